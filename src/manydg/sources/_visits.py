"""Hospital visits with their codes and drugs, from the tables that databases of the MIMIC family share."""

from __future__ import annotations

import gzip
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
import polars as pl
import torch

from manydg.data.columns import Column, Ragged, as_ids_of, ids_of
from manydg.data.info import CohortStep, DatasetInfo, TargetSpec
from manydg.data.storage import DatasetWriter
from manydg.errors import ConfigError, DataError, warn
from manydg.files import Json, disk_errors
from manydg.jobs import Job
from manydg.sources import NewSamples, Options, TrainedOn, option
from manydg.sources._events import offsets_of, ranges
from manydg.sources._preparing import CohortFlow, WorkFolder, describe_files, run_jobs, with_provenance, work_folder
from manydg.sources._tables import (
    Array,
    CategoryMap,
    SampleIndex,
    Table,
    find_tables,
    limit_patients,
    open_table,
    table_names,
)

TABLES = ("admissions", "diagnoses_icd", "procedures_icd", "prescriptions")
LEAST_COVERAGE = 0.5
"""Share of the prescriptions that a mapping of drugs must know."""
IntArray = npt.NDArray[np.int64]
_ATC_COLUMNS = ("atc", "atc4", "atc_code", "atc_4", "atc3", "atc5")
_NDC_COLUMNS = ("ndc", "ndc11", "ndc_code")
_BATCH = 250_000
_PIECE = 20_000
_NO_ID = -(1 << 62)
_SIDE_EFFECTS = 40
_KEYS = ["subject_id", "hadm_id"]
_TIME_FORMATS = ("%Y-%m-%d %H:%M:%S", "%Y-%m-%dT%H:%M:%S", "%Y-%m-%d %H:%M", "%Y-%m-%d")


@dataclass(frozen=True)
class VisitOptions(Options):
    """Which patients and codes to use."""

    ndc_map: Path | None = option(None, help="CSV table with the columns ndc and atc.")
    limit_patients: int | None = option(None, help="Only the first N patients.", low=1)
    min_visits: int = option(2, help="Minimum of complete visits per patient.", low=1)
    max_diagnoses: int | None = option(
        2000, help="Keep the most frequent diagnosis codes of the table; 0 for all.", low=1, zero=True
    )
    drugs: Path | None = option(None, help="Text file of the drug classes to keep.")
    ddi: Path | None = option(None, help="Table of drug interactions.")
    ddi_atc: Path | None = option(None, help="ATC codes of the compounds in --ddi.")

    def to_json(self) -> dict[str, Json]:
        """All but ``ddi_atc``, which is a part of ``ddi``."""
        return {name: value for name, value in super().to_json().items() if name != "ddi_atc"}


@dataclass(frozen=True)
class DrugMapOptions(Options):
    """What new tables need besides themselves."""

    ndc_map: Path | None = option(None, help="MIMIC: mapping from NDC to ATC.")


def find_new_tables(folder: Path, source: str) -> dict[str, Table]:
    """The tables of new patients, whose prescriptions may be missing."""
    absent = TABLES[3:] if folder.is_dir() and "prescriptions" not in table_names(folder) else ()
    return find_tables(folder, TABLES, source=source, without=absent)


@dataclass(frozen=True)
class IcdColumns:
    """The columns of a code and of its version; without the latter every code is of the same."""

    code: str = "icd9_code"
    version: str | None = None


