"""deploy/chart without Helm: values, schema and profiles against each other, the compose file and the process table.

What the templates make of them is `make chart-test`'s to check (tests/chart), which needs Helm.
"""

import json
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from services.contracts.processes import FULL_CPU_SHARES, HTTP_STEP, PROCESSES, Process
from services.stack.compose import COMPOSE_FILE, read_compose
from services.stack.folders import REPOSITORY

CHART = REPOSITORY / "deploy" / "chart"
VALUES = yaml.safe_load((CHART / "values.yaml").read_text(encoding="utf-8"))
SCHEMA = json.loads((CHART / "values.schema.json").read_text(encoding="utf-8"))
PROFILES = sorted((CHART / "profiles").glob("*.yaml"))
TEMPLATES = {path.name: path.read_text(encoding="utf-8") for path in (CHART / "templates").iterdir()}
# In memory at /tmp, which counts as the container's.
TMP_MB = 64


def resolved(schema: dict[str, Any]) -> dict[str, Any]:
    """What a $ref of values.schema.json stands for."""
    found = schema.get("$ref")
    return SCHEMA["$defs"][found.rpartition("/")[2]] if found else schema


def differences(values: Any, schema: dict[str, Any], where: str = "", *, whole: bool) -> Iterator[str]:
    """Where values have what the schema has not, or `whole` values lack what it has; types and patterns, too."""
    schema = resolved(schema)
    kinds = {"object": dict, "array": list, "string": str, "integer": int, "boolean": bool}
    kind = schema.get("type")
    if kind and (not isinstance(values, kinds[kind]) or (kind == "integer" and isinstance(values, bool))):
        yield f"{where}={values!r} is no {kind}"
        return
    if "enum" in schema and values not in schema["enum"]:
        yield f"{where}={values!r} is none of {schema['enum']}"
    if isinstance(values, str) and not re.search(schema.get("pattern", ""), values):
        yield f"{where}={values!r} is not like {schema['pattern']}"
    if isinstance(values, int) and not schema.get("minimum", values) <= values <= schema.get("maximum", values):
        yield f"{where}={values!r} is out of range"
    if isinstance(values, list):
        for position, value in enumerate(values):
            yield from differences(value, schema["items"], f"{where}[{position}]", whole=whole)
    if isinstance(values, dict) and "properties" in schema:
        assert schema["additionalProperties"] is False, f"{where} is open: a misspelt value would say nothing"
        # Helm itself adds `global`.
        known = schema["properties"].keys() - {"global"}
        yield from (f"{where}.{name} is not in the schema" for name in values.keys() - known)
        if whole:
            yield from (f"{where}.{name} has no default" for name in known - values.keys())
        for name in values.keys() & known:
            yield from differences(values[name], schema["properties"][name], f"{where}.{name}", whole=whole)


def mebibytes(quantity: str) -> int:
    number, unit = re.fullmatch(r"(\d+)(Mi|Gi)", quantity).groups()  # type: ignore[union-attr]
    return int(number) * (1024 if unit == "Gi" else 1)


def test_the_chart_reads_the_files_that_compose_and_prometheus_read() -> None:
    read = {path.name: path.resolve() for path in (CHART / "files").iterdir()}
    assert read == {
        "docker-compose.yml": COMPOSE_FILE,
        "compose.gpu.yml": REPOSITORY / "deploy" / "compose.gpu.yml",
        "alerts.yml": REPOSITORY / "deploy" / "dashboards" / "alerts.yml",
    }
    named = set(re.findall(r'\.Files\.Get "files/([^"]+)"', "".join(TEMPLATES.values())))
    assert named == set(read)


def test_every_value_has_a_default_and_a_type() -> None:
    assert list(differences(VALUES, SCHEMA, whole=True)) == []


@pytest.mark.parametrize("profile", PROFILES, ids=lambda path: path.stem)
def test_profiles_say_what_the_schema_knows(profile: Path) -> None:
    said = yaml.safe_load(profile.read_text(encoding="utf-8"))
    assert list(differences(said, SCHEMA, whole=False)) == []


def test_versions_are_the_images() -> None:
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text(encoding="utf-8"))
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text(encoding="utf-8"))["project"]["version"]
    images = {read_compose(environ={})[name].image.partition(":")[2] for name in PROCESSES}
    assert images == {chart["appVersion"]} == {project}


def test_values_hold_the_processes_of_the_table() -> None:
    assert VALUES["processes"].keys() == PROCESSES.keys()


@pytest.mark.parametrize("row", PROCESSES.values(), ids=lambda row: row.name)
def test_memory_and_weight_are_those_of_the_row(row: Process) -> None:
    own = VALUES["processes"][row.name]
    assert mebibytes(own["memory"]) >= row.memory_mb + TMP_MB
    # Kubernetes makes weights of what is asked for.
    whole = int(VALUES["processes"]["gateway"]["cpu"].removesuffix("m"))
    assert int(own["cpu"].removesuffix("m")) * FULL_CPU_SHARES == whole * row.cpu_shares


@pytest.mark.parametrize("row", PROCESSES.values(), ids=lambda row: row.name)
def test_templates_reckon_ports_and_health_services_as_the_row_does(row: Process) -> None:
    template = TEMPLATES["processes.yaml"]
    assert 'index $service.environment (printf "FRESHET_%s_PORT" (upper $process))' in template
    assert read_compose(environ={})[row.name].environment[row.port_variable] == str(row.port)
    assert "containerPort: {{ add $port 1000 }}" in template
    assert row.metrics_port == row.port + 1000
    assert f"containerPort: {{{{ add $port {HTTP_STEP} }}}}" in template
    assert "service: freshet.v1.{{ title $process }}Service" in template
    assert row.health_service == f"freshet.v1.{row.name.title()}Service"


def test_addresses_in_settings_are_rewritten_for_every_part() -> None:
    hosts = re.search(r'\$hosts := "([^"]+)"', TEMPLATES["_compose.tpl"])
    assert hosts is not None
    assert set(hosts[1].split("|")) == set(read_compose(environ={}))
