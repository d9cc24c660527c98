"""The `phrases/` part of a text bundle: which file holds what, written by the training and read by who generates.

A vocabulary, weights, shortlist, trie and identifiers that do not belong together are refused, naming both values; each
file's own reader refuses one that is cut short. It knows no encoder and no tokens.
"""

from dataclasses import dataclass
from pathlib import Path

from services.algorithms.generation.generator import Generator, GeneratorSettings
from services.algorithms.generation.identifiers import IdentifierTable
from services.algorithms.generation.output_layer import OutputLayer
from services.algorithms.generation.shortlist import Shortlist
from services.algorithms.generation.trie import IdentifierTrie
from services.algorithms.generation.vocabulary import PhraseVocabulary
from services.algorithms.manifest import BundleError
from services.algorithms.text_bundle import PHRASES, TextBundle

ENCODER = "encoder.onnx"
VOCABULARY = "vocabulary.tsv"
OUTPUT_LAYER = "output_layer.safetensors"
SHORTLIST = "shortlist.safetensors"
TRIE = "trie.safetensors"
IDENTIFIERS = "identifiers.safetensors"


@dataclass(frozen=True, slots=True)
class PhraseParts:
    """What generates, and what writes a new identifier in tokens."""

    generator: Generator
    vocabulary: PhraseVocabulary


def save_phrases(folder: Path, parts: PhraseParts, encoder: Path) -> dict[str, Path]:
    """Write all files but the encoder's graph into `folder`; name to path of each, as `add_phrases` takes them.

    Raises: ValueError for a trie or identifiers that changed since they were built.
    """
    files = {name: folder / name for name in (VOCABULARY, OUTPUT_LAYER, SHORTLIST, TRIE, IDENTIFIERS)}
    generator = parts.generator
    parts.vocabulary.save(files[VOCABULARY])
    generator.output_layer.save(files[OUTPUT_LAYER])
    generator.shortlist.save(files[SHORTLIST])
    generator.trie.save(files[TRIE])
    generator.identifiers.save(files[IDENTIFIERS])
    return {ENCODER: encoder, **files}


def load_phrases(bundle: TextBundle, *, settings: GeneratorSettings | None = None) -> PhraseParts:
    """Everything but the encoder, memory-mapped.

    Raises: BundleError where the bundle has no such part, a file is missing or cut short, or two of them disagree.
    """
    said = bundle.phrases
    vocabulary = PhraseVocabulary.load(_file(bundle, VOCABULARY))
    if (vocabulary.fingerprint, len(vocabulary)) != (said.vocabulary, said.vocabulary_size):
        raise BundleError(
            f"{bundle.path}: the vocabulary is {vocabulary.fingerprint} of {len(vocabulary)} phrases; the model was "
            f"trained for {said.vocabulary} of {said.vocabulary_size}"
        )
    output_layer = OutputLayer.load(_file(bundle, OUTPUT_LAYER))
    if (len(output_layer), output_layer.width) != (said.vocabulary_size, said.width):
        raise BundleError(
            f"{bundle.path}: the output layer is {len(output_layer)} phrases of width {output_layer.width}; the model "
            f"has {said.vocabulary_size} of {said.width}"
        )
    trie = IdentifierTrie.load(_file(bundle, TRIE))
    if trie.max_tokens > said.positions:
        raise BundleError(f"{bundle.path}: identifiers of {trie.max_tokens} tokens; the model has {said.positions}")
    identifiers = IdentifierTable.load(_file(bundle, IDENTIFIERS))
    named = identifiers.items().rows
    if len(named) and int(named.max()) >= bundle.num_items:
        raise BundleError(f"{bundle.path}: an identifier names document {named.max()}; there are {bundle.num_items}")
    try:
        generator = Generator(
            output_layer=output_layer,
            shortlist=Shortlist.load(_file(bundle, SHORTLIST)),
            trie=trie,
            identifiers=identifiers,
            settings=settings or GeneratorSettings(),
        )
    except ValueError as exc:
        raise BundleError(f"{bundle.path}: {exc}") from exc
    return PhraseParts(generator, vocabulary)


def _file(bundle: TextBundle, name: str) -> Path:
    return bundle.file(f"{PHRASES}/{name}")
