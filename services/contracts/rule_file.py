"""Read rules from YAML.

rules:
  - name: new-arrivals
    categories: [Drama]
    where: ["released>=2026-01-01"]
    boost: 0.1
"""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import yaml
from freshet.v1 import common_pb2

from services.contracts.attributes import COMPARISONS, condition_message, read_value
from services.contracts.conditions import condition_text, parse_condition
from services.platform.errors import InvalidRequest

_LISTS = ("item_ids", "categories", "where")
EFFECTS = ("boost", "bury", "pin", "cap")
_KEYS = ("name", *_LISTS, *EFFECTS)


def read_rules(path: Path) -> list[common_pb2.Rule]:
    """Return the rules of a file, limits unchecked. Raises: InvalidRequest."""
    try:
        written = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as exc:
        raise InvalidRequest(f"{path} cannot be read: {exc}") from exc
    return parse_rules(str(path), written)


def parse_rules(where: str, written: str) -> list[common_pb2.Rule]:
    """Return the rules of a text. where: the file's name in errors. Raises: InvalidRequest as `read_rules`."""
    try:
        content = yaml.safe_load(written)
    except (yaml.YAMLError, RecursionError) as exc:
        raise InvalidRequest(f"{where} cannot be read: {exc}") from exc
    if not isinstance(content, dict) or list(content) != ["rules"]:
        raise InvalidRequest.of(where, "another form", "`rules:` and a list below it")
    return rules_from(f"{where}: rules", content["rules"])


def rules_from(where: str, raw: Any) -> list[common_pb2.Rule]:
    """Return rules from YAML's list. Raises: InvalidRequest with rule and key below `where`."""
    if not isinstance(raw, list):
        raise InvalidRequest.of(where, str(raw)[:80], "a list of rules")
    return [_rule(f"{where}[{position}]", one) for position, one in enumerate(raw)]


def rules_text(rules: Iterable[common_pb2.Rule]) -> str:
    """Return the rules as a file's text."""
    plain = []
    for rule in rules:
        lists = {"item_ids": [*rule.item_ids], "categories": [*rule.categories]}
        lists["where"] = [where_text(one) for one in rule.where]
        effect = rule.WhichOneof("effect") or "boost"
        named = {name: values for name, values in lists.items() if values}
        plain.append({"name": rule.name, **named, effect: getattr(rule, effect)})
    return yaml.safe_dump({"rules": plain}, sort_keys=False, allow_unicode=True, default_flow_style=None, width=120)


def where_text(message: common_pb2.AttributeCondition) -> str:
    values = [read_value(one, "value") for one in message.values]
    return condition_text(message.name, COMPARISONS[message.comparison], values)


def _rule(where: str, raw: Any) -> common_pb2.Rule:
    if not isinstance(raw, dict):
        raise InvalidRequest.of(where, str(raw)[:80], f"keys {', '.join(_KEYS)}")
    if unknown := [key for key in raw if key not in _KEYS]:
        raise InvalidRequest.of(f"{where}.{unknown[0]}", "an unknown key", ", ".join(_KEYS))
    if len([name for name in EFFECTS if name in raw]) != 1:
        raise InvalidRequest.of(where, "none or several effects", f"one of {', '.join(EFFECTS)}")
    for name in _LISTS:
        values = raw.get(name, [])
        if not isinstance(values, list) or not all(isinstance(value, str) for value in values):
            raise InvalidRequest.of(f"{where}.{name}", str(values)[:80], "a list of texts, numbers in quotes")
    rule = common_pb2.Rule(
        name=str(raw.get("name", "")), item_ids=raw.get("item_ids", ()), categories=raw.get("categories", ())
    )
    for text in raw.get("where", ()):
        try:
            rule.where.append(condition_message(*parse_condition(text)))
        except InvalidRequest as exc:
            raise InvalidRequest(f"{where}.where: {exc.message}") from exc
    for name in EFFECTS:
        if name in raw:
            try:
                setattr(rule, name, raw[name])
            except (TypeError, ValueError) as exc:
                allowed = "a number" if name in ("boost", "bury") else "a whole number from 1"
                raise InvalidRequest.of(f"{where}.{name}", str(raw[name])[:80], allowed) from exc
    return rule
