"""The gateway's limits, checked by the in-memory gateway (`testing`). Every check raises InvalidArgument."""

from __future__ import annotations

import math
import time
from typing import Any

from freshet_client.errors import InvalidArgument

_DAY_S = 24 * 3600


def check_k(k: int) -> None:
    """Check the number of items."""
    if not 1 <= k <= 1000:
        raise InvalidArgument.of("k", k, "1-1000")


def check_id(name: str, text: str) -> None:
    """Check an id."""
    check_text(name, text, 1, 128)
    if any(ord(character) < 32 or 127 <= ord(character) < 160 for character in text):
        raise InvalidArgument.of(name, "text with control characters", "no control characters")


def check_text(name: str, text: str, least: int, most: int) -> None:
    """Check that a text has `least` to `most` bytes."""
    size = len(text.encode())
    if not least <= size <= most:
        raise InvalidArgument.of(name, f"text of {size} bytes", f"{least}-{most} bytes of UTF-8")


def check_shown(request: Any) -> None:
    """Check the fields of a Recommend request besides `k` and `user_id`."""
    if not 0.0 <= request.diversity <= 1.0:
        raise InvalidArgument.of("diversity", request.diversity, "0-1")
    if request.HasField("max_gap") and not 0.0 <= request.max_gap < math.inf:
        raise InvalidArgument.of("max_gap", request.max_gap, "a finite number, at least 0")
    if len(request.history) > 1000:
        raise InvalidArgument.of("history", f"{len(request.history)} events", "at most 1000 events")
    if request.HasField("freshness_token") and not request.user_id:
        raise InvalidArgument.of("freshness_token", "set", "only together with user_id")
    if request.page_depth and not request.k <= request.page_depth <= 1000:
        raise InvalidArgument.of("page_depth", request.page_depth, f"0, or {request.k} (k) to 1000")
    if request.HasField("not_again"):
        asked = request.not_again
        for name, value, most in (("answers", asked.answers, 50), ("minutes", asked.minutes, 1440)):
            if value > most:
                raise InvalidArgument.of(f"not_again.{name}", value, f"0-{most}")
        if not asked.answers and not asked.minutes:
            raise InvalidArgument.of("not_again", "neither answers nor minutes", "at least one of them")
    for name in ("page_depth", "page_token", "not_again"):
        is_set = request.HasField(name) if name == "not_again" else getattr(request, name)
        if is_set and not request.user_id:
            raise InvalidArgument.of(name, "set", "only together with user_id")


def check_interaction(one: Any, prefix: str) -> None:
    """Check one interaction; errors put `prefix` before field names."""
    for name in ("user_id", "item_id"):
        check_id(prefix + name, getattr(one, name))
    check_text(f"{prefix}type", one.type or "interaction", 1, 64)
    if not math.isfinite(one.value):
        raise InvalidArgument.of(f"{prefix}value", one.value, "a finite number")
    if one.HasField("event_time") and one.event_time.ToSeconds() > time.time() + _DAY_S:
        at_ms, last_ms = one.event_time.ToMilliseconds(), round((time.time() + _DAY_S) * 1000)
        allowed = f"0 to {last_ms} ms: at most a day in the future"
        raise InvalidArgument.of(f"{prefix}event_time", f"{at_ms} ms", allowed)
    if one.query and one.type != "search_click":
        allowed = "empty unless type is 'search_click' and nothing is undone"
        raise InvalidArgument.of(f"{prefix}query", "set", allowed)
