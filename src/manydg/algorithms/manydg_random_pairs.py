"""Control: ManyDG whose partners are strangers, so that the pairs tell nothing about the patient."""

from __future__ import annotations

from manydg.algorithms.manydg import ManyDG


class ManyDGRandomPairs(ManyDG):
    """The same losses on pairs drawn without regard to the patient.

    What ManyDG gains over this is due to its pairs being of one patient.
    """

    sampling = "random-pairs"
