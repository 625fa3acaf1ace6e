"""A run: training on some patients, scoring on others once, and the folder that holds what came out.

A run folder has the record (``run.json``, written last), the weights with all that rebuilding the model needs
(``model.safetensors``), predictions on validation and test patients, the split, what later predictions are judged by
(``calibration.safetensors``), and how labels of a new patient are used (``personal.safetensors``). A folder that a
:class:`~manydg.estimator.ManyDGClassifier` saved has the first two and the last.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import shutil
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from manydg.algorithms import ALGORITHMS, Algorithm
from manydg.backbones import BACKBONES, SingleInput
from manydg.backbones._sequences import SequenceBackbone
from manydg.config import UNITS, DecisionRule, TrainingConfig, duration, pick_device
from manydg.data.columns import ArrayLike, Frame
from manydg.data.context import with_session_gap
from manydg.data.dataset import DomainDataset, InputSchema, from_arrays, unlabelled
from manydg.data.info import EventSpec, TargetSpec
from manydg.data.splits import (
    Split,
    check_split,
    patient_folds,
    patient_labels,
    site_folds,
    split_named,
    split_patients,
    split_sites,
    warn_of_overlap,
)
from manydg.data.storage import refuse_dataset_folder
from manydg.data.timeline import ContextOptions, SequenceOptions, Timeline, is_missing
from manydg.errors import ConfigError, DataError, ManyDGError, StorageError
from manydg.evaluation.clinical import rates_at_threshold, threshold_for
from manydg.evaluation.metrics import Predictions, Timing, choose_threshold, score, score_patients, write_predictions
from manydg.files import (
    Json,
    JsonObject,
    ParsedJson,
    code_version,
    fingerprint,
    read_json,
    remove_partial_files,
    write_json,
)
from manydg.targets import target_of
from manydg.training.execution import by_leader, current_team, shared_probabilities
from manydg.training.execution.memory import peak_memory
from manydg.training.fit import CHECKPOINT, MEMBERS, Fitted, Reporter, Silent, fit, trust_named
from manydg.training.inference import (
    CAUSAL,
    Calibration,
    as_trained,
    fit_calibration,
    predict_probabilities,
    read_calibration,
    rebuild,
    refuse_infinite,
    spared_seconds,
    with_context,
    write_calibration,
)
from manydg.training.personal import (
    PERSONAL,
    Population,
    fit_population,
    needed,
    outputs_of,
    personal_logits,
    read_population,
    write_population,
)
from manydg.training.record import Counts, RunRecord, check_files, read_tensors, write_tensors

RECORD, MODEL, PREDICTIONS, SPLIT, IDENTITY = (
    "run.json",
    "model.safetensors",
    "predictions.npz",
    "split.json",
    "identity.json",
)


@dataclass(frozen=True)
class Run:
    """A trained model and its record.

    Attributes
    ----------
    algorithm : Algorithm
    record : RunRecord
    schema : InputSchema
        Of the inputs it was trained on, context included.
    config : TrainingConfig
        As it was given; the record has it with every default filled in.
    info : mapping
        JSON values about the data it was trained on, for predictions on new files: ``source``, ``settings``,
        ``vocabularies``, ``roles`` (columns of a table); and ``module``, the class of a backbone that was given as a
        module.
    folder : Path, optional
    population : Population, optional
        What :meth:`personalise` knows of patients in general.
    """

    algorithm: Algorithm
    record: RunRecord
    schema: InputSchema
    config: TrainingConfig
    info: JsonObject = field(default_factory=dict)
    folder: Path | None = None
    population: Population | None = None

    def predict_proba(
        self,
        samples: DomainDataset | ArrayLike | Mapping[str, ArrayLike] | Frame,
        *,
        patients: ArrayLike | Sequence[Any] | None = None,
        times: ArrayLike | None = None,
    ) -> npt.NDArray[np.float32]:
        """Probabilities for samples of any patient, ``(samples, K)``.

        If the run was trained with patient context, it is computed from the samples given here.

        Parameters
        ----------
        samples : DomainDataset, array ``(samples, ...)``, dict of arrays, or DataFrame
            As :func:`manydg.from_arrays` takes them.
        patients, times : arrays ``(samples,)``, optional
            For arrays and tables. By default, the table's columns of the same names as in training; without patients,
            each sample counts as a separate patient.

        Raises
        ------
        DataError
            If an input is infinite, or so large that the output for a sample is not finite.
        """
        dataset = self.as_dataset(samples, patients, times)
        probabilities = predict_probabilities(self.algorithm, self.prepare(dataset)).numpy()
        _check_finite(probabilities)
        return probabilities

    def personalise(
        self,
        samples: DomainDataset | ArrayLike | Mapping[str, ArrayLike] | Frame,
        labels: Sequence[Any],
        *,
        patients: ArrayLike | Sequence[Any] | None = None,
        times: ArrayLike | None = None,
        learner: str = "effects",
    ) -> npt.NDArray[np.float32]:
        """Probabilities for samples of patients of whom some samples have labels, ``(samples, K)``.

        The model is not trained again. A label affects its own patient only and, with causal context, later samples
        only.

        Parameters
        ----------
        samples, patients, times
            As :meth:`predict_proba` takes them, labelled samples included.
        labels : sequence ``(samples,)``
            The name of the sample's class, or a list of the names of its labels; ``None`` where it is not known.
        learner : {"effects", "prototypes", "intercept", "fine-tune", "markov", "auto"}
            How labels are used (:mod:`manydg.training.personal`).

        Returns
        -------
        array
            NaN in the rows whose label was given.
        """
        needed(self.population, self.algorithm.target)
        dataset = self.as_dataset(samples, patients, times)
        known, indicators = _shown_labels(labels, self.algorithm.target.spec, len(dataset))
        return self.personal_probabilities(dataset, known, indicators, learner)

    def personal_probabilities(
        self, dataset: DomainDataset, known: npt.NDArray[np.int64], indicators: npt.NDArray[np.float64], learner: str
    ) -> npt.NDArray[np.float32]:
        """:meth:`personalise` with the positions of the labelled samples, and their labels as indicators."""
        target, prepared = self.algorithm.target, self.prepare(dataset)
        population = needed(self.population, target)
        outputs = outputs_of(self.algorithm, prepared, population)
        _check_finite(outputs.logits)
        causal = context_of(self.schema, self.algorithm).get("mode") == CAUSAL
        patients = dataset.domains.cpu().numpy()
        rest = np.setdiff1d(np.arange(len(patients)), known)
        logits = personal_logits(
            outputs, patients, known, indicators, population, target, learner, causal=causal, asked=rest
        )
        probabilities = target.probabilities(torch.from_numpy(logits)).numpy().astype(np.float32)
        probabilities[known] = np.nan
        return probabilities

    @cached_property
    def calibration(self) -> Calibration | None:
        """How far to trust its predictions; None for a run without a folder, or made without calibration."""
        return None if self.folder is None else read_calibration(self.folder)

    def as_dataset(
        self,
        samples: DomainDataset | ArrayLike | Mapping[str, ArrayLike] | Frame,
        patients: ArrayLike | Sequence[Any] | None,
        times: ArrayLike | None,
    ) -> DomainDataset:
        """New samples for this model, as :meth:`predict_proba` takes them."""
        if isinstance(samples, DomainDataset):
            if patients is not None or times is not None:
                raise DataError("a dataset has patients and times of its own: leave out patients= and times=")
            return samples
        roles = cast("Mapping[str, str | None]", self.info.get("roles") or {})
        return unlabelled(samples, self.schema, self.algorithm.target.spec, roles, patients=patients, times=times)

    def prepare(self, dataset: DomainDataset) -> DomainDataset:
        """The dataset as the run's algorithm takes it: checked, and with the patient context it was trained with."""
        refuse_infinite(dataset)
        settings = cast("ParsedJson", self.info.get("settings") or {})
        like_training = with_session_gap(dataset, settings.get("session_gap"))
        prepared = as_trained(like_training, self.schema, self.algorithm.backbone)
        self.schema.check(InputSchema.of(prepared))
        return prepared


