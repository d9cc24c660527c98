"""`freshet bench encoding`: whole windows encoded again for every event, or one step from kept keys and values.

A history grows event by event, slides of the window included, and each event asks for the state before it and the one
after it. Ways take turns of a few events, so that a noisy moment hits all of them, and the history is repeated under
another key; answers are compared with the whole encode's of this process. CPU time is each event's least over repeats.

Letters: L = max_history, n events of a window.
"""

import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from services.algorithms.bundles.model_bundle import ENCODER_ONNX, ENCODER_STEP_ONNX, Bundle, load_bundle
from services.algorithms.encoding.history import trim
from services.algorithms.encoding.incremental_encoding import IncrementalEncoder
from services.offline.evaluation.common.report import Report, Request, Say, plain_page, report_of, written
from services.offline.evaluation.common.timing import Times

EVENTS = 400
_REPEATS, _QUICK_REPEATS = 6, 2
_EVENTS_PER_TURN = 20
_CACHE_BYTES = 256 << 20
_SERVER_MODEL = "encoder"
_TIMEOUT_S = 10.0

IntArray = npt.NDArray[np.int64]
Outputs = dict[str, npt.NDArray[Any]]
# items (n,), times (n,), positions (M,)
Call = tuple[IntArray, IntArray, IntArray]
# key of the history, items (n,), times (n,), positions (M,) -> the states, and how many events were not encoded anew
Way = Callable[[int, IntArray, IntArray, IntArray], tuple[Outputs, int]]


def run(request: Request, *, bundle: Path, inference_server: str = "") -> Report:
    """Writes encoding.{md,json}; `inference_server`: host:port of one that serves the bundle, for its rows.

    Raises: BundleError for a bundle without a step graph.
    """
    began = time.perf_counter()
    found = rows(bundle, inference_server=inference_server, quick=request.quick, seed=request.seed, say=request.say)
    report = report_of("encoding", request, found, began) | {"model": described(bundle), "events": EVENTS}
    return written(request, report, partial(plain_page, Path(__file__).with_name("page.template.md")))


def rows(
    bundle: Path, *, inference_server: str = "", quick: bool = False, seed: int = 0, say: Say = lambda line: None
) -> list[dict[str, Any]]:
    """A row per way: milliseconds per event, its share of the quickest whole encode's time at the same place, largest
    error, share of calls that found something kept, share of events not encoded anew.

    `inference_server`: host:port of one that serves the bundle; "" leaves its rows out.
    Raises: BundleError for a bundle without a step graph.
    """
    loaded = load_bundle(bundle, verify=False)
    ways = _ways(loaded, inference_server)
    taken = {name: _Taken() for name in ways}
    every = list(_calls(loaded, np.random.default_rng(seed)))
    sent = sum(len(items) for calls in every for items, _, _ in calls)
    repeats = _QUICK_REPEATS if quick else _REPEATS
    for repeat in range(repeats):
        say(f"{EVENTS} events, time {repeat + 1} of {repeats}")
        for turn in range(0, EVENTS, _EVENTS_PER_TURN):
            events = every[turn : turn + _EVENTS_PER_TURN]
            answers = {name: taken[name].turn(way, repeat, events) for name, way in ways.items()}
            for name, outputs in answers.items():
                taken[name].max_error = max(taken[name].max_error, _difference(outputs, answers[_REFERENCE]))
    found = []
    for name, mine in taken.items():
        place = name.partition(":")[0]
        whole = [taken[other] for other in ways if other.startswith(f"{place}: whole")]
        local = place == "in process"
        found.append(
            {
                "way": name,
                "events": len(mine.times.wall),
                "milliseconds": mine.times.median_ms,
                "p99_milliseconds": mine.times.quantile_ms(0.99),
                "share_of_whole": sum(mine.times.wall) / min(sum(other.times.wall) for other in whole),
                "cpu_milliseconds": 1e3 * mine.least_cpu() / EVENTS if local else None,
                "cpu_share_of_whole": mine.least_cpu() / min(other.least_cpu() for other in whole) if local else None,
                "max_error": mine.max_error,
                "hit_rate": mine.hits / mine.calls,
                "events_reused": mine.reused / (sent * repeats),
            }
        )
    return found


@dataclass(slots=True)
class _Taken:
    """What one way has cost so far, event by event. CPU: this process's, so nothing that an inference server spends."""

    times: Times = field(default_factory=Times)
    max_error: float = 0.0
    hits: int = 0
    calls: int = 0
    reused: int = 0

    def turn(self, way: Way, repeat: int, events: list[list[Call]]) -> list[Outputs]:
        """Some events one after the other; the answers to all their calls."""
        answers = []
        for calls in events:
            found = self.times.call(lambda event: [way(repeat, *call) for call in event], calls)
            answers += [outputs for outputs, _ in found]
            self.calls += len(found)
            self.hits += sum(kept > 0 for _, kept in found)
            self.reused += sum(kept for _, kept in found)
        return answers

    def least_cpu(self) -> float:
        """Seconds of CPU of the whole history, each event's the least of its repeats."""
        return float(np.reshape(self.times.cpu, (-1, EVENTS)).min(axis=0).sum())


