"""Check a request's limits before any work.

Each check raises InvalidRequest for the first invalid field. kinds: the kind of each attribute of the model.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

from services.algorithms.rules.attributes import MAX_CONDITIONS, Kinds
from services.algorithms.rules.filters import ItemFilter
from services.algorithms.rules.ranking_rules import Rule
from services.contracts.topics.interactions import MAX_CONTEXT_BYTES, MAX_CONTEXT_ENTRIES, MAX_FUTURE_MS, MAX_TYPE_BYTES
from services.gateway.domain import (
    ExplainQuery,
    FreshnessToken,
    HistoryEvent,
    RecommendQuery,
    SearchQuery,
    SimilarQuery,
)
from services.gateway.recommend.repeats import MAX_ANSWERS
from services.platform.errors import InvalidRequest
from services.platform.validation import MAX_ID_BYTES, validate_id, validate_query, validate_text

MAX_K = 1000
MAX_HISTORY = 1000
MAX_FILTER_ITEMS = 10_000
MAX_FILTER_CATEGORIES = 1000
MAX_MINUTES = 24 * 60
MAX_RULES, MAX_RULE_ITEMS = 8, 1000


def check_query(query: RecommendQuery, now_ms: int, kinds: Kinds) -> None:
    _check_k(query.k)
    _check_asker(query.user_id, query.history)
    if not 0.0 <= query.diversity <= 1.0:  # NaN fails too
        raise InvalidRequest.of("diversity", query.diversity, "0-1")
    if query.max_gap is not None and not 0.0 <= query.max_gap < math.inf:  # NaN fails too
        raise InvalidRequest.of("max_gap", query.max_gap, "a finite number, at least 0")
    if query.history:
        _check_history(query.history, now_ms)
    _check_context(query.context)
    if query.token is not None:
        _check_token(query.token, query.user_id)
    if query.query:
        validate_query("query", query.query)
    if query.as_of_ms is not None and not 0 <= query.as_of_ms <= now_ms + MAX_FUTURE_MS:
        allowed = f"0 to {now_ms + MAX_FUTURE_MS} ms: at most a day in the future"
        raise InvalidRequest.of("as_of", f"{query.as_of_ms} ms", allowed)
    _check_shown(query)
    check_rules(query.rules, kinds)
    _check_filter(query.filter, kinds)


def check_rules(rules: Sequence[Rule], kinds: Kinds) -> None:
    if len(rules) > MAX_RULES:
        raise InvalidRequest.of("rules", f"{len(rules)} rules", f"at most {MAX_RULES}")
    for position, rule in enumerate(rules):
        check_rule(rule, f"rules[{position}]", kinds)


def check_rule(rule: Rule, field: str, kinds: Kinds) -> None:
    """Check one rule. field: the rule's name in errors."""
    validate_text(f"{field}.name", rule.name, 1, MAX_TYPE_BYTES)
    which = rule.which
    if not (which.allow_item_ids or which.allow_categories or which.where):
        raise InvalidRequest.of(field, "every item", "item_ids, categories or where, at least one of them")
    if len(which.allow_item_ids) > MAX_RULE_ITEMS:
        allowed = f"at most {MAX_RULE_ITEMS}"
        raise InvalidRequest.of(f"{field}.item_ids", f"{len(which.allow_item_ids)} entries", allowed)
    _check_filter(which, kinds, field)
    effects = [name for name in ("boost", "bury", "pin", "cap") if getattr(rule, name)]
    if len(effects) != 1:
        raise InvalidRequest.of(f"{field}.effect", effects or "none, or 0", "one of boost, bury, pin, cap, not 0")
    for name, value in (("boost", rule.boost), ("bury", rule.bury), ("pin", rule.pin), ("cap", rule.cap)):
        if value and not 0 < value <= MAX_K:  # NaN fails too
            raise InvalidRequest.of(f"{field}.{name}", value, f"above 0, at most {MAX_K}")


def _check_shown(query: RecommendQuery) -> None:
    if query.page_depth and not query.k <= query.page_depth <= MAX_K:
        raise InvalidRequest.of("page_depth", query.page_depth, f"0, or {query.k} (k) to {MAX_K}")
    asked = query.not_again
    if asked is not None:
        for name, value, most in (("answers", asked.answers, MAX_ANSWERS), ("minutes", asked.minutes, MAX_MINUTES)):
            if value > most:
                raise InvalidRequest.of(f"not_again.{name}", value, f"0-{most}")
        if not asked.answers and not asked.minutes:
            raise InvalidRequest.of("not_again", "neither answers nor minutes", "at least one of them")
    for name in ("page_depth", "page_token", "not_again"):
        if getattr(query, name) and not query.user_id:
            raise InvalidRequest.of(name, "set", "only together with user_id")


def check_search(query: SearchQuery, kinds: Kinds) -> None:
    validate_query("query", query.query)
    _check_k(query.k)
    if query.user_id:
        validate_id("user_id", query.user_id)
    elif query.filter.exclude_seen:
        raise InvalidRequest.of("filter.exclude_seen", True, "only together with user_id")
    _check_context(query.context)
    _check_filter(query.filter, kinds)


