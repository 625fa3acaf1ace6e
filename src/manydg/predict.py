"""Predictions on new raw files: through the preparation of the training data, with how far to trust them.

:func:`predict_raw` is ``manydg predict``: beside the probabilities and the decision, each sample gets columns that say
how far to trust them (:func:`trust_columns`), and ``about.json`` explains the model's decisions (:func:`about`).
:func:`personalise_raw` is ``manydg personalise``.
"""

from __future__ import annotations

import json
import math
import re
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import polars as pl
import torch

from manydg.data.columns import encode_patients
from manydg.data.dataset import DomainDataset, open_dataset
from manydg.data.info import DatasetInfo
from manydg.data.timeline import Timeline
from manydg.errors import ConfigError, DataError, ManyDGWarning, StorageError
from manydg.evaluation.clinical import raise_alarms
from manydg.evaluation.metrics import decide, read_predictions
from manydg.evaluation.trust import EmbeddingSums, SetRule, prediction_interval, prediction_sets, scale_temperature
from manydg.files import Json, JsonObject, ParsedJson, new_folder, write_through
from manydg.sources import (
    SOURCES,
    AnySource,
    NewSamples,
    SamplePredictions,
    TrainedOn,
    find_source,
    write_prediction_table,
)
from manydg.training.inference import CAUSAL, Calibration, distances_so_far, patient_embeddings, predict_probabilities
from manydg.training.personal import MARKOV, needed
from manydg.training.run import PREDICTIONS, Run, context_of, open_run, open_to_predict, silence_of

Columns = dict[str, Sequence[Any]]
ABOUT = "about.json"
_NEARLY_ALL = 0.9
_OVERFLOW = "the model's output is not finite: values of the patient are far beyond those of the training"
_COLUMNS = {
    "predicted": "what the model decides: the most probable class or, where a threshold is given, every label whose "
    "probability reaches it, separated by |",
    "stage": "the most probable stage of an epoch",
    "threshold": "the probability from which a label counts as present",
    "p_NAME": "the model's probability of a class or label",
    "calibrated_NAME": "the same after temperature scaling on validation patients",
    "set_LEVEL": "what cannot be ruled out, separated by |: sets of a new patient hold the truth in LEVEL per cent of "
    "the samples, on average over patients",
    "set_LEVEL_of_SHARE": "the same, so that it is true of SHARE per cent of new patients",
    "alarm": "of a model of an event: whether an alarm is raised, which is where the probability reaches the threshold "
    "and the last alarm of the session is long enough ago",
    "not_predicted": "why a sample has no prediction; the column is there only where some have none",
    "unlike_training": "whether the patient lies farther from the training patients than nearly all validation "
    "patients do",
    "distance": "how far, 1 being that limit; empty where it is not finite, which counts as unlike. Of a model with "
    "causal context both columns are of the patient's samples up to this one",
    "any text": "where names are separated by |, a | or \\ within a name has a \\ before it; text that a spreadsheet "
    "would compute, such as what begins with =, has an apostrophe before it",
}
_VALUE_COLUMNS = {
    "predicted": "the predicted value, in the unit of the training data",
    "low_LEVEL, high_LEVEL": "an interval: those of a new patient hold the truth in LEVEL per cent of the samples, on "
    "average over patients",
    "low_LEVEL_of_SHARE, high_LEVEL_of_SHARE": "the same, so that it is true of SHARE per cent of new patients",
    **{name: _COLUMNS[name] for name in ("not_predicted", "unlike_training", "distance", "any text")},
}


def predict_raw(
    run_folder: str | Path,
    raw: str | Path,
    out: str | Path,
    *,
    backbone: str | None = None,
    algorithm: str | None = None,
    **options: object,
) -> list[Path]:
    """Predict new raw files and write what comes out; all or nothing.

    Parameters
    ----------
    run_folder : path
        A finished run.
    raw : path
        New files in the format of the run's training data, or a dataset folder that was prepared like it.
    out : path
        A folder that does not exist yet.
    backbone, algorithm : str, optional
        Classes of your own that the run was trained with, as ``package.module:Class``.
    **options
        What the source of the training data needs besides (see ``manydg predict --help``). ``keep`` names columns of a
        table to put beside the predictions; of a dataset folder, ``patient`` and ``time``.

    Returns
    -------
    list of path
        The files of predictions. Beside them is ``about.json``: how the model decides, how well it did on patients it
        had not seen, and what the columns mean.
    """
    run, folder, path = open_to_predict(run_folder, backbone=backbone, algorithm=algorithm), Path(out), Path(raw)
    if folder.exists():
        raise StorageError(f"{folder} already exists: name another folder")
    given = {name: value for name, value in options.items() if value is not None and value is not False and value != []}
    with new_folder(folder) as partial:
        if (path / "dataset.json").is_file():
            shown, data = _dataset_rows(path, given)
            written = [write_prediction_table(partial, shown, predict_samples(run, data))]
        else:
            written = _predict_files(run, path, partial, _source_of(run, run_folder), given)
        write_through(partial / ABOUT, json.dumps(about(run), indent=1))
    return [folder / file.name for file in written]


