"""The scikit-learn estimators: arrays in, ``fit`` with the patients as groups, predictions on new patients.

A fitted estimator holds a :class:`~manydg.training.run.Run`, and what it saves is a run folder like any other:
:func:`manydg.open_run` and the commands take it. The other way round, :meth:`ManyDGClassifier.load` takes the folder of
any finished run whose samples are one array.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import numbers
import os
import time
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Self

import numpy as np
import numpy.typing as npt
import polars as pl
import torch
from sklearn.base import (
    BaseEstimator,
    ClassifierMixin,
    ClassNamePrefixFeaturesOutMixin,
    RegressorMixin,
    TransformerMixin,
)
from sklearn.model_selection import BaseCrossValidator
from sklearn.utils import check_array, check_random_state
from sklearn.utils.class_weight import compute_sample_weight
from sklearn.utils.multiclass import check_classification_targets, type_of_target
from sklearn.utils.validation import check_consistent_length, check_is_fitted, column_or_1d, validate_data
from threadpoolctl import threadpool_limits
from torch import nn

from manydg.algorithms import Algorithm
from manydg.config import TrainingConfig, pick_device
from manydg.data.columns import CATEGORIES, FrameEncoding, as_frame, encode_patients
from manydg.data.dataset import DomainDataset, InputSchema, from_arrays, unlabelled
from manydg.data.info import DatasetInfo, TargetSpec
from manydg.data.splits import rank_patients, split_patients
from manydg.data.timeline import clock_of, is_missing
from manydg.errors import ConfigError, DataError, ManyDGWarning
from manydg.evaluation.metrics import DEFAULT_THRESHOLD, decide
from manydg.files import JsonObject, code_version, fingerprint
from manydg.training.fit import fit, trust_named
from manydg.training.inference import CAUSAL, NONE, embed_dataset, predict_probabilities, settled, with_context
from manydg.training.personal import fit_population
from manydg.training.record import checksum
from manydg.training.run import Run, context_of, open_run, save_model, training_record

Array = npt.NDArray[Any]
Rows = npt.NDArray[np.int64]
FEWEST_PATIENTS_TO_HOLD_BACK = 10
MOST_REPEATS = 10
"""How many times as many rows as there are samples weights may make of them."""
_INFO = "estimator"
"""Key of a run's info under which the estimator's own fields are."""
_VALUE_RULE = "the predicted value itself"
_PARAMETERS = ("algorithm", "epochs", "lr", "weight_decay", "selection", "loss", "context", "sequence")
_TABLES = ("settings", "backbone_options", "sequence_options")
"""Parameters that are a run's options of the same name: values, and mappings."""


class EstimatorError(DataError, ConfigError, ValueError):
    """What was given to the estimator is not what it takes; a ``ValueError`` too, as scikit-learn's users expect."""


