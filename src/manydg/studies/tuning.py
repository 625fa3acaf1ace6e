"""Searching settings: the same number of trials for every algorithm on every split, judged by validation patients.

A search is of one algorithm on one split. It sees that split's training and validation patients and never its test
patients, whose rows are dropped before anything is computed; what it chooses is used on the same split alone. The first
trial has the defaults. Optuna draws the others and keeps a journal of each search on disk; ``tuning.json`` is the
record that comparisons and reports read.
"""

from __future__ import annotations

import dataclasses
import math
import time
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import numpy as np

from manydg.algorithms import ALGORITHMS
from manydg.algorithms.best import Best
from manydg.backbones import SEARCHED_OPTIONS
from manydg.config import SEARCHED, Range, Searched, TrainingConfig, pick_device, searched_from_json
from manydg.data.dataset import DomainDataset
from manydg.errors import ConfigError, DataError, ManyDGError, StorageError, in_a_line
from manydg.evaluation.metrics import choose_threshold, score
from manydg.files import (
    Json,
    ParsedJson,
    code_version,
    disk_errors,
    fields_as_json,
    fingerprint,
    make_folder,
    private,
    read_json,
    verify_checksum,
    with_checksum,
    write_json,
)
from manydg.jobs import Job, current_engine
from manydg.studies.records import read_runs
from manydg.studies.settings import Options, spelled_out
from manydg.studies.study import CONTEXTS, open_once
from manydg.targets import oriented, target_of
from manydg.training.fit import Silent, StoppedEarlyError, fit, trust_named
from manydg.training.inference import predict_probabilities, sharing_context, with_context
from manydg.training.record import EpochEntry
from manydg.training.run import draw_split

RECORD, JOURNALS = "tuning.json", "searches"
COMPLETE, PRUNED, FAILED = "complete", "pruned", "failed"
_SCHEMA = 1
_REMEDY = "restore it, or delete the folder and tune again"
_BEFORE_PRUNING = 4
"""Complete trials that a search needs before it stops others."""
_RANDOM = 6
"""Trials that are drawn at random before the results so far decide where to look."""
Value = str | int | float
Values = Mapping[str, Value]
"""Searched values by name, as ``--set`` takes them: ``training.lr``, ``backbone.width``, ``manydg.mmd``."""


# What is searched


def search_space(config: TrainingConfig) -> dict[str, Searched]:
    """What a search of an algorithm draws from, by the names that ``--set`` takes.

    Its own settings; and, where it trains a network in epochs, the options of training and of the backbone that all
    such algorithms share. Each range holds the configuration's own value.

    - ``config``: With every default spelled out.
    """
    cls = ALGORITHMS.get(config.algorithm)
    space = {
        f"{config.algorithm}.{entry.name}": entry.metadata[SEARCHED]
        for entry in dataclasses.fields(cls.Settings)
        if SEARCHED in entry.metadata
    }
    if cls.sampling != "whole":
        shared = (entry for entry in dataclasses.fields(TrainingConfig) if SEARCHED in entry.metadata)
        space |= {f"training.{entry.name}": entry.metadata[SEARCHED] for entry in shared}
        space |= {f"backbone.{key}": drawn for key, drawn in SEARCHED_OPTIONS.items() if key in config.backbone_options}
    defaults = values_of(config, space)
    return {name: drawn.including(cast("float", defaults[name])) for name, drawn in space.items()}


def values_of(config: TrainingConfig, names: Iterable[str]) -> dict[str, Value]:
    """A configuration's values under searched names."""
    values = {}
    for name in names:
        part, _, key = name.rpartition(".")
        table = {"training": vars(config), "backbone": config.backbone_options}.get(part, config.settings)
        values[name] = cast("Value", table[key])
    return values


def applied(config: TrainingConfig, values: Values) -> TrainingConfig:
    """A configuration with searched values."""
    parts: dict[str, dict[str, Value]] = {"training": {}, "backbone": {}, "algorithm": {}}
    for name, value in values.items():
        part, _, key = name.rpartition(".")
        parts[part if part in parts else "algorithm"][key] = value
    return config.replace(
        settings={**config.settings, **parts["algorithm"]},
        backbone_options={**config.backbone_options, **parts["backbone"]},
        **parts["training"],
    )


