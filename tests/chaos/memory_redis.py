"""Redis in memory, as far as the state store uses it: the real keys, the real scripts, one hash slot for each of them.

The Lua of `user_state/scripts.py` is translated to Python line by line, so what runs here is what runs in Redis. Keys
never expire. `hook` is called before and after each command, so that a fault may come between any two of them;
`is_full` refuses writes as `noeviction` does, `is_down` answers nobody.
"""

import copy
import fnmatch
import math
import re
from collections.abc import Callable, Iterator
from functools import cache, lru_cache
from types import SimpleNamespace
from typing import Any

from redis.crc import key_slot
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import OutOfMemoryError, ResponseError

_WRITES = {"SET", "HSET", "HSETNX", "HINCRBY", "ZADD", "SADD"}
_TOKEN = re.compile(r"'[^']*'|\d+(?:\.\d+)?|[A-Za-z_][\w.]*|~=|==|<=|>=|\.\.|\n|[^\s]")
_WORDS = {
    "nil": "None", "true": "True", "false": "None", "~=": "!=", "..": "+", "{": "Table([", "}": "])",
    "redis.call": "call", "unpack": "*unpack", "table.concat": "concat", "table.insert": "insert", "tonumber": "number",
    "^": "**",
}  # fmt: skip
_BLOCK_ENDS = ("end", "else", "elseif")
slot = lru_cache(maxsize=None)(key_slot)


class Table(list[Any]):
    """A Lua table that is a list: it counts from 1 and lacks nothing."""

    def __getitem__(self, at: Any) -> Any:
        return super().__getitem__(at - 1) if 0 < at <= len(self) else None

    def __setitem__(self, at: Any, value: Any) -> None:
        self.append(value) if at == len(self) + 1 else super().__setitem__(at - 1, value)


class Sorted(dict[bytes, float]):
    """A sorted set: member to score."""

    def ordered(self) -> list[bytes]:
        return sorted(self, key=lambda member: (self[member], member))


class _Translator:
    """Statements of the Lua that the scripts are written in; expressions are taken over word by word."""

    def __init__(self, script: str) -> None:
        self.words, self.at = [*_TOKEN.findall(script), "end"], 0

    def take(self) -> str:
        self.at += 1
        return self.words[self.at - 1]

    def expression(self, *stops: str) -> str:
        found: list[str] = []
        depth = 0
        while depth or self.words[self.at] not in (*stops, *_BLOCK_ENDS):
            word = self.take()
            depth += (word in "({[") - (word in ")}]")
            if word == "#":
                name, index = self.take(), ""
                while self.words[self.at] == "[":
                    self.take()
                    index += f"[{self.expression(']')}]"
                    self.take()
                found.append(f"len({name}{index})")
            elif word.startswith("'"):
                found.append("b" + word)
            elif word != "\n":
                found.append(_WORDS.get(word, word))
        return " ".join(found)

    def block(self, indent: str) -> Iterator[str]:
        empty = True
        while (word := self.words[self.at]) not in _BLOCK_ENDS:
            if word == "\n":
                self.take()
                continue
            empty = False
            if word in ("if", "while", "for"):
                yield from self.compound(indent)
            else:
                if word == "local":
                    self.take()
                yield indent + self.expression("\n")
        if empty:
            yield indent + "pass"

    def compound(self, indent: str) -> Iterator[str]:
        kind = self.take()
        if kind == "for":
            name, _ = self.take(), self.take()
            first, last, *step = self.expression("do").split(" , ")
            head = f"for {name} in range({', '.join([first, f'{last} + 1', *step])}):"
        else:
            head = f"{kind} {self.expression('then', 'do')}:"
        self.take()
        yield indent + head
        yield from self.block(indent + " ")
        while (word := self.take()) != "end":
            if word == "elseif":
                yield f"{indent}elif {self.expression('then')}:"
                self.take()
            else:
                yield f"{indent}else:"
            yield from self.block(indent + " ")


@cache
def _compiled(script: str) -> Callable[..., Any]:
    lines = ["def script(call, KEYS, ARGV):", *_Translator(script).block(" ")]
    names: dict[str, Any] = {
        "Table": Table,
        "unpack": lambda table, first=1, last=None: list(table)[first - 1 : last],
        "concat": lambda table, by: by.join(table),
        "insert": lambda table, at, value: table.insert(at - 1, value),
        "number": lambda text: int(text) if text.lstrip(b"-").isdigit() else float(text),
        "math": SimpleNamespace(max=max, min=min, log=math.log),
        "string": SimpleNamespace(format=lambda pattern, value: pattern % value),
    }
    exec("\n".join(lines), names)
    return names["script"]  # type: ignore[no-any-return]