def _check_finite(values: npt.NDArray[Any]) -> None:
    failed = np.flatnonzero(~np.isfinite(values).all(axis=1))
    if len(failed):
        raise DataError(
            f"the model's output is not finite for {len(failed)} of {len(values)} samples, the first is row "
            f"{failed[0]} (the first row is 0): its values overflow in the model; correct them or leave them out"
        )


def _shown_labels(
    labels: Sequence[Any], spec: TargetSpec, samples: int
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float64]]:
    """Positions of the labels that are known, and which classes or labels they name, ``(known, K)``."""
    if len(labels) != samples:
        raise DataError(f"there are {len(labels)} labels, but {samples} samples: give None where a label is not known")
    codes = {name: code for code, name in enumerate(spec.names)}
    # By position, whatever the index of a column of pandas.
    known = {row: label for row, label in enumerate(labels) if not is_missing(label)}
    indicators = np.zeros((len(known), spec.size))
    for position, (row, label) in enumerate(known.items()):
        several = spec.kind == "multilabel" and not isinstance(label, str)
        for name in label if several else [label]:
            if str(name) not in codes:
                raise DataError(f"row {row}: '{name}' is not one of the model's labels ({', '.join(spec.names[:20])})")
            indicators[position, codes[str(name)]] = 1.0
    return np.array(list(known), np.int64), indicators