# The record


@dataclass(frozen=True)
class Trial:
    """One setting that was tried.

    - ``number``: From 0, which has the defaults.
    - ``state`` {"complete", "pruned", "failed"}
    - ``score``: The best validation metric of its epochs; of a pruned trial, up to where it was stopped.
    - ``epochs``: How many it trained; 0 where there are none.
    - ``error``: Why it failed.
    """

    number: int
    values: Values
    state: str
    score: float | None = None
    epochs: int = 0
    seconds: float = 0.0
    error: str | None = None

    @staticmethod
    def from_json(value: ParsedJson) -> Trial:
        trial = Trial(**value)
        numbers = (trial.number, trial.epochs, trial.seconds, 0.0 if trial.score is None else trial.score)
        if trial.state not in (COMPLETE, PRUNED, FAILED) or not all(map(math.isfinite, numbers)):
            raise ValueError(f"trial {trial.number} has the state {trial.state!r}")
        return dataclasses.replace(trial, values=dict(trial.values))


@dataclass(frozen=True)
class Search:
    """The trials of one algorithm on one split.

    - ``seed``: Of the split.
    - ``base``: What the trials share, every default spelled out; trial 0 is this.
    - ``space``: What the values are drawn from.
    - ``test_patients``: A hash of the split's test patients, who were not used.
    - ``trials``: In the order of their numbers.
    """

    algorithm: str
    seed: int
    base: TrainingConfig
    space: Mapping[str, Searched]
    test_patients: str
    trials: tuple[Trial, ...] = ()

    @property
    def name(self) -> str:
        """The search in a few words."""
        return f"{self.algorithm} split {self.seed}"

    @property
    def chosen(self) -> Trial | None:
        """The complete trial with the highest score, the earlier of equals; None where there is none."""
        done = [trial for trial in self.trials if trial.state == COMPLETE and trial.score is not None]
        return max(done, key=lambda trial: (trial.score or 0.0, -trial.number), default=None)

    def count(self, state: str) -> int:
        """How many trials ended in a state."""
        return sum(trial.state == state for trial in self.trials)

    def best_so_far(self) -> list[float]:
        """The highest score of the complete trials up to each; NaN before the first."""
        best, curve = math.nan, []
        for trial in self.trials:
            if trial.state == COMPLETE and trial.score is not None and not trial.score <= best:
                best = trial.score
            curve.append(best)
        return curve

    @staticmethod
    def from_json(value: ParsedJson) -> Search:
        return Search(
            algorithm=str(value["algorithm"]),
            seed=int(value["seed"]),
            base=TrainingConfig.from_mapping(value["base"]),
            space={name: searched_from_json(drawn) for name, drawn in value["space"].items()},
            test_patients=str(value["test_patients"]),
            trials=tuple(Trial.from_json(trial) for trial in value["trials"]),
        )


@dataclass(frozen=True)
class Tuning:
    """What was searched on a dataset.

    - ``dataset``, ``dataset_hash``: Name and content.
    - ``trials``: The budget: trials of each search.
    - ``command``: How to make it again; the last where there were several.
    """

    dataset: str
    dataset_hash: str
    code_version: str
    trials: int
    searches: tuple[Search, ...] = ()
    command: str = ""

    def search(self, algorithm: str, seed: int) -> Search | None:
        """The search of an algorithm on the split of a seed."""
        wanted = (algorithm, seed)
        return next((search for search in self.searches if (search.algorithm, search.seed) == wanted), None)

    def finished(self, search: Search) -> bool:
        """Whether all trials of a search have ended."""
        return len(search.trials) >= self.trials

    def budget(self, algorithms: Collection[str]) -> str:
        """How much was searched for some algorithms, as a sentence."""
        searches = [search for search in self.searches if search.algorithm in algorithms]
        done = sum(len(search.trials) for search in searches)
        pruned, failed = (sum(search.count(state) for search in searches) for state in (PRUNED, FAILED))
        each = "one trial, the defaults," if self.trials == 1 else f"{self.trials} trials, the first with the defaults,"
        return (
            f"Settings: {each} for each algorithm and split, chosen by the validation patients of that split "
            f"({done:,} trials in all, {pruned:,} stopped early, {failed:,} failed)."
        )

    def to_json(self) -> dict[str, Json]:
        return {"schema": _SCHEMA, **fields_as_json(self)}

    def write(self, path: Path) -> None:
        """Replace a file by the record, with its checksum."""
        write_json(path, with_checksum(self.to_json()), allow_nan=False)

    @staticmethod
    def read(path: Path) -> Tuning:
        """The record in a file; raises StorageError where there is none, or one that was changed."""
        missing = f"{path} is missing: name a folder that 'manydg tune' wrote"
        content = read_json(path, remedy=_REMEDY, missing=missing)
        verify_checksum(content, path, _REMEDY)
        try:
            if content["schema"] != _SCHEMA:
                raise ValueError(f"schema version {content['schema']}, this program reads {_SCHEMA}")
            return Tuning(
                dataset=str(content["dataset"]),
                dataset_hash=str(content["dataset_hash"]),
                code_version=str(content["code_version"]),
                trials=int(content["trials"]),
                searches=tuple(Search.from_json(search) for search in content["searches"]),
                command=str(content["command"]),
            )
        except (KeyError, TypeError, ValueError, AttributeError, ManyDGError) as error:
            raise StorageError(f"{path} is damaged ({error}): {_REMEDY}") from error


