"""A finished model on another labelled dataset, and what a drop of its score is made of.

The score goes from the run's own test patients to the new ones in four steps, whose changes add up to the whole:

1. *prevalence*: the run's test samples, with the classes as frequent as in the new data;
2. *discrimination*: the new patients who are like the training patients, after recalibration;
3. *strange patients*: all new patients, after recalibration;
4. *calibration*: all new patients, as the model is.

Recalibration is a scale and a shift of the log-probabilities, each patient's fitted on the labels of other new
patients. It does not reorder the samples of a binary target: AUPRC and AUROC lose nothing by calibration.
"""

from __future__ import annotations

import html
import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from manydg.data.dataset import DomainDataset
from manydg.errors import DataError
from manydg.evaluation.metrics import Predictions, choose_threshold, read_predictions, score
from manydg.evaluation.statistics import MIN_PATIENTS, Interval, PatientResampling, percentile_interval
from manydg.evaluation.trust import brier_score, reliability, statements
from manydg.files import JsonObject, fields_as_json
from manydg.studies.summary_text import METRIC_NAMES
from manydg.targets import Target
from manydg.training.inference import patient_embeddings, read_calibration
from manydg.training.run import PREDICTIONS, Run, predictions_on

_RANKING = ("auprc", "auroc")
_FOLDS, _FEWEST, _MOST_ROWS = 5, 3, 200_000
_RIDGE = 1e-3


@dataclass(frozen=True)
class Side:
    """The run's own test patients, or the new ones.

    - ``patients``, ``samples``, ``sites``: ``sites`` is 0 where they are not known.
    - ``metrics``: With 95% intervals over patients, or over sites and then patients.
    - ``shares``: Of the samples, by class or label.
    - ``stated``, ``observed``: Mean probability that the model states (of the positive class, of each label, or of its
      decision), and how often it is true.
    """

    patients: int
    samples: int
    sites: int
    metrics: Mapping[str, Interval]
    shares: Mapping[str, float]
    stated: float
    observed: float
    calibration_error: float
    brier: float


@dataclass(frozen=True)
class SiteScore:
    """One site of the new data."""

    site: str
    patients: int
    samples: int
    value: float | None


@dataclass(frozen=True)
class External:
    """A run's model on another dataset.

    - ``change``: Of the metric, from the run's test patients to the new ones.
    - ``steps``: What the change is made of; the estimates add up to it.
    - ``strange``: New patients unlike the training patients; ``None`` where the run cannot tell.
    - ``sites``: The largest first.
    """

    run: str
    algorithm: str
    trained_on: str
    dataset: str
    metric: str
    own: Side
    new: Side
    change: Interval
    steps: Mapping[str, Interval]
    strange: int | None
    sites: list[SiteScore]
    words: list[str]

    def to_json(self) -> JsonObject:
        """JSON values; what is undefined is null."""
        return fields_as_json(self)

    def to_markdown(self) -> str:
        """A page in Markdown."""
        lines = [f"# {self.algorithm}, trained on {self.trained_on}, on {self.dataset}", ""]
        lines += [f"- {sentence}" for sentence in self.words]
        for caption, rows in self.tables():
            head, *body = [f"| {' | '.join(row)} |" for row in rows]
            lines += ["", f"## {caption}", "", head, "|---" * len(rows[0]) + "|", *body]
        return "\n".join(lines) + "\n"

    def to_html(self) -> str:
        """The same page as HTML that needs nothing else."""
        title = html.escape(f"{self.algorithm}, trained on {self.trained_on}, on {self.dataset}")
        parts = [f"<h1>{title}</h1><ul>", *(f"<li>{html.escape(text)}</li>" for text in self.words), "</ul>"]
        for caption, rows in self.tables():
            parts.append(f"<h2>{html.escape(caption)}</h2><table>")
            for number, row in enumerate(rows):
                cell = "td" if number else "th"
                parts.append(f"<tr>{''.join(f'<{cell}>{html.escape(text)}</{cell}>' for text in row)}</tr>")
            parts.append("</table>")
        style = (
            "body{font:16px sans-serif;max-width:60em;margin:2em auto}td,th{text-align:left;padding:.2em 1em .2em 0}"
        )
        head = f'<meta charset="utf-8"><title>{title}</title><style>{style}</style>'
        return f'<!doctype html><html lang="en"><head>{head}</head><body>{"".join(parts)}</body></html>\n'

    def tables(self) -> list[tuple[str, list[list[str]]]]:
        """Captions and rows, the first of them the heading."""
        metrics = [["", "test patients of the run", self.dataset]]
        metrics += [
            [METRIC_NAMES.get(name, name), _text(self.own.metrics[name]), _text(self.new.metrics[name])]
            for name in self.own.metrics
        ]
        for name in ("patients", "samples", "calibration_error", "brier", "stated", "observed"):
            metrics.append([name.replace("_", " "), _number(getattr(self.own, name)), _number(getattr(self.new, name))])
        steps = [["step", f"change of {METRIC_NAMES.get(self.metric, self.metric)}"]]
        steps += [[name, _text(change)] for name, change in self.steps.items()] + [["together", _text(self.change)]]
        tables = [("Scores", metrics), ("What the change is made of", steps)]
        if self.sites:
            rows = [[one.site, str(one.patients), str(one.samples), _number(one.value)] for one in self.sites]
            tables.append(
                ("Sites", [["site", "patients", "samples", METRIC_NAMES.get(self.metric, self.metric)], *rows])
            )
        return tables


