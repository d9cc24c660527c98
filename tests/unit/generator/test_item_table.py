"""The items by row: what each is found by, and who may be answered."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from services.algorithms.rules.filters import ItemFilter
from services.contracts.topics.items import CatalogueItem
from services.generator.domain.items import Changes, ItemTable


def table() -> ItemTable:
    documents = {"b": "Space Jam", "a": "Toy Story. Woody is jealous of a space ranger.", "only text": "a document"}
    titles = ["Toy Story", "Space Jam", "Red"]
    return ItemTable(["a", "b", "c"], titles, [("Animation",), (), ("Drama",)], documents, documents.values())


def allowed(items: ItemTable, **wanted: object) -> list[str]:
    mask = items.allowed(ItemFilter(**wanted))  # type: ignore[arg-type]
    return sorted(items.ids(row for row, passes in enumerate(mask.tolist()) if passes))


def test_an_item_is_found_by_its_document_or_title_and_its_categories() -> None:
    assert list(table().words()) == [
        "Space Jam",
        "Toy Story. Woody is jealous of a space ranger. Animation",
        "a document",
        "Red Drama",
    ]


def test_a_new_title_joins_a_document_and_takes_the_place_of_a_title() -> None:
    items = table()
    changes = items.describe(
        [CatalogueItem(item_id="a", title="Another Name"), CatalogueItem(item_id="b", title="Other")]
    )
    assert changes.words == {1: "Another Name Toy Story. Woody is jealous of a space ranger.", 0: "Other"}
    assert changes.titles == {1: "Another Name", 0: "Other"}
    back = items.describe([CatalogueItem(item_id="b", title="")])
    assert back.words == {0: "Space Jam"}


_NAMES = st.lists(st.sampled_from(["x", "y", "z"]), unique=True, max_size=3).map(tuple)
_IDS = [f"item-{number}" for number in range(6)]
_TITLES = st.sampled_from(["", "Red", "Blue", "Red Blue"])
_RECORDS = st.builds(
    CatalogueItem,
    item_id=st.sampled_from([*_IDS, "new-1", "new-2"]),
    title=_TITLES,
    categories=_NAMES,
    withdrawn=st.booleans(),
)


@given(
    bundled=st.dictionaries(st.sampled_from(_IDS), st.tuples(_TITLES, _NAMES)),
    documents=st.dictionaries(st.sampled_from(_IDS), _TITLES),
    records=st.lists(st.lists(_RECORDS, max_size=4), max_size=6),
    wanted=st.builds(
        ItemFilter,
        allow_categories=_NAMES,
        deny_categories=_NAMES,
        allow_item_ids=st.lists(st.sampled_from([*_IDS, "new-2", "unknown"]), max_size=6).map(tuple),
        deny_item_ids=st.lists(st.sampled_from([*_IDS, "new-1", "unknown"]), max_size=2).map(tuple),
    ),
)
def test_columns_hold_what_lists_do_whatever_changed(
    bundled: dict[str, tuple[str, tuple[str, ...]]],
    documents: dict[str, str],
    records: list[list[CatalogueItem]],
    wanted: ItemFilter,
) -> None:
    titles, categories = [title for title, _ in bundled.values()], [names for _, names in bundled.values()]
    items = ItemTable(bundled, titles, categories, documents, documents.values())
    order = [*documents, *(item_id for item_id in bundled if item_id not in documents)]
    now = {item_id: bundled.get(item_id, ("", ())) for item_id in order}
    withdrawn: set[str] = set()

    def words(item_id: str) -> str:
        (title, names), first = now[item_id], bundled.get(item_id, ("", ()))[0]
        document = documents.get(item_id, "")
        text = title or first
        if document not in ("", first):
            text = document if title in document else f"{title} {document}"
        return " ".join([text, *(name for name in names if name not in text)])

    for batch in records:
        expected = Changes()
        for item in {item.item_id: item for item in batch}.values():
            if item.item_id not in now:
                order.append(item.item_id)
                now[item.item_id] = ("", ())
            row, before, was_hidden = order.index(item.item_id), words(item.item_id), item.item_id in withdrawn
            if item.title and item.title != now[item.item_id][0]:
                expected.titles[row] = item.title
            now[item.item_id] = (item.title, item.categories)
            (withdrawn.discard if item.is_served else withdrawn.add)(item.item_id)
            if not item.is_served:
                expected.hidden.add(row)
            elif was_hidden or words(item.item_id) != before:
                expected.words[row] = words(item.item_id)
        assert items.describe(batch) == expected
    assert items.ids(range(len(order))) == order
    assert list(items.words()) == [words(item_id) for item_id in order]
    assert items.ids(np.flatnonzero(items.allowed(wanted)).tolist()) == [
        item_id
        for item_id in order
        if item_id not in withdrawn
        and item_id not in wanted.deny_item_ids
        and (not wanted.allow_item_ids or item_id in wanted.allow_item_ids)
        and (not wanted.allow_categories or {*wanted.allow_categories} & {*now[item_id][1]})
        and not {*wanted.deny_categories} & {*now[item_id][1]}
    ]