# Using what was chosen


def with_tuned(
    options: Options, folder: str | Path, data: DomainDataset, algorithms: Sequence[str], seeds: Sequence[int]
) -> Options:
    """Options under which every algorithm runs on every split with what was chosen for it on that split.

    - raises ConfigError: If the search was of another dataset, by another version of the program or under other
      options, if an algorithm or a split was not searched to its end, or if a test patient of a split was used in its
      search.
    """
    path = Path(folder) / RECORD
    tuning = Tuning.read(path)
    _check_same(tuning, data, path)
    tuned = {}
    for algorithm in algorithms:
        for seed in seeds:
            config = spelled_out(options.of(algorithm, seed), data)
            tuned[algorithm, seed] = _chosen(tuning, config, data, path)
    return dataclasses.replace(options, tuned=tuned)


def _chosen(tuning: Tuning, config: TrainingConfig, data: DomainDataset, path: Path) -> TrainingConfig:
    search = tuning.search(config.algorithm, config.seed)
    again = f"run 'manydg tune' on it with --out {path.parent}"
    if search is None:
        raise ConfigError(f"{path}: {config.algorithm} was not tuned on split {config.seed}: {again}")
    if not tuning.finished(search):
        done = f"{len(search.trials)} of {tuning.trials} trials"
        raise ConfigError(f"{path}: the search of {search.name} has only {done}: run 'manydg tune' to its end")
    _check_base(search.base, config, path)
    if search.test_patients != _test_patients(data, config):
        raise ConfigError(f"{path}: the search of {search.name} had other test patients: {again}")
    if search.chosen is None:
        raise ConfigError(f"{path}: no trial of {search.name} was complete: leave out {config.algorithm}")
    if search.space != search_space(config) or set(search.chosen.values) != set(search.space):
        raise ConfigError(f"{path}: the search of {search.name} was over other settings or ranges: {again}")
    return applied(config, search.chosen.values)


def _check_same(tuning: Tuning, data: DomainDataset, path: Path) -> None:
    """Raise if a search was of other data or by another version of the program."""
    if tuning.dataset_hash != data.content_hash():
        raise ConfigError(
            f"{path} is of another dataset ('{tuning.dataset}', content {tuning.dataset_hash}; this one is "
            f"{data.content_hash()}): name another folder"
        )
    if tuning.code_version != code_version():
        raise ConfigError(
            f"{path} was made by another version of the program ({tuning.code_version}, this is {code_version()}): "
            "tune again in another folder"
        )


def _check_base(before: TrainingConfig, now: TrainingConfig, path: Path) -> None:
    """Raise if a search was under other options than those asked for."""
    old, new = before.to_json(), now.to_json()
    for name, value in old.items():
        if value != new[name]:
            raise ConfigError(
                f"{path}: {now.algorithm} was tuned with {name} {_shown(value, new[name])}, and is asked for with "
                f"{_shown(new[name], value)}: give the same options, or tune in another folder"
            )


