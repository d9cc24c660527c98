"""Open the text bundle's parts for the sources, and encode queries with its graphs in ONNX Runtime in this process.
Encoders are thread-safe.

Letters: B queries.
"""

import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import structlog

from services.algorithms.bundles.model_manifest import BundleError
from services.algorithms.bundles.sealed_files import MANIFEST
from services.algorithms.bundles.text_bundle import (
    PHRASE_ENCODER,
    TEXT_ENCODER,
    TEXT_MOL,
    TextBundle,
    load_text_bundle,
)
from services.algorithms.native import instruction_set
from services.algorithms.scoring.states import FloatArray
from services.algorithms.text.word_pieces import WordPieces
from services.platform.errors import PreconditionFailed

INPUTS = ("input_ids", "attention_mask")


class InProcessText:
    """A graph on `threads` threads, loaded on first use. alone: encode texts one by one."""

    def __init__(
        self, graph: Path, word_pieces: WordPieces, *, max_tokens: int, threads: int = 1, alone: bool = False
    ) -> None:
        self._graph, self._word_pieces, self._max_tokens = graph, word_pieces, max_tokens
        self._threads, self._alone = threads, alone
        self._loading = threading.Lock()
        self._session: Any = None

    def encode(self, texts: Sequence[str]) -> FloatArray:
        """Return the model's output for B texts (B >= 1), (B, rows, width) float32.

        Raises: PreconditionFailed for a graph that cannot be loaded, or an output of another shape or with NaN.
        """
        if self._alone and len(texts) > 1:
            return np.concatenate([self.encode([text]) for text in texts])
        return checked(next(iter(self.outputs(texts).values())), len(texts), self.owner)

    @property
    def owner(self) -> str:
        return f"{self._graph.name} of the text bundle"

    def outputs(self, texts: Sequence[str]) -> dict[str, Any]:
        """Return every output for B texts by name, unchecked. Raises: PreconditionFailed for an unusable graph."""
        arrays = self._word_pieces.batch(texts, max_tokens=self._max_tokens)
        session = self._loaded()
        known = {spec.name for spec in session.get_inputs()}
        feeds = {name: array for name, array in zip(INPUTS, arrays, strict=True) if name in known}
        return dict(zip((spec.name for spec in session.get_outputs()), session.run(None, feeds), strict=True))

    def close(self) -> None:
        with self._loading:
            self._session = None

    def _loaded(self) -> Any:
        with self._loading:
            if self._session is None:
                try:
                    import onnxruntime

                    options = onnxruntime.SessionOptions()
                    options.intra_op_num_threads, options.inter_op_num_threads = self._threads, 1
                    self._session = onnxruntime.InferenceSession(
                        str(self._graph), options, providers=["CPUExecutionProvider"]
                    )
                except Exception as exc:  # the library has no common base class
                    raise PreconditionFailed(f"{self._graph} cannot be loaded: {exc}") from exc
            return self._session


class SharedText:
    """A graph with one output per model. The first call for a text computes all outputs; calls for other outputs get
    them from the cache. remembered: how many texts are cached.
    """

    def __init__(self, graph: InProcessText, *, remembered: int = 64) -> None:
        self._graph, self._remembered = graph, remembered
        self._lock = threading.Lock()
        self._found: OrderedDict[str, Future[dict[str, Any]]] = OrderedDict()

    def of(self, output: str) -> "OneOutput":
        return OneOutput(self, output)

    def encode(self, text: str, output: str) -> FloatArray:
        """Return one output, (1, rows, width). Raises: as `InProcessText.encode`, also for an unknown output."""
        with self._lock:
            future = self._found.get(text)
            is_first = future is None
            if future is None:
                future = self._found[text] = Future()
                if len(self._found) > self._remembered:
                    self._found.popitem(last=False)
        if is_first:
            try:
                future.set_result(self._graph.outputs([text]))
            except BaseException as exc:
                with self._lock:
                    self._found.pop(text, None)
                future.set_exception(exc)
        found = future.result()
        if output not in found:
            raise PreconditionFailed(f"the graph of both models has no output {output!r}; it has {sorted(found)}")
        # Each output is checked separately, so that NaN of one model does not affect the other.
        return checked(found[output], 1, f"{output} in {self._graph.owner}")

    def close(self) -> None:
        self._graph.close()


