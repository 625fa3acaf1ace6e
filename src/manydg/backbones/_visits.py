"""Hospital visits with their codes, as one vector a visit."""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor, nn

from manydg.backbones._backbone import Inputs
from manydg.backbones._codes import CodeMeans, KnownCodes, two_levels
from manydg.backbones._fixed_layout import layout_of
from manydg.backbones._layout import Layout
from manydg.data.columns import Ragged
from manydg.data.dataset import DomainDataset
from manydg.data.schema import InputSchema
from manydg.errors import ConfigError, DataError

COLUMNS = ("diagnoses", "procedures", "history_drugs")


class VisitCodes(nn.Module):
    """Mean embeddings of the diagnoses and of the procedures of each visit.

    Parameters
    ----------
    schema : InputSchema
    width : int
    reach : float
        The embeddings start between minus and plus this number.
    """

    def __init__(self, schema: InputSchema, width: int, reach: float = 1.0) -> None:
        super().__init__()
        check_visit_schema(schema)
        self.known_diagnoses = KnownCodes(schema.sizes["diagnoses"])
        self.known_procedures = KnownCodes(schema.sizes["procedures"])
        self.diagnoses = CodeMeans(schema.sizes["diagnoses"], width, reach)
        self.procedures = CodeMeans(schema.sizes["procedures"], width, reach)
        with torch.no_grad():
            # Training may never meet the unknown code: it must not come with random meaning.
            self.diagnoses.table[0] = 0.0
            self.procedures.table[0] = 0.0

    def forward(self, inputs: Inputs) -> tuple[Tensor, Tensor, Layout]:
        """Vectors of diagnoses and of procedures, ``(visits, width)`` each, and how the visits lie in the samples."""
        diagnoses, _, bounds = two_levels("diagnoses", inputs["diagnoses"])
        first = self.diagnoses(self.known_diagnoses(diagnoses), bounds)
        procedures, _, bounds = two_levels("procedures", inputs["procedures"])
        second = self.procedures(self.known_procedures(procedures), bounds)
        return first, second, layout_of(cast("Ragged", inputs["diagnoses"]))

    def fit(self, dataset: DomainDataset) -> None:
        check_visits(dataset)
        self.known_diagnoses.fit(two_levels("diagnoses", dataset.column("diagnoses"))[0])
        self.known_procedures.fit(two_levels("procedures", dataset.column("procedures"))[0])


class VisitSteps(nn.Module):
    """One vector a visit: its diagnoses, its procedures, and the drugs of the visit before.

    Parameters
    ----------
    schema : InputSchema
    width : int
    """

    def __init__(self, schema: InputSchema, width: int) -> None:
        super().__init__()
        self.codes = VisitCodes(schema, width)
        self.drugs = CodeMeans(schema.sizes["drugs"], width)
        self.join = nn.Linear(3 * width, width)

    def forward(self, inputs: Inputs) -> tuple[Tensor, Layout]:
        """Vectors ``(visits, width)``, and how the visits lie in the samples."""
        diagnoses, procedures, layout = self.codes(inputs)
        drugs, earlier, bounds = two_levels("history_drugs", inputs["history_drugs"])
        pooled = self.drugs(drugs, bounds)
        history = Ragged(pooled, earlier)
        # The drugs of a sample's visit i are known at its visit i + 1.
        place = layout.offsets[history.row_of_item()] + history.position_of_item() + 1
        before = torch.zeros_like(diagnoses).index_copy(0, place, pooled)
        joined: Tensor = self.join(torch.cat([diagnoses, procedures, before], dim=-1))
        return joined, layout

    def fit(self, dataset: DomainDataset) -> None:
        self.codes.fit(dataset)


def check_visit_schema(schema: InputSchema) -> None:
    """Raise if a dataset's inputs are not visits with codes and earlier drugs."""
    wrong = [name for name in COLUMNS if name not in schema.columns or schema.columns[name].nesting != 2]
    if wrong:
        raise ConfigError(
            f"this backbone takes visits: columns {list(COLUMNS)}, each a list of code sets; "
            f"missing or of another kind: {wrong}"
        )
    unknown = [name for name in ("diagnoses", "procedures", "drugs") if name not in schema.sizes]
    if unknown:
        raise ConfigError(f"the dataset names no vocabulary for {unknown}: add it to info['vocabularies']")


def check_visits(dataset: DomainDataset) -> None:
    """Raise if the columns do not tell one story: equal visits, and drugs for all of them but the current one."""
    _, visits, _ = two_levels("diagnoses", dataset.column("diagnoses"))
    _, procedures, _ = two_levels("procedures", dataset.column("procedures"))
    drugs, earlier, _ = two_levels("history_drugs", dataset.column("history_drugs"))
    lengths = visits[1:] - visits[:-1]
    wrong = (lengths != procedures[1:] - procedures[:-1]) | (lengths != earlier[1:] - earlier[:-1] + 1)
    if bool(wrong.any()):
        row = int(torch.nonzero(wrong)[0])
        raise DataError(
            f"sample {row} has {int(lengths[row])} visits with diagnoses, "
            f"{int(procedures[row + 1] - procedures[row])} with procedures and "
            f"{int(earlier[row + 1] - earlier[row])} earlier visits with drugs: the first two must be equal, and the "
            "third one less (the current visit's drugs are what is predicted)"
        )
    if len(drugs) and int(drugs.min()) < 0:
        raise DataError(f"history_drugs holds the code {int(drugs.min())}: drugs are counted from 0")
