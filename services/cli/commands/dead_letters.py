"""The commands `freshet dead-letters list`, `show`, `replay` and `forget`."""

import base64
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer import Argument, Option

from services.cli import client, options, output

if TYPE_CHECKING:
    from pathlib import Path

    from services.contracts.dead_letters import DeadLetters, Replay
    from services.contracts.topics.dead_letters import StoredLetter

app = typer.Typer(name="dead-letters", help="Dead letters: list, show, replay and forget them.", no_args_is_help=True)

_Topic = Annotated[str, Option(help="Only dead letters of this topic, like interactions.")]
_SHOWN = 20


@output.group_command(app, "list")
def list_letters(
    *,
    topic: _Topic = "",
    limit: Annotated[int, Option(min=1, help="At most this many, the newest.")] = _SHOWN,
    state: options.State = options.DEFAULT_STATE,
    kafka: options.Kafka = "",
) -> None:
    """List dead letters: position, time, reason, and whether the record was replayed.

    Example:  freshet dead-letters list --topic interactions
    """
    with _opened(state, kafka) as opened:
        letters = opened.letters(_topics(topic))
    newest = letters[-limit:]

    def shown() -> None:
        rows = ((one.name, _time(one), one.reason, ":".join(map(str, one.replayed_to or ()))) for one in newest)
        output.echo(output.table("record", "time", "reason", "replayed to", rows=rows))
        output.echo(f"{len(newest):,} of {len(letters):,} dead letters", style="dim")

    output.answer({"total": len(letters), "dead_letters": [_facts(letter) for letter in newest]}, shown)


@output.group_command(app)
def show(
    record: Annotated[str, Argument(help="topic:partition:offset, as `list` prints it.")],
    *,
    state: options.State = options.DEFAULT_STATE,
    kafka: options.Kafka = "",
) -> None:
    """Show a dead letter's reason, key, headers and value. The value is decoded if possible.

    Example:  freshet dead-letters show interactions:3:17
    """
    from services.contracts.dead_letters import decoded

    with _opened(state, kafka) as opened:
        (letter,) = _named(opened, [record])
        whole = opened.whole(letter)
    found = whole or letter
    facts = _facts(found) | {
        "is_whole": found.is_whole,
        "key": _text(found.key),
        "headers": {name: _text(text) for name, text in found.headers},
        "value": decoded(found),
        "value_base64": base64.b64encode(found.value).decode(),
    }

    def shown() -> None:
        told = facts if facts["value"] is not None else facts | {"value": "it cannot be decoded"}
        output.echo(output.table("", "", rows=((name, str(value)) for name, value in told.items())))
        if not found.is_whole:
            output.echo("the dead letter is truncated, and its topic no longer has the record", style="yellow")

    output.answer(facts, shown)


@output.group_command(app)
def replay(
    record: Annotated[list[str] | None, Argument(help="topic:partition:offset, as `list` prints it.")] = None,
    *,
    every: Annotated[bool, Option("--all", help="All dead letters, or all that match the filters.")] = False,
    topic: _Topic = "",
    reason: Annotated[str, Option(help="With --all: only those whose reason contains this.")] = "",
    dry_run: Annotated[bool, Option("--dry-run", help="Only print what would be written.")] = False,
    again: Annotated[bool, Option("--again", help="Also records that were replayed before.")] = False,
    yes: Annotated[bool, Option("--yes", help="Do not ask.")] = False,
    state: options.State = options.DEFAULT_STATE,
    kafka: options.Kafka = "",
) -> None:
    """Write records to their topic again, with the same key, value and headers.

    A replayed interaction counts once: it keeps its event id, or gets one that is made from its position. A record is
    not written if it was replayed before, if its user was forgotten, or if its key has a newer record.

    Example:  freshet dead-letters replay interactions:3:17

    Example:  freshet dead-letters replay --all --reason "internal error" --dry-run
    """
    if bool(record) == every:
        raise output.usage_error("give either records or --all", "freshet dead-letters replay interactions:3:17")
    with _opened(state, kafka) as opened:
        if record:
            letters = _named(opened, record)
        else:
            letters = [letter for letter in opened.letters(_topics(topic)) if reason in letter.reason]
        planned = opened.plan(letters, again=again)
        count = sum(one.record is not None for one in planned)
        if not dry_run and count and not yes:
            if output.is_json() or not sys.stdin.isatty():
                raise output.usage_error(
                    "replaying writes to a live topic, and there is no terminal to ask for confirmation",
                    "the same with --dry-run, then with --yes",
                )
            _show_plan(planned)
            if not typer.confirm(f"write {count:,} {'record' if count == 1 else 'records'} again?"):
                raise output.CommandError("nothing was written")
        written = {} if dry_run else {one.letter.name: place for one, place in opened.replay(planned)}

    def shown() -> None:
        if dry_run or yes:
            _show_plan(planned)
        would = f"{count:,} of {len(planned):,} records would be written"
        output.echo(would if dry_run else f"{len(written):,} records written", style="dim" if dry_run else "green")

    rows = [
        {
            **_facts(one.letter),
            "event_id": one.event_id or None,
            "left_out": one.why_not or None,
            "written_to": list(written[one.letter.name]) if one.letter.name in written else None,
        }
        for one in planned
    ]
    output.answer({"dry_run": dry_run, "written": len(written), "records": rows}, shown)


