"""Items: find an item, see its catalogue entry, change it, withdraw it or restore it.

Saving writes only the fields that this tab changed, so two tabs can edit different fields of one item.
"""

from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

from freshet_client import DescribedItem, FreshetError, Item, ItemProgress
from nicegui import ui
from nicegui.element import Element

from services.console.access import LOOK, Access
from services.console.frame import Visit, add_page, box, button, entry, text
from services.console.links import items_link, why_link
from services.console.sentences import date_text

PATH = "/items"
PAGE, MAX_EMPTY_PAGES, SIMILAR, MAX_SUGGESTED = 30, 20, 8, 200


def add(access: Access) -> None:
    """Add the page."""

    lead = "What the catalogue has, and what people see of it."
    add_page(access, PATH, "Items", lead, lambda visit: Items(visit).begin())


class Items:
    """One tab's page. Its address contains the search fields."""

    def __init__(self, visit: Visit) -> None:
        self._visit, self._token = visit, ""
        self._item_id = visit.query.get("item", "")
        self._asked = {name: visit.query.get(name, "") for name in ("prefix", "category", "newest")}
        prefix, category, newest = self._asked.values()
        with box("div", "row end"):
            entry("Begins with", self._find("prefix"), value=prefix, hint="an id or a title, then Enter")
            field = entry("Category", self._find("category"), value=category, hint="its name, then Enter")
            field.props["list"] = "categories"
            newest_first = box("button", "chip", type="button", aria_pressed=str(bool(newest)).lower())
            with newest_first:
                text("span", "Newest first")
            newest_first.on("click", lambda: self._find("newest")("" if newest else "1"))
        with box("div", "columns even"):
            with box("section", "panel", aria_label="Found items"):
                self._list = box("ol", "plain")
                self._more = button("Show more", self._show_more, icon="expand_more")
            self._side = box("div", "side")

    async def begin(self) -> None:
        """Show the list, and the item that the address names."""
        with self._visit.notice.failures():
            catalogue = await self._visit.client.catalogue(max_categories=MAX_SUGGESTED)
            self._kinds = {one.name: one.kind for one in catalogue.attributes}
            with box("datalist", id="categories"):
                for one in catalogue.categories:
                    box("option", value=one.name)
            if self._item_id:
                await self._show_item()
            await self._show_more()

    def _find(self, field: str) -> Callable[[str], None]:
        return lambda value: ui.navigate.to(items_link(**self._asked | {field: value.strip()}))

    async def _show_more(self) -> None:
        with self._visit.notice.failures():
            for _ in range(MAX_EMPTY_PAGES):
                page = await self._visit.client.list_items(
                    self._asked["prefix"],
                    category=self._asked["category"],
                    newest_first=bool(self._asked["newest"]),
                    page_size=PAGE,
                    page_token=self._token,
                )
                self._token = page.next_page_token
                if page.items or not self._token:
                    break
            with self._list:
                for one in page.items:
                    self._line(one)
                if not (self._list.default_slot.children or self._token):
                    text("li", "No item fits: write the beginning of a title or an id.", "hint")
        self._more.set_visibility(bool(self._token))

    def _line(self, one: DescribedItem) -> None:
        item = one.item
        with box("li", "pair found"):
            text("a", item.title or item.item_id, "isolated", href=items_link(item=item.item_id, **self._asked))
            for name in [*item.categories[:3], *_marks(one)]:
                text("span", name, "tag isolated")

    async def _show_item(self) -> None:
        """Fetch the item and show it."""
        found = await self._visit.client.get_item(self._item_id)
        item, self._before, self._inputs = found.item.item, found.item.item, dict[str, Element]()
        self._side.clear()
        with self._side, box("section", "panel", aria_label="Item"):
            text("h2", item.title or item.item_id, "isolated")
            text("p", f"Id {item.item_id}", "hint isolated")
            for name in _marks(found.item):
                text("span", name, "tag why")
            text("p", _way(found.item, found.progress))
            if found.item.first_seen is not None:
                text("p", f"First described {date_text(found.item.first_seen)}.", "hint")
            self._editor(item)
            text("a", "Why somebody gets it", "button", href=why_link("", item.item_id))
        await self._show_similar()

    def _editor(self, item: Item) -> None:
        self._inputs["title"] = entry("Title", lambda _: self._save(), value=item.title)
        with box("label", "field"):
            text("span", "Categories, one a line", "field-name")
            lines = max(2, len(item.categories))
            self._inputs["categories"] = area = box("textarea", "input", rows=str(lines))
        area.props["value"] = "\n".join(item.categories)
        for name, kind in self._kinds.items():
            label, value = f"{name} ({kind})", _shown(item.attributes.get(name))
            self._inputs[f"attributes.{name}"] = entry(label, lambda _: self._save(), value=value, hint="none")
        self._said = text("p", "", "hint", role="status")
        if not self._visit.may("operator"):
            return
        with box("div", "row"):
            button("Save", self._save, classes="button strong")
            if item.withdrawn:
                button("Restore", lambda: self._put({"withdrawn": False}), icon="undo")
            else:
                button("Withdraw", lambda: self._put({"withdrawn": True}), icon="block", classes="button danger")

    async def _save(self) -> None:
        """Write the fields that differ from what this tab showed."""
        ids = [one.id for one in self._inputs.values()]
        values = await ui.run_javascript(f"{ids}.map((id) => getElement(id).value)")
        changes: dict[str, Any] = {}
        for (name, value), before in zip(zip(self._inputs, values, strict=True), self._shown_values(), strict=True):
            if value.strip() != before:
                try:
                    changes[name] = self._parsed(name, value.strip())
                except ValueError:
                    self._visit.notice.say(f"{name} is {value!r}; allowed: a {self._kinds[name.partition('.')[2]]}.")
                    return
        await self._put(changes)

    def _shown_values(self) -> list[str]:
        item = self._before
        attributes = [_shown(item.attributes.get(name)) for name in self._kinds]
        return [item.title, "\n".join(item.categories), *attributes]

    def _parsed(self, name: str, value: str) -> Any:
        if name == "categories":
            return [line.strip() for line in value.splitlines() if line.strip()]
        kind = self._kinds.get(name.partition(".")[2], "tag")
        if not value or kind == "tag":
            return value
        return float(value) if kind == "number" else datetime.fromisoformat(value).replace(tzinfo=UTC)

    async def _put(self, changes: dict[str, Any]) -> None:
        """Write only these fields, then show the item."""
        if not changes:
            self._said.set_text("Nothing was changed.")
            return
        plain = {name: value for name, value in changes.items() if "." not in name}
        attributes = {name.partition(".")[2]: value for name, value in changes.items() if "." in name and value != ""}
        try:
            await self._visit.client.put_items(
                [Item(self._item_id, **plain, attributes=attributes)], fields=list(changes)
            )
        except FreshetError as error:
            self._visit.notice.say(str(error))
        else:
            with self._visit.notice.failures():
                await self._show_item()
                self._said.set_text(f"Saved: {', '.join(changes)}.")

    async def _show_similar(self) -> None:
        try:
            items = (await self._visit.client.similar(self._item_id, SIMILAR, context=LOOK)).items
        except FreshetError:
            items = ()
        with self._side, box("section", "panel", aria_label="Who is like it"):
            text("h2", "Who is like it")
            if not items:
                text("p", "No index serves this item, so nothing is like it yet.", "hint")
            with box("ol", "plain"):
                for one in items:
                    with box("li", "pair"):
                        text("a", one.title or one.item_id, "isolated", href=items_link(item=one.item_id))
                        text("span", f"{one.similarity:.2f}", "hint")


def _marks(one: DescribedItem) -> list[str]:
    marks = (("withdrawn", one.item.withdrawn), ("not available", one.item.available is False))
    return [name for name, is_so in (*marks, ("new", not one.is_trained)) if is_so]


def _way(one: DescribedItem, progress: ItemProgress | None) -> str:
    """A sentence that says whether answers can contain the item, and why."""
    if one.is_trained:
        since = f" {progress.num_interactions:,} interactions since then refine it." if progress is not None else ""
        return f"The model knows it from training.{since}"
    if progress is None:
        return "It is new; how many people know it is not known now."
    if progress.is_published:
        return "It is new, and answers may have it: of what people did with it, or of its text."
    return f"It is new: {progress.num_users:,} of {progress.min_users:,} people that it needs did something with it."


def _shown(value: object) -> str:
    if isinstance(value, datetime):
        return value.replace(tzinfo=None).isoformat()
    return "" if value is None else f"{value:g}" if isinstance(value, float) else str(value)
