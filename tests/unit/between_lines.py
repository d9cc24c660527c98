"""A reader that comes between any two lines of a writer, in place of threads that would have to be lucky."""

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any


def read_between_lines(write: Callable[[], object], read: Callable[[], object], *, file: str) -> None:
    """Call `write`, and `read` before each line that it runs in files of this name; what `read` raises is raised."""
    raised: list[Exception] = []

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        if not frame.f_code.co_filename.endswith(file):
            return None
        sys.settrace(None)
        try:
            read()
        except Exception as exc:
            raised.append(exc)
        finally:
            sys.settrace(trace)
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        write()
    finally:
        sys.settrace(before)
    if raised:
        raise raised[0]