@dataclass(frozen=True)
class VisitCohort:
    """Hospital visits with diagnoses, procedures and drugs, from the tables of a MIMIC database.

    - ``tables``: Those of :data:`TABLES`.
    - ``icd``: How ``diagnoses_icd`` and ``procedures_icd`` name their codes.
    - ``settings``: What the dataset's settings hold besides.
    """

    source: str
    tables: Mapping[str, Table]
    icd: IcdColumns = IcdColumns()
    settings: Mapping[str, Json] = field(default_factory=dict)

    def prepare(self, raw: Path, out: Path, options: VisitOptions, *, workers: int, overwrite: bool) -> Path:
        """Make a dataset folder."""
        assert options.ndc_map is not None
        read_ndc_map(options.ndc_map)  # A mapping that cannot be read is better known before the tables are.
        extra = [file for file in (options.ndc_map, options.drugs, options.ddi, options.ddi_atc) if file is not None]
        flow = CohortFlow()
        with (
            work_folder(out, self.source, {"max_diagnoses": options.max_diagnoses, "version": 1}) as work,
            ThreadPoolExecutor(1) as pool,
        ):
            files = pool.submit(describe_files, [*(table.path for table in self.tables.values()), *extra])
            records = self._read(options, workers, flow, work)
            if options.drugs is not None:
                records = replace(records, drugs=keep_listed_drugs(records.drugs, options.drugs, flow))
            records = _cohort(records, options.min_visits, options.limit_patients, flow)
            vocabularies = _vocabularies(records)
            pairs: list[list[int]] = []
            if options.ddi is not None:
                pairs = read_interactions(options.ddi, vocabularies["drugs"], compounds=options.ddi_atc)
            settings: dict[str, Json] = {"source": self.source, "drug_interactions": pairs, **self.settings}
            info = DatasetInfo(name=self.source, vocabularies=vocabularies, settings=settings)
            info = with_provenance(info, self.source, files.result(), options.to_json(), flow, raw=raw)
            _write(records, vocabularies, out, info, overwrite)
        return out

    def for_prediction(self, raw: Path, trained: TrainedOn, ndc_map: Path | None) -> NewSamples:
        """Every visit with a diagnosis and a procedure."""
        records = self._read_new(ndc_map)
        visits = records.visits
        for frame in (records.diagnoses, records.procedures):
            visits = visits.join(frame, on="hadm_id", how="semi", maintain_order="left")
        if visits.is_empty():
            raise DataError(
                f"{raw}: no visit has both a diagnosis and a procedure, so there is nothing to predict from"
            )
        codes = {
            name: codes_by_visit(visits, getattr(records, name), trained.vocabularies[name])
            for name in ("diagnoses", "procedures", "drugs")
        }
        complete = (codes["drugs"].lengths > 0).numpy()
        patients, rows = visits["subject_id"].to_numpy(), np.arange(visits.height)
        columns = visit_columns(patients, complete, rows, codes)
        history = columns["history_drugs"]
        assert isinstance(history, Ragged)
        shown = visits.drop("subject_id").with_columns(earlier_visits=pl.Series(history.lengths.numpy()))
        return NewSamples(columns, shown, patients, visits["hours"].to_numpy(writable=True))

    def _tasks(self, visits: pl.DataFrame, ndc_map: Path, max_diagnoses: int | None) -> list[TableTask]:
        return [
            TableTask(self.tables["diagnoses_icd"], visits, self.icd, most=max_diagnoses),
            TableTask(self.tables["procedures_icd"], visits, self.icd),
            TableTask(self.tables["prescriptions"], visits, self.icd, ndc_map=ndc_map),
        ]

    def _read(self, options: VisitOptions, workers: int, flow: CohortFlow, work: WorkFolder) -> Records:
        assert options.ndc_map is not None
        admissions = self.tables["admissions"]
        visits = read_admissions(admissions, flow)
        jobs = []
        for task in self._tasks(visits, options.ndc_map.absolute(), options.max_diagnoses):
            files = tuple(filter(None, (task.table.path, admissions.path, task.ndc_map)))
            jobs.append(Job(task.table.name, files, replace(task, out=work.path_for(task.table.name, files))))
        frames = []
        saved = run_jobs(keep_table, jobs, work, SavedTable, workers=workers, title="tables")
        for job, table in zip(jobs, saved, strict=True):
            flow.extend(table.flow)
            assert job.argument.out is not None
            with disk_errors(work.path):
                frames.append(pl.read_ipc(job.argument.out))
        return Records(visits, *frames)

    def _read_new(self, ndc_map: Path | None) -> Records:
        visits = read_admissions(self.tables["admissions"], CohortFlow())
        return Records(
            visits,
            read_codes(self.tables["diagnoses_icd"], self.icd, visits, CohortFlow()),
            read_codes(self.tables["procedures_icd"], self.icd, visits, CohortFlow()),
            _earlier_drugs(self.tables.get("prescriptions"), ndc_map, visits),
        )


