"""Synthetic patients, drawn from the paper's generative model: the demonstration's dataset, and twins of clinical ones.

Each module holds one :class:`manydg.sources.Twin`, which writes raw files in the format of the source of its name.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from manydg.data.dataset import DomainDataset, from_arrays
from manydg.data.info import CohortStep, DatasetInfo, Provenance

CLASSES = ("calm", "drowsy", "asleep", "dreaming")
LATENT, SIGNAL, SPURIOUS = 24, 24, 4
NOISE = 1.2
Ints = npt.NDArray[Any]
Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class DemoPatients:
    """Patients of the demonstration: what is seen of them, and what is true of them.

    Each patient has a factor ``z ~ N(0, I)`` and label priors of its own. A sample of class ``y`` has the class's
    pattern, turned and shifted by z, plus noise. A last group of features is a spurious covariate of the patient: in
    the patients who train and validate it gives away which classes the patient mostly shows; in the quarter of the
    patients who are new it says something else.

    Attributes
    ----------
    patient, label : array ``(samples,)``
    signal, spurious : array ``(samples, features)``
    is_new : array ``(patients,)`` bool
        Patients for the test.
    factor, priors : array ``(patients, ...)``
    pattern : array ``(classes, SIGNAL)``
    effect : array ``(classes, LATENT, SIGNAL)``
        How a patient's factor moves a class's pattern.
    """

    patient: Ints
    label: Ints
    signal: Floats
    spurious: Floats
    is_new: Ints
    factor: Floats
    priors: Floats
    pattern: Floats
    effect: Floats

    @staticmethod
    def draw(patients: int = 240, samples: int = 60, seed: int = 0) -> DemoPatients:
        """Draw patients, then samples given the patient and the label.

        Parameters
        ----------
        patients : int
        samples : int
            Average number of samples per patient; the numbers differ from patient to patient.
        seed : int
        """
        rng = np.random.default_rng(seed)
        factor = rng.normal(size=(patients, LATENT))
        priors = rng.dirichlet(np.full(len(CLASSES), 1.5), size=patients)
        is_new = np.arange(patients) >= patients - patients // 4
        counts = _uneven_counts(patients, samples, rng)
        who = np.repeat(np.arange(patients), counts)
        label = (rng.random(len(who))[:, None] > priors.cumsum(axis=1)[who]).sum(axis=1).clip(max=len(CLASSES) - 1)

        pattern = rng.normal(size=(len(CLASSES), SIGNAL))
        turn = rng.normal(size=(len(CLASSES), LATENT, SIGNAL)) * 0.1
        shift = rng.normal(size=(LATENT, SIGNAL)) * 0.8
        signal = pattern[label] + np.einsum("nl,nls->ns", factor[who], turn[label]) + factor[who] @ shift
        signal += rng.normal(size=signal.shape) * NOISE
        shown = np.where(is_new[:, None], rng.dirichlet(np.full(len(CLASSES), 1.5), size=patients), priors)
        spurious = (shown @ rng.normal(size=(len(CLASSES), SPURIOUS)))[who]
        spurious += rng.normal(size=(len(who), SPURIOUS)) * 0.3
        return DemoPatients(who, label, signal, spurious, is_new, factor, priors, pattern, turn + shift)

    def dataset(self) -> DomainDataset:
        """What a learner gets to see."""
        names = np.array([f"demo-{number:04d}" for number in range(len(self.is_new))])
        flow = CohortStep("drawn from the generative model", {"patients": len(names), "samples": len(self.label)})
        origin = Provenance("demo", "manydg demo", synthetic=True)
        return from_arrays(
            np.concatenate([self.signal, self.spurious], axis=1),
            np.array(CLASSES)[self.label],
            names[self.patient],
            kind="classes",
            names=CLASSES,
            info=DatasetInfo(test_patients=tuple(names[self.is_new].tolist()), provenance=origin, cohort_flow=(flow,)),
        )

    def best_possible(self, *, knowing_the_patient: bool) -> Floats:
        """Bayes' rule on the samples of the new patients: no learner can expect to do better.

        Parameters
        ----------
        knowing_the_patient : bool
            Whether the rule is given the patient's factor and label priors. Without them, the factor is integrated out:
            a sample of class y is normal with mean ``pattern[y]`` and covariance ``effect[y]' effect[y] + NOISE^2 I``,
            and all classes are equally likely.

        Returns
        -------
        array ``(samples of new patients, classes)``
            Probabilities.
        """
        rows = self.is_new[self.patient]
        who, signal = self.patient[rows], self.signal[rows]
        scores = np.empty((len(who), len(CLASSES)))
        for code, (pattern, effect) in enumerate(zip(self.pattern, self.effect, strict=True)):
            if knowing_the_patient:
                error = signal - pattern - self.factor[who] @ effect
                scores[:, code] = np.log(self.priors[who, code]) - np.square(error).sum(axis=1) / (2 * NOISE**2)
            else:
                covariance = effect.T @ effect + NOISE**2 * np.eye(SIGNAL)
                error = signal - pattern
                distance = (error * np.linalg.solve(covariance, error.T).T).sum(axis=1)
                scores[:, code] = -(distance + np.linalg.slogdet(covariance)[1]) / 2
        odds = np.exp(scores - scores.max(axis=1, keepdims=True))
        return np.asarray(odds / odds.sum(axis=1, keepdims=True))


def make_demo_dataset(patients: int = 240, samples: int = 60, seed: int = 0) -> DomainDataset:
    """The demonstration's dataset (:class:`DemoPatients`).

    Examples
    --------
    >>> make_demo_dataset(patients=8, samples=5)
    DomainDataset(40 samples of 8 patients, inputs x; classes of 4)
    """
    return DemoPatients.draw(patients, samples, seed).dataset()


def _uneven_counts(patients: int, samples: int, rng: np.random.Generator) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """Numbers of samples that differ by patient and add up to the average asked for."""
    share = rng.dirichlet(np.full(patients, 4.0))
    counts = 1 + np.floor(share * patients * (samples - 1)).astype(np.int64)
    short = patients * samples - int(counts.sum())
    counts[rng.permutation(patients)[:short]] += 1
    return counts
