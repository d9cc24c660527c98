"""Errors with the part, the reason and the next step."""

from pathlib import Path


class StackError(RuntimeError):
    """A part of the stack could not be prepared, started or stopped."""

    def __init__(self, part: str, problem: str, *, advice: str = "") -> None:
        super().__init__(f"{part}: {problem}" + (f"\n  try: {advice}" if advice else ""))
        self.part = part
        self.problem = problem
        self.advice = advice


def tail(path: Path, *, lines: int = 15, bytes_read: int = 16_384) -> str:
    """Return a log's last lines, or a sentence that there is none."""
    try:
        with path.open("rb") as file:
            file.seek(0, 2)
            file.seek(max(0, file.tell() - bytes_read))
            text = file.read().decode(errors="replace").rstrip()
    except OSError:
        return f"(no log at {path})"
    return "\n".join(text.splitlines()[-lines:]) or f"({path} is empty)"
