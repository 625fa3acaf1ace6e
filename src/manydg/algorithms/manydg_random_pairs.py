"""Control: ManyDG with random partners, so that the pairs carry no information about the patient."""

from __future__ import annotations

from manydg.algorithms.manydg import ManyDG


class ManyDGRandomPairs(ManyDG):
    """The same losses on pairs drawn without regard to the patient.

    What ManyDG gains over this is due to its pairs being of one patient.
    """

    title, order = "ManyDG, random pairs", 20
    summary = "ManyDG on pairs drawn without regard to the patient."
    is_control = True

    sampling = "random-pairs"
