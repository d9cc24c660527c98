"""Check whether the bundle fits into memory before a start.

The estimate, a measured amount per part plus the bundle's files, is generous.
"""

import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path

from services.platform.machine import available_bytes
from services.stack.errors import StackError
from services.stack.ports import PARTS

_MIB = 1 << 20
_ONNX = "encoder.onnx"
_ENCODE = frozenset({"encoder", "inference-server"})


def needed_bytes(
    bundle: Path, parts: Iterable[str], *, text: Path | None = None, settings: Mapping[str, str] = os.environ
) -> dict[str, int]:
    """Return the bytes that each part needs for the bundle, the text bundle and set options.

    Raises: StackError if a manifest can't be read.
    """
    sizes = _file_sizes(bundle)
    if text is not None and (text / "manifest.json").exists():
        sizes |= {name: size for name, size in _file_sizes(text).items() if "/" in name}
    needed = {}
    for part in parts:
        files = sum(sizes.get(name, 0) * times for name, times in PARTS[part].holds.items())
        options = sum(mib for name, mib in PARTS[part].options.items() if settings.get(name))
        needed[part] = (PARTS[part].memory_mb + options) * _MIB + files
    return needed


def require_stack_memory(
    bundle: Path, parts: Iterable[str], available: int | None = None, *, text: Path | None = None
) -> None:
    """Check that `parts` with this bundle fit into memory. Raises: StackError with needed and available memory."""
    needed = needed_bytes(bundle, parts, text=text)
    have = available_bytes() if available is None else available
    need = sum(needed.values())
    if need > have:
        largest = max(needed, key=lambda part: needed[part])
        raise StackError(
            "memory",
            f"the model at {bundle} needs about {need / _MIB:,.0f} MiB for {len(needed)} parts "
            f"(the most, {needed[largest] / _MIB:,.0f} MiB, for {largest}); {have / _MIB:,.0f} MiB are available",
            advice="end other programs, start fewer parts (freshet up --only ...), or train a smaller model",
        )


def require_encoder(bundle: Path, parts: Iterable[str]) -> None:
    """Refuse a bundle without ONNX encoder if one of `parts` encodes. Raises: StackError."""
    if not _ENCODE.intersection(parts) or _ONNX in _file_sizes(bundle):
        return
    if json.loads((bundle / "manifest.json").read_text(encoding="utf-8")).get("encoder", ...) is None:
        what = "holds vectors without an encoder, which no whole stack serves"
        advice = f"FRESHET_BUNDLE={bundle} freshet serve candidates"
    else:
        what, advice = f"holds no {_ONNX}", f"freshet export --bundle {bundle}"
    raise StackError("bundle", f"{bundle} {what}", advice=advice)


def _file_sizes(bundle: Path) -> dict[str, int]:
    try:
        files = json.loads((bundle / "manifest.json").read_text(encoding="utf-8"))["files"]
        return {name: int(entry["bytes"]) for name, entry in files.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as exc:
        raise StackError("bundle", f"{bundle / 'manifest.json'} cannot be read: {exc}") from exc
