"""The checks of `freshet doctor` on settings, certificates and API keys.

They read the environment as a process does at its start; error texts mask secrets.
"""

import difflib
import importlib
import os
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

from services.cli.doctor.findings import Finding, error, fine, warning
from services.cli.doctor.running import Running
from services.contracts.processes import PROCESSES, Process
from services.platform.config import ConfigError, ProcessSettings, environment_tls, load_settings

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
