"""Parse conditions on attributes from a command line or a rules file.

    price<=20   released >= 2026-01-01   language in en,de   brand not in "7",x   has price   has no price

A value's form gives its kind: 20 or -1.5e3 is a number, 2026-01-01 or 2026-01-01T08:00:00+02:00 a time (UTC by
default), anything else, or text in double quotes, a tag.
"""

import re
from collections.abc import Iterable
from datetime import UTC, datetime, timedelta

from services.contracts.attributes import ParsedCondition, Value
from services.platform.errors import InvalidRequest

_NAME = r"([A-Za-z_][A-Za-z0-9_]*)"
_PRESENCE = re.compile(rf"\s*has\s+(no\s+)?{_NAME}\s*")
_ORDERED = re.compile(rf"\s*{_NAME}\s*(<=|>=|<|>|=)\s*([^\s<>=].*?)\s*")
_LISTED = re.compile(rf"\s*{_NAME}\s+(not\s+)?in\s+(.+?)\s*")
_COMPARISONS = {"<=": "at most", ">=": "at least", "<": "below", ">": "above", "=": "one of"}
_SYMBOLS = {one: symbol for symbol, one in _COMPARISONS.items()} | {"one of": " in ", "none of": " not in "}
_NUMBER = re.compile(r"[-+]?(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?")
_TIME = re.compile(r"\d{4}-\d\d-\d\d([T ]\d\d:\d\d(:\d\d(\.\d{1,6})?)?(Z|[-+]\d\d:\d\d)?)?")
_VALUES = re.compile(r'\s*("[^"]*"|[^",]+?)\s*(,|$)')
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_ALLOWED = "e.g. price<=20, released>=2026-01-01, language in en,de, language not in fr, has price, has no price"


def parse_condition(text: str) -> ParsedCondition:
    """Return name, comparison and values. Raises: InvalidRequest with allowed examples."""
    if match := _PRESENCE.fullmatch(text):
        return match[2], "absent" if match[1] else "present", ()
    if match := _ORDERED.fullmatch(text):
        return match[1], _COMPARISONS[match[2]], (parse_value(match[3]),)
    if match := _LISTED.fullmatch(text):
        return match[1], "none of" if match[2] else "one of", _values(match[3], text)
    raise InvalidRequest.of("condition", text[:200], _ALLOWED)


def parse_value(text: str) -> Value:
    """Return a number, Unix milliseconds, or a tag. Raises: InvalidRequest for an invalid date."""
    if len(text) > 1 and text[0] == text[-1] == '"':
        return text[1:-1]
    if _NUMBER.fullmatch(text):
        return float(text)
    if not _TIME.fullmatch(text):
        return text
    try:
        time = datetime.fromisoformat(text)
    except ValueError as exc:
        raise InvalidRequest.of("time", text, f"a date of the calendar ({exc}); a tag in double quotes") from exc
    return ((time if time.tzinfo else time.replace(tzinfo=UTC)) - _EPOCH) // timedelta(milliseconds=1)


def condition_text(name: str, comparison: str, values: Iterable[Value]) -> str:
    """The inverse of `parse_condition`, for tags without double quotes."""
    if comparison in ("present", "absent"):
        return f"has {'no ' if comparison == 'absent' else ''}{name}"
    texts = [
        f'"{one}"'
        if isinstance(one, str)
        else repr(one)
        if isinstance(one, float)
        else (_EPOCH + timedelta(milliseconds=one)).isoformat()
        for one in values
    ]
    return f"{name}{_SYMBOLS[comparison]}{','.join(texts)}"


def _values(text: str, condition: str) -> tuple[Value, ...]:
    values, start = [], 0
    while match := _VALUES.match(text, start):
        values.append(parse_value(match[1]))
        start = match.end()
        if not match[2]:
            return tuple(values)
    raise InvalidRequest.of("condition", condition[:200], _ALLOWED)
