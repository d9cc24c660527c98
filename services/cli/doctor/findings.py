"""What `freshet doctor` says: one finding per thing that it looked at."""

from dataclasses import dataclass
from typing import Literal

Severity = Literal["ok", "warning", "error"]


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One thing looked at: what was found; where it is not right why that matters, and the next command to type."""

    severity: Severity
    about: str
    found: str
    why: str = ""
    advice: str = ""


def fine(about: str, found: str) -> Finding:
    """All is well."""
    return Finding(severity="ok", about=about, found=found)


def error(about: str, found: str, why: str, advice: str) -> Finding:
    """It keeps the stack from running, or answers from being right."""
    return Finding(severity="error", about=about, found=found, why=why, advice=advice)


def warning(about: str, found: str, why: str, advice: str) -> Finding:
    """It runs, and somebody should know."""
    return Finding(severity="warning", about=about, found=found, why=why, advice=advice)
