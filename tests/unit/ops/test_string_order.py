"""Positions among ascending strings, by each build, against bisection in Python."""

from bisect import bisect_left

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from native_builds import native_builds

from services.algorithms.item_table.strings import Strings
from services.algorithms.ops.string_order import rows_before

Texts = st.lists(st.text(st.sampled_from("ab\0é\U0001f600"), max_size=4), max_size=60)


@pytest.mark.parametrize("dtype", [np.int32, np.int64])
@settings(max_examples=150, deadline=None)
@given(texts=Texts, others=Texts)
def test_positions_are_those_of_bisection(dtype: type[np.signedinteger], texts: list[str], others: list[str]) -> None:
    strings, wanted = Strings.of(sorted(texts)), Strings.of(sorted(others))
    for library in native_builds("string_order").values():
        ends, other_ends = strings.ends.astype(dtype), wanted.ends.astype(dtype)
        rows = rows_before(strings.data, ends, wanted.data, other_ends, kernels=library)
        assert rows.tolist() == [bisect_left(sorted(texts), one) for one in sorted(others)]


def test_a_few_strings_far_apart_among_many() -> None:
    strings = Strings.of([f"{row:06}" for row in range(50_000)])
    wanted = Strings.of(["000000", "012345", "012345x", "049999", "05"])
    rows = rows_before(strings.data, strings.ends, wanted.data, wanted.ends)
    assert rows.tolist() == [0, 12_345, 12_346, 49_999, 50_000]
