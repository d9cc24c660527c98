"""Unit costs by size: a fit goes through its points, and a check says how far off its predictions were."""

from typing import Any

import pytest

from services.offline.evaluation.scale.rows import QUANTITIES, compared, page
from services.offline.evaluation.scale.unit_costs import fit


@pytest.mark.parametrize("power", [0.5, 1.0])
def test_a_fit_goes_through_both_points(power: float) -> None:
    fitted = fit({100: 3.0, 10_000: 21.0}, power)
    assert fitted(100) == pytest.approx(3.0)
    assert fitted(10_000) == pytest.approx(21.0)


def test_a_fit_grows_with_its_power() -> None:
    assert fit({0: 1.0, 100: 11.0}, 1.0)(400) == pytest.approx(41.0)
    assert fit({0: 1.0, 100: 11.0}, 0.5)(400) == pytest.approx(21.0)


def row(num_items: int, value: float) -> dict[str, Any]:
    return {"num_items": num_items, "load": 0.1, "start_s": 1.0} | dict.fromkeys(QUANTITIES, value)


def report() -> dict[str, Any]:
    return {
        "command": "freshet bench scale",
        "machine": "a machine",
        "item_bytes": {"state": 432},
        "rows": [row(10, 1.0), row(1_000, 2.0)],
        "fits": {name: {"at_zero": 1.0, "slope": 0.001, "power": power} for name, (_, power) in QUANTITIES.items()},
        "predictions": [
            {"quantity": name, "num_items": size, "predicted": 2.2, "measured": None, "error": None}
            for size in (300, 5_000)
            for name in QUANTITIES
        ],
        "users": [],
        "records": [],
        "check": None,
    }


def test_a_check_adds_errors_and_leaves_the_fit_and_the_predictions() -> None:
    before = report()
    after = compared(before, [row(300, 2.0), row(5_000, 4.4)])
    assert {(one["num_items"], one["error"]) for one in after["predictions"]} == {(300, 0.1), (5_000, -0.5)}
    assert [one["predicted"] for one in after["predictions"]] == [one["predicted"] for one in before["predictions"]]
    assert after["fits"] == before["fits"]
    assert [one["num_items"] for one in after["rows"]] == [10, 1_000, 300, 5_000]
    assert compared(after, [row(300, 2.0), row(5_000, 4.4)]) == after


def test_the_page_says_whether_predictions_were_checked() -> None:
    assert "Not measured yet" in page(report())
    checked = compared(report(), [row(300, 2.0), row(5_000, 4.4)])
    checked["check"] = {"command": "freshet bench scale --check", "machine": "another machine"}
    assert "Largest error: 50%" in page(checked)
    assert "Not measured yet" not in page(checked)
