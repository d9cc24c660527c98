"""`freshet up`, `down`, `status`, `doctor`, `logs` and `serve`: commands for the local stack."""

import importlib
import os
import time
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer
from typer import Argument, Option

from services.cli import client, options, output
from services.contracts.processes import PROCESSES

if TYPE_CHECKING:
    from services.stack.launcher import PartStatus, Stack

_STYLES = {"ok": "green", "warning": "yellow", "error": "bold red"}


@output.json_command
def up(
    *,
    state: options.State = options.DEFAULT_STATE,
    bundle: options.StackBundle = None,
    text: Annotated[Path | None, Option(envvar="FRESHET_TEXT", help="Text bundle, if any [STATE/text].")] = None,
    only: Annotated[str, Option(help="Only these parts, comma-separated, such as kafka,redis.")] = "",
    profile: Annotated[
        Literal["split", "compact"] | None,
        Option(help="compact: candidates and reranker in the gateway's process, no inference server. [split]"),
    ] = None,
    workers: Annotated[
        int | None, Option(min=1, max=8, help="Compact profile: number of processes behind the gateway's port. [1]")
    ] = None,
    shards: Annotated[int | None, Option(min=1, max=16, help="Shards of the catalogue in candidates. [1]")] = None,
    replicas: Annotated[int, Option(min=1, max=4, help="Processes for each shard.")] = 1,
    with_console: options.WithConsole = True,
    port_offset: options.PortOffset = 0,
    timeout_s: Annotated[float, Option(min=1, help="Seconds in which all parts must be healthy.")] = 120.0,
) -> None:
    """Start Kafka, Redis, the inference server, the processes and the console; wait until all are healthy.

    Example:  freshet up

    Example:  freshet up --profile compact --workers 2

    Example:  freshet up --shards 4 --replicas 2

    Example:  freshet up --only kafka,redis --port-offset 1000
    """
    from services.stack import Ports, Stack
    from services.stack.version_sets import find_set, set_names, set_parts

    parts = [part.strip() for part in only.split(",") if part.strip()] or None
    with output.sentences(), output.stack_progress() as say:
        ports = Ports.default(offset=port_offset) if port_offset else None
        stack = Stack(
            state,
            bundle=bundle,
            text=text,
            ports=ports,
            profile=profile,
            workers=workers,
            shards=shards,
            replicas=replicas,
            console=with_console,
            say=say,
        )
        stack.up(parts, timeout_s=timeout_s)
        if parts is None:
            stack.up_shards(timeout_s=timeout_s)
            for one in [find_set(stack, name, say) for name in set_names(stack)]:
                if one.bundle != stack.bundle:
                    one.up(set_parts(one), timeout_s=timeout_s)
    _show([*stack.status(), *_shard_status(stack)])
    if not output.is_json() and (address := stack.console_address):
        output.echo(f"watch it live: {address}")


@output.json_command
def down(*, state: options.State = options.DEFAULT_STATE) -> None:
    """Stop what `freshet up` started; the data of Kafka and Redis stays in the state folder.

    Example:  freshet down
    """
    from services.stack.version_sets import find_set, set_names

    with output.stack_progress() as say:
        stack = client.stack_of(state, say=say)
        stopped = [f"{part} of set {name}" for name in set_names(stack) for part in find_set(stack, name, say).down()]
        stopped += [f"{part} {name}" for name, one in stack.shard_stacks() for part in one.down()]
        stopped += stack.down()
    output.answer({"stopped": stopped}, lambda: None if stopped else typer.echo(f"nothing of {state} was running"))


@output.json_command
def status(*, state: options.State = options.DEFAULT_STATE) -> None:
    """Show each part's readiness, address, memory and time since its start.

    The exit status is 0 if all parts are ready, else 3.

    Example:  freshet status --json
    """
    from services.stack.version_sets import find_set, set_names, set_parts

    stack = client.stack_of(state)
    statuses = [*stack.status(), *_shard_status(stack)]
    for name in set_names(stack):
        own = find_set(stack, name)
        parts = set_parts(own)
        statuses += [replace(part, name=f"{part.name} {name}") for part in own.status() if part.name in parts]
    if not _show(statuses):
        raise typer.Exit(int(output.ExitStatus.UNAVAILABLE))


