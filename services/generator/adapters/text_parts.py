"""The text bundle's parts for the sources. Only this module of the process reads the bundle's files."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import structlog

from services.algorithms.bundles.model_manifest import BundleError
from services.algorithms.bundles.sealed_files import MANIFEST
from services.algorithms.bundles.text_bundle import (
    PHRASE_ENCODER,
    PHRASES,
    TEXT_ENCODER,
    TEXT_MOL,
    TextBundle,
    load_text_bundle,
)
from services.algorithms.item_table.attributes import AttributeTable
from services.algorithms.item_table.categories import Categories
from services.algorithms.item_table.strings import Strings
from services.algorithms.items.catalogue import Catalogue
from services.algorithms.native import instruction_set
from services.algorithms.scoring.states import FloatArray
from services.algorithms.text.word_pieces import WordPieces
from services.generator.adapters.text_encoders import TextEncoder

log = structlog.get_logger()

# The tokens of a query without a word: [CLS] and [SEP].
_EMPTY_TOKENS = 2


def open_text_bundle(path: Path) -> tuple[TextBundle | None, str]:
    """Return the bundle; or None and the reason. A damaged bundle is logged as an error."""
    if not (path / MANIFEST).exists():
        return None, f"there is no text bundle at {path}; freshet train-text makes one"
    try:
        return load_text_bundle(path), ""
    except (BundleError, ValueError) as exc:
        log.error("text_bundle_refused", path=str(path), reason=str(exc))
        return None, str(exc)


def documents_catalogue(bundle: TextBundle, categories: Categories, attributes: AttributeTable) -> Catalogue:
    """Return the text model's documents as a catalogue. categories, attributes: of their items, in the same order.

    Raises: BundleError without a text model.
    """
    return Catalogue(
        model_version=bundle.text_version,
        item_ids=bundle.item_index,
        titles=Strings(np.zeros(0, np.uint8), np.zeros(bundle.num_items, np.int32)),
        categories=categories,
        states=bundle.item_states,
        pair_gate=bundle.pair_gate,
        attributes=attributes,
    )


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
        self, encoder: TextEncoder, stage: Callable[[], AbstractContextManager[None]] = nullcontext
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


def text_queries(bundle: TextBundle) -> tuple[Queries, Graph]:
    """Return the text model's queries and graph. Raises: BundleError without that part."""
    return Queries(bundle.word_pieces, bundle.text_mol.max_tokens), _graph(bundle, TEXT_MOL, TEXT_ENCODER)


def phrase_queries(bundle: TextBundle) -> tuple[Queries, Graph]:
    """Return the phrase model's queries and graph. Raises: BundleError without that part."""
    return Queries(bundle.word_pieces, bundle.phrases.max_tokens), _graph(bundle, PHRASES, PHRASE_ENCODER)


def _graph(bundle: TextBundle, part: str, whole: str) -> Graph:
    """Return the int8 graph if this processor multiplies bytes (VNNI); others gain only a seventh (decision 022)."""
    if instruction_set() == "avx512":
        if bundle.shared_int8_graph is not None:
            return Graph(bundle.shared_int8_graph, alone=True, output=part)
        int8 = bundle.int8_graph(part)
        if int8 is not None:
            return Graph(int8, alone=True)
    return Graph(bundle.file(whole))
