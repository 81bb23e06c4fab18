"""A thinned curve has the peaks of the whole one."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from packtrain.report.figures import thin


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=400), st.integers(4, 60))
def test_ends_and_extremes_stay_and_no_more_points_than_asked_for(values: list[float], most: int) -> None:
    curve = np.array(values)
    kept = thin(curve, most)
    assert len(kept) <= max(most, 4) and (np.diff(kept) > 0).all()
    assert kept[0] == 0 and kept[-1] == len(curve) - 1
    assert curve[kept].min() == curve.min() and curve[kept].max() == curve.max()
    if len(curve) <= most:
        assert kept.tolist() == [*range(len(curve))]


@pytest.mark.parametrize("peak", [1, 777, 49_998])
def test_a_single_peak_is_kept_where_it_is(peak: int) -> None:
    curve = np.sin(np.arange(50_000) / 500)
    curve[peak] = -9
    assert peak in thin(curve, 200)
