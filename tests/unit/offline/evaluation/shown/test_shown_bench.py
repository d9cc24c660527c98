"""The simulated world: equal seeds are equal, effects do what their names say, and the page shows what was measured."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from services.algorithms.scoring.impressions import discount
from services.offline.evaluation.common.report import Request
from services.offline.evaluation.shown import rows
from services.offline.evaluation.shown.world import Policy, World, run

SMALL = World(people=40, items=120, days=4)


def test_an_impression_halves() -> None:
    np.testing.assert_allclose(discount([0, 50, 100, -5], each=0.8, half_life_s=50), [0.8, 0.4, 0.2, 0.8])


def test_equal_seeds_are_equal_and_others_are_not() -> None:
    assert run(SMALL, Policy(), 3) == run(SMALL, Policy(), 3) != run(SMALL, Policy(), 4)


def test_who_tires_takes_less_and_who_hides_nothing_hides_nothing() -> None:
    tired = [run(replace(SMALL, fatigue=fatigue), Policy(), 3).taken for fatigue in (0.0, 3.0)]
    assert tired[0] > tired[1]
    assert run(replace(SMALL, hides=0.0), Policy(), 3).hidden == 0
    assert run(SMALL, Policy(), 3).hidden > 0


def test_reserved_positions_show_new_items() -> None:
    hidden_by_noise = replace(SMALL, new_noise=5.0)
    without, reserved = (run(hidden_by_noise, Policy(new_share=share), 3).new_taken for share in (0.0, 0.5))
    assert reserved > without


@pytest.mark.parametrize("world", rows.WORLDS)
def test_worlds_differ_from_the_first_in_one_effect(world: str) -> None:
    first, other = rows.WORLDS["all effects"], rows.WORLDS[world]
    assert sum(getattr(first, name) != getattr(other, name) for name in World.__slots__) == (world != "all effects")


def test_the_page_says_that_it_is_simulated(tmp_path: Path) -> None:
    report = rows.measure(
        Request(quick=True, seed=0, out=tmp_path, how="freshet bench shown --quick", say=lambda _: None)
    )
    assert len(report["rows"]) == len(rows.WORLDS) * len(rows.POLICIES)
    page = (tmp_path / "shown.md").read_text()
    assert "(simulated)" in page
    assert page.count("| nobody tires |") == len(rows.POLICIES)