def _shown(value: Json, other: Json) -> str:
    """A value; of a mapping only what differs."""
    if isinstance(value, Mapping) and isinstance(other, Mapping):
        return str({key: entry for key, entry in value.items() if other.get(key) != entry})
    return str(value)


def _test_patients(data: DomainDataset, config: TrainingConfig) -> str:
    """A hash of the test patients of a configuration's split."""
    names = set(draw_split(data, config).patients("test").tolist())
    pseudonyms = zip(data.patients.tolist(), data.pseudonyms(), strict=True)
    return fingerprint(sorted(alias for name, alias in pseudonyms if name in names))


# In a results folder


def kept_tuning(results: str | Path, dataset: str) -> Tuning | None:
    """The searches whose choices the comparison on a dataset in a results folder uses; None where it has none."""
    file = _kept_file(Path(results), dataset)
    return Tuning.read(file) if file.exists() else None


def keep_tuning(results: Path, dataset: str, tuned: Path | None) -> None:
    """Copy the record of the searches into the results folder of a comparison.

    - raises ConfigError: If the folder has a comparison with other settings: the table would mix them.
    """
    kept = kept_tuning(results, dataset)
    if tuned is None:
        if kept is not None:
            raise ConfigError(f"{results} compares tuned settings on {dataset}: add --tuned, or name another folder")
        return
    tuning = Tuning.read(tuned / RECORD)
    known = kept.searches if kept is not None else ()
    if any(tuning.search(search.algorithm, search.seed) != search for search in known):
        raise ConfigError(f"{results} compares settings of another search on {dataset}: name another folder")
    uses = (use for record in read_runs(results) if record.dataset == dataset for use in record.uses)
    if kept is None and any(use.experiment == "compare" for use in uses):
        raise ConfigError(f"{results} compares settings that were not tuned on {dataset}: name another folder")
    tuning.write(_kept_file(results, dataset))


def _kept_file(results: Path, dataset: str) -> Path:
    return results / "tuning" / f"{dataset}.json"


# Trials


@dataclass(frozen=True)
class TrialJob:
    """What a process needs to know to do one trial.

    - ``search``: Which search it belongs to, by its position.
    - ``number``: Of the trial.
    - ``journal``: Of the search.
    """

    search: int
    number: int
    config: TrainingConfig
    dataset: Path
    journal: Path
    device: str


@dataclass(frozen=True)
class TrialResult:
    """How a trial ended; ``hopeless`` if no other trial can do better, because the data or the options are at fault."""

    state: str
    score: float | None = None
    epochs: int = 0
    seconds: float = 0.0
    error: str | None = None
    hopeless: bool = False


def do_trial(job: TrialJob) -> TrialResult:
    """Train with one setting and score the validation patients; a failure becomes a result too."""
    start = time.perf_counter()
    # A process of its own does not know yet which classes outside the package the user has named.
    trust_named(job.config)
    pruning = _Pruning(job)
    try:
        value = validation_score(open_once(job.dataset, verify="sizes"), job.config, job.device, pruning)
        result = TrialResult(COMPLETE, value)
    except StoppedEarlyError:
        result = TrialResult(PRUNED, pruning.best)
    except Exception as error:  # noqa: BLE001 - a trial that fails must not stop the others, whatever the reason
        reason = str(error) if isinstance(error, ManyDGError) else in_a_line(error)
        result = TrialResult(FAILED, error=reason, hopeless=isinstance(error, ConfigError | DataError))
    return dataclasses.replace(result, epochs=pruning.epochs, seconds=time.perf_counter() - start)


