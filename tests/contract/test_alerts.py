"""Alerts, runbooks and dashboards speak of what the processes export, and of each other; promtool tests the alerts."""

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_client import CollectorRegistry

from services.algorithms.encoding.incremental_encoding import CacheCounts
from services.candidates.metrics import CandidatesMetrics
from services.catalogue.changes import MergeReports
from services.contracts.processes import PROCESSES
from services.encoder.metrics import EncoderMetrics
from services.gateway.metrics import GatewayMetrics
from services.generator.metrics import GeneratorMetrics
from services.platform.rpc.guard import RpcMetrics
from services.platform.stream.follower import TurnClock
from services.refresher.metrics import RefresherMetrics
from services.reranker.handlers import RerankerMetrics
from services.stack.folders import REPOSITORY

FOLDER = REPOSITORY / "deploy" / "dashboards"
RUNBOOKS = REPOSITORY / "docs" / "operate" / "runbooks"
OPERATIONS = REPOSITORY / "docs" / "operate" / "operations.md"
GROUPS = yaml.safe_load((FOLDER / "alerts.yml").read_text(encoding="utf-8"))["groups"]
RULES = [rule for group in GROUPS for rule in group["rules"]]
ALERTS = [rule for rule in RULES if "alert" in rule]
TESTS = yaml.safe_load((FOLDER / "alerts.test.yml").read_text(encoding="utf-8"))["tests"]
DASHBOARDS = {path.stem: json.loads(path.read_text(encoding="utf-8")) for path in sorted(FOLDER.glob("*.json"))}

# Of the exporters in compose.observability.yml and of the inference server, at the versions that are named there.
OTHERS = {
    *("up", "redis_up", "redis_memory_used_bytes", "redis_memory_max_bytes", "redis_evicted_keys_total"),
    *("kafka_brokers", "kafka_topic_partition_current_offset"),
    *("node_filesystem_avail_bytes", "node_filesystem_size_bytes"),
    *("nv_inference_request_success", "nv_inference_request_failure", "nv_inference_pending_request_count"),
    *("nv_inference_queue_duration_us", "nv_inference_compute_infer_duration_us"),
}
_WORDS = {"and", "or", "unless", "by", "on", "ignoring", "group_left"}
_SUFFIXES = {"counter": ("_total",), "histogram": ("_bucket", "_count", "_sum"), "gauge": ("",)}


def exported() -> set[str]:
    """The names of every series that the processes export."""
    registry = CollectorRegistry()
    gateway, encoder, refresher = GatewayMetrics(registry), EncoderMetrics(registry), RefresherMetrics(registry)
    candidates, reranker, generator = (
        CandidatesMetrics(registry),
        RerankerMetrics(registry),
        GeneratorMetrics(registry),
    )
    clock = TurnClock()
    for watching in (gateway, encoder, refresher, candidates.catalogue, reranker.catalogue):
        watching.watch_turns(clock)
    generator.watch_turns("items", clock)
    generator.watch_merges(MergeReports([]))
    encoder.watch_cache(CacheCounts)
    for process in PROCESSES:
        RpcMetrics(process, registry)
    return {family.name + suffix for family in registry.collect() for suffix in _SUFFIXES[family.type]}


EXPORTED = exported()
KNOWN = EXPORTED | OTHERS | {rule["record"] for rule in RULES if "record" in rule}


def names(expression: str) -> Iterator[str]:
    """The metrics of an expression; a pattern of names as each name that it stands for."""
    for pattern in re.findall(r'__name__=~"([^"]+)"', expression):
        before, choices, after = re.fullmatch(r"(\w+)\(([\w|]+)\)(\w+)", pattern).groups()
        yield from (f"{before}{choice}{after}" for choice in choices.split("|"))
    plain = re.sub(r'"[^"]*"|\[\w+\]|\b(by|on|group_left|ignoring) \([^)]*\)', "", expression)
    plain = re.sub(r"\{[^}]*\}", "", plain)
    for word in re.findall(r"(?<![\w.])([a-z_][\w:]*)\b(?! *\()", plain):
        if word not in _WORDS:
            yield word


def test_names_are_found_in_expressions() -> None:
    expression = (
        'sum by (le) (rate(a_total{b="c"}[5m])) / on (of) group_left () x:y > 1e3 and {__name__=~"d_(e|f)_g"} or h'
    )
    assert set(names(expression)) == {"a_total", "x:y", "d_e_g", "d_f_g", "h"}


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.get("alert") or rule["record"])
def test_rules_ask_for_what_is_exported(rule: dict[str, Any]) -> None:
    assert set(names(rule["expr"])) <= KNOWN
    assert set(names(rule["expr"])) or rule["expr"].startswith("vector(")


