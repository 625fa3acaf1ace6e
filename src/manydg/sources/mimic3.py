"""MIMIC-III: drugs prescribed in a hospital visit.

MIMIC-III 1.4 (PhysioNet, credentialed access; the demo of 100 patients is open under the Open Database License 1.0):
diagnoses, procedures and prescriptions of hospital admissions, from which the drugs of a visit are predicted. Johnson
et al., "MIMIC-III, a freely accessible critical care database", Scientific Data 3, 2016; Goldberger et al.,
"PhysioBank, PhysioToolkit, and PhysioNet", Circulation 101(23), 2000.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from manydg.sources import NewSamples, PublishedCounts, Reporter, Source, SourceDocs, TrainedOn, option
from manydg.sources._preparing import make_ready
from manydg.sources._tables import find_tables, table_names
from manydg.sources._visits import TABLES, DrugMapOptions, VisitCohort, VisitOptions, find_drug_mapping, find_new_tables


@dataclass(frozen=True)
class Mimic3Options(VisitOptions):
    """The same; a mapping of drugs is needed."""

    ndc_map: Path = option(help="CSV table with the columns ndc and atc.")


class Mimic3(Source[Mimic3Options, DrugMapOptions]):
    """Hospital visits, one sample each, with the patient's earlier visits as history.

    A folder holds ADMISSIONS, DIAGNOSES_ICD, PROCEDURES_ICD and PRESCRIPTIONS, ``.csv`` or ``.csv.gz``, in any case.
    Complete visits have a diagnosis, a procedure and a mapped drug each. The columns ``diagnoses`` and ``procedures``
    hold earlier visits and the current one, last; ``history_drugs`` earlier ones only; the target is the visit's drugs.
    """

    name = "mimic3"
    options_class = Mimic3Options
    prediction_options_class = DrugMapOptions
    published = PublishedCounts(
        "MIMIC-III 1.4, patients with two or more visits",
        {"patients": 6_350, "samples": 15_032, "diagnoses": 1_958, "procedures": 1_430, "drugs": 112},
        labels_per_sample={"mean": 11.65, "most": 64},
        notes={"drugs": "which drugs remain hangs on the NDC to ATC mapping that is used"},
    )
    docs = SourceDocs(
        predicts="drugs of a hospital visit",
        target="many labels",
        page="[mimic3](datasets/mimic3.md)",
        task="drug recommendation",
        files="[MIMIC-III](docs/datasets/mimic3.md), full or demo",
    )

    def looks_like(self, folder: Path) -> bool:
        return len({*TABLES, "icustays"} & table_names(folder)) >= 2

    def prepare(
        self, raw: Path, out: Path, options: Mimic3Options, *, workers: int = 1, overwrite: bool = False
    ) -> Path:
        make_ready(out, overwrite=overwrite)
        tables = find_tables(raw.absolute(), TABLES, source=self.name)
        return VisitCohort(self.name, tables).prepare(raw, out, options, workers=workers, overwrite=overwrite)

    def for_prediction(self, raw: Path, trained: TrainedOn, options: DrugMapOptions) -> Iterator[NewSamples]:
        """Every visit with a diagnosis and a procedure; its history is the patient's earlier complete visits.

        Its own prescriptions are not needed, those of earlier visits are, where there are any. Unknown codes count as
        unknown.
        """
        self.check_trained_on(trained)
        cohort = VisitCohort(self.name, find_new_tables(raw, self.name))
        yield cohort.for_prediction(raw, trained, options.ndc_map)

    def options_for(self, raw: Path, nearby: Path, report: Reporter) -> Mimic3Options:
        """Any mapping of drugs that lies with the tables, or nearby."""
        return Mimic3Options(find_drug_mapping(self.name, raw, nearby))
