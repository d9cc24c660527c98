"""Typed attributes of items: numbers, times and tags, as columns, and the conditions that filters put on them.

Which attributes there are, and of what kind, the bundle declares; a value of another kind is refused wherever it comes
from. A value's Python type says its kind: float a number, int a time in Unix milliseconds, str a tag. In columns all
are float64, NaN where an item lacks the attribute: times are whole milliseconds below 2^53, a tag is its code.

Letters: A attributes, n items.
"""

import math
import operator
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any, Self

import numpy as np
import numpy.typing as npt
import pyarrow as pa

Value = float | int | str
Values = Mapping[str, Value]  # of one item, by name
Columns = npt.NDArray[np.float64]  # (A, n)
Mask = npt.NDArray[np.bool_]

MAX_ATTRIBUTES = 32
MAX_CONDITIONS = 32
MAX_CONDITION_VALUES = 1_000


class Kind(StrEnum):
    """What an attribute's values are."""

    NUMBER = "number"
    TIME = "time"
    TAG = "tag"


Kinds = Mapping[str, Kind]
NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,63}")
# What a bundle's columns are.
ARROW_TYPES = {Kind.NUMBER: pa.float64(), Kind.TIME: pa.timestamp("ms", tz="UTC"), Kind.TAG: pa.string()}
_KIND_OF = {float: Kind.NUMBER, int: Kind.TIME, str: Kind.TAG}


def kind_of(value: Value) -> Kind:
    """Raises: ValueError for what is no value of an attribute, NaN and infinity among it."""
    kind = _KIND_OF.get(type(value))
    if kind is None or (kind is Kind.NUMBER and not math.isfinite(value)):  # type: ignore[arg-type]
        raise ValueError(f"{value!r} allowed: a finite number (float), a time (int, Unix milliseconds) or a tag (str)")
    return kind


def check_values(values: Values, kinds: Kinds) -> None:
    """Raise ValueError, naming attribute, value and what is allowed, for what is not declared or of another kind."""
    for name, value in values.items():
        if name not in kinds:
            raise ValueError(f"attributes[{name!r}] is not declared; allowed: {described(kinds)}")
        if kind_of(value) is not kinds[name]:
            raise ValueError(f"attributes[{name!r}]={value!r} is a {kind_of(value)}; allowed: a {kinds[name]}")


def described(kinds: Kinds) -> str:
    """For messages: which attributes there are."""
    return ", ".join(f"{name} ({kind})" for name, kind in kinds.items()) or "none, the bundle declares no attribute"


class Comparison(StrEnum):
    """How a condition compares. NONE_OF and ABSENT alone hold for an item without the attribute."""

    AT_MOST = "at most"
    AT_LEAST = "at least"
    BELOW = "below"
    ABOVE = "above"
    ONE_OF = "one of"
    NONE_OF = "none of"
    PRESENT = "present"
    ABSENT = "absent"


_ORDERED: Mapping[Comparison, Callable[[Any, Any], Any]] = {
    Comparison.AT_MOST: operator.le,
    Comparison.AT_LEAST: operator.ge,
    Comparison.BELOW: operator.lt,
    Comparison.ABOVE: operator.gt,
}
_NO_VALUE = frozenset({Comparison.PRESENT, Comparison.ABSENT})
_MANY_VALUES = frozenset({Comparison.ONE_OF, Comparison.NONE_OF})