def evaluate_run(run: Run, dataset: DomainDataset, name: str, *, resamples: int = 1000) -> External:
    """Score a finished run on another labelled dataset, and take the change of its score apart.

    - ``run``: With its folder, whose predictions on test patients are the other side of the comparison.
    - ``dataset``: Prepared like the run's training data, of other patients.
    - ``name``: What to call the dataset.
    - ``resamples``: Of the bootstrap over patients, or over sites and then patients where the dataset knows
      its sites.
    """
    target = run.algorithm.target
    _check(run, dataset, name)
    if run.folder is None:
        raise DataError("a run without a folder has no predictions on its own test patients: train it with out=")
    own = read_predictions(run.folder / PREDICTIONS, "test", target, run.record.threshold).scored()
    prepared = run.prepare(dataset)
    given = predictions_on(run.algorithm, prepared, np.arange(len(dataset)))
    new = replace(given, threshold=run.record.threshold).scored()
    failed = np.asarray(~np.isfinite(new.probabilities).all(axis=1))
    new = new.select(~failed)
    if not len(new.truth):
        raise DataError(f"{name}: the model's output is finite for no sample")
    sites, strange = dataset.sites(), _strange(run, prepared)
    site_of = None if sites is None else dict(zip(dataset.pseudonyms(), sites.tolist(), strict=True))
    change = _Change(run, own, new, strange, site_of, resamples)
    steps = change.steps()
    result = External(
        run=run.record.run,
        algorithm=run.record.algorithm,
        trained_on=run.record.dataset,
        dataset=name,
        metric=change.metric,
        own=_side(own, change.own_plan, 0),
        new=_side(new, change.new_plan, 0 if sites is None else len(set(sites.tolist()))),
        change=change.whole,
        steps=steps,
        strange=None if strange is None else len(strange),
        sites=[] if site_of is None else _by_site(new, site_of, change.metric),
        words=[],
    )
    return replace(result, words=_words(result, int(failed.sum()), change.unseen))


