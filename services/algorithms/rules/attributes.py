"""Typed attributes of items: numbers, times and tags, and conditions on them in filters.

The bundle declares attributes and kinds; values of another kind are rejected. A value's Python type gives its kind:
float is a number, int a time in Unix milliseconds, str a tag. Columns are float64, int64 and, for codes of tags, int32.
A missing value is NaN or the type's least number.
"""

import math
import operator
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

Value = float | int | str
Values = Mapping[str, Value]  # of one item, by name
Column = npt.NDArray[Any]
Columns = Mapping[str, Column]  # (n,) each, by name
Codes = Mapping[str, Mapping[str, int]]  # codes of each attribute's tags
Mask = npt.NDArray[np.bool_]

MAX_ATTRIBUTES = 32
MAX_CONDITIONS = 32
MAX_CONDITION_VALUES = 1_000
_FEW = 8  # values compared one by one


class Kind(StrEnum):
    NUMBER = "number"
    TIME = "time"
    TAG = "tag"


Kinds = Mapping[str, Kind]
NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,63}")
# Types of table columns.
ARROW_TYPES = {Kind.NUMBER: pa.float64(), Kind.TIME: pa.timestamp("ms", tz="UTC"), Kind.TAG: pa.string()}
_CODED_TAG = pa.dictionary(pa.int32(), pa.string())
DTYPES: Mapping[Kind, np.dtype[Any]] = {
    Kind.NUMBER: np.dtype(np.float64),
    Kind.TIME: np.dtype(np.int64),
    Kind.TAG: np.dtype(np.int32),
}
_KIND_OF = {float: Kind.NUMBER, int: Kind.TIME, str: Kind.TAG}


def kind_of(value: Value) -> Kind:
    """A value's kind. Raises: ValueError for other types, NaN and infinity."""
    kind = _KIND_OF.get(type(value))
    if kind is None or (kind is Kind.NUMBER and not math.isfinite(value)):  # type: ignore[arg-type]
        raise ValueError(f"{value!r} allowed: a finite number (float), a time (int, Unix milliseconds) or a tag (str)")
    return kind


def check_values(values: Values, kinds: Kinds) -> None:
    """Raise ValueError with attribute, value and alternatives if the attribute is undeclared or the kind differs."""
    for name, value in values.items():
        if name not in kinds:
            raise ValueError(f"attributes[{name!r}] is not declared; allowed: {described(kinds)}")
        if kind_of(value) is not kinds[name]:
            raise ValueError(f"attributes[{name!r}]={value!r} is a {kind_of(value)}; allowed: a {kinds[name]}")


def described(kinds: Kinds) -> str:
    return ", ".join(f"{name} ({kind})" for name, kind in kinds.items()) or "none, the bundle declares no attribute"


class Comparison(StrEnum):
    """How a condition compares. Without the attribute, only NONE_OF and ABSENT are true."""

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
    """A condition on an attribute: `name` `comparison` `values`. All values have one kind."""

    name: str
    comparison: Comparison
    values: tuple[Value, ...] = ()

    def __post_init__(self) -> None:
        """Raise ValueError for too few or too many values, several kinds, or an order comparison of a tag."""
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
        """Raise ValueError with the attribute and alternatives if it is undeclared or of another kind."""
        if self.name not in kinds:
            raise ValueError(f"name={self.name!r} allowed: {described(kinds)}")
        if self.values and (found := kind_of(self.values[0])) is not kinds[self.name]:
            raise ValueError(
                f"{self.name!r} {self.comparison} {self.values[0]!r}: a {found}; allowed: a {kinds[self.name]}"
            )

    def holds(self, value: Value | None) -> bool:
        """Whether the condition is true for an item's value, None without the attribute."""
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

    def mask(self, column: Column, codes: Mapping[str, int]) -> Mask:
        """Where the condition is true in a column (n,) whose tags have these codes: (n,)."""
        match self.comparison:
            case Comparison.ONE_OF | Comparison.NONE_OF:
                known = [codes.get(value, -1) if isinstance(value, str) else value for value in self.values]
                found = np.asarray(np.isin(column, known) if len(known) > _FEW else column == known[0])
                for one in known[1:] if len(known) <= _FEW else ():
                    found |= column == one
                return found if self.comparison is Comparison.ONE_OF else ~found
            case Comparison.PRESENT | Comparison.ABSENT:
                return np.asarray(is_absent(column) == (self.comparison is Comparison.ABSENT))
        matches = np.asarray(_ORDERED[self.comparison](column, self.values[0]))
        if self.comparison in (Comparison.AT_MOST, Comparison.BELOW) and column.dtype.kind == "i":
            matches &= ~is_absent(column)  # the least number is below every value; NaN is not
        return matches


def absent(dtype: np.dtype[Any]) -> float:
    return math.nan if dtype.kind == "f" else int(np.iinfo(dtype).min)


def is_absent(column: Column) -> Mask:
    """Which items of a column (n,) lack the attribute: (n,)."""
    return np.asarray(np.isnan(column) if column.dtype.kind == "f" else column == absent(column.dtype))


def mask_of(where: Sequence[Condition], columns: Columns | npt.NDArray[np.void], codes: Codes) -> Mask:
    """Which of n items meet all conditions: (n,). There must be at least one condition, and `Condition.check` must
    accept each.
    """
    passes, *others = (one.mask(columns[one.name], codes.get(one.name, {})) for one in where)
    for mask in others:
        passes &= mask
    return passes


def arrow_kinds(schema: pa.Schema) -> dict[str, Kind]:
    """Table columns' declared kinds. Raises: ValueError for invalid names or types."""
    if len(schema.names) > MAX_ATTRIBUTES:
        raise ValueError(f"{len(schema.names)} attributes; allowed: at most {MAX_ATTRIBUTES}")
    kinds = {}
    for field in schema:
        of = field.type.value_type if field.type == _CODED_TAG else field.type
        kind = next((kind for kind, type_ in ARROW_TYPES.items() if type_ == of), None)
        if kind is None:
            raise ValueError(f"{field.name} is of {field.type}; allowed: {', '.join(map(str, ARROW_TYPES.values()))}")
        if not NAME.fullmatch(field.name):
            raise ValueError(f"attribute {field.name!r}; allowed: {NAME.pattern}")
        kinds[field.name] = kind
    return kinds