LABEL = "label"


def personalise_raw(
    run_folder: str | Path,
    raw: str | Path,
    out: str | Path,
    labels: str | Path,
    *,
    learner: str = "effects",
    backbone: str | None = None,
    algorithm: str | None = None,
    **options: object,
) -> list[Path]:
    """Predict new raw files of patients of whom a few samples are labelled; all or nothing.

    - ``run_folder``, ``raw``, ``out``, ``backbone``, ``algorithm``, ``**options``: As :func:`predict_raw` takes them.
    - ``labels``: CSV or Parquet: the column ``label`` (several labels separated by ``|``), and one or more columns of
      ``predictions.csv`` that say which sample it is of, such as ``row``, or ``recording`` and ``row``.
    - ``learner``: {"effects", "prototypes", "intercept", "fine-tune", "markov", "auto"}
    - returns: ``predictions.csv``, with the samples that are not labelled. Beside it is ``about.json``.
    """
    run, folder, path = open_run(run_folder, backbone=backbone, algorithm=algorithm), Path(out), Path(raw)
    if folder.exists():
        raise StorageError(f"{folder} already exists: name another folder")
    used = needed(run.population, run.algorithm.target).learner(learner)
    given = {name: value for name, value in options.items() if value is not None and value is not False and value != []}
    shown = LabelFile.read(Path(labels))
    with new_folder(folder) as partial:
        parts = [
            _personalise(run, rows, data, shown, learner) for rows, data in _new_samples(run, path, given, run_folder)
        ]
        shown.check_all_used()
        written = _write_personal(partial, run, parts)
        causal = context_of(run.schema, run.algorithm).get("mode") == CAUSAL
        personal: dict[str, Json] = {
            "learner": used,
            "labelled samples": shown.count,
            "labels used for a sample": f"those of the same patient{', of earlier samples alone' if causal else ''}",
        }
        if used == MARKOV:
            personal["samples read beside it"] = f"{'earlier' if causal else 'all'} ones of the same patient"
        write_through(partial / ABOUT, json.dumps({**about(run), "personalised": personal}, indent=1))
    return [folder / written.name]


class LabelFile:
    """Labels of some samples, by the columns that tell samples apart."""

    def __init__(self, path: Path, table: pl.DataFrame) -> None:
        self.path, self.count = path, len(table)
        self.keys = [name for name in table.columns if name != LABEL]
        self._labels = dict(zip(table.select(self.keys).rows(), table[LABEL].to_list(), strict=True))
        self._unused = set(self._labels)

    @staticmethod
    def read(path: Path) -> LabelFile:
        """Raise an error that names the file where it is not what it should be."""
        try:
            parquet = path.suffix.lower() in (".parquet", ".pq")
            table = pl.read_parquet(path) if parquet else pl.read_csv(path, infer_schema=False)
            table = table.with_columns(pl.all().cast(pl.String))
        except FileNotFoundError:
            raise DataError(f"{path} is missing: name the file with the labels") from None
        except (pl.exceptions.PolarsError, OSError, UnicodeDecodeError) as error:
            raise DataError(
                f"{path} cannot be read as a table ({str(error).splitlines()[0]}): write CSV or Parquet"
            ) from None
        if table.is_empty():
            raise DataError(f"{path} has no rows: add labels, or use 'manydg predict', which needs none")
        if LABEL not in table.columns or len(table.columns) < 2:
            raise DataError(
                f"{path} has the columns {', '.join(table.columns)}: it needs '{LABEL}' and a column that says which "
                "sample it is of, such as 'row'"
            )
        keys = [name for name in table.columns if name != LABEL]
        wrong = {
            "lacks a value": pl.any_horizontal(pl.all().is_null()),
            "names a sample for the second time": pl.struct(keys).is_duplicated()
            & ~pl.struct(keys).is_first_distinct(),
        }
        for what, test in wrong.items():
            if bad := [line for line, row in enumerate(table.select(test).to_series(), start=2) if row]:
                raise DataError(f"{path}, line {bad[0]}: it {what}; correct the line")
        return LabelFile(path, table)

    def of(self, rows: pl.DataFrame, multilabel: bool) -> list[Any]:
        """The label of each row, or ``None``."""
        if lacking := [name for name in self.keys if name not in rows.columns]:
            raise DataError(f"{self.path}: samples have no column '{lacking[0]}'; theirs are {', '.join(rows.columns)}")
        keys = rows.select(pl.col(self.keys).cast(pl.String)).rows()
        named = [key for key in keys if key in self._labels]
        # Recordings come one after the other: a label that one of them has used is of no other.
        if len(set(named)) < len(named) or not self._unused.issuperset(named):
            further = [name for name in rows.columns if name not in self.keys] or ["row"]
            raise DataError(
                f"{self.path}: {', '.join(self.keys)} alone does not tell samples apart: add a column, such as "
                f"'{further[0]}'"
            )
        self._unused -= set(named)
        return [
            split_names(label) if multilabel and label is not None else label for label in map(self._labels.get, keys)
        ]

    def check_all_used(self) -> None:
        if self._unused:
            first = ", ".join(f"{name} {value}" for name, value in zip(self.keys, min(self._unused), strict=True))
            raise DataError(
                f"{self.path}: no sample has {first} ({len(self._unused)} of {self.count} labels are of none)"
            )


