"""Read rules from YAML, for the gateway's standing rules and the command line.

rules:
  - name: new-arrivals
    categories: [Drama]
    where: ["released>=2026-01-01"]
    boost: 0.1
"""

from pathlib import Path
from typing import Any

import yaml
from freshet.v1 import common_pb2

from services.contracts.attributes import condition_message
from services.contracts.conditions import parse_condition
from services.platform.errors import InvalidRequest

_LISTS = ("item_ids", "categories", "where")
_EFFECTS = ("boost", "bury", "pin", "cap")
_KEYS = ("name", *_LISTS, *_EFFECTS)


def read_rules(path: Path) -> list[common_pb2.Rule]:
    """Return the rules of a file, limits unchecked. Raises: InvalidRequest with file, rule and key."""
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError, RecursionError) as exc:
        raise InvalidRequest(f"{path} cannot be read: {exc}") from exc
    if not isinstance(content, dict) or list(content) != ["rules"]:
        raise InvalidRequest.of(str(path), "another form", "`rules:` and a list below it")
    return rules_from(f"{path}: rules", content["rules"])


def rules_from(where: str, raw: Any) -> list[common_pb2.Rule]:
    """Return rules from YAML's list. Raises: InvalidRequest with rule and key below `where`."""
    if not isinstance(raw, list):
        raise InvalidRequest.of(where, str(raw)[:80], "a list of rules")
    return [_rule(f"{where}[{position}]", one) for position, one in enumerate(raw)]


def _rule(where: str, raw: Any) -> common_pb2.Rule:
    if not isinstance(raw, dict):
        raise InvalidRequest.of(where, str(raw)[:80], f"keys {', '.join(_KEYS)}")
    if unknown := [key for key in raw if key not in _KEYS]:
        raise InvalidRequest.of(f"{where}.{unknown[0]}", "an unknown key", ", ".join(_KEYS))
    if len([name for name in _EFFECTS if name in raw]) != 1:
        raise InvalidRequest.of(where, "none or several effects", f"one of {', '.join(_EFFECTS)}")
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
    for name in _EFFECTS:
        if name in raw:
            try:
                setattr(rule, name, raw[name])
            except (TypeError, ValueError) as exc:
                allowed = "a number" if name in ("boost", "bury") else "a whole number from 1"
                raise InvalidRequest.of(f"{where}.{name}", str(raw[name])[:80], allowed) from exc
    return rule