def described(bundle: Path) -> dict[str, Any]:
    """The shapes that the figures belong to."""
    encoder = load_bundle(bundle, verify=False).encoder
    window = encoder.num_blocks * encoder.num_heads * (encoder.d_qk + encoder.d_v) * 4 * encoder.max_history
    return asdict(encoder) | {"bytes_of_a_full_window": window}


_REFERENCE = "in process: whole, 1 thread"


def _ways(bundle: Bundle, inference_server: str) -> dict[str, Way]:
    step = IncrementalEncoder(_session(bundle.file(ENCODER_STEP_ONNX), 1), max_bytes=_CACHE_BYTES)
    ways: dict[str, Way] = {
        _REFERENCE: _whole(_session(bundle.file(ENCODER_ONNX), 1)),
        "in process: whole, padded as served": _whole(_session(bundle.file(ENCODER_ONNX), 1), bundle.max_history // 4),
        "in process: whole, 2 threads": _whole(_session(bundle.file(ENCODER_ONNX), 2)),
        "in process: incremental": lambda key, items, times, positions: step.encode(key, items, times, -1, positions),
    }
    if inference_server:
        ways["inference server: whole"] = _remote(bundle, inference_server, keyed=False)
        ways["inference server: incremental"] = _remote(bundle, inference_server, keyed=True)
    return ways


def _session(path: Path, threads: int) -> Any:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.inter_op_num_threads = threads, 1
    # As served; and a thread that spins would disturb whoever is measured next.
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    return onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])


def _whole(session: Any, length_step: int = 1) -> Way:
    """Windows encoded anew, padded to multiples of `length_step`."""
    names = [spec.name for spec in session.get_outputs()]
    takes_user = "user_index" in {spec.name for spec in session.get_inputs()}

    def encode(key: int, items: IntArray, times: IntArray, positions: IntArray) -> tuple[Outputs, int]:
        del key
        feeds = _padded(items, times, positions, length_step)
        if takes_user:
            feeds["user_index"] = np.array([-1])
        return {name: array[0] for name, array in zip(names, session.run(names, feeds), strict=True)}, 0

    return encode


def _remote(bundle: Bundle, address: str, *, keyed: bool) -> Way:
    """As the encoder process asks: lengths padded, the key sent or not."""
    from tritonclient.grpc import InferenceServerClient, InferInput, InferRequestedOutput

    client = InferenceServerClient(address)
    names = ["components", "gate"] if bundle.manifest.head.is_mixture else ["components"]
    quarter = bundle.max_history // 4
    # Keys of other runs against the same server must not be met again.
    offset = int(np.random.default_rng().integers(1 << 62))

    def encode(key: int, items: IntArray, times: IntArray, positions: IntArray) -> tuple[Outputs, int]:
        arrays = _padded(items, times, positions, quarter)
        if bundle.encoder.uses_user_index:
            arrays["user_index"] = np.array([[-1]])
        if keyed:
            arrays["cache_key"] = np.array([[offset + key]])
        inputs = []
        for name, array in arrays.items():
            tensor = InferInput(name, list(array.shape), "INT64")
            tensor.set_data_from_numpy(array)
            inputs.append(tensor)
        wanted = [InferRequestedOutput(name) for name in [*names, *(["kept"] if keyed else [])]]
        answer = client.infer(_SERVER_MODEL, inputs, outputs=wanted, client_timeout=_TIMEOUT_S)
        return {name: answer.as_numpy(name)[0] for name in names}, int(answer.as_numpy("kept")[0, 0]) if keyed else 0

    return encode


def _padded(items: IntArray, times: IntArray, positions: IntArray, length_step: int) -> dict[str, IntArray]:
    padding = -len(items) % length_step
    return {
        "item_index": np.pad(items, (0, padding), constant_values=-1)[None],
        "event_time": np.pad(times, (0, padding), mode="edge")[None],
        "position": positions[None],
    }


def _calls(bundle: Bundle, rng: np.random.Generator) -> Iterator[list[Call]]:
    """What the stream asks after each event: both states in one window, or, at a slide, one in each of two."""
    times = 10**9 + (10 ** rng.uniform(0, 6, EVENTS)).astype(np.int64).cumsum()
    events = list(zip(rng.integers(0, bundle.num_items, EVENTS).tolist(), times.tolist(), strict=True))
    window: list[tuple[int, int]] = []
    for event in events:
        before, grown = window, [*window, event]
        window = list(trim(grown, bundle.max_history))
        if len(window) == len(grown):
            yield [_call(window, [len(window) - 2, len(window) - 1] if before else [0])]
        else:
            yield [_call(before, [len(before) - 1]), _call(window, [len(window) - 1])]


def _call(window: list[tuple[int, int]], positions: list[int]) -> Call:
    items, times = (np.array(column, dtype=np.int64) for column in zip(*window, strict=True))
    return items, times, np.array(positions, dtype=np.int64)


def _difference(found: list[Outputs], reference: list[Outputs]) -> float:
    return max(
        float(np.abs(one[name] - other[name]).max())
        for one, other in zip(found, reference, strict=True)
        for name in one
    )