def train(
    dataset: DomainDataset,
    config: TrainingConfig | None = None,
    *,
    split: Split | None = None,
    backbone: nn.Module | str | None = None,
    out: str | Path | None = None,
    device: str = "auto",
    name: str = "dataset",
    reporter: Reporter | None = None,
    **options: Any,
) -> Run:
    """Train an algorithm on some patients and test it on others.

    Parameters
    ----------
    dataset : DomainDataset
    config : TrainingConfig, optional
        Or give its fields as keywords: ``train(dataset, algorithm="dann", epochs=10)``.
    split : Split, optional
        The patients' sides; drawn from the seed if not given.
    backbone : nn.Module or str, optional
        Your own module, or the name of a backbone, instead of ``config.backbone``.
    out : path, optional
        Run folder. An unfinished run there is continued, a finished one returned.
    device : str
        ``auto``, ``cpu``, ``cuda`` or ``cuda:N``.
    name : str
        What to call the dataset in the record.
    reporter : Reporter, optional
        Gets a line for every epoch.

    Examples
    --------
    >>> from manydg.data.dataset import from_arrays
    >>> X = np.random.default_rng(0).normal(size=(240, 4))
    >>> data = from_arrays(X, X[:, 0] > 0, np.repeat(np.arange(12), 20))
    >>> run = train(data, epochs=2)
    >>> sorted(run.record.test)
    ['auprc', 'auroc', 'f1', 'kappa']
    """
    if not isinstance(dataset, DomainDataset):
        raise DataError(
            f"train takes a dataset, not {type(dataset).__name__}: build one with manydg.from_arrays, or open a folder "
            "with manydg.open_dataset"
        )
    if config is not None and options:
        raise ConfigError(f"give {', '.join(sorted(options))} within config, or leave config out")
    config = config if config is not None else TrainingConfig.from_mapping(options)
    if isinstance(backbone, str):
        config, backbone = config.replace(backbone=backbone), None
    trust_named(config)
    chosen = _checked_split(dataset, config, split)
    identity = _identity(dataset, config, chosen, backbone)
    folder = None if out is None else Path(out)
    if folder is not None:
        by_leader(partial(_claim, folder, identity))
        if (folder / RECORD).exists():
            _remove_checkpoints(folder)
            return open_run(folder, backbone=backbone, device=device)
    try:
        training = _Training(dataset, config, chosen, backbone, folder, pick_device(device), reporter or Silent())
        return training.run(name, identity)
    except BaseException:
        if folder is not None and ((team := current_team()) is None or team.leads):
            _unclaim(folder)
        raise


