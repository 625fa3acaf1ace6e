"""MIMIC-III: which drugs a visit's prescriptions hold, from its diagnoses, its procedures and earlier visits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl

from manydg.data.columns import Column, Ragged
from manydg.data.dataset import TargetSpec
from manydg.data.storage import DatasetWriter
from manydg.errors import ConfigError, DataError
from manydg.sources._mimic_tables import (
    TABLES,
    Records,
    TableTask,
    keep_listed_drugs,
    keep_table,
    kept_table,
    read_admissions,
    read_table,
)
from manydg.sources._ndc import read_interactions, read_ndc_map
from manydg.sources._provenance import CohortFlow, describe_files, provenance
from manydg.sources._resume import WorkFolder, make_ready, run_jobs, work_folder
from manydg.sources._spread import Job
from manydg.sources._tables import Table, find_tables
from manydg.sources._twin_mimic3 import synthesize
from manydg.sources._visits import codes_by_visit, multi_hot, visit_columns

__all__ = ["prepare", "prepare_for_prediction", "synthesize"]

_PIECE = 20_000


def prepare(
    raw: str | Path,
    out: str | Path,
    *,
    ndc_map: str | Path,
    workers: int = 1,
    limit_patients: int | None = None,
    overwrite: bool = False,
    min_visits: int = 2,
    max_diagnoses: int | None = 2000,
    drugs: str | Path | None = None,
    ddi: str | Path | None = None,
    ddi_atc: str | Path | None = None,
) -> Path:
    """Make a dataset folder from MIMIC-III's tables, one sample a visit.

    Parameters
    ----------
    raw : path
        Folder with ADMISSIONS, DIAGNOSES_ICD, PROCEDURES_ICD and PRESCRIPTIONS, ``.csv`` or ``.csv.gz``, any case.
    out : path
        The dataset folder to write.
    ndc_map : path
        CSV table with the columns ``ndc`` and ``atc``.
    workers : int
        Processes, each of which reads a table; polars uses threads of its own within one.
    limit_patients : int, optional
        Keep only this many patients of the cohort, the lowest numbers first.
    min_visits : int
        Complete visits (a diagnosis, a procedure and a mapped drug each) a patient must have.
    max_diagnoses : int, optional
        Keep only the diagnosis codes that are most frequent in the whole table, as the literature does; None for all.
    drugs : path, optional
        Text file with the drug classes to keep, one a line.
    ddi, ddi_atc : path, optional
        Drug-interaction table, and the ATC codes of its compounds; see :func:`manydg.sources._ndc.read_interactions`.

    Returns
    -------
    Path
        The dataset folder.
    """
    raw, out = Path(raw).absolute(), Path(out)
    make_ready(out, overwrite=overwrite)
    _check(min_visits, limit_patients, max_diagnoses)
    tables = find_tables(raw, TABLES, source="mimic3")
    read_ndc_map(ndc_map)  # A mapping that cannot be read is better known before the tables are.
    options = {
        "ndc_map": Path(ndc_map).name,
        "min_visits": min_visits,
        "max_diagnoses": max_diagnoses,
        "drugs": None if drugs is None else Path(drugs).name,
        "ddi": None if ddi is None else Path(ddi).name,
        "limit_patients": limit_patients,
    }
    named = [Path(file) for file in (ndc_map, drugs, ddi, ddi_atc) if file is not None]
    flow = CohortFlow()
    with (
        work_folder(out, "mimic3", {"max_diagnoses": max_diagnoses, "version": 1}) as work,
        ThreadPoolExecutor(1) as pool,
    ):
        files = pool.submit(describe_files, [*(table.path for table in tables.values()), *named])
        records = _read(tables, Path(ndc_map).absolute(), max_diagnoses, workers, flow, work)
        if drugs is not None:
            records = replace(records, drugs=keep_listed_drugs(records.drugs, drugs, flow))
        records = _cohort(records, min_visits, limit_patients, flow)
        vocabularies = _vocabularies(records)
        pairs = [] if ddi is None else read_interactions(ddi, vocabularies["drugs"], compounds=ddi_atc)
        settings = {"source": "mimic3", "drug_interactions": pairs}
        info = {"name": "mimic3", "vocabularies": vocabularies, "settings": settings}
        info |= provenance("mimic3", files.result(), options, flow)
        _write(records, vocabularies, out, info, overwrite)
    return out


def prepare_for_prediction(
    raw: str | Path,
    vocabularies: Mapping[str, Sequence[str]],
    settings: Mapping[str, Any],
    *,
    ndc_map: str | Path | None = None,
) -> tuple[dict[str, Column], pl.DataFrame]:
    """New visits as a trained model's inputs; labels are not needed, prescriptions of earlier visits are.

    Every visit with a diagnosis and a procedure is a row; its history is the patient's earlier complete visits.

    Parameters
    ----------
    raw : path
    vocabularies : dict
        ``info["vocabularies"]`` of the training dataset. Codes that are not in it count as unknown.
    settings : dict
        ``info["settings"]`` of the training dataset.
    ndc_map : path
        As for :func:`prepare`.

    Returns
    -------
    columns : dict of str to Ragged
    rows : DataFrame
        ``subject_id``, ``hadm_id``, ``hours`` and ``earlier_visits`` of each row.
    """
    if settings.get("source", "mimic3") != "mimic3":
        raise DataError(f"the model was trained on {settings['source']} data; these are MIMIC-III tables")
    if ndc_map is None:
        raise ConfigError("the drugs of earlier visits need a mapping from NDC to ATC: name it (--ndc-map)")
    tables = find_tables(raw, TABLES, source="mimic3")
    visits = read_admissions(tables["admissions"], CohortFlow())
    found = [read_table(task, CohortFlow()) for task in _tasks(tables, visits, Path(ndc_map), None)]
    records = Records(visits, *found)
    usable = records.visits
    for frame in (records.diagnoses, records.procedures):
        usable = usable.join(frame, on="hadm_id", how="semi", maintain_order="left")
    if usable.is_empty():
        raise DataError(f"{raw}: no visit has both a diagnosis and a procedure, so there is nothing to predict from")
    codes = {
        name: codes_by_visit(usable, getattr(records, name), vocabularies[name])
        for name in ("diagnoses", "procedures", "drugs")
    }
    complete = (codes["drugs"].lengths > 0).numpy()
    patients, rows = usable["subject_id"].to_numpy(), np.arange(usable.height)
    columns = visit_columns(patients, complete, rows, codes)
    history = columns["history_drugs"]
    assert isinstance(history, Ragged)
    return columns, usable.with_columns(earlier_visits=pl.Series(history.lengths.numpy()))


def _check(min_visits: int, limit: int | None, max_diagnoses: int | None) -> None:
    for name, value in (("min_visits", min_visits), ("limit_patients", limit), ("max_diagnoses", max_diagnoses)):
        if value is not None and value < 1:
            raise ConfigError(f"{name} must be at least 1, not {value}")


def _tasks(
    tables: Mapping[str, Table], visits: pl.DataFrame, ndc_map: Path, max_diagnoses: int | None
) -> list[TableTask]:
    return [
        TableTask(tables["diagnoses_icd"], visits, most=max_diagnoses),
        TableTask(tables["procedures_icd"], visits),
        TableTask(tables["prescriptions"], visits, ndc_map=ndc_map),
    ]


def _read(
    tables: Mapping[str, Table],
    ndc_map: Path,
    max_diagnoses: int | None,
    workers: int,
    flow: CohortFlow,
    work: WorkFolder,
) -> Records:
    visits = read_admissions(tables["admissions"], flow)
    jobs = []
    for task in _tasks(tables, visits, ndc_map, max_diagnoses):
        files = tuple(filter(None, (task.table.path, tables["admissions"].path, task.ndc_map)))
        place = work.room_for(task.table.name, files)
        jobs.append(Job(task.table.name, files, replace(task, place=place)))
    frames = []
    for job, found in zip(jobs, run_jobs(keep_table, jobs, work, workers=workers, title="tables"), strict=True):
        flow.extend(found["flow"])
        frames.append(kept_table(job.argument))
    return Records(visits, *frames)


def _cohort(records: Records, min_visits: int, limit: int | None, flow: CohortFlow) -> Records:
    visits = records.visits
    for name in ("diagnoses", "procedures", "drugs"):
        visits = visits.join(getattr(records, name), on="hadm_id", how="semi", maintain_order="left")
        _note(flow, f"visits with {'mapped drugs' if name == 'drugs' else name}", visits)
    visits = visits.filter(pl.len().over("subject_id") >= min_visits)
    _note(flow, f"patients with {min_visits} or more complete visits", visits)
    if limit is not None:
        first = visits["subject_id"].unique().sort().head(limit)
        visits = visits.filter(pl.col("subject_id").is_in(first.to_list()))
        _note(flow, f"limited to {limit} patients", visits)
    if visits.is_empty():
        raise DataError(f"no patient has {min_visits} or more complete visits: there is nothing to learn from")
    kept = visits.select("hadm_id")
    codes = [frame.join(kept, on="hadm_id", how="semi") for frame in (records.diagnoses, records.procedures)]
    return Records(visits, codes[0], codes[1], records.drugs.join(kept, on="hadm_id", how="semi"))


def _vocabularies(records: Records) -> dict[str, list[str]]:
    return {
        "diagnoses": ["<unknown>", *records.diagnoses["code"].unique().sort()],
        "procedures": ["<unknown>", *records.procedures["code"].unique().sort()],
        "drugs": records.drugs["code"].unique().sort().to_list(),
    }


def _write(
    records: Records, vocabularies: Mapping[str, list[str]], out: Path, info: Mapping[str, Any], overwrite: bool
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
            writer.append(columns, multi_hot(codes["drugs"], rows, target.size), patients[rows], hours[rows])


def _note(flow: CohortFlow, step: str, visits: pl.DataFrame) -> None:
    flow.add(step, patients=visits["subject_id"].n_unique(), samples=visits.height)
