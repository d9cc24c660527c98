"""The notebooks of docs/guide, and the reader of Debezium's messages, on the system that the first notebook starts."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest
from freshet_client import Client
from kafka import KafkaProducer
from kafka.admin import KafkaAdminClient, NewTopic

from services.stack import Ports, Stack
from services.stack.folders import REPOSITORY

sys.path.insert(0, str(REPOSITORY / "deploy" / "site"))
import notebooks

pytestmark = pytest.mark.timeout(600)
_MOST_BYTES = 150_000


@pytest.fixture(scope="module")
def shop(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """The system of the notebook your-data, which ran."""
    folder = tmp_path_factory.mktemp("notebooks")
    stack = Stack(folder / "stack", ports=Ports.free(), profile="compact")
    stack.up(["redis"])  # from here on the folder has these ports
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FRESHET_GATEWAY", stack.address("gateway"))
        patch.setenv("PATH", os.environ["PATH"])  # which `run` changes
        try:
            check(notebooks.run("your-data", folder))
            yield stack
        finally:
            command = [sys.executable, "-m", "services.cli", "down", "--state", str(folder / "stack")]
            subprocess.run(command, check=False, timeout=100)


def check(notebook: dict) -> None:
    """It plots as the stored one does, and nothing was printed as a warning."""
    outputs = [output for cell in notebook["cells"] for output in cell.get("outputs", [])]
    assert sum("image/png" in output.get("data", {}) for output in outputs) >= 1
    assert [output["text"] for output in outputs if "Warning" in output.get("text", "")] == []


def test_messages_of_debezium_become_the_users_history(shop: Stack) -> None:
    recorded = REPOSITORY / "tests" / "unit" / "docs" / "debezium.jsonl"
    messages = [json.loads(line) for line in recorded.read_text().splitlines()]
    admin = KafkaAdminClient(bootstrap_servers=shop.kafka_bootstrap)
    admin.create_topics([NewTopic(name, 1, 1) for name in {one["topic"] for one in messages}])
    admin.close()
    producer = KafkaProducer(bootstrap_servers=shop.kafka_bootstrap, acks="all")
    for one in messages:
        key, value = (None if one[name] is None else json.dumps(one[name]).encode() for name in ("key", "value"))
        producer.send(one["topic"], key=key, value=value).get(timeout=30)
    producer.close()
    program = REPOSITORY / "docs" / "guide" / "examples" / "debezium.py"
    reads = subprocess.Popen([sys.executable, program, shop.kafka_bootstrap, shop.address("gateway")])
    try:
        with Client(shop.address("gateway")) as client:
            deadline, events = time.monotonic() + 60, []
            while events != [("260", 5.0)] and time.monotonic() < deadline:
                assert reads.poll() is None
                time.sleep(0.1)
                events = [(event.item_id, event.value) for event in client.user("1217").events]
        assert events == [("260", 5.0)]
    finally:
        reads.terminate()
        reads.wait()


def test_the_notebooks_run(shop: Stack) -> None:
    folder = shop.place.state.root.parent
    check(notebooks.run("events", folder))
    check(notebooks.run("models", folder))
    assert [part.name for part in shop.status() if part.running] == []


def test_the_stored_notebooks_are_small_and_have_their_outputs() -> None:
    paths = sorted(notebooks.FOLDER.glob("*.ipynb"))
    assert [path.stem for path in paths] == sorted(notebooks.NAMES)
    for path in paths:
        assert path.stat().st_size < _MOST_BYTES
        stored = json.loads(path.read_text(encoding="utf-8"))
        assert all(cell["execution_count"] for cell in stored["cells"] if cell["cell_type"] == "code")
        assert "data:image/png;base64," in notebooks.markdown(path)