def validation_score(dataset: DomainDataset, config: TrainingConfig, device: str, reporter: Silent) -> float:
    """Train on a split's training patients and give the metric of its validation patients.

    The rows of the test patients are dropped first.
    """
    split, chosen_device = draw_split(dataset, config), pick_device(device)
    rows = np.sort(np.concatenate([split.train, split.val]))
    seen = dataset.select(rows)
    train, val = np.searchsorted(rows, split.train), np.searchsorted(rows, split.val)
    target = target_of(seen.target)
    target.check(seen.targets)
    train, val = seen.learnable(train), seen.learnable(val)
    metric = config.selection or target.selection
    if oriented(metric, 1.0) < 0:
        raise ConfigError(f"a search looks for the highest value, and of {metric} the lowest is best: select by r2")
    with sharing_context(CONTEXTS):
        data = with_context(seen, config, chosen_device, None, train)
    sides = {"train": data.select(train), "val": data.select(val)}
    fitted = fit(config, sides["train"], sides["val"], chosen_device, reporter=reporter)
    if fitted.epoch and fitted.out_of_fold is None:
        value = fitted.history[fitted.epoch - 1].val[metric]
    else:
        truth = target.truth(sides["val"].targets).cpu().numpy()
        probabilities = fitted.out_of_fold
        if probabilities is None:
            probabilities = predict_probabilities(fitted.algorithm, sides["val"]).numpy()
        value = score(target, truth, probabilities, choose_threshold(target, truth, probabilities)[0])[metric]
    if value is None or not math.isfinite(value):
        raise DataError(f"the validation {metric} is undefined on split {config.seed}: take more validation patients")
    return float(value)


class _Pruning(Silent):
    """Notes every epoch in a search's journal and stops a trial that does worse than half of those before it.

    Rounds of boosting are no epochs: what a few of them reach says little where each learns at a rate of its own. Those
    of ``best`` are of one learner after the other, whose values at the same number do not compare.
    """

    def __init__(self, job: TrialJob) -> None:
        self.job, self.best, self.epochs = job, -math.inf, 0
        self.metric = job.config.selection or ""
        algorithm = ALGORITHMS.get(job.config.algorithm)
        self.in_epochs = algorithm.sampling != "whole" and not issubclass(algorithm, Best)

    def epoch_ended(self, entry: EpochEntry) -> None:
        value = entry.val.get(self.metric)
        if not self.in_epochs or value is None:
            return
        self.epochs = entry.epoch
        self.best = max(self.best, value)
        study = _open_journal(self.job.journal, self.job.config.epochs)
        storage, trial = study._storage, study.trials[self.job.number]
        storage.set_trial_intermediate_value(trial._trial_id, entry.epoch, value)
        if entry.epoch < self.job.config.epochs and study.pruner.prune(study, storage.get_trial(trial._trial_id)):
            raise StoppedEarlyError(f"stopped after epoch {entry.epoch}")


# Searches


Ended = Callable[[Search, Trial], None]
"""Called with a search and its trial that ended."""


def tune(
    dataset: str | Path,
    algorithms: Sequence[str],
    out: str | Path,
    *,
    trials: int,
    seeds: int,
    options: Options,
    workers: int = 1,
    device: str = "auto",
    command: str = "",
    planned: Callable[[int, int], None] | None = None,
    ended: Ended | None = None,
) -> Tuning:
    """Search the settings of every algorithm on every split, each with the same number of trials.

    Parameters
    ----------
    dataset, out : path
        Dataset folder, and the folder of the searches: trials that are there already are not repeated.
    algorithms : sequence of str
    trials : int
        Of each algorithm on each split, the defaults included.
    seeds : int
        Number of patient splits, from seed 0.
    options : Options
        What is not searched, and the defaults.
    workers, device
        Of the trials.
    command : str
        How to make it again, for the report.
    planned : callable, optional
        Called with the number of trials there are to be, and of those that are done already.
    ended : callable, optional
    """
    _import_optuna()
    folder, data = Path(out), open_once(dataset)
    _check_request(algorithms, trials)
    searches = [_plan(options.of(name, seed), data) for seed in range(seeds) for name in algorithms]
    tuning = Tuning(Path(dataset).resolve().name, data.content_hash(), code_version(), trials, tuple(searches), command)
    record = _Record(folder, _joined(folder / RECORD, tuning, data))
    with disk_errors(folder):
        make_folder(folder / JOURNALS)
    opened = [_OpenSearch(search, folder / JOURNALS, position) for position, search in enumerate(searches)]
    for search in opened:
        search.refuse_fewer(trials)
    record.write(opened)
    if planned is not None:
        planned(len(opened) * trials, sum(len(search.search.trials) for search in opened))
    jobs = _jobs(opened, trials, Path(dataset).absolute(), device)
    try:
        for job, result in current_engine().run(do_trial, jobs, workers, device=device):
            search = opened[job.argument.search]
            trial = search.end(job.argument.number, result)
            if ended is not None:
                ended(search.search, trial)
            if len(search.search.trials) == trials:
                record.write(opened)
    finally:
        record.write(opened)
    return record.tuning


