"""The libraries of one op that this processor can run: one per instruction set, all held to the same claims."""

import ctypes
from pathlib import Path

from services.algorithms import native


def native_builds(op: str | Path) -> dict[str, ctypes.CDLL]:
    """Libraries by instruction set of `algorithms/ops/<op>`, or of an op's folder elsewhere."""
    usable = native.INSTRUCTION_SETS[: native.INSTRUCTION_SETS.index(native.instruction_set()) + 1]
    folder = Path(native.__file__).parent.parent / "ops" / op
    paths = {name: folder / f"cpu-{name}.so" for name in usable}
    return {name: ctypes.CDLL(str(path)) for name, path in paths.items() if path.exists()}
