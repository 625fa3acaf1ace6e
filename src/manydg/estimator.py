"""The scikit-learn face: arrays in, ``fit`` with the patients as groups, ``predict_proba`` on new patients."""

from __future__ import annotations

import contextlib
import copy
import numbers
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from sklearn.base import BaseEstimator, ClassifierMixin
from sklearn.utils import check_random_state
from sklearn.utils.multiclass import check_classification_targets, type_of_target
from sklearn.utils.validation import check_consistent_length, check_is_fitted, column_or_1d, validate_data
from torch import nn

from manydg.algorithms import Algorithm
from manydg.config import TrainingConfig, pick_device
from manydg.data.build import from_arrays
from manydg.data.dataset import DomainDataset
from manydg.data.encoding import encode_patients
from manydg.data.info import DatasetInfo, TargetSpec
from manydg.data.schema import InputSchema
from manydg.data.splits import split_patients
from manydg.errors import ConfigError, DataError, ManyDGWarning, StorageError
from manydg.targets import target_of
from manydg.training.checkpoint import read_tensors, write_tensors
from manydg.training.fit import fit, rebuild
from manydg.training.inference import predict_probabilities
from manydg.training.patient_context import as_trained, with_context

# A fitted estimator as one safetensors file: weights, and everything else as JSON in its header.


MODEL = "model.safetensors"
_SCHEMA = 1


class EstimatorError(DataError, ConfigError, ValueError):
    """What was given to the estimator is not what it takes; a ``ValueError`` too, as scikit-learn's users expect."""


def save_estimator(model: ManyDGClassifier, folder: Path) -> Path:
    """Write a fitted estimator; the old file, if any, stays until the new one is whole."""
    spec = model.algorithm_.target.spec
    names = getattr(model, "feature_names_in_", None)
    meta = {
        "estimator": _SCHEMA,
        "parameters": _plain_parameters(model),
        "config": model._config_.to_json(),
        "schema": model._schema_.to_json(),
        "target": {"kind": spec.kind, "names": list(spec.names)},
        "n_domains": model.algorithm_.n_domains,
        "classes": {"type": model.classes_.dtype.str, "labels": model.classes_.tolist()},
        "features": {"count": model.n_features_in_, "names": None if names is None else names.tolist()},
        "attributes": {name: getattr(model, name) for name in ("selection_rule_", "epoch_", "history_", "n_patients_")},
    }
    path = folder / MODEL
    try:
        write_tensors(path, model.algorithm_.state_dict(), meta)
    except TypeError as error:
        raise EstimatorError(f"a setting or a class label cannot be written as JSON: {error}") from error
    return path


def load_estimator(folder: Path, backbone: nn.Module | None) -> tuple[dict[str, Any], dict[str, Any]]:
    """The constructor's arguments and the fitted attributes of a saved estimator."""
    path = folder / MODEL
    tensors, meta = read_tensors(path, "name a folder that ManyDGClassifier.save wrote, or save the model again")
    if meta.get("estimator") != _SCHEMA:
        raise StorageError(f"{path} was not written by ManyDGClassifier.save: a run is opened with manydg.open_run")
    parameters = meta["parameters"]
    if parameters["backbone"] is None and backbone is None:
        raise ConfigError(f"{path} was trained with a module of your own: give one like it as backbone=")
    config, schema = TrainingConfig.from_mapping(meta["config"]), InputSchema.from_json(meta["schema"])
    target = target_of(TargetSpec(meta["target"]["kind"], tuple(meta["target"]["names"])))
    algorithm = rebuild(
        config, schema, target, meta["n_domains"], tensors, backbone=copy.deepcopy(backbone), source=path
    )
    fitted = {
        "algorithm_": algorithm.to(pick_device(parameters["device"])),
        "classes_": np.array(meta["classes"]["labels"], dtype=np.dtype(meta["classes"]["type"])),
        "n_features_in_": meta["features"]["count"],
        "_config_": config,
        "_schema_": schema,
        **meta["attributes"],
    }
    if meta["features"]["names"] is not None:
        fitted["feature_names_in_"] = np.array(meta["features"]["names"], dtype=object)
    return {**parameters, "backbone": backbone if backbone is not None else parameters["backbone"]}, fitted