@output.group_command(app)
def forget(*, state: options.State = options.DEFAULT_STATE, kafka: options.Kafka = "") -> None:
    """Remove the interactions of forgotten users from the dead letters. Run it as often as your privacy policy
    requires.

    Example:  freshet dead-letters forget
    """
    with _opened(state, kafka) as opened:
        gone = opened.forget()
    output.answer({"removed": gone}, f"{gone:,} records of forgotten users removed")


@contextmanager
def _opened(state: "Path", kafka: str) -> "Iterator[DeadLetters]":
    from services.contracts.dead_letters import DeadLetters
    from services.platform.config import environment_kafka

    with (
        output.sentences(),
        closing(DeadLetters(environment_kafka(kafka or client.stack_of(state).kafka_bootstrap))) as opened,
    ):
        yield opened


def _topics(topic: str) -> list[str]:
    from services.contracts.dead_letters import LETTERED
    from services.contracts.topics.dead_letters import SUFFIX

    if not topic:
        return list(LETTERED)
    if topic.removesuffix(SUFFIX) not in LETTERED:
        raise output.usage_error(f"topic {topic!r} has no dead letters", f"one of {', '.join(LETTERED)}")
    return [topic.removesuffix(SUFFIX)]


def _named(opened: "DeadLetters", names: list[str]) -> "list[StoredLetter]":
    """Return the letters of these names, in this order. Raises: CommandError."""
    for name in names:
        parts = name.split(":")
        if len(parts) != 3 or not all(part.isdigit() for part in parts[1:]):
            raise output.usage_error(
                f"{name!r} names no record", "topic:partition:offset, as `freshet dead-letters list` has it"
            )
    topics = {name.partition(":")[0] for name in names}
    known = {letter.name: letter for topic in sorted(topics) for letter in opened.letters(_topics(topic))}
    if absent := [name for name in names if name not in known]:
        raise output.CommandError(f"there is no dead letter {absent[0]}", advice="freshet dead-letters list")
    return [known[name] for name in names]


def _facts(letter: "StoredLetter") -> dict[str, Any]:
    return {
        "record": letter.name,
        "topic": letter.topic,
        "partition": letter.position.partition,
        "offset": letter.position.offset,
        "time": _time(letter),
        "reason": letter.reason,
        "replayed_to": list(letter.replayed_to) if letter.replayed_to is not None else None,
    }


def _time(letter: "StoredLetter") -> str:
    return datetime.fromtimestamp(letter.written_ms / 1000, UTC).isoformat(timespec="seconds")


def _text(data: bytes) -> str:
    return data.decode(errors="backslashreplace")


def _show_plan(planned: "list[Replay]") -> None:
    rows = ((one.letter.name, one.event_id, one.why_not or "is written again") for one in planned)
    output.echo(output.table("record", "event id", "", rows=rows))