@dataclass(frozen=True, slots=True)
class Condition:
    """What an attribute of an item must be: `name` `comparison` `values`, of one kind."""

    name: str
    comparison: Comparison
    values: tuple[Value, ...] = ()

    def __post_init__(self) -> None:
        """Raises: ValueError for values that are none, too few, too many, of several kinds, or tags to be ordered."""
        count, comparison = len(self.values), self.comparison
        if comparison in _NO_VALUE:
            allowed, is_right = "none", count == 0
        elif comparison in _MANY_VALUES:
            allowed, is_right = f"1-{MAX_CONDITION_VALUES}", 1 <= count <= MAX_CONDITION_VALUES
        else:
            allowed, is_right = "1", count == 1
        if not is_right:
            raise ValueError(f"{self.name!r} {comparison}: {count} values; allowed: {allowed}")
        kinds = sorted({kind_of(value) for value in self.values})
        if len(kinds) > 1:
            raise ValueError(f"{self.name!r} {comparison}: values are {' and '.join(kinds)}; allowed: one kind")
        if Kind.TAG in kinds and comparison not in _MANY_VALUES:
            raise ValueError(f"{self.name!r} {comparison} {self.values[0]!r}: a tag; allowed: one of, none of")

    def check(self, kinds: Kinds) -> None:
        """Raise ValueError, naming the attribute and what is allowed, where it is not declared or of another kind."""
        if self.name not in kinds:
            raise ValueError(f"name={self.name!r} allowed: {described(kinds)}")
        if self.values and (found := kind_of(self.values[0])) is not kinds[self.name]:
            raise ValueError(
                f"{self.name!r} {self.comparison} {self.values[0]!r}: a {found}; allowed: a {kinds[self.name]}"
            )

    def holds(self, value: Value | None) -> bool:
        """For one item; None where it lacks the attribute."""
        if value is None:
            return self.comparison in (Comparison.NONE_OF, Comparison.ABSENT)
        match self.comparison:
            case Comparison.ONE_OF:
                return value in self.values
            case Comparison.NONE_OF:
                return value not in self.values
            case Comparison.PRESENT | Comparison.ABSENT:
                return self.comparison is Comparison.PRESENT
        return bool(_ORDERED[self.comparison](value, self.values[0]))

    def mask(self, column: npt.NDArray[np.float64], codes: Mapping[str, int]) -> Mask:
        """Where it holds in a column (n,) whose tags have these codes: (n,)."""
        known = [float(codes.get(value, -1) if isinstance(value, str) else value) for value in self.values]
        match self.comparison:
            case Comparison.ONE_OF:
                return np.isin(column, known)
            case Comparison.NONE_OF:
                return ~np.isin(column, known)
            case Comparison.PRESENT | Comparison.ABSENT:
                return np.asarray(np.isnan(column) == (self.comparison is Comparison.ABSENT))
        return np.asarray(_ORDERED[self.comparison](column, known[0]))


@dataclass(frozen=True, kw_only=True, slots=True)
class AttributeTable:
    """The attributes of n items: values (A, n), rows as `kinds` names them; a tag's code is its place in `tags`."""

    kinds: Kinds
    values: Columns
    tags: Sequence[str]

    @classmethod
    def of(cls, kinds: Kinds, items: Sequence[Values]) -> Self:
        """A table of a few items. Raises: ValueError as `check_values`."""
        codes: dict[str, int] = {}
        for one in items:
            check_values(one, kinds)
        values = np.array([encoded(one, kinds, codes) for one in items]).reshape(len(items), len(kinds)).T
        return cls(kinds=kinds, values=values, tags=list(codes))

    @classmethod
    def from_arrow(cls, table: pa.Table) -> Self:
        """From columns of the types of `ARROW_TYPES`, nulls where an item lacks the attribute. Raises: ValueError."""
        kinds = arrow_kinds(table.schema)
        values, codes = np.empty((len(kinds), len(table))), dict[str, int]()
        for row, (name, kind) in enumerate(kinds.items()):
            column = table.column(name).combine_chunks()
            if kind is Kind.TAG:
                coded = column.dictionary_encode()
                places = [codes.setdefault(tag, len(codes)) for tag in coded.dictionary.to_pylist()]
                found = coded.indices.to_numpy(zero_copy_only=False).astype(np.float64)
                here = ~np.isnan(found)
                found[here] = np.array(places, dtype=np.float64)[found[here].astype(np.int64)]
            else:
                column = column.cast(pa.int64()) if kind is Kind.TIME else column
                found = column.to_numpy(zero_copy_only=False).astype(np.float64)
                if not (np.isfinite(found) | column.is_null().to_numpy(zero_copy_only=False)).all():
                    raise ValueError(f"{name} holds NaN or infinite numbers; allowed: finite ones, or null")
            values[row] = found
        return cls(kinds=kinds, values=values, tags=list(codes))

    @property
    def num_items(self) -> int:
        return int(self.values.shape[1])

    def of_row(self, row: int) -> dict[str, Value]:
        """The attributes that an item has."""
        found: dict[str, Value] = {}
        for (name, kind), value in zip(self.kinds.items(), self.values[:, row].tolist(), strict=True):
            if not math.isnan(value):
                found[name] = self.tags[int(value)] if kind is Kind.TAG else int(value) if kind is Kind.TIME else value
        return found

    def take(self, rows: Sequence[int] | npt.NDArray[np.integer[Any]]) -> Self:
        """The items of some rows, in their order; -1 is one without attributes."""
        values = np.full((len(self.kinds), len(rows)), np.nan)
        known = np.flatnonzero(np.asarray(rows, dtype=np.int64) >= 0)
        values[:, known] = self.values[:, np.asarray(rows, dtype=np.int64)[known]]
        return replace(self, values=values)

    def recoded(self, codes: dict[str, int]) -> Columns:
        """The values with tags as in `codes`, which gets those that it lacks."""
        moved = np.array([codes.setdefault(tag, len(codes)) for tag in self.tags], dtype=np.float64)
        if (moved == np.arange(len(moved))).all():
            return self.values
        values = self.values.copy()
        for row, kind in enumerate(self.kinds.values()):
            if kind is Kind.TAG:
                here = ~np.isnan(values[row])
                values[row, here] = moved[values[row, here].astype(np.int64)]
        return values


