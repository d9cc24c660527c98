"""The model port over the inference server (model "encoder"). Thread-safe.

The Python backend's model gets each job's cache key and encodes only new events; the native backend has no cache.

Letters: B batch, L padded length, M positions wanted, P_q query components, P component pairs, d component width.
"""

import threading
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from tritonclient.grpc import InferenceServerClient, InferInput, InferRequestedOutput
from tritonclient.utils import InferenceServerException

from services.algorithms.encoding.incremental_encoding import CacheCounts
from services.algorithms.scoring.states import check_sizes
from services.encoder.domain import PADDING_ITEM, EncodedStates, EncodeJob, calls, length_buckets, pad_jobs
from services.platform.errors import (
    DeadlineExceeded,
    DependencyUnavailable,
    FreshetError,
    PreconditionFailed,
)
from services.platform.rpc.client import PEER_OPTIONS
from services.platform.transport import Tls, inference_options

MODEL_NAME = "encoder"
CACHE_KEY = "cache_key"
KEPT = "kept"
_TIMEOUT_S = 5.0


class InferenceServerEncoder:
    """Encodes through the inference server; connects on first use.

    components_shape: the (P_q, d) that answers must have.
    """

    def __init__(
        self,
        address: str,
        *,
        model_version: str,
        max_history: int,
        components_shape: tuple[int, int],
        has_gate: bool,
        uses_user_index: bool,
        max_rows: int = 64,
        tls: Tls | None = None,
    ) -> None:
        self._address = address
        self._model_version = model_version
        self._buckets = length_buckets(max_history)
        self._components_shape = components_shape
        self._has_gate = has_gate
        self._uses_user_index = uses_user_index
        self._max_rows = max_rows
        # Whether the server's model has a cache: asked on first use and after an error.
        self._keeps: bool | None = None
        self._counts = CacheCounts()
        self._counts_lock = threading.Lock()
        self._closed = False
        self._client = InferenceServerClient(
            url=address,
            channel_args=[
                ("grpc.max_send_message_length", -1),
                ("grpc.max_receive_message_length", -1),
                *PEER_OPTIONS,
            ],
            **inference_options(tls),
        )

    def check(self) -> None:
        """Check connection, model version and shapes. Raises: as `encode`."""
        config = self._config()
        found = config.parameters["model_version"].string_value
        if found != self._model_version:
            raise PreconditionFailed(
                f"the inference server at {self._address} serves model {found or 'without a version'}; the bundle is "
                f"{self._model_version}: load the same bundle there"
            )
        one = np.zeros(1, dtype=np.int64)
        self.encode([EncodeJob(item_index=one, event_time=one, user_index=-1, positions=[0])])

    def encode(self, jobs: Sequence[EncodeJob]) -> list[EncodedStates]:
        """The wanted states of each job, in order.

        Raises: DependencyUnavailable, DeadlineExceeded; PreconditionFailed if the server has another model.
        """
        keyed = [number for number, job in enumerate(jobs) if job.cache_key is not None]
        if keyed and not self._model_keeps():
            keyed = []
        plain = [number for number in range(len(jobs)) if number not in set(keyed)]
        results: list[EncodedStates | None] = [None] * len(jobs)
        for numbers in calls(jobs, plain, self._max_rows):
            for number, states in zip(numbers, self._call([jobs[n] for n in numbers], keyed=False), strict=True):
                results[number] = states
        # In order, because a user's next job continues from the cache entry of the last one.
        for start in range(0, len(keyed), self._max_rows):
            numbers = keyed[start : start + self._max_rows]
            for number, states in zip(numbers, self._call([jobs[n] for n in numbers], keyed=True), strict=True):
                results[number] = states
        return [states for states in results if states is not None]

    def drop(self, cache_keys: Sequence[int]) -> None:
        """Drop these keys' cache entries on the server. Raises: as `encode`."""
        if not cache_keys or not self._model_keeps():
            return
        # An empty window replaces the cache entry.
        empty = np.full(1, PADDING_ITEM, dtype=np.int64)
        jobs = [EncodeJob(empty, np.zeros(1, dtype=np.int64), -1, [0], cache_key=key) for key in cache_keys]
        for start in range(0, len(jobs), self._max_rows):
            list(self._call(jobs[start : start + self._max_rows], keyed=True))

    def cache_counts(self) -> CacheCounts:
        with self._counts_lock:
            return self._counts

    def close(self) -> None:
        """Close the connection. Running and later calls raise DependencyUnavailable."""
        self._closed = True
        self._client.close()

    def _config(self) -> Any:
        try:
            return self._client.get_model_config(MODEL_NAME, client_timeout=_TIMEOUT_S).config
        except (InferenceServerException, ValueError) as exc:
            raise self._error(exc) from exc

    def _model_keeps(self) -> bool:
        if self._keeps is None:
            self._keeps = CACHE_KEY in {tensor.name for tensor in self._config().input}
        return self._keeps

    def _call(self, jobs: Sequence[EncodeJob], *, keyed: bool) -> Iterator[EncodedStates]:
        arrays = pad_jobs(jobs, self._buckets)
        if not self._uses_user_index:
            del arrays["user_index"]
        if keyed:
            arrays[CACHE_KEY] = np.array([[job.cache_key] for job in jobs], dtype=np.int64)
        inputs = []
        for name, array in arrays.items():
            tensor = InferInput(name, list(array.shape), "INT64")
            tensor.set_data_from_numpy(array)
            inputs.append(tensor)
        outputs = [InferRequestedOutput("components")]
        if self._has_gate:
            outputs.append(InferRequestedOutput("gate"))
        if keyed:
            outputs.append(InferRequestedOutput(KEPT))
        try:
            answer = self._client.infer(MODEL_NAME, inputs, outputs=outputs, client_timeout=_TIMEOUT_S)
        except (InferenceServerException, ValueError) as exc:
            self._keeps = None
            raise self._error(exc) from exc
        if keyed:
            self._count(jobs, answer.as_numpy(KEPT))
        components = answer.as_numpy("components")
        gate = answer.as_numpy("gate") if self._has_gate else None
        expected = (len(jobs), arrays["position"].shape[1], *self._components_shape)
        if components is None or components.shape != expected:
            found = None if components is None else components.shape
            raise PreconditionFailed(
                f"the inference server at {self._address} answers components of shape {found}; the bundle's model "
                f"gives {expected}: load the same bundle there"
            )
        try:
            check_sizes(components.reshape(-1, *self._components_shape), gate)
        except ValueError as exc:
            raise PreconditionFailed(f"the inference server at {self._address} answers {exc}") from exc
        for row, job in enumerate(jobs):
            used = len(job.positions)
            yield EncodedStates(components[row, :used], None if gate is None else gate[row, :used])

    def _error(self, exc: Exception) -> Exception:
        if isinstance(exc, InferenceServerException):
            return _translated(exc, self._address, _TIMEOUT_S)
        # gRPC raises ValueError for a closed channel.
        return DependencyUnavailable(f"the connection to {self._address} is closed") if self._closed else exc

    def _count(self, jobs: Sequence[EncodeJob], cached: npt.NDArray[np.int64] | None) -> None:
        """Add to the cache counts. cached (B, 2): reused events, and bytes in the model's cache after the job."""
        if cached is None:
            return
        # Empty windows only drop cache entries.
        asked = [row for row, job in enumerate(jobs) if job.item_index[0] != PADDING_ITEM]
        lengths = [len(jobs[row].item_index) for row in asked]
        with self._counts_lock:
            self._counts = self._counts.plus(cached[asked, 0].tolist(), lengths, held_bytes=int(cached[-1, 1]))


def _translated(exc: InferenceServerException, address: str, timeout_s: float) -> FreshetError:
    status = exc.status() or ""
    text = f"inference server at {address}: {exc.message()}"
    if "DEADLINE_EXCEEDED" in status:
        return DeadlineExceeded(f"inference server at {address} did not answer within {timeout_s:.1f} s")
    if "NOT_FOUND" in status or "INVALID_ARGUMENT" in status:
        return PreconditionFailed(text)
    return DependencyUnavailable(text)
