"""The `phrases/` part of a text bundle: a generator, its vocabulary and the encoder."""

from dataclasses import dataclass

from services.algorithms.bundles.model_manifest import BundleError
from services.algorithms.bundles.text_bundle import PHRASES, TextBundle
from services.algorithms.generation.generator import Generator
from services.algorithms.generation.vocabulary import PhraseVocabulary

GENERATOR, VOCABULARY = "generator", "vocabulary"


@dataclass(frozen=True, slots=True)
class PhraseParts:
    generator: Generator
    vocabulary: PhraseVocabulary


def load_phrases(bundle: TextBundle) -> PhraseParts:
    """Load the vocabulary, and the generator, memory-mapped if large.

    Raises: BundleError if the part or a file is missing or truncated, or with both values if two files disagree.
    """
    part = bundle.phrases
    vocabulary = PhraseVocabulary.load(bundle.file(f"{PHRASES}/{VOCABULARY}"))
    if (vocabulary.fingerprint, len(vocabulary)) != (part.vocabulary, part.vocabulary_size):
        raise BundleError(
            f"{bundle.path}: the vocabulary is {vocabulary.fingerprint} of {len(vocabulary)} phrases; the model was "
            f"trained for {part.vocabulary} of {part.vocabulary_size}"
        )
    generator = Generator.load(bundle.file(f"{PHRASES}/{GENERATOR}"))
    layer = generator.output_layer
    if (len(layer), layer.width) != (part.vocabulary_size, part.width):
        raise BundleError(
            f"{bundle.path}: the output layer is {len(layer)} phrases of width {layer.width}; the model has "
            f"{part.vocabulary_size} of {part.width}"
        )
    if generator.trie.max_tokens > part.positions:
        raise BundleError(
            f"{bundle.path}: identifiers of up to {generator.trie.max_tokens} tokens; the model has {part.positions}"
        )
    rows = generator.identifiers.items().rows
    if len(rows) and int(rows.max()) >= bundle.num_items:
        raise BundleError(f"{bundle.path}: an identifier names document {rows.max()}; there are {bundle.num_items}")
    return PhraseParts(generator, vocabulary)
