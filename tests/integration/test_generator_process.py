"""The generator as a process on a real broker: what a click, an undo, a new title, SIGKILL and a restart leave."""

import json
import shutil
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import pytest
from freshet.v1 import generator_pb2, generator_pb2_grpc
from kafka import KafkaConsumer, TopicPartition

from services.contracts.topics import ensure_topics
from services.contracts.topics.dead_letters import SUFFIX
from services.contracts.topics.items import ITEMS, CatalogueItem, encode_item
from services.contracts.topics.search_clicks import SEARCH_CLICKS
from services.platform.stream.kafka import BulkProducer, Record
from services.stack import Stack
from tests.unit.generator.generator_scene import click, forget, undo, write_catalogue, write_text

pytestmark = [pytest.mark.integration, pytest.mark.timeout(240)]

DEADLINE_S = 30.0
STATUSES = {status.value[0]: status for status in grpc.StatusCode}


class Generator:
    """The running process, its topics, and one call for each source."""

    def __init__(self, stack: Stack) -> None:
        self.stack = stack
        self.producer = BulkProducer(stack.kafka_bootstrap)
        # Places of `interactions` that no other test of this session names: the topic is the session's.
        self.first = time.time_ns() // 1_000_000

    def call(self, method: str, request: Any) -> Any:
        with grpc.insecure_channel(self.stack.address("generator")) as channel:
            stub = generator_pb2_grpc.GeneratorServiceStub(channel)
            return getattr(stub, method)(request, timeout=5, wait_for_ready=True)

    def info(self) -> Any:
        return self.call("GetGeneratorInfo", generator_pb2.GetGeneratorInfoRequest())

    def find(self, source: str, query: str) -> Any:
        request = generator_pb2.FindByWordsRequest(query=query, k=6, sources=[source])
        (answer,) = self.call("FindByWords", request).answers
        return answer

    def items(self, source: str, query: str) -> Any:
        answer = self.find(source, query)
        assert answer.status == 0, answer.reason
        return answer.items

    def text(self, query: str) -> list[str]:
        return [item.item_id for item in self.items("text_mol", query)]

    def words(self, query: str) -> list[str]:
        return [item.item_id for item in self.items("lexical", query)]

    def generated(self, query: str) -> list[str]:
        return [item.identifier for item in self.items("phrases", query)]

    def write(self, *values: bytes) -> int:
        """Records of `search-clicks`; the offset behind the last one, once it is in the answers."""
        places = self.producer.send_many([Record(SEARCH_CLICKS, b"key", value) for value in values])
        behind = places[-1][1] + 1
        self.wait(lambda: self.info().clicks[0].offset >= behind)
        return behind

    def wait(self, holds: Any) -> None:
        deadline = time.monotonic() + DEADLINE_S
        while not holds():
            assert time.monotonic() < deadline, "it did not come true"
            time.sleep(0.05)

    def digests(self) -> list[str]:
        """What each start of the process said once it had caught up with the clicks."""
        lines = self.stack.log("generator").read_text(encoding="utf-8").splitlines()
        events = [json.loads(line) for line in lines if "clicks_caught_up" in line]
        return [event["digest"] for event in events]

    def restart(self) -> None:
        self.stack.stop("generator")
        self.stack.start("generator")


@pytest.fixture
def generator(_session_stack: Stack, tmp_path: Path) -> Iterator[Generator]:
    """Alone with the broker, over the films' bundles; other parts of the session's stack keep theirs."""
    stack, before = _session_stack, _session_stack.place
    stack.up(["kafka"])
    ensure_topics(stack.kafka_bootstrap)
    stack.stop("generator")
    write_text(tmp_path / "text", tmp_path)
    stack.place = replace(before, text=tmp_path / "text", bundle=Path(write_catalogue(tmp_path / "bundle")))
    stack.start("generator")
    running = Generator(stack)
    try:
        yield running
        running.write(forget("u", running.first + 1_000), forget("v", running.first + 1_000))
    finally:
        running.producer.close(1.0)
        stack.stop("generator")
        stack.place = before


def test_a_click_is_in_the_next_answers_and_an_undo_takes_it_out(generator: Generator) -> None:
    plain = generator.text("galaxy film")
    assert plain[0] != "5"
    at = generator.first
    generator.write(click(at, "galaxy film", "5"))
    assert generator.text("galaxy film")[0] == "5"
    assert generator.text("galaxy movie")[0] == "5"
    generator.write(undo(at + 1, at))
    assert generator.text("galaxy film") == plain