@dataclass(frozen=True)
class _Training:
    """One call of :func:`train`, its options settled."""

    dataset: DomainDataset
    config: TrainingConfig
    split: Split
    backbone: nn.Module | None
    folder: Path | None
    device: torch.device
    reporter: Reporter

    def run(self, name: str, identity: str) -> Run:
        """Train, predict the test patients once, and write the run folder."""
        first_use = warm_up(self.device)
        start = time.perf_counter()
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
        target_of(self.dataset.target).check(self.dataset.targets)
        learned = self.dataset.learnable(self.split.train)
        data = with_context(self.dataset, self.config, self.device, self.backbone, learned)
        start -= spared_seconds()
        sides = sides_of(data, self.split)
        fitted = fit(
            self.config, sides["train"], sides["val"], self.device,
            backbone=self.backbone, folder=self.folder, reporter=self.reporter,
        )  # fmt: skip
        held_out, predict_seconds = _timed_predictions(fitted.algorithm, data, self.split)
        if fitted.out_of_fold is not None:
            held_out["val"] = held_out["val"].with_scored(fitted.out_of_fold)
        record = make_record(
            self.config, self.dataset, sides, held_out, fitted,
            name=name, run=identity, seconds=time.perf_counter() - start, device=str(self.device),
        )  # fmt: skip
        schema, team = InputSchema.of(data), current_team()
        record = record.replace(
            context=context_of(schema, fitted.algorithm),
            processes=None if team is None else team.size,
            first_use_seconds=first_use,
            predict_seconds=predict_seconds,
        )
        info, val = _data_info(self.dataset, self.backbone), held_out["val"].scored()
        causal = record.context.get("mode") == CAUSAL
        population = fit_population(fitted.algorithm, sides["train"], sides["val"], val.probabilities, causal=causal)
        run = Run(fitted.algorithm, record, schema, self.config, info, self.folder, population)
        if self.folder is not None:
            by_leader(partial(write_calibration, self.folder, fit_calibration(fitted.algorithm, sides, val)))
            by_leader(partial(self._write, self.folder, run, held_out))
        self.reporter.finished(record)
        return run

    def _write(self, folder: Path, run: Run, held_out: Mapping[str, Predictions]) -> None:
        self.split.save(folder / SPLIT, self.dataset)
        write_predictions(folder / PREDICTIONS, held_out)
        _write_model(folder, run)
        _remove_checkpoints(folder)


_warmed_up: set[torch.device] = set()


