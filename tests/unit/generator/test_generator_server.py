"""The generator process over real gRPC, from bundles on disk: three sources, each of which may be missing."""

import re
import threading
import unittest.mock
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc
import pytest
import pytest_asyncio
from freshet.v1 import common_pb2, generator_pb2, generator_pb2_grpc
from generator_scene import Running, click, make_running, write_catalogue, write_text
from serving_scene import served
from structlog.testing import capture_logs

from services.generator.domain.requests import LEXICAL, PHRASES, TEXT_MOL, Asked, Scored

SOURCES = (TEXT_MOL, PHRASES, LEXICAL)


class Asking:
    """A served process, and one call for each source."""

    def __init__(self, running: Running, stub: Any) -> None:
        self.running, self.stub = running, stub

    async def find(self, query: str, *sources: str, k: int = 3, timeout: float = 10, **wanted: Any) -> Any:
        wants = common_pb2.Filter(**wanted)
        request = generator_pb2.FindByWordsRequest(query=query, k=k, filter=wants, sources=sources)
        return await self.stub.FindByWords(request, timeout=timeout)

    async def ask(self, source: str, query: str, k: int = 3, **wanted: Any) -> Any:
        (answer,) = (await self.find(query, source, k=k, **wanted)).answers
        return answer

    async def ids(self, source: str, query: str, k: int = 3, **wanted: Any) -> list[str]:
        answer = await self.ask(source, query, k, **wanted)
        assert answer.status == 0, answer.reason
        return [item.item_id for item in answer.items]

    async def refusal(self, source: str, query: str, k: int = 3, **wanted: Any) -> grpc.aio.AioRpcError:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await self.ask(source, query, k, **wanted)
        return caught.value

    async def info(self) -> Any:
        return await self.stub.GetGeneratorInfo(generator_pb2.GetGeneratorInfoRequest(), timeout=10)


async def _asking(running: Running) -> AsyncIterator[Asking]:
    add = generator_pb2_grpc.add_GeneratorServiceServicer_to_server
    async with served("generator", running.settings, add, running.servicer, running.registry) as channel:
        yield Asking(running, generator_pb2_grpc.GeneratorServiceStub(channel))
    await running.servicer.close()


@pytest_asyncio.fixture
async def whole(films: Path) -> AsyncIterator[Asking]:
    async for asking in _asking(make_running(films)):
        yield asking


@pytest_asyncio.fixture
async def bare(films: Path) -> AsyncIterator[Asking]:
    async for asking in _asking(make_running(films, text="absent")):
        yield asking


async def test_each_source_finds_what_shares_words_with_the_query(whole: Asking) -> None:
    assert (await whole.ids(LEXICAL, "space odyssey"))[0] == "3"
    assert (await whole.ids(TEXT_MOL, "space odyssey"))[0] == "3"
    assert (await whole.ids(PHRASES, "space odyssey"))[0] == "3"


async def test_answers_say_what_they_are_of(whole: Asking) -> None:
    found = await whole.find("toy story")
    assert found.text_version == whole.running.sources.text_version
    assert [answer.source for answer in found.answers] == list(SOURCES)
    assert found.answers[1].items[0].identifier == "Toy Story"
    for answer in found.answers:
        scores = [item.score for item in answer.items]
        assert scores == sorted(scores, reverse=True)


async def test_only_catalogue_identifiers_are_generated_whatever_is_asked(whole: Asking) -> None:
    titles = {"Toy Story", "Space Jam", "A Space Odyssey", "The Lonely Dog", "Cat and Dog", "Red Story"}
    for query in ("zzzz", "galaxy film", "😀", "select * from items", "dog " * 200):
        answer = await whole.ask(PHRASES, query, k=100)
        assert {item.identifier for item in answer.items} <= titles


BAD_QUERIES = {
    "empty": ("", "query=.*allowed: 1-1024 bytes"),
    "too long": ("x" * 1025, "query=.*1025 bytes.*allowed: 1-1024 bytes"),
    "too long in bytes": ("é" * 600, "query=.*1200 bytes"),
    "white space": ("  \u2003", "query=.*allowed: words"),
    "control characters": ("space\x00jam", "query=.*allowed: no control characters"),
}


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize(("query", "says"), BAD_QUERIES.values(), ids=BAD_QUERIES)
async def test_a_bad_query_is_refused_naming_field_value_and_range(
    whole: Asking, source: str, query: str, says: str
) -> None:
    error = await whole.refusal(source, query)
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert re.search(says, error.details() or "")


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("query", ["\u200b\u200d", "\ufeff"])
async def test_a_query_that_tokenizes_to_nothing_has_an_empty_answer(whole: Asking, source: str, query: str) -> None:
    assert await whole.ids(source, query) == []


@pytest.mark.parametrize("source", SOURCES)
async def test_filters_act_inside_the_search(whole: Asking, source: str) -> None:
    assert await whole.ids(source, "space jam", k=1) == ["2"]
    assert (await whole.ids(source, "space jam", deny_item_ids=["2"]))[0] != "2"
    assert await whole.ids(source, "space jam", allow_item_ids=["3", "unknown"]) == ["3"]
    assert set(await whole.ids(source, "space jam dog story", k=9, allow_categories=["Comedy"])) <= {"2", "5"}
    assert not {"1", "2"} & set(await whole.ids(source, "space toy story", k=9, deny_categories=["Animation"]))
    assert await whole.ids(source, "space", allow_categories=["no such"]) == []