def _check(run: Run, dataset: DomainDataset, name: str) -> None:
    """Raise if the dataset is not one that the run can be scored on."""
    if run.algorithm.target.numeric:
        raise DataError(
            "a change of the score is taken apart for classes and labels, and this run predicts a measured value: "
            "predict the samples with 'manydg predict', and compare the values"
        )
    if dataset.content_hash() == run.record.dataset_hash:
        raise DataError(f"{name} is the dataset that the run was trained on: name one of other patients")
    spec = run.algorithm.target.spec
    if dataset.target.kind != spec.kind or dataset.target.names != spec.names:
        raise DataError(
            f"{name} has {dataset.target.kind} labels ({', '.join(dataset.target.names[:6])}), the model predicts "
            f"{spec.kind} ({', '.join(spec.names[:6])}): prepare it with the same classes in the same order"
        )
    run.algorithm.target.check(dataset.targets)


def _strange(run: Run, prepared: DomainDataset) -> set[str] | None:
    """Pseudonyms of the patients who are unlike the training patients; ``None`` where the run cannot tell."""
    calibration = None if run.folder is None else read_calibration(run.folder)
    if calibration is None or calibration.reference is None:
        return None
    counted = prepared.scored()
    codes, distances = calibration.reference.distances(*patient_embeddings(run.algorithm, counted))
    names = np.array(counted.pseudonyms())[codes]
    return set(names[~(distances <= calibration.limit)].tolist())


class _Change:
    """The metric on each step from the run's test patients to the new ones, under draws of patients."""

    def __init__(
        self,
        run: Run,
        own: Predictions,
        new: Predictions,
        strange: set[str] | None,
        site_of: Mapping[str, str] | None,
        resamples: int,
    ) -> None:
        self.target, self.own, self.new, self.strange = run.algorithm.target, own, new, strange
        self.metric = run.config.selection or self.target.selection
        own_sites = run.record.sites
        own_by_patient = np.array([own_sites[name] for name in own.names]) if own_sites else None
        self.own_plan = PatientResampling(own.names, resamples=resamples, sites=own_by_patient)
        by_patient = None if site_of is None else np.array([site_of[name] for name in new.names])
        self.new_plan = PatientResampling(new.names, resamples=resamples, seed=1, sites=by_patient)
        self.unseen: list[str] = []
        self.whole = self._difference(self._draws(own, self.own_plan), self._draws(new, self.new_plan))

    def steps(self) -> dict[str, Interval]:
        """What the change is made of, in order; a step that cannot be told from the next is left out."""
        recalibrated = self._recalibrated()
        path = [self._draws(self.own, self.own_plan)]
        names: list[str] = []
        if self.target.exclusive:
            path.append(self._draws(self._as_frequent(), self.own_plan))
            names.append("prevalence")
        familiar = None
        if self.strange:
            like = ~np.isin(recalibrated.patients, list(self.strange))
            familiar = recalibrated.select(like) if len(np.unique(recalibrated.patients[like])) >= _FEWEST else None
        if familiar is not None and np.isfinite(self._draws(familiar, self.new_plan)[0]):
            path.append(self._draws(familiar, self.new_plan))
            names += ["discrimination"]
            path.append(self._draws(recalibrated, self.new_plan))
            names += ["strange patients"]
        else:
            path.append(self._draws(recalibrated, self.new_plan))
            names += ["discrimination"]
        path.append(self._draws(self.new, self.new_plan))
        names += ["calibration"]
        return {name: self._difference(*pair) for name, pair in zip(names, itertools.pairwise(path), strict=True)}

    def _draws(self, predictions: Predictions, plan: PatientResampling) -> npt.NDArray[np.float64]:
        """The metric, and its bootstrap draws."""
        return plan.evaluate(predictions)[self.metric][: 1 + plan.resamples]

    def _difference(self, before: npt.NDArray[np.float64], after: npt.NDArray[np.float64]) -> Interval:
        gap, fewest = after - before, min(self.own_plan, self.new_plan, key=lambda plan: plan.units)
        # Of two patients, or sites, a change has no more of an interval than the score itself.
        few = fewest.units < MIN_PATIENTS
        return fewest.interval(gap) if few else percentile_interval(gap[1:], float(gap[0]))

    def _as_frequent(self) -> Predictions:
        """The run's test samples, repeated so that classes are as frequent as in the new data."""
        truth, size = np.asarray(self.own.truth), self.target.size
        wanted = np.bincount(np.asarray(self.new.truth), minlength=size) / len(self.new.truth)
        available = np.bincount(truth, minlength=size)
        self.unseen = [self.target.spec.names[code] for code in np.flatnonzero((wanted > 0) & (available == 0))]
        total, rng = min(_MOST_ROWS, 4 * len(truth)), np.random.default_rng(0)
        rows = [
            np.resize(rng.permutation(np.flatnonzero(truth == code)), round(float(wanted[code]) * total))
            for code in np.flatnonzero(available)
        ]
        chosen = np.concatenate(rows)
        return Predictions(
            self.target, truth[chosen], self.own.probabilities[chosen], self.own.patients[chosen], self.own.threshold
        )

    def _recalibrated(self) -> Predictions:
        """The new samples after recalibration, each patient's fitted on other patients."""
        if self.metric in _RANKING or len(self.new.names) < 2:
            return self.new
        fold = (np.random.default_rng(0).permutation(len(self.new.names)) % _FOLDS)[self.new.groups]
        probabilities = np.array(self.new.probabilities, np.float64)
        for number in np.unique(fold):
            rest, own = fold != number, fold == number
            probabilities[own] = _rescaled(self.target, self.new.select(rest), self.new.probabilities[own])
        threshold, _ = choose_threshold(self.target, self.new.truth, probabilities)
        return replace(self.new, probabilities=probabilities, threshold=threshold)


