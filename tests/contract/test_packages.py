"""pyproject.toml, deploy/constraints.txt and the installed packages agree; the distribution's name is in one place."""

import re
import tomllib
from importlib.metadata import version
from pathlib import Path

import freshet.v1
import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from typer.testing import CliRunner

from services.cli.main import app
from services.contracts.processes import PROCESSES
from services.stack.folders import REPOSITORY
from services.stack.version import DISTRIBUTION

PROJECT = tomllib.loads((REPOSITORY / "pyproject.toml").read_text(encoding="utf-8"))["project"]
CLIENT = tomllib.loads((REPOSITORY / "services" / "client" / "pyproject.toml").read_text(encoding="utf-8"))
STUBS = Path(freshet.v1.__file__).parent
CONSTRAINTS = {
    canonicalize_name(name): pin
    for name, _, pin in (
        line.partition("==") for line in (REPOSITORY / "deploy" / "constraints.txt").read_text().splitlines() if line
    )
}
REQUIREMENTS = [
    *PROJECT["dependencies"],
    *(entry for name, extra in PROJECT["optional-dependencies"].items() if name != "all" for entry in extra),
    *CLIENT["project"]["dependencies"],
]
# What this repository builds itself.
CONSTRAINTS["freshet-client"] = CLIENT["project"]["version"]


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


def test_the_client_needs_grpc_and_protobuf_alone_on_each_python() -> None:
    project = CLIENT["project"]
    assert {Requirement(entry).name for entry in project["dependencies"]} == {"grpcio", "protobuf"}
    pythons = Requirement(f"python{project['requires-python']}").specifier
    named = [entry.rpartition(" ")[2] for entry in project["classifiers"] if " :: 3." in entry]
    assert named == [f"3.{minor}" for minor in range(20) if pythons.contains(f"3.{minor}.1")]
    assert named == ["3.10", "3.11", "3.12", "3.13", "3.14"]


def test_the_stubs_are_generated_by_the_tested_version_and_run_on_it() -> None:
    (tools,) = [Requirement(entry) for entry in CLIENT["build-system"]["requires"] if "grpcio-tools" in entry]
    assert str(tools.specifier) == f"=={CONSTRAINTS['grpcio-tools']}"
    by_name = {Requirement(entry).name: Requirement(entry).specifier for entry in CLIENT["project"]["dependencies"]}
    (grpc_stubs, message_stubs) = (
        (STUBS / f"gateway_pb2{kind}.py").read_text(encoding="utf-8") for kind in ("_grpc", "")
    )
    generated = re.search(r"GRPC_GENERATED_VERSION = '(.+)'", grpc_stubs)
    protobuf = re.search(r"# Protobuf Python Version: (.+)", message_stubs)
    assert generated is not None
    assert protobuf is not None
    assert f">={generated[1]}" in str(by_name["grpcio"])
    assert f">={protobuf[1]}" in str(by_name["protobuf"])


def test_the_command_tells_the_installed_version() -> None:
    told = CliRunner().invoke(app, ["--version"])
    assert told.exit_code == 0
    assert told.stdout == f"freshet {version(DISTRIBUTION)}\n"
