"""Items: find an item, see its catalogue entry, change it, withdraw it or restore it.

The address has the search fields. Saving writes only fields changed in this tab, so that two tabs can edit one item.
"""

from collections.abc import Callable
from datetime import UTC, datetime
from functools import partial
from typing import Any

from freshet_client import DescribedItem, FreshetError, InvalidArgument, Item, ItemProgress
from nicegui import ui

from services.console.access import LOOK
from services.console.elements import area, box, button, entry, item_link, item_list, link, panel, refill, text, typed
from services.console.frame import Page
from services.console.sentences import date_text

PAGE, MAX_EMPTY_PAGES, SIMILAR, MAX_SUGGESTED = 30, 20, 8, 200


class Items(Page):
    async def show(self) -> None:
        self._token, self._item_id = "", self.query.get("item", "")
        self._asked = {name: self.query.get(name, "") for name in ("prefix", "category", "newest")}
        prefix, category, newest = self._asked.values()
        listed = partial(self.client.list_items, prefix, category=category, newest_first=bool(newest))
        self._list_items = partial(listed, page_size=PAGE)
        with box("div", "row end"):
            entry("Begins with", self._find("prefix"), value=prefix, hint="an id or a title, then Enter")
            field = entry("Category", self._find("category"), value=category, hint="its name, then Enter")
            field.props["list"] = "categories"
            newest_first = button("Newest first", lambda: self._find("newest")("" if newest else "1"), classes="chip")
            newest_first.props["aria-pressed"] = str(bool(newest)).lower()
        with box("div", "columns even"):
            with box("section", "panel", aria_label="Found items"):
                self._list = box("ol", "plain")
                self._more = button("Show more", self._show_more, icon="expand_more")
            self._side = box("div", "side")
        catalogue = await self.client.catalogue(max_categories=MAX_SUGGESTED)
        self._kinds = {one.name: one.kind for one in catalogue.attributes}
        with box("datalist", id="categories"):
            for one in catalogue.categories:
                box("option", value=one.name)
        if self._item_id:
            await self._show_item()
        await self._show_more()

    def _find(self, field: str) -> Callable[[str], None]:
        return lambda value: ui.navigate.to(link("/items", **self._asked | {field: value.strip()}))

    async def _show_more(self) -> None:
        for _ in range(MAX_EMPTY_PAGES):
            page = await self._list_items(page_token=self._token)
            self._token = page.next_page_token
            if page.items or not self._token:
                break
        with self._list:
            for one in page.items:
                with box("li", "pair found"):
                    item_link(one.item, "/items", **self._asked)
                    for name in [*one.item.categories[:3], *_marks(one)]:
                        text("span", name, "tag isolated")
            if not (self._list.default_slot.children or self._token):
                text("li", "No item fits: write the beginning of a title or an id.", "hint")
        self._more.set_visibility(bool(self._token))

    async def _show_item(self) -> None:
        """Fetch the item and show it."""
        found = await self.client.get_item(self._item_id)
        item = found.item.item
        with refill(self._side), panel(item.title or item.item_id, "Item"):
            with box("p", "pair"):
                text("span", f"Id {item.item_id}", "hint isolated")
                for name in _marks(found.item):
                    text("span", name, "tag why")
            text("p", _way(found.item, found.progress))
            if found.item.first_seen is not None:
                text("p", f"First described {date_text(found.item.first_seen)}.", "hint")
            self._editor(item)
            text("a", "Why somebody gets it", "button", href=link("/why", item=item.item_id))
        await self._show_similar(is_withdrawn=item.withdrawn)

    def _editor(self, item: Item) -> None:
        lines = "\n".join(item.categories)
        title = entry("Title", lambda _: self._save(), value=item.title)
        categories = area("Categories, one a line", lines, max(2, len(item.categories)))
        # By field: its element, and the text that this tab showed.
        self._inputs = {"title": (title, item.title), "categories": (categories, lines)}
        for name, kind in self._kinds.items():
            value = _shown(item.attributes.get(name))
            field = entry(f"{name} ({kind})", lambda _: self._save(), value=value, hint="none")
            self._inputs[f"attributes.{name}"] = field, value
        self._said = text("p", "", "hint", role="status")
        if self.may("operator"):
            with box("div", "row"):
                button("Save", self._save, classes="button strong")
                if item.withdrawn:
                    button("Restore", lambda: self._put({"withdrawn": False}), icon="undo")
                else:
                    button("Withdraw", lambda: self._put({"withdrawn": True}), icon="block", classes="button danger")

    async def _save(self) -> None:
        """Write the fields that differ from what this tab showed."""
        values, changes = await typed(*(field for field, _ in self._inputs.values())), dict[str, Any]()
        for (name, (_, before)), value in zip(self._inputs.items(), values, strict=True):
            if value.strip() != before:
                try:
                    changes[name] = self._parsed(name, value.strip())
                except ValueError as error:
                    raise InvalidArgument.of(name, value, f"a {self._kinds[name.partition('.')[2]]}") from error
        await self._put(changes)

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
        item = Item(self._item_id, **plain, attributes=attributes)
        await self.client.put_items([item], fields=list(changes))
        await self._show_item()
        gone = " No answer contains the item until it is restored." if changes.get("withdrawn") else ""
        self._said.set_text(f"Saved: {', '.join(changes)}.{gone}")

    async def _show_similar(self, *, is_withdrawn: bool) -> None:
        try:
            items = (await self.client.similar(self._item_id, SIMILAR, context=LOOK)).items
        except FreshetError:
            items = ()
        with self._side, panel("Who is like it"):
            if not items:
                why = "it is withdrawn" if is_withdrawn else "no index serves it yet"
                text("p", f"Nothing is compared with this item, because {why}.", "hint")
            item_list(items, "/items", lambda one: (f"{one.similarity:.2f}", "hint"))


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
