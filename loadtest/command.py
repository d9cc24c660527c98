"""The command line of the load tests; the last line on stdout is the summary.

Exit status: 0 done, 1 the target did not answer or too many calls failed, 2 wrong usage, 130 interrupted.
"""

import argparse
import dataclasses
import datetime
import ipaddress
import json
import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from .engine import EngineSettings, run
from .open_loop import MAX_IN_FLIGHT
from .options import Option, add_options, check_options
from .report import write_report
from .results import Conclusion, RunResults, SetUpError, caveats, summarise
from .scenarios import SCENARIOS

DEFAULT_TARGET = "127.0.0.1:50050"
_CONNECT_TIMEOUT_S = 5.0
# A shell's status for a process ended by SIGINT.
_INTERRUPTED_STATUS = 130


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one scenario; returns the exit status. gevent must already be enabled (see __main__.py)."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    parser = _parser()
    options = parser.parse_args(given)
    try:
        check_options(options, _OPTIONS)
        check_target(options)
    except ValueError as exc:
        parser.error(str(exc))
    import grpc

    started_at = datetime.datetime.now(datetime.UTC)
    with _channel(options.target) as channel:
        try:
            plan = options.build(options, channel, np.random.default_rng(options.seed))
            seconds = options.seconds if plan.seconds is None else plan.seconds
            settings = EngineSettings(
                seconds=seconds, warmup_s=min(options.warmup, seconds / 2), max_in_flight=options.max_in_flight
            )
        except ValueError as exc:
            parser.error(str(exc))
        try:
            grpc.channel_ready_future(channel).result(timeout=_CONNECT_TIMEOUT_S)
        except grpc.FutureTimeoutError:
            return _say_failed(
                f"nothing answers at {options.target} within {_CONNECT_TIMEOUT_S:g} s; is `freshet up` running?"
            )
        options.output.mkdir(parents=True, exist_ok=True)
        counted = ", ".join(f"{len(stream.arrivals_s):,} {stream.name}" for stream in plan.streams)
        sys.stderr.write(f"{options.scenario}: {counted} in {settings.seconds:g} s at {options.target}\n")
        try:
            plan.set_up()
            results = run(plan.streams, settings, host=options.target, locust_report=options.output / "locust.html")
        except (grpc.RpcError, SetUpError) as exc:
            return _say_failed(f"{options.scenario} could not be set up: {exc}")
        finally:
            plan.tear_down()
    conclusion = plan.conclude(results)
    summary = _describe(options, given, started_at, results, conclusion)
    page = write_report(options.output, results, summary)
    if not options.json:
        sys.stdout.write(_table(summary) + f"\nreport: {page}\n")
    sys.stdout.write(json.dumps(summary) + "\n")
    if results.interrupted:
        return _INTERRUPTED_STATUS
    if missed := [claim.says for claim in conclusion.claims if claim.held is False]:
        return _say_failed(f"not shown: {'; '.join(missed)}")
    if summary["error_share"] > options.max_error_share:
        return _say_failed(f"{summary['error_share']:.1%} of the calls failed; allowed: {options.max_error_share:.1%}")
    return 0


def _channel(target: str) -> Any:
    """Return a channel, encrypted if FRESHET_TLS_CA names the gateway's CA.

    Calls have the key of FRESHET_API_KEY, if set.
    """
    import grpc

    class ShowsKey(grpc.UnaryUnaryClientInterceptor, grpc.StreamUnaryClientInterceptor):  # type: ignore[misc]
        def intercept_unary_unary(self, make: Any, details: Any, request: Any) -> Any:
            return make(
                details._replace(metadata=[*(details.metadata or ()), ("authorization", f"Bearer {key}")]), request
            )

        intercept_stream_unary = intercept_unary_unary

    ca, key = os.environ.get("FRESHET_TLS_CA"), os.environ.get("FRESHET_API_KEY")
    channel = (
        grpc.secure_channel(target, grpc.ssl_channel_credentials(Path(ca).read_bytes()))
        if ca
        else grpc.insecure_channel(target)
    )
    return grpc.intercept_channel(channel, ShowsKey()) if key else channel


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="freshet loadtest",
        description="Load tests with arrivals on a clock; latency counts from the scheduled moment.",
        epilog="example: freshet loadtest steady --seconds 30 --recommend-rate 40 --event-rate 200",
    )
    scenarios = parser.add_subparsers(dest="scenario", required=True, metavar="SCENARIO")
    scenarios.add_parser("knee", help="how much the system takes, and what it does with more (a compiled sender)")
    scenarios.add_parser("path", help="what a call costs, process by process, beside an empty call (a compiled sender)")
    for name, scenario in SCENARIOS.items():
        sub = scenarios.add_parser(
            name,
            help=scenario.summary,
            description=f"{name}: {scenario.summary}.",
            epilog=f"example: freshet loadtest {name} --seconds 30",
            formatter_class=argparse.ArgumentDefaultsHelpFormatter,
        )
        sub.set_defaults(build=scenario.build)
        add_options(sub, _OPTIONS)
        add_target(sub, name)
        sub.add_argument("--json", action="store_true", help="print the summary alone")
        scenario.add_arguments(sub)
    return parser


