"""A trained model on new raw files, through the same preparation as its training data."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import numpy.typing as npt
import torch

from manydg.data.columns import Column
from manydg.data.dataset import DomainDataset
from manydg.data.info import DatasetInfo
from manydg.errors import ConfigError, DataError, StorageError
from manydg.evaluation.calibration import scale_temperature
from manydg.evaluation.predictions import decide, read_predictions
from manydg.evaluation.trust import SetRule, prediction_sets
from manydg.files import new_folder, write_through
from manydg.training.reliability import Calibration, patient_embeddings, read_calibration
from manydg.training.run import Run, open_run

if TYPE_CHECKING:
    import polars


# How a run decides, in words and numbers, for those who read its predictions without having seen its training.


_NEARLY_ALL = 0.9
_COLUMNS = {
    "predicted": "what the model decides: the most probable class or, where a threshold is given, every label whose "
    "probability reaches it",
    "stage": "the most probable stage of an epoch",
    "threshold": "the probability from which a label counts as present",
    "p_NAME": "the model's probability of a class or label",
    "calibrated_NAME": "the same after temperature scaling on validation patients",
    "set_LEVEL": "what cannot be ruled out, separated by |: sets of a new patient hold the truth in LEVEL per cent of "
    "the samples, on average over patients",
    "set_LEVEL_of_SHARE": "the same, so that it is true of SHARE per cent of new patients",
    "unlike_training": "whether the patient lies farther from the training patients than nearly all validation "
    "patients do",
    "distance": "how far, 1 being that limit",
}


def about(run: Run) -> dict[str, Any]:
    """What a file of predictions should be read with, as JSON values."""
    record = run.record
    unseen = {"patients": record.patients.test, "samples": record.samples.test, **record.test}
    return {
        "run": record.run,
        "algorithm": record.algorithm,
        "trained on": record.dataset,
        "classes or labels": list(run.algorithm.target.spec.names),
        "how well it did on patients it had not seen": unseen,
        "decision": _decision(run),
        "columns": _COLUMNS,
    }


def _decision(run: Run) -> dict[str, Any]:
    record = run.record
    threshold, rule = record.threshold, record.threshold_rule
    if threshold is None:
        return {"rule": rule, "in words": f"the {rule} decides"}
    target, labels = run.algorithm.target, list(run.algorithm.target.spec.names)
    found = {"rule": rule, "threshold": threshold}
    what = f"'{labels[1]}'" if target.kind == "binary" else "every label"
    words = f"{what} counts as predicted from a probability of {threshold:.4g} upwards ({rule}"
    counts = None if run.folder is None else _on_validation(run, threshold)
    if counts is None:
        return found | {"in words": words + ")"}
    things = "samples" if target.kind == "binary" else "labels"
    words += f"; {counts['predicted']:.0%} of their {things} are predicted so, {counts['true']:.0%} are true)"
    if counts["predicted"] > _NEARLY_ALL:
        words += (
            ". Nearly everything is predicted: the model hardly tells what is true from what is not on those patients, "
            "and then F1 is highest so. Train it longer or on more patients, or choose a threshold of your own"
        )
    return found | {"on validation patients": counts, "in words": words}


def _on_validation(run: Run, threshold: float) -> dict[str, float] | None:
    """Which share of the validation patients' samples (or of their labels) is predicted, and which is true."""
    assert run.folder is not None
    path = run.folder / "predictions.npz"
    if not path.exists():
        return None
    val = read_predictions(path, "val", run.algorithm.target, threshold)
    return {"predicted": float(np.mean(val.decisions() != 0)), "true": float(np.mean(val.truth != 0))}


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
    source = str(run.info.get("source") or "")
    if source not in _WRITERS:
        known = ", ".join(_WRITERS)
        raise ConfigError(
            f"{run_folder} was trained on data from '{source or 'arrays'}'; raw files of {known} can be read"
        )
    asked = options or PredictOptions()
    _refuse_unused(asked, source)
    with new_folder(place) as partial:
        written = _WRITERS[source](run, Path(raw), partial, asked)
        write_through(partial / ABOUT, json.dumps(about(run), indent=1))
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
    from manydg.sources.sleep_edf import as_dataset, find_recordings, read_recording, write_stages

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
    return cast("Mapping[str, Any]", run.info.get(key, {}))


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

    target, count = run.algorithm.target, len(rows)
    names_of_new, codes = np.unique(patients, return_inverse=True)
    data = DomainDataset(
        columns,
        torch.zeros((count, target.size) if target.spec.kind in ("votes", "multilabel") else count),
        target.spec,
        torch.from_numpy(codes),
        names_of_new.astype(str),
        None if times is None else torch.from_numpy(times),
        info=DatasetInfo(settings=_known(run, "settings"), vocabularies=_known(run, "vocabularies")),
    )
    probabilities = run.predict_proba(data)
    threshold = run.record.threshold
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


# How far to trust predictions on new patients: further columns of what ``manydg predict`` writes.


Columns = dict[str, Sequence[Any]]


def trust_columns(run: Run, data: DomainDataset, probabilities: npt.NDArray[np.float32]) -> Columns:
    """Columns by name, one entry per sample; none for a run that was made without calibration.

    ``calibrated_NAME`` is the probability after temperature scaling. ``set_90`` holds the classes that cannot be ruled
    out (for multi-label, the labels that may be present), separated by ``|``, so that 90% of a new patient's sets hold
    the truth on average over patients; ``set_90_of_80`` so that this is true of 80% of new patients. The figures are
    lower where few patients validated. ``unlike_training`` says whether the sample's patient lies farther from the
    training patients than nearly all validation patients, and ``distance`` how far, one being the limit.

    Parameters
    ----------
    data : DomainDataset
        The samples, with the patient of each.
    probabilities : array ``(samples, K)``
        As the model gives them.
    """
    calibration = None if run.folder is None else read_calibration(run.folder)
    if calibration is None:
        return {}
    target = run.algorithm.target
    mended = scale_temperature(target, probabilities, calibration.temperature).round(5)
    columns: Columns = {f"calibrated_{name}": mended[:, k].tolist() for k, name in enumerate(target.spec.names)}
    names = np.array(target.spec.names)
    for rule in (calibration.on_average, calibration.for_most):
        sets = prediction_sets(target, probabilities, rule)
        columns[set_name(rule)] = ["|".join(names[row]) for row in sets]
    return columns | _novelty(run, data, calibration)


def set_name(rule: SetRule) -> str:
    """What a column of prediction sets is called.

    Examples
    --------
    >>> set_name(SetRule(np.zeros(1), 0.9)), set_name(SetRule(np.zeros(1), 0.9, 0.8))
    ('set_90', 'set_90_of_80')
    """
    level = f"set_{_percent(rule.level)}"
    return f"{level}_of_{_percent(rule.share)}" if rule.share else level


def _percent(value: float) -> int:
    return math.floor(100 * value + 1e-6)


def _novelty(run: Run, data: DomainDataset, calibration: Calibration) -> Columns:
    if calibration.reference is None:
        return {}
    codes, distances = calibration.reference.distances(*patient_embeddings(run.algorithm, run.prepare(data)))
    of_sample = distances[np.searchsorted(codes, data.domains.cpu().numpy())]
    shown = (of_sample / calibration.limit).round(3) if calibration.limit > 0 else of_sample
    return {"unlike_training": (of_sample > calibration.limit).tolist(), "distance": shown.tolist()}