def no_attributes(num_items: int) -> AttributeTable:
    """The table of items of a model that declares none."""
    return AttributeTable(kinds={}, values=np.empty((0, num_items)), tags=[])


class AttributeColumns:
    """The attributes of items that change, by row: one writer, any number of readers."""

    def __init__(self, table: AttributeTable) -> None:
        """Starts from a table, whose memory it takes over."""
        self.kinds, self._codes = table.kinds, {tag: code for code, tag in enumerate(table.tags)}
        self._values, self._num_items = table.values, table.num_items

    def put(self, row: int, values: Values) -> None:
        """An item's attributes, whole; a row behind the last one is a new item."""
        if not self.kinds:
            return
        if row >= self._num_items:
            self._num_items = row + 1
            if row >= self._values.shape[1]:
                more = np.full((len(self.kinds), max(16, row)), np.nan)
                self._values = np.concatenate([self._values, more], axis=1)
        self._values[:, row] = encoded(values, self.kinds, self._codes)

    def mask(self, where: Sequence[Condition], rows: npt.NDArray[np.integer[Any]] | None = None) -> Mask:
        """The items that meet all conditions, of which there is at least one: of all, or of m rows (m,), where one
        that there is no item for does not."""
        if rows is None:
            return mask_of(where, self._values[:, : self._num_items], self.kinds, self._codes)
        is_here = (rows >= 0) & (rows < self._num_items)
        is_here[is_here] = mask_of(where, self._values[:, rows[is_here]], self.kinds, self._codes)
        return is_here


def mask_of(where: Sequence[Condition], values: Columns, kinds: Kinds, codes: Mapping[str, int]) -> Mask:
    """The items (n,) that meet all conditions, in columns (A, n). Raises: ValueError as `Condition.check`."""
    allowed = np.ones(values.shape[1], dtype=bool)
    names = list(kinds)
    for one in where:
        one.check(kinds)
        allowed &= one.mask(values[names.index(one.name)], codes)
    return allowed


def encoded(values: Values, kinds: Kinds, codes: dict[str, int]) -> list[float]:
    """One item's column entries (A,): NaN for what it lacks; a new tag gets the next code."""
    entries = []
    for name in kinds:
        value = values.get(name, math.nan)
        entries.append(float(codes.setdefault(value, len(codes)) if isinstance(value, str) else value))
    return entries


def arrow_kinds(schema: pa.Schema) -> dict[str, Kind]:
    """What a bundle's attribute columns declare. Raises: ValueError for names or types that are not allowed."""
    if len(schema.names) > MAX_ATTRIBUTES:
        raise ValueError(f"{len(schema.names)} attributes; allowed: at most {MAX_ATTRIBUTES}")
    kinds = {}
    for field in schema:
        kind = next((kind for kind, type_ in ARROW_TYPES.items() if type_ == field.type), None)
        if kind is None:
            raise ValueError(f"{field.name} is of {field.type}; allowed: {', '.join(map(str, ARROW_TYPES.values()))}")
        if not NAME.fullmatch(field.name):
            raise ValueError(f"attribute {field.name!r}; allowed: {NAME.pattern}")
        kinds[field.name] = kind
    return kinds