# The tables read into visits and their codes, every row that is left out counted


@dataclass(frozen=True)
class Records:
    """What the tables hold.

    - ``visits``: ``subject_id``, ``hadm_id``, ``hours`` since the patient's first admission; by patient, then by
      admission time.
    - ``diagnoses``, ``procedures``, ``drugs``: ``hadm_id`` and ``code``, each pair once.
    """

    visits: pl.DataFrame
    diagnoses: pl.DataFrame
    procedures: pl.DataFrame
    drugs: pl.DataFrame


@dataclass(frozen=True)
class TableTask:
    """A table of codes to read.

    - ``visits``: As :func:`read_admissions` gives them.
    - ``most``: Keep only so many most frequent codes.
    - ``ndc_map``: Where given, the table holds prescriptions.
    - ``out``: File to keep the codes in.
    """

    table: Table
    visits: pl.DataFrame
    icd: IcdColumns
    most: int | None = None
    ndc_map: Path | None = None
    out: Path | None = None


@dataclass(frozen=True)
class SavedTable:
    """The steps of a table's cohort flow, and the file its codes are in."""

    flow: list[CohortStep]
    kept: dict[str, int]


def keep_table(task: TableTask) -> SavedTable:
    """Read a table and save its codes in a file: ``hadm_id`` and ``code``, each pair once."""
    assert task.out is not None
    flow = CohortFlow()
    if task.ndc_map is not None:
        codes = read_drugs(task.table, task.ndc_map, task.visits, flow)
    else:
        codes = read_codes(task.table, task.icd, task.visits, flow, most=task.most)
    with disk_errors(task.out.parent):
        codes.write_ipc(task.out)
    return SavedTable(list(flow.steps()), {task.out.name: task.out.stat().st_size})


def read_admissions(table: Table, flow: CohortFlow) -> pl.DataFrame:
    """Admissions with a usable time, sorted by patient and admission time."""
    rows = table.collect(integers=["hadm_id"], texts=["subject_id", "admittime", "dischtime"])
    known = rows.drop_nulls(_KEYS)
    known = known.with_columns(ids_of(known["subject_id"]))
    nameless = rows.height - known.height
    frame = table.distinct(known, "hadm_id", "subject_id", flow, "admissions in the table", nameless)
    start, end = _time("admittime"), _time("dischtime")
    timed = frame.with_columns(start=start, end=end).filter(pl.col("start").is_not_null())
    forward = timed.filter((pl.col("end") >= pl.col("start")).fill_null(True))
    if forward.is_empty():
        raise DataError(
            f"{table.path}: not one of {frame.height} admissions has an ADMITTIME such as 2164-10-23 21:09:00"
        )
    left_out = {"without_time": frame.height - timed.height, "end_before_start": timed.height - forward.height}
    counts = {f"left_out_{reason}": count for reason, count in left_out.items()}
    flow.count("admissions that begin at a known time and end after it", forward["subject_id"], **counts)
    ordered = forward.sort("subject_id", "start", "hadm_id")
    hours = (pl.col("start") - pl.col("start").first().over("subject_id")).dt.total_seconds() / 3600.0
    return ordered.select("subject_id", "hadm_id", hours=hours)


def read_icd(table: Table, icd: IcdColumns, ids: Sequence[str], texts: Sequence[str] = ()) -> pl.DataFrame:
    """Ids and other texts of a table's rows, and their ``code``: upper case, null where there is none.

    Where the table names the version, it stands before the code (``10:I10``): E849 is a place of accidents in ICD-9 and
    cystic fibrosis in ICD-10.
    """
    code, version = pl.col(icd.code).str.strip_chars().str.to_uppercase(), icd.version
    code = pl.when(code != "").then(code)
    if version is not None:
        number = pl.col(version).str.strip_chars().str.strip_suffix(".0")
        code = pl.concat_str(number, pl.lit(":"), code)
    with table.reading(ids):
        scan = table.scan(integers=ids, texts=[*texts, icd.code, *([version] if version else [])])
        rows = scan.select(*ids, *texts, *([number.alias(version)] if version else []), code=code)
        frame = rows.collect(engine="streaming")
    if frame.is_empty():
        raise DataError(f"{table.path} holds no rows: download it again")
    return frame if version is None else _check_versions(table, frame, version)