@pytest.mark.parametrize("name", DASHBOARDS)
def test_dashboards_ask_for_what_is_exported(name: str) -> None:
    board = DASHBOARDS[name]
    assert board["uid"] == f"freshet-{name}"
    assert board["title"].endswith("?")
    for panel in board["panels"]:
        assert panel["targets"], panel["title"]
        for target in panel["targets"]:
            asked = set(names(target["expr"]))
            assert asked, target["expr"]
            assert asked <= KNOWN, panel["title"]


def test_every_process_and_dependency_is_on_a_dashboard() -> None:
    shown = {
        name
        for board in DASHBOARDS.values()
        for panel in board["panels"]
        for target in panel["targets"]
        for name in names(target["expr"])
    }
    for prefix in (*(f"freshet_{process}_" for process in PROCESSES), "redis_", "kafka_", "nv_", "node_"):
        assert any(name.startswith(prefix) for name in shown), prefix


def test_every_alert_has_its_runbook_and_every_runbook_its_alert() -> None:
    assert {path.stem for path in RUNBOOKS.glob("*.md")} == {rule["alert"] for rule in ALERTS}
    for rule in ALERTS:
        assert rule["annotations"]["runbook_url"] == f"docs/operate/runbooks/{rule['alert']}.md"
        assert rule["annotations"]["summary"].endswith(".")
        assert rule["labels"]["severity"] in ("page", "ticket")


@pytest.mark.parametrize("page", sorted(RUNBOOKS.glob("*.md")), ids=lambda page: page.stem)
def test_a_runbook_says_what_it_means_what_to_do_and_when_it_clears(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert text.startswith(f"# {page.stem}\n")
    for part in ("**Users.**", "**Look.**", "**Do.**", "**Clears**"):
        assert text.count(part) == 1, part
    families = {name.removesuffix("_bucket") for name in EXPORTED}
    assert set(re.findall(r"\b(?:freshet|redis|kafka|node|nv)_\w+", text)) - KNOWN - families == set()


def test_the_objectives_of_the_page_are_those_of_the_rules() -> None:
    rows = re.findall(r"^\| (\w+) \| .* \| ([\d.]+) % \|", OPERATIONS.read_text(encoding="utf-8"), re.MULTILINE)
    said = {objective: round(1 - float(share) / 100, 6) for objective, share in rows}
    allowed = {
        rule["labels"]["objective"]: float(rule["expr"][len("vector(") : -1])
        for rule in RULES
        if rule.get("record") == "freshet:allowed_bad"
    }
    assert said == allowed
    for record in ("freshet:all:rate5m", "freshet:bad:rate5m"):
        assert {rule["labels"]["objective"] for rule in RULES if rule.get("record") == record} == set(allowed)


def test_each_objective_is_alerted_on_in_the_same_two_ways() -> None:
    forms: dict[str, set[tuple[str, str]]] = {}
    for rule in ALERTS:
        for objective in set(re.findall(r'objective="(\w+)"', rule["expr"])):
            form = " ".join(rule["expr"].replace(objective, "X").split())
            forms.setdefault(objective, set()).add((rule["labels"]["severity"], form))
    assert len(forms) == 4
    (same,) = {frozenset(form) for form in forms.values()}
    assert {severity for severity, _ in same} == {"page", "ticket"}


def test_each_alert_is_seen_firing_and_clearing() -> None:
    fired, cleared = set(), set()
    for test in TESTS:
        firing: set[str] = set()
        for look in test["alert_rule_test"]:
            expected = look.get("exp_alerts", [])
            fired |= {(look["alertname"], one["exp_labels"]["severity"]) for one in expected}
            if not expected and look["alertname"] in firing:
                cleared.add(look["alertname"])
            firing |= {look["alertname"]} if expected else set()
    assert fired == {(rule["alert"], rule["labels"]["severity"]) for rule in ALERTS}
    assert cleared == {rule["alert"] for rule in ALERTS}


def promtool(*arguments: str) -> None:
    beside = Path(sys.executable).parent / "promtool"
    program = str(beside) if beside.exists() else shutil.which("promtool")
    assert program, "no promtool: `make promtool` fetches it on Debian and Ubuntu; elsewhere install Prometheus"
    done = subprocess.run([program, *arguments], cwd=FOLDER, capture_output=True, text=True, timeout=250, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_prometheus_takes_its_configuration_and_the_rules() -> None:
    promtool("check", "config", "prometheus.yml")


def test_each_alert_fires_and_clears() -> None:
    promtool("test", "rules", "alerts.test.yml")
