"""Every port that carries state has a suite in tests/contract, run on its fake and on its real adapter alike.

A port is a Protocol of what is deployed; a suite covers the ports that it imports. A port without one stands here with
the reason.
"""

import ast
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

# Through these nothing is written that is read back through the same port.
WITHOUT_SUITE = {
    # Questions to other processes, one RPC each. The fakes answer what a test sets; what crosses the wire is checked in
    # tests/unit/gateway/test_adapters.py.
    "services.gateway.ports.Encoder": "a question to another process",
    "services.gateway.ports.Candidates": "a question to another process",
    "services.gateway.ports.Reranker": "a question to another process",
    "services.gateway.ports.TextSources": "a question to another process",
    "services.gateway.ports.Refreshers": "a question to another process",
    "services.gateway.adapters.processes.Peer": "both ways of asking are compared in tests/unit/compact",
    "services.platform.rpc.guard.Door": "one implementation: tests/unit/gateway/test_door.py",
    "services.platform.http.connections.LimitedConnection": "asyncio's word for a connection; no port",
    "services.gateway.ports.StreamStatus": "two flags, set by hand in the fake",
    "services.gateway.ports.StreamEnds": "a question; the real one is asked in tests/contract/test_gateway_topics.py",
    "services.gateway.ports.Parts": "questions to other processes: tests/unit/gateway/test_health.py",
    "services.gateway.ports.DeadLetterLog": "the real one is asked in tests/integration/test_dead_letters_on_kafka.py",
    "services.gateway.ports.ShownAnswers": "as DeadLetterLog",
    # Models: functions of their input.
    "services.encoder.ports.Keeper": "told only",
    "services.encoder.ports.SequenceEncoder": "what it keeps never shows in an answer (tests/unit/encoder)",
    "services.generator.domain.requests.TextSource": "a function of its query; the sources have no fake",
    # What a follower of topics calls: they are told, and nobody asks them through the port. The fakes record calls.
    "services.catalogue.follower.Listener": "told only",
    "services.catalogue.changes.Remembered": "told only",
    "services.catalogue.snapshots.Snapshotted": "told only; tests use the real one",
}


def ports() -> set[str]:
    """The Protocols under services/, apart from the batch jobs' and the library's own."""
    found = set()
    for path in sorted((ROOT / "services").rglob("*.py")):
        folder = path.relative_to(ROOT / "services").parts[0]
        if folder in ("offline", "algorithms"):
            continue
        module = ".".join(path.relative_to(ROOT).with_suffix("").parts)
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef) and any("Protocol" in ast.unparse(base) for base in node.bases):
                found.add(f"{module}.{node.name}")
    return found


def imported_by_suites() -> set[str]:
    """What the modules of tests/contract import, by full name."""
    return {
        f"{node.module}.{alias.name}"
        for path in sorted((ROOT / "tests" / "contract").glob("test_*.py"))
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }


def test_every_port_has_a_contract_suite_or_a_reason_why_not() -> None:
    covered, all_ports = imported_by_suites() & ports(), ports()
    assert sorted(all_ports - covered - WITHOUT_SUITE.keys()) == [], "write a suite in tests/contract, or say why not"
    assert sorted(WITHOUT_SUITE.keys() - all_ports) == [], "there are no such ports"
    assert sorted(WITHOUT_SUITE.keys() & covered) == [], "these have a suite"
