"""Rules of more than one request: the operator's, for all answers, and those of experiments' arms."""

from pathlib import Path

from services.algorithms.rules.attributes import Kinds
from services.algorithms.rules.ranking_rules import Rule
from services.contracts.experiments import Experiment
from services.contracts.rule_file import read_rules
from services.contracts.wire import rules_of
from services.gateway.validation import MAX_RULES, check_rule
from services.platform.config import ConfigError
from services.platform.errors import InvalidRequest


def standing_rules(file: Path | None, kinds: Kinds) -> list[Rule]:
    """Return the rules of FRESHET_GATEWAY_RULES, none without a file. Raises: ConfigError with file, rule, key and what
    is
    allowed.
    """
    if file is None:
        return []
    try:
        rules = list(rules_of(read_rules(file)))
        for position, rule in enumerate(rules):
            check_rule(rule, f"rules[{position}]", kinds)
        if len(rules) > MAX_RULES:
            raise InvalidRequest.of("rules", f"{len(rules)} rules", f"at most {MAX_RULES}")
    except InvalidRequest as exc:
        raise ConfigError(f"FRESHET_GATEWAY_RULES: {exc.message}") from exc
    return rules


def check_arms(kinds: Kinds, one: Experiment) -> None:
    """Raises: InvalidRequest for the first rule of an arm that breaks its limit, or that these kinds do not allow."""
    for number, arm in enumerate(one.arms):
        for position, rule in enumerate(arm.rules):
            check_rule(rule, f"arms[{number}].rules[{position}]", kinds)