def test_a_new_title_is_found_by_words_and_generated_and_a_withdrawn_one_is_not(generator: Generator) -> None:
    def put(**fields: Any) -> None:
        item = CatalogueItem(item_id="words-99", title="New Saga", **fields)
        generator.producer.send_many([Record(ITEMS, b"words-99", encode_item(item))])

    put()
    generator.wait(lambda: generator.words("saga") == ["words-99"])
    generator.wait(lambda: generator.generated("new saga")[0] == "New Saga")
    put(withdrawn=True)
    generator.wait(lambda: generator.words("saga") == [])
    generator.wait(lambda: "New Saga" not in generator.generated("new saga"))


def test_killed_while_it_is_asked_it_comes_back_with_every_click_before_it_is_ready(generator: Generator) -> None:
    at = generator.first
    clicks = [
        click(at + row, query, item) for row, (query, item) in enumerate([("galaxy film", "5"), ("red", "1")] * 20)
    ]
    behind = generator.write(*clicks, undo(at + 100, at + 3), forget("v", at + 50))
    remembered, best = generator.info().num_remembered_clicks, generator.text("galaxy film")
    generator.restart()
    whole = generator.digests()[-1]
    failures: list[grpc.StatusCode] = []
    answered, stopped = [0], threading.Event()

    def ask() -> None:
        with grpc.insecure_channel(generator.stack.address("generator")) as channel:
            stub = generator_pb2_grpc.GeneratorServiceStub(channel)
            while not stopped.is_set():
                try:
                    request = generator_pb2.FindByWordsRequest(query="galaxy film", k=6, sources=["text_mol"])
                    (answer,) = stub.FindByWords(request, timeout=2).answers
                    if answer.status:
                        failures.append(STATUSES[answer.status])
                        continue
                    assert [item.item_id for item in answer.items] == best
                    answered[0] += 1
                except grpc.RpcError as error:
                    failures.append(error.code())
                    stopped.wait(0.02)

    asking = threading.Thread(target=ask)
    asking.start()
    try:
        generator.wait(lambda: answered[0] > 10)
        generator.stack.kill("generator")
        generator.wait(lambda: len(failures) > 3)
        generator.stack.start("generator")
        info, again = generator.info(), answered[0]
        generator.wait(lambda: answered[0] > again + 10)
    finally:
        stopped.set()
        asking.join()
    assert set(failures) <= {grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED}
    assert info.clicks[0].offset >= behind
    assert info.num_remembered_clicks == remembered
    assert generator.digests()[-1] == whole
    assert generator.text("galaxy film") == best


def test_an_unreadable_click_is_set_aside_once_whatever_restarts(generator: Generator) -> None:
    generator.write(b"unreadable", click(generator.first, "galaxy film", "5"))
    generator.restart()
    generator.restart()
    assert generator.text("galaxy film")[0] == "5"
    consumer = KafkaConsumer(bootstrap_servers=generator.stack.kafka_bootstrap, auto_offset_reset="earliest")
    try:
        partition = TopicPartition(SEARCH_CLICKS + SUFFIX, 0)
        consumer.assign([partition])
        consumer.seek_to_beginning(partition)
        end = consumer.end_offsets([partition])[partition]
        letters = []
        while consumer.position(partition) < end:
            letters += [record for batch in consumer.poll(timeout_ms=500).values() for record in batch]
    finally:
        consumer.close()
    mine = [record for record in letters if record.value == b"unreadable"]
    assert len(mine) == 1
    assert b"value=" in dict(mine[0].headers)["freshet-reason"]


def test_without_a_text_bundle_it_serves_the_catalogues_titles(generator: Generator, tmp_path: Path) -> None:
    generator.stack.stop("generator")
    shutil.rmtree(tmp_path / "text")
    generator.stack.start("generator")
    info = generator.info()
    assert {one.source: one.is_loaded for one in info.sources} == {"text_mol": False, "phrases": False, "lexical": True}
    assert STATUSES[generator.find("text_mol", "galaxy film").status] is grpc.StatusCode.FAILED_PRECONDITION
    scratch = tmp_path / "again"
    scratch.mkdir()
    write_text(tmp_path / "text", scratch)
    generator.restart()