def warm_up(device: torch.device) -> float | None:
    """Pay once for what the first training of a process pays for all: imports and first calls, on a device.

    A run's own seconds begin after it, so that the first run of a study is not charged for the others.

    - returns: The seconds it took; None where this process trained on the device before.
    """
    if device in _warmed_up or current_team() is not None:
        return None
    start = time.perf_counter()
    rng, rows = np.random.default_rng(0), np.arange(24)
    data = from_arrays(rng.normal(size=(24, 4)), rows % 2, rows // 6)
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        fitted = fit(TrainingConfig("base", epochs=1, batch_size=8, execution="plain"), data, data, device)
        predict_probabilities(fitted.algorithm, data)
    _warmed_up.add(device)
    return time.perf_counter() - start


def draw_split(dataset: DomainDataset, config: TrainingConfig) -> Split:
    """The split of a seed. A dataset may name its test patients (``info.test_patients``); then only training and
    validation are drawn."""
    reserved = dataset.info.test_patients
    if reserved and (config.folds or config.split == "site"):
        what = "folds" if config.folds else "sites"
        raise ConfigError(f"the dataset names its test patients: there are no {what} to test the others in")
    if config.split == "site":
        repeat, fold = divmod(config.seed, max(config.folds, 1))
        by_site = site_folds(dataset, config.folds, repeat)[fold] if config.folds else None
        return by_site or split_sites(dataset, config.ratios, config.seed)
    if config.folds:
        repeat, fold = divmod(config.seed, config.folds)
        return patient_folds(dataset, config.folds, repeat, patient_labels(dataset) if config.stratify else None)[fold]
    if not reserved:
        return split_patients(dataset, config.ratios, config.seed, patient_labels(dataset) if config.stratify else None)
    others = dataset.subset(sorted(set(dataset.patients.tolist()) - set(reserved)))
    train_share, val_share, _ = config.ratios
    labels = patient_labels(others) if config.stratify else None
    drawn = split_patients(others, (train_share, val_share, 0.0), config.seed, labels)
    return split_named(dataset, train=drawn.patients("train"), val=drawn.patients("val"), test=reserved)


def _checked_split(dataset: DomainDataset, config: TrainingConfig, split: Split | None) -> Split:
    check_decision(config, dataset)
    if dataset.n_patients < 3:
        raise DataError(
            f"the dataset has {dataset.n_patients} patient(s): training, validation and test need one each at least"
        )
    chosen = split if split is not None else draw_split(dataset, config)
    check_split(chosen, dataset)
    warn_of_overlap(dataset, chosen)
    return chosen


def _identity(dataset: DomainDataset, config: TrainingConfig, split: Split, backbone: nn.Module | None) -> str:
    custom = None if backbone is None else [type(backbone).__qualname__, str(backbone)]
    sides = [fingerprint(getattr(split, side).tolist()) for side in ("train", "val", "test")]
    return fingerprint(code_version(), data_identity(dataset), config.to_json(), sides, custom)


def data_identity(dataset: DomainDataset) -> str:
    """A hash of the content of a dataset and of what else of it decides a run: settings, and who may be tested."""
    info = dataset.info
    return fingerprint(dataset.content_hash(), dict(info.settings), info.test_patients, dict(info.sites))


def context_of(schema: InputSchema, algorithm: Algorithm) -> JsonObject:
    """Which of a patient's other samples a model makes use of, as its record states it."""
    # Adapting to a patient at prediction is context too: all samples of the patient that are there.
    by_algorithm: JsonObject = {"mode": "offline", "by": "algorithm"} if algorithm.uses_patients else {"mode": "none"}
    context = cast("JsonObject", schema.settings.get("context", by_algorithm))
    sequence = cast("JsonObject | None", schema.settings.get("sequence"))
    return context if sequence is None else {**context, "mode": sequence["direction"], "sequence": sequence}


def _data_info(dataset: DomainDataset, backbone: nn.Module | None) -> JsonObject:
    known = dataset.info.to_json()
    options = dataset.info.provenance.options if dataset.info.provenance else {}
    return {
        **{key: known[key] for key in ("vocabularies", "settings") if key in known},
        "source": dataset.info.source,
        # Names of columns, by which the rows of a new table have a patient and a time.
        "roles": {role: options.get(role) for role in ("patient", "time", "session")},
        "module": None if backbone is None else type(backbone).__qualname__,
    }


# Records


def sides_of(data: DomainDataset, split: Split) -> dict[str, DomainDataset]:
    """The samples to train on, to choose the epoch by, and to test: of an event to be foreseen, those before onset."""
    return {side: data.select(data.learnable(getattr(split, side))) for side in ("train", "val", "test")}


def _timed_predictions(algorithm: Algorithm, data: DomainDataset, split: Split) -> tuple[dict[str, Predictions], float]:
    """What :func:`predict_held_out` gives, and the seconds that a thousand samples took."""
    start = time.perf_counter()
    held_out = predict_held_out(algorithm, data, split)
    return held_out, 1000 * (time.perf_counter() - start) / sum(len(each.truth) for each in held_out.values())


def predict_held_out(algorithm: Algorithm, data: DomainDataset, split: Split) -> dict[str, Predictions]:
    """Predictions on all samples of the validation and, once, of the test patients: ``val`` and ``test``."""
    return {side: predictions_on(algorithm, data, np.asarray(getattr(split, side))) for side in ("val", "test")}


def predictions_on(algorithm: Algorithm, data: DomainDataset, rows: npt.NDArray[np.int64]) -> Predictions:
    """Predictions on some rows of a labelled dataset that has the context and order of the training."""
    part = data.select(rows)
    columns = part.info.subgroups if "subgroups" in part.metadata else {}
    codes = part.metadata["subgroups"].cpu().numpy() if columns else np.zeros((0, 0), np.int16)
    return Predictions(
        algorithm.target,
        algorithm.target.truth(part.targets).cpu().numpy(),
        shared_probabilities(algorithm, part).numpy(),
        np.array(part.pseudonyms())[part.domains.cpu().numpy()],
        rows=rows,
        timing=_timing(part),
        subgroups={name: np.array(groups)[codes[:, at]] for at, (name, groups) in enumerate(columns.items())},
    )


def _timing(part: DomainDataset) -> Timing | None:
    if part.info.event is None or part.times is None:
        return None
    timeline = Timeline.of(part.domains, part.times, part.info.session_gap)
    session = torch.empty_like(timeline.session)
    session[timeline.order] = timeline.session
    onset = part.metadata["onset"].cpu().numpy()
    return Timing(part.info.event, part.times.cpu().numpy(), onset, session.cpu().numpy())


def make_record(
    config: TrainingConfig,
    dataset: DomainDataset,
    sides: Mapping[str, DomainDataset],
    held_out: Mapping[str, Predictions],
    fitted: Fitted,
    *,
    name: str,
    run: str,
    seconds: float,
    device: str,
) -> RunRecord:
    """The record of a run: what ran, on what, and how it did on patients it had not seen."""
    test = held_out["test"].scored()
    silence = silence_of(config, dataset.info.event)
    threshold, threshold_rule = decide_threshold(config, held_out["val"])
    patients = score_patients(test.target, test.truth, test.probabilities, test.patients, threshold)
    return training_record(config, fitted, sides, name=name, seconds=seconds, device=device).replace(
        run=run,
        dataset_hash=dataset.content_hash(),
        sites=_sites_of(dataset, held_out["test"]) if config.split == "site" else {},
        code_version=code_version(),
        event=dataset.info.event,
        threshold=threshold,
        threshold_rule=threshold_rule,
        val=_scores(held_out["val"], threshold),
        test=_scores(held_out["test"], threshold),
        operating=_operating(dataclasses.replace(held_out["test"], threshold=threshold), silence),
        per_patient={
            name: {**_plain(patients[name]), "samples": int(patients[name]["samples"])}
            for name in sides["test"].pseudonyms()
        },
    )


def decide_threshold(config: TrainingConfig, val: Predictions) -> tuple[float | None, str]:
    """The decision threshold from the validation patients, and how it was chosen."""
    if config.at is None:
        counted = val.scored()
        return choose_threshold(counted.target, counted.truth, counted.probabilities)
    event = None if val.timing is None else val.timing.event
    return threshold_for(DecisionRule.parse(config.at), val, silence_of(config, event))


def check_decision(config: TrainingConfig, dataset: DomainDataset) -> None:
    """Raise if the target of a dataset has no use for the threshold or the alarms of a configuration."""
    if config.at is not None and dataset.target.kind != "binary":
        raise ConfigError(f"'--at {config.at}' is for a binary target, and this one is {dataset.target.kind}")
    alarms = config.at is not None and DecisionRule.parse(config.at).kind == "alarms"
    if dataset.info.event is None and (alarms or config.silence is not None):
        raise ConfigError("alarms need an event: prepare the table with --event and --horizon")


def silence_of(config: TrainingConfig, event: EventSpec | None) -> float | None:
    """The silence after an alarm in the unit of the times; None for the horizon."""
    if config.silence is None or event is None:
        return None
    return duration(config.silence, "silence") / UNITS["d"] * event.day


def _operating(test: Predictions, silence: float | None) -> dict[str, float | int | None]:
    """Rates of a binary target at the threshold, alarms included."""
    if test.target.kind != "binary":
        return {}
    each = np.ones((1, len(test.names)))
    rates = test.rates(each) if test.timing is None else rates_at_threshold(test, each, silence)
    return _plain({name: float(values[0]) for name, values in rates.items()})


def _scores(run: Predictions, threshold: float | None) -> dict[str, float | int | None]:
    """Metrics of the samples that count and, where there is an event, of those before and after its onset apart."""
    parts = {"": run.scored()} | {f"_{when}": part for when, part in run.around_onset().items()}
    return {
        f"{name}{suffix}": value
        for suffix, part in parts.items()
        for name, value in _plain(score(part.target, part.truth, part.probabilities, threshold)).items()
    }


def _sites_of(dataset: DomainDataset, test: Predictions) -> dict[str, str]:
    """Pseudonym of each tested patient to the patient's site, also of those with samples after an onset alone."""
    sites, tested = dataset.sites(), set(test.names.tolist())
    known = [] if sites is None else zip(dataset.pseudonyms(), sites.tolist(), strict=True)
    return {name: site for name, site in known if name in tested}


def training_record(
    config: TrainingConfig,
    fitted: Fitted,
    sides: Mapping[str, DomainDataset],
    *,
    name: str,
    seconds: float,
    device: str,
) -> RunRecord:
    """What there is to record of a training before any patient is predicted; its validation metrics are the epoch's."""
    return RunRecord(
        run="",
        algorithm=config.algorithm,
        seed=config.seed,
        dataset=name,
        synthetic=sides["train"].info.synthetic,
        target=fitted.algorithm.target.spec,
        samples=Counts(**{side: len(part) for side, part in sides.items()}),
        patients=Counts(**{side: part.n_patients for side, part in sides.items()}),
        config=_effective(config, fitted),
        selection_rule=fitted.selection_rule,
        epoch=fitted.epoch,
        epochs=len(fitted.history),
        val=fitted.history[fitted.epoch - 1].val if fitted.epoch else {},
        history=tuple(fitted.history),
        seconds=seconds,
        peak_memory_mb=_peak_memory_mb(device),
        parameters=sum(parameter.numel() for parameter in fitted.algorithm.parameters()),
        device=device,
        members=fitted.members,
        members_rule=fitted.members_rule,
    )


def _effective(config: TrainingConfig, fitted: Fitted) -> TrainingConfig:
    """The configuration with every default filled in, and the backbone and the speed that were really used."""
    algorithm = fitted.algorithm
    backbone: nn.Module = algorithm.backbone
    if isinstance(backbone, SequenceBackbone):
        backbone = backbone.samples
    if isinstance(backbone, SingleInput):
        backbone = backbone.module
    package, _, entry = type(backbone).__module__.rpartition(".")
    used = entry.replace("_", "-") if package == "manydg.backbones" else type(backbone).__qualname__
    return config.replace(
        settings=dataclasses.asdict(algorithm.settings),
        backbone=used if config.backbone == "auto" else config.backbone,
        precision=fitted.speed.precision,
        execution=fitted.speed.execution,
    )


def _plain(metrics: Mapping[str, float]) -> dict[str, float | int | None]:
    """JSON values; an undefined metric is null."""
    return {
        name: value if isinstance(value, int) else (float(value) if math.isfinite(value) else None)
        for name, value in metrics.items()
    }


def _peak_memory_mb(device: str) -> float | None:
    peak = torch.cuda.max_memory_allocated(device) if device.startswith("cuda") else peak_memory()
    return None if peak is None else peak / 2**20


# Run folders


def save_model(folder: Path, run: Run) -> Path:
    """Write a run that was not trained there to a folder, so that :func:`open_run` opens it; returns the weights' file.

    What was saved there before is replaced.
    """
    refuse_dataset_folder(folder)
    if (folder / IDENTITY).exists():
        raise StorageError(f"{folder} holds a run that was trained there: name another folder")
    # Without its record a model does not open, so that weights and record of two models are never taken for one.
    (folder / RECORD).unlink(missing_ok=True)
    (folder / PERSONAL).unlink(missing_ok=True)
    _write_model(folder, run)
    return folder / MODEL


def _write_model(folder: Path, run: Run) -> None:
    meta: dict[str, Json] = {
        "config": run.config.to_json(),
        "schema": run.schema.to_json(),
        "target": run.algorithm.target.spec.to_json(),
        "n_domains": run.algorithm.n_domains,
        "info": dict(run.info),
    }
    write_tensors(folder / MODEL, run.algorithm.state_dict(), meta)
    if run.population is not None:
        write_population(folder, run.population)
    run.record.write(folder / RECORD)


def open_run(
    folder: str | Path, *, backbone: nn.Module | str | None = None, algorithm: str | None = None, device: str = "cpu"
) -> Run:
    """Open a finished run, or a model that :meth:`manydg.ManyDGClassifier.save` wrote.

    A folder cannot cause code to run: if the run was trained with your own class, name it here.

    Parameters
    ----------
    folder : path
    backbone : nn.Module or str, optional
        Your own module that the run was trained with, newly created, whose weights are loaded; or its class as
        ``package.module:Class``, if it was named so in training.
    algorithm : str, optional
        Your own algorithm that the run was trained with, as ``package.module:Class``.
    """
    run = open_to_predict(folder, backbone=backbone, algorithm=algorithm, device=device)
    return dataclasses.replace(run, population=read_population(Path(folder), run.algorithm.target.size))


def open_to_predict(
    folder: str | Path, *, backbone: nn.Module | str | None = None, algorithm: str | None = None, device: str = "cpu"
) -> Run:
    """:func:`open_run` without the population, which predictions for patients without any labels have no use for."""
    path = Path(folder)
    again = f"delete {path} and train again"
    _check_finished(path)
    record = RunRecord.read(path / RECORD, again)
    tensors, meta = read_tensors(path / MODEL, again)
    check_files(path / RECORD, again)
    try:
        described = _Description.from_json(meta)
        described.check(record)
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError, ManyDGError) as error:
        raise StorageError(f"{path / MODEL} does not describe a model of this program ({error}): {again}") from error
    module = backbone if isinstance(backbone, nn.Module) else None
    if described.info.get("module") and module is None:
        raise ConfigError(f"{path} was trained with a module of your own: give one like it as backbone= in Python")
    config, schema = described.config, described.schema
    _trust_as_named(path, config, algorithm, backbone if isinstance(backbone, str) else None)
    model = rebuild(
        config, schema, target_of(described.target, config.loss), described.n_domains, tensors,
        backbone=module, source=path / MODEL,
    ).to(pick_device(device))  # fmt: skip
    return Run(model, record, schema, config, described.info, path)


