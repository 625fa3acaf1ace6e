"""MIMIC-III's four tables read into visits and their codes, every row that is left out counted."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import polars as pl

from manydg.data._files import disk_errors
from manydg.errors import DataError
from manydg.sources._lookup import Array, CategoryMap, SampleIndex
from manydg.sources._ndc import normalise_ndc, read_ndc_map
from manydg.sources._provenance import CohortFlow
from manydg.sources._tables import Table

TABLES = ("admissions", "diagnoses_icd", "procedures_icd", "prescriptions")
LEAST_COVERAGE = 0.5
_BATCH = 250_000
_NO_ID = -(1 << 62)
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


@dataclass(frozen=True)
class TableTask:
    """A table of codes to read.

    Parameters
    ----------
    table : Table
    visits : DataFrame
        As :func:`read_admissions` gives them.
    most : int, optional
        Keep only so many most frequent codes.
    ndc_map : path, optional
        Where given, the table holds prescriptions.
    place : path, optional
        File to keep the codes in.
    """

    table: Table
    visits: pl.DataFrame
    most: int | None = None
    ndc_map: Path | None = None
    place: Path | None = None


def read_table(task: TableTask, flow: CohortFlow) -> pl.DataFrame:
    """``hadm_id`` and ``code`` of a table, each pair once."""
    if task.ndc_map is not None:
        return read_drugs(task.table, task.ndc_map, task.visits, flow)
    return read_codes(task.table, task.visits, flow, most=task.most)


def keep_table(task: TableTask) -> dict[str, Any]:
    """Read a table and keep its codes in a file; returns the steps of its cohort flow."""
    assert task.place is not None
    flow = CohortFlow()
    codes = read_table(task, flow)
    with disk_errors(task.place.parent):
        codes.write_ipc(task.place)
    return {"flow": flow.to_json(), "kept": {task.place.name: task.place.stat().st_size}}


def kept_table(task: TableTask) -> pl.DataFrame:
    """The codes that :func:`keep_table` kept."""
    assert task.place is not None
    with disk_errors(task.place.parent):
        return pl.read_ipc(task.place)


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
    prescribed = _Prescribed(read_ndc_map(ndc_map), visits)
    # As categories the few thousand different products are looked up once each, not once a prescription.
    product = pl.col("ndc").fill_null("").cast(pl.Categorical(pl.Categories.random()))
    with table.reading(_KEYS):
        scan = table.scan(integers=_KEYS, texts=["ndc"]).with_columns(product)
        for batch in scan.collect_batches(chunk_size=_BATCH, engine="streaming"):
            prescribed.add(batch)
    counts, pairs = prescribed.counts, prescribed.pairs()
    total, covered = counts["rows"], counts["mapped"]
    if total == 0:
        raise DataError(f"{table.path} holds no rows: download it again")
    if covered < LEAST_COVERAGE * total:
        raise DataError(
            f"{ndc_map} maps only {covered} of {total} prescriptions ({covered / total:.0%}; {counts['with_ndc']} have "
            f"an NDC at all), under half: use a mapping made for this database"
        )
    flow.add(
        f"rows of {table.name}",
        rows=total,
        left_out_without_ndc=total - counts["with_ndc"],
        left_out_not_in_mapping=counts["with_ndc"] - covered,
        left_out_unknown_admission=covered - counts["known"],
        left_out_repeated=counts["known"] - pairs.height,
        codes=pairs["code"].n_unique(),
    )
    return pairs


class _Prescribed:
    """Counts prescriptions and collects the drug classes of each visit, batch by batch.

    Parameters
    ----------
    mapping : DataFrame
        ``ndc`` and ``atc``.
    visits : DataFrame
        ``subject_id`` and ``hadm_id``.
    """

    def __init__(self, mapping: pl.DataFrame, visits: pl.DataFrame) -> None:
        self._classes = mapping["atc"].unique().sort()
        self._mapping = mapping.join(pl.DataFrame({"atc": self._classes}).with_row_index("class"), on="atc")
        self._class_of = CategoryMap(self._look_up, np.int32)
        self._visit_of = SampleIndex(visits["hadm_id"].to_numpy())
        self._admissions, self._subjects = visits["hadm_id"], visits["subject_id"].to_numpy()
        self._found: list[npt.NDArray[np.int64]] = []
        self.counts = {"rows": 0, "with_ndc": 0, "mapped": 0, "known": 0}

    def _look_up(self, products: pl.Series) -> Array:
        """The number of each product's class; -1 for a product outside the mapping, -2 for what is no product."""
        ndc = pl.DataFrame({"ndc": products}).select(normalise_ndc(pl.col("ndc")))
        found = ndc.join(self._mapping, on="ndc", how="left", maintain_order="left")
        number = pl.when(pl.col("ndc").is_null()).then(-2).otherwise(pl.col("class").cast(pl.Int32).fill_null(-1))
        return found.select(number.alias("number"))["number"].to_numpy()

    def add(self, batch: pl.DataFrame) -> None:
        drug = self._class_of(batch["ndc"])
        subject, admission = (batch[name].fill_null(_NO_ID).to_numpy() for name in _KEYS)
        rows = np.flatnonzero(drug >= 0)
        visit = self._visit_of(admission[rows])
        known = (visit >= 0) & (self._subjects[visit] == subject[rows])
        self.counts["rows"] += batch.height
        self.counts["with_ndc"] += int((drug > -2).sum())
        self.counts["mapped"] += len(rows)
        self.counts["known"] += int(known.sum())
        key = visit[known].astype(np.int64) * len(self._classes) + drug[rows[known]]
        self._found.append(pl.Series(key).unique().to_numpy())

    def pairs(self) -> pl.DataFrame:
        """``hadm_id`` and ``code``, each pair once."""
        key = pl.Series(np.concatenate([*self._found, np.zeros(0, np.int64)])).unique().to_numpy()
        visit, drug = np.divmod(key, max(1, len(self._classes)))
        return pl.DataFrame({"hadm_id": self._admissions.gather(visit), "code": self._classes.gather(drug)})


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


def _time(column: str) -> pl.Expr:
    text = pl.col(column).str.strip_chars()
    return pl.coalesce(text.str.to_datetime(form, strict=False, time_unit="us") for form in _TIME_FORMATS)


def _note(flow: CohortFlow, step: str, visits: pl.DataFrame, **left_out: int) -> None:
    flow.add(step, patients=visits["subject_id"].n_unique(), samples=visits.height, **left_out)
