"""Numbers in laboratory and pharmacy text."""

from __future__ import annotations

import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from manydg.data.columns import parse_numbers
from manydg.sources._tables import parse_doses


def read(text: str) -> float | None:
    return parse_numbers(pl.Series([text])).item()


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("<0.02", 0.02),
        ("> 90 %", 90.0),
        (">=3", 3.0),
        ("1,000", 1000.0),
        ("1,234,567.5", 1234567.5),
        ("0-2", 1.0),
        ("3 to 5", 4.0),
        ("-1--0.5", -0.75),
        ("2.0  ", 2.0),
        ("-3", -3.0),
        ("4.5 (H)", 4.5),
        (".5", 0.5),
        ("1.5e3", 1500.0),
        ("10 /hpf", 10.0),
    ],
)
def test_a_result_with_a_number_in_it_is_read(text: str, number: float) -> None:
    assert read(text) == pytest.approx(number)


@pytest.mark.parametrize(
    "text",
    ["neg", "", "  ", "PYXIS", "+", "1+", "<", "1,00", "12/80", "1.2.3", "10-5", "nan", "inf", "1e999", "see note 3"],
)
def test_what_is_not_a_number_is_missing_and_never_zero(text: str) -> None:
    assert read(text) is None


def test_a_missing_text_stays_missing() -> None:
    assert parse_numbers(pl.Series([None, "7"], dtype=pl.String)).to_list() == [None, 7.0]


def test_a_unit_code_after_a_dose_is_not_part_of_it() -> None:
    assert parse_doses(pl.Series(["15 3", "1,000 mL", "PYXIS", "1-2 mg", None])).to_list() == [
        15,
        1000,
        None,
        1.5,
        None,
    ]


@settings(max_examples=200, deadline=None)
@given(st.floats(-1e6, 1e6).map(lambda value: round(value, 3)))
def test_every_plain_number_reads_as_itself(value: float) -> None:
    assert read(str(value)) == pytest.approx(value)
    assert read(f"  {value} ") == pytest.approx(value)


@settings(max_examples=200, deadline=None)
@given(st.text(max_size=12))
def test_no_text_crashes_the_parser_or_gives_a_number_out_of_nothing(text: str) -> None:
    number = read(text)
    if not any(character.isdigit() for character in text):
        assert number is None
    doses = parse_doses(pl.Series([text]))
    assert len(doses) == 1