@dataclass(frozen=True)
class _Description:
    """What a model's file says of itself, besides the weights."""

    config: TrainingConfig
    schema: InputSchema
    target: TargetSpec
    n_domains: int
    info: JsonObject

    @staticmethod
    def from_json(meta: ParsedJson) -> _Description:
        """Raise a plain error if a value is missing or impossible."""
        info, n_domains = dict(meta["info"]), meta["n_domains"]
        if isinstance(n_domains, bool) or not isinstance(n_domains, int) or not 1 <= n_domains < 2**31:
            raise ValueError(f"it is of {n_domains!r} patients")
        schema = InputSchema.from_json(meta["schema"])
        if isinstance(context := schema.settings.get("context"), Mapping):
            ContextOptions.from_json(context)
        if isinstance(sequence := schema.settings.get("sequence"), Mapping):
            SequenceOptions.from_json(sequence)
        for name in ("settings", "vocabularies", "roles"):
            if not isinstance(info.get(name, {}), Mapping):
                raise ValueError(f"its {name} are {info[name]!r}")
        for name, words in info.get("vocabularies", {}).items():
            if not isinstance(words, list) or not all(isinstance(word, str) for word in words):
                raise ValueError(f"the vocabulary of '{name}' is not a list of text")
        config = TrainingConfig.from_mapping(meta["config"])
        return _Description(config, schema, TargetSpec.from_json(meta["target"]), n_domains, info)

    def check(self, record: RunRecord) -> None:
        """Raise a plain error if this is not the model of a record."""
        if record.target != self.target:
            raise ValueError(f"its classes are not those of {RECORD}")
        if record.algorithm != self.config.algorithm:
            raise ValueError(f"its algorithm is not that of {RECORD}")


