"""Finished runs in an experiment tracker: ``--log mlflow:URI`` (the extra ``mlflow``).

A run is logged once it is complete, from its record alone: settings, metrics by epoch, validation and test metrics. No
file, no patient and no pseudonym is sent. A run that the tracker has already is not logged again.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from manydg.errors import ConfigError, StorageError
from manydg.training.record import RunRecord

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities import Metric, Param

T = TypeVar("T")
_SCHEME = "mlflow:"
_RUN_TAG = "manydg.run"
_METRICS_AT_ONCE, _PARAMETERS_AT_ONCE = 500, 90
_LONGEST_VALUE = 500
_IMPATIENT = {"MLFLOW_HTTP_REQUEST_MAX_RETRIES": "2", "MLFLOW_HTTP_REQUEST_TIMEOUT": "20"}


@dataclass(frozen=True)
class Tracker:
    """An MLflow server or store.

    - ``uri``: As MLflow takes it: ``http://HOST:PORT``, or a database or folder.
    """

    uri: str

    @staticmethod
    def of(text: str) -> Tracker:
        """The tracker that ``--log`` names; it must answer.

        - raises ConfigError: If it is none, its package is not installed, or it does not answer.
        """
        uri = text.removeprefix(_SCHEME)
        if not text.startswith(_SCHEME) or not uri:
            raise ConfigError(f"--log takes mlflow:URI, such as mlflow:http://127.0.0.1:5000, not '{text}'")
        tracker = Tracker(uri)
        tracker._try("cannot be used", lambda client: client.search_experiments(max_results=1))
        return tracker

    def log(self, records: Iterable[RunRecord]) -> int:
        """Log the runs that ended well and are not there yet; how many were."""
        finished = [record for record in records if record.ok]
        remedy = "results are complete; run the same command again to log them"
        return self._try(f"did not take the runs ({remedy})", lambda client: sum(_log(client, run) for run in finished))

    def _try(self, what: str, call: Callable[[MlflowClient], T]) -> T:
        for name, value in _IMPATIENT.items():
            os.environ.setdefault(name, value)
        try:
            from mlflow import MlflowClient
            from mlflow.exceptions import MlflowException
        except ImportError:
            raise ConfigError("--log mlflow:URI needs the package 'mlflow': pip install 'manydg[mlflow]'") from None
        try:
            return call(MlflowClient(tracking_uri=self.uri))
        except (MlflowException, OSError) as error:
            reason = " ".join(str(error).split())[:300]
            raise StorageError(f"the tracker {self.uri} {what}: {reason}") from None


def _log(client: MlflowClient, record: RunRecord) -> int:
    """Log one run; 0 where the tracker has it."""
    name = f"manydg: {record.dataset}"
    there = client.get_experiment_by_name(name)
    experiment = str(there.experiment_id if there is not None else client.create_experiment(name))
    known = client.search_runs([experiment], f"tags.`{_RUN_TAG}` = '{record.run}'", max_results=1)
    if known and known[0].info.status == "FINISHED":
        return 0
    run = known[0] if known else client.create_run(experiment, run_name=f"{record.algorithm}, seed {record.seed}")
    identity = run.info.run_id
    parameters, metrics = list(_parameters(record)), list(_metrics(record))
    for start in range(0, len(parameters), _PARAMETERS_AT_ONCE):
        client.log_batch(identity, params=parameters[start : start + _PARAMETERS_AT_ONCE])
    for start in range(0, len(metrics), _METRICS_AT_ONCE):
        client.log_batch(identity, metrics=metrics[start : start + _METRICS_AT_ONCE])
    for name, value in _tags(record).items():
        client.set_tag(identity, name, value)
    client.set_terminated(identity, "FINISHED")
    return 1


def _tags(record: RunRecord) -> dict[str, str]:
    return {
        _RUN_TAG: record.run,
        "manydg.dataset_hash": record.dataset_hash,
        "manydg.files": record.code_version,
        "manydg.selection_rule": record.selection_rule,
        "manydg.synthetic": str(record.synthetic).lower(),
    }


def _parameters(record: RunRecord) -> Iterator[Param]:
    from mlflow.entities import Param

    for name, value in record.config.to_json().items():
        if isinstance(value, dict):
            yield from (Param(f"{name}.{key}", str(each)[:_LONGEST_VALUE]) for key, each in value.items())
        else:
            yield Param(name, str(value)[:_LONGEST_VALUE])
    for side in ("train", "val", "test"):
        yield Param(f"patients.{side}", str(getattr(record.patients, side)))
        yield Param(f"samples.{side}", str(getattr(record.samples, side)))


def _metrics(record: RunRecord) -> Iterator[Metric]:
    from mlflow.entities import Metric

    now = int(time.time() * 1000)
    for entry in record.history:
        values = {f"val_{name}": value for name, value in entry.val.items()}
        values |= {f"loss_{name}": value for name, value in entry.losses.items()} | {"epoch_seconds": entry.seconds}
        yield from (Metric(name, value, now, entry.epoch) for name, value in values.items() if value is not None)
    # The chosen epoch's are last, so that the tracker shows them as the run's.
    chosen = {f"val_{name}": value for name, value in record.val.items()}
    chosen |= {f"test_{name}": value for name, value in record.test.items()} | {"seconds": record.seconds}
    last = max((entry.epoch for entry in record.history), default=0) + 1
    yield from (Metric(name, value, now, last) for name, value in chosen.items() if value is not None)
