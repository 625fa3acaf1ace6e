"""What the estimator does to arrays before training, and around it."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from sklearn.utils.validation import check_consistent_length

from manydg._estimator_files import EstimatorError
from manydg.data.build import encode_patients
from manydg.data.dataset import DomainDataset, TargetSpec
from manydg.data.splits import split_patients
from manydg.errors import ConfigError, DataError, ManyDGWarning

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
        info={"settings": {"missing": True}} if np.isnan(inputs).any() else {},
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