def _trust_as_named(folder: Path, config: TrainingConfig, algorithm: str | None, backbone: str | None) -> None:
    """Import the user's classes, if they are the ones that the run was trained with."""
    for registry, used, named in ((ALGORITHMS, config.algorithm, algorithm), (BACKBONES, config.backbone, backbone)):
        if named is None:
            continue
        if named != used:
            raise ConfigError(f"{folder} was trained with the {registry.kind} '{used}', not '{named}'")
        registry.trust(named)


def _check_finished(folder: Path) -> None:
    if (folder / RECORD).exists():
        return
    if (folder / MODEL).exists() and not (folder / IDENTITY).exists():
        raise StorageError(
            f"{folder / MODEL} has no {RECORD} beside it: an estimator of an earlier version saved it, whose files are "
            "no longer read, or saving was interrupted. Fit the estimator and save it again"
        )
    raise StorageError(
        f"{folder} is not a finished run: it has no {RECORD}. Name a folder that 'manydg train' finished"
    )


def _claim(folder: Path, identity: str) -> None:
    """Make the run folder this run's, or refuse if it is another's."""
    file = folder / IDENTITY
    refuse_dataset_folder(folder)
    remove_partial_files(folder)
    if file.exists():
        remedy = f"name another folder, or delete {folder} and run again"
        if read_json(file, remedy=remedy).get("identity") != identity:
            raise StorageError(
                f"{folder} holds a run of other data, another split, other options or another version of the program: "
                "name another folder"
            )
        return
    if (folder / RECORD).exists() or _has_checkpoints(folder):
        raise StorageError(f"{folder} holds a run that does not say what it is of: name another folder")
    write_json(file, {"identity": identity}, indent=None)


def _has_checkpoints(folder: Path) -> bool:
    return (folder / CHECKPOINT).exists() or (folder / MEMBERS).exists()


def _remove_checkpoints(folder: Path) -> None:
    (folder / CHECKPOINT).unlink(missing_ok=True)
    shutil.rmtree(folder / MEMBERS, ignore_errors=True)


def _unclaim(folder: Path) -> None:
    """Release the folder of a run that failed before it wrote anything, so that other options can be tried there."""
    if not _has_checkpoints(folder) and not (folder / RECORD).exists():
        with contextlib.suppress(OSError):
            (folder / IDENTITY).unlink(missing_ok=True)
