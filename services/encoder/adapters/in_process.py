"""The model port in this process: ONNX Runtime over the bundle's graphs, on one thread, without PyTorch.

A job with a cache key costs one step per new event. Other jobs, and all jobs of a model without a step graph (SASRec),
are encoded in full, in batches. Thread-safe; sessions load on first use.

Letters: B batch, L padded length, M positions wanted, P_q query components, P component pairs, d component width.
"""

import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from services.algorithms.encoding.incremental_encoding import CacheCounts, IncrementalEncoder
from services.algorithms.scoring.states import check_sizes
from services.encoder.domain import EncodedStates, EncodeJob, calls, length_buckets, pad_jobs
from services.platform.errors import PreconditionFailed


class InProcessEncoder:
    """Encodes with one bundle's `encoder_onnx`, and `step_onnx` if it has one.

    cache_bytes: limit of cached keys and values. max_rows: sequences per run of the full graph.
    """

    def __init__(
        self, encoder_onnx: Path, step_onnx: Path | None, *, max_history: int, cache_bytes: int, max_rows: int = 64
    ) -> None:
        self._encoder_onnx, self._step_onnx = encoder_onnx, step_onnx
        self._buckets = length_buckets(max_history)
        self._cache_bytes, self._max_rows = cache_bytes, max_rows
        self._loading = threading.Lock()
        self._session: Any = None
        self._incremental: IncrementalEncoder | None = None

    def check(self) -> None:
        """Load the graphs and encode one event. Raises: PreconditionFailed if ONNX Runtime or a file is unusable."""
        one = np.zeros(1, dtype=np.int64)
        self.encode([EncodeJob(item_index=one, event_time=one, user_index=-1, positions=[0])])

    def encode(self, jobs: Sequence[EncodeJob]) -> list[EncodedStates]:
        # Local variables, because another thread may close the encoder meanwhile.
        session, incremental = self._load()
        results: list[EncodedStates | None] = [None] * len(jobs)
        whole = []
        for number, job in enumerate(jobs):
            if job.cache_key is None or incremental is None:
                whole.append(number)
            else:
                results[number] = self._go_on(incremental, job.cache_key, job)
        for numbers in calls(jobs, whole, self._max_rows):
            for number, states in zip(numbers, self._encode_whole(session, [jobs[n] for n in numbers]), strict=True):
                results[number] = states
        found = [states for states in results if states is not None]
        try:
            for states in found:
                check_sizes(states.components, states.gate)
        except ValueError as exc:
            raise PreconditionFailed(f"{self._encoder_onnx} answers {exc}: train the model again") from exc
        return found

    def drop(self, cache_keys: Sequence[int]) -> None:
        incremental = self._incremental
        if incremental is not None:
            for key in cache_keys:
                incremental.drop(key)

    def cache_counts(self) -> CacheCounts:
        incremental = self._incremental
        return CacheCounts() if incremental is None else incremental.counts()

    def close(self) -> None:
        """Free the memory once running calls have ended."""
        with self._loading:
            self._session = self._incremental = None

    def _go_on(self, incremental: IncrementalEncoder, key: int, job: EncodeJob) -> EncodedStates:
        positions = np.asarray(job.positions, dtype=np.int64)
        outputs, _ = incremental.encode(key, job.item_index, job.event_time, job.user_index, positions)
        return EncodedStates(outputs["components"], outputs.get("gate"))

    def _encode_whole(self, session: Any, jobs: Sequence[EncodeJob]) -> Iterator[EncodedStates]:
        arrays = pad_jobs(jobs, self._buckets)
        arrays["user_index"] = arrays["user_index"][:, 0]
        feeds = {spec.name: arrays[spec.name] for spec in session.get_inputs()}
        components, *gate = session.run(None, feeds)
        for row, job in enumerate(jobs):
            used = len(job.positions)
            yield EncodedStates(components[row, :used], gate[0][row, :used] if gate else None)

    def _load(self) -> tuple[Any, IncrementalEncoder | None]:
        with self._loading:
            if self._session is None:
                step = None if self._step_onnx is None else _session(self._step_onnx)
                if step is not None:
                    self._incremental = IncrementalEncoder(step, max_bytes=self._cache_bytes)
                self._session = _session(self._encoder_onnx)
            return self._session, self._incremental


def _session(path: Path) -> Any:
    try:
        import onnxruntime
    except ImportError as exc:
        raise PreconditionFailed(
            "FRESHET_ENCODER_ENGINE=in-process needs the package onnxruntime (extra cpu); or set inference-server"
        ) from exc
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    try:
        return onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    except Exception as exc:
        raise PreconditionFailed(f"{path} cannot be loaded: {exc}") from exc