def _check_versions(table: Table, rows: pl.DataFrame, version: str) -> pl.DataFrame:
    other = (~rows[version].is_in(["9", "10"])).fill_null(True).arg_true()
    if len(other):
        value = rows[version][other[0]]
        shown = "is empty" if value is None else f"is '{value}'"
        raise DataError(f"{table.path}, row {other[0] + 1}: '{version}' {shown}: known are 9 and 10")
    return rows.drop(version)


def read_codes(
    table: Table, icd: IcdColumns, visits: pl.DataFrame, flow: CohortFlow, *, most: int | None = None
) -> pl.DataFrame:
    """ICD codes of visits; with ``most``, only of that many codes that are most frequent in the whole table."""
    rows = read_icd(table, icd, ["hadm_id"], ["subject_id"])
    rows = rows.with_columns(as_ids_of(pl.col("subject_id"), visits["subject_id"]))
    named = rows.drop_nulls()
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
    prescribed.read(table)
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

    - ``mapping``: ``ndc`` and ``atc``.
    - ``visits``: ``subject_id`` and ``hadm_id``.
    """

    def __init__(self, mapping: pl.DataFrame, visits: pl.DataFrame) -> None:
        self._classes = mapping["atc"].unique().sort()
        self._mapping = mapping.join(pl.DataFrame({"atc": self._classes}).with_row_index("class"), on="atc")
        self._class_of = CategoryMap(self._look_up, np.int32)
        self._visit_of = SampleIndex(visits["hadm_id"].to_numpy())
        self._admissions, self._patients = visits["hadm_id"], visits["subject_id"]
        self._subjects = self._patients.to_numpy()
        self._keys: list[npt.NDArray[np.int64]] = []
        self.counts = {"rows": 0, "with_ndc": 0, "mapped": 0, "known": 0}

    def _look_up(self, products: pl.Series) -> Array:
        """The number of each product's class; -1 for a product outside the mapping, -2 for what is no product."""
        ndc = pl.DataFrame({"ndc": products}).select(normalise_ndc(pl.col("ndc")))
        matched = ndc.join(self._mapping, on="ndc", how="left", maintain_order="left")
        number = pl.when(pl.col("ndc").is_null()).then(-2).otherwise(pl.col("class").cast(pl.Int32).fill_null(-1))
        return matched.select(number.alias("number"))["number"].to_numpy()

    def read(self, table: Table) -> None:
        """Add all rows of a table of prescriptions."""
        # As categories the few thousand different products are looked up once each, not once a prescription.
        product = pl.col("ndc").fill_null("").cast(pl.Categorical(pl.Categories.random()))
        subject = as_ids_of(pl.col("subject_id"), self._patients)
        with table.reading(["hadm_id"]):
            scan = table.scan(integers=["hadm_id"], texts=["subject_id", "ndc"]).with_columns(product, subject)
            for batch in scan.collect_batches(chunk_size=_BATCH, engine="streaming"):
                self.add(batch)

    def add(self, batch: pl.DataFrame) -> None:
        drug = self._class_of(batch["ndc"])
        nobody = "" if batch["subject_id"].dtype == pl.String else _NO_ID
        subject = batch["subject_id"].fill_null(nobody).to_numpy()
        admission = batch["hadm_id"].fill_null(_NO_ID).to_numpy()
        rows = np.flatnonzero(drug >= 0)
        visit = self._visit_of(admission[rows])
        known = (visit >= 0) & (self._subjects[visit] == subject[rows])
        self.counts["rows"] += batch.height
        self.counts["with_ndc"] += int((drug > -2).sum())
        self.counts["mapped"] += len(rows)
        self.counts["known"] += int(known.sum())
        key = visit[known].astype(np.int64) * len(self._classes) + drug[rows[known]]
        self._keys.append(pl.Series(key).unique().to_numpy())

    def pairs(self) -> pl.DataFrame:
        """``hadm_id`` and ``code``, each pair once."""
        key = pl.Series(np.concatenate([*self._keys, np.zeros(0, np.int64)])).unique().to_numpy()
        visit, drug = np.divmod(key, max(1, len(self._classes)))
        return pl.DataFrame({"hadm_id": self._admissions.gather(visit), "code": self._classes.gather(drug)})


