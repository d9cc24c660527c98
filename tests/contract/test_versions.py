"""What is released together has one version: server, Python client, npm package, change log."""

import json
import tomllib

from services.stack.folders import REPOSITORY


def test_server_clients_and_change_log_have_one_version() -> None:
    client = REPOSITORY / "services" / "client"
    projects = [tomllib.loads((folder / "pyproject.toml").read_text())["project"] for folder in (REPOSITORY, client)]
    package = json.loads((client / "typescript" / "package.json").read_text())
    (version,) = {project["version"] for project in projects} | {package["version"]}
    assert f"## Unreleased: {version}\n" in (REPOSITORY / "CHANGELOG.md").read_text()
