"""The checks of `freshet doctor` examine settings, the machine and the stack, and yield findings."""

from dataclasses import dataclass
from typing import Literal

Severity = Literal["ok", "warning", "error"]


@dataclass(frozen=True, kw_only=True)
class Finding:
    """The result of one check; for a problem also its effect and the next command."""

    severity: Severity
    about: str
    found: str
    why: str = ""
    advice: str = ""


def fine(about: str, found: str) -> Finding:
    """Return a finding without a problem."""
    return Finding(severity="ok", about=about, found=found)


def error(about: str, found: str, why: str, advice: str) -> Finding:
    """Return a problem that prevents the stack from running or makes answers wrong."""
    return Finding(severity="error", about=about, found=found, why=why, advice=advice)


def warning(about: str, found: str, why: str, advice: str) -> Finding:
    """Return a problem that does not prevent the stack from running."""
    return Finding(severity="warning", about=about, found=found, why=why, advice=advice)