@dataclass(frozen=True, slots=True)
class OneOutput:
    """One model of a shared graph."""

    shared: SharedText
    output: str

    def encode(self, texts: Sequence[str]) -> FloatArray:
        return np.concatenate([self.shared.encode(text, self.output) for text in texts])

    def close(self) -> None:
        self.shared.close()


# An encoder of the text bundle.
TextEncoder = InProcessText | OneOutput


def checked(output: Any, num_texts: int, owner: str) -> FloatArray:
    """Return the output as float32. Raises: PreconditionFailed for another shape or non-finite values."""
    found = None if output is None else output.shape
    if output is None or len(output.shape) != 3 or len(output) != num_texts:
        raise PreconditionFailed(f"{owner} answers shape {found}; expected ({num_texts}, rows, width)")
    if not np.isfinite(output).all():
        raise PreconditionFailed(f"{owner} answers NaN or infinite values: train the model again")
    return np.asarray(output, dtype=np.float32)


log = structlog.get_logger()

# The tokens of a query without a word: [CLS] and [SEP].
_EMPTY_TOKENS = 2


def open_text_bundle(path: Path) -> tuple[TextBundle | None, str]:
    """Return the bundle, or None with the reason. A damaged bundle is logged as an error."""
    if not (path / MANIFEST).exists():
        return None, f"there is no text bundle at {path}; freshet train-text makes one"
    try:
        return load_text_bundle(path), ""
    except (BundleError, ValueError) as exc:
        log.error("text_bundle_refused", path=str(path), reason=str(exc))
        return None, str(exc)


@dataclass(frozen=True, slots=True)
class Queries:
    """Encodes queries, and finds those with a known word."""

    word_pieces: WordPieces
    max_tokens: int

    def with_words(self, texts: Sequence[str]) -> npt.NDArray[np.bool_]:
        return np.array([self.has_words(text) for text in texts], dtype=bool)

    def has_words(self, text: str) -> bool:
        return len(self.word_pieces.token_ids(text, max_tokens=self.max_tokens)) > _EMPTY_TOKENS

    def all_at_once(
        self, encoder: TextEncoder, stage: Callable[[], AbstractContextManager[None]]
    ) -> Callable[[Sequence[str]], tuple[FloatArray, npt.NDArray[np.bool_]]]:
        """Return an encoder of B texts padded together, timed by `stage`."""

        def encode(texts: Sequence[str]) -> tuple[FloatArray, npt.NDArray[np.bool_]]:
            with stage():
                outputs = encoder.encode(texts)
            return outputs, self.with_words(texts)

        return encode

    def alone(self, encoder: TextEncoder) -> Callable[[str], FloatArray | None]:
        """Return an encoder of single texts; it returns None for a text without a word."""
        return lambda text: encoder.encode([text])[0] if self.has_words(text) else None


@dataclass(frozen=True, slots=True)
class Graph:
    """A graph. alone: encode texts one by one, because outputs depend on the call's other texts. output: this part's
    name, if the graph has one output per part.
    """

    path: Path
    alone: bool = False
    output: str = ""


def queries_of(bundle: TextBundle, part: str) -> tuple[Queries, Graph]:
    """Return the query tokenizer of a part (`TEXT_MOL` or `PHRASES`), and the part's graph: int8 if this processor has
    VNNI, else float32 (decision 022). Raises: BundleError without that part.
    """
    model, whole = (bundle.text_mol, TEXT_ENCODER) if part == TEXT_MOL else (bundle.phrases, PHRASE_ENCODER)
    queries = Queries(bundle.word_pieces, model.max_tokens)
    if instruction_set() == "avx512":
        if bundle.shared_int8_graph is not None:
            return queries, Graph(bundle.shared_int8_graph, alone=True, output=part)
        int8 = bundle.int8_graph(part)
        if int8 is not None:
            return queries, Graph(int8, alone=True)
    return queries, Graph(bundle.file(whole))
