"""What a few labels of a new patient are worth, by how many there are and how they are used.

A protocol says what of an unseen patient is shown; the others of the patient's samples are scored, and nothing that was
shown. Where MOABB has a name for a protocol, it is the same here (``moabb.evaluations.CrossSubjectMode``).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from manydg.data.dataset import DomainDataset
from manydg.data.splits import load_split
from manydg.evaluation.metrics import Predictions, score
from manydg.evaluation.statistics import Interval, compare_paired, holm, patient_difference
from manydg.studies.figure_data import Axis, Cell, CellTable, Curve, FigureData, Line, XAxis
from manydg.studies.study import Experiment, PlannedRun, Record, Request, grid, mean_and_sd
from manydg.studies.summary import row_name
from manydg.targets import target_of
from manydg.training.inference import CAUSAL
from manydg.training.personal import (
    KINDS,
    LEARNERS,
    MARKOV,
    UNLABELLED,
    Outputs,
    Population,
    needed,
    outputs_of,
    personal_logits,
)
from manydg.training.record import Counts, Variant
from manydg.training.run import SPLIT, Run, context_of, open_run

COUNTS = (1, 5, 10, 20, 50, 100)
SHARE = 0.2
_RESAMPLES = 500
_WITH_LABELS = "train_and_target_labeled"
_NAMES_OF_SERIES = {
    "first": "the first samples",
    "drawn": "samples drawn at random",
    "spread": "samples drawn evenly over the predicted classes",
}

Rows = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Protocol:
    """What is shown of an unseen patient.

    - ``name``: As MOABB has it, or in its style.
    - ``count``: Samples that are shown; a share of the patient's where it is None.
    - ``drawn`` {"first", "drawn", "spread"}: Whether they are the patient's first, drawn at random, or drawn in turns
      from the classes that the model predicts, for which no label is needed.
    - ``online``: Whether all samples are scored one after the other, and the labels of earlier ones are known by then.
    """

    name: str
    words: str
    count: int | None = None
    drawn: str = "drawn"
    labelled: bool = True
    online: bool = False

    @property
    def learners(self) -> tuple[str, ...]:
        if self.labelled:
            return LEARNERS
        return (MARKOV,) if self.count == 0 else (UNLABELLED,)

    @property
    def known_labels(self) -> str:
        """As a record says it."""
        return "earlier" if self.online else "some" if self.labelled else ""

    def described(self, delay: float) -> str:
        """What is shown, in words."""
        return self.words + (f", known after {delay:g}" if self.online and delay else "")

    def shown(self, outputs: Outputs, patients: Rows, seed: int) -> Rows:
        """Positions of what is shown; draws of more samples hold those of fewer."""
        if self.online:
            return np.arange(len(patients))
        chosen = []
        for code in np.unique(patients):
            rows = np.flatnonzero(patients == code)
            rows = rows[np.argsort(outputs.times[rows], kind="stable")]
            if self.drawn != "first":
                rows = np.random.default_rng([seed, int(code)]).permutation(rows)
            if self.drawn == "spread":
                rows = rows[_in_turns(outputs.logits[rows].argmax(axis=1))]
            chosen.append(rows[: int(SHARE * len(rows)) if self.count is None else self.count])
        return np.concatenate(chosen)


def _in_turns(classes: Rows) -> Rows:
    """An order in which the first of every class come first, then the second of every class, and so on.

    Examples
    --------
    >>> _in_turns(np.array([0, 0, 0, 1, 1, 2])).tolist()
    [0, 3, 5, 1, 4, 2]
    """
    rank = np.zeros(len(classes), np.int64)
    for label in np.unique(classes):
        rank[classes == label] = np.arange((classes == label).sum())
    return np.argsort(rank, kind="stable")


UNLABELLED_RECORD = Protocol("train_and_target_unlabeled", "all samples, without labels", 0, labelled=False)
UNLABELLED_SHARE = Protocol("train_and_target_unlabeled_20p", "20% of the samples, without labels", labelled=False)
LABELLED_SHARE = Protocol(f"{_WITH_LABELS}_20p", "20% of the samples, labelled")
FIRST = [Protocol(f"{_WITH_LABELS}_first_{k}", f"the first {k}, labelled", k, "first") for k in COUNTS]
DRAWN = [Protocol(f"{_WITH_LABELS}_drawn_{k}", f"{k} drawn at random, labelled", k) for k in COUNTS]
SPREAD = [
    Protocol(f"{_WITH_LABELS}_spread_{k}", f"{k} drawn evenly over the predicted classes, labelled", k, "spread")
    for k in COUNTS
]
EARLIER = Protocol(f"{_WITH_LABELS}_earlier", "the labels of all earlier samples", online=True)
PROTOCOLS = (UNLABELLED_RECORD, UNLABELLED_SHARE, *FIRST, *DRAWN, *SPREAD, LABELLED_SHARE, EARLIER)


@dataclass(frozen=True, eq=False)
class Unseen:
    """A run's model and the test patients, before any of their labels is shown."""

    run: Run
    outputs: Outputs
    patients: Rows
    names: npt.NDArray[np.str_]
    indicators: npt.NDArray[np.float64]
    truth: npt.NDArray[np.int64]

    @staticmethod
    def of(run: Run, part: DomainDataset) -> Unseen:
        """What the model makes of the samples, computed once for all protocols and learners."""
        target, prepared, part = run.algorithm.target, run.prepare(part).scored(), part.scored()
        population = needed(run.population, target)
        truth = target.truth(part.targets).cpu().numpy()
        indicators = truth.astype(np.float64) if truth.ndim == 2 else np.eye(target.size)[truth]
        patients, names = part.domains.cpu().numpy(), np.array(part.pseudonyms())
        return Unseen(run, outputs_of(run.algorithm, prepared, population), patients, names, indicators, truth)

    @property
    def causal(self) -> bool:
        """Whether only labels of earlier samples may be used."""
        return context_of(self.run.schema, self.run.algorithm).get("mode") == CAUSAL

    def personal(
        self, shown: Rows, learner: str, *, causal: bool, delay: float = 0.0, asked: Rows | None = None
    ) -> npt.NDArray[np.float64]:
        """Logits of all samples, or of those that are asked for; of the labels, only those shown are handed on."""
        return personal_logits(
            self.outputs, self.patients, shown, self.indicators[shown], self.population, self.run.algorithm.target,
            learner, causal=causal, delay=delay, asked=asked,
        )  # fmt: skip

    @property
    def population(self) -> Population:
        return needed(self.run.population, self.run.algorithm.target)

    def predictions(self, logits: npt.NDArray[np.float64], rows: Rows) -> Predictions:
        target = self.run.algorithm.target
        probabilities = target.probabilities(torch.from_numpy(logits[rows])).numpy()
        names = self.names[self.patients[rows]]
        return Predictions(target, self.truth[rows], probabilities, names, self.run.record.threshold)


