"""Finds what prevents the stack from running, or from running well.

The checks change nothing and leave no process behind. The checks of settings read the environment as a process does at
its start. Error texts mask secrets.
"""

import difflib
import importlib
import os
import shutil
import sys
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import psutil

from services.cli.doctor import Finding, error, fine, warning
from services.cli.doctor.running import Running, look_at_parts, look_at_running
from services.cli.output import CommandError
from services.contracts.processes import PROCESSES, Process
from services.platform.config import ConfigError, ProcessSettings, environment_tls, load_settings
from services.platform.errors import FreshetError
from services.platform.machine import available_bytes
from services.stack.errors import StackError
from services.stack.folders import cache_root
from services.stack.launcher import Stack
from services.stack.memory import needed_bytes
from services.stack.ports import INFRASTRUCTURE

_GIB = 1 << 30
_MIB = 1 << 20
_MIN_DISK_BYTES = 2 * _GIB
_DATASETS_WITHOUT_NETWORK = ("ml-1m", "ml-latest-small", "ml-100k")


def examine(stack: Stack) -> list[Finding]:
    """Return all findings. A failure of a check is a finding too."""
    findings = list(look_at_settings())
    try:
        running = Running.of(stack)
    except ConfigError:
        # The other checks need valid certificates. look_at_settings has already reported the problem.
        return findings
    for check in (look_at_parts, _ports, _machine, _memory, _recipes, _bundle, _data, look_at_running, look_at_expiry):
        try:
            findings.extend(check(running))
        except (OSError, ValueError, StackError, CommandError, FreshetError, psutil.Error) as exc:
            about = check.__name__.removeprefix("look_at").strip("_")
            findings.append(error(about, f"this check failed: {exc}", "problems there are not found", "freshet status"))
    return findings


def _ports(running: Running) -> Iterator[Finding]:
    taken = [problem for name in running.absent for problem in running.stack.ports.taken(name)]
    for problem in taken:
        found = f"taken by {problem.owner or 'a process that this user cannot see'}"
        advice = "freshet up --port-offset 1000, or stop the process that uses it"
        yield error(f"port {problem.port}", found, "the part that needs this port cannot start", advice)
    if not taken:
        yield fine("ports", "free, or held by the stack")


def _machine(_: Running) -> Iterator[Finding]:
    found = ".".join(str(part) for part in sys.version_info[:3])
    if sys.version_info[:2] == (3, 11):
        yield fine("Python", found)
    else:
        yield error("Python", found, "Freshet is tested only with 3.11", "make setup PYTHON=python3.11")
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    if cores >= 2:
        yield fine("cores", str(cores))
    else:
        yield warning("cores", str(cores), "documented latencies need two", "nproc, and add another core")


def _disk(about: str, folder: Path) -> Finding:
    free = shutil.disk_usage(_existing(folder)).free
    found = f"{free / _GIB:.1f} GiB free at {folder}"
    if free >= _MIN_DISK_BYTES:
        return fine(about, found)
    advice = f"df -h {_existing(folder)}, and free {_MIN_DISK_BYTES / _GIB:.0f} GiB, or set XDG_CACHE_HOME"
    return error(about, found, "Kafka stops on a full disk", advice)


def _memory(running: Running) -> Iterator[Finding]:
    stack = running.stack
    yield _disk("disk for state", stack.place.state.root)
    yield _disk("disk for the cache", cache_root())
    have = available_bytes()
    if not (stack.bundle / "manifest.json").exists():
        yield fine("memory", f"{have / _MIB:,.0f} MiB available")
        return
    need = sum(needed_bytes(stack.bundle, running.absent, text=stack.place.text).values())
    found = f"{have / _MIB:,.0f} MiB available, about {need / _MIB:,.0f} MiB needed for what is not running"
    if need <= have:
        yield fine("memory", found)
    else:
        advice = "freshet up --only kafka,redis, end other programs, or train a smaller model"
        yield error("memory", found, "parts would be killed or refuse to start", advice)


def _recipes(running: Running) -> Iterator[Finding]:
    for name in running.stack.parts:
        if name not in INFRASTRUCTURE:
            continue
        missing = running.stack.components[name].missing()
        if missing is None:
            yield fine(f"recipe of {name}", "can run here")
        else:
            yield error(f"recipe of {name}", missing[0], "it cannot be started here", missing[1])


def _bundle(running: Running) -> Iterator[Finding]:
    from services.algorithms.bundles.model_bundle import ENCODER_ONNX, BundleError, load_bundle

    path, why = running.stack.bundle, "every process loads it at its start"
    if not (path / "manifest.json").exists():
        yield error("bundle", f"none at {path}", why, "freshet train, or make demo")
        return
    try:
        bundle = load_bundle(path)
    except (BundleError, OSError) as exc:
        yield error("bundle", str(exc), why, "freshet train, or take it from a backup: freshet restore")
        return
    if bundle.manifest.encoder is None or ENCODER_ONNX in bundle.manifest.files:
        yield fine("bundle", f"{bundle.model_version} with {bundle.num_items:,} items, checksums agree")
    else:
        yield error("bundle", f"{path} holds no {ENCODER_ONNX}", "no encoder starts", f"freshet export --bundle {path}")