def _check_request(algorithms: Sequence[str], trials: int) -> None:
    if not algorithms:
        raise ConfigError("name the algorithms to tune, as in --algorithms base,manydg")
    if trials < 1:
        raise ConfigError(f"{trials} trials leave nothing to choose from: at least 1, which has the defaults")
    for name in algorithms:
        ALGORITHMS.trust(name)
        ALGORITHMS.get(name)


def _plan(config: TrainingConfig, data: DomainDataset) -> Search:
    trust_named(config)
    base = spelled_out(config, data)
    return Search(base.algorithm, base.seed, base, search_space(base), _test_patients(data, base))


def _joined(path: Path, asked: Tuning, data: DomainDataset) -> Tuning:
    """What was searched in a folder before, and what is to be searched now."""
    if not path.exists():
        return asked
    before = Tuning.read(path)
    _check_same(before, data, path)
    for search in asked.searches:
        known = before.search(search.algorithm, search.seed)
        if known is not None:
            _check_base(known.base, search.base, path)
    new = {(search.algorithm, search.seed) for search in asked.searches}
    others = [search for search in before.searches if (search.algorithm, search.seed) not in new]
    if others and before.trials != asked.trials:
        raise ConfigError(
            f"{path} has searches of {before.trials} trials ({others[0].name}): every algorithm gets the same number, "
            f"so give --trials {before.trials}, or name all algorithms and splits"
        )
    return dataclasses.replace(asked, searches=(*others, *asked.searches))


class _Record:
    """Keeps ``tuning.json`` up to date."""

    def __init__(self, folder: Path, tuning: Tuning) -> None:
        self.file, self.tuning = folder / RECORD, tuning

    def write(self, opened: Sequence[_OpenSearch]) -> None:
        now = {(each.search.algorithm, each.search.seed): each.search for each in opened}
        searches = tuple(now.get((search.algorithm, search.seed), search) for search in self.tuning.searches)
        self.tuning = dataclasses.replace(self.tuning, searches=searches)
        self.tuning.write(self.file)


def _jobs(opened: Sequence[_OpenSearch], trials: int, dataset: Path, device: str) -> Iterator[Job[TrialJob]]:
    """The next trial of the search that has fewest under way, and of these the one that is least far."""
    while waiting := [search for search in opened if search.has_next(trials)]:
        search = min(waiting, key=lambda each: (each.running, each.started))
        number, config = search.start()
        job = TrialJob(search.position, number, config, dataset, search.journal, device)
        yield Job(f"{search.search.name} trial {number}", (dataset, search.journal), job)