def _bytes(value: Any) -> bytes:
    return value if isinstance(value, bytes) else str(value).encode()


class MemoryServer:
    """The data, and what is wrong with the server. num_evicted: as INFO counts."""

    def __init__(self) -> None:
        self.data: dict[bytes, Any] = {}
        self.is_full = self.is_down = False
        self.num_evicted = 0
        self.hook: Callable[[], None] = lambda: None

    def snapshot(self) -> dict[bytes, Any]:
        return copy.deepcopy(self.data)

    def restore(self, data: dict[bytes, Any], tags: tuple[bytes, ...] = (b"",)) -> None:
        """Everything, or the nodes that hold keys beginning with these tags, as it was."""
        for key in [key for key in self.data if key.startswith(tags)]:
            del self.data[key]
        self.data |= {key: copy.deepcopy(value) for key, value in data.items() if key.startswith(tags)}

    def evict(self, keys: list[bytes]) -> None:
        for key in keys:
            self.num_evicted += self.data.pop(key, None) is not None

    def run(self, name: str, *arguments: Any) -> Any:
        """One command of a client, script calls among them."""
        self._answers()
        found = self._script(*arguments) if name == "EVAL" else self._command(name, *arguments)
        self._answers()
        return found

    def _answers(self) -> None:
        self.hook()
        if self.is_down:
            raise RedisConnectionError("connection refused")

    def _script(self, script: str, num_keys: int, *arguments: Any) -> Any:
        keys, values = Table(map(_bytes, arguments[:num_keys])), Table(map(_bytes, arguments[num_keys:]))
        if len({slot(key) for key in keys}) > 1:
            raise ResponseError("CROSSSLOT Keys in request don't hash to the same slot")

        def call(name: bytes, *arguments: Any) -> Any:
            found = self._command(name.decode(), *arguments)
            return Table(found) if isinstance(found, list) else found

        return _compiled(script)(call, keys, values)

    def _command(self, name: str, *arguments: Any) -> Any:
        if self.is_full and name in _WRITES:
            raise OutOfMemoryError("command not allowed when used memory > 'maxmemory'.")
        return getattr(self, "do_" + name.lower())(*map(_bytes, arguments))

    def do_get(self, key: bytes) -> Any:
        return self.data.get(key)

    def do_set(self, key: bytes, value: bytes, *options: bytes) -> Any:
        if b"NX" in options and key in self.data:
            return None
        self.data[key] = value
        return True

    def do_del(self, *keys: bytes) -> int:
        return sum(self.data.pop(key, None) is not None for key in keys)

    do_unlink = do_delete = do_del

    def do_exists(self, *keys: bytes) -> int:
        return sum(key in self.data for key in keys)

    def do_expire(self, key: bytes, seconds: bytes) -> int:
        return int(key in self.data)

    def do_ping(self) -> bool:
        return True

    def do_hget(self, key: bytes, name: bytes) -> Any:
        return self.data.get(key, {}).get(name)

    def do_hmget(self, key: bytes, *names: bytes) -> list[Any]:
        found = self.data.get(key, {})
        return [found.get(name) for name in names]

    def do_hset(self, key: bytes, *pairs: bytes) -> int:
        self.data.setdefault(key, {}).update(zip(pairs[::2], pairs[1::2], strict=True))
        return len(pairs) // 2

    def do_hsetnx(self, key: bytes, name: bytes, value: bytes) -> int:
        fields = self.data.setdefault(key, {})
        return int(fields.setdefault(name, value) is value)

    def do_hdel(self, key: bytes, *names: bytes) -> int:
        return sum(self.data.get(key, {}).pop(name, None) is not None for name in names)

    def do_hincrby(self, key: bytes, name: bytes, step: bytes) -> int:
        fields = self.data.setdefault(key, {})
        fields[name] = str(int(fields.get(name, b"0")) + int(step)).encode()
        return int(fields[name])

    def do_hstrlen(self, key: bytes, name: bytes) -> int:
        return len(self.data.get(key, {}).get(name, b""))

    def do_hscan(self, key: bytes, *_: bytes) -> list[Any]:
        return [b"0", Table(part for pair in self.data.get(key, {}).items() for part in pair)]

    def do_zadd(self, key: bytes, *arguments: bytes) -> int:
        greater, pairs = (b"GT" in arguments, [word for word in arguments if word != b"GT"])
        found = self.data.setdefault(key, Sorted())
        for score, member in zip(pairs[::2], pairs[1::2], strict=True):
            found[member] = max(float(score), found[member]) if greater and member in found else float(score)
        return 0

    def do_zscore(self, key: bytes, member: bytes) -> bytes | None:
        score = self.data.get(key, {}).get(member)
        return None if score is None else b"%.17g" % score

    def do_zrem(self, key: bytes, *members: bytes) -> int:
        removed = sum(self.data.get(key, {}).pop(member, None) is not None for member in members)
        if key in self.data and not self.data[key]:
            del self.data[key]
        return removed

    def do_zcard(self, key: bytes) -> int:
        return len(self.data.get(key, ()))

    def do_zrange(self, key: bytes, *_: bytes) -> list[bytes]:
        found = self.data.get(key, Sorted())
        return [word for member in found.ordered() for word in (member, _bytes(found[member]))]

    def do_zrevrange(self, key: bytes, *_: bytes) -> list[bytes]:
        return self.data[key].ordered()[::-1] if key in self.data else []

    def do_zremrangebyrank(self, key: bytes, first: bytes, last: bytes) -> int:
        ordered = self.data[key].ordered() if key in self.data else []
        return self.do_zrem(key, *ordered[int(first) : len(ordered) + int(last) + 1])

    def do_smembers(self, key: bytes) -> Any:
        return set(self.data.get(key, ()))

    def do_sadd(self, key: bytes, *members: bytes) -> int:
        self.data.setdefault(key, set()).update(members)
        return len(members)