@dataclass(frozen=True)
class Gain:
    """Predictions of the same samples with what a protocol shows, without it, and by the model alone, for every split.

    Without labels, a learner may still know the patient's other samples (``markov``).
    """

    protocol: Protocol
    learner: str
    shown: list[Predictions] = field(default_factory=list)
    without: list[Predictions] = field(default_factory=list)
    alone: list[Predictions] = field(default_factory=list)

    def add(self, other: Gain) -> None:
        """Take the predictions of another split."""
        for ours, theirs in ((self.shown, other.shown), (self.without, other.without), (self.alone, other.alone)):
            ours.extend(theirs)

    def change(self) -> dict[str, Interval]:
        """Of each metric, with a 95% interval over patients."""
        return patient_difference(self.shown, self.without, resamples=_RESAMPLES)

    def scores(self, metric: str) -> tuple[list[float], list[float], list[float]]:
        """A metric of the model alone, without and with what is shown, for each split."""
        alone, without, shown = (
            [score(one.target, one.truth, one.probabilities, one.threshold)[metric] for one in side]
            for side in (self.alone, self.without, self.shown)
        )
        return alone, without, shown


def evaluate(unseen: Unseen, seed: int, delay: float = 0.0) -> Iterator[Gain]:
    """Every protocol and learner on the test patients of a run.

    - ``seed``: Of the draws.
    - ``delay``: Where the labels of earlier samples are known: how long that takes.
    """
    everyone, nothing = np.arange(len(unseen.patients)), np.zeros(0, np.int64)
    timeless = bool((unseen.outputs.times == 0).all())
    chained = {causal: unseen.personal(nothing, MARKOV, causal=causal) for causal in {unseen.causal, True}}
    for protocol in PROTOCOLS:
        causal = protocol.online or unseen.causal
        shown = protocol.shown(unseen.outputs, unseen.patients, seed)
        rest = everyone if protocol.online else np.setdiff1d(everyone, shown)
        # Of fewer samples than are shown, a metric says little.
        few = len(rest) < len(shown) or len(np.unique(unseen.patients[rest])) < 2
        if few or (timeless and (protocol.drawn == "first" or protocol.online)):
            continue
        alone = unseen.predictions(unseen.outputs.logits, rest)
        known: dict[str, tuple[Predictions, Predictions]] = {}
        for learner in protocol.learners:
            name = unseen.population.learner(learner)
            if name not in known:
                lag = delay if protocol.online else 0.0
                logits = unseen.personal(shown, name, causal=causal, delay=lag, asked=rest)
                without = unseen.predictions(chained[causal], rest) if name == MARKOV and protocol.labelled else alone
                known[name] = unseen.predictions(logits, rest), without
            yield Gain(protocol, learner, [known[name][0]], [known[name][1]], [alone])