def keep_listed_drugs(drugs: pl.DataFrame, path: str | Path, flow: CohortFlow) -> pl.DataFrame:
    """Only the drug classes that a text file lists, one four-character ATC code a line."""
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
        listed = {line.strip().upper()[:4] for line in lines if line.strip()}
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not UTF-8 text"
        raise DataError(f"cannot read the list of drugs {path}: {reason}") from None
    kept = drugs.filter(pl.col("code").is_in(sorted(listed)))
    codes = kept["code"].n_unique()
    flow.add("drugs on the list", codes=codes, left_out_codes=drugs["code"].n_unique() - codes)
    return kept


def _time(column: str) -> pl.Expr:
    text = pl.col(column).str.strip_chars()
    return pl.coalesce(text.str.to_datetime(form, strict=False, time_unit="us") for form in _TIME_FORMATS)


# Drugs: NDC to ATC by a table the user names, and pairs of drugs that interact


def find_drug_mapping(source: str, *folders: Path) -> Path:
    """A CSV table with the columns ndc and atc, in or under the folders."""
    for folder in folders:
        for path in sorted(folder.rglob("*.csv*")):
            columns = {name.strip().strip('"').lower() for name in _first_line(path).split(",")}
            if {"ndc", "atc"} <= columns:
                return path
    raise DataError(
        f"{source} needs a mapping of drugs: put a CSV table with the columns ndc and atc into {folders[-1]} "
        "(docs/datasets.md says where to get one)"
    )


def _first_line(path: Path) -> str:
    try:
        if path.suffix == ".gz":
            with gzip.open(path, "rt", encoding="utf-8", errors="replace") as packed:
                return packed.readline(10_000)
        with path.open(encoding="utf-8", errors="replace") as file:
            return file.readline(10_000)
    except (OSError, EOFError):
        return ""


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

    - ``path``: A CSV file (plain or gzipped) with a column ``ndc`` and a column ``atc`` (or ``atc4``, ``atc_code``), in
      any case; other columns are ignored. The first row with a valid class counts where a code stands in several.
    - returns: Columns ``ndc`` (eleven digits) and ``atc`` (four characters), one row a code.
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


def read_interactions(path: str | Path, drugs: list[str], *, compounds: str | Path | None = None) -> list[list[int]]:
    """Read which pairs of drugs interact.

    Where the table names side effects, only pairs with one of the 40 rarest of them count: nearly any two drugs share a
    common one.

    - ``path``: Either a CSV file with the columns ``atc_1`` and ``atc_2``, or a table of STITCH compound pairs with the
      columns ``stitch 1`` and ``stitch 2`` (as TWOSIDES is distributed), which needs ``compounds``.
    - ``drugs``: The dataset's drugs, four characters each, in label order.
    - ``compounds``: A CSV file without header: a STITCH compound, then its ATC codes.
    - returns: Pairs of label indices, the smaller first, sorted.
    """
    table = _open_map(path, "drug-interaction table")
    if "atc_1" in table.columns:
        with table.reading():
            rows = table.scan(texts=["atc_1", "atc_2"]).collect(engine="streaming")
        pairs = rows.select(first=cut_atc(pl.col("atc_1")), second=cut_atc(pl.col("atc_2"))).drop_nulls().unique()
    elif "stitch 1" in table.columns:
        if compounds is None:
            raise DataError(f"{path} names STITCH compounds: name the table that gives their ATC codes too (--ddi-atc)")
        pairs = _compound_pairs(table, Path(compounds))
    else:
        raise DataError(f"{path} has neither the columns atc_1, atc_2 nor STITCH 1, STITCH 2: see the docs on --ddi")
    index = pl.DataFrame({"atc": drugs, "label": range(len(drugs))}, schema={"atc": pl.String, "label": pl.Int64})
    labelled = pairs.join(index.rename({"atc": "first", "label": "i"}), on="first").join(
        index.rename({"atc": "second", "label": "j"}), on="second"
    )
    low, high = pl.min_horizontal("i", "j"), pl.max_horizontal("i", "j")
    unique = labelled.filter(pl.col("i") != pl.col("j")).select(i=low, j=high).unique().sort("i", "j")
    return [[int(i), int(j)] for i, j in unique.iter_rows()]