def split_names(cell: str) -> list[str]:
    """The names that :func:`joined_names` joined.

    Examples
    --------
    >>> split_names("N1|N2"), split_names(joined_names(["N1|N2"]))
    (['N1', 'N2'], ['N1|N2'])
    """
    names = [part.replace("\\|", "|").replace("\\\\", "\\") for part in re.split(r"(?<!\\)\|", cell)]
    return [name for name in names if name]


@dataclass(frozen=True)
class _Personal:
    """Samples without a label, and the probabilities of their classes."""

    rows: pl.DataFrame
    probabilities: npt.NDArray[np.float32]


def _new_samples(
    run: Run, path: Path, options: Mapping[str, object], run_folder: str | Path
) -> Iterator[tuple[pl.DataFrame, DomainDataset]]:
    """What tells samples apart, and the samples."""
    if (path / "dataset.json").is_file():
        yield _dataset_rows(path, options)
        return
    source = _source_of(run, run_folder)
    for samples in source.for_prediction(path, trained_on(run), _prediction_options(source, options)):
        yield samples.rows, as_dataset(samples, run)


def _personalise(run: Run, rows: pl.DataFrame, data: DomainDataset, labels: LabelFile, learner: str) -> _Personal:
    shown = labels.of(rows, run.algorithm.target.kind == "multilabel")
    rest = np.array([label is None for label in shown], bool)
    try:
        probabilities = run.personalise(data, shown, learner=learner)
    except DataError as error:
        raise DataError(f"{labels.path}: {error}") from error
    return _Personal(rows.filter(pl.Series(rest)), probabilities[rest])


def _write_personal(folder: Path, run: Run, parts: Sequence[_Personal]) -> Path:
    rows = pl.concat([part.rows for part in parts])
    probabilities = np.concatenate([part.probabilities for part in parts])
    decisions, threshold = _decisions(run, probabilities), run.record.threshold
    return write_prediction_table(
        folder, rows, SamplePredictions(run.algorithm.target.spec, probabilities, decisions, threshold, {})
    )


def _decisions(run: Run, probabilities: npt.NDArray[np.float32]) -> list[str]:
    """The name of the class of each sample, its labels, or its number."""
    names = np.array(run.algorithm.target.spec.names)
    decided = decide(run.algorithm.target, probabilities, run.record.threshold)
    if run.algorithm.target.numeric:
        return [f"{value:.7g}" for value in decided]
    if decided.ndim == 1:
        return [str(name) for name in names[decided]]
    return [joined_names(names[row.astype(bool)]) for row in decided]


def _source_of(run: Run, run_folder: str | Path) -> AnySource:
    name = str(run.info.get("source") or "")
    if name not in SOURCES.names():
        known = ", ".join(SOURCES.names())
        raise ConfigError(
            f"{run_folder} was trained on data from '{name or 'arrays'}'; raw files of {known} can be read, "
            "and dataset folders"
        )
    return find_source(name)


