"""Seconds as people read them: one unit, one decimal where it tells something."""

_UNITS = (("y", 365 * 86400), ("d", 86400), ("h", 3600), ("min", 60))


def duration(seconds: float) -> str:
    """`"3.2 d"`, `"45.0 s"`, `"120 ms"`."""
    for unit, size in _UNITS:
        if seconds >= size:
            return f"{seconds / size:.1f} {unit}"
    return f"{seconds:.1f} s" if seconds >= 1 or seconds <= 0 else f"{seconds * 1000:.0f} ms"