_OPTIONS = (
    Option("seconds", 30.0, 0.1, 3_600, "length of the run, at most 3600"),
    Option("warmup", 2.0, 0, 3_600, "seconds at the start that are not measured"),
    Option("timeout-ms", 1_000.0, 1, 60_000, "deadline of each call"),
    Option("max-in-flight", MAX_IN_FLIGHT, 1, 100_000, "calls that may be open at once"),
    Option("max-error-share", 0.01, 0, 1, "more failures than this: exit status 1"),
    Option("seed", 0, 0, 2**63 - 1, "equal seeds schedule equal arrivals"),
)


def add_target(parser: argparse.ArgumentParser, scenario: str) -> None:
    """Add the options of the gateway and of the results' folder."""
    parser.add_argument("--target", default=DEFAULT_TARGET, help="the gateway, host:port")
    parser.add_argument("--allow-remote", action="store_true", help="permit a target that is not this machine")
    parser.add_argument("--output", type=Path, default=Path(".freshet/loadtest") / scenario, metavar="FOLDER",
                        help="where the results go")  # fmt: skip


def check_target(options: argparse.Namespace) -> None:
    """Check the target. Raises: ValueError if it is no address, or another machine without permission."""
    host, separator, port = options.target.rpartition(":")
    if not separator or not host or not port.isdigit() or not 1 <= int(port) <= 65_535:
        raise ValueError(f"--target={options.target}; allowed: host:port with a port from 1 to 65535")
    if not options.allow_remote and not _is_this_machine(host):
        raise ValueError(f"--target={options.target} is another machine; load it only with --allow-remote")


def _is_this_machine(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def _describe(
    options: argparse.Namespace,
    given: Sequence[str],
    started_at: datetime.datetime,
    results: RunResults,
    conclusion: Conclusion,
) -> dict[str, Any]:
    summary = {
        "scenario": options.scenario,
        "target": options.target,
        "started_at": started_at.isoformat(timespec="seconds"),
        **summarise(results),
        "claims": [dataclasses.asdict(claim) for claim in conclusion.claims],
        "findings": conclusion.findings,
        "command": f"freshet loadtest {shlex.join(given)}",
        "commit": _commit(),
        "hardware": {"cpu": _cpu_name(), "cores": len(os.sched_getaffinity(0)), "python": platform.python_version()},
    }
    return {**summary, "caveats": caveats(summary, timeout_ms=options.timeout_ms)}


def _table(summary: dict[str, Any]) -> str:
    lines = [f"{'call':<12}{'offered/s':>10}{'achieved/s':>12}{'errors':>8}{'p50 ms':>9}{'p95 ms':>9}{'p99 ms':>9}"]
    for name, call in summary["calls"].items():
        latency = (call["latency_ms"][key] for key in ("p50", "p95", "p99"))
        cells = "".join(f"{'–' if value is None else f'{value:.1f}':>9}" for value in latency)
        failed = sum(call["errors"].values()) + call["not_sent"]
        lines.append(f"{name:<12}{call['offered_per_s']:>10.1f}{call['achieved_per_s']:>12.1f}{failed:>8}{cells}")
    for stage, times in summary["stages_ms"].items():
        cells = "".join(f"{'–' if times[key] is None else f'{times[key]:.1f}':>9}" for key in ("p50", "p95", "p99"))
        lines.append(f"  {stage:<40}{cells}")
    for what in ("degradations", "counts"):
        if summary[what]:
            lines.append(f"{what}: " + ", ".join(f"{name} {count}" for name, count in summary[what].items()))
    for claim in summary["claims"]:
        mark = {True: "shown", False: "NOT SHOWN", None: "not measured"}[claim["held"]]
        value = "" if claim["value"] is None else f": {claim['value']:g}"
        lines.append(f"{mark:<13}{claim['says']}{value} (allowed: {claim['allowed']})")
    return "\n".join(lines)


def _say_failed(message: str) -> int:
    sys.stderr.write(f"loadtest: {message}\n")
    return 1


def _commit() -> str:
    try:
        answer = subprocess.run(
            ["git", "rev-parse", "--short=12", "HEAD"],
            cwd=Path(__file__).parent, capture_output=True, text=True, timeout=5, check=True,
        )  # fmt: skip
    except (OSError, subprocess.SubprocessError):
        return "unknown"
    return answer.stdout.strip()


def _cpu_name() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()
