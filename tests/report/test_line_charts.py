"""Lines: numbers on axes as one would write them."""

from __future__ import annotations

import re

import numpy as np

from manydg.report.charts import Series, common_limits, lines

PATIENTS = np.array([100.0, 1_000, 10_000, 100_000, 1_000_000])


def texts(svg: str) -> list[str]:
    return re.findall(r"<text[^>]*>([^<]*)</text>", svg)


def test_numbers_of_logarithmic_axes_are_written_out() -> None:
    series = [Series("DANN", PATIENTS, np.array([1.0, 20, 300, 4_000, 50_000]))]
    panel = lines("Cost", series, "patients", "milliseconds", scale="log", y_scale="log")
    written = texts(panel.svg)
    assert {"100", "1,000", "10,000", "100,000", "1,000,000"} <= set(written)
    assert {"1", "10"} <= set(written)
    assert not any("e+" in text or "^" in text for text in written)
    assert panel.words.endswith("at 1,000,000.")


def test_limits_of_a_logarithmic_axis_leave_a_margin_above_0() -> None:
    groups = [[Series("a", PATIENTS, np.array([1.0, 10, 100, 1_000, 10_000]))]]
    low, high = common_limits(groups, "log") or (0.0, 0.0)
    assert 0.5 < low < 1
    assert 10_000 < high < 20_000
