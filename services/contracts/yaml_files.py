"""Read rules and experiments from YAML, limits unchecked. Errors name the file and the key.

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
from freshet.v1 import common_pb2, events_pb2

from services.contracts.attributes import COMPARISONS, condition_message, condition_text, parse_condition, read_value
from services.platform.errors import InvalidRequest

_LISTS = ("item_ids", "categories", "where")
EFFECTS = ("boost", "bury", "pin", "cap")
_RULE_KEYS = ("name", *_LISTS, *EFFECTS)
_EXPERIMENT_KEYS = ("name", "layer", "share", "arms", "context", "interleaved")
_ARM_KEYS = ("name", "share", "version_set", "rules", "diversity", "max_per_category", "new_item_share", "max_gap")
EXAMPLE = """\
# 20 % of the users of layer "ranking" take part, half of them in each arm. The first arm is the control.
name: diversity
layer: ranking
share: 0.2
arms:
  - name: control
    share: 0.5
  - name: diverse
    share: 0.5
    diversity: 0.3          # and max_per_category, new_item_share, max_gap, version_set, rules (as in a rules file)
# Only requests with this in their context; leave it out for all.
# context: {surface: home}
# Both arms in one answer, item by item: a verdict with far fewer users. Two arms.
# interleaved: true
"""


def read_rules(path: Path) -> list[common_pb2.Rule]:
    """Return the rules of a file. Raises: InvalidRequest."""
    return parse_rules(str(path), _text(path))


def parse_rules(where: str, written: str) -> list[common_pb2.Rule]:
    """Return the rules of a text. where: the file's name in errors. Raises: InvalidRequest."""
    content = _parsed(where, written)
    if not isinstance(content, dict) or list(content) != ["rules"]:
        raise InvalidRequest.of(where, "another form", "`rules:` and a list below it")
    return rules_from(f"{where}: rules", content["rules"])


def rules_from(where: str, raw: Any) -> list[common_pb2.Rule]:
    """Return the rules of a list. where: the list's place in errors. Raises: InvalidRequest."""
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
    _keyed(where, raw, _RULE_KEYS, before_key=".")
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


def read_experiment(path: Path) -> events_pb2.Experiment:
    """Return the experiment of a file. Raises: InvalidRequest."""
    return parse_experiment(_text(path), str(path))


def parse_experiment(text: str, path: str) -> events_pb2.Experiment:
    """Return the experiment of a text. path: its name in errors. Raises: InvalidRequest."""
    raw = _keyed(path, _parsed(path, text), _EXPERIMENT_KEYS)
    arms = raw.get("arms")
    if not isinstance(arms, list):
        raise InvalidRequest.of(f"{path}: arms", str(arms)[:80], "a list of arms")
    return events_pb2.Experiment(
        name=str(raw.get("name", "")),
        layer=str(raw.get("layer", "default")),
        share=_number(f"{path}: share", raw.get("share", 1.0)),
        arms=[_arm(f"{path}: arms[{number}]", one) for number, one in enumerate(arms)],
        context={str(name): str(value) for name, value in _keyed(f"{path}: context", raw.get("context", {})).items()},
        interleaved=raw.get("interleaved") is True,
        state=events_pb2.Experiment.STATE_CREATED,
    )


def _arm(where: str, raw: Any) -> events_pb2.Arm:
    arm = _keyed(where, raw, _ARM_KEYS)

    def optional(name: str) -> float | None:
        return _number(f"{where}.{name}", arm[name]) if arm.get(name) is not None else None

    made = events_pb2.Arm(
        name=str(arm.get("name", "")),
        share=_number(f"{where}.share", arm.get("share")),
        version_set=str(arm.get("version_set", "")),
        rules=rules_from(f"{where}.rules", arm.get("rules", [])),
        diversity=_number(f"{where}.diversity", arm.get("diversity", 0.0)),
        new_item_share=optional("new_item_share"),
        max_gap=optional("max_gap"),
    )
    most = arm.get("max_per_category", 0)
    try:
        made.max_per_category = most
    except (TypeError, ValueError) as exc:
        raise InvalidRequest.of(f"{where}.max_per_category", str(most)[:80], "a whole number from 0") from exc
    return made


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as exc:
        raise InvalidRequest(f"{path} cannot be read: {exc}") from exc


def _parsed(where: str, written: str) -> Any:
    try:
        return yaml.safe_load(written)
    except (yaml.YAMLError, RecursionError) as exc:
        raise InvalidRequest(f"{where} cannot be read: {exc}") from exc


def _keyed(where: str, raw: Any, keys: tuple[str, ...] = (), *, before_key: str = ": ") -> dict[str, Any]:
    if not isinstance(raw, dict):
        raise InvalidRequest.of(where, str(raw)[:80], f"keys {', '.join(keys)}" if keys else "names and values")
    if keys and (unknown := [key for key in raw if key not in keys]):
        raise InvalidRequest.of(f"{where}{before_key}{unknown[0]}", "an unknown key", ", ".join(keys))
    return raw


def _number(where: str, raw: Any) -> float:
    if isinstance(raw, bool) or not isinstance(raw, int | float):
        raise InvalidRequest.of(where, str(raw)[:80], "a number")
    return float(raw)