class _Pipeline:
    def __init__(self, server: MemoryServer, *, transaction: bool) -> None:
        self._server, self._queue, self._transaction = server, list[tuple[Any, ...]](), transaction

    def __len__(self) -> int:
        return len(self._queue)

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *arguments: self._queue.append((name, *arguments))

    def execute(self) -> list[Any]:
        queue, self._queue = self._queue, []
        hook = self._server.hook
        try:
            if self._transaction:
                hook()
                self._server.hook = lambda: None
            return [_run(self._server, *command) for command in queue]
        finally:
            self._server.hook = hook


def _run(server: MemoryServer, name: str, *arguments: Any, nx: bool = False, ex: int | None = None) -> Any:
    if name in ("eval", "evalsha"):
        return server.run("EVAL", *arguments)
    flat = [word for one in arguments for word in (one if isinstance(one, (list, tuple)) else (one,))]
    return server.run(name.upper(), *flat, *(["NX"] if nx else []))


class Client:
    """redis-py's client of a `MemoryServer`; a script's sha is the script."""

    def __init__(self, server: MemoryServer) -> None:
        self._server = server

    def __getattr__(self, name: str) -> Callable[..., Any]:
        return lambda *arguments, **options: _run(self._server, name, *arguments, **options)

    def script_load(self, script: str) -> str:
        return script

    def pipeline(self, *, transaction: bool = True) -> _Pipeline:
        return _Pipeline(self._server, transaction=transaction)

    def scan_iter(self, match: str, count: int = 10) -> list[bytes]:
        pattern = match.replace("{", "[{]").replace("}", "[}]")
        return [key for key in self._server.data if fnmatch.fnmatchcase(key.decode(), pattern)]

    def hscan_iter(self, key: str, count: int = 10) -> list[tuple[bytes, bytes]]:
        found = self._server.run("HSCAN", key, 0)[1]
        return list(zip(*[iter(found)] * 2, strict=True))

    def info(self) -> dict[str, int]:
        self._server.run("PING")
        return {"evicted_keys": self._server.num_evicted, "expired_keys": 0, "used_memory": 0, "maxmemory": 0}

    def close(self) -> None:
        """Nothing is held."""


class AsyncClient(Client):
    """The same for an event loop."""

    def __getattr__(self, name: str) -> Callable[..., Any]:
        async def run(*arguments: Any, **options: Any) -> Any:
            return _run(self._server, name, *arguments, **options)

        return run

    async def script_load(self, script: str) -> str:  # type: ignore[override]
        return script

    def pipeline(self, *, transaction: bool = True) -> Any:
        return _AsyncPipeline(self._server, transaction=transaction)


class _AsyncPipeline(_Pipeline):
    async def execute(self) -> list[Any]:  # type: ignore[override]
        return super().execute()
