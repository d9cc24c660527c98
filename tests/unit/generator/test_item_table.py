"""The items by row: what each is found by, and who may be answered."""

from services.algorithms.rules.filters import ItemFilter
from services.contracts.topics.items import CatalogueItem
from services.generator.domain.items import ItemTable


def table() -> ItemTable:
    documents = {"b": "Space Jam", "a": "Toy Story. Woody is jealous of a space ranger.", "only text": "a document"}
    return ItemTable(["a", "b", "c"], ["Toy Story", "Space Jam", "Red"], [("Animation",), (), ("Drama",)], documents)


def allowed(items: ItemTable, **wanted: object) -> list[str]:
    mask = items.allowed(ItemFilter(**wanted))  # type: ignore[arg-type]
    return sorted(items.ids(row for row, passes in enumerate(mask.tolist()) if passes))


def test_rows_are_the_documents_and_then_the_models_other_items() -> None:
    items = table()
    assert items.ids(range(len(items.words()))) == ["b", "a", "only text", "c"]


def test_an_item_is_found_by_its_document_or_title_and_its_categories() -> None:
    assert table().words() == [
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


def test_a_record_that_changes_no_words_changes_nothing() -> None:
    changes = table().describe([CatalogueItem(item_id="b", title="Space Jam")])
    assert (changes.words, changes.titles, changes.hidden) == ({}, {}, set())


def test_a_new_item_gets_the_next_row_and_keeps_it() -> None:
    items = table()
    assert items.describe([CatalogueItem(item_id="new", title="New")]).words == {4: "New"}
    assert items.describe([CatalogueItem(item_id="new", title="Newer")]).words == {4: "Newer"}
    assert items.ids([4]) == ["new"]


def test_of_several_records_for_one_item_the_last_counts() -> None:
    items = table()
    changes = items.describe(
        [CatalogueItem(item_id="c", title="Red", withdrawn=True), CatalogueItem(item_id="c", title="Blue")]
    )
    assert (changes.words, changes.hidden) == ({3: "Blue"}, set())


def test_who_is_withdrawn_or_not_available_is_not_allowed_and_returns_with_words() -> None:
    items = table()
    for fields in ({"withdrawn": True}, {"available": False}):
        assert items.describe([CatalogueItem(item_id="c", title="Red", **fields)]).hidden == {3}
        assert "c" not in allowed(items)
        assert items.describe([CatalogueItem(item_id="c", title="Red")]).words == {3: "Red"}
        assert "c" in allowed(items)


def test_filters_join_and_unknown_names_match_nothing() -> None:
    items = table()
    assert allowed(items) == ["a", "b", "c", "only text"]
    assert allowed(items, allow_item_ids=("a", "c", "unknown")) == ["a", "c"]
    assert allowed(items, allow_item_ids=("a", "c"), deny_item_ids=("c", "unknown")) == ["a"]
    assert allowed(items, allow_categories=("Animation", "Drama")) == ["a", "c"]
    assert allowed(items, deny_categories=("Drama", "no such")) == ["a", "b", "only text"]
    assert allowed(items, allow_categories=("no such",)) == []
    items.describe([CatalogueItem(item_id="c", title="Red", categories=("War",))])
    assert allowed(items, allow_categories=("Drama",)) == []
    assert allowed(items, allow_categories=("War",)) == ["c"]
