"""ONNX Runtime inside the inference server's Python backend: the encoder where no native backend is at hand.

The server hands over a dynamic batch; requests of similar length become one run of 1/model.onnx. It knows the names
of the inputs and outputs and nothing about histories, users or weights, and takes what the ONNX file asks for: a
`user_index` that the file has no use for is left out. Rows with a `cache_key` are encoded by 1/step.onnx from what was
kept of them (1/incremental_encoding.py, the encoder process's own module), one after the other, in order.

Letters: B batch, L history, M positions wanted.
"""

import os
import sys
from itertools import groupby
from pathlib import Path

import numpy as np
import onnxruntime
import triton_python_backend_utils as pb_utils

# Rows per run: the attention weights of one run stay in the cache, and memory stays bounded for any B.
MAX_ROWS = int(os.environ.get("FRESHET_ENCODER_MAX_ROWS", "64"))
# Keys and values that are kept, at most. About 640 kB of them make a full window of 8 blocks at L = 200.
CACHE_MIB = int(os.environ.get("FRESHET_ENCODER_CACHE_MIB", "256"))
UNKNOWN_USER = -1


def _session(path):
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = int(os.environ.get("OMP_NUM_THREADS", "1"))
    options.inter_op_num_threads = 1
    # A spinning worker would take a core from the read path while it waits for work.
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    options.add_session_config_entry("session.inter_op.allow_spinning", "0")
    return onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])


def _bucket(length):
    """Lengths within a factor of two share a run, so padding at most doubles the work."""
    return max(16, 1 << (length - 1).bit_length())


def _widen(array, width, fill=None):
    """(B, L) -> (B, width): padded with `fill`, or with each row's last value."""
    missing = width - array.shape[1]
    if missing <= 0:
        return array
    if fill is None:
        return np.pad(array, ((0, 0), (0, missing)), mode="edge")
    return np.pad(array, ((0, 0), (0, missing)), constant_values=fill)


def _problem(inputs):
    """What is wrong with one request's arrays, or None."""
    items, times, position = inputs["item_index"], inputs["event_time"], inputs["position"]
    keys = inputs.get("cache_key")
    if keys is not None and keys.min() < 0:
        return f"cache_key={keys.min()}; allowed: 0 or more, or no such input"
    if items.shape != times.shape:
        return f"item_index has shape {items.shape} and event_time {times.shape}; they must be equal"
    if items.shape[1] == 0 or position.shape[1] == 0:
        return f"item_index has shape {items.shape} and position {position.shape}; no axis may be empty"
    if position.min() < 0 or position.max() >= items.shape[1]:
        return f"position spans {position.min()}..{position.max()}; allowed: 0..{items.shape[1] - 1}"
    return None


def _refusal(problem):
    # TritonError exists once the model is loaded, not while this module is imported.
    return pb_utils.InferenceResponse(error=pb_utils.TritonError(problem, pb_utils.TritonError.INVALID_ARG))


