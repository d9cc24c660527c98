"""Histories as the model sees them: known items, few shapes, half precision."""

from dataclasses import replace

import numpy as np
import pytest
from streams import VOCABULARY
from tritonclient.utils import InferenceServerException

from services.algorithms.bundles.event_schema import default_schema
from services.algorithms.encoding.actions import STRIDE, Actions
from services.contracts.stored_history import StoredEvent
from services.encoder.adapters.inference_server import InferenceServerEncoder
from services.encoder.domain import (
    EncodedStates,
    EncodeJob,
    cache_key,
    encode_job,
    length_buckets,
    pack_state,
    pad_jobs,
)
from services.platform.errors import DeadlineExceeded, DependencyUnavailable, PreconditionFailed


def history(*items: str) -> list[StoredEvent]:
    return [StoredEvent(1_000 * number + 999, 0, number, number, item) for number, item in enumerate(items)]


def test_unknown_items_are_left_out_and_prefixes_find_their_rows() -> None:
    job, rows = encode_job(VOCABULARY, "user-0", history("item-1", "new", "item-2", "new"), [0, 1, 2, 4])
    assert job is not None
    assert job.item_index.tolist() == [1, 2]
    assert job.event_time.tolist() == [0, 2]
    assert job.user_index == 7
    # Nothing precedes the first event; one and two events end with the same known item.
    assert job.positions == [0, 1]
    assert rows == {1: 0, 2: 0, 4: 1}


def acted(*actions: tuple[str, float]) -> list[StoredEvent]:
    events = history(*(f"item-{number}" for number in range(len(actions))))
    return [event._replace(type=kind, value=value) for event, (kind, value) in zip(events, actions, strict=True)]


def test_what_an_event_was_travels_with_its_item_where_the_model_reads_it() -> None:
    events = acted(("rating", 1.0), ("like", 1.0), ("skip", 1.0), ("hide", 1.0), ("", 0.0))
    actions = Actions(default_schema(), ["skip", "rating -2"])
    job, rows = encode_job(replace(VOCABULARY, actions=actions), "user-9", events, [2, 3, 4, 5])
    assert job is not None
    # Training saw no likes, which are of row 0 then, and no hides, which would read as taken.
    assert job.item_index.tolist() == [0 + 2 * STRIDE, 1, 2 + 1 * STRIDE, 4]
    assert rows == {2: 0, 3: 1, 4: 1, 5: 2}
    blind, _ = encode_job(VOCABULARY, "user-9", events, [5])
    assert blind is not None
    assert blind.item_index.tolist() == [0, 1, 4]


def test_only_jobs_of_the_stream_carry_a_key_and_it_is_the_users() -> None:
    events = history("item-1")
    plain, _ = encode_job(VOCABULARY, "user-9", events, [1])
    keyed, _ = encode_job(VOCABULARY, "user-9", events, [1], cached=True)
    assert plain is not None
    assert plain.cache_key is None
    assert keyed is not None
    assert keyed.cache_key == cache_key("user-9") != cache_key("user-8")
    assert 0 <= cache_key("user-9") < 2**63


def test_states_are_stored_in_little_endian_half_precision() -> None:
    components = np.array([[[0.5, -1.0]], [[0.25, 2.0]]], dtype=np.float32)
    packed = pack_state(EncodedStates(components, np.array([[1.0], [3.0]], dtype=np.float32)), 1, "model-1")
    assert np.frombuffer(packed.components, "<f2").tolist() == [0.25, 2.0]
    assert np.frombuffer(packed.gate, "<f2").tolist() == [3.0]
    assert (packed.model_version, packed.num_components, packed.component_width) == ("model-1", 1, 2)


def job(length: int, positions: list[int], user: int = -1) -> EncodeJob:
    return EncodeJob(np.arange(length), 10 * np.arange(length), user, positions)


def test_jobs_are_padded_at_the_end_to_one_of_few_shapes() -> None:
    arrays = pad_jobs([job(3, [2]), job(5, [1, 3, 4], user=4)], length_buckets(20))
    assert arrays["item_index"].tolist() == [[0, 1, 2, -1, -1], [0, 1, 2, 3, 4]]
    assert arrays["event_time"].tolist() == [[0, 10, 20, 20, 20], [0, 10, 20, 30, 40]]
    assert arrays["position"].tolist() == [[2, 2, 2, 2], [1, 3, 4, 4]]
    assert arrays["user_index"].tolist() == [[-1], [4]]


class Answers(InferenceServerEncoder):
    """The adapter in front of a server that answers as told."""

    def __init__(self, answer: "Exception | np.ndarray | None", max_rows: int = 64) -> None:
        super().__init__(
            "127.0.0.1:1",
            model_version="a",
            max_history=100,
            components_shape=(1, 2),
            has_gate=False,
            uses_user_index=False,
            max_rows=max_rows,
        )
        self.close()
        self.shapes: list[tuple[int, ...]] = []
        self._answer = answer
        self._client = self

    def infer(self, model: str, inputs: list[object], **_: object) -> "Answers":
        if isinstance(self._answer, Exception):
            raise self._answer
        self.shapes.append(tuple(inputs[0].shape()))  # type: ignore[attr-defined]
        self._rows = inputs[0].shape()[0]  # type: ignore[attr-defined]
        self._wanted = inputs[2].shape()[1]  # type: ignore[attr-defined]
        return self

    def as_numpy(self, name: str) -> np.ndarray:
        assert name == "components"
        if self._answer is not None:
            return self._answer  # type: ignore[return-value]
        return np.full((self._rows, self._wanted, 1, 2), 0.5, dtype=np.float32)


@pytest.mark.parametrize(
    ("status", "expected"),
    [
        ("StatusCode.UNAVAILABLE", DependencyUnavailable),
        ("StatusCode.INTERNAL", DependencyUnavailable),
        ("StatusCode.DEADLINE_EXCEEDED", DeadlineExceeded),
        ("StatusCode.INVALID_ARGUMENT", PreconditionFailed),
    ],
)
def test_the_servers_errors_become_ours(status: str, expected: type[Exception]) -> None:
    with pytest.raises(expected):
        Answers(InferenceServerException("no", status=status)).encode([job(3, [2])])


@pytest.mark.parametrize("shape", [(1, 1, 2, 2), (1, 1, 1, 3), (2, 1, 1, 2)])
def test_a_server_with_another_model_is_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(PreconditionFailed, match="load the same bundle"):
        Answers(np.ones(shape, dtype=np.float32)).encode([job(3, [2])])


@pytest.mark.parametrize(("value", "length"), [(np.nan, "nan"), (3e38, "inf"), (1.0, "1.41421")])
def test_states_that_are_not_of_length_1_are_refused(value: float, length: str) -> None:
    with pytest.raises(
        PreconditionFailed, match=f"answers components: row 0, component 0 has length {length}; allowed"
    ):
        Answers(np.full((1, 1, 1, 2), value, dtype=np.float32)).encode([job(3, [2])])


def test_many_jobs_are_sent_by_length_in_bounded_calls() -> None:
    server = Answers(None, max_rows=5)
    jobs = [job(length, [0]) for length in range(45, 0, -4)]
    assert len(server.encode(jobs)) == 12
    assert [shape[:2] for shape in server.shapes] == [(5, 25), (5, 50), (2, 50)]
