"""Make documents, identifiers and pseudo queries for a catalogue with titles and categories but without queries.

A pseudo query has random words of a title, in order, and up to two categories before or after them, like a search from
a vague memory. Identifiers are the title, the title as spoken ("The Usual Suspects" for "Usual Suspects, The (1995)"),
and the categories with the decade if the title has a year. Several items can share the last.

Letters: X items.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

QUERIES_OF_AN_ITEM = 4
_YEAR = re.compile(r"\s*\(((?:18|19|20)\d\d)(?:-\d*)?\)\s*$")
_ARTICLE = re.compile(r"^(.*), (The|A|An|Le|La|Les|Das|Der|Die|El|Il)$")
_ALSO_KNOWN = re.compile(r"\s*\([^()]*\)")
_WORD = re.compile(r"\w+(?:'\w+)?")
_NO_CATEGORY = "(no genres listed)"
# Pseudo queries omit these words, unless a title has no others.
_STOP_WORDS = frozenset(
    ("a", "an", "and", "at", "by", "for", "from", "in", "is", "it", "of", "on", "or", "the", "to", "with")
)


@dataclass(frozen=True, kw_only=True, slots=True)
class CatalogueTexts:
    """A catalogue's texts (X,), identifiers (X lists), and pairs of (pseudo query, item row)."""

    item_ids: list[str]
    texts: list[str]
    identifiers: list[list[str]]
    pairs: list[tuple[str, int]]


def catalogue_texts(
    item_ids: Sequence[str], titles: Sequence[str], categories: Sequence[Sequence[str]], *, seed: int = 0
) -> CatalogueTexts:
    """Return a catalogue's documents, identifiers and pseudo queries; an item's id replaces a missing title.

    Raises: ValueError if the columns' lengths differ.
    """
    if not len(item_ids) == len(titles) == len(categories):
        raise ValueError(
            f"{len(item_ids)} item ids, {len(titles)} titles, {len(categories)} categories; allowed: equally many"
        )
    rng = np.random.default_rng(seed)
    texts, identifiers, pairs = [], [], []
    for row, (item_id, title, names) in enumerate(zip(item_ids, titles, categories, strict=True)):
        named = title if _WORD.search(title) else item_id
        kinds = [name for name in names if name != _NO_CATEGORY]
        texts.append(" ".join([named, *kinds]))
        identifiers.append(_identifiers(named, kinds))
        pairs += [(query, row) for query in _pseudo_queries(named, kinds, rng)]
    return CatalogueTexts(item_ids=list(item_ids), texts=texts, identifiers=identifiers, pairs=pairs)


def spoken(title: str) -> str:
    """Return a title without year and alternative titles, with its article in front."""
    plain = _ALSO_KNOWN.sub("", _YEAR.sub("", title)).strip()
    article = _ARTICLE.match(plain)
    return (f"{article[2]} {article[1]}" if article else plain) or title


def _identifiers(title: str, kinds: Sequence[str]) -> list[str]:
    found = [title, spoken(title)]
    year = _YEAR.search(title)
    if kinds:
        found.append(" ".join([*kinds, *([f"{year[1][:3]}0s"] if year else [])]))
    return list(dict.fromkeys(found))


def _pseudo_queries(title: str, kinds: Sequence[str], rng: np.random.Generator) -> list[str]:
    every = _WORD.findall(spoken(title).lower())
    words = [word for word in every if word not in _STOP_WORDS] or every or [title]
    queries = []
    for _ in range(QUERIES_OF_AN_ITEM):
        kept = [words[row] for row in sorted(rng.permutation(len(words))[: 1 + int(rng.integers(len(words)))])]
        some = [kinds[row].lower() for row in rng.permutation(len(kinds))[: int(rng.integers(3))]]
        parts = [*some, *kept] if rng.random() < 0.5 else [*kept, *some]
        queries.append(" ".join(parts))
    return list(dict.fromkeys(queries))
