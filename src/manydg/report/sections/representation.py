"""What the model has learnt about patients: maps of its features, orthogonality, similarity and norms."""

from __future__ import annotations

from collections.abc import Iterator

from manydg.report.results_folder import Chapter
from manydg.report.sections import Block, Part, Section, Text, figure_blocks, known_similarities, similarity_in_words
from manydg.studies.figure_data import Similarity

_EXPERIMENTS = {
    "embedding": (
        "A map of what the model sees",
        "Each dot is a sample, placed so that samples the model finds alike lie together. The features v are split "
        "into a part along z, meant to hold what is the patient’s own, and a part at right angles, from which the "
        "label is read. If the split works, patients should separate in the first part and in z, labels in the second.",
    ),
    "orthogonality": (
        "Do patient and label use different dimensions",
        "Linear models are fitted to v and to its two parts, to predict labels or patients; the cosine of their "
        "weights says how far they use the same dimensions (1: the same, 0: unrelated).",
    ),
    "domain-similarity": (
        "Does z tell patients apart",
        "z is meant to hold what is particular to a patient. If it does, two samples of one patient have a more "
        "similar z than samples of two patients.",
    ),
    "audit": (
        "Is the model an identity detector",
        "How well the model's features, domain factors and logits identify patients from another of their sessions, "
        "beside chance, and how the score changes when the directions in which training patients differ most are "
        "erased from the features (LEACE, Belrose et al. 2023, in closed form).",
    ),
    "norms": (
        "How large the two parts are",
        "Length of the part of v along z against the length of the part across it, a dot per sample.",
    ),
}
"""Title and introduction of each experiment, in the order of the page."""


class Representation(Section):
    """The experiments that look into trained models."""

    order = 600
    experiments = tuple(_EXPERIMENTS)
    expected = ("orthogonality", "domain-similarity", "norms")

    def build(self, chapter: Chapter) -> Iterator[Part]:
        for name, (title, introduction) in _EXPERIMENTS.items():
            if figures := chapter.figures_of(name):
                blocks: list[Block] = [Text(introduction)]
                for figure in figures:
                    blocks += figure_blocks([figure])
                yield Part(name, title, blocks, chapter.command(name))

    def findings(self, chapter: Chapter) -> list[str]:
        tables = [figure.data for figure in chapter.figures_of("domain-similarity")]
        similarities = [known_similarities(data.rows) for data in tables if isinstance(data, Similarity)]
        return [similarity_in_words(rows) for rows in similarities if rows]