def _predict_files(run: Run, raw: Path, out: Path, source: AnySource, options: Mapping[str, object]) -> list[Path]:
    chosen, written = _prediction_options(source, options), []
    for samples in source.for_prediction(raw, trained_on(run), chosen):
        predictions = predict_samples(run, as_dataset(samples, run))
        written += source.write_predictions(out, samples, predictions)
    return written


def _prediction_options(source: AnySource, options: Mapping[str, object]) -> Any:
    known = {field.name for field in fields(source.prediction_options_class)}
    for name in options:
        if name not in known:
            raise _useless(name, source.name)
    return source.prediction_options_class.of(**options)


def _dataset_rows(folder: Path, options: Mapping[str, object]) -> tuple[pl.DataFrame, DomainDataset]:
    """What tells the samples of a dataset folder apart, and the dataset."""
    keep = tuple(cast("Sequence[str]", options.get("keep", ())))
    for name in options:
        if name != "keep":
            raise ConfigError(f"--{name.replace('_', '-')} is for raw files, not for a dataset folder: leave it out")
    if unknown := [name for name in keep if name not in ("patient", "time")]:
        raise ConfigError(f"a dataset folder has no column '{unknown[0]}' to keep: patient and time can be kept")
    data = open_dataset(folder)
    rows = {"row": np.arange(len(data))}
    if "patient" in keep:
        rows["patient"] = data.patients[data.domains.numpy()]
    if "time" in keep and data.times is not None:
        rows["time"] = data.times.numpy()
    return pl.DataFrame({name: values.tolist() for name, values in rows.items()}), data


def _useless(option: str, source: str) -> ConfigError:
    """The error for an option that does nothing to data of this source."""
    owners = [
        name
        for name in SOURCES.names()
        if option in {field.name for field in fields(find_source(name).prediction_options_class)}
    ]
    flag = f"--{option.replace('_', '-')}"
    return ConfigError(
        f"{flag} is for models trained on {' or '.join(owners)}, this one was on {source}: leave it out"
        if owners
        else f"{source} has no option {flag}: leave it out"
    )


def trained_on(run: Run) -> TrainedOn:
    """What a run knows of the data it was trained on."""
    info = cast("ParsedJson", run.info)
    return TrainedOn(
        str(info.get("source") or ""), info.get("settings", {}), info.get("vocabularies", {}), info.get("roles", {})
    )


def as_dataset(samples: NewSamples, run: Run) -> DomainDataset:
    """New samples as a dataset for a trained model; its targets mean nothing."""
    target, count, trained = run.algorithm.target, len(samples.rows), trained_on(run)
    codes, names = encode_patients(samples.patients)
    return DomainDataset(
        samples.columns,
        torch.zeros((count, target.size) if target.spec.kind in ("votes", "multilabel") else count),
        target.spec,
        codes,
        names,
        None if samples.times is None else torch.from_numpy(np.array(samples.times)),
        info=DatasetInfo(settings=trained.settings, vocabularies=trained.vocabularies),
    )


@dataclass(eq=False)
class Earlier:
    """What is known of the patients of a dataset from samples before its own.

    - ``alarms`` ``(patients,)``: When an alarm was raised last.
    """

    alarms: npt.NDArray[np.float64]
    embeddings: EmbeddingSums


def predict_samples(run: Run, data: DomainDataset, earlier: Earlier | None = None) -> SamplePredictions:
    """What a model says of the samples of a dataset, and how far to trust it.

    A sample for which the model's output is not finite gets no decision, and the column ``not_predicted`` says why.
    What is known from ``earlier`` samples is brought up to date.
    """
    target, threshold, prepared = run.algorithm.target, run.record.threshold, run.prepare(data)
    probabilities = predict_probabilities(run.algorithm, prepared).numpy()
    failed = _not_finite(probabilities)
    decisions: Sequence[str | None] = _decisions(run, np.where(failed[:, None], 0, probabilities))
    alarms = _alarm_column(run, data, probabilities, earlier)
    trust = {**alarms, **trust_columns(run, prepared, probabilities, earlier)}
    if failed.any():
        decisions = _blank(decisions, failed)
        trust["not_predicted"] = [_OVERFLOW if bad else None for bad in failed]
        message = f"{int(failed.sum())} of {len(failed)} samples are not predicted: {_OVERFLOW}"
        warnings.warn(message, ManyDGWarning, stacklevel=2)
    return SamplePredictions(target.spec, probabilities, decisions, threshold, trust)


