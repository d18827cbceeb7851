"""Known values and properties of Holm's correction."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tapfm.metrics.holm import holm_correction

P_VALUES = st.lists(st.one_of(st.none(), st.floats(0, 1)), max_size=12)


def test_known_values():
    # in ascending order: 4 * 0.005, 3 * 0.01, 2 * 0.03, and 0.04, which is raised to the previous 0.06
    assert holm_correction([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert holm_correction([0.5, 0.9]) == [1.0, 1.0]
    assert holm_correction([None, 0.2]) == [None, 0.2]
    assert holm_correction([]) == []


@given(P_VALUES)
def test_corrected_values_keep_the_order_and_are_at_most_1(p_values):
    corrected = holm_correction(p_values)
    assert [each is None for each in corrected] == [each is None for each in p_values]
    both = sorted((p, c) for p, c in zip(p_values, corrected, strict=True) if p is not None)
    assert all(p <= c <= 1 for p, c in both)
    assert [c for _, c in both] == sorted(c for _, c in both)
    if both:
        assert both[0][1] == min(1.0, both[0][0] * len(both))
