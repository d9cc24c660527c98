"""Work is what the formulas cannot avoid; the roofline takes it at rates that this machine shows."""

import pytest

from services.offline.evaluation.catalogues.scene import SHAPES
from services.offline.evaluation.common.roofline import (
    Rates,
    Work,
    full_scores,
    measure_rates,
    pool_scores,
)

SLOW = Rates(multiply_adds=1.0, exponentials=1.0, bytes_read=1.0, threads=1)


def test_measured_rates_are_a_processors() -> None:
    rates = measure_rates()
    assert 1e8 < rates.multiply_adds < 1e14
    assert 1e6 < rates.exponentials < 1e13
    assert 1e7 < rates.bytes_read < 1e13
    assert rates.threads >= 1


def test_full_scores_count_every_product_and_exponential() -> None:
    work = full_scores(SHAPES["books"], num_queries=2, num_items=10)
    assert work.multiply_adds == 2 * 10 * (64 * 32 + 64 * 128 + 128 * 64)
    assert work.exponentials == 2 * 10 * (128 + 64 + 64)
    assert work.bytes_read == 4 * 10 * (8 * 32 + 64)


def test_pools_share_no_item_and_full_scans_share_all() -> None:
    shape = SHAPES["ml-20m"]
    pools, scan = pool_scores(shape, num_queries=8, pool=50), full_scores(shape, num_queries=8, num_items=50)
    assert pools.multiply_adds == scan.multiply_adds
    assert pools.bytes_read == 8 * scan.bytes_read


@pytest.mark.parametrize(("work", "seconds"), [(Work(multiply_adds=3, exponentials=4, bytes_read=5), 7),
                                               (Work(multiply_adds=3, exponentials=4, bytes_read=9), 9)])  # fmt: skip
def test_arithmetic_adds_up_and_memory_runs_beside_it(work: Work, seconds: float) -> None:
    assert SLOW.seconds(work) == seconds
    assert SLOW.seconds(work + work) == 2 * seconds