def _open_map(path: str | Path, what: str) -> Table:
    file = Path(path)
    if not file.is_file():
        raise DataError(f"there is no {what} at {file}")
    return open_table(file, file.name)


def _column(table: Table, names: tuple[str, ...]) -> str:
    known = next((name for name in names if name in table.columns), None)
    if known is None:
        raise DataError(f"{table.path} has no column '{names[0]}'; its columns are {', '.join(table.columns)}")
    return known


def _compound_pairs(table: Table, compounds: Path) -> pl.DataFrame:
    atc = _read_compounds(compounds)
    texts = ["stitch 1", "stitch 2"]
    with table.reading():
        if "side effect name" in table.columns:
            rows = table.scan(texts=[*texts, "side effect name"]).collect(engine="streaming")
            effect = pl.col("side effect name")
            rarest = rows.group_by(effect).len().sort("len", "side effect name").head(_SIDE_EFFECTS)
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
        lines = pl.Series("line", path.read_text(encoding="utf-8").splitlines(), dtype=pl.String)
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


# Visits with their history as ragged columns


def codes_by_visit(visits: pl.DataFrame, codes: pl.DataFrame, words: Sequence[str]) -> Ragged:
    """The codes of each visit, as indices into a vocabulary.

    - ``visits``: One row a visit, with ``hadm_id``.
    - ``codes``: ``hadm_id`` and ``code``; rows of other visits are ignored.
    - ``words``: The vocabulary. Where its first word is ``<unknown>`` a code that is not in it counts as that, else it
      is left out.
    - returns: ``(visits,)`` rows of sorted, different code indices.
    """
    numbered = visits.select("hadm_id").with_row_index("visit")
    index = pl.DataFrame({"code": list(words), "index": range(len(words))}, {"code": pl.String, "index": pl.Int64})
    coded = codes.join(numbered, on="hadm_id").join(index, on="code", how="left")
    coded = coded.with_columns(pl.col("index").fill_null(0)) if list(words[:1]) == ["<unknown>"] else coded.drop_nulls()
    coded = coded.select(pl.col("visit").cast(pl.Int64), "index").unique().sort("visit", "index")
    lengths = np.bincount(coded["visit"].to_numpy(), minlength=visits.height)
    return Ragged(torch.from_numpy(coded["index"].to_numpy().copy()), offsets_of(lengths))


def visit_columns(
    patients: IntArray, complete: npt.NDArray[np.bool_], rows: IntArray, codes: Mapping[str, Ragged]
) -> dict[str, Column]:
    """Input columns of some visits, each with its patient's earlier complete visits.

    - ``patients`` ``(visits,)``: Whose each visit is; a patient's visits stand together, in the order of admission.
    - ``complete`` ``(visits,)``: Whether a visit may serve as history.
    - ``rows`` ``(rows,)``: The visits to make samples of.
    - ``codes``: ``diagnoses``, ``procedures`` and ``drugs`` of every visit.
    - returns: ``diagnoses`` and ``procedures``: earlier visits and the current one, last; ``history_drugs``: earlier
      only.
    """
    chosen = np.flatnonzero(complete)
    before = np.concatenate([[0], np.cumsum(complete)])
    begins = np.concatenate([[True], patients[1:] != patients[:-1]])[: len(patients)]
    first = np.flatnonzero(begins)[np.cumsum(begins) - 1][rows]
    start, count = before[first], before[rows] - before[first]
    earlier = chosen[ranges(start, count)]
    with_current = np.empty(len(earlier) + len(rows), np.int64)
    last = np.cumsum(count + 1) - 1
    is_current = np.zeros(len(with_current), bool)
    is_current[last] = True
    with_current[is_current], with_current[~is_current] = rows, earlier
    columns: dict[str, Column] = {
        name: Ragged(codes[name].take(torch.from_numpy(with_current)), offsets_of(count + 1))
        for name in ("diagnoses", "procedures")
    }
    columns["history_drugs"] = Ragged(codes["drugs"].take(torch.from_numpy(earlier)), offsets_of(count))
    return columns


