"""Jobs with a cache key, to a server whose model keeps keys and values, and to one whose model keeps nothing."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from tritonclient.utils import InferenceServerException

from services.encoder.adapters.inference_server import InferenceServerEncoder
from services.encoder.domain import EncodeJob
from services.platform.errors import DependencyUnavailable


class KeepingServer:
    """Answers each row with its length and key, and says that all but the last event of it were kept."""

    def __init__(self, encoder: InferenceServerEncoder, *, keeps: bool = True) -> None:
        encoder.close()
        encoder._client = self
        names = ["item_index", "event_time", "position", *(["cache_key"] if keeps else [])]
        self._config = SimpleNamespace(config=SimpleNamespace(input=[SimpleNamespace(name=name) for name in names]))
        self.calls: list[dict[str, np.ndarray]] = []
        self.config_asked = 0
        self.fails = False

    def get_model_config(self, *_: object, **__: object) -> Any:
        self.config_asked += 1
        return self._config

    def infer(self, model: str, inputs: list[Any], **_: object) -> "KeepingServer":
        if self.fails:
            raise InferenceServerException("gone", status="StatusCode.UNAVAILABLE")
        arrays = {
            tensor.name(): np.frombuffer(tensor._get_content(), np.int64).reshape(tensor.shape()) for tensor in inputs
        }
        self.calls.append(arrays)
        return self

    def as_numpy(self, name: str) -> np.ndarray:
        arrays = self.calls[-1]
        lengths = (arrays["item_index"] >= 0).sum(axis=1)
        if name == "kept":
            return np.stack([np.maximum(lengths - 1, 0), np.full_like(lengths, 1_000)], axis=1)
        keys = arrays.get("cache_key", np.full((len(lengths), 1), -1))[:, 0]
        answer = (np.stack([lengths, keys], axis=1) / 1_024).astype(np.float32)
        return np.broadcast_to(answer[:, None, None, :], (len(lengths), arrays["position"].shape[1], 1, 2)).copy()


def encoder(max_rows: int = 64) -> InferenceServerEncoder:
    return InferenceServerEncoder(
        "127.0.0.1:1",
        model_version="a",
        max_history=100,
        components_shape=(1, 2),
        has_gate=False,
        uses_user_index=False,
        max_rows=max_rows,
    )


def job(length: int, key: int | None) -> EncodeJob:
    return EncodeJob(np.arange(length), 10 * np.arange(length), -1, [length - 1], cache_key=key)


def answers(adapter: InferenceServerEncoder, jobs: list[EncodeJob]) -> list[tuple[int, int]]:
    return [tuple((1_024 * states.components[0, 0]).astype(int).tolist()) for states in adapter.encode(jobs)]


def test_keyed_jobs_go_in_order_and_apart_from_the_others_which_are_sorted() -> None:
    adapter = encoder(max_rows=3)
    server = KeepingServer(adapter)
    keyed = [job(length, key) for length, key in ((40, 7), (30, 7), (90, 8), (2, 9))]
    plain = [job(length, None) for length in (60, 50, 40, 30, 20, 10, 9, 8, 7)]
    jobs = [one for pair in zip(keyed, plain, strict=False) for one in pair] + plain[4:]
    assert answers(adapter, jobs) == [
        (len(one.item_index), -1 if one.cache_key is None else one.cache_key) for one in jobs
    ]
    with_key = [call["cache_key"][:, 0].tolist() for call in server.calls if "cache_key" in call]
    assert with_key == [[7, 7, 8], [9]]
    without = [(call["item_index"] >= 0).sum(axis=1).tolist() for call in server.calls if "cache_key" not in call]
    assert without == [[7, 8, 9], [10, 20, 30], [40, 50, 60]]
    assert server.config_asked == 1


def test_what_the_server_kept_is_counted() -> None:
    adapter = encoder()
    KeepingServer(adapter)
    adapter.encode([job(10, 1), job(1, 2), job(5, None)])
    counts = adapter.cache_counts()
    assert (counts.hits, counts.misses, counts.events, counts.reused_events, counts.bytes) == (1, 1, 11, 9, 1_000)


def test_a_server_that_keeps_nothing_is_sent_whole_jobs_without_keys() -> None:
    adapter = encoder()
    server = KeepingServer(adapter, keeps=False)
    assert answers(adapter, [job(10, 1)]) == [(10, -1)]
    adapter.drop([1])
    assert ["cache_key" in call for call in server.calls] == [False]
    assert adapter.cache_counts().misses == 0


def test_dropping_a_user_sends_an_empty_window_under_the_key() -> None:
    adapter = encoder(max_rows=2)
    server = KeepingServer(adapter)
    adapter.drop([4, 5, 6])
    assert [call["cache_key"][:, 0].tolist() for call in server.calls] == [[4, 5], [6]]
    assert all((call["item_index"] == -1).all() for call in server.calls)
    assert adapter.cache_counts().misses == 0


def test_after_an_error_the_server_is_asked_anew_what_it_is() -> None:
    adapter = encoder()
    server = KeepingServer(adapter)
    adapter.encode([job(3, 1)])
    server.fails = True
    with pytest.raises(DependencyUnavailable):
        adapter.encode([job(4, 1)])
    server.fails = False
    adapter.encode([job(4, 1)])
    assert server.config_asked == 2


def test_a_closed_connection_is_unavailable_and_no_bug_for_who_still_encodes() -> None:
    adapter = encoder()
    adapter.close()
    for call in (adapter.check, lambda: adapter.encode([job(1, None)]), lambda: adapter.encode([job(1, 7)])):
        with pytest.raises(DependencyUnavailable, match="is closed"):
            call()