class PatientEstimator(ClassNamePrefixFeaturesOutMixin, TransformerMixin, BaseEstimator):  # type: ignore[misc]
    """What :class:`ManyDGClassifier` and :class:`ManyDGRegressor` share: parameters, training, saving and loading."""

    n_features_in_: int
    algorithm_: Algorithm
    _shown_: _Shown | None = None
    _numeric: ClassVar[bool] = False

    def __init__(
        self,
        algorithm: str = "manydg",
        *,
        settings: JsonObject | None = None,
        backbone: str | nn.Module = "auto",
        backbone_options: JsonObject | None = None,
        epochs: int = 20,
        batch_size: int | str = "auto",
        lr: float = 1e-3,
        weight_decay: float = 1e-5,
        validation_share: float = 0.1,
        selection: str | None = None,
        loss: str = "auto",
        context: str = "auto",
        sequence: str = "none",
        sequence_options: JsonObject | None = None,
        class_weight: Mapping[Any, float] | str | None = None,
        n_jobs: int | None = None,
        device: str = "auto",
        random_state: Any = None,
    ) -> None:
        self.algorithm = algorithm
        self.settings = settings
        self.backbone = backbone
        self.backbone_options = backbone_options
        self.epochs = epochs
        self.batch_size = batch_size
        self.lr = lr
        self.weight_decay = weight_decay
        self.validation_share = validation_share
        self.selection = selection
        self.loss = loss
        self.context = context
        self.sequence = sequence
        self.sequence_options = sequence_options
        self.class_weight = class_weight
        self.n_jobs = n_jobs
        self.device = device
        self.random_state = random_state

    def _fit(
        self, inputs: Any, targets: Array, kind: str, names: list[str], groups: Any, times: Any, weights: Array | None
    ) -> None:
        """Train on checked samples."""
        patients = _patients(groups, inputs)
        seed = int(check_random_state(self.random_state).randint(2**31 - 1))
        # Training seeds torch; the caller gets its own random state back.
        own_numbers = torch.random.fork_rng(devices=range(torch.cuda.device_count()))
        with _as_value_errors(), own_numbers, _threads(self.n_jobs):
            data = from_arrays(
                inputs, targets, patients, kind=kind, names=names, missing=_has_gaps(inputs),
                times=_numbers(times, inputs),
            )  # fmt: skip
            self._adopt(self._train(data, seed, weights))

    def _validated(self, X: Any, y: Any, **checks: Any) -> tuple[Any, Array]:
        """Samples and labels, checked; a table with columns that are no numbers stays a table."""
        with _as_value_errors():
            frame = _mixed_frame(X)
        _refuse_missing(y)
        if frame is None:
            with np.errstate(over="ignore"):  # A number too large for float32 becomes infinite, which is refused.
                inputs, labels = validate_data(
                    self,
                    X,
                    y,
                    dtype=np.float32,
                    allow_nd=True,
                    ensure_all_finite="allow-nan",
                    ensure_min_samples=2,
                    **checks,
                )
            return _writable(inputs), labels
        validate_data(self, X, skip_check_array=True)
        labels = check_array(y, ensure_2d=False, dtype=None, input_name="y")
        check_consistent_length(frame, labels)
        return frame, labels

    def _weights(self, sample_weight: Any, labels: Array) -> Array | None:
        """The weight of each sample, ``(samples,)``; ``None`` where all are the same."""
        if sample_weight is None and self.class_weight is None:
            return None
        weights = compute_sample_weight(self.class_weight, labels)
        if sample_weight is not None:
            own = np.asarray(sample_weight, dtype=np.float64)
            if own.ndim not in (0, 1) or (own.ndim == 1 and len(own) != len(labels)):
                raise EstimatorError(f"sample_weight has shape {own.shape}; it needs one weight for each sample")
            weights = weights * own
        if not np.isfinite(weights).all() or (weights < 0).any() or not weights.any():
            raise EstimatorError("sample weights must be finite, none of them negative and not all of them zero")
        return np.asarray(weights)

    def _outputs(self, X: Any, groups: Any, times: Any) -> npt.NDArray[np.float32]:
        """What the model says of samples, ``(samples, K)``."""
        if self._shown_ is not None:
            inputs = self._array(X)
            with _as_value_errors(), _threads(self.n_jobs):
                return self._shown_.predict(self._run_, inputs, groups, times)
        data = self._new_samples(X, groups, times)
        with _as_value_errors(), _threads(self.n_jobs):
            return self._run_.predict_proba(data)

    def transform(self, X: Any, groups: Any = None, times: Any = None) -> npt.NDArray[np.float32]:
        """What the model sees in each sample, ``(samples, width)``: features for another model, or for a picture.

        Of networks it is the output of the backbone, of trees the scores. ``groups`` and ``times`` are those of
        :meth:`predict_proba`.
        """
        data = self._new_samples(X, groups, times)
        with _as_value_errors(), _threads(self.n_jobs):
            return self._embed(data)

    @property
    def _n_features_out(self) -> int:
        """The width of :meth:`transform`, from which scikit-learn makes the names of its columns."""
        schema, target = self._run_.schema.without_context(), self.algorithm_.target.spec
        one = {name: np.zeros((1, *column.shape), column.dtype) for name, column in schema.columns.items()}
        data = unlabelled(one, schema, target, {}, patients=np.zeros(1), times=np.zeros(1))
        return int(self._embed(data).shape[1])

    def _embed(self, data: DomainDataset) -> npt.NDArray[np.float32]:
        return embed_dataset(self.algorithm_, self._run_.prepare(data))["v"].numpy()

    def _new_samples(self, X: Any, groups: Any, times: Any) -> DomainDataset:
        """Samples to predict, checked against those of ``fit``."""
        check_is_fitted(self, "algorithm_")
        schema, target = self._run_.schema, self.algorithm_.target.spec
        run = self._run_
        if groups is None and (run.config.sequence != NONE or run.record.context.get("mode", NONE) != NONE):
            warnings.warn(
                "this model draws on the patient's other samples, but was not told which samples are of one patient: "
                "each is predicted as if it were alone. Give the patients as groups; where scikit-learn calls predict, "
                "route them with set_predict_request(groups=True) and set_predict_proba_request(groups=True)",
                ManyDGWarning,
                stacklevel=4,
            )
        with _as_value_errors():
            if CATEGORIES not in schema.columns:
                return _unlabelled(self._array(X), _input_column(schema), target, groups, times)
            if (frame := as_frame(X)) is None:
                raise EstimatorError("this model was fitted on a table with categories: give a pandas or polars frame")
            validate_data(self, X, skip_check_array=True, reset=False)
            clock = np.zeros(len(frame)) if times is None and groups is None else _numbers(times, frame)
            who = None if groups is None else _column(groups, frame)
            return unlabelled(frame, schema, target, {}, patients=who, times=clock)

    def _array(self, X: Any) -> Array:
        """Samples of numbers to predict, checked against those of ``fit``."""
        check_is_fitted(self, "algorithm_")
        if CATEGORIES in self._run_.schema.columns:
            raise EstimatorError("a model of a table with categories is personalised by 'manydg personalise'")
        with np.errstate(over="ignore"):
            inputs: Array = validate_data(
                self, X, dtype=np.float32, allow_nd=True, ensure_all_finite="allow-nan", reset=False
            )
        return inputs

    def save(self, folder: str | Path) -> Path:
        """Write the fitted model to a folder that :func:`manydg.open_run`, ``manydg export`` and others take.

        The weights are one safetensors file, all else is JSON, and nothing is pickled. A model saved there before is
        replaced; the folder of a run of ``manydg train`` is refused.

        Returns
        -------
        Path
            The file with the weights.
        """
        check_is_fitted(self, "algorithm_")
        if self._shown_ is not None:
            raise EstimatorError(
                "a personalised model holds samples of its patients and is not saved: save the model that personalise "
                "was called on"
            )
        version, config = code_version(), self._run_.config.to_json()
        identity = fingerprint(version, config, checksum(self.algorithm_.state_dict()))
        run = dataclasses.replace(
            self._run_,
            record=dataclasses.replace(self._run_.record, run=identity, code_version=version),
            info={**self._run_.info, _INFO: self._to_json()},
        )
        try:
            return save_model(Path(folder), run)
        except TypeError as error:
            raise EstimatorError(f"a setting or a class label cannot be written as JSON: {error}") from error

    @classmethod
    def load(cls, folder: str | Path, *, backbone: nn.Module | str | None = None, algorithm: str | None = None) -> Self:
        """Open what :meth:`save` wrote, or a run of ``manydg train`` whose samples are one array; it predicts the same.

        The classes of a run are the names of its target's classes, as text.

        Parameters
        ----------
        folder : path
        backbone : nn.Module or str, optional
            Needed where the model was trained with a module of your own: one like it, freshly built, whose weights are
            filled in; or its class as ``package.module:Class``, where it was named so.
        algorithm : str, optional
            The same for an algorithm of your own.
        """
        run = open_run(folder, backbone=copy.deepcopy(backbone), algorithm=algorithm)
        if run.algorithm.target.numeric != cls._numeric:
            right = ManyDGRegressor if run.algorithm.target.numeric else ManyDGClassifier
            raise EstimatorError(f"{folder} has a model of {run.algorithm.target.spec}: load it with {right.__name__}")
        saved: Any = run.info.get(_INFO) or _estimator_of(run, Path(folder))
        # Fitting imports what an estimator names; these two names were checked when the run was opened.
        parameters = {**saved["parameters"], "algorithm": run.config.algorithm, "backbone": run.config.backbone}
        if backbone is not None:
            parameters["backbone"] = backbone
        try:
            model = cls(**parameters)
            model._from_json_of_target(saved)
            model.n_features_in_ = int(saved["features"]["count"])
            if saved["features"]["names"] is not None:
                model.feature_names_in_ = np.array(saved["features"]["names"], dtype=object)
        except (KeyError, TypeError, ValueError) as error:
            raise EstimatorError(f"{folder} does not describe an estimator ({error}): fit and save it again") from error
        run.algorithm.to(pick_device(model.device))
        model._adopt(run)
        return model

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.allow_nan = True
        tags.transformer_tags.preserves_dtype = ["float32"]
        tags.non_deterministic = False
        return tags

    def _to_json_of_target(self) -> JsonObject:
        """What predictions are called."""
        return {}

    def _from_json_of_target(self, saved: Any) -> None:
        """Read what :meth:`_to_json_of_target` wrote."""

    def _batch_size(self, samples: int) -> int:
        return min(256, max(32, samples // 8)) if self.batch_size == "auto" else _plain(self.batch_size)

    def _config(self, seed: int) -> TrainingConfig:
        parameters = _plain(self.get_params(deep=False))
        options = {name: parameters[name] for name in _PARAMETERS}
        options |= {name: parameters[name] or {} for name in _TABLES}
        backbone = self.backbone if isinstance(self.backbone, str) else "auto"
        return TrainingConfig(**options, backbone=backbone, batch_size=self._batch_size(0), seed=seed)

    def _train(self, data: DomainDataset, seed: int, weights: Array | None = None) -> Run:
        """Train on all patients but those held back to choose the epoch."""
        start, device = time.perf_counter(), pick_device(self.device)
        config = self._config(seed)
        trust_named(config)
        if weights is not None:
            if settled(config, data).sequence != NONE:
                raise ConfigError("a sequence is read as it is: leave out sample_weight and class_weight, or times")
            data, weights = data.select(np.flatnonzero(weights)), weights[weights > 0]
        chosen, held_back = _hold_back(data, _plain(self.validation_share), seed)
        data = with_context(data, config, torch.device("cpu"), training=chosen)
        repeated = chosen if weights is None else np.repeat(chosen, _repeats(weights[chosen], seed))
        train = data if held_back is None and weights is None else data.select(repeated)
        val = None if held_back is None else data.select(held_back)
        config = config.replace(batch_size=self._batch_size(len(train)))
        module = copy.deepcopy(self.backbone) if isinstance(self.backbone, nn.Module) else None
        fitted = fit(config, train, val, device, backbone=module)
        record = training_record(
            config, fitted, {"train": train} if val is None else {"train": train, "val": val},
            name="arrays", seconds=time.perf_counter() - start, device=str(device),
        )  # fmt: skip
        threshold = DEFAULT_THRESHOLD if data.target.kind == "multilabel" else None
        rule = _VALUE_RULE if data.target.kind == "regression" else "highest probability"
        if threshold is not None:
            rule = f"{threshold}: not chosen on any patients"
        schema = InputSchema.of(data)
        record = dataclasses.replace(
            record, context=context_of(schema, fitted.algorithm), threshold=threshold, threshold_rule=rule
        )  # fmt: skip
        probabilities = None if val is None else predict_probabilities(fitted.algorithm, val).numpy()
        causal = record.context.get("mode") == CAUSAL
        population = fit_population(fitted.algorithm, train, val, probabilities, causal=causal)
        info = self._data_info(data, module)
        return Run(fitted.algorithm.eval(), record, schema, config, info, population=population)

    def _data_info(self, data: DomainDataset, module: nn.Module | None) -> JsonObject:
        """What predictions on new files need to know: a table with named columns is a source, and so is an array."""
        names = getattr(self, "feature_names_in_", None)
        settings = dict(data.info.settings)
        if names is not None:
            settings.setdefault("features", names.tolist())
        return {
            "source": "arrays" if names is None else "table",
            "settings": settings,
            "module": None if module is None else type(module).__qualname__,
        }

    @property
    def history_(self) -> list[JsonObject]:
        """What each epoch's training gave."""
        return [entry.to_json() for entry in self._run_.record.history]

    def _adopt(self, run: Run) -> None:
        """Set the fitted attributes that a run decides."""
        self._run_, self.algorithm_, self._shown_ = run, run.algorithm, None
        record = run.record
        self.epoch_, self.selection_rule_, self.threshold_ = record.epoch, record.selection_rule, record.threshold
        self.n_patients_ = record.patients.train + record.patients.val

    def _to_json(self) -> JsonObject:
        """What a run does not hold of an estimator: the constructor's arguments, the classes and the features.

        A module and a random generator have no JSON value and become null.
        """
        parameters = _plain(self.get_params(deep=False))
        if not isinstance(self.backbone, str):
            parameters["backbone"] = None
        seed = self.random_state
        parameters["random_state"] = int(seed) if isinstance(seed, numbers.Integral) else None
        names = getattr(self, "feature_names_in_", None)
        return {
            "parameters": parameters,
            **self._to_json_of_target(),
            "features": {"count": self.n_features_in_, "names": None if names is None else names.tolist()},
        }


class ManyDGClassifier(ClassifierMixin, PatientEstimator):  # type: ignore[misc]
    """A classifier for unseen patients, trained on samples of many patients.

    Parameters
    ----------
    algorithm : str
        Name of an algorithm of this package (``manydg``, ``base``, ``dann``, ``boosting``, ...).
    settings : dict, optional
        Settings of the algorithm; the others have their defaults.
    backbone : str or nn.Module
        Name of a backbone, ``package.module:Class``, or your own module that maps ``(batch, features)`` to
        ``(batch, width)``. A module is copied before it is trained. ``auto`` is a multilayer perceptron, or the
        ``tabular`` network where values are missing.
    backbone_options : dict, optional
        Options of a backbone that is given by name.
    epochs : int
    batch_size : int or "auto"
        Samples of a step; ``auto`` is an eighth of the training samples, but at least 32 and at most 256.
    lr, weight_decay : float
        Of Adam.
    validation_share : float
        Share of the patients held back to choose the epoch. None are held back if it is 0, if there are fewer than ten
        patients, or if those held back would not have two classes, or would take the last samples of a class away; then
        the last epoch's weights are kept. :attr:`selection_rule_` says which it was.
    selection : str, optional
        Validation metric that chooses the epoch; the target's own if not given.
    loss : {"auto"}
        Classes have one loss; the regressor has others.
    context : {"auto", "none", "offline", "causal"}
        Patient context: whether the model sees the patient's other samples, all or the earlier ones, without labels;
        ``auto`` is the algorithm's own choice.
    sequence : {"none", "gru", "transformer", "conv"}
        The network on top of the backbone that reads each patient's samples in the order of ``times``.
    sequence_options : dict, optional
        Options of :class:`manydg.data.timeline.SequenceOptions`; ``{"direction": "causal"}`` reads up to each sample.
    class_weight : dict, "balanced" or None
        Weights of the classes, as in scikit-learn; they multiply ``sample_weight``.
    n_jobs : int, optional
        CPU threads of fitting and predicting; -1 is all, None leaves it to torch.
    device : str
        ``auto``, ``cpu``, ``cuda`` or ``cuda:N``.
    random_state : int, RandomState instance or None
        Decides validation patients, initial weights, order and dropout.

    Attributes
    ----------
    classes_ : array ``(K,)``
        The labels, sorted; for label indicators, the numbers of the labels.
    n_features_in_ : int
    feature_names_in_ : array of str
        Where ``X`` was a table with named columns.
    algorithm_ : Algorithm
        The trained model.
    selection_rule_ : str
        How the epoch was chosen whose weights are kept.
    epoch_ : int
        That epoch.
    history_ : list of dict
        Loss terms and validation metrics of every epoch.
    threshold_ : float or None
        Probability from which a label, or the second of two classes, is predicted; None where the most probable class
        is. ``fit`` leaves it at 0.5 for label indicators and None for classes; a loaded run has its own.
    n_patients_ : int
        Patients seen in ``fit``, those held back included.

    Notes
    -----
    Pass the patients to ``fit`` as ``groups``. Without them every sample counts as a separate patient: ManyDG then has
    no pairs and trains its supervised and MMD terms only, the validation samples are not from other patients, and a
    warning says so. In cross-validation the patients must reach both the splitter and
    ``fit``, which needs scikit-learn's metadata routing (see the example).

    Examples
    --------
    >>> import sklearn
    >>> from sklearn.model_selection import GroupKFold, cross_val_score
    >>> rng = np.random.default_rng(0)
    >>> patients = np.repeat(np.arange(12), 10)
    >>> X = rng.normal(size=(120, 4))
    >>> y = np.where(X[:, 0] > 0, "ill", "well")
    >>> model = ManyDGClassifier(epochs=3, random_state=0).fit(X, y, groups=patients)
    >>> model.predict_proba(X[:5]).shape
    (5, 2)
    >>> with sklearn.config_context(enable_metadata_routing=True):
    ...     routed = ManyDGClassifier(epochs=1, random_state=0).set_fit_request(groups=True)
    ...     scores = cross_val_score(routed, X, y, cv=GroupKFold(3), params={"groups": patients})
    >>> len(scores)
    3
    """

    classes_: Array

    def fit(self, X: Any, y: Any, groups: Any = None, times: Any = None, sample_weight: Any = None) -> ManyDGClassifier:
        """Train on samples of many patients.

        Parameters
        ----------
        X : array or DataFrame ``(samples, features)``
            NaN is a missing value. More dimensions are possible with your own backbone. Columns of a
            pandas or polars frame that are text or categories are categorical features; levels that no two patients
            have, and levels that are new at prediction, count as unseen. Dates, times and durations become numbers.
        y : array ``(samples,)`` of class labels, or ``(samples, K)`` of 0 and 1
        groups : array ``(samples,)``, optional
            The patient of each sample.
        times : array ``(samples,)``, optional
            When each sample was taken, on its patient's own clock; used by patient context and sequences.
        sample_weight : array ``(samples,)``, optional
            Only ratios count. A training sample enters each epoch as often as its weight says in relation to the
            smallest, and once at least; an epoch becomes at most ten times as long. Fractions are rounded at random. A
            weight of 0 leaves the sample out. A weight of 2 is not exactly the same as giving the row twice, as it is
            not for scikit-learn's ``SGDClassifier``: which samples share a batch depends on the order and number of
            rows, and without ``groups`` a row that is given twice counts as two patients.

        Returns
        -------
        ManyDGClassifier
            Itself.
        """
        inputs, labels = self._validated(X, y, multi_output=True)
        kind, codes = self._encode(labels)
        names, weights = [str(label) for label in self.classes_.tolist()], self._weights(sample_weight, labels)
        self._fit(inputs, codes, kind, names, groups, times, weights)
        return self

    def predict_proba(self, X: Any, groups: Any = None, times: Any = None) -> npt.NDArray[np.float32]:
        """Probabilities of the classes for samples of any patient, ``(samples, K)``.

        For label indicators each column is the probability of that label, and a row need not sum to one.

        Parameters
        ----------
        X : array ``(samples, features)``
        groups : array ``(samples,)``, optional
            The patient of each sample, for models with context or a sequence. Without it, every sample counts as a
            separate patient, and a warning says so. Other models ignore it.
        times : array ``(samples,)``, optional
            When each sample was taken, where the model was trained with times.
        """
        probabilities = self._outputs(X, groups, times)
        # In 32 bits a sigmoid rounds to exactly 1 where a label is merely very likely.
        margin = np.finfo(np.float32).eps
        return (
            np.clip(probabilities, margin, 1 - margin) if self.algorithm_.target.kind == "multilabel" else probabilities
        )

    def predict(self, X: Any, groups: Any = None, times: Any = None) -> Array:
        """The class of each sample ``(samples,)``, or 1 for each label that is predicted ``(samples, K)``.

        The most probable class or, with a :attr:`threshold_`, each label that reaches it. ``groups`` and ``times``
        are those of :meth:`predict_proba`.
        """
        probabilities = self.predict_proba(X, groups, times)
        if self.threshold_ is None:
            chosen: Array = probabilities.argmax(axis=1)
        else:
            chosen = decide(self.algorithm_.target, probabilities, self.threshold_)
        if self.algorithm_.target.kind == "multilabel":
            return chosen
        return np.asarray(self.classes_[chosen])

    def personalise(
        self, X: Any, y: Any, groups: Any = None, times: Any = None, learner: str = "effects"
    ) -> ManyDGClassifier:
        """A copy of the fitted model that knows labels of a few samples of new patients; nothing is trained again.

        Its :meth:`predict_proba` and :meth:`predict` take further samples of the same patients, or of others, whom the
        labels do not affect.

        Parameters
        ----------
        X : array ``(labelled, features)``
        y : array ``(labelled,)`` of class labels, or ``(labelled, K)`` of 0 and 1
        groups : array ``(labelled,)``, optional
            The patient of each sample, named as in predictions; without it, all samples, and all samples to predict,
            belong to one patient.
        times : array ``(labelled,)``, optional
            When each was taken, where the model was trained with times.
        learner : {"effects", "prototypes", "intercept", "fine-tune", "markov", "auto"}
            How labels are used (:mod:`manydg.training.personal`).

        Returns
        -------
        ManyDGClassifier
            It holds the labelled samples and cannot be saved.

        Examples
        --------
        >>> rng = np.random.default_rng(0)
        >>> patients = np.repeat(np.arange(60), 40)
        >>> shift = rng.normal(size=60)[patients]
        >>> X = rng.normal(size=(2400, 4))
        >>> y = X[:, 0] + 2 * shift > 0
        >>> model = ManyDGClassifier("base", epochs=5, random_state=0).fit(X[:2000], y[:2000], groups=patients[:2000])
        >>> known = np.arange(2000, 2400).reshape(10, 40)[:, :15].ravel()  # of every new patient, the first 15 samples
        >>> rest = np.setdiff1d(np.arange(2000, 2400), known)
        >>> personal = model.personalise(X[known], y[known], patients[known])
        >>> before, after = model.score(X[rest], y[rest]), np.mean(personal.predict(X[rest], patients[rest]) == y[rest])
        >>> bool(after > before)
        True
        """
        inputs = self._array(X)
        check_consistent_length(inputs, y)
        _refuse_missing(y)
        with _as_value_errors():
            # By value, as labels are the same in scikit-learn: 1, 1.0 and True are one.
            names = {label: str(label) for label in self.classes_.tolist()}
            if self.algorithm_.target.kind == "multilabel":
                rows = check_array(y, dtype=None, input_name="y")
                labels: list[Any] = [[name for name, has in zip(names, row, strict=True) if has] for row in rows]
            else:
                labels = [names.get(label, label) for label in column_or_1d(y, warn=True).tolist()]
            model = copy.copy(self)
            model._shown_ = _Shown(inputs, labels, groups, times, learner)
            model._shown_.predict(self._run_, inputs[:0], None if groups is None else [], None if times is None else [])
        return model

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.classifier_tags.multi_label = True
        return tags

    def _to_json_of_target(self) -> JsonObject:
        return {"classes": {"type": self.classes_.dtype.str, "labels": self.classes_.tolist()}}

    def _from_json_of_target(self, saved: Any) -> None:
        self.classes_ = np.array(saved["classes"]["labels"], dtype=np.dtype(saved["classes"]["type"]))

    def _encode(self, y: Array) -> tuple[str, Array]:
        """The kind of target and its codes; sets ``classes_``."""
        check_classification_targets(y)
        if type_of_target(y) == "multilabel-indicator":
            self.classes_ = np.arange(y.shape[1])
            return "multilabel", np.asarray(y, dtype=np.int64)
        self.classes_, codes = np.unique(column_or_1d(y, warn=True), return_inverse=True)
        if len(self.classes_) < 2:
            raise EstimatorError(f"y holds one class only ({self.classes_.tolist()[0]!r}): there is nothing to learn")
        return "binary" if len(self.classes_) == 2 else "classes", codes


class ManyDGRegressor(RegressorMixin, PatientEstimator):  # type: ignore[misc]
    """A regressor for unseen patients, trained on samples of many patients.

    Parameters
    ----------
    algorithm, settings, backbone, backbone_options, epochs, batch_size, lr, weight_decay
        Those of :class:`ManyDGClassifier`.
    validation_share, selection, context, sequence, sequence_options, device, random_state
        Likewise; the epoch is the one with the highest R2 on validation patients, or with the lowest ``mae`` or
        ``rmse`` if ``selection`` names it.
    class_weight : None
        Classes have weights; numbers take ``sample_weight``.
    n_jobs : int, optional
        CPU threads of fitting and predicting; -1 is all, None leaves it to torch.
    loss : {"auto", "squared", "huber"}
        ``auto`` is squared. With Huber's, errors beyond one standard deviation of ``y`` count linearly.

    Attributes
    ----------
    n_features_in_, feature_names_in_, algorithm_, selection_rule_, epoch_, history_, n_patients_
        Those of :class:`ManyDGClassifier`.

    Notes
    -----
    Pass the patients to ``fit`` as ``groups``; :class:`ManyDGClassifier` describes what happens without them. The model
    standardises ``y``; predictions are in its unit.

    Examples
    --------
    >>> rng = np.random.default_rng(0)
    >>> patients = np.repeat(np.arange(12), 10)
    >>> X = rng.normal(size=(120, 4))
    >>> days = 10 + 3 * X[:, 0]
    >>> model = ManyDGRegressor("base", epochs=20, lr=0.01, random_state=0).fit(X, days, groups=patients)
    >>> model.predict(X[:5]).shape, model.score(X, days) > 0.8
    ((5,), True)
    """

    _numeric: ClassVar[bool] = True

    def fit(self, X: Any, y: Any, groups: Any = None, times: Any = None, sample_weight: Any = None) -> ManyDGRegressor:
        """Train on samples of many patients.

        Parameters
        ----------
        y : array ``(samples,)`` of numbers
        X, groups, times, sample_weight
            Those of :meth:`ManyDGClassifier.fit`.

        Returns
        -------
        ManyDGRegressor
            Itself.
        """
        if self.class_weight is not None:
            raise EstimatorError("class_weight is for classes: give sample_weight")
        inputs, values = self._validated(X, y, multi_output=True, y_numeric=True)
        numbers_of_y, weights = column_or_1d(values, warn=True), self._weights(sample_weight, values)
        self._fit(inputs, numbers_of_y, "regression", ["value"], groups, times, weights)
        return self

    def predict(self, X: Any, groups: Any = None, times: Any = None) -> npt.NDArray[np.float32]:
        """The value of each sample, ``(samples,)``, in the unit of ``y``.

        Parameters
        ----------
        X : array ``(samples, features)``
        groups, times : array ``(samples,)``, optional
            Those of :meth:`ManyDGClassifier.predict_proba`.
        """
        return self._outputs(X, groups, times)[:, 0]


# Labels of new patients


@dataclass(frozen=True, eq=False)
class _Shown:
    """The labelled samples of a personalised model."""

    inputs: Array
    labels: list[Any]
    groups: Any
    times: Any
    learner: str

    def predict(self, run: Run, inputs: Array, groups: Any, times: Any) -> npt.NDArray[np.float32]:
        """Probabilities of further samples, which join the labelled ones of their patients."""
        for name, ours, theirs in (("groups", self.groups, groups), ("times", self.times, times)):
            if (ours is None) != (theirs is None):
                raise DataError(f"the labelled samples were given {'without' if ours is None else 'with'} {name}")
        everyone = (
            np.zeros(len(self.inputs) + len(inputs), np.int64) if groups is None else _joined(self.groups, groups)
        )
        clock = None if times is None else _joined(self.times, times)
        both = np.concatenate([self.inputs, inputs])
        data = _unlabelled(both, _input_column(run.schema), run.algorithm.target.spec, everyone, clock)
        unknown = [None] * len(inputs)
        return run.personalise(data, [*self.labels, *unknown], learner=self.learner)[len(self.inputs) :]


def _joined(first: Any, second: Any) -> Array:
    return np.concatenate(
        [np.asarray(first), np.asarray(second, np.asarray(first).dtype if len(second) == 0 else None)]
    )


# Arrays to datasets


def _patients(groups: Any, inputs: Any) -> Array:
    """Whose sample each one is; without groups every sample is a patient of its own, with a warning."""
    if groups is not None:
        return _column(groups, inputs)
    warnings.warn(
        "fit was not told whose samples these are: every sample counts as a patient of its own, so that nothing is "
        "learnt about patients. Give fit the patients as groups; where scikit-learn calls fit (cross_val_score, "
        "GridSearchCV, Pipeline), route them: sklearn.set_config(enable_metadata_routing=True), "
        "set_fit_request(groups=True) and params={'groups': patients}",
        ManyDGWarning,
        stacklevel=4,
    )
    return np.arange(len(inputs))


def _unlabelled(inputs: Array, column: str, target: TargetSpec, groups: Any, times: Any) -> DomainDataset:
    """Samples to predict, ``(samples, ...)``; without groups each has a patient of its own."""
    shape = (len(inputs), target.size) if target.kind in ("multilabel", "votes") else (len(inputs),)
    domains, names = encode_patients(np.arange(len(inputs)) if groups is None else _column(groups, inputs))
    clock = np.zeros(len(inputs)) if times is None and groups is None else _numbers(times, inputs)
    return DomainDataset(
        columns={column: torch.from_numpy(_writable(inputs))},
        targets=torch.zeros(shape, dtype=torch.int64),
        target=target,
        domains=domains,
        patients=names,
        times=None if clock is None else torch.as_tensor(clock, dtype=torch.float64),
        info=DatasetInfo(settings={"missing": True} if np.isnan(inputs).any() else {}),
    )


def _mixed_frame(X: Any) -> pl.DataFrame | None:
    """A table with a column that is no number, as a polars frame; ``None`` for anything else."""
    frame = as_frame(X)
    if frame is None or all(column.dtype.is_numeric() or column.dtype == pl.Boolean for column in frame):
        return None
    return frame


def _refuse_missing(y: Any) -> None:
    """Raise where a label is NaN, None or NA, of which scikit-learn says neither where they are nor always what."""
    labels = np.asarray(y)
    if labels.ndim != 1 or labels.dtype.kind not in "fO":
        return
    rows = np.flatnonzero(np.isnan(labels) if labels.dtype.kind == "f" else [is_missing(label) for label in labels])
    if len(rows):
        raise EstimatorError(
            f"Input y contains NaN or None: {len(rows)} of {len(labels)} labels are missing, the first in row "
            f"{rows[0]} (the first row is 0); leave those samples out"
        )


def _has_gaps(inputs: Array | pl.DataFrame) -> bool:
    """Whether a value is missing."""
    if isinstance(inputs, np.ndarray):
        return bool(np.isnan(inputs).any())
    return any(column.null_count() or (column.dtype.is_float() and column.is_nan().any()) for column in inputs)


def _repeats(weights: Array, seed: int) -> Rows:
    """How often each sample is trained on, ``(samples,)``: exactly by whole-number weights, on average by others.

    Examples
    --------
    >>> _repeats(np.array([1.0, 3.0]), 0).tolist(), _repeats(np.array([0.5, 4.5]), 0).tolist()
    ([1, 3], [1, 9])
    """
    whole = bool((weights == np.round(weights)).all())
    unit = np.gcd.reduce(weights.astype(np.int64)) if whole else weights.min()
    wanted = weights / unit
    wanted *= min(1.0, MOST_REPEATS * len(weights) / wanted.sum())
    # Fractions are rounded so that sums over the samples, in a random order, are right too.
    rng = np.random.default_rng(seed)
    order = rng.permutation(len(weights))
    edges = np.floor(np.cumsum(wanted[order]) + (0.0 if whole else rng.random()) + 1e-9).astype(np.int64)
    repeats = np.empty(len(weights), np.int64)
    repeats[order] = np.maximum(np.diff(edges, prepend=0), 1)
    return repeats


def _column(values: Any, inputs: Any) -> Array:
    """Values with one row for each sample, ``(samples,)``."""
    check_consistent_length(inputs, values)
    return np.asarray(values)


def _numbers(times: Any, inputs: Any) -> Array | None:
    """Times as numbers ``(samples,)``, where there are any."""
    return None if times is None else clock_of(_column(times, inputs))


def _writable(inputs: Array) -> Array:
    """The array itself, or a copy where torch could not share its memory."""
    return np.require(inputs, requirements=["C", "W"])


# Who is held back


def _hold_back(data: DomainDataset, share: Any, seed: int) -> tuple[Rows, Rows | None]:
    """Rows of the training and of the validation patients, or all and ``None`` where there are too few patients."""
    if isinstance(share, bool) or not isinstance(share, int | float) or not 0 <= share < 1:
        raise ConfigError(f"validation_share is {share!r}; it must be from 0 to less than 1")
    if share == 0 or data.n_patients < FEWEST_PATIENTS_TO_HOLD_BACK:
        return np.arange(len(data)), None
    split = split_patients(data, (1 - share, share, 0.0), seed)
    if not _can_choose(data, data.select(split.train), data.select(split.val)):
        return np.arange(len(data)), None
    return split.train, split.val


def _can_choose(data: DomainDataset, train: DomainDataset, val: DomainDataset) -> bool:
    """Whether the training patients have every class, and the validation patients enough to choose an epoch by."""
    if data.target.kind == "regression":
        return all(len(np.unique(side.targets.numpy())) > 1 for side in (train, val))
    if data.target.kind == "multilabel":
        positive = train.targets.sum(dim=0)
        return bool(((positive > 0) & (positive < len(train))).all()) and bool((val.targets > 0).any())
    classes = [len(np.unique(side.targets.numpy())) for side in (train, val)]
    return classes[0] == data.target.size and classes[1] > 1


# Runs as estimators


def _input_column(schema: InputSchema) -> str:
    """The one input column of a schema, its patients' context aside."""
    return next(iter(schema.without_context().columns))


def _estimator_of(run: Run, folder: Path) -> JsonObject:
    """What :meth:`PatientEstimator.save` would have written beside a run of ``manydg train``."""
    columns, spec, config = run.schema.without_context().columns, run.algorithm.target.spec, run.config
    dense = [column for column in columns.values() if column.nesting == 0 and column.dtype == "float32"]
    mixed = CATEGORIES in columns and set(columns) <= {"x", CATEGORIES}
    if not mixed and (len(columns) != 1 or not dense):
        raise ConfigError(
            f"{folder} was trained on {', '.join(columns)}: an estimator takes samples that are one array of numbers; "
            "open it with manydg.open_run"
        )
    train_share, val_share, _ = config.ratios
    parameters: JsonObject = {
        **{name: getattr(config, name) for name in (*_PARAMETERS, "backbone", "batch_size")},
        **{name: dict(getattr(config, name)) for name in _TABLES},
        "validation_share": val_share / (train_share + val_share),
        "random_state": config.seed,
    }
    labels: Array = np.arange(spec.size) if spec.kind == "multilabel" else np.array(spec.names)
    classes: JsonObject = {"classes": {"type": labels.dtype.str, "labels": labels.tolist()}}
    settings = run.info.get("settings") or {}
    names = settings.get("features") if isinstance(settings, Mapping) else None
    count = 0 if mixed else (*dense[0].shape, 1)[0]
    if mixed:
        read = FrameEncoding.of(run.schema.settings).columns()
        names, count = list(read), len(read)
    return {
        "parameters": parameters,
        **({} if spec.kind == "regression" else classes),
        "features": {"count": count, "names": names},
    }


def _plain(value: Any) -> Any:
    """A parameter with NumPy's numbers, of which searches make grids, as Python's; also within mappings.

    Examples
    --------
    >>> _plain(np.int64(3)), _plain({"weight": np.float32(0.5)})
    (3, {'weight': 0.5})
    """
    if isinstance(value, Mapping):
        return {key: _plain(each) for key, each in value.items()}
    return value.item() if isinstance(value, np.generic) else value


@contextlib.contextmanager
def _as_value_errors() -> Iterator[None]:
    """Errors about data or settings as scikit-learn's users expect them."""
    try:
        yield
    except (DataError, ConfigError) as error:
        raise EstimatorError(str(error)) from error


@contextlib.contextmanager
def _threads(count: Any) -> Iterator[None]:
    """So many CPU threads for torch and for OpenMP in the block; ``None`` changes nothing, -1 is all."""
    if count is None:
        yield
        return
    if isinstance(count, bool) or not isinstance(count, numbers.Integral) or count == 0:
        raise ConfigError(f"n_jobs is {count!r}; it is a number of threads, -1 for all, or None")
    every = os.cpu_count() or 1
    wanted, before = max(1, every + 1 + int(count)) if count < 0 else int(count), torch.get_num_threads()
    with threadpool_limits(limits=wanted):
        torch.set_num_threads(wanted)
        try:
            yield
        finally:
            torch.set_num_threads(before)


# Cross-validation by patient


class PatientSplit(BaseCrossValidator):  # type: ignore[misc]
    """Cross-validation in which no patient is on both sides, for scikit-learn's searches and scores.

    Without times, the patients are dealt into folds by a hash of the seed and their id, so that the same seed gives the
    same folds whatever the order of rows, and each fold has its share of the patients of every label. With times on one
    clock for all patients (a date of admission), the folds go forward in time: patients are ordered by their first
    sample, each fold tests on the patients that came next, and trains on earlier patients' samples from before that.

    Parameters
    ----------
    n_splits : int
    stratify : bool
        Spread the patients of each label over the folds: of two classes, whether any sample is of the second; of more,
        the most frequent; of numbers, the quarter that the patient's mean is in. With times it has no effect.
    random_state : int
        The seed.

    Examples
    --------
    >>> patients, y = np.repeat(np.arange(6), 2), np.repeat([0, 0, 0, 1, 1, 1], 2)
    >>> for train, test in PatientSplit(3).split(y, y, patients):
    ...     print(len(train), sorted(y[test].tolist()))
    8 [0, 0, 1, 1]
    8 [0, 0, 1, 1]
    8 [0, 0, 1, 1]
    >>> for train, test in PatientSplit(2).split(y, y, patients, times=np.arange(12)):
    ...     print(train.tolist(), test.tolist())
    [0, 1, 2, 3] [4, 5, 6, 7]
    [0, 1, 2, 3, 4, 5, 6, 7] [8, 9, 10, 11]
    """

    # Folds are of patients: the groups are always asked for, times where set_split_request(times=True) says so.
    __metadata_request__split = {"groups": True}  # noqa: RUF012 - as scikit-learn's own splitters have it

    def __init__(self, n_splits: int = 5, *, stratify: bool = True, random_state: int = 0) -> None:
        self.n_splits = n_splits
        self.stratify = stratify
        self.random_state = random_state

    def get_n_splits(self, X: Any = None, y: Any = None, groups: Any = None) -> int:
        """Number of folds."""
        return self.n_splits

    def split(self, X: Any, y: Any = None, groups: Any = None, times: Any = None) -> Iterator[tuple[Rows, Rows]]:
        """Rows of training and test samples, fold by fold.

        Parameters
        ----------
        X : array ``(samples, ...)``
            Only its length counts.
        y : array ``(samples,)``, optional
            Labels to stratify by.
        groups : array ``(samples,)``
            The patient of each sample.
        times : array ``(samples,)``, optional
            When each sample was taken, on one clock for all patients: numbers or dates.
        """
        if groups is None:
            raise EstimatorError(
                "PatientSplit needs the patients: give groups, or params={'groups': patients} with metadata routing"
            )
        check_consistent_length(X, groups, *(values for values in (y, times) if values is not None))
        codes, names = encode_patients(np.asarray(groups))
        needed = self.n_splits + (times is not None)
        if self.n_splits < 2 or len(names) < needed:
            raise EstimatorError(f"{self.n_splits} folds need 2 or more, and {needed} patients; there are {len(names)}")
        who = codes.numpy()
        if times is not None:
            yield from self._forward(who, np.asarray(times))
            return
        labels = _patient_classes(np.asarray(y), who) if self.stratify and y is not None else None
        fold = np.empty(len(names), np.int64)
        fold[rank_patients(names, self.random_state, labels)] = np.arange(len(names)) % self.n_splits
        for number in range(self.n_splits):
            tested = fold[who] == number
            yield np.flatnonzero(~tested), np.flatnonzero(tested)

    def _forward(self, who: Rows, times: Array) -> Iterator[tuple[Rows, Rows]]:
        """Train on what came before, test on the patients that came next."""
        if np.isnat(times).any() if times.dtype.kind == "M" else not np.isfinite(np.asarray(times, np.float64)).all():
            raise EstimatorError("some times are missing: PatientSplit orders the patients by them")
        order = np.lexsort((times, who))
        first = times[order][np.flatnonzero(np.diff(who[order], prepend=-1))]
        ranking = np.argsort(first, kind="stable")
        block = np.empty(len(first), np.int64)
        block[ranking] = np.arange(len(first)) * (self.n_splits + 1) // len(first)
        for number in range(1, self.n_splits + 1):
            tested = block[who] == number
            yield np.flatnonzero((block[who] < number) & (times < times[tested].min())), np.flatnonzero(tested)


def _patient_classes(y: Array, who: Rows) -> Rows | None:
    """A class of each patient to stratify by, ``(patients,)``; ``None`` for label indicators."""
    if y.ndim != 1:
        return None
    if type_of_target(y) == "continuous":
        means = np.bincount(who, y) / np.bincount(who)
        return np.searchsorted(np.quantile(means, [0.25, 0.5, 0.75]), means).astype(np.int64)
    values, codes = np.unique(y, return_inverse=True)
    counts = np.zeros((who.max() + 1, len(values)), np.int64)
    np.add.at(counts, (who, codes), 1)
    return (counts[:, 1] > 0).astype(np.int64) if len(values) == 2 else counts.argmax(axis=1)