@output.json_command
def doctor(*, state: options.State = options.DEFAULT_STATE, bundle: options.StackBundle = None) -> None:
    """Explain what prevents the stack from running, or from running well.

    Each finding names the problem, its effect and the next command. The command checks settings, parts, ports, machine,
    bundle and expiry dates. If parts run, it also checks model versions, topics, Redis and lag. It changes nothing. The
    exit status is 1 if it finds an error.

    Example:  freshet doctor
    """
    from services.cli.doctor.examine import examine

    findings = examine(client.stack_of(state, bundle=bundle))
    errors = sum(finding.severity == "error" for finding in findings)

    def shown() -> None:
        from rich.text import Text

        rows = output.table("", "", "", show_header=False, padding=(0, 2))
        for finding in findings:
            text = Text(finding.found)
            if finding.why:
                text.append(f"\nwhy: {finding.why}", style="dim")
            if finding.advice:
                text.append(f"\nnext: {finding.advice}", style="bold")
            rows.add_row(Text(finding.severity, style=_STYLES[finding.severity]), finding.about, text)
        output.echo(rows)
        output.echo("no errors found" if not errors else f"{errors} to fix")

    output.answer({"errors": errors, "findings": [asdict(finding) for finding in findings]}, shown)
    if errors:
        raise typer.Exit(int(output.ExitStatus.FAILED))


@output.reports_errors
def serve(process: Annotated[str, Argument(help=f"One of: {', '.join(PROCESSES)}.")]) -> None:
    """Run one process in the foreground; its settings are FRESHET_ variables, its logs JSON on stdout.

    Example:  FRESHET_BUNDLE=.freshet/bundle freshet serve candidates
    """
    if process not in PROCESSES:
        raise output.usage_error(f"process={process!r} allowed: {', '.join(PROCESSES)}", "freshet serve gateway")
    # One compute thread, as the launcher sets; it must be set before a library reads these variables.
    for variable in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
        os.environ.setdefault(variable, os.environ.get("FRESHET_COMPUTE_THREADS", "1"))
    raise typer.Exit(importlib.import_module(f"{PROCESSES[process].module}.__main__").main())


def _shard_status(stack: "Stack") -> "list[PartStatus]":
    return [
        replace(part, name=f"{part.name} {name}")
        for name, one in stack.shard_stacks()
        for part in one.status()
        if part.name == "candidates"
    ]


def _show(statuses: "list[PartStatus]") -> bool:
    """Print the parts; return whether all are healthy."""
    healthy = all(part.healthy for part in statuses)
    parts = [asdict(part) | {"healthy": part.healthy} for part in statuses]
    output.answer({"healthy": healthy, "parts": parts}, lambda: _print(statuses))
    return healthy


def _print(statuses: "list[PartStatus]") -> None:
    from rich.text import Text

    shown = output.table(
        *("part", "state", "listens at", "pid", "memory", "up since"), right=("memory", "up since"), header_style="bold"
    )
    for part in statuses:
        status, style = ("ready", "green") if part.healthy else (str(part.problem), "red" if part.running else "dim")
        about = (
            (str(part.pid), f"{part.memory_mb:,.0f} MB", output.duration(part.uptime_s)) if part.running else ("",) * 3
        )
        shown.add_row(part.name, Text(status, style=style), part.address, *about)
    output.echo(shown)


_LOOK_AGAIN_S = 0.3
_TAIL_BYTES = 1 << 20


@output.reports_errors
def logs(
    process: Annotated[str, Argument(help="One part, such as gateway; default: all.")] = "",
    *,
    follow: Annotated[bool, Option("--follow", "-f", help="Follow new lines.")] = False,
    lines: Annotated[int, Option("--lines", "-n", min=0, help="Number of newest lines of each part.")] = 20,
    state: options.State = options.DEFAULT_STATE,
) -> None:
    """Show the newest lines of a part's log, including those of its shards and version sets.

    Example:  freshet logs gateway --follow
    """
    files = {name: path for name, path in _log_files(state) if not process or name.split(" ")[0] == process}
    if not files:
        known = ", ".join(sorted({name.split(" ")[0] for name, _ in _log_files(state)}))
        raise output.usage_error(
            f"process={process!r} has no log in {state}; allowed: {known or 'none, nothing was started'}"
        )
    read = {name: _tail(name, path, lines, alone=len(files) == 1) for name, path in files.items()}
    while follow:
        time.sleep(_LOOK_AGAIN_S)
        for name, path in files.items():
            read[name] = _after(name, path, read[name], alone=len(files) == 1)


def _log_files(state: Path) -> Iterator[tuple[str, Path]]:
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
    _show_lines(name, newest[len(newest) - lines :] if lines < len(newest) else newest, alone=alone)
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
    _show_lines(name, whole.splitlines(), alone=alone)
    return (read if size > read else 0) + len(whole)


def _show_lines(name: str, lines: list[bytes], *, alone: bool) -> None:
    for line in lines:
        text = output.printable(line.decode(errors="replace"))
        typer.echo(text if alone else f"{name:18} {text}")