# The cohort and the dataset folder


def _earlier_drugs(table: Table | None, ndc_map: Path | None, visits: pl.DataFrame) -> pl.DataFrame:
    """``hadm_id`` and ``code`` of new visits' drugs, as far as they can be known; a mapping is asked for if it matters.

    That few prescriptions are in the mapping, or none, is no error here: a new patient need not have any.
    """
    nothing = pl.DataFrame(schema={"hadm_id": pl.Int64, "code": pl.String})
    earlier = visits.filter(pl.col("hadm_id") != pl.col("hadm_id").last().over("subject_id"))
    if table is None:
        if earlier.height:
            _warn_of_history("there is no table of prescriptions")
        return nothing
    if ndc_map is None:
        with table.reading(["hadm_id"]):
            rows = table.scan(integers=["hadm_id"]).unique().collect(engine="streaming")
        known = earlier.join(rows, on="hadm_id", how="semi").height
        if known:
            raise ConfigError(
                f"the drugs of {known} earlier visits need a mapping from NDC to ATC: name it (--ndc-map), or take the "
                "table of prescriptions away to predict without them"
            )
        return nothing
    prescribed = _Prescribed(read_ndc_map(ndc_map), visits)
    prescribed.read(table)
    total, covered = prescribed.counts["rows"], prescribed.counts["mapped"]
    if earlier.height and covered < LEAST_COVERAGE * total:
        _warn_of_history(f"{ndc_map} maps only {covered} of {total} prescriptions")
    return prescribed.pairs()


def _warn_of_history(reason: str) -> None:
    warn(f"{reason}: earlier visits without known drugs are not used")


def _cohort(records: Records, min_visits: int, limit: int | None, flow: CohortFlow) -> Records:
    visits = records.visits
    for name in ("diagnoses", "procedures", "drugs"):
        visits = visits.join(getattr(records, name), on="hadm_id", how="semi", maintain_order="left")
        flow.count(f"visits with {'mapped drugs' if name == 'drugs' else name}", visits["subject_id"])
    visits = visits.filter(pl.len().over("subject_id") >= min_visits)
    flow.count(f"patients with {min_visits} or more complete visits", visits["subject_id"])
    visits = limit_patients(visits, "subject_id", limit, flow)
    if visits.is_empty():
        raise DataError(f"no patient has {min_visits} or more complete visits: there is nothing to learn from")
    codes = (records.diagnoses, records.procedures, records.drugs)
    return Records(visits, *(frame.join(visits.select("hadm_id"), on="hadm_id", how="semi") for frame in codes))


def _vocabularies(records: Records) -> dict[str, list[str]]:
    return {
        "diagnoses": ["<unknown>", *records.diagnoses["code"].unique().sort()],
        "procedures": ["<unknown>", *records.procedures["code"].unique().sort()],
        "drugs": records.drugs["code"].unique().sort().to_list(),
    }


def _write(
    records: Records, vocabularies: Mapping[str, list[str]], out: Path, info: DatasetInfo, overwrite: bool
) -> None:
    visits = records.visits
    codes = {name: codes_by_visit(visits, getattr(records, name), words) for name, words in vocabularies.items()}
    patients, hours = visits["subject_id"].to_numpy(), visits["hours"].to_numpy()
    complete = np.ones(visits.height, bool)
    target = TargetSpec("multilabel", tuple(vocabularies["drugs"]))
    with DatasetWriter(out, target, info, overwrite=overwrite) as writer:
        for start in range(0, visits.height, _PIECE):
            rows = np.arange(start, min(start + _PIECE, visits.height))
            columns = visit_columns(patients, complete, rows, codes)
            taken = codes["drugs"].take(torch.from_numpy(rows))
            labels = np.zeros((len(rows), target.size), np.float32)
            labels[taken.row_of_item().numpy(), np.asarray(taken.values)] = 1.0
            writer.append(columns, labels, patients[rows], hours[rows])
