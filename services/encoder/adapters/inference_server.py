"""The model port over the inference server (model "encoder"): pads sequences into few shapes, translates errors.

A call takes at most `max_rows` sequences, shortest first and grouped by length, so that one long history does not
make every short one long and no call holds the server for long. Thread-safe.

Letters: B batch, L padded length, M positions wanted, P_q query components, P component pairs, d component width.
"""

from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt
from tritonclient.grpc import InferenceServerClient, InferInput, InferRequestedOutput
from tritonclient.utils import InferenceServerException

from services.common.errors import (
    DeadlineExceeded,
    DependencyUnavailable,
    FreshetError,
    PreconditionFailed,
)
from services.encoder.domain import EncodedStates, EncodeJob

MODEL_NAME = "encoder"
PADDING_ITEM = -1

IntArray = npt.NDArray[np.int64]


def length_buckets(max_history: int) -> list[int]:
    """The lengths that sequences are padded to: few shapes, and below a third more work than unpadded."""
    quarter = max_history // 4
    return sorted({max(4, quarter // 2), max(4, quarter), 2 * quarter, 3 * quarter, max_history})


def pad_jobs(jobs: Sequence[EncodeJob], buckets: Sequence[int]) -> dict[str, IntArray]:
    """The model's inputs for some jobs: left-aligned, padded at the end.

    Shapes: item_index (B, L), event_time (B, L), user_index (B, 1), position (B, M).
    """
    longest = max(len(job.item_index) for job in jobs)
    length = next((bucket for bucket in buckets if bucket >= longest), longest)
    most = max(len(job.positions) for job in jobs)
    wanted = 1 << (most - 1).bit_length()
    items = np.full((len(jobs), length), PADDING_ITEM, dtype=np.int64)
    times = np.empty((len(jobs), length), dtype=np.int64)
    positions = np.empty((len(jobs), wanted), dtype=np.int64)
    for row, job in enumerate(jobs):
        used = len(job.item_index)
        items[row, :used] = job.item_index
        times[row, :used] = job.event_time
        times[row, used:] = job.event_time[-1]
        positions[row, : len(job.positions)] = job.positions
        positions[row, len(job.positions) :] = job.positions[-1]
    users = np.array([[job.user_index] for job in jobs], dtype=np.int64)
    return {"item_index": items, "event_time": times, "user_index": users, "position": positions}


class InferenceServerEncoder:
    """Encodes through the inference server. Connects when first used.

    model_version, uses_user_index, has_gate: of the bundle's model. components_shape: its (P_q, d), which answers
    must have.
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
        timeout_s: float = 5.0,
    ) -> None:
        self._address = address
        self._model_version = model_version
        self._buckets = length_buckets(max_history)
        self._components_shape = components_shape
        self._has_gate = has_gate
        self._uses_user_index = uses_user_index
        self._max_rows = max_rows
        self._timeout_s = timeout_s
        self._client = InferenceServerClient(
            url=address,
            channel_args=[
                ("grpc.max_send_message_length", -1),
                ("grpc.max_receive_message_length", -1),
                # A server that comes back is found within half a second.
                ("grpc.initial_reconnect_backoff_ms", 100),
                ("grpc.min_reconnect_backoff_ms", 100),
                ("grpc.max_reconnect_backoff_ms", 500),
            ],
        )

    def check(self) -> None:
        """Prove connection, model version and shapes: states of another model must not be stored under ours.

        Raises: PreconditionFailed naming both versions; as `encode`.
        """
        try:
            config = self._client.get_model_config(MODEL_NAME, client_timeout=self._timeout_s).config
        except InferenceServerException as exc:
            raise _translated(exc, self._address, self._timeout_s) from exc
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

        Raises: DependencyUnavailable, DeadlineExceeded; PreconditionFailed when the server's model is another one.
        """
        results: list[EncodedStates | None] = [None] * len(jobs)
        for numbers in self._calls(jobs):
            for number, states in zip(numbers, self._call([jobs[n] for n in numbers]), strict=True):
                results[number] = states
        return [states for states in results if states is not None]

    def close(self) -> None:
        """Close the connection."""
        self._client.close()

    def _calls(self, jobs: Sequence[EncodeJob]) -> Iterator[list[int]]:
        if len(jobs) <= 8:
            if jobs:
                yield list(range(len(jobs)))
            return
        by_length = sorted(range(len(jobs)), key=lambda number: len(jobs[number].item_index))
        for start in range(0, len(by_length), self._max_rows):
            yield by_length[start : start + self._max_rows]

    def _call(self, jobs: Sequence[EncodeJob]) -> Iterator[EncodedStates]:
        arrays = pad_jobs(jobs, self._buckets)
        if not self._uses_user_index:
            del arrays["user_index"]
        inputs = []
        for name, array in arrays.items():
            tensor = InferInput(name, list(array.shape), "INT64")
            tensor.set_data_from_numpy(array)
            inputs.append(tensor)
        outputs = [InferRequestedOutput("components")]
        if self._has_gate:
            outputs.append(InferRequestedOutput("gate"))
        try:
            answer = self._client.infer(MODEL_NAME, inputs, outputs=outputs, client_timeout=self._timeout_s)
        except InferenceServerException as exc:
            raise _translated(exc, self._address, self._timeout_s) from exc
        components = answer.as_numpy("components")
        gate = answer.as_numpy("gate") if self._has_gate else None
        expected = (len(jobs), arrays["position"].shape[1], *self._components_shape)
        if components is None or components.shape != expected:
            found = None if components is None else components.shape
            raise PreconditionFailed(
                f"the inference server at {self._address} answers components of shape {found}; the bundle's model "
                f"gives {expected}: load the same bundle there"
            )
        if not np.isfinite(components).all():
            raise PreconditionFailed(f"the inference server at {self._address} answers NaN or infinite components")
        for row, job in enumerate(jobs):
            used = len(job.positions)
            yield EncodedStates(components[row, :used], None if gate is None else gate[row, :used])


def _translated(exc: InferenceServerException, address: str, timeout_s: float) -> FreshetError:
    status = exc.status() or ""
    text = f"inference server at {address}: {exc.message()}"
    if "DEADLINE_EXCEEDED" in status:
        return DeadlineExceeded(f"inference server at {address} did not answer within {timeout_s:.1f} s")
    if "NOT_FOUND" in status or "INVALID_ARGUMENT" in status:
        return PreconditionFailed(text)
    return DependencyUnavailable(text)
