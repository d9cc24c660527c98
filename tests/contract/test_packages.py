"""pyproject.toml, deploy/constraints.txt and the installed packages agree; the distribution's name is in one place."""

import re
import tomllib
from importlib.metadata import version

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from typer.testing import CliRunner

from services.cli.main import app
from services.contracts.processes import PROCESSES
from services.stack.folders import REPOSITORY
from services.stack.version import DISTRIBUTION

PROJECT = tomllib.loads((REPOSITORY / "pyproject.toml").read_text(encoding="utf-8"))["project"]
CONSTRAINTS = {
    canonicalize_name(name): pin
    for name, _, pin in (
        line.partition("==") for line in (REPOSITORY / "deploy" / "constraints.txt").read_text().splitlines() if line
    )
}
REQUIREMENTS = [
    *PROJECT["dependencies"],
    *(entry for name, extra in PROJECT["optional-dependencies"].items() if name != "all" for entry in extra),
]


@pytest.mark.parametrize("requirement", REQUIREMENTS)
def test_a_dependency_is_a_range_around_the_tested_version(requirement: str) -> None:
    wanted = Requirement(requirement)
    assert {part.operator for part in wanted.specifier} == {">=", "<"}
    assert wanted.specifier.contains(CONSTRAINTS[canonicalize_name(wanted.name)], prereleases=True)


def test_the_tested_set_is_exact() -> None:
    assert [name for name, pin in CONSTRAINTS.items() if not re.fullmatch(r"[0-9][0-9a-z.]*", pin)] == []


def test_the_makefile_installs_the_distribution_by_its_name() -> None:
    assert PROJECT["name"] == DISTRIBUTION
    assert f"--reinstall-package {DISTRIBUTION} " in (REPOSITORY / "Makefile").read_text(encoding="utf-8")


def test_all_is_every_extra_but_those_that_make_adds() -> None:
    extras = PROJECT["optional-dependencies"]
    (everything,) = extras["all"]
    # `make setup` adds them where they fit: one accelerator, and hnswlib where it can be built.
    added_by_make = {"cpu", "gpu", "bench-cpu", "bench-gpu", "bench-hnswlib"}
    assert Requirement(everything).name == DISTRIBUTION
    assert Requirement(everything).extras == extras.keys() - added_by_make - {"all"}
    assert {row.extra for row in PROCESSES.values()} <= extras.keys()


def test_the_command_tells_the_installed_version() -> None:
    told = CliRunner().invoke(app, ["--version"])
    assert told.exit_code == 0
    assert told.stdout == f"freshet {version(DISTRIBUTION)}\n"