class Personalise(Experiment):
    """A few labels of each unseen patient: what they are worth by their number, and by how they are used."""

    name = "personalise"
    title = "A few labels of the new patient"
    kinds = KINDS

    def plan(self, request: Request) -> list[PlannedRun]:
        return grid("compare", request.algorithms, range(request.seeds), request.options)

    def aggregate(self, request: Request, records: Sequence[Record], folder: Path) -> dict[str, FigureData]:
        gains: dict[str, dict[tuple[str, str], Gain]] = {}
        for record in records:
            run = open_run(folder / record.folder)
            split = load_split(folder / record.folder / SPLIT, request.dataset)
            unseen = Unseen.of(run, request.dataset.select(np.asarray(split.test)))
            mode = str(context_of(run.schema, run.algorithm).get("mode"))
            variant: Variant = {} if mode == "none" else {"context": f"{mode} context"}
            for gain in evaluate(unseen, record.seed, request.label_delay):
                name = row_name(record.replace(known_labels=gain.protocol.known_labels, variant=variant))
                key = gain.protocol.name, gain.learner
                gains.setdefault(name, {}).setdefault(key, Gain(gain.protocol, gain.learner)).add(gain)
        metric = records[0].config.selection or target_of(request.dataset.target).selection
        return _figures(gains, metric, request.label_delay, records[0].patients)


COLUMNS = (
    *("method", "protocol", "shown of the patient", "labels", "learner", "model alone", "no labels", "shown"),
    *("change", "low", "high", "p"),
)


def _figures(
    gains: Mapping[str, Mapping[tuple[str, str], Gain]], metric: str, delay: float, patients: Counts
) -> dict[str, FigureData]:
    """A table of all protocols, and a curve over the number of labels for each way to choose them."""
    rows: list[list[Cell]] = []
    lines: dict[str, dict[str, dict[int, Interval]]] = {name: {} for name in _NAMES_OF_SERIES}
    for name, entries in gains.items():
        p_values = _corrected(list(entries.values()), metric, patients)
        for gain, p in zip(entries.values(), p_values, strict=True):
            change, means = gain.change()[metric], [mean_and_sd(values)[0] for values in gain.scores(metric)]
            shown = [gain.protocol.name, gain.protocol.described(delay), gain.protocol.count, gain.learner]
            numbers = [_finite(value) for value in (change.estimate, change.low, change.high, p)]
            rows.append([name, *shown, *means, *numbers])
            if gain.protocol.count:
                of_kind = lines[gain.protocol.drawn]
                of_kind.setdefault(f"{name}: {gain.learner}", {})[gain.protocol.count] = change
    note = (
        f"{metric} of the samples that were not shown, all patients together. The change is against the same learner "
        "without labels; low and high are its 95% interval over patients, p is of the corrected resampled t-test over "
        "splits, after Holm for the numbers of labels. Strengths of the learners were chosen on validation patients. "
        f"{_verdict(rows)} Rows with labels and rows without them answer different questions: only those of one "
        "protocol compare."
    )
    table = CellTable(list(COLUMNS), rows)
    figures = {"personalise": FigureData(Personalise.title, table, Personalise.name, note=note)}
    for kind, series in lines.items():
        if series:
            title = f"What labels of a new patient are worth: {_NAMES_OF_SERIES[kind]}"
            figures[f"personalise-{kind}"] = FigureData(title, _curve(series, metric), Personalise.name, note=note)
    return figures


def _corrected(gains: Sequence[Gain], metric: str, patients: Counts) -> list[float]:
    """p of each change over splits, after Holm among those of one learner and one way to choose the labels."""
    families: dict[tuple[str, str, bool], list[int]] = {}
    raw = []
    for position, gain in enumerate(gains):
        _, without, shown = gain.scores(metric)
        raw.append(compare_paired(shown, without, patients.test / max(patients.train, 1)).corrected_p)
        families.setdefault((gain.learner, gain.protocol.drawn, gain.protocol.online), []).append(position)
    adjusted = list(raw)
    for positions in families.values():
        for position, p in zip(positions, holm([raw[position] for position in positions]), strict=True):
            adjusted[position] = p
    return adjusted


def _verdict(rows: Sequence[Sequence[Cell]]) -> str:
    """Whether labels were ever worth less than none beyond chance, as a sentence."""
    entries = [dict(zip(COLUMNS, row, strict=True)) for row in rows]
    tested = [entry for entry in entries if isinstance(entry["high"], float) and entry["labels"] != 0]
    worse = [f"{entry['method']}, {entry['learner']}, {entry['protocol']}" for entry in tested if entry["high"] < 0]  # type: ignore[operator]
    rows_worse = f"in {len(worse)}: {'; '.join(worse)}" if worse else "in none"
    return f"Worse than without labels beyond chance (interval below 0): {rows_worse} of {len(tested)} rows."


def _curve(series: Mapping[str, Mapping[int, Interval]], metric: str) -> Curve:
    counts = sorted({count for entries in series.values() for count in entries})
    lines = []
    for name, entries in series.items():
        known = [entries.get(count, Interval(math.nan, math.nan, math.nan)) for count in counts]
        means, lows, highs = (
            [0.0, *(_finite(getattr(entry, bound)) for entry in known)] for bound in ("estimate", "low", "high")
        )
        lines.append(Line(name, means, lows, highs))
    x = XAxis("labelled samples of the patient", [0, *counts], "linear")
    return Curve(x, Axis(f"change of {metric}"), lines)


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
