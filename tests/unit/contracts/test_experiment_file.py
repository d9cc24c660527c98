"""An experiment's file: what it may have, and the errors that name the key."""

import pytest

from services.contracts.topics.experiments import Arm, experiment_of
from services.contracts.yaml_files import EXAMPLE, parse_experiment
from services.platform.errors import InvalidRequest

ARMS = "name: a\narms: [{name: control, share: 0.5}, {name: few, share: 0.5, "


def test_the_example_is_an_experiment() -> None:
    found = experiment_of(parse_experiment(EXAMPLE, "file"))
    assert (found.name, found.layer, found.share) == ("diversity", "ranking", 0.2)
    assert found.arms == (Arm(name="control", share=0.5), Arm(name="diverse", share=0.5, diversity=0.3))


@pytest.mark.parametrize(
    ("written", "error"),
    [
        ("name: a", r"file: arms='None' allowed: a list of arms"),
        (ARMS + "colour: red}]", r"file: arms\[1\]: colour='an unknown key'"),
        (ARMS + "diversity: high}]", r"file: arms\[1\]\.diversity='high' allowed: a number"),
        (ARMS + "max_per_category: -1}]", r"arms\[1\]\.max_per_category='-1' allowed: a whole number from 0"),
        (ARMS + "max_per_category: .nan}]", r"arms\[1\]\.max_per_category='nan' allowed: a whole number from 0"),
        (ARMS + "rules: [{name: x, boost: high}]}]", r"arms\[1\]\.rules\[0\]\.boost='high' allowed: a number"),
    ],
)
def test_a_key_that_cannot_be_read_is_named(written: str, error: str) -> None:
    with pytest.raises(InvalidRequest, match=error):
        parse_experiment(written, "file")


def test_each_commented_key_of_the_example_stands_alone() -> None:
    written = EXAMPLE.replace("# context:", "context:")
    assert dict(parse_experiment(written, "file").context) == {"surface": "home"}
    assert experiment_of(parse_experiment(EXAMPLE.replace("# interleaved:", "interleaved:"), "file")).interleaved
