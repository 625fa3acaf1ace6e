"""Synthetic patients, drawn from the paper's generative model: the demonstration's dataset, and twins of clinical ones.

Each module holds one :class:`manydg.sources.Twin`, which writes raw files in the format of the source of its name.
"""

from __future__ import annotations

import numpy as np

from manydg.data.dataset import DomainDataset, from_arrays
from manydg.data.info import CohortStep, DatasetInfo, Provenance

CLASSES = ("calm", "drowsy", "asleep", "dreaming")
LATENT, SIGNAL, SPURIOUS = 6, 24, 4


def make_demo_dataset(patients: int = 240, samples: int = 60, seed: int = 0) -> DomainDataset:
    """Draw patients, then samples given the patient and the label.

    Each patient has a factor ``z ~ N(0, I)`` and label priors of its own. A sample of class ``y`` has the class's
    pattern, turned and shifted by z, plus noise. A last group of features is a spurious covariate of the patient: in
    the patients who train and validate it gives away which classes the patient mostly shows; in the quarter of the
    patients who are new it says something else.

    Parameters
    ----------
    patients : int
    samples : int
        Average number of samples per patient; the numbers differ from patient to patient.
    seed : int

    Examples
    --------
    >>> make_demo_dataset(patients=8, samples=5)
    DomainDataset(40 samples of 8 patients, inputs x; classes of 4)
    """
    rng = np.random.default_rng(seed)
    factor = rng.normal(size=(patients, LATENT))
    priors = rng.dirichlet(np.full(len(CLASSES), 1.5), size=patients)
    is_new = np.arange(patients) >= patients - patients // 4
    counts = _uneven_counts(patients, samples, rng)
    who = np.repeat(np.arange(patients), counts)
    label = (rng.random(len(who))[:, None] > priors.cumsum(axis=1)[who]).sum(axis=1).clip(max=len(CLASSES) - 1)

    pattern = rng.normal(size=(len(CLASSES), SIGNAL))
    turn = rng.normal(size=(len(CLASSES), LATENT, SIGNAL)) * 0.25
    shift = rng.normal(size=(LATENT, SIGNAL)) * 0.6
    signal = pattern[label] + np.einsum("nl,nls->ns", factor[who], turn[label]) + factor[who] @ shift
    signal += rng.normal(size=signal.shape) * 1.6
    told = np.where(is_new[:, None], rng.dirichlet(np.full(len(CLASSES), 1.5), size=patients), priors)
    spurious = (told @ rng.normal(size=(len(CLASSES), SPURIOUS)) * 3)[who] + rng.normal(size=(len(who), SPURIOUS)) * 0.3
    names = np.array([f"demo-{number:04d}" for number in range(patients)])
    flow = CohortStep("drawn from the generative model", {"patients": patients, "samples": len(who)})
    origin = Provenance("demo", "manydg demo", synthetic=True)
    return from_arrays(
        np.concatenate([signal, spurious], axis=1),
        np.array(CLASSES)[label],
        names[who],
        kind="classes",
        names=CLASSES,
        info=DatasetInfo(test_patients=tuple(names[is_new].tolist()), provenance=origin, cohort_flow=(flow,)),
    )


def _uneven_counts(patients: int, samples: int, rng: np.random.Generator) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """Numbers of samples that differ by patient and add up to the average asked for."""
    share = rng.dirichlet(np.full(patients, 4.0))
    counts = 1 + np.floor(share * patients * (samples - 1)).astype(np.int64)
    short = patients * samples - int(counts.sum())
    counts[rng.permutation(patients)[:short]] += 1
    return counts
