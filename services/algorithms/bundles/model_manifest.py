"""The manifest of a model bundle: the model's shapes and its files.

An unknown, missing, mistyped or out-of-range field is an error with its name.
"""

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import Field, asdict, dataclass, field, fields, is_dataclass
from pathlib import Path, PurePosixPath
from types import NoneType, UnionType
from typing import Any, Self, TypeVar, get_args, get_origin

from services.algorithms.encoding.history import check_max_history

FORMAT = 4
WHOLE = "manifest"  # the `owner` in errors about top-level fields
ENCODER_KINDS = ("hstu", "sasrec")
HEAD_KINDS = ("mol", "dot")
OUTPUT_NORMS = ("length", "layer")
QUERY_ACTIVATIONS = ("silu", "gelu")

# A field's JSON types. A float may be an integer; a boolean is not a number.
_JSON_TYPES: dict[Any, tuple[type, ...]] = {
    int: (int,),
    float: (int, float),
    str: (str,),
    bool: (bool,),
    dict: (dict,),
    NoneType: (NoneType,),
}

Part = TypeVar("Part")


class BundleError(ValueError):
    """A part of a bundle contradicts its manifest."""


@contextmanager
def errors_of(path: Path, also: type[Exception] = ValueError) -> Iterator[None]:
    """Turn a ValueError or an `also` that the block raises into a BundleError that names the file."""
    try:
        yield
    except BundleError:
        raise
    except (ValueError, also) as exc:
        raise BundleError(f"{path}: {exc}") from exc


def _require_positive(owner: str, values: Mapping[str, float]) -> None:
    for name, value in values.items():
        if not value > 0:
            raise BundleError(f"{owner}.{name}={value}; allowed: more than 0")


@dataclass(frozen=True, kw_only=True, slots=True)
class EncoderShape:
    """The encoder's shapes and inputs. width: the model width D; d_qk, d_v: widths per head.

    norm_epsilon: added to a variance inside a block (the authors use 1e-6 in HSTU, 1e-8 in SASRec). output_norm:
    "length" divides states by their length, "layer" (which the authors use with a mixture) applies layer normalisation.
    residual_of_norm: as in the SASRec authors' code, blocks normalise only the query and add the attention to it.
    actions: names of the action embedding's rows, from row 1.
    """

    kind: str
    num_blocks: int
    num_heads: int
    width: int
    d_qk: int
    d_v: int
    max_history: int
    num_time_buckets: int = 0
    uses_user_index: bool = False
    norm_epsilon: float = 1e-5
    output_norm: str = "length"
    residual_of_norm: bool = False
    actions: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not isinstance(self.actions, list | tuple) or not all(type(name) is str for name in self.actions):
            raise BundleError(f"encoder.actions={self.actions!r:.80}; allowed: a list of names")
        object.__setattr__(self, "actions", tuple(self.actions))  # JSON gives a list
        if len(set(self.actions)) < len(self.actions):
            raise BundleError(f"encoder.actions={list(self.actions)!r:.80}; allowed: each name once")
        if self.kind not in ENCODER_KINDS:
            raise BundleError(f"encoder.kind={self.kind!r}; allowed: {ENCODER_KINDS}")
        if self.output_norm not in OUTPUT_NORMS:
            raise BundleError(f"encoder.output_norm={self.output_norm!r}; allowed: {OUTPUT_NORMS}")
        if self.residual_of_norm and self.kind != "sasrec":
            raise BundleError(f"encoder.residual_of_norm=True with kind={self.kind!r}; allowed: False")
        names = ("num_blocks", "num_heads", "width", "d_qk", "d_v", "norm_epsilon")
        _require_positive("encoder", {name: getattr(self, name) for name in names})
        check_max_history(self.max_history)