class TritonPythonModel:
    """What the Python backend looks for in 1/model.py."""

    def initialize(self, args):
        """Load 1/model.onnx and run it once, so that the first request pays for nothing."""
        folder = Path(args["model_repository"]) / args["model_version"]
        self.session = _session(folder / "model.onnx")
        self.inputs = {spec.name for spec in self.session.get_inputs()}
        self.outputs = [spec.name for spec in self.session.get_outputs()]
        self.incremental = self._incremental(folder)
        one = np.zeros((1, 1), dtype=np.int64)
        self._run({"item_index": one, "event_time": one, "position": one, "user_index": np.array([UNKNOWN_USER])})

    def execute(self, requests):
        """One response per request, in order; a malformed request fails alone."""
        parsed = [self._parse(request) for request in requests]
        responses = [None] * len(requests)
        good = []
        for index, inputs in enumerate(parsed):
            problem = _problem(inputs)
            if problem is None and "cache_key" in inputs:
                responses[index] = self._response(self._go_on(inputs), requests[index].requested_output_names())
            elif problem is None:
                good.append(index)
            else:
                responses[index] = _refusal(problem)

        def by_length(index):
            return _bucket(parsed[index]["item_index"].shape[1])

        for _, members in groupby(sorted(good, key=by_length), key=by_length):
            group = list(members)
            for index, outputs in zip(group, self._run_together([parsed[index] for index in group]), strict=True):
                wanted = requests[index].requested_output_names()
                responses[index] = self._response(outputs, wanted)
        return responses

    def _incremental(self, folder):
        """Over 1/step.onnx; None where the encoder has none (SASRec)."""
        if not (folder / "step.onnx").exists():
            return None
        sys.path.insert(0, str(folder))
        from incremental_encoding import IncrementalEncoder

        return IncrementalEncoder(_session(folder / "step.onnx"), max_bytes=CACHE_MIB << 20)

    def _go_on(self, inputs):
        """Rows one by one, each from what is kept under its key; an empty row has that dropped."""
        if self.incremental is None:
            return self._run(inputs)
        rows = []
        for row, key in enumerate(inputs["cache_key"].tolist()):
            length = int((inputs["item_index"][row] >= 0).sum())
            if length:
                states, reused = self.incremental.encode(
                    key,
                    inputs["item_index"][row, :length],
                    inputs["event_time"][row, :length],
                    int(inputs["user_index"][row]),
                    inputs["position"][row].clip(max=length - 1),
                )
            else:
                self.incremental.drop(key)
                states, reused = self._no_states(inputs["position"].shape[1]), 0
            rows.append({**states, "kept": np.array([reused, self.incremental.counts().bytes], dtype=np.int64)})
        return {name: np.stack([states[name] for states in rows]) for name in rows[0]}

    def _no_states(self, positions):
        return {
            spec.name: np.zeros((positions, *spec.shape[2:]), dtype=np.float32) for spec in self.session.get_outputs()
        }

    def _parse(self, request):
        arrays = {}
        for name in ("item_index", "event_time", "position", "user_index", "cache_key"):
            tensor = pb_utils.get_input_tensor_by_name(request, name)
            if tensor is not None:
                arrays[name] = tensor.as_numpy()
        rows = len(arrays["item_index"])
        arrays["user_index"] = arrays.get("user_index", np.full(rows, UNKNOWN_USER, dtype=np.int64)).reshape(rows)
        if "cache_key" in arrays:
            arrays["cache_key"] = arrays["cache_key"].reshape(rows)
        return arrays

    def _response(self, outputs, wanted):
        # Somebody who names no outputs is sent all of them.
        outputs = {"kept": np.zeros((len(outputs["components"]), 2), dtype=np.int64), **outputs}
        missing = [name for name in wanted if name not in outputs]
        if missing:
            message = f"output {missing[0]!r} is not made by this model; it has: {', '.join(self.outputs)}"
            return _refusal(message)
        return pb_utils.InferenceResponse([pb_utils.Tensor(name, outputs[name]) for name in wanted])

    def _run_together(self, group):
        """Several requests as one padded batch; each gets back its own rows and positions."""
        if len(group) == 1:
            return [self._run(group[0])]
        length = max(inputs["item_index"].shape[1] for inputs in group)
        wanted = max(inputs["position"].shape[1] for inputs in group)
        outputs = self._run(
            {
                "item_index": np.concatenate([_widen(inputs["item_index"], length, fill=-1) for inputs in group]),
                "event_time": np.concatenate([_widen(inputs["event_time"], length) for inputs in group]),
                "position": np.concatenate([_widen(inputs["position"], wanted) for inputs in group]),
                "user_index": np.concatenate([inputs["user_index"] for inputs in group]),
            }
        )
        parts, start = [], 0
        for inputs in group:
            rows, positions = inputs["position"].shape
            parts.append({name: array[start : start + rows, :positions] for name, array in outputs.items()})
            start += rows
        return parts

    def _run(self, inputs):
        feeds = {name: array for name, array in inputs.items() if name in self.inputs}
        rows = len(inputs["item_index"])
        chunks = [
            self.session.run(
                self.outputs,
                {name: np.ascontiguousarray(array[start : start + MAX_ROWS]) for name, array in feeds.items()},
            )
            for start in range(0, rows, MAX_ROWS)
        ]
        return {
            name: np.concatenate(parts) for name, parts in zip(self.outputs, zip(*chunks, strict=True), strict=True)
        }
