"""Answers for many users as a Parquet table; an interrupted run can be continued.

The gateway treats each request as sent by the user. All answers of a batch come from one model. The index may
change, so each row names its index version. A few calls run at a time, with background priority, and are repeated if
the gateway is busy. Each part of the table is renamed into place. At the end the parts are joined and deleted.
"""

import hashlib
import json
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq

from services.cli.output import CommandError, ExitStatus
from services.offline.backfill.answer_rows import SCHEMA

if TYPE_CHECKING:
    from freshet.v1 import gateway_pb2
    from freshet_client import Client, Recommendation

# Users per part: an interrupted run repeats at most one part.
PART = 1_000
_AT_ONCE = 8
_BUSY_WAIT_S, _PATIENCE_S = 0.05, 60.0


def read_users(path: Path, out: Path) -> list[str]:
    """Return the distinct ids of the column `user_id`, in order of appearance.

    Raises: ValueError naming the defect, also if `out` is this table or a folder.
    """
    if out.is_dir() or out.resolve() == path.resolve():
        raise ValueError(f"out={str(out)!r} allowed: a file, and another one than the table of users")
    try:
        column = pq.read_table(path, columns=["user_id"]).column("user_id")
    except (OSError, pa.ArrowInvalid, KeyError) as error:
        raise ValueError(f"{path}: {error}; allowed: a Parquet table with a column user_id") from error
    if not (pa.types.is_string(column.type) or pa.types.is_large_string(column.type)):
        raise ValueError(f"{path}: user_id is {column.type}; allowed: string, ids as they were recorded")
    users = list(dict.fromkeys(ids := column.to_pylist()))
    for user in users:
        if not user or len(user.encode()) > 128:
            raise ValueError(f"{path} row {ids.index(user)}: user_id={user!r} allowed: 1 to 128 bytes of UTF-8")
    if not users:
        raise ValueError(f"{path} has no rows; allowed: one at least")
    return users


def run(
    client: "Client",
    users: Sequence[str],
    request: "gateway_pb2.RecommendRequest",
    out: Path,
    *,
    timeout_s: float,
    progress: Callable[[int], None] = lambda done: None,
) -> dict[str, Any]:
    """Send `request`, which names no user, for every user; write `out`; return a summary.

    `progress` gets the number of users done.
    Raises: CommandError if `out` has the parts of another batch, if the model changed, or if the gateway was busy for a
    minute. Running the same command again continues the batch.
    """
    asked = hashlib.sha256(request.SerializeToString(deterministic=True))
    for user in users:
        asked.update(user.encode() + b"\0")
    parts = RowParts(out, {"asked": asked.hexdigest(), "users": len(users), "part": PART})
    again = parts.found
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        for number, first in enumerate(range(0, len(users), PART)):
            chunk = users[first : first + PART]
            if not parts.has(number):
                answers = pool.map(lambda user: _ask(client, user, request, timeout_s=timeout_s), chunk)
                rows = [_row(user, answer) for user, answer in zip(chunk, answers, strict=True)]
                parts.write(number, pa.Table.from_pylist(rows, schema=SCHEMA))
            progress(first + len(chunk))
    return parts.join() | {"users": len(users), "parts_found": again}


def _ask(client: "Client", user: str, request: "gateway_pb2.RecommendRequest", *, timeout_s: float) -> "Recommendation":
    """Return the answer for one user; repeat while it fails as busy or has the degradation `busy`.

    Raises: FreshetError; CommandError if the gateway was busy for a minute.
    """
    from freshet.v1 import gateway_pb2
    from freshet_client import DeadlineExceeded, Overloaded, Unavailable
    from freshet_client.wire import read

    own = gateway_pb2.RecommendRequest()
    own.CopyFrom(request)
    own.user_id = user
    until = time.monotonic() + _PATIENCE_S
    while True:
        wait_s = _BUSY_WAIT_S
        try:
            answer: Recommendation = read(client.call("Recommend", own, timeout_s=timeout_s))
            if "busy" not in answer.degradations:
                return answer
        except (DeadlineExceeded, Overloaded, Unavailable) as error:
            wait_s = max(_BUSY_WAIT_S, error.retry_after_s or 0)
            if time.monotonic() + wait_s > until:
                raise
        if time.monotonic() + wait_s > until:
            raise CommandError(
                "the gateway has been too busy for a minute",
                advice="run the same command again: it continues from here",
                status=ExitStatus.UNAVAILABLE,
            )
        time.sleep(wait_s)