@dataclass(frozen=True, kw_only=True, slots=True)
class HeadShape:
    """The head's shapes P_q, P_x and d; a mixture also has the hidden widths of the gate and the MLPs.

    query_activation: activation of the query projection's hidden layer, "silu" (SwiGLU) or "gelu" (GeGLU).
    """

    kind: str
    num_query_components: int
    num_item_components: int
    component_width: int
    tau: float
    gate_hidden: int = 0
    query_hidden: int = 0
    item_hidden: int = 0
    query_activation: str = "silu"

    def __post_init__(self) -> None:
        if self.kind not in HEAD_KINDS:
            raise BundleError(f"head.kind={self.kind!r}; allowed: {HEAD_KINDS}")
        if self.query_activation not in QUERY_ACTIVATIONS:
            raise BundleError(f"head.query_activation={self.query_activation!r}; allowed: {QUERY_ACTIVATIONS}")
        names = ["num_query_components", "num_item_components", "component_width", "tau"]
        _require_positive("head", {name: getattr(self, name) for name in names})
        if self.is_mixture:
            _require_positive("head", {"gate_hidden": self.gate_hidden})
        elif self.num_pairs != 1:
            raise BundleError(f"head.kind='dot' with {self.num_pairs} component pairs; allowed: 1")

    @property
    def is_mixture(self) -> bool:
        return self.kind == "mol"

    @property
    def num_pairs(self) -> int:
        return self.num_query_components * self.num_item_components


@dataclass(frozen=True, kw_only=True, slots=True)
class NeighbourShape:
    """Item neighbours. The user's r-th last item, counted from 0, has weight decay^r.

    model_share: lambda. A final score is model_share * s + (1 - model_share) * the neighbours' vote.
    """

    num_neighbours: int
    decay: float
    model_share: float

    def __post_init__(self) -> None:
        _require_positive("neighbours", {"num_neighbours": self.num_neighbours})
        for name in ("decay", "model_share"):
            if not 0 < getattr(self, name) <= 1:  # rejects NaN, too
                raise BundleError(f"neighbours.{name}={getattr(self, name)}; allowed: more than 0, at most 1")


@dataclass(frozen=True, kw_only=True, slots=True)
class AbsenceShape:
    """Buckets of the time since a user's last event (`encoding.absence`).

    Bucket 0 ends at `floor_seconds`; bucket b > 0 begins at floor_seconds * 2^(b - 1). With 18 buckets, the last begins
    at 2.1 years.
    """

    floor_seconds: int = 1024
    num_buckets: int = 18

    def __post_init__(self) -> None:
        for name, low, high in (("floor_seconds", 1, 1 << 24), ("num_buckets", 2, 32)):
            if not low <= getattr(self, name) <= high:
                raise BundleError(f"absence.{name}={getattr(self, name)}; allowed: {low} to {high}")


@dataclass(frozen=True, kw_only=True, slots=True)
class FileEntry:
    """A file's checksum and size."""

    sha256: str
    bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Manifest:
    """`manifest.json`.

    data: what the model was trained on. metrics: its quality. new_item_length: length of a new item's components (a
    trained item has 1), None if not measured. model_version does not depend on these three. encoder is None for
    imported embeddings, neighbours for a model that scores alone, absence for one that ignores the time since the last
    event.
    """

    model_version: str
    encoder: EncoderShape | None
    head: HeadShape
    num_items: int
    num_users: int
    new_item_length: float | None = None
    neighbours: NeighbourShape | None = None
    absence: AbsenceShape | None = None
    data: dict[str, Any] = field(default_factory=dict)
    metrics: dict[str, Any] = field(default_factory=dict)
    files: dict[str, FileEntry] = field(default_factory=dict)
    format: int = FORMAT

    def __post_init__(self) -> None:
        if self.format != FORMAT:
            raise BundleError(f"format={self.format}; this program reads format {FORMAT}")
        _require_positive("manifest", {"num_items": self.num_items})
        if self.num_users < 0 or (self.num_users and not (self.encoder and self.encoder.uses_user_index)):
            raise BundleError(f"num_users={self.num_users}; a model without user-id component has 0")
        if self.new_item_length is not None and not 0 < self.new_item_length <= 1:  # rejects NaN, too
            raise BundleError(f"new_item_length={self.new_item_length}; allowed: more than 0, at most 1, or null")

    @classmethod
    def read(cls, path: Path) -> Self:
        """Read a manifest. Raises: BundleError if the file is missing or no JSON object, or a field is wrong."""
        raw = read_fields(path, "a bundle")
        if raw.get("format") != FORMAT:
            allowed = f"format {FORMAT}; `freshet train` or `freshet index` writes it again"
            raise BundleError(f"{path}: format={raw.get('format')!r:.80}; this program reads {allowed}")
        return build_part(path, WHOLE, raw, cls)

    def write(self, path: Path) -> None:
        write_fields(path, asdict(self))


