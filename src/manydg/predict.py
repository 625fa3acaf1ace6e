"""A trained model on new raw files, through the same preparation as its training data."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch

from manydg._decision import about
from manydg.data._files import disk_errors, partial_name, write_text
from manydg.data.columns import Column
from manydg.data.dataset import DomainDataset
from manydg.errors import ConfigError, DataError, StorageError
from manydg.evaluation.metrics import decide
from manydg.training.run import Run, open_run

if TYPE_CHECKING:
    import polars

Probabilities = npt.NDArray[np.float32]
ABOUT = "about.json"


@dataclass(frozen=True)
class PredictOptions:
    """What else a prediction may need.

    Parameters
    ----------
    ndc_map : path, optional
        Mapping from NDC to ATC, for MIMIC-III.
    times : path, optional
        Parquet file of prediction times, for MEDS.
    resample : bool
        Bring recordings of another rate to the model's instead of refusing them.
    """

    ndc_map: Path | None = None
    times: Path | None = None
    resample: bool = False


def predict_raw(
    run_folder: str | Path, raw: str | Path, out: str | Path, options: PredictOptions | None = None
) -> list[Path]:
    """Predict new raw files and write what comes out; all or nothing.

    Parameters
    ----------
    run_folder : path
        A finished run.
    raw : path
        New files in the format of the run's training data: EDF recordings, EEG arrays, MIMIC-III or eICU tables, a MEDS
        dataset, or a table with the same feature columns.
    out : path
        A folder that does not exist yet.

    Returns
    -------
    list of path
        The files of predictions. Beside them lies ``about.json``: how the model decides, how well it did on patients it
        had not seen, and what the columns mean.
    """
    run, place = open_run(run_folder), Path(out)
    if place.exists():
        raise StorageError(f"{place} already exists: name another folder")
    source = str((run.info or {}).get("source") or "")
    if source not in _WRITERS:
        known = ", ".join(_WRITERS)
        raise ConfigError(
            f"{run_folder} was trained on data from '{source or 'arrays'}'; raw files of {known} can be read"
        )
    asked = options or PredictOptions()
    _refuse_unused(asked, source)
    partial = partial_name(place)
    try:
        with disk_errors(place):
            partial.mkdir(parents=True)
            written = _WRITERS[source](run, Path(raw), partial, asked)
            write_text(partial / ABOUT, json.dumps(about(run), indent=1))
            partial.replace(place)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return [place / path.name for path in written]


def _refuse_unused(options: PredictOptions, source: str) -> None:
    """An error for an option that would do nothing to data of this source."""
    for name, value, owner in (
        ("--ndc-map", options.ndc_map, "mimic3"),
        ("--times", options.times, "meds"),
        ("--resample", options.resample or None, "sleep-edf"),
    ):
        if value is not None and source != owner:
            raise ConfigError(f"{name} is for models trained on {owner}, this one was on {source}: leave it out")


def _sleep(run: Run, raw: Path, out: Path, options: PredictOptions) -> list[Path]:
    """A stage for every epoch of every recording."""
    from manydg._trust import trust_columns
    from manydg.sources._predict_sleep import as_dataset, find_recordings, read_recording, write_stages

    settings, target = _known(run, "settings"), run.algorithm.target
    written = []
    for path in find_recordings(raw):
        recording = read_recording(path, settings, resample=options.resample)
        data = as_dataset(recording, settings, target.spec)
        probabilities = run.predict_proba(data)
        trust = trust_columns(run, data, probabilities)
        written += write_stages(out, recording, target.spec.names, probabilities, trust)
    return written


def _iiic(run: Run, raw: Path, out: Path, options: PredictOptions) -> list[Path]:
    from manydg.sources.iiic import prepare_for_prediction

    columns, rows, patients = prepare_for_prediction(raw, _known(run, "settings"))
    return [_write_rows(run, columns, rows, patients, out)]


def _mimic3(run: Run, raw: Path, out: Path, options: PredictOptions) -> list[Path]:
    from manydg.sources.mimic3 import prepare_for_prediction

    columns, rows = prepare_for_prediction(
        raw, _known(run, "vocabularies"), _known(run, "settings"), ndc_map=options.ndc_map
    )
    return [_write_rows(run, columns, rows.drop("subject_id"), rows["subject_id"].to_numpy(), out)]


def _eicu(run: Run, raw: Path, out: Path, options: PredictOptions) -> list[Path]:
    from manydg.sources.eicu import prepare_for_prediction

    columns, rows = prepare_for_prediction(raw, _known(run, "vocabularies"), _known(run, "settings"))
    return [_write_rows(run, columns, rows.select("patientunitstayid"), rows["uniquepid"].to_numpy(), out)]


def _meds(run: Run, raw: Path, out: Path, options: PredictOptions) -> list[Path]:
    from manydg.sources.meds import prepare_for_prediction

    columns, rows = prepare_for_prediction(
        raw, _known(run, "vocabularies"), _known(run, "settings"), times=options.times
    )
    return [_write_rows(run, columns, rows, rows["subject_id"].to_numpy(), out)]


def _table(run: Run, raw: Path, out: Path, options: PredictOptions) -> list[Path]:
    import polars as pl

    from manydg.sources.table import read_features, read_roles

    settings = _known(run, "settings")
    values = read_features(raw, settings["features"])
    gaps = np.isnan(values).any(axis=1)
    if gaps.any() and not settings.get("missing"):
        row = int(np.flatnonzero(gaps)[0])
        raise DataError(
            f"{raw}: {int(gaps.sum())} rows have empty features, the first is row {row}, but the model was trained on "
            "complete rows: fill them in or leave those rows out"
        )
    whose, times = read_roles(raw, _known(run, "roles"), settings.get("session_gap"))
    rows = pl.DataFrame({"row": np.arange(len(values))})
    # Where the table does not say whose a row is, every row is taken for a patient of its own.
    patients = np.arange(len(values)) if whose is None else whose
    return [_write_rows(run, {"x": torch.from_numpy(values)}, rows, patients, out, times)]


_WRITERS: dict[str, Callable[[Run, Path, Path, PredictOptions], list[Path]]] = {
    "sleep-edf": _sleep,
    "iiic": _iiic,
    "mimic3": _mimic3,
    "eicu": _eicu,
    "meds": _meds,
    "table": _table,
}


def _known(run: Run, key: str) -> Mapping[str, Any]:
    """What the run knows of its training data."""
    value: Mapping[str, Any] = (run.info or {}).get(key, {})
    return value


def _write_rows(
    run: Run,
    columns: dict[str, Column],
    rows: polars.DataFrame,
    patients: npt.NDArray[Any],
    out: Path,
    times: npt.NDArray[np.float64] | None = None,
) -> Path:
    """One CSV line per visit or stay: its ids, what was decided, the probability of every class or label, and how far
    to trust it."""
    import polars as pl

    from manydg._trust import trust_columns

    target, count = run.algorithm.target, len(rows)
    names_of_new, codes = np.unique(patients, return_inverse=True)
    data = DomainDataset(
        columns,
        torch.zeros((count, target.size) if target.spec.kind in ("votes", "multilabel") else count),
        target.spec,
        torch.from_numpy(codes),
        names_of_new.astype(str),
        None if times is None else torch.from_numpy(times),
        info={"settings": _known(run, "settings"), "vocabularies": _known(run, "vocabularies")},
    )
    probabilities = run.predict_proba(data)
    threshold = run.record["threshold"]
    decided = decide(target, probabilities, threshold)
    names = np.array(target.spec.names)
    if decided.ndim == 1:
        answer = names[decided].tolist()
    else:
        answer = [" ".join(names[row.astype(bool)]) for row in decided]
    table = rows.with_columns(
        pl.Series("predicted", answer, dtype=pl.String),
        *([] if threshold is None else [pl.lit(float(f"{threshold:.6g}")).alias("threshold")]),
        *(pl.Series(f"p_{name}", probabilities[:, k].round(5)) for k, name in enumerate(target.spec.names)),
        *(pl.Series(name, values) for name, values in trust_columns(run, data, probabilities).items()),
    )
    path = out / "predictions.csv"
    table.write_csv(path)
    return path
