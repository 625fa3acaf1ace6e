"""Numbers out of the text that laboratories and pharmacies write: parsed, or missing; never zero by default."""

from __future__ import annotations

import polars as pl

_NUMBER = r"[+-]?(?:\d{1,3}(?:,\d{3})+(?:\.\d*)?|\d+(?:\.\d*)?|\.\d+)(?:[eE][+-]?\d+)?"
_UNIT = r"(?:\s*/?[%A-Za-z°µμ*^(].*)?"


def parse_numbers(texts: pl.Series) -> pl.Series:
    """Read each text as a number.

    A limit counts as the limit itself (``<0.02`` is 0.02, ``> 90 %`` is 90), a range as its middle (``0-2`` is 1), and
    a comma between groups of three digits is dropped (``1,000`` is 1000). A unit may follow (``40 mg``). What is not
    a number (``neg``, ``PYXIS``, an empty text) is missing, null.

    Parameters
    ----------
    texts : Series of str

    Returns
    -------
    Series of float64

    Examples
    --------
    >>> parse_numbers(pl.Series(["<0.02", "> 90 %", "neg", "1,000", "0-2", "2.0  ", "40 mg", "-3"])).to_list()
    [0.02, 90.0, None, 1000.0, 1.0, 2.0, 40.0, -3.0]
    """
    clean = texts.cast(pl.String).str.strip_chars()
    frame = pl.DataFrame({"text": clean}).select(
        single=_as_float(pl.col("text").str.extract(rf"^(?:[<>]=?|[≤≥~])?\s*({_NUMBER}){_UNIT}$")),
        low=_as_float(pl.col("text").str.extract(rf"^({_NUMBER})\s*(?:-|–|to)\s*{_NUMBER}{_UNIT}$")),
        high=_as_float(pl.col("text").str.extract(rf"^{_NUMBER}\s*(?:-|–|to)\s*({_NUMBER}){_UNIT}$")),
    )
    low, high = pl.col("low"), pl.col("high")
    # A "range" that falls is a date, a ratio or a slip of the pen; its middle would mean nothing.
    middle = pl.when(low <= high).then((low + high) / 2)
    ranged = low.is_not_null() & high.is_not_null()
    return frame.select(pl.when(ranged).then(middle).otherwise(pl.col("single")).alias(texts.name)).to_series()


def parse_doses(texts: pl.Series) -> pl.Series:
    """Read each dosage as a number; some hospitals write a unit's code number after the dose (``5 3`` is 5).

    Examples
    --------
    >>> parse_doses(pl.Series(["5 3", "40 mg", "1,000 mL", "PYXIS"])).to_list()
    [5.0, 40.0, 1000.0, None]
    """
    return parse_numbers(texts.cast(pl.String).str.replace(r"^(\s*\S+)\s+\d+\s*$", "$1"))


def _as_float(expression: pl.Expr) -> pl.Expr:
    value = expression.str.replace_all(",", "", literal=True).cast(pl.Float64, strict=False)
    # Float32 is what the dataset stores: a number beyond its range is no measurement.
    return pl.when(value.abs() < 3e38).then(value)