def _alarm_column(
    run: Run, data: DomainDataset, probabilities: npt.NDArray[np.float32], earlier: Earlier | None
) -> Columns:
    """Where a model of an event raises alarms; nothing without times."""
    event, threshold = run.record.event, run.record.threshold
    if event is None or threshold is None or data.times is None:
        return {}
    timeline = Timeline.of(data.domains, data.times, data.info.session_gap)
    session = np.empty(len(data), np.int64)
    session[timeline.order.cpu().numpy()] = timeline.session.cpu().numpy()
    silence = silence_of(run.config, event)
    times, scores = data.times.cpu().numpy(), probabilities[:, 1].astype(np.float64)
    patients = data.domains.cpu().numpy()
    last = None if earlier is None else earlier.alarms[patients]
    raised = raise_alarms(event, times, session, scores, threshold, silence, last)
    if earlier is not None:
        np.maximum.at(earlier.alarms, patients[raised], times[raised])
    return {"alarm": raised.tolist()}


def _not_finite(probabilities: npt.NDArray[np.float32]) -> npt.NDArray[np.bool_]:
    """Which samples have no prediction, ``(samples,)``."""
    return np.asarray(~np.isfinite(probabilities).all(axis=1))


def _blank(values: Sequence[Any], rows: npt.NDArray[np.bool_]) -> list[Any]:
    """The values, with nothing in some rows."""
    return [None if blank else value for value, blank in zip(values, rows, strict=True)]


def trust_columns(
    run: Run, data: DomainDataset, probabilities: npt.NDArray[np.float32], earlier: Earlier | None = None
) -> Columns:
    """Columns by name, one entry per sample; none for a run that was made without calibration.

    ``calibrated_NAME`` is the probability after temperature scaling. ``set_90`` holds the classes that cannot be ruled
    out (for multi-label, the labels that may be present), separated by ``|``, so that 90% of a new patient's sets hold
    the truth on average over patients; ``set_90_of_80`` so that this is true of 80% of new patients. The figures are
    lower where few patients validated. A regression target has ``low_90`` and ``high_90``, the bounds of an interval,
    in place of these. ``unlike_training`` is whether the sample's patient is farther from the training
    patients than nearly all validation patients, and ``distance`` how far, one being the limit.

    - ``data``: The samples as :meth:`~manydg.training.run.Run.prepare` gives them.
    - ``probabilities`` ``(samples, K)``: As the model gives them; where they are not finite there are no sets, and the
      sample counts as unlike the training.
    """
    calibration = run.calibration
    if calibration is None:
        return {}
    target, names = run.algorithm.target, np.array(run.algorithm.target.spec.names)
    _check_calibration(run, calibration)
    failed = _not_finite(probabilities)
    novelty = partial(_novelty, run, data, calibration, failed, earlier)
    if target.numeric:
        return _intervals(probabilities, calibration, failed) | novelty()
    calibrated = scale_temperature(target, probabilities, calibration.temperature).round(5)
    columns: Columns = {f"calibrated_{name}": _blank(calibrated[:, k].tolist(), failed) for k, name in enumerate(names)}
    for rule in (calibration.on_average, calibration.for_most):
        sets = prediction_sets(target, probabilities, rule)
        columns[rule_name("set", rule)] = _blank([joined_names(names[row]) for row in sets], failed)
    return columns | novelty()


def _intervals(values: npt.NDArray[np.float32], calibration: Calibration, failed: npt.NDArray[np.bool_]) -> Columns:
    """Bounds of the intervals of a measured value, by both rules."""
    columns: Columns = {}
    for rule in (calibration.on_average, calibration.for_most):
        for name, bound in zip(("low", "high"), prediction_interval(values, rule).T, strict=True):
            columns[rule_name(name, rule)] = _blank([float(f"{value:.7g}") for value in bound], failed)
    return columns


def joined_names(names: Iterable[str]) -> str:
    """Several classes or labels in one cell, separated by ``|``; those within a name have a backslash before them.

    Examples
    --------
    >>> print(joined_names(["N1", "N2"]), joined_names(["N1|N2"]))
    N1|N2 N1\\|N2
    """
    return "|".join(name.replace("\\", "\\\\").replace("|", "\\|") for name in names)


