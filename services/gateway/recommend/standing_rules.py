"""Rules for many requests: the operator's rules, and the rules of experiments' arms."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import structlog

from services.algorithms.rules.attributes import Kinds
from services.algorithms.rules.ranking_rules import Rule
from services.contracts.topics.experiments import Experiment
from services.contracts.topics.rules import StandingRules
from services.contracts.wire import rules_of
from services.contracts.yaml_files import read_rules
from services.gateway.validation import check_rule, check_rules
from services.platform.config import ConfigError
from services.platform.errors import InvalidRequest

log = structlog.get_logger()


class LiveRules:
    """The standing rules of a version set. whole: the rules of the last PutRules, or of the file until then. now: the
    rules that the model's attributes allow. problems: why the other rules are left out.
    """

    def __init__(self, kinds: Kinds, of_file: Sequence[Rule] = ()) -> None:
        self.whole = self.now = StandingRules(rules=tuple(of_file))
        self.problems: Sequence[str] = ()
        self._kinds = kinds

    def check(self, rules: Sequence[Rule]) -> None:
        """Check rules for this model. Raises: InvalidRequest."""
        check_rules(rules, self._kinds)

    def apply(self, standing: StandingRules) -> None:
        kept, problems = [], []
        for position, rule in enumerate(standing.rules):
            try:
                check_rule(rule, f"rules[{position}]", self._kinds)
                kept.append(rule)
            except InvalidRequest as exc:
                problems.append(exc.message)
        if problems:
            log.error("rules_not_applied", revision=standing.revision, reasons=problems)
        self.whole, self.now, self.problems = standing, replace(standing, rules=tuple(kept)), problems


def standing_rules(file: Path | None, kinds: Kinds) -> list[Rule]:
    """Return the rules of FRESHET_GATEWAY_RULES, none without a file.

    Raises: ConfigError with the file, the rule, the key and the allowed values.
    """
    if file is None:
        return []
    try:
        rules = list(rules_of(read_rules(file)))
        check_rules(rules, kinds)
    except InvalidRequest as exc:
        raise ConfigError(f"FRESHET_GATEWAY_RULES: {exc.message}") from exc
    return rules


def check_arms(kinds: Kinds, one: Experiment) -> None:
    """Check the rules of an experiment's arms. Raises: InvalidRequest."""
    for number, arm in enumerate(one.arms):
        for position, rule in enumerate(arm.rules):
            check_rule(rule, f"arms[{number}].rules[{position}]", kinds)
