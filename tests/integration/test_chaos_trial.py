"""One trial of `make chaos` on the real stack: 2,000 events, 200 reads, three faults, contents compared."""

import sys
from pathlib import Path

import pytest

from services.stack import Stack

sys.path.append(str(Path(__file__).parents[1] / "chaos"))

pytestmark = [pytest.mark.integration, pytest.mark.cluster, pytest.mark.timeout(290)]


def test_a_trial_on_real_engines_ends_as_the_log_has_it(stack: Stack) -> None:
    from real import RealTrial

    found = RealTrial(stack, 0).run()
    assert found["violations"] == []
    assert (found["events"] >= 2_000, found["reads"] >= 200, len(found["faults"])) == (True, True, 3)