def _data(_: Running) -> Iterator[Finding]:
    from services.offline.datasets.locate import Locator

    for name in _DATASETS_WITHOUT_NETWORK:
        located = Locator(download=False).on_this_machine(name)
        if located is not None:
            yield fine("data", f"{name} {located.where}")
            return
    why = "training downloads one, or uses the simulator if it cannot"
    yield warning("data", "no MovieLens set found here", why, "export FRESHET_DATA=/the/folder/that/has/one")


def _existing(folder: Path) -> Path:
    while not folder.exists():
        folder = folder.parent
    return folder


SOON = timedelta(days=14)
# Variables that only commands, the compose files or tests read.
_OTHERS = (
    *("API_KEY", "CANDIDATES", "CHAOS_BUNDLE", "CHAOS_NEXT", "DATA", "GATEWAY", "GATEWAYS"),
    *("MAVEN_REPOSITORY", "REDIS_MAXMEMORY", "STATE"),
)
OF_COMMANDS = frozenset(f"FRESHET_{name}" for name in _OTHERS)


def settings_of(row: Process) -> type[ProcessSettings]:
    """Return the class that reads a process's settings."""
    module = vars(importlib.import_module(f"{row.module}.config"))
    (found,) = [
        kind
        for kind in module.values()
        if isinstance(kind, type) and issubclass(kind, ProcessSettings) and kind.__module__ == f"{row.module}.config"
    ]
    return found


def variables_of(settings: type[ProcessSettings]) -> set[str]:
    """Return the names of the environment variables that `settings` reads."""
    aliases = {name: field.validation_alias for name, field in settings.model_fields.items()}
    return {alias if isinstance(alias, str) else f"FRESHET_{name.upper()}" for name, alias in aliases.items()}


def look_at_settings() -> Iterator[Finding]:
    """Check the environment as each process reads it."""
    refused: dict[str, list[str]] = {}
    known: set[str] = set()
    for name, row in PROCESSES.items():
        kind = settings_of(row)
        known |= variables_of(kind)
        try:
            load_settings(kind)
        except ConfigError as exc:
            refused.setdefault(str(exc), []).append(name)
    for problem, names in refused.items():
        variable = problem.partition("=")[0]
        advice = f"unset {variable}" if variable in os.environ else "env | grep FRESHET_"
        yield error("settings", problem, f"{', '.join(names)} would end at once", advice)
    unread = sorted(name for name in os.environ if name.startswith("FRESHET_") and name not in known | OF_COMMANDS)
    meant = {name: difflib.get_close_matches(name, known, 1, 0.85) for name in unread}
    for name, (close, *_) in ((name, matches) for name, matches in meant.items() if matches):
        found = f"no process reads {name}; did you mean {close}?"
        advice = f'export {close}="${name}"; unset {name}'
        yield warning("settings", found, f"the default of {close} is used instead", advice)
    if not refused and not any(meant.values()):
        yield fine("settings", "every process accepts them")


def look_at_expiry(running: Running) -> Iterator[Finding]:
    """Check the certificates named in the environment, and the gateway's API keys."""
    tls = environment_tls()
    if tls is not None:
        yield from _certificate(tls.certificate, "processes that use an expired certificate cannot call each other")
        yield from _certificate(tls.ca, "certificates of an expired CA are not valid")
    named = os.environ.get("FRESHET_API_KEYS")
    path = Path(named) if named else running.stack.place.state.root / "api-keys.json"
    if path.exists():
        yield from _keys(path)


def _certificate(path: Path, why: str) -> Iterator[Finding]:
    from cryptography import x509

    about = f"certificate {path.name}"
    ends = x509.load_pem_x509_certificate(path.read_bytes()).not_valid_after_utc
    advice = f"freshet certs --out {path.parent} --renew, then restart the processes one by one"
    yield _ending(about, ends, why, advice)


def _keys(path: Path) -> Iterator[Finding]:
    from services.gateway.edge.api_keys import read_keys

    try:
        keys = read_keys(path)
    except ConfigError as exc:
        yield error("API keys", str(exc), "the gateway does not start with it", f"freshet keys list --file {path}")
        return
    for key in keys:
        if key.expires is not None:
            roles = " ".join(f"--role {role}" for role in sorted(key.roles))
            advice = f"freshet keys create {key.id}-2 {roles} --days 90 --file {path}, then give it to the callers"
            yield _ending(f"API key {key.id}", key.expires, "the gateway rejects calls with an expired key", advice)
    yield fine("API keys", f"{len(keys)} in {path}")


def _ending(about: str, ends: datetime, why: str, advice: str) -> Finding:
    left = ends - datetime.now(UTC)
    if left <= timedelta():
        return error(about, f"ended on {ends:%Y-%m-%d}", why, advice)
    if left < SOON:
        return warning(about, f"ends in {left.days} days, on {ends:%Y-%m-%d}", why, advice)
    return fine(about, f"good until {ends:%Y-%m-%d}")
