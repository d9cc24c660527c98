"""What the page `Try it` asks for: read from its address, written to its address, and as a call of the gateway."""

from dataclasses import dataclass, field

from freshet_client import AsyncSession, Filter
from starlette.datastructures import QueryParams


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


def call_of(wanted: Wanted, session: AsyncSession, count: int) -> tuple[str, str, dict[str, object], dict[str, object]]:
    """The gateway's method, the client's method, and the arguments of each."""
    user = "" if session.is_visitor else session.user_id
    only = {"allowCategories": wanted.categories} if wanted.categories else {}
    if wanted.words:
        named: dict[str, object] = {"query": wanted.words, "k": count}
        return "Search", "search", named | {"userId": user, "filter": only}, named | _who(user, wanted)
    if wanted.like:
        named = {"item_id": wanted.like, "k": count}
        request = {"itemId": wanted.like, "k": count, "userId": user, "filter": only}
        return "Similar", "similar", request, named | _who(user, wanted)
    request = {
        "userId": session.user_id,
        "k": count,
        "filter": only,
        "maxPerCategory": wanted.per_category,
        "diversity": wanted.variety,
        "withDetails": True,
    }
    arguments = {"user_id": session.user_id, "k": count, "filter": wanted.filter}
    arguments |= {"max_per_category": wanted.per_category, "diversity": wanted.variety, "with_details": True}
    return "Recommend", "recommend", request, arguments


def _who(user: str, wanted: Wanted) -> dict[str, object]:
    return {"user_id": user, "filter": wanted.filter}
