"""Read an experiment from YAML."""

from pathlib import Path
from typing import Any

import yaml
from freshet.v1 import events_pb2

from services.contracts.rule_file import rules_from
from services.platform.errors import InvalidRequest

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
_KEYS = ("name", "layer", "share", "arms", "context", "interleaved")
_ARM_KEYS = ("name", "share", "version_set", "rules", "diversity", "max_per_category", "new_item_share", "max_gap")


def read_experiment(path: Path) -> events_pb2.Experiment:
    """Return the experiment of a file, limits unchecked. Raises: InvalidRequest with file and key."""
    try:
        return parse_experiment(path.read_text(encoding="utf-8"), str(path))
    except (OSError, UnicodeDecodeError) as exc:
        raise InvalidRequest(f"{path} cannot be read: {exc}") from exc


def parse_experiment(text: str, path: str) -> events_pb2.Experiment:
    """Return the experiment of a text; `path` names it in errors. Raises: InvalidRequest as `read_experiment`."""
    try:
        content = yaml.safe_load(text)
    except (yaml.YAMLError, RecursionError) as exc:
        raise InvalidRequest(f"{path} cannot be read: {exc}") from exc
    raw = _keyed(path, content, _KEYS)
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


def _keyed(where: str, raw: Any, keys: tuple[str, ...] = ()) -> dict[str, Any]:
    if not isinstance(raw, dict):
        raise InvalidRequest.of(where, str(raw)[:80], f"keys {', '.join(keys)}" if keys else "names and values")
    if keys and (unknown := [key for key in raw if key not in keys]):
        raise InvalidRequest.of(f"{where}: {unknown[0]}", "an unknown key", ", ".join(keys))
    return raw


def _number(where: str, raw: Any) -> float:
    if isinstance(raw, bool) or not isinstance(raw, int | float):
        raise InvalidRequest.of(where, str(raw)[:80], "a number")
    return float(raw)
