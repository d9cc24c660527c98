"""`freshet loadtest path`: the cost of a call, process by process, next to an empty call of the same library.

Closed loop: each caller sends the next call after its answer. The operating system measures the processor time of all
processes of the local stack until encoder and refresher have handled the events; their time at rest is subtracted. With
`--beside` another stack is measured in turns with the first.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import numpy as np
from freshet.v1 import gateway_pb2

from . import requests
from .compiled import NOT_SENT, OK, PlannedCall, SenderError, build, send
from .machine import loopback_bytes, processes, uses
from .options import Option, add_items, add_options, add_state, check_options
from .population import Draws, Population, title_words
from .report import figure

_K, _MANY, _CALLERS = 10, 50, (1, 8, 32)
# Events are handled once processor time over _LOOK_S is at most _NEAR_REST cores above rest, or after _DRAINED_S. More
# calls are planned (_MOST_PER_S) than can be answered.
_LOOK_S, _NEAR_REST, _DRAINED_S = 0.5, 0.1, 30.0
# Assumed cores at rest before the measurement.
_FIRST_REST = 0.4
_REST_S, _MOST_PER_S, _TIMEOUT_S = 5.0, 4_000, 5.0
_EMPTY = "empty call"
OPTIONS = (
    Option("seconds", 5.0, 0.2, 60, "how long each is measured in a turn"),
    Option("turns", 3, 1, 20, "how often; figures are medians of turns"),
    Option("num-users", 1_000, 1, 100_000, "how many users to make up"),
    Option("seed", 0, 0, 2**63 - 1, "equal seeds make equal calls"),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Turn:
    """One subject, one number of callers, one turn.

    units: calls, or events if these are counted. Per unit: processor time by process (ms), bytes on the loopback
    device, waits of threads. Latencies are per call.
    """

    stack: str
    subject: str
    callers: int
    units: int
    units_per_s: float
    p50_ms: float
    p99_ms: float
    processor_ms: dict[str, float]
    bytes: float
    waits: float
    marked: int
    failed: int
    scoring_ms: float

    @property
    def total_ms(self) -> float:
        return sum(self.processor_ms.values())


@dataclass(kw_only=True, slots=True)
class _Stack:
    name: str
    target: str
    pids: dict[str, int]
    at_rest: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Subject:
    """make: a call's request. units: how many a call counts for."""

    name: str
    method: str
    make: Callable[[], bytes]
    units: int = 1


