"""The manifest of a text bundle: parts, fingerprints and files. Fields are checked as in a model bundle's manifest."""

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Self

from services.algorithms.bundles.model_manifest import (
    WHOLE,
    BundleError,
    FileEntry,
    HeadShape,
    build_part,
    read_fields,
    write_fields,
)

KIND = "text"
FORMAT = 2


@dataclass(frozen=True, kw_only=True, slots=True)
class TextMolPart:
    """A text encoder with its documents' states.

    tokenizer: fingerprint of the word list. max_tokens: most tokens of a query, including [CLS] and [SEP].
    """

    head: HeadShape
    tokenizer: str
    max_tokens: int

    def __post_init__(self) -> None:
        _require(self.max_tokens >= 3, "text_mol.max_tokens", self.max_tokens, "at least 3")


@dataclass(frozen=True, kw_only=True, slots=True)
class PhrasesPart:
    """A phrase model and its data for generation.

    tokenizer, vocabulary: fingerprints of the query's word list and the phrase vocabulary. positions: the number of
    positions at which the model scores tokens. width: the number of components of its vectors.
    """

    tokenizer: str
    vocabulary: str
    vocabulary_size: int
    positions: int
    width: int
    max_tokens: int

    def __post_init__(self) -> None:
        for name, least in (("vocabulary_size", 2), ("positions", 1), ("width", 1), ("max_tokens", 3)):
            value = getattr(self, name)
            _require(value >= least, f"phrases.{name}", value, f"at least {least}")


@dataclass(frozen=True, kw_only=True, slots=True)
class TextManifest:
    """`manifest.json`. data: what the models were trained on; metrics: their quality."""

    text_version: str
    num_items: int
    text_mol: TextMolPart | None = None
    phrases: PhrasesPart | None = None
    data: dict[str, Any] = field(default_factory=dict)
    metrics: dict[str, Any] = field(default_factory=dict)
    files: dict[str, FileEntry] = field(default_factory=dict)
    kind: str = KIND
    format: int = FORMAT

    def __post_init__(self) -> None:
        _require(self.num_items >= 1, "num_items", self.num_items, "at least 1")

    @classmethod
    def read(cls, path: Path) -> Self:
        """Read a manifest. Raises: BundleError if the file is missing, no JSON object or of another kind, or has other
        fields.
        """
        raw = read_fields(path, "a text bundle")
        if raw.get("kind") != KIND:
            raise BundleError(f"{path}: kind={raw.get('kind')!r}; a text bundle's is {KIND!r}")
        if raw.get("format") != FORMAT:
            raise BundleError(f"{path}: format={raw.get('format')}; this program reads format {FORMAT}")
        return build_part(path, WHOLE, raw, cls)

    def write(self, path: Path) -> None:
        write_fields(path, asdict(self))


def _require(condition: bool, name: str, value: object, allowed: str) -> None:
    if not condition:
        raise BundleError(f"{name}={value}; allowed: {allowed}")
