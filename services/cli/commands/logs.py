"""`freshet logs`."""

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer

from services.cli import options
from services.cli.output import printable, reports_errors, usage_error

_LOOK_AGAIN_S = 0.3
_TAIL_BYTES = 1 << 20


@reports_errors
def logs(
    process: Annotated[str, typer.Argument(help="One part, such as gateway; default: all.")] = "",
    *,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Follow new lines.")] = False,
    lines: Annotated[int, typer.Option("--lines", "-n", min=0, help="Number of newest lines of each part.")] = 20,
    state: options.State = options.DEFAULT_STATE,
) -> None:
    """Show the newest lines of a part's log, including those of its shards and version sets.

    Example:  freshet logs gateway --follow
    """
    files = {name: path for name, path in _files(state) if not process or name.split(" ")[0] == process}
    if not files:
        known = ", ".join(sorted({name.split(" ")[0] for name, _ in _files(state)}))
        raise usage_error(f"process={process!r} has no log in {state}; allowed: {known or 'none, nothing was started'}")
    read = {name: _tail(name, path, lines, alone=len(files) == 1) for name, path in files.items()}
    while follow:
        time.sleep(_LOOK_AGAIN_S)
        for name, path in files.items():
            read[name] = _after(name, path, read[name], alone=len(files) == 1)


def _files(state: Path) -> Iterator[tuple[str, Path]]:
    """Yield name and path of each log. A name is the part's, with its shard or version set, if any."""
    yield from ((path.stem, path) for path in sorted(state.glob("logs/*.log")))
    for pattern in ("shards/*/logs/*.log", "sets/*/stack/logs/*.log"):
        for path in sorted(state.glob(pattern)):
            yield f"{path.stem} {path.relative_to(state).parts[1]}", path


def _tail(name: str, path: Path, lines: int, *, alone: bool) -> int:
    """Show the last lines; return the file's size."""
    size = path.stat().st_size
    with path.open("rb") as file:
        file.seek(max(0, size - _TAIL_BYTES))
        newest = file.read(size).splitlines()
    _show(name, newest[len(newest) - lines :] if lines < len(newest) else newest, alone=alone)
    return size


def _after(name: str, path: Path, read: int, *, alone: bool) -> int:
    """Show the complete lines after byte `read`; return their end. A file shorter than `read` is a new one."""
    size = path.stat().st_size
    if size == read:
        return read
    with path.open("rb") as file:
        file.seek(read if size > read else 0)
        written = file.read(_TAIL_BYTES)
    whole = written[: written.rfind(b"\n") + 1]
    _show(name, whole.splitlines(), alone=alone)
    return (read if size > read else 0) + len(whole)


def _show(name: str, lines: list[bytes], *, alone: bool) -> None:
    for line in lines:
        text = printable(line.decode(errors="replace"))
        typer.echo(text if alone else f"{name:18} {text}")