def _row(user: str, answer: "Recommendation") -> dict[str, Any]:
    of, proof = answer.provenance, answer.certificate
    position = of.state_position
    return {
        "user_id": user,
        "item_ids": [item.item_id for item in answer.items],
        "scores": [item.score for item in answer.items],
        "source": answer.items[0].source if answer.items else None,
        "model_version": of.model_version,
        "index_version": of.index_version,
        "state_source": of.state_source,
        "state_partition": None if position is None else position.partition,
        "state_offset": None if position is None else position.offset,
        "absence_bucket": of.absence_bucket,
        "certificate": proof.kind if proof else "unspecified",
        "gap": proof.gap if proof and proof.kind == "bounded" else None,
        "degradations": list(answer.degradations),
    }


class RowParts:
    """The folder next to `out` with the parts of one batch.

    `batch` holds JSON values that identify the batch. Raises: CommandError if the folder has parts of another batch.
    """

    def __init__(self, out: Path, batch: Mapping[str, Any]) -> None:
        self._out, self._folder = out, out.with_name(out.name + ".parts")
        self._batch = dict(batch)
        self._folder.mkdir(parents=True, exist_ok=True)
        note = self._folder / "batch.json"
        if note.exists():
            if json.loads(note.read_text(encoding="utf-8")) != self._batch:
                raise CommandError(
                    f"{self._folder} holds parts of another batch: other users, another request, model or log",
                    advice="remove the folder, or name another --out",
                    status=ExitStatus.USAGE,
                )
        else:
            self._rename(note, lambda path: path.write_text(json.dumps(self._batch), encoding="utf-8"))
        self._model = next(self._models(), "")

    @property
    def found(self) -> int:
        """Number of existing parts."""
        return len(list(self._folder.glob("part-*.parquet")))

    def has(self, number: int) -> bool:
        return self._path(number).exists()

    def write(self, number: int, table: pa.Table) -> None:
        """Write a part. Raises: CommandError if the batch's answers come from several models."""
        models = set(table.column("model_version").to_pylist()) | ({self._model} if self._model else set())
        if len(models) > 1:
            raise CommandError(
                f"the model changed during the batch: answers are of {' and '.join(sorted(models))}",
                advice=f"remove {self._folder} and begin again, for one model",
            )
        self._model = models.pop() if models else ""
        self._rename(self._path(number), lambda path: pq.write_table(table, path))

    def join(self) -> dict[str, Any]:
        """Build the table of all parts, and delete them."""
        counts: dict[str, int] = {}

        def all_parts(path: Path) -> None:
            with pq.ParquetWriter(path, SCHEMA) as writer:
                for number in range(self.found):
                    table = pq.read_table(self._path(number), schema=SCHEMA)
                    for source in table.column("state_source").to_pylist():
                        counts[source] = counts.get(source, 0) + 1
                    writer.write_table(table)

        self._rename(self._out, all_parts)
        shutil.rmtree(self._folder)
        return {"model_version": self._model, "state_sources": counts, "out": str(self._out)}

    def _models(self) -> Iterator[str]:
        for path in self._folder.glob("part-*.parquet"):
            yield from pq.read_table(path, columns=["model_version"]).column(0)[:1].to_pylist()

    def _path(self, number: int) -> Path:
        return self._folder / f"part-{number:06d}.parquet"

    @staticmethod
    def _rename(path: Path, write: Callable[[Path], Any]) -> None:
        aside = path.with_name(f".{path.name}.new")
        write(aside)
        aside.replace(path)