@dataclass
class _OpenSearch:
    """A search with its journal.

    A trial that was under way when its process was killed is done again, with the same values and number.
    """

    search: Search
    folder: Path
    position: int
    running: int = 0
    waiting: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        name = fingerprint(code_version(), self.search.base.to_json(), self.search.test_patients)
        self.journal = (self.folder / f"{name}.journal").absolute()
        self.study = _open_journal(self.journal, self.search.base.epochs, mend=True)
        space = self.search.space
        self.distributions = {name: _distribution(drawn) for name, drawn in space.items()}
        self.waiting = [trial.number for trial in self.study.trials if trial.state.name == "RUNNING"]
        self._update()

    @property
    def started(self) -> int:
        """Trials that have ended or are under way."""
        return len(self.search.trials) + self.running

    def has_next(self, trials: int) -> bool:
        return bool(self.waiting) or self.started < trials

    def refuse_fewer(self, trials: int) -> None:
        done = len(self.search.trials) + len(self.waiting)
        if done > trials:
            raise ConfigError(
                f"{self.search.name} has {done} trials in {self.folder.parent} already: give --trials {done} or more, "
                "or another folder"
            )

    def start(self) -> tuple[int, TrainingConfig]:
        """The number and the configuration of the next trial."""
        if not self.waiting:
            self._add()
        number = self.waiting.pop(0)
        self.running += 1
        return number, applied(self.search.base, self.study.trials[number].params)

    def _add(self) -> None:
        """Note a new trial in the journal with all of its values at once, so that a kill never leaves half of one."""
        optuna, before = _import_optuna(), self.study.trials
        values = self._drawn(before) if before else values_of(self.search.base, self.search.space)
        state = optuna.trial.TrialState.RUNNING
        self.study.add_trial(optuna.trial.create_trial(state=state, params=values, distributions=self.distributions))
        self.waiting.append(len(before))

    def _drawn(self, before: Sequence[Any]) -> dict[str, Value]:
        """Values for the next trial."""
        # A sampler of its own for every trial, so that a search goes on after a kill as if nothing had happened.
        seed = int(fingerprint(self.search.algorithm, self.search.seed, len(before))[:8], 16)
        optuna = _import_optuna()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            sampler = optuna.samplers.TPESampler(seed=seed, n_startup_trials=_RANDOM, constant_liar=True)
        copy = optuna.create_study(direction="maximize", sampler=sampler)
        copy.add_trials(before)
        drawn: dict[str, Value] = copy.ask(self.distributions).params
        return drawn

    def end(self, number: int, result: TrialResult) -> Trial:
        """Note a trial's result; the defaults must not fail for a reason that every trial would."""
        if number == 0 and result.hopeless:
            raise ConfigError(f"{self.search.name}: {result.error}")
        self.running -= 1
        trial = self.study.trials[number]
        for name in ("score", "epochs", "seconds", "error"):
            self.study._storage.set_trial_user_attr(trial._trial_id, name, getattr(result, name))
        states = _import_optuna().trial.TrialState
        state = {COMPLETE: states.COMPLETE, PRUNED: states.PRUNED, FAILED: states.FAIL}[result.state]
        self.study.tell(number, result.score if result.state == COMPLETE else None, state=state)
        self._update()
        return next(each for each in self.search.trials if each.number == number)

    def _update(self) -> None:
        names = {"COMPLETE": COMPLETE, "PRUNED": PRUNED, "FAIL": FAILED}
        ended = tuple(
            Trial(trial.number, trial.params, names[trial.state.name], **trial.user_attrs)
            for trial in self.study.trials
            if trial.state.name in names
        )
        self.search = dataclasses.replace(self.search, trials=ended)


def _distribution(drawn: Searched) -> Any:
    distributions = _import_optuna().distributions
    if not isinstance(drawn, Range):
        return distributions.CategoricalDistribution(drawn.options)
    if drawn.whole:
        return distributions.IntDistribution(int(drawn.low), int(drawn.high), log=drawn.log)
    return distributions.FloatDistribution(drawn.low, drawn.high, log=drawn.log)


def _open_journal(file: Path, epochs: int, *, mend: bool = False) -> Any:
    """The study of a search, as its journal tells it."""
    optuna = _import_optuna()
    if mend:
        _mend(file)
    try:
        lock = optuna.storages.journal.JournalFileOpenLock(str(file))
        storage = optuna.storages.JournalStorage(optuna.storages.journal.JournalFileBackend(str(file), lock))
        pruner = optuna.pruners.MedianPruner(_BEFORE_PRUNING, n_warmup_steps=max(2, epochs // 4))
        return optuna.create_study(
            storage=storage, study_name="search", direction="maximize", pruner=pruner, load_if_exists=True
        )
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise StorageError(
            f"{file} is damaged ({in_a_line(error)}): delete it and run the same command again; its trials are repeated"
        ) from error


def _mend(file: Path) -> None:
    """Clear away what a killed process may have left: a lock, and half a line."""
    with disk_errors(file):
        file.with_name(file.name + ".lock").unlink(missing_ok=True)
        with open(file, "ab", opener=private):
            pass
        content = file.read_bytes()
        whole = content[: content.rfind(b"\n") + 1]
        if whole != content:
            with open(file, "r+b") as journal:
                journal.truncate(len(whole))


def _import_optuna() -> Any:
    """The package ``optuna``, or an error that says how to get it."""
    try:
        import optuna
    except ImportError:
        raise ConfigError("'manydg tune' needs the package 'optuna': pip install 'manydg[tune]'") from None
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    return optuna