def check_similar(query: SimilarQuery, kinds: Kinds) -> None:
    validate_id("item_id", query.item_id)
    _check_k(query.k)
    if query.user_id:
        validate_id("user_id", query.user_id)
    _check_context(query.context)
    _check_filter(query.filter, kinds)


def check_explain(query: ExplainQuery, now_ms: int, kinds: Kinds) -> None:
    validate_id("item_id", query.item_id)
    _check_asker(query.user_id, query.history)
    _check_history(query.history, now_ms)
    check_rules(query.rules, kinds)


def _check_k(k: int) -> None:
    if not 1 <= k <= MAX_K:
        raise InvalidRequest.of("k", k, f"1-{MAX_K}")


def _check_asker(user_id: str, history: Sequence[HistoryEvent]) -> None:
    if user_id:
        validate_id("user_id", user_id)
    elif not history:
        raise InvalidRequest.of("user_id", "", f"1-{MAX_ID_BYTES} bytes of UTF-8, or empty with a history")


def _check_history(history: Sequence[HistoryEvent], now_ms: int) -> None:
    if len(history) > MAX_HISTORY:
        raise InvalidRequest.of("history", f"{len(history)} events", f"at most {MAX_HISTORY} events")
    latest = 0
    for position, event in enumerate(history):
        validate_id(f"history[{position}].item_id", event.item_id)
        if not math.isfinite(event.value):
            raise InvalidRequest.of(f"history[{position}].value", event.value, "a finite number")
        if len(event.type.encode("utf-8", "replace")) > MAX_TYPE_BYTES:
            raise InvalidRequest.of(f"history[{position}].type", event.type, f"at most {MAX_TYPE_BYTES} bytes of UTF-8")
        time_ms = event.event_time_ms
        if time_ms is None:
            continue
        if not latest <= time_ms <= now_ms + MAX_FUTURE_MS:
            raise InvalidRequest.of(
                f"history[{position}].event_time",
                f"{time_ms} ms",
                f"{latest} to {now_ms + MAX_FUTURE_MS} ms: oldest first, at most a day in the future",
            )
        latest = time_ms


def _check_context(context: Mapping[str, str]) -> None:
    if len(context) > MAX_CONTEXT_ENTRIES:
        raise InvalidRequest.of("context", f"{len(context)} entries", f"at most {MAX_CONTEXT_ENTRIES} entries")
    for key, text in context.items():
        size = max(len(key.encode()), len(text.encode()))
        if size > MAX_CONTEXT_BYTES:
            raise InvalidRequest.of("context", f"an entry of {size} bytes", f"at most {MAX_CONTEXT_BYTES} bytes a side")


def _check_token(token: FreshnessToken, user_id: str) -> None:
    if not user_id:
        raise InvalidRequest.of("freshness_token", "set", "only together with user_id")
    if len(token.epoch) > MAX_ID_BYTES:
        raise InvalidRequest.of("freshness_token.epoch", token.epoch, f"at most {MAX_ID_BYTES} bytes")
    for name, value in (("partition", token.partition), ("offset", token.offset)):
        if value < 0:
            raise InvalidRequest.of(f"freshness_token.{name}", value, "0 or more, as the receipt gave it")


def _check_filter(wanted: ItemFilter, kinds: Kinds, field: str = "filter") -> None:
    for part, texts, limit in (
        ("allow_item_ids", wanted.allow_item_ids, MAX_FILTER_ITEMS),
        ("deny_item_ids", wanted.deny_item_ids, MAX_FILTER_ITEMS),
        ("allow_categories", wanted.allow_categories, MAX_FILTER_CATEGORIES),
        ("deny_categories", wanted.deny_categories, MAX_FILTER_CATEGORIES),
    ):
        # A rule's fields have no prefix `allow_`.
        name = f"{field}.{part if field == 'filter' else part.removeprefix('allow_')}"
        if len(texts) > limit:
            raise InvalidRequest.of(name, f"{len(texts)} entries", f"at most {limit} entries")
        for position, text in enumerate(texts):
            size = len(text) if text.isascii() else len(text.encode())
            if not 1 <= size <= MAX_ID_BYTES:
                raise InvalidRequest.of(
                    f"{name}[{position}]", f"text of {size} bytes", f"1-{MAX_ID_BYTES} bytes of UTF-8"
                )
    if len(wanted.where) > MAX_CONDITIONS:
        raise InvalidRequest.of(f"{field}.where", f"{len(wanted.where)} conditions", f"at most {MAX_CONDITIONS}")
    for position, one in enumerate(wanted.where):
        try:
            one.check(kinds)
        except ValueError as exc:
            raise InvalidRequest(f"{field}.where[{position}]: {exc}") from exc


def with_times(history: Sequence[HistoryEvent], now_ms: int) -> tuple[HistoryEvent, ...]:
    """Give events without a time the time of their predecessor. Those at the beginning get the first known time, else
    `now_ms`.
    """
    if all(event.event_time_ms is not None for event in history):
        return tuple(history)
    time_ms = next((event.event_time_ms for event in history if event.event_time_ms is not None), now_ms)
    timed = []
    for event in history:
        if event.event_time_ms is None:
            timed.append(replace(event, event_time_ms=time_ms))
        else:
            time_ms = event.event_time_ms
            timed.append(event)
    return tuple(timed)