def _rescaled(target: Target, known: Predictions, probabilities: npt.NDArray[Any]) -> npt.NDArray[np.float64]:
    """Probabilities after the scale and shift of log-probabilities that suit other samples best."""

    def logits(values: npt.NDArray[Any]) -> torch.Tensor:
        inside = torch.as_tensor(np.clip(np.asarray(values, np.float64), 1e-7, 1 - 1e-7))
        return inside.log() if target.exclusive else torch.logit(inside)

    scale = torch.zeros(1, dtype=torch.float64, requires_grad=True)
    shift = torch.zeros(target.size, dtype=torch.float64, requires_grad=True)
    outputs, truth = logits(known.probabilities), torch.as_tensor(np.asarray(known.truth))
    optimizer = torch.optim.LBFGS([scale, shift], max_iter=50, line_search_fn="strong_wolfe")

    def loss() -> torch.Tensor:
        optimizer.zero_grad()
        moved = scale.exp() * outputs + shift
        value = _log_loss(target, moved, truth) + _RIDGE * (scale.square().sum() + shift.square().sum())
        torch.autograd.backward(value)
        return value

    optimizer.step(loss)  # type: ignore[no-untyped-call]
    moved = (scale.exp() * logits(probabilities) + shift).detach()
    return np.asarray((moved.softmax(dim=1) if target.exclusive else moved.sigmoid()).numpy(), np.float64)


def _log_loss(target: Target, logits: torch.Tensor, truth: torch.Tensor) -> torch.Tensor:
    if target.exclusive:
        return torch.nn.functional.cross_entropy(logits, truth.long())
    return torch.nn.functional.binary_cross_entropy_with_logits(logits, truth.to(logits.dtype))


def _side(predictions: Predictions, plan: PatientResampling, sites: int) -> Side:
    target, truth, probabilities = predictions.target, predictions.truth, predictions.probabilities
    stated, true = statements(target, truth, probabilities)
    indicators = np.asarray(truth)[:, None] == np.arange(target.size) if target.exclusive else np.asarray(truth)
    values = plan.evaluate(predictions)
    return Side(
        patients=len(predictions.names),
        samples=len(np.asarray(truth)),
        sites=sites,
        metrics={name: plan.interval(values[name]) for name in target.metrics},
        shares=dict(zip(target.spec.names, indicators.mean(axis=0).tolist(), strict=True)),
        stated=float(stated.mean()),
        observed=float(true.mean()),
        calibration_error=reliability(target, truth, probabilities).error,
        brier=brier_score(target, truth, probabilities),
    )


