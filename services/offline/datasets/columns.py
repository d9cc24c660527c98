"""Find each role's column in a table, by the name that the caller gives or by a usual name.

Case, blanks and underscores are ignored: `User_ID` is `user_id`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

# Usual names by role, as `plain` writes them; the first name that the table has is chosen.
_USUAL = {
    "user": ("user", "userid", "reviewerid", "customer", "customerid", "visitor", "visitorid"),
    "item": ("item", "itemid", "movieid", "parentasin", "asin", "product", "productid", "sku", "article", "articleid"),
    "timestamp": ("timestamp", "time", "ts", "eventtime", "unixreviewtime", "datetime", "date", "createdat"),
    "type": ("type", "eventtype", "event"),
    "value": ("value", "rating", "ratings", "overall", "stars"),
    "session": (),
    "title": ("title",),
    "categories": ("categories", "category", "genres"),
}
_OPTIONS = {"timestamp": "--time", "user": "--user or --session"}
REQUIRED = ("user", "item", "timestamp")
_RATINGS = frozenset({"rating", "ratings", "overall", "stars"})


@dataclass(frozen=True, kw_only=True, slots=True)
class TableOptions:
    """How to read a table. columns: unusual column names by role, as in {"user": "who"}. items: the file of items.
    separator: text between a cell's categories.
    """

    columns: Mapping[str, str] = field(default_factory=dict)
    items: Path | None = None
    separator: str = "|"

    def __post_init__(self) -> None:
        if not self.separator:
            raise ValueError("category separator is empty; allowed: one character or more")


def choose_columns(path: Path, present: Sequence[str], wanted: Mapping[str, str]) -> dict[str, str]:
    """Return column names by role.

    Raises: ValueError if a named or required column is missing, or if two columns have a chosen name.
    """
    chosen: dict[str, str] = {}
    for role, usual in _USUAL.items():
        asked = wanted.get(role, "")
        if asked and asked not in present:
            raise ValueError(f"{path} has no column {asked!r} for {role}; it has: {', '.join(present)}")
        found = asked or _named(present, usual)
        if found:
            if present.count(found) > 1:
                raise ValueError(f"{path} has {present.count(found)} columns {found!r}; allowed: one")
            chosen[role] = found
    for role in REQUIRED:
        if role not in chosen and not (role == "user" and "session" in chosen):
            raise ValueError(
                f"{path} has no {role} column (looked for {', '.join(_USUAL[role])}); it has: {', '.join(present)}. "
                f"Name it with {_OPTIONS.get(role, f'--{role}')} COLUMN"
            )
    return chosen


def usual_names(taken: Mapping[str, str]) -> list[str]:
    """Return a text with the usual names for each role that is not in `taken`."""
    return [f"{role}: {', '.join(names)}" for role, names in _USUAL.items() if names and role not in taken]


def is_rating(name: str) -> bool:
    """Whether a column of this name has ratings."""
    return plain(name) in _RATINGS


def plain(name: str) -> str:
    """Return the name's letters and digits, in lower case."""
    return "".join(letter for letter in name.casefold() if letter.isalnum())


def _named(present: Sequence[str], usual: Sequence[str]) -> str:
    return next((name for one in usual for name in present if plain(name) == one), "")