def main(arguments: Sequence[str]) -> int:
    """Run the command. Exit status: 0 measured, 1 a target did not answer, 2 wrong usage."""
    from .command import add_target, check_target

    parser = argparse.ArgumentParser(
        prog="freshet loadtest path",
        description="What a call costs, process by process, beside an empty call of the same library.",
        epilog="example: freshet loadtest path --items .freshet/bundle",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add_options(parser, OPTIONS)
    add_target(parser, "path")
    add_items(parser, "bundle folder: items to write events of, titles to search for")
    add_state(parser)
    parser.add_argument("--beside", nargs=2, metavar=("HOST:PORT", "FOLDER"), help="another stack, in turns with it")
    options = parser.parse_args(arguments)
    try:
        check_options(options, OPTIONS)
        check_target(options)
        stacks = [_Stack(name="this", target=options.target, pids=processes(options.state))]
        if options.beside:
            target, state = options.beside
            stacks.append(_Stack(name="beside", target=target, pids=processes(Path(state))))
        turns = _measure(options, stacks)
    except ValueError as exc:
        parser.error(str(exc))
    except SenderError as exc:
        sys.stderr.write(f"loadtest: {exc}\n")
        return 1
    options.output.mkdir(parents=True, exist_ok=True)
    command = json.dumps("freshet loadtest path " + " ".join(arguments))
    lines = ",\n  ".join(json.dumps(asdict(turn)) for turn in turns)
    raw = f'{{\n "command": {command},\n "turns": [\n  {lines}\n ]\n}}\n'
    Path(options.output, "path.json").write_text(raw, encoding="utf-8")
    picture = plot(turns, options.output / "path.png")
    sys.stdout.write(f"{table(turns)}\n{picture}\n")
    return 0


def _measure(options: argparse.Namespace, stacks: Sequence[_Stack]) -> list[Turn]:
    rng = np.random.default_rng(options.seed)
    population = Population.made_up(options.num_users, options.items)
    draws, titles, program = Draws(population, rng), title_words(options.items), build()

    def words() -> str:
        title = titles[int(rng.integers(len(titles)))]
        return title[int(rng.integers(len(title)))]

    subjects = (
        _Subject(name=_EMPTY, method=requests.HEALTH, make=lambda: b""),
        _Subject(name="Recommend", method=requests.RECOMMEND, make=lambda: requests.recommend(draws.draw()[0], _K)),
        _Subject(name="Search", method=requests.SEARCH, make=lambda: requests.search(words(), draws.draw()[0], _K)),
        _Subject(name="event, alone", method=requests.RECORD, make=lambda: requests.record([draws.draw()])),
        _Subject(
            name=f"event, {_MANY} a call",
            method=requests.RECORD,
            make=lambda: requests.record([draws.draw() for _ in range(_MANY)]),
            units=_MANY,
        ),
    )
    for stack in stacks:
        requests.make_known(program, stack.target, population, draws)
    turns = []
    for number in range(options.turns):
        for stack in stacks:
            _wait_for_rest(stack)
            before = uses(stack.pids)
            time.sleep(_REST_S)
            after = uses(stack.pids)
            stack.at_rest = {name: (after[name].processor_s - before[name].processor_s) / _REST_S for name in after}
        for subject in subjects:
            for callers in _CALLERS:
                # The first stack alternates from turn to turn.
                for stack in stacks if number % 2 == 0 else reversed(stacks):
                    turns.append(_turn(program, stack, subject, callers, options.seconds))
                    one = turns[-1]
                    sys.stderr.write(
                        f"turn {number + 1}  {stack.name:<7} {subject.name:<18} {callers:>3} callers "
                        f"{one.units_per_s:8.0f}/s {one.total_ms:7.2f} ms of processor each\n"
                    )
    return turns


def _wait_for_rest(stack: _Stack) -> None:
    until, most = time.monotonic() + _DRAINED_S, (sum(stack.at_rest.values()) or _FIRST_REST) + _NEAR_REST
    before = sum(one.processor_s for one in uses(stack.pids).values())
    while time.monotonic() < until:
        time.sleep(_LOOK_S)
        now = sum(one.processor_s for one in uses(stack.pids).values())
        if now - before <= most * _LOOK_S:
            return
        before = now


def _turn(program: Path, stack: _Stack, subject: _Subject, callers: int, seconds: float) -> Turn:
    number = int(_MOST_PER_S * seconds / subject.units) + callers
    calls = [PlannedCall(due_s=0.0, method=subject.method, request=subject.make()) for _ in range(number)]
    before, bytes_before, began = uses(stack.pids), loopback_bytes(), time.monotonic()
    answers = send(program, stack.target, calls, timeout_s=_TIMEOUT_S, callers=callers, lasts_s=seconds)
    num_bytes = loopback_bytes() - bytes_before
    _wait_for_rest(stack)
    took_s, after = time.monotonic() - began, uses(stack.pids)
    well = answers.status == OK
    units = subject.units * int(well.sum())
    if not units:
        raise SenderError(
            f"{stack.target} answers no {subject.name}: gRPC status {sorted(set(answers.status.tolist()))}"
        )
    latency_ms = 1e3 * answers.latency_s[well]
    marked, scoring_ms = 0, [0.0]
    if subject.method == requests.RECOMMEND:
        read = [gateway_pb2.RecommendResponse.FromString(raw) for raw in answers.answer if raw]
        marked = sum(bool(one.degradations) for one in read)
        scoring_ms = [one.stage_times.first_stage_ms + one.stage_times.rerank_ms for one in read]
    return Turn(
        stack=stack.name,
        subject=subject.name,
        callers=callers,
        units=units,
        units_per_s=units / float((answers.sent_s + answers.latency_s)[well].max()),
        p50_ms=float(np.percentile(latency_ms, 50)),
        p99_ms=float(np.percentile(latency_ms, 99, method="higher")),
        processor_ms={
            name: 1e3 * (after[name].processor_s - before[name].processor_s - took_s * stack.at_rest[name]) / units
            for name in stack.pids
        },
        bytes=num_bytes / units,
        waits=sum(after[name].waits - before[name].waits for name in stack.pids) / units,
        marked=marked,
        failed=int((~well & (answers.status != NOT_SENT)).sum()),
        scoring_ms=statistics.median(scoring_ms),
    )


def _median(turns: Sequence[Turn], value: Callable[[Turn], float]) -> float:
    return statistics.median(map(value, turns))


def _parts(group: Sequence[Turn]) -> dict[str, float]:
    return {name: statistics.median(turn.processor_ms[name] for turn in group) for name in group[0].processor_ms}


def _grouped(turns: Sequence[Turn]) -> dict[tuple[str, str, int], list[Turn]]:
    found: dict[tuple[str, str, int], list[Turn]] = {}
    for turn in turns:
        found.setdefault((turn.subject, turn.stack, turn.callers), []).append(turn)
    return found


def table(turns: Sequence[Turn]) -> str:
    """Return medians of turns, as a Markdown table; its last column has processes above a twentieth of the total."""
    groups = _grouped(turns)
    lines = [
        "| what | stack | callers | a second | p50, ms | p99, ms | processor, ms | × empty call | bytes | waits "
        "| marked, failed | of it |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for (subject, stack, callers), group in groups.items():
        total = _median(group, lambda turn: turn.total_ms)
        empty = _median(groups[_EMPTY, stack, callers], lambda turn: turn.total_ms)
        parts = _parts(group)
        shown = ", ".join(
            f"{name} {value:.2f}"
            for name, value in sorted(parts.items(), key=lambda part: -part[1])
            if value > total / 20
        )
        lines.append(
            f"| {subject} | {stack} | {callers} | {_median(group, lambda turn: turn.units_per_s):,.0f} "
            f"| {_median(group, lambda turn: turn.p50_ms):.1f} | {_median(group, lambda turn: turn.p99_ms):.1f} "
            f"| {total:.2f} | {total / empty:.1f} | {_median(group, lambda turn: turn.bytes):,.0f} "
            f"| {_median(group, lambda turn: turn.waits):.1f} "
            f"| {sum(turn.marked for turn in group)}, {sum(turn.failed for turn in group)} | {shown} |"
        )
    scored = [turn.scoring_ms for turn in turns if turn.subject == "Recommend" and turn.callers == 1]
    if scored:
        lines.append(f"\nScoring alone, by its own process's clock, one caller: {statistics.median(scored):.2f} ms.")
    return "\n".join(lines)


def plot(turns: Sequence[Turn], path: Path) -> Path:
    """Plot a bar for each row of the table, with its processes stacked."""
    groups = _grouped(turns)
    parts = [_parts(group) for group in groups.values()]
    drawn = figure(0.32 * len(groups) + 1.5)
    panel = drawn.subplots()
    left = np.zeros(len(groups))
    for name in sorted({name for one in parts for name in one}):
        width = np.array([max(0.0, one.get(name, 0.0)) for one in parts])
        panel.barh(range(len(groups)), width, left=left, label=name)
        left += width
    panel.set_yticks(
        range(len(groups)), [f"{subject}, {callers} callers, {stack}" for subject, stack, callers in groups]
    )
    panel.invert_yaxis()
    panel.set_xlabel("milliseconds of processor")
    panel.legend(fontsize="small")
    drawn.savefig(path, dpi=110)
    return path
