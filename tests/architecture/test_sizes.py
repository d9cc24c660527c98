"""Functions of at most 80 lines, files of at most 400, objects of at most 12 fields; what is larger says why here.

Fields are what an object sets on itself. Settings, metrics and plain values (dataclasses that set nothing) are lists of
names, as long as what they name.
"""

import ast
from collections.abc import Iterator
from pathlib import Path

SERVICES = Path(__file__).parents[2] / "services"

FUNCTIONS = {
    "algorithms/ops/mol_scores/kernel.py mol_scores_kernel": "one kernel: Triton compiles a function",
    "offline/training/run.py run_training": "the order of a training, a call a step",
}
FILES = {
    "algorithms/items/live_catalogue.py": "one writer's lock",
    "client/freshet_client/testing.py": "one gateway in memory: a method for each RPC",
    "offline/evaluation/quality/table.py": "one comparison: what runs, in which order, and its verdicts",
}
OBJECTS = {
    "algorithms/indexes/mutable/index.py MutableIndex": "what one assignment swaps, and what a merge is at",
    "algorithms/ops/mol_scores/device.py DeviceScorer": "arrays on a card and their shapes",
    "algorithms/pefa/query_feedback.py QueryFeedback": "sums, votes and what is undone, under one order of clicks",
    "client/freshet_client/testing.py FakeGateway": "all that one gateway remembers",
    "console/pages/health.py Health": "the elements that a tick changes",
    "console/pages/try_it.py TryIt": "the elements that a new list changes",
    "contracts/topic_reader.py TopicReader": "a consumer's place in several topics",
    "encoder/consumer.py Consumer": "what is due when",
    "gateway/handlers.py Handlers": "a handler for each RPC",
    "offline/backfill/memory_store.py MemoryStore": "all that Redis holds of users",
    "offline/demo/replay.py Replay": "a run's parts",
    "offline/evaluation/stream/pefa.py RefreshedItems": "an arm's settings",
    "offline/training/loop.py _Run": "a training's parts",
    "offline/training/phrases/fit.py _Training": "a training's parts",
    "platform/stream/follower.py Follower": "a thread and what it says of itself",
    "refresher/consumer.py Refresher": "what is due when",
    "refresher/domain/partition.py Partition": "all that is known of a partition",
    "refresher/handlers/publish.py Publication": "what waits to be written, and under which number",
    "user_state/leases.py RedisLeases": "a thread and what it holds",
}


def trees() -> Iterator[tuple[str, str, ast.Module]]:
    for path in sorted(SERVICES.rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        yield path.relative_to(SERVICES).as_posix(), text, ast.parse(text)


def fields_set(node: ast.ClassDef) -> set[str]:
    """What methods assign on `self`."""
    found = set()
    for one in ast.walk(node):
        targets = one.targets if isinstance(one, ast.Assign) else [one.target] if isinstance(one, ast.AnnAssign) else []
        for target in targets:
            for name in target.elts if isinstance(target, ast.Tuple) else [target]:
                if isinstance(name, ast.Attribute) and isinstance(name.value, ast.Name) and name.value.id == "self":
                    found.add(name.attr)
    return found


def test_functions_are_short() -> None:
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
    long = {
        f"{path} {node.name}"
        for path, _, tree in trees()
        for node in ast.walk(tree)
        if isinstance(node, kinds) and node.end_lineno is not None and node.end_lineno - node.lineno >= 80
    }
    assert long == FUNCTIONS.keys()


def test_files_are_short() -> None:
    assert {path for path, text, _ in trees() if text.count("\n") > 400} == FILES.keys()


def test_objects_have_few_fields() -> None:
    many = {
        f"{path} {node.name}"
        for path, _, tree in trees()
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef) and not path.endswith("/metrics.py") and len(fields_set(node)) > 12
    }
    assert many == OBJECTS.keys()
