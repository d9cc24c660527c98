"""A process needs the packages of its role alone: a fresh interpreter that can find no others imports all of it."""

import subprocess
import sys
import tomllib
from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, packages_distributions, requires

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from services.contracts.processes import PROCESSES, Process
from services.stack.folders import REPOSITORY

_SCRIPT = """
import sys

class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in refused:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

refused = set(sys.argv[2:])
sys.meta_path.insert(0, Missing())
__import__(f"{sys.argv[1]}.__main__")
__import__(f"{sys.argv[1]}.bootstrap")
"""
PROJECT = tomllib.loads((REPOSITORY / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def closure(wanted: Iterable[str]) -> set[str]:
    """The distributions that installing `wanted` brings, of those that are installed here."""
    found: set[tuple[str, str]] = set()
    left = [Requirement(entry) for entry in wanted]
    while left:
        requirement = left.pop()
        name = canonicalize_name(requirement.name)
        for extra in ("", *requirement.extras):
            if (name, extra) in found:
                continue
            found.add((name, extra))
            try:
                entries = [Requirement(entry) for entry in requires(name) or []]
            except PackageNotFoundError:
                continue
            left += [one for one in entries if one.marker is None or one.marker.evaluate({"extra": extra})]
    return {name for name, _ in found}


@pytest.mark.parametrize("row", PROCESSES.values(), ids=lambda row: row.name)
def test_a_process_imports_nothing_beyond_its_role(row: Process) -> None:
    allowed = closure([*PROJECT["dependencies"], *PROJECT["optional-dependencies"][row.extra]])
    refused = [
        name
        for name, distributions in packages_distributions().items()
        if not {canonicalize_name(one) for one in distributions} & (allowed | {canonicalize_name(PROJECT["name"])})
    ]
    assert {"typer", "pytest", "onnxruntime", "faiss", "torch"} <= set(refused)
    done = subprocess.run(
        [sys.executable, "-c", _SCRIPT, row.module, *refused],
        capture_output=True,
        text=True,
        check=False,
        cwd=REPOSITORY,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr
