"""A fitted estimator as one safetensors file: weights, and everything else as JSON in its header."""

from __future__ import annotations

import copy
import numbers
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import nn

from manydg.data.dataset import TargetSpec
from manydg.data.schema import InputSchema
from manydg.errors import ConfigError, DataError, StorageError
from manydg.targets import target_of
from manydg.training.checkpoint import read_tensors, write_tensors
from manydg.training.config import TrainingConfig, pick_device
from manydg.training.fit import rebuild

if TYPE_CHECKING:
    from manydg.estimator import ManyDGClassifier

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
