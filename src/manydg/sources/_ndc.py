"""Drug codes: NDC to ATC by a table the user names, and pairs of drugs that interact."""

from __future__ import annotations

from pathlib import Path

import polars as pl

from manydg.errors import DataError
from manydg.sources._tables import Table, open_table

ATC_CHARACTERS = 4
_ATC_COLUMNS = ("atc", "atc4", "atc_code", "atc_4", "atc3", "atc5")
_NDC_COLUMNS = ("ndc", "ndc11", "ndc_code")


def normalise_ndc(column: pl.Expr) -> pl.Expr:
    """Eleven digits: hyphened parts are padded to 5-4-2, and leading zeros that a spreadsheet ate come back.

    Zero, which MIMIC-III writes for an unknown product, and anything that is not a code become null.

    Examples
    --------
    >>> codes = pl.DataFrame({"ndc": ["0002-3235-60", "2323560", "0", "n/a"]})
    >>> codes.select(normalise_ndc(pl.col("ndc")))["ndc"].to_list()
    ['00002323560', '00002323560', None, None]
    """
    text = column.str.strip_chars().str.strip_suffix(".0")
    parts = [text.str.extract(r"^(\d{1,5})-(\d{1,4})-(\d{1,2})$", group) for group in (1, 2, 3)]
    joined = pl.concat_str(part.str.zfill(width) for part, width in zip(parts, (5, 4, 2), strict=True))
    digits = pl.coalesce(joined, text)
    valid = digits.str.contains(r"^\d{1,11}$") & ~digits.str.contains(r"^0+$")
    return pl.when(valid).then(digits.str.zfill(11)).alias("ndc")


def cut_atc(column: pl.Expr) -> pl.Expr:
    """The first four characters of an ATC code in upper case (``A12CA01`` is ``A12C``); null for what is none."""
    return column.str.strip_chars().str.to_uppercase().str.extract(r"^([A-Z]\d{2}[A-Z])(?:[A-Z](?:\d{2})?)?$")


def read_ndc_map(path: str | Path) -> pl.DataFrame:
    """Read a mapping from product codes to drug classes.

    Parameters
    ----------
    path : path
        A CSV file (plain or gzipped) with a column ``ndc`` and a column ``atc`` (or ``atc4``, ``atc_code``), in any
        case; other columns are ignored. The first row with a valid class counts where a code stands in several.

    Returns
    -------
    DataFrame
        Columns ``ndc`` (eleven digits) and ``atc`` (four characters), one row a code.
    """
    table = _open_map(path, "NDC to ATC mapping")
    ndc, atc = _column(table, _NDC_COLUMNS), _column(table, _ATC_COLUMNS)
    with table.reading():
        rows = table.scan(texts=[ndc, atc]).collect(engine="streaming")
    frame = rows.select(normalise_ndc(pl.col(ndc)), cut_atc(pl.col(atc)).alias("atc"))
    frame = frame.drop_nulls().unique("ndc", keep="first", maintain_order=True)
    if frame.is_empty():
        raise DataError(f"{path} maps no NDC to an ATC code: it needs rows such as 00002323560,N06AX")
    return frame


def read_interactions(
    path: str | Path, drugs: list[str], *, compounds: str | Path | None = None, side_effects: int = 40
) -> list[list[int]]:
    """Read which pairs of drugs interact.

    Parameters
    ----------
    path : path
        Either a CSV file with the columns ``atc_1`` and ``atc_2``, or a table of STITCH compound pairs with the columns
        ``stitch 1`` and ``stitch 2`` (as TWOSIDES is distributed), which needs ``compounds``.
    drugs : list of str
        The dataset's drugs, four characters each, in label order.
    compounds : path, optional
        A CSV file without header: a STITCH compound, then its ATC codes.
    side_effects : int
        Where the table names side effects, only pairs with one of this many rarest of them count: nearly any two drugs
        share a common one.

    Returns
    -------
    list of [int, int]
        Pairs of label indices, the smaller first, sorted.
    """
    table = _open_map(path, "drug-interaction table")
    if "atc_1" in table.columns:
        pairs = _atc_pairs(table)
    elif "stitch 1" in table.columns:
        if compounds is None:
            raise DataError(f"{path} names STITCH compounds: name the table that gives their ATC codes too (--ddi-atc)")
        pairs = _compound_pairs(table, Path(compounds), side_effects)
    else:
        raise DataError(f"{path} has neither the columns atc_1, atc_2 nor STITCH 1, STITCH 2: see the docs on --ddi")
    index = pl.DataFrame({"atc": drugs, "label": range(len(drugs))}, schema={"atc": pl.String, "label": pl.Int64})
    found = pairs.join(index.rename({"atc": "first", "label": "i"}), on="first").join(
        index.rename({"atc": "second", "label": "j"}), on="second"
    )
    low, high = pl.min_horizontal("i", "j"), pl.max_horizontal("i", "j")
    unique = found.filter(pl.col("i") != pl.col("j")).select(i=low, j=high).unique().sort("i", "j")
    return [[int(i), int(j)] for i, j in unique.iter_rows()]


def _open_map(path: str | Path, what: str) -> Table:
    file = Path(path)
    if not file.is_file():
        raise DataError(f"there is no {what} at {file}")
    return open_table(file, file.name)


def _column(table: Table, names: tuple[str, ...]) -> str:
    for name in names:
        if name in table.columns:
            return name
    raise DataError(f"{table.path} has no column '{names[0]}'; its columns are {', '.join(table.columns)}")


def _atc_pairs(table: Table) -> pl.DataFrame:
    with table.reading():
        rows = table.scan(texts=["atc_1", "atc_2"]).collect(engine="streaming")
    return rows.select(first=cut_atc(pl.col("atc_1")), second=cut_atc(pl.col("atc_2"))).drop_nulls().unique()


def _compound_pairs(table: Table, compounds: Path, side_effects: int) -> pl.DataFrame:
    atc = _read_compounds(compounds)
    texts = ["stitch 1", "stitch 2"]
    with table.reading():
        if "side effect name" in table.columns:
            rows = table.scan(texts=[*texts, "side effect name"]).collect(engine="streaming")
            effect = pl.col("side effect name")
            rarest = rows.group_by(effect).len().sort("len", "side effect name").head(side_effects)
            rows = rows.join(rarest.select(effect), on="side effect name", how="semi")
        else:
            rows = table.scan(texts=texts).collect(engine="streaming")
    named = rows.select(one="stitch 1", two="stitch 2").unique()
    first = named.join(atc.rename({"compound": "one", "atc": "first"}), on="one")
    both = first.join(atc.rename({"compound": "two", "atc": "second"}), on="two")
    return both.select("first", "second").unique()


def _read_compounds(path: Path) -> pl.DataFrame:
    if not path.is_file():
        raise DataError(f"there is no table of compounds at {path}")
    try:
        lines = pl.Series("line", path.read_text().splitlines(), dtype=pl.String)
    except (OSError, UnicodeDecodeError):
        raise DataError(f"{path} cannot be read as text") from None
    frame = pl.DataFrame(lines).select(
        compound=pl.col("line").str.split(",").list.first().str.strip_chars(),
        atc=pl.col("line").str.split(",").list.slice(1),
    )
    frame = frame.explode("atc").select("compound", cut_atc(pl.col("atc")).alias("atc")).drop_nulls().unique()
    if frame.is_empty():
        raise DataError(f"{path} gives no compound an ATC code: a line reads CID000003015,G03HA01")
    return frame
