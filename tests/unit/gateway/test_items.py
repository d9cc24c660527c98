"""Items as people look at them, and edits of some fields beside other writers."""

import asyncio
from dataclasses import replace

import numpy as np
import pytest
from freshet.v1 import events_pb2, gateway_pb2
from gateway_scene import Scene

from services.algorithms.item_table.strings import Strings
from services.contracts.topics.items import CatalogueItem, decode_item, encode_item
from services.gateway.describe import items as listing
from services.gateway.ports import ItemProgress
from services.gateway.recommend.popular import PopularItems
from services.platform.errors import DeadlineExceeded, DependencyUnavailable, InvalidRequest, NotFound


async def item_of(scene: Scene, item_id: str) -> events_pb2.Item:
    return (await scene.servicer.GetItem(gateway_pb2.GetItemRequest(item_id=item_id), None)).item.item


async def listed(scene: Scene, **fields: object) -> list[str]:
    """Ids of all pages."""
    found, token = [], ""
    while True:
        page = await scene.servicer.ListItems(gateway_pb2.ListItemsRequest(page_token=token, **fields), None)
        found += [one.item.item_id for one in page.items]
        token = page.next_page_token
        if not token:
            return found


async def test_an_item_is_described_whole_with_how_far_it_is(scene: Scene) -> None:
    progress = ItemProgress(num_interactions=4, num_users=2, min_users=3, is_published=False, reason="too few users")
    scene.refreshers.of_items["n"] = [replace(progress, num_interactions=0), progress]
    new = CatalogueItem(item_id="n", title="N", categories=("x",), attributes={"price": 9.5}, written_ms=5_000)
    scene.popular.describe([replace(new, withdrawn=True, available=False)])
    found = await scene.servicer.GetItem(gateway_pb2.GetItemRequest(item_id="n"), None)
    assert found.item == gateway_pb2.DescribedItem(
        item=events_pb2.Item(
            item_id="n", title="N", categories=["x"], attributes={"price": {"number": 9.5}}, available=False,
            withdrawn=True,
        ),
        first_seen={"seconds": 5},
    )  # fmt: skip
    assert (found.progress.num_users, found.progress.min_users, found.progress.reason) == (2, 3, "too few users")
    trained = await scene.servicer.GetItem(gateway_pb2.GetItemRequest(item_id="b"), None)
    assert trained.item.is_trained
    assert not trained.item.HasField("first_seen")
    assert dict(trained.item.item.attributes) == {
        "price": events_pb2.Item(attributes={"_": {"number": 10}}).attributes["_"],
        "maker": events_pb2.Item(attributes={"_": {"tag": "y"}}).attributes["_"],
    }
    assert not trained.HasField("progress")
    with pytest.raises(NotFound, match="'nowhere'"):
        await item_of(scene, "nowhere")


async def test_progress_is_unknown_while_the_items_refresher_may_be_the_silent_one(scene: Scene) -> None:
    none = ItemProgress(num_interactions=0, num_users=0, min_users=3, is_published=False, reason="no interactions")
    scene.refreshers.of_items["a"], scene.refreshers.all_answer = [none], False
    request = gateway_pb2.GetItemRequest(item_id="a")
    assert not (await scene.servicer.GetItem(request, None)).HasField("progress")
    scene.refreshers.all_answer = True
    assert (await scene.servicer.GetItem(request, None)).progress.min_users == 3


