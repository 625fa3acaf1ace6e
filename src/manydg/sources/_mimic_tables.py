"""MIMIC-III's four tables read into visits and their codes, every row that is left out counted."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import polars as pl

from manydg.errors import DataError
from manydg.sources._ndc import normalise_ndc, read_ndc_map
from manydg.sources._provenance import CohortFlow
from manydg.sources._tables import Table

TABLES = ("admissions", "diagnoses_icd", "procedures_icd", "prescriptions")
LEAST_COVERAGE = 0.5
_KEYS = ["subject_id", "hadm_id"]
_TIME_FORMATS = ("%Y-%m-%d %H:%M:%S", "%Y-%m-%dT%H:%M:%S", "%Y-%m-%d %H:%M", "%Y-%m-%d")


@dataclass(frozen=True)
class Records:
    """What the tables hold.

    Parameters
    ----------
    visits : DataFrame
        ``subject_id``, ``hadm_id``, ``hours`` since the patient's first admission; by patient, then by admission time.
    diagnoses, procedures, drugs : DataFrame
        ``hadm_id`` and ``code``, each pair once.
    """

    visits: pl.DataFrame
    diagnoses: pl.DataFrame
    procedures: pl.DataFrame
    drugs: pl.DataFrame


def read_admissions(table: Table, flow: CohortFlow) -> pl.DataFrame:
    """Admissions with a usable time, sorted by patient and admission time."""
    with table.reading(_KEYS):
        rows = table.scan(integers=_KEYS, texts=["admittime", "dischtime"]).collect(engine="streaming")
    if rows.is_empty():
        raise DataError(f"{table.path} holds no rows: download it again")
    known = rows.drop_nulls(_KEYS)
    frame = known.unique(maintain_order=True)
    if frame["hadm_id"].n_unique() < frame.height:
        twice = frame.filter(pl.col("hadm_id").is_duplicated())
        raise DataError(f"{table.path}: {twice['hadm_id'].n_unique()} admissions stand there twice with other content")
    _note(
        flow,
        "admissions in the table",
        frame,
        left_out_without_id=rows.height - known.height,
        left_out_duplicates=known.height - frame.height,
    )
    start, end = _time("admittime"), _time("dischtime")
    timed = frame.with_columns(start=start, end=end).filter(pl.col("start").is_not_null())
    forward = timed.filter((pl.col("end") >= pl.col("start")).fill_null(True))
    if forward.is_empty():
        raise DataError(
            f"{table.path}: not one of {frame.height} admissions has an ADMITTIME such as 2164-10-23 21:09:00"
        )
    _note(
        flow,
        "admissions that begin at a known time and end after it",
        forward,
        left_out_without_time=frame.height - timed.height,
        left_out_end_before_start=timed.height - forward.height,
    )
    ordered = forward.sort("subject_id", "start", "hadm_id")
    hours = (pl.col("start") - pl.col("start").first().over("subject_id")).dt.total_seconds() / 3600.0
    return ordered.select("subject_id", "hadm_id", hours=hours)


def read_codes(table: Table, visits: pl.DataFrame, flow: CohortFlow, *, most: int | None = None) -> pl.DataFrame:
    """ICD codes of visits; with ``most``, only of that many codes that are most frequent in the whole table."""
    with table.reading(_KEYS):
        rows = table.scan(integers=_KEYS, texts=["icd9_code"]).collect(engine="streaming")
    if rows.is_empty():
        raise DataError(f"{table.path} holds no rows: download it again")
    code = pl.col("icd9_code").str.strip_chars().str.to_uppercase()
    named = rows.select(*_KEYS, code=code).filter(pl.col("code").is_not_null() & (pl.col("code") != "")).drop_nulls()
    kept = named
    if most is not None:
        top = named.group_by("code").len().sort(["len", "code"], descending=[True, False]).head(most)
        kept = named.join(top.select("code"), on="code", how="semi")
    known = kept.join(visits.select(_KEYS), on=_KEYS, how="semi")
    pairs = known.select("hadm_id", "code").unique()
    flow.add(
        f"rows of {table.name}",
        rows=rows.height,
        left_out_without_code=rows.height - named.height,
        left_out_rare_codes=named.height - kept.height,
        left_out_unknown_admission=kept.height - known.height,
        left_out_repeated=known.height - pairs.height,
        codes=pairs["code"].n_unique(),
    )
    return pairs


def read_drugs(table: Table, ndc_map: str | Path, visits: pl.DataFrame, flow: CohortFlow) -> pl.DataFrame:
    """Drug classes (ATC, four characters) prescribed in each visit."""
    mapping = read_ndc_map(ndc_map)
    # As categories the few thousand different products are looked up once each, not once a prescription.
    product = pl.col("ndc").cast(pl.Categorical(pl.Categories.random()))
    with table.reading(_KEYS):
        rows = table.scan(integers=_KEYS, texts=["ndc"]).with_columns(product).collect(engine="streaming")
    products = rows.select("ndc").unique().drop_nulls()
    products = products.with_columns(normalise_ndc(pl.col("ndc").cast(pl.String)).alias("product"))
    products = products.join(mapping.rename({"ndc": "product", "atc": "code"}), on="product", how="left")
    joined = rows.join(products.with_columns(pl.col("code").cast(pl.Categorical)), on="ndc", how="left")
    counts = joined.group_by(*_KEYS, "code").agg(times=pl.len(), with_ndc=pl.col("product").is_not_null().sum())
    total, with_ndc = rows.height, int(counts["with_ndc"].sum())
    mapped = counts.drop_nulls().with_columns(pl.col("code").cast(pl.String))
    covered = _sum(mapped)
    if total == 0:
        raise DataError(f"{table.path} holds no rows: download it again")
    if covered < LEAST_COVERAGE * total:
        raise DataError(
            f"{ndc_map} maps only {covered} of {total} prescriptions ({covered / total:.0%}; {with_ndc} have an NDC at "
            f"all), under half: use a mapping made for this database"
        )
    known = mapped.join(visits.select(_KEYS), on=_KEYS, how="semi")
    pairs = known.select("hadm_id", "code").unique()
    flow.add(
        f"rows of {table.name}",
        rows=total,
        left_out_without_ndc=total - with_ndc,
        left_out_not_in_mapping=with_ndc - covered,
        left_out_unknown_admission=covered - _sum(known),
        left_out_repeated=_sum(known) - pairs.height,
        codes=pairs["code"].n_unique(),
    )
    return pairs


def keep_listed_drugs(drugs: pl.DataFrame, path: str | Path, flow: CohortFlow) -> pl.DataFrame:
    """Only the drug classes that a text file lists, one four-character ATC code a line."""
    try:
        listed = {line.strip().upper()[:4] for line in Path(path).read_text().splitlines() if line.strip()}
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"cannot read the list of drugs {path}: {error}") from None
    kept = drugs.filter(pl.col("code").is_in(sorted(listed)))
    flow.add("drugs on the list", codes=kept["code"].n_unique(), left_out_codes=_left(drugs, kept))
    return kept


def _left(before: pl.DataFrame, after: pl.DataFrame) -> int:
    return before["code"].n_unique() - after["code"].n_unique()


def _sum(frame: pl.DataFrame) -> int:
    return int(frame["times"].sum())


def _time(column: str) -> pl.Expr:
    text = pl.col(column).str.strip_chars()
    return pl.coalesce(text.str.to_datetime(form, strict=False, time_unit="us") for form in _TIME_FORMATS)


def _note(flow: CohortFlow, step: str, visits: pl.DataFrame, **left_out: int) -> None:
    flow.add(step, patients=visits["subject_id"].n_unique(), samples=visits.height, **left_out)