def read_fields(path: Path, whose: str) -> dict[str, Any]:
    """A manifest's fields, unchecked. Raises: BundleError if it is missing or no JSON object."""
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as exc:
        raise BundleError(f"{path} is missing; {whose} is a directory that contains this file") from exc
    except (ValueError, RecursionError) as exc:
        raise BundleError(f"{path} is not JSON: {exc}") from exc
    if not isinstance(raw, dict):
        raise BundleError(f"{path} holds a JSON {type(raw).__name__}; expected an object")
    return raw


def write_fields(path: Path, plain: Mapping[str, Any]) -> None:
    """Write a temporary file, then rename it to `path`."""
    aside = path.with_name(f".{path.name}.writing")
    aside.write_text(json.dumps(plain, indent=2, sort_keys=True, allow_nan=False) + "\n", encoding="utf-8")
    aside.replace(path)


def build_part(path: Path, owner: str, raw: Any, kind: type[Part]) -> Part:
    """Build `kind`, with nested parts, from the manifest `path`: the whole manifest if owner is `WHOLE`, else a part.

    Raises: BundleError with `owner`, field and file. A listed file outside the folder is an error, too.
    """
    if not isinstance(raw, dict):
        raise BundleError(f"{path}: {owner} is a JSON {type(raw).__name__}; expected an object")
    check_names(path, owner, raw, kind)
    values = {one.name: _field(path, owner, one, raw[one.name]) for one in _fields(kind)}
    try:
        return kind(**values)
    except ValueError as exc:  # BundleError is a ValueError
        raise BundleError(f"{path}: {exc}") from exc


def check_names(path: Path, owner: str, raw: Mapping[str, Any], kind: type[Any]) -> None:
    """Raise BundleError unless `raw` has the fields of `kind`."""
    wanted = {one.name for one in _fields(kind)}
    if raw.keys() != wanted:
        raise BundleError(f"{path}: {owner} has fields {sorted(raw)}; expected {sorted(wanted)}")


def _fields(kind: type[Any]) -> tuple[Field[Any], ...]:
    return fields(kind)


def _field(path: Path, owner: str, one: Field[Any], value: Any) -> Any:
    union = get_args(one.type) if get_origin(one.type) is UnionType else (one.type,)
    part: Any = next((each for each in union if is_dataclass(each)), None)
    if part is not None:
        is_none = value is None and NoneType in union
        inner = one.name if owner == WHOLE else f"{owner}.{one.name}"
        return None if is_none else build_part(path, inner, value, part)
    allowed = {get_origin(each) or each for each in union}
    if allowed <= _JSON_TYPES.keys() and type(value) not in {found for name in allowed for found in _JSON_TYPES[name]}:
        wanted = " or ".join(sorted("null" if name is NoneType else name.__name__ for name in allowed))
        raise BundleError(f"{path}: {owner}.{one.name}={value!r:.80}; allowed: {wanted}")
    if one.type != dict[str, FileEntry]:
        return value
    for name in value:
        if (named := PurePosixPath(name)).is_absolute() or ".." in named.parts:
            raise BundleError(f"{path}: files.{name!r:.80}; allowed: paths inside the folder")
    return {name: build_part(path, f"files.{name}", entry, FileEntry) for name, entry in value.items()}
