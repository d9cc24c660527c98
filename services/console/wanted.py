"""What the page `Try it` asks for: its address, the call of the client, and the panel that changes it."""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

from freshet.v1 import gateway_pb2
from freshet_client import AsyncSession, CatalogueDescription, Filter
from nicegui.element import Element
from starlette.datastructures import QueryParams

from services.console.frame import box, entry, fill, panel, text

MAX_CHIPS = 16


@dataclass
class Wanted:
    """What the page asks for, as its address says. If both `words` and `like` are set, `words` counts."""

    user: str = ""
    categories: list[str] = field(default_factory=list)
    words: str = ""
    like: str = ""
    per_category: int = 0
    variety: float = 0.0

    @property
    def filter(self) -> Filter | None:
        return Filter(allow_categories=self.categories) if self.categories else None

    @property
    def address(self) -> list[tuple[str, str]]:
        """The fields that are set, for the address bar."""
        fields = [("user", self.user), ("words", self.words), ("like", self.like)]
        fields += [("category", name) for name in self.categories]
        fields += [("per_category", str(self.per_category or "")), ("variety", str(self.variety or ""))]
        return [(name, value) for name, value in fields if value]

    @classmethod
    def of(cls, asked: QueryParams) -> "Wanted":
        """Read the address. Fields that cannot be parsed are ignored."""
        per_category, variety = asked.get("per_category", ""), asked.get("variety", "")
        return cls(
            user=asked.get("user", ""),
            categories=asked.getlist("category"),
            words=asked.get("words", ""),
            like=asked.get("like", ""),
            per_category=min(int(per_category), 10) if per_category.isdecimal() else 0,
            variety=min(float(variety), 1.0) if variety.replace(".", "", 1).isdecimal() else 0.0,
        )


def call_of(wanted: Wanted, session: AsyncSession, count: int) -> tuple[str, Any, dict[str, Any]]:
    """Return the client's method, an empty request of the gateway's, and the arguments."""
    given: dict[str, Any] = {"k": count, "user_id": session.user_id, "filter": wanted.filter}
    if wanted.words or wanted.like:
        given["user_id"] = "" if session.is_visitor else session.user_id
    if wanted.words:
        return "search", gateway_pb2.GatewayServiceSearchRequest(), {"query": wanted.words} | given
    if wanted.like:
        return "similar", gateway_pb2.GatewayServiceSimilarRequest(), {"item_id": wanted.like} | given
    given |= {"max_per_category": wanted.per_category, "diversity": wanted.variety, "with_details": True}
    return "recommend", gateway_pb2.RecommendRequest(), given


class Filters:
    """The panel of words and filters. search: called with the words. changed: called after any other change."""

    def __init__(
        self, wanted: Wanted, search: Callable[[str], Awaitable[None]], changed: Callable[[], Awaitable[None]]
    ) -> None:
        self._wanted, self._search, self._changed = wanted, search, changed
        self._chips: dict[str, Element] = {}
        self._panel = panel("What to answer", classes="panel after")

    def show(self, catalogue: CatalogueDescription) -> None:
        """Show the fields, with the catalogue's categories. Call it once."""
        with self._panel:
            hint = "find by words, then Enter"
            self._words = entry("Words", self._search, value=self._wanted.words, hint=hint, kind="search")
            if catalogue.categories:
                text("p", "Only these categories", "field-name")
            self._box = box("div", "chips")
            for one in catalogue.categories[:MAX_CHIPS]:
                self._add_chip(one.name, f"{one.items:,}")
            for name in self._wanted.categories:
                if name not in self._chips:
                    self._add_chip(name, "")
            if catalogue.num_categories > MAX_CHIPS:
                entry(f"Another of {catalogue.num_categories:,} categories", self._toggle, hint="its name, then Enter")
            self._range("At most of one category", "per_category", "5", "1", "0 is no limit")
            self._range("Variety", "variety", "0.9", "0.1", "0 orders by score alone")

    def clear_words(self) -> None:
        """Empty the words: the list is no longer a search result."""
        fill(self._words, "")

    def _add_chip(self, name: str, count: str) -> None:
        is_on = str(name in self._wanted.categories).lower()
        with self._box, box("button", "chip", type="button", aria_pressed=is_on) as chip:
            text("span", name, "isolated")
            text("span", count, "count")
        self._chips[name] = chip.on("click", lambda: self._toggle(name))

    async def _toggle(self, name: str) -> None:
        chosen, name = self._wanted.categories, name.strip()
        if not name:
            return
        if name in chosen:
            chosen.remove(name)
        else:
            chosen.append(name)
        if name not in self._chips:
            self._add_chip(name, "")
        self._chips[name].props["aria-pressed"] = str(name in chosen).lower()
        self._chips[name].update()
        await self._changed()

    def _range(self, label: str, name: str, most: str, step: str, hint: str) -> None:
        value = str(getattr(self._wanted, name))
        with box("label", "field"):
            with box("span", "field-name"):
                text("span", label)
                shown = text("span", value)
            slider = box("input", "range", type="range", min="0", max=most, step=step, title=hint)
            slider.props["^value"] = value  # See `entry`.

        async def moved(value: str) -> None:
            setattr(self._wanted, name, int(value) if step == "1" else float(value))
            shown.set_text(value)
            await self._changed()

        slider.on("change", lambda event: moved(str(event.args)), js_handler="(e) => emit(e.target.value)")