def _check_calibration(run: Run, calibration: Calibration) -> None:
    """Raise if a calibration is of another model than the run's."""
    target = run.algorithm.target
    counts = {"multilabel": {target.size}, "binary": {1, 2}}.get(target.kind, {1})
    if any(len(rule.thresholds) not in counts for rule in (calibration.on_average, calibration.for_most)):
        raise StorageError(f"the calibration in {run.folder} is of other classes than its model: train it again")


def rule_name(what: str, rule: SetRule) -> str:
    """What a column of prediction sets, or of a bound of intervals, is called.

    Examples
    --------
    >>> rule_name("set", SetRule(np.zeros(1), 0.9)), rule_name("low", SetRule(np.zeros(1), 0.9, 0.8))
    ('set_90', 'low_90_of_80')
    """
    level = f"{what}_{_percent(rule.level)}"
    return f"{level}_of_{_percent(rule.share)}" if rule.share else level


def _percent(value: float) -> int:
    return math.floor(100 * value + 1e-6)


def _novelty(
    run: Run, data: DomainDataset, calibration: Calibration, failed: npt.NDArray[np.bool_], earlier: Earlier | None
) -> Columns:
    if calibration.reference is None:
        return {}
    try:
        if context_of(run.schema, run.algorithm).get("mode") == CAUSAL:
            known = None if earlier is None else earlier.embeddings
            distances = distances_so_far(run.algorithm, data, calibration.reference, known)
        else:
            codes, by_patient = calibration.reference.distances(*patient_embeddings(run.algorithm, data))
            distances = by_patient[np.searchsorted(codes, data.domains.cpu().numpy())]
    except ValueError as error:
        # Embeddings of another width than the reference's.
        raise StorageError(f"the calibration in {run.folder} is of another model ({error}): train it again") from error
    relative = (distances / calibration.limit).round(3) if calibration.limit > 0 else distances
    unlike = ~(distances <= calibration.limit) | failed  # So written, because NaN is unlike anything.
    return {"unlike_training": unlike.tolist(), "distance": _blank(relative.tolist(), ~np.isfinite(relative))}


def about(run: Run) -> JsonObject:
    """What the readers of a file of predictions should know, who have not seen the training."""
    record = run.record
    unseen = {"patients": record.patients.test, "samples": record.samples.test, **record.test}
    numeric = run.algorithm.target.numeric
    return {
        "run": record.run,
        "algorithm": record.algorithm,
        "trained on": f"{record.dataset} (synthetic data)" if record.synthetic else record.dataset,
        ("predicted value" if numeric else "classes or labels"): list(run.algorithm.target.spec.names),
        "how well it did on patients it had not seen": unseen,
        "decision": _decision(run),
        "columns": _VALUE_COLUMNS if numeric else _COLUMNS,
    }


@dataclass(frozen=True)
class _Shares:
    """Of the validation patients' samples, or of their labels: the share that is predicted, and that is true."""

    predicted: float
    true: float


def _decision(run: Run) -> JsonObject:
    """How the run decides, in words and numbers."""
    threshold, rule, target = run.record.threshold, run.record.threshold_rule, run.algorithm.target
    if target.numeric:
        return {"rule": rule, "in words": "the model predicts the value itself, in the unit of the training data"}
    if threshold is None:
        return {"rule": rule, "in words": f"the {rule} decides"}
    binary = target.kind == "binary"
    what = f"'{target.spec.names[1]}'" if binary else "every label"
    words = f"{what} counts as predicted from a probability of {threshold:.4g} upwards ({rule}"
    shares = _on_validation(run, threshold)
    if shares is None:
        return {"rule": rule, "threshold": threshold, "in words": words + ")"}
    things = "samples" if binary else "labels"
    words += f"; {shares.predicted:.0%} of their {things} are predicted so, {shares.true:.0%} are true)"
    if shares.predicted > _NEARLY_ALL:
        words += (
            ". Nearly everything is predicted: the model hardly tells what is true from what is not on those patients, "
            "and then F1 is highest so. Train it longer or on more patients, or choose a threshold of your own"
        )
    return {"rule": rule, "threshold": threshold, "on validation patients": asdict(shares), "in words": words}


def _on_validation(run: Run, threshold: float) -> _Shares | None:
    path = None if run.folder is None else run.folder / PREDICTIONS
    if path is None or not path.exists():
        return None
    val = read_predictions(path, "val", run.algorithm.target, threshold).scored()
    return _Shares(float(np.mean(val.decisions() != 0)), float(np.mean(val.truth != 0)))