def _plain_parameters(model: ManyDGClassifier) -> dict[str, Any]:
    """The constructor's arguments as JSON values; a module and a generator have none and become null."""
    given: dict[str, Any] = model.get_params(deep=False)
    if not isinstance(given["backbone"], str):
        given["backbone"] = None
    seed = given["random_state"]
    given["random_state"] = int(seed) if isinstance(seed, numbers.Integral) else None
    return given


# What the estimator does to arrays before training, and around it.


Array = npt.NDArray[Any]
Rows = npt.NDArray[np.int64]
FEWEST_PATIENTS_TO_HOLD_BACK = 10


def hold_back(data: DomainDataset, share: Any, seed: int) -> tuple[Rows, Rows | None]:
    """Rows of the training and of the validation patients, or all and ``None`` where nobody can be spared."""
    if isinstance(share, bool) or not isinstance(share, int | float) or not 0 <= share < 1:
        raise ConfigError(f"validation_share is {share!r}; it must be from 0 to less than 1")
    if share == 0 or data.n_patients < FEWEST_PATIENTS_TO_HOLD_BACK:
        return np.arange(len(data)), None
    split = split_patients(data, (1 - share, share, 0.0), seed)
    if not _can_choose(data, data.select(split.train), data.select(split.val)):
        return np.arange(len(data)), None
    return split.train, split.val


def _can_choose(data: DomainDataset, train: DomainDataset, val: DomainDataset) -> bool:
    """Whether the training patients show all that there is to learn, and the validation patients enough to judge it."""
    if data.target.kind == "multilabel":
        positive = train.targets.sum(dim=0)
        return bool(((positive > 0) & (positive < len(train))).all()) and bool((val.targets > 0).any())
    shown = [len(np.unique(side.targets.numpy())) for side in (train, val)]
    return shown[0] == data.target.size and shown[1] > 1


def patients_of(groups: Any, inputs: Array) -> Array:
    """Whose sample each one is; without groups every sample is a patient of its own, with a warning."""
    if groups is not None:
        return column_of(groups, inputs)
    warnings.warn(
        "fit was not told whose samples these are: every sample counts as a patient of its own, so that nothing is "
        "learnt about patients. Give fit the patients as groups",
        ManyDGWarning,
        stacklevel=3,
    )
    return np.arange(len(inputs))


def unlabelled(inputs: Array, target: TargetSpec, groups: Any, times: Any) -> DomainDataset:
    """Samples to predict, ``(samples, features)``; without groups each has a patient of its own."""
    shape = (len(inputs), target.size) if target.kind == "multilabel" else (len(inputs),)
    who, names = encode_patients(np.arange(len(inputs)) if groups is None else column_of(groups, inputs))
    clock = np.zeros(len(inputs)) if times is None and groups is None else numbers_of(times, inputs)
    return DomainDataset(
        columns={"x": torch.from_numpy(writable(inputs))},
        targets=torch.zeros(shape, dtype=torch.int64),
        target=target,
        domains=who,
        patients=names,
        times=None if clock is None else torch.as_tensor(clock, dtype=torch.float64),
        info=DatasetInfo(settings={"missing": True} if np.isnan(inputs).any() else {}),
    )


def column_of(values: Any, inputs: Array) -> Array:
    """Values with one row for each sample, ``(samples,)``."""
    check_consistent_length(inputs, values)
    return np.asarray(values)


def numbers_of(times: Any, inputs: Array) -> Array | None:
    """Times as numbers ``(samples,)``, where there are any."""
    return None if times is None else np.asarray(column_of(times, inputs), dtype=np.float64)


def writable(inputs: Array) -> Array:
    """The array itself, or a copy where torch could not share its memory."""
    return np.require(inputs, requirements=["C", "W"])