async def test_a_new_item_is_found_by_its_words_and_its_identifier_at_once(whole: Asking) -> None:
    assert await whole.ids(LEXICAL, "saga") == []
    whole.running.put("99", "New Saga")
    assert await whole.ids(LEXICAL, "saga") == ["99"]
    found = await whole.ask(PHRASES, "new saga", k=1)
    assert [(item.item_id, item.identifier) for item in found.items] == [("99", "New Saga")]


async def test_a_new_item_is_found_by_text_once_somebody_chose_it(whole: Asking) -> None:
    whole.running.put("99", "New Saga", categories=("Comedy",))
    assert "99" not in await whole.ids(TEXT_MOL, "galaxy film", k=9)
    whole.running.take(click(0, "galaxy film", "99"))
    assert (await whole.ids(TEXT_MOL, "galaxy film", k=9))[0] == "99"
    assert await whole.ids(TEXT_MOL, "galaxy film", k=9, deny_categories=["Comedy"]) != []
    assert "99" not in await whole.ids(TEXT_MOL, "galaxy film", k=9, deny_categories=["Comedy"])


@pytest.mark.parametrize("source", SOURCES)
async def test_a_withdrawn_item_is_not_answered_until_it_is_put_again(whole: Asking, source: str) -> None:
    whole.running.put("2", "Space Jam", withdrawn=True)
    assert "2" not in await whole.ids(source, "space jam", k=9)
    whole.running.put("2", "Space Jam")
    assert "2" in await whole.ids(source, "space jam", k=9)
    whole.running.put("2", "Space Jam", available=False)
    assert "2" not in await whole.ids(source, "space jam", k=9)


async def test_a_renamed_item_is_found_by_its_new_words_alone(whole: Asking) -> None:
    whole.running.put("6", "Galaxy Film")
    assert await whole.ids(LEXICAL, "galaxy") == ["6"]
    assert await whole.ids(LEXICAL, "red") == []
    whole.running.put("6", "Saga")
    assert await whole.ids(LEXICAL, "galaxy") == []
    identifiers = {item.identifier for item in (await whole.ask(PHRASES, "galaxy saga film", k=9)).items}
    assert "Saga" in identifiers
    assert "Galaxy Film" not in identifiers


async def test_a_change_sets_the_next_offset_of_the_clicks(whole: Asking) -> None:
    whole.running.take(click(0, "galaxy film", "5"))
    whole.running.put("99", "New Saga")
    assert whole.running.sample("freshet_generator_next_offset", topic="search-clicks") == 1
    assert [(at.partition, at.offset) for at in (await whole.info()).clicks] == [(0, 1)]


async def test_a_title_that_no_identifier_can_hold_is_found_by_words_and_counted(whole: Asking) -> None:
    whole.running.put("99", "Qx Wz Vk Jp Hq Zj Xw Kq")
    assert await whole.ids(LEXICAL, "hq") == ["99"]
    assert whole.running.sample("freshet_generator_records_total", kind="title_left_out") == 1


async def test_several_sources_in_one_call_answer_as_each_does_alone(whole: Asking) -> None:
    found = await whole.find("space toy", k=5)
    assert [answer.source for answer in found.answers] == ["text_mol", "phrases", "lexical"]
    alone = [await whole.ask(source, "space toy", 5) for source in SOURCES]
    for answer, single in zip(found.answers, alone, strict=True):
        assert (answer.status, answer.reason) == (0, "")
        assert answer.milliseconds > 0
        assert list(answer.items) == list(single.items)
    assert found.answers[1].items[0].identifier != ""
    assert found.text_version == whole.running.sources.text_version
    assert [answer.source for answer in (await whole.find("toy", "lexical", "phrases")).answers] == [
        "lexical",
        "phrases",
    ]


@pytest.mark.parametrize("source", SOURCES)
async def test_nothing_is_answered_before_items_and_clicks_were_read_to_their_ends(films: Path, source: str) -> None:
    waiting_for = {"items", "clicks"}
    async for asking in _asking(make_running(films, waiting_for=waiting_for)):
        for name in ("items", "clicks"):
            answer = await asking.ask(source, "space jam")
            assert answer.status == grpc.StatusCode.UNAVAILABLE.value[0]
            assert "still reading items and clicks" in answer.reason
            waiting_for.discard(name)
        assert (await asking.ids(source, "space jam"))[0] == "2"


async def test_a_source_that_is_not_loaded_costs_the_joint_answer_itself_alone(bare: Asking) -> None:
    found = await bare.find("space jam")
    assert [answer.status for answer in found.answers] == [grpc.StatusCode.FAILED_PRECONDITION.value[0]] * 2 + [0]
    assert "source phrases is not loaded" in found.answers[1].reason
    assert found.answers[2].items[0].item_id == "2"


