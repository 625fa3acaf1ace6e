"""How long planned runs will take: from earlier runs of the same kind, else from a short trial of each algorithm."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from manydg.config import TrainingConfig, pick_device
from manydg.data.dataset import DomainDataset, open_dataset
from manydg.errors import ManyDGError
from manydg.studies.procedures import STEPS, tuning_epochs
from manydg.studies.records import read_runs
from manydg.studies.study import PlannedRun, Study
from manydg.training.fit import fit
from manydg.training.record import RunRecord

_TRIAL_STEPS = 4


@dataclass(frozen=True)
class Plan:
    """Planned runs, which of them are done, and how long the others will take one after the other.

    Attributes
    ----------
    runs : list of PlannedRun
        Different ones only: a run that serves several experiments is here once.
    done : list of bool
    seconds : float or None
        ``None`` where not one run could be tried.
    """

    runs: list[PlannedRun]
    done: list[bool]
    seconds: float | None


def estimate(study: Study) -> Plan:
    """What a study would do, and how long it would take."""
    runs = dict(study.keyed())
    done = {key: study.is_done(key) for key in runs}
    todo = [run for key, run in runs.items() if not done[key]]
    dataset = open_dataset(study.dataset, verify="sizes")
    costs = _Costs(dataset, study.device, read_runs(study.folder))
    known = [costs.of(run) for run in todo]
    total = None if any(seconds is None for seconds in known) else sum(seconds or 0.0 for seconds in known)
    return Plan(list(runs.values()), list(done.values()), total)


class _Costs:
    """Seconds of runs, each algorithm on each backbone looked up or tried once."""

    def __init__(self, dataset: DomainDataset, device: str, records: Sequence[RunRecord]) -> None:
        self.dataset, self.device = dataset, device
        self._per_sample: dict[tuple[str, str], float | None] = {}
        hash_ = dataset.content_hash()
        found: dict[tuple[str, str], list[float]] = {}
        for record in records:
            if record.ok and record.dataset_hash == hash_ and record.experiment != "continual":
                kind = (record.algorithm, record.config.backbone)
                shown = record.samples.train * max(1, record.epochs)
                found.setdefault(kind, []).append((record.seconds or 0.0) / shown)
        for kind, values in found.items():
            self._per_sample[kind] = float(np.mean(values))

    def of(self, run: PlannedRun) -> float | None:
        """Seconds of a run; ``None`` where its algorithm cannot be tried."""
        kind = (run.config.algorithm, run.config.backbone)
        if kind not in self._per_sample:
            self._per_sample[kind] = self._try(run.config)
        each = self._per_sample[kind]
        return None if each is None else each * _samples_shown(run, self.dataset)

    def _try(self, config: TrainingConfig) -> float | None:
        """Seconds per training sample, from an epoch on a few steps' worth of samples."""
        rows = np.random.default_rng(0).permutation(len(self.dataset))[: _TRIAL_STEPS * config.batch_size]
        some = self.dataset.select(np.sort(rows))
        start = time.perf_counter()
        try:
            fit(config.replace(epochs=1), some, None, pick_device(self.device))
        except ManyDGError:
            return None
        return (time.perf_counter() - start) / len(some)


def _samples_shown(run: PlannedRun, dataset: DomainDataset) -> float:
    """Training samples times epochs."""
    train, val, test = run.config.ratios
    share = train / (train + val + test)
    patients = run.variant.get("training patients")
    if isinstance(patients, int | float):
        share = min(share, patients / dataset.n_patients)
    epochs = float(run.config.epochs)
    if run.procedure == "continual":
        # Half of the patients at the start; later each step shows a tenth of the others and a little of the rest.
        epochs = epochs / 2 + STEPS * tuning_epochs(run.config) * 0.15
    return len(dataset) * share * epochs