def inside(probabilities: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    """The probabilities, none of them exactly 0 or 1."""
    margin = np.finfo(np.float32).eps
    return np.clip(probabilities, margin, 1 - margin)


@contextlib.contextmanager
def as_value_errors() -> Iterator[None]:
    """What is wrong with data or settings, as scikit-learn's users expect it."""
    try:
        yield
    except (DataError, ConfigError) as error:
        raise EstimatorError(str(error)) from error


@contextlib.contextmanager
def own_randomness() -> Iterator[None]:
    """Training seeds torch; whoever called ``fit`` gets its own state back."""
    with torch.random.fork_rng(devices=range(torch.cuda.device_count())):
        yield


class ManyDGClassifier(ClassifierMixin, BaseEstimator):  # type: ignore[misc]
    """A classifier for patients it has never seen, trained on samples of many patients.

    Parameters
    ----------
    algorithm : str
        Name of an algorithm of this package (``manydg``, ``base``, ``dann``, ``boosting``, ...).
    settings : dict, optional
        Settings of the algorithm; what is not given has its default.
    backbone : str or nn.Module
        Name of a backbone, ``package.module:Class``, or a module of your own that maps ``(batch, features)`` to
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
        Share of the patients held back to choose the epoch. Nobody is held back if it is 0, if there are fewer than ten
        patients, or if those held back would not show two classes, or take the last samples of a class away; then the
        last epoch's weights are kept. :attr:`selection_rule_` says which it was.
    selection : str, optional
        Validation metric that chooses the epoch; the target's own if not given.
    context : {"auto", "none", "offline", "causal"}
        Whether each patient's other samples are shown to the learner, all or the earlier ones, none of them with its
        label; ``auto`` is what the algorithm is made for.
    device : str
        ``auto``, ``cpu``, ``cuda`` or ``cuda:N``.
    random_state : int, RandomState instance or None
        Decides who is held back, initial weights, order and dropout.

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
    n_patients_ : int
        Patients seen in ``fit``, those held back included.

    Notes
    -----
    Give the patients to ``fit`` as ``groups``. Without them every sample counts as a patient of its own: ManyDG then
    has no two samples of one patient to compare and trains its supervised and MMD terms only, the samples held back are
    not of other patients, and a warning says so. In cross-validation the patients have to reach both the splitter and
    ``fit``, which takes scikit-learn's metadata routing (see the example).

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
    n_features_in_: int
    algorithm_: Algorithm

    def __init__(
        self,
        algorithm: str = "manydg",
        *,
        settings: Mapping[str, Any] | None = None,
        backbone: str | nn.Module = "auto",
        backbone_options: Mapping[str, Any] | None = None,
        epochs: int = 20,
        batch_size: int | str = "auto",
        lr: float = 1e-3,
        weight_decay: float = 1e-5,
        validation_share: float = 0.1,
        selection: str | None = None,
        context: str = "auto",
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
        self.context = context
        self.device = device
        self.random_state = random_state

    def fit(self, X: Any, y: Any, groups: Any = None, times: Any = None) -> ManyDGClassifier:
        """Train on samples of many patients.

        Parameters
        ----------
        X : array ``(samples, features)``
            NaN is a value that is missing. More dimensions are possible with a backbone of your own.
        y : array ``(samples,)`` of class labels, or ``(samples, K)`` of 0 and 1
        groups : array ``(samples,)``, optional
            Whose sample each one is.
        times : array ``(samples,)``, optional
            When each sample was taken, on its patient's own clock; only patient context makes use of it.

        Returns
        -------
        ManyDGClassifier
            Itself.
        """
        inputs, labels = validate_data(
            self, X, y, dtype=np.float32, multi_output=True, allow_nd=True, ensure_all_finite="allow-nan",
            ensure_min_samples=2,
        )  # fmt: skip
        kind, codes = self._encode(labels)
        who = patients_of(groups, inputs)
        seed = int(check_random_state(self.random_state).randint(2**31 - 1))
        with as_value_errors(), own_randomness():
            names = [str(label) for label in self.classes_.tolist()]
            data = from_arrays(
                writable(inputs), codes, who, kind=kind, names=names, missing=bool(np.isnan(inputs).any()),
                times=numbers_of(times, inputs),
            )  # fmt: skip
            config = self._config(seed)
            chosen, held = hold_back(data, self.validation_share, seed)
            data = with_context(data, config, torch.device("cpu"), training=chosen)
            train, val = (data, None) if held is None else (data.select(chosen), data.select(held))
            config = config.replace(batch_size=self._batch_size(len(train)))
            module = copy.deepcopy(self.backbone) if isinstance(self.backbone, nn.Module) else None
            fitted = fit(config, train, val, pick_device(self.device), backbone=module)
        self.algorithm_ = fitted.algorithm.eval()
        self.history_ = [entry.to_json() for entry in fitted.history]
        self.epoch_, self.selection_rule_ = fitted.epoch, fitted.selection_rule
        self.n_patients_ = data.n_patients
        self._config_, self._schema_ = config, InputSchema.of(data)
        return self

    def predict_proba(self, X: Any, groups: Any = None, times: Any = None) -> npt.NDArray[np.float32]:
        """Probabilities of the classes for samples of any patient, ``(samples, K)``.

        For label indicators each column is the probability of that label, and a row need not sum to one.

        Parameters
        ----------
        X : array ``(samples, features)``
        groups : array ``(samples,)``, optional
            Whose sample each one is: what a model trained with context draws on. Without it, every sample is of a
            patient of whom nothing else is known. Other models make no use of it.
        times : array ``(samples,)``, optional
            When each sample was taken, where the model was trained with times.
        """
        check_is_fitted(self, "algorithm_")
        inputs = validate_data(self, X, dtype=np.float32, allow_nd=True, ensure_all_finite="allow-nan", reset=False)
        target = self.algorithm_.target.spec
        with as_value_errors():
            data = as_trained(unlabelled(inputs, target, groups, times), self._schema_)
            self._schema_.check(InputSchema.of(data))
        probabilities = predict_probabilities(self.algorithm_, data).numpy()
        # In 32 bits a sigmoid rounds to exactly 1 where a label is merely very likely.
        return inside(probabilities) if target.kind == "multilabel" else probabilities

    def predict(self, X: Any, groups: Any = None, times: Any = None) -> Array:
        """The most probable class of each sample ``(samples,)``, or each label from 0.5 upwards ``(samples, K)``.

        ``groups`` and ``times`` are those of :meth:`predict_proba`.
        """
        probabilities = self.predict_proba(X, groups, times)
        if self.algorithm_.target.spec.kind == "multilabel":
            return np.asarray(probabilities >= 0.5, dtype=np.int64)
        chosen: Array = self.classes_[probabilities.argmax(axis=1)]
        return chosen

    def save(self, folder: str | Path) -> Path:
        """Write the fitted model to a folder: one safetensors file with JSON in its header, and no pickle.

        Returns
        -------
        Path
            The file written.
        """
        check_is_fitted(self, "algorithm_")
        return save_estimator(self, Path(folder))

    @classmethod
    def load(cls, folder: str | Path, *, backbone: nn.Module | None = None) -> ManyDGClassifier:
        """Open what :meth:`save` wrote; it predicts the same.

        Parameters
        ----------
        folder : path
        backbone : nn.Module, optional
            Needed where the model was trained with a module of your own: one like it, freshly built; its weights are
            filled in.
        """
        parameters, fitted = load_estimator(Path(folder), backbone)
        model = cls(**parameters)
        for name, value in fitted.items():
            setattr(model, name, value)
        return model

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.classifier_tags.multi_label = True
        tags.input_tags.allow_nan = True
        tags.non_deterministic = False
        return tags

    def _encode(self, y: Array) -> tuple[str, Array]:
        """The kind of target and its codes; sets ``classes_``."""
        check_classification_targets(y)
        if type_of_target(y) == "multilabel-indicator":
            self.classes_ = np.arange(y.shape[1])
            return "multilabel", np.asarray(y, dtype=np.int64)
        self.classes_, codes = np.unique(column_or_1d(y, warn=True), return_inverse=True)
        if len(self.classes_) < 2:
            raise EstimatorError(f"y holds one class only ({self.classes_[0]!r}): there is nothing to learn")
        return "binary" if len(self.classes_) == 2 else "classes", codes

    def _batch_size(self, samples: int) -> int:
        return min(256, max(32, samples // 8)) if self.batch_size == "auto" else self.batch_size  # type: ignore[return-value]

    def _config(self, seed: int) -> TrainingConfig:
        return TrainingConfig(
            algorithm=self.algorithm,
            settings=dict(self.settings or {}),
            backbone=self.backbone if isinstance(self.backbone, str) else "auto",
            backbone_options=dict(self.backbone_options or {}),
            epochs=self.epochs,
            batch_size=self._batch_size(0),
            lr=self.lr,
            weight_decay=self.weight_decay,
            seed=seed,
            selection=self.selection,
            context=self.context,
        )
