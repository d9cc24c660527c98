"""Stands in for packages that read files or speak to a stack, where a card's machine lacks them.

What runs there takes arrays and calls none of them, but for a checkpoint's tensors, which PyTorch then writes in a form
of its own, and hashes of ids, which are blake2b's. A package that is there is used.
"""

import sys
from hashlib import blake2b
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from unittest.mock import MagicMock

import torch

_PACKAGES = {
    "freshet",
    "google",
    "grpc",
    "kafka",
    "pyarrow",
    "pydantic",
    "pydantic_settings",
    "safetensors",
    "structlog",
    "xxhash",
    "yaml",
}


class _Anything(ModuleType):
    """A module that has every name."""

    def __getattr__(self, name: str) -> MagicMock:
        if name.startswith("__"):
            raise AttributeError(name)
        return MagicMock(name=f"{self.__name__}.{name}")


class _StandIns(MetaPathFinder, Loader):
    def find_spec(self, fullname: str, path: object, target: object = None) -> ModuleSpec | None:
        known = fullname.partition(".")[0] in _PACKAGES
        return ModuleSpec(fullname, self, is_package=True) if known else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _Anything(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        if module.__name__ == "safetensors.torch":
            module.save_file, module.load_file = torch.save, torch.load  # type: ignore[attr-defined]
        if module.__name__ == "xxhash":
            module.xxh3_64_intdigest = _digest  # type: ignore[attr-defined]


def _digest(data: bytes) -> int:
    return int.from_bytes(blake2b(data, digest_size=8).digest())


sys.meta_path.append(_StandIns())  # last: it is asked only where nobody else has the package