def _by_site(new: Predictions, site_of: Mapping[str, str], metric: str) -> list[SiteScore]:
    sites = np.array([site_of[name] for name in new.names])[new.groups]
    scores = []
    for site in np.unique(sites):
        part = new.select(sites == site)
        value = score(part.target, part.truth, part.probabilities, part.threshold)[metric]
        known = value if math.isfinite(value) else None
        scores.append(SiteScore(str(site), len(part.names), len(part.truth), known))
    return sorted(scores, key=lambda one: (-one.patients, one.site))


# In words


def _words(result: External, failed: int, unseen: Sequence[str]) -> list[str]:
    metric, own, new = METRIC_NAMES.get(result.metric, result.metric), result.own, result.new
    patients = f"{new.patients} patient{'s' if new.patients > 1 else ''}"
    where = f" of {new.sites} site{'s' if new.sites > 1 else ''}" if new.sites else ""
    words = [
        f"{metric} is {_text(new.metrics[result.metric])} on {patients}{where} of {result.dataset}, and "
        f"was {_text(own.metrics[result.metric])} on the {own.patients} test patients of the run: a change of "
        f"{_text(result.change)}."
    ]
    if failed:
        words.append(f"{failed} samples are left out: the model's output for them is not finite.")
    if math.isnan(result.change.low):
        words.append(f"How sure the change is cannot be said ({result.change.note}).")
    elif result.change.low <= 0 <= result.change.high:
        words.append(
            "The interval of the change includes 0: these patients do not show that the model does worse here."
        )
    sentences = {
        "prevalence": f"Prevalence: {{}}. {_shares(result)}",
        "discrimination": "Discrimination: {}. Of patients like those of the training, with classes as frequent and "
        "probabilities recalibrated, that is how much worse or better the model tells them apart.",
        "strange patients": f"Strange patients: {{}}. {result.strange} of {new.patients} are farther from the training "
        "patients than nearly all validation patients were.",
        "calibration": f"Calibration: {{}}. The model states {new.stated:.1%} on average and {new.observed:.1%} is "
        f"true; on its own test patients it was {own.stated:.1%} and {own.observed:.1%}. This part comes back by "
        "recalibration on labelled patients of the new data.",
    }
    words += [sentences[name].format(_text(change)) for name, change in result.steps.items()]
    if "strange patients" not in result.steps:
        words.append(_no_strange(result))
    if unseen:
        words.append(
            f"The run's test patients have no sample of {', '.join(unseen)}: prevalence is that of the others."
        )
    losses = {name: change.estimate for name, change in result.steps.items()}
    largest = min(losses, key=lambda name: losses[name])
    if result.change.high < 0 and losses[largest] < 0:
        words.append(f"The largest part of the drop is {largest} ({losses[largest]:+.3f}).")
    return words


def _no_strange(result: External) -> str:
    if result.strange is None:
        return "Strange patients: the run has no reference of its training patients, so that they cannot be told."
    return f"Strange patients: {result.strange} of {result.new.patients}: too few of one kind to take them apart."


def _shares(result: External) -> str:
    names = sorted(result.new.shares, key=lambda name: -abs(result.new.shares[name] - result.own.shares[name]))[:2]
    parts = [
        f"{name} is {result.new.shares[name]:.1%} of the samples here, {result.own.shares[name]:.1%} there"
        for name in names
    ]
    return "; ".join(parts[:1] if len(result.new.shares) == 2 else parts) + "."


def _text(value: Interval) -> str:
    bounds = "" if math.isnan(value.low) else f" [{value.low:.3f}, {value.high:.3f}]"
    return f"{_number(value.estimate)}{bounds}"


def _number(value: float | None) -> str:
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return "–"
    return str(value) if isinstance(value, int) else f"{value:.3f}"
