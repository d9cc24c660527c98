"""ONNX Runtime inside the inference server's Python backend: a text encoder where no native backend is at hand.

The model folders `text` and `phrases` of a text bundle both run this file over their own 1/model.onnx. The server hands
over a dynamic batch; requests of similar length become one padded run. It knows the names of the inputs, takes the
output's from the graph, and knows nothing of what a query means.

Letters: B queries, L tokens of the longest of them.
"""

import os
from itertools import groupby
from pathlib import Path

import numpy as np
import onnxruntime
import triton_python_backend_utils as pb_utils

INPUTS = ("input_ids", "attention_mask")
# Rows per run: the attention weights of one run stay in the cache, and memory stays bounded for any B.
MAX_ROWS = 64


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
    return max(8, 1 << (length - 1).bit_length())


def _arrays(request):
    return [pb_utils.get_input_tensor_by_name(request, name).as_numpy() for name in INPUTS]


def _problem(ids, mask):
    """What is wrong with one request's arrays, or None."""
    if ids.shape != mask.shape:
        return f"input_ids has shape {ids.shape} and attention_mask {mask.shape}; they must be equal"
    if ids.shape[1] == 0:
        return f"input_ids has shape {ids.shape}; no axis may be empty"
    if not mask.any(axis=1).all():
        return "attention_mask has a row without a token; [CLS] is always one"
    return None


def _refusal(problem):
    # TritonError exists once the model is loaded, not while this module is imported.
    return pb_utils.InferenceResponse(error=pb_utils.TritonError(problem, pb_utils.TritonError.INVALID_ARG))


class TritonPythonModel:
    """What the Python backend looks for in 1/model.py."""

    def initialize(self, args):
        """Load 1/model.onnx and run it once, so that the first request pays for nothing."""
        self.session = _session(Path(args["model_repository"]) / args["model_version"] / "model.onnx")
        self.output = self.session.get_outputs()[0].name
        one = np.ones((1, 2), dtype=np.int64)
        self._run(one, one)

    def execute(self, requests):
        """One response per request, in order; a malformed request fails alone."""
        parsed = [
            [pb_utils.get_input_tensor_by_name(request, name).as_numpy() for name in INPUTS] for request in requests
        ]
        responses = [None] * len(requests)
        good = []
        for index, (ids, mask) in enumerate(parsed):
            problem = _problem(ids, mask)
            if problem is None:
                good.append(index)
            else:
                responses[index] = _refusal(problem)

        def by_length(index):
            return _bucket(parsed[index][0].shape[1])

        for _, members in groupby(sorted(good, key=by_length), key=by_length):
            group = list(members)
            for index, answer in zip(group, self._run_together([parsed[index] for index in group]), strict=True):
                responses[index] = answer
        return responses

    def _run_together(self, group):
        """Several requests as one padded batch; each is answered with its own rows, or all with the run's error."""
        length = max(ids.shape[1] for ids, _ in group)
        ids, mask = (
            np.concatenate([np.pad(arrays[place], ((0, 0), (0, length - arrays[place].shape[1]))) for arrays in group])
            for place in range(2)
        )
        try:
            rows = self._run(ids, mask)
        except onnxruntime.capi.onnxruntime_pybind11_state.OnnxRuntimeException as exc:
            if len(group) == 1:
                return [_refusal(f"the graph refuses input_ids of shape {ids.shape}: {exc}")]
            # One request's tokens may be beyond the graph's: the others are answered.
            return [self._run_together([arrays])[0] for arrays in group]
        bounds = np.cumsum([len(ids) for ids, _ in group])[:-1]
        return [
            pb_utils.InferenceResponse([pb_utils.Tensor(self.output, np.ascontiguousarray(part))])
            for part in np.split(rows, bounds)
        ]

    def _run(self, ids, mask):
        known = {spec.name for spec in self.session.get_inputs()}
        chunks = []
        for start in range(0, len(ids), MAX_ROWS):
            arrays = dict(zip(INPUTS, (ids[start : start + MAX_ROWS], mask[start : start + MAX_ROWS]), strict=True))
            feeds = {name: np.ascontiguousarray(array) for name, array in arrays.items() if name in known}
            chunks.append(self.session.run([self.output], feeds)[0])
        return np.concatenate(chunks)