async def test_lists_are_in_order_by_prefix_category_and_age(scene: Scene) -> None:
    for number, (item_id, title) in enumerate([("neu", "Ärger"), ("N2", "beta"), ("b2", "")]):
        scene.popular.describe([CatalogueItem(item_id=item_id, title=title, categories=("x",), written_ms=number)])
    scene.popular.describe([CatalogueItem(item_id="c", title="Beetle", categories=("y",), withdrawn=True)])
    by_count = ["b", "d", "c", "e", "f", "a"]
    new = ["neu", "N2", "b2"]
    for size in (1, 4, 1000):
        assert await listed(scene, page_size=size) == [*by_count, *new]
        assert await listed(scene, page_size=size, newest_first=True) == [*new[::-1], *by_count]
        assert await listed(scene, page_size=size, category="x") == ["b", "d", "a", *new]
    assert await listed(scene, prefix="B") == ["b", "c", "N2", "b2"]
    assert await listed(scene, prefix="be") == ["c", "N2"]
    assert await listed(scene, prefix="n", category="x", newest_first=True) == ["N2", "neu"]
    assert await listed(scene, prefix="Ärg") == ["neu"]
    assert await listed(scene, prefix="C") == ["c"]
    assert await listed(scene, category="none") == []


async def test_a_call_looks_at_a_limited_number_of_items(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listing, "MAX_LOOKED", 2)
    scene, looks = Scene(), []
    starting = scene.popular.rows.starting

    def look(rows: np.ndarray, prefix: bytes) -> np.ndarray:
        looks.append(len(rows))
        return starting(rows, prefix)

    monkeypatch.setattr(scene.popular.rows, "starting", look)
    first = await scene.servicer.ListItems(gateway_pb2.ListItemsRequest(prefix="a"), None)
    assert (list(first.items), looks) == ([], [2])
    assert await listed(scene, prefix="a") == ["a"]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"page_size": 1001}, "page_size=1001 allowed: 0-1000"),
        ({"page_token": "1@other"}, "page_token='1@other' allowed: that of a page of this model"),
        ({"page_token": f"{10**12}@m1"}, "page_token="),
        ({"prefix": "x" * 513}, "prefix='text of 513 bytes'"),
        ({"category": "x" * 129}, "category='text of 129 bytes'"),
    ],
    ids=["size", "model", "number", "prefix", "category"],
)
async def test_a_bad_list_is_refused_by_name(fields: dict, message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        await Scene().servicer.ListItems(gateway_pb2.ListItemsRequest(**fields), None)


def test_columns_find_prefixes_as_python_does() -> None:
    strings = ["", "a", "A", "Ab", "ab", "äb", "B", "abc"]
    column, rows = Strings.of(strings), np.array([7, 0, 1, 2, 3, 4, 5, 6])
    for prefix in ("", "a", "ab", "ä", "abcd"):
        wanted = [strings[row].encode().lower().startswith(prefix.encode()) for row in rows]
        assert column.starting(rows, prefix.encode()).tolist() == wanted


async def test_an_edit_changes_the_named_fields_alone(scene: Scene) -> None:
    await scene.put_items([CatalogueItem(item_id="b", withdrawn=True)], ["withdrawn"])
    assert await item_of(scene, "b") == events_pb2.Item(
        item_id="b", title="B", categories=["x"], available=True, withdrawn=True,
        attributes={"price": {"number": 10}, "maker": {"tag": "y"}},
    )  # fmt: skip
    edit = CatalogueItem(item_id="b", title="ignored", attributes={"price": 3.0})
    await scene.put_items([edit], ["attributes.price", "attributes.maker", "withdrawn"])
    assert await item_of(scene, "b") == events_pb2.Item(
        item_id="b", title="B", categories=["x"], available=True, attributes={"price": {"number": 3}}
    )
    await scene.put_items([replace(edit, attributes={"maker": "z"})], ["attributes"])
    assert scene.items.written[-1].attributes == {"maker": "z"}


@pytest.mark.parametrize(
    ("item", "fields", "error", "says"),
    [
        ({}, ["titel"], InvalidRequest, r"fields\[0\]='titel' allowed: title, categories, available, withdrawn, attr"),
        ({}, ["title", "attributes.colour"], InvalidRequest, r"fields\[1\]=.*attributes\.price, attributes\.maker"),
        ({}, ["title"], InvalidRequest, r"items\[0\]\.title='' allowed: 1-512 bytes"),
        ({"item_id": "new"}, ["withdrawn"], NotFound, "'new'"),
    ],
    ids=["field", "attribute", "no title", "unknown item"],
)
async def test_a_bad_edit_writes_nothing(
    item: dict, fields: list[str], error: type[Exception], says: str, scene: Scene
) -> None:
    with pytest.raises(error, match=says):
        await scene.put_items([CatalogueItem(**{"item_id": "a"} | item)], fields)
    assert scene.items.written == []


@pytest.mark.parametrize("through", [("first", "second"), ("first", "first")], ids=["two gateways", "one gateway"])
async def test_edits_of_one_item_at_once_lose_nothing(through: tuple[str, str], scene: Scene) -> None:
    """Both gateways' views are late: each record comes to them a moment after it was written."""
    log, other = scene.items, Scene()
    behind: list[tuple[PopularItems, CatalogueItem]] = []
    log.follower = lambda items: behind.extend((view, one) for view in (scene.popular, other.popular) for one in items)

    async def arrive() -> None:
        while True:
            await asyncio.sleep(0.01)
            for view, one in behind[:3]:
                view.describe([one])
            del behind[:3]

    task = asyncio.create_task(arrive())
    gateways = {"first": scene.put_items, "second": replace(other.put_items, log=log)}
    await asyncio.gather(
        gateways[through[0]]([CatalogueItem(item_id="a", title="New title")], ["title"]),
        gateways[through[1]](
            [CatalogueItem(item_id="a", categories=("new",), attributes={"price": 7.0})],
            ["categories", "attributes.price"],
        ),
    )
    task.cancel()
    for view, one in behind:
        view.describe([one])
    wanted = CatalogueItem(item_id="a", title="New title", categories=("new",), attributes={"price": 7.0, "maker": "x"})
    assert log.written[-1] == wanted
    for view in (scene, other):
        assert (found := view.popular.item("a")) is not None
        assert found.item == wanted


async def test_attributes_of_another_models_bundle_survive_an_edit() -> None:
    scene, other = Scene(), Scene()
    record = encode_item(CatalogueItem(item_id="n", title="N", attributes={"price": 1.0, "colour": "red"}))
    scene.popular.describe([replace(decode_item(b"n", record, {"price": "number", "maker": "tag"}), offset=0)])
    scene.items.written.append(CatalogueItem(item_id="n"))
    beside = replace(scene.put_items, kinds={"price": "number"}, others=lambda: [other.popular])
    await beside([CatalogueItem(item_id="n", title="M")], ["title"])
    assert decode_item(b"n", encode_item(scene.items.written[-1]), {}).undeclared == {"price": 1.0, "colour": "red"}
    # Of an item that is in no record, another set's bundle says what it has.
    await beside([CatalogueItem(item_id="b", title="M")], ["title"])
    assert decode_item(b"b", encode_item(scene.items.written[-1]), {}).undeclared == {"price": 10.0, "maker": "y"}


async def test_a_record_without_a_title_leaves_it_and_replaces_attributes_of_every_model(scene: Scene) -> None:
    whole = CatalogueItem(item_id="a", title="New", attributes={"price": 1.0}, undeclared={"colour": "red"})
    scene.popular.describe([whole, CatalogueItem(item_id="a")])
    assert (found := scene.popular.item("a")) is not None
    assert (found.item, found.item.undeclared) == (CatalogueItem(item_id="a", title="New"), {})


async def test_an_edit_that_is_not_read_back_or_has_nothing_to_merge_into_is_an_error() -> None:
    scene = Scene(limits=replace(Scene().limits, edit_timeout_s=0.05))
    scene.items.follower = lambda items: None
    with pytest.raises(DeadlineExceeded, match="not read back"):
        await scene.put_items([CatalogueItem(item_id="a", title="A2")], ["title"])
    scene = Scene()
    scene.popular.knows_withdrawn = False
    with pytest.raises(DependencyUnavailable, match="not read yet"):
        await scene.put_items([CatalogueItem(item_id="a", title="A2")], ["title"])