@pytest.mark.parametrize(
    ("query", "sources", "says"), [("", [], "query=.*1-1024 bytes"), ("space", ["mol"], "sources=.*mol.*lexical")]
)
async def test_a_joint_call_is_refused_whole_for_what_no_source_can_read(
    whole: Asking, query: str, sources: list[str], says: str
) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await whole.find(query, *sources)
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert re.search(says, caught.value.details() or "")


class CountedWords(str):
    """A query that counts how often it is looked through."""

    looks = 0

    def isspace(self) -> bool:
        self.looks += 1
        return super().isspace()


async def test_the_words_of_a_joint_call_are_checked_once_however_many_sources_are_asked(whole: Asking) -> None:
    request = SimpleNamespace(query=CountedWords("space jam"), k=3, filter=common_pb2.Filter(), sources=())
    found = await whole.running.servicer.FindByWords(request, None)
    assert [answer.status for answer in found.answers] == [0, 0, 0]
    assert request.query.looks == 1


async def test_a_slow_source_has_no_answer_and_the_others_have_theirs(whole: Asking) -> None:
    held = threading.Event()

    def find(asked: Sequence[Asked]) -> list[Scored]:
        held.wait(30)
        return []

    slow = whole.running.servicer.matches[PHRASES].source
    assert slow is not None
    with unittest.mock.patch.object(slow, "find", find):
        found = await whole.find("space jam", timeout=0.5)
        held.set()
    assert [answer.status for answer in found.answers] == [0, grpc.StatusCode.DEADLINE_EXCEEDED.value[0], 0]
    assert "phrases: no answer within" in found.answers[1].reason


async def test_without_a_text_bundle_titles_are_found_and_the_others_say_why(bare: Asking) -> None:
    assert (await bare.ids(LEXICAL, "space odyssey"))[0] == "3"
    for source in (TEXT_MOL, PHRASES):
        answer = await bare.ask(source, "space")
        assert answer.status == grpc.StatusCode.FAILED_PRECONDITION.value[0]
        assert f"source {source} is not loaded: there is no text bundle at" in answer.reason
    info = await bare.info()
    assert {one.source: one.is_loaded for one in info.sources} == {"text_mol": False, "phrases": False, "lexical": True}
    assert info.text_version.startswith("titles.")
    assert not info.clicks


async def test_info_says_what_is_loaded_how_large_and_how_far(whole: Asking) -> None:
    whole.running.put("99", "New Saga")
    whole.running.take(click(0, "space", "3"), click(1, "space", "2"))
    info = await whole.info()
    sources = {one.source: one for one in info.sources}
    assert all(one.is_loaded and one.num_bytes > 0 for one in sources.values())
    assert {name: one.num_documents for name, one in sources.items()} == {"text_mol": 6, "phrases": 7, "lexical": 8}
    assert info.vocabulary_size > 100
    assert info.num_remembered_clicks == 2
    assert [(at.partition, at.offset) for at in info.clicks] == [(0, 2)]


@pytest.mark.parametrize("parts", [("text_mol",), ("phrases",), ()])
async def test_parts_of_a_text_bundle_load_apart(tmp_path: Path, parts: tuple[str, ...]) -> None:
    write_catalogue(tmp_path / "bundle")
    write_text(tmp_path / "text", tmp_path, parts=parts)
    running = make_running(tmp_path)
    loaded = {one.source for one in running.servicer.info().sources if one.is_loaded}
    assert loaded == {"lexical", *parts}
    reasons = {one.source: one.reason for one in running.servicer.info().sources if not one.is_loaded}
    assert all(f"has no part {source}" in reason for source, reason in reasons.items())
    await running.servicer.close()


@pytest.mark.parametrize("name", ["phrases/generator", "text_mol/encoder.onnx"])
async def test_a_damaged_text_bundle_leaves_the_catalogues_words(tmp_path: Path, name: str) -> None:
    write_catalogue(tmp_path / "bundle")
    write_text(tmp_path / "text", tmp_path)
    path = tmp_path / "text" / name
    path.write_bytes(path.read_bytes()[:-20])
    running = make_running(tmp_path)
    by_source = {one.source: one for one in running.servicer.info().sources}
    assert by_source["lexical"].is_loaded
    assert name.rpartition("/")[2] in by_source["phrases"].reason
    assert not by_source["text_mol"].is_loaded
    await running.servicer.close()


async def test_a_merge_that_fails_is_said_once_and_shown_until_one_succeeds(films: Path) -> None:
    running = make_running(films)
    assert running.sources.text is not None
    merge = running.sources.text.merges[0]
    merge.error = RuntimeError("no room")
    with capture_logs() as logs:
        running.put("99", "New Saga")
        running.take(click(0, "galaxy film", "99"))
        assert running.sample("freshet_generator_merge_failed") == 1
        merge.error = None
        running.put("99", "New Saga")
    said = [entry["event"] for entry in logs if entry["event"].startswith("merge_")]
    assert said == ["merge_failed", "merge_recovered"]
    assert running.sample("freshet_generator_merge_failed") == 0
    await running.servicer.close()
