"""Suggest what an event type unknown to a schema means, and the `events.yaml` line that adds it."""

import difflib

from services.algorithms.bundles.event_schema import EventSchema, EventType, Role

from .columns import plain

# Known type by the first letters of a synonym.
_OTHER_WORDS = {
    "basket": "add_to_cart",
    "buy": "purchase",
    "bought": "purchase",
    "order": "purchase",
    "checkout": "purchase",
    "transaction": "purchase",
    "fav": "save",
    "bookmark": "save",
    "detail": "view",
    "rate": "rating",
    "stars": "rating",
    "dismiss": "hide",
    "refund": "return",
    "stream": "play",
    "show": "impression",
}
# A name with such a prefix undoes an event, so it is not a positive type.
_TAKES_BACK = ("remove", "delete", "cancel", "undo", "un")
_NOTHING = "remove_from_cart"
_LEAST_LIKE = 0.75
_WEIGHT = {Role.POSITIVE: 1.0, Role.NEGATIVE: -1.0, Role.EXPOSURE: 0.0, Role.NEUTRAL: 0.0}


def near_type(name: str, schema: EventSchema) -> str | None:
    """Return the type that `name` probably means; None if no name is near.

    Precedence: the same letters, a prefix that undoes something, a type that contains `name` as a word or is part
    of `name`, a synonym, similar letters.
    """
    spelled = plain(name)
    if not spelled:
        return None
    by_letters = {plain(one): one for one in schema.types}
    if spelled in by_letters:
        return by_letters[spelled]
    if spelled.startswith(_TAKES_BACK):
        return _NOTHING if _NOTHING in schema.types else None
    if len(spelled) >= 3:
        part = [one for letters, one in by_letters.items() if spelled in one.split("_") or letters in spelled]
        if part:
            return max(part, key=lambda one: (len(plain(one)), one)) if len(spelled) > 4 else part[0]
    for beginning, one in _OTHER_WORDS.items():
        if spelled.startswith(beginning) and one in schema.types:
            return one
    like = difflib.get_close_matches(spelled, by_letters, n=1, cutoff=_LEAST_LIKE)
    return by_letters[like[0]] if like else None


def schema_line(name: str, means: EventType) -> str:
    """Return the line of `events.yaml` that gives `name` this meaning."""
    parts = [f"role: {means.role}"]
    if means.weight.centre is not None or means.weight.slope != _WEIGHT[means.role]:
        parts.append(f"weight: {means.weight.slope:g}")
    if means.weight.centre is not None:
        parts.append(f"centre: {means.weight.centre:g}")
    for what in ("seen", "history"):
        if getattr(means, what) is not (means.role in (Role.POSITIVE, Role.NEGATIVE)):
            parts.append(f"{what}: {str(getattr(means, what)).lower()}")
    return f"{name if name.isidentifier() else repr(name)}: {{{', '.join(parts)}}}"


def rating_scale(least: float, most: float) -> tuple[float, float] | None:
    """Return the smallest usual scale that includes `least` and `most`: 0 to 1; 0 or 1 to 7, 10, 20 or 100; a symmetric
    scale if `least` is negative. Return None for up to five stars and for values beyond 100.
    """
    for top in (1.0, 5.0, 7.0, 10.0, 20.0, 100.0):
        if max(most, -least) <= top:
            if least < 0:
                return -top, top
            return None if top == 5.0 or least == top else (float(least >= 1), top)
    return None


def scale_line(name: str, scale: tuple[float, float]) -> str:
    """Return the line of `events.yaml` that maps a scale's ends to the weights -1 and 1."""
    low, high = scale
    return f"{name}: {{role: positive, weight: {2 / (high - low):.4g}, centre: {(low + high) / 2:g}}}"
