"""GAMENet: which drugs now, from the visits so far and a memory of how drugs go together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor, nn

from manydg.backbones import Backbone, Inputs
from manydg.backbones._records import PatientFeatures, VisitCodes, two_levels
from manydg.backbones._sequences import Layout, layout_of
from manydg.data.columns import Ragged
from manydg.data.dataset import CONTEXT, DomainDataset, InputSchema
from manydg.errors import ConfigError


class _DrugGraph(nn.Module):
    """Two graph convolutions over the drugs, each drug starting from a vector of its own."""

    graph: Tensor

    def __init__(self, drugs: int, width: int, dropout: float) -> None:
        super().__init__()
        self.register_buffer("graph", torch.eye(drugs))
        self.first = nn.Parameter(torch.empty(drugs, width).uniform_(-1, 1) * width**-0.5)
        self.first_bias = nn.Parameter(torch.zeros(width))
        self.second = nn.Linear(width, width)
        self.dropout = nn.Dropout(dropout)

    def connect(self, links: Tensor) -> None:
        """Set the graph from links ``(drugs, drugs)``: every drug also to itself, each row's weights summing to 1."""
        linked = ((links + links.T) > 0).to(torch.float32)
        linked.fill_diagonal_(1.0)
        self.graph.copy_(linked / linked.sum(dim=1, keepdim=True))

    def forward(self) -> Tensor:
        """Vectors of the drugs, ``(drugs, width)``."""
        hidden = self.dropout((self.graph @ self.first + self.first_bias).relu())
        vectors: Tensor = self.graph @ self.second(hidden)
        return vectors


class GAMENet(Backbone):
    """Graph-augmented memory network over visits.

    Shang et al., "GAMENet: graph augmented memory networks for recommending medication combination", AAAI 2019. A
    query sums up the visits so far; it reads the memory of the drugs (fact 1) and, by its likeness to the queries of
    earlier visits, the memory of the drugs given then (fact 2, which is fact 1 at a first visit). The links between
    drugs that are given together come from training patients; those that should not be come with the dataset, as
    ``settings["drug_interactions"]``, pairs of drug codes. The drugs of the current visit are not an input.

    Parameters
    ----------
    schema : InputSchema
        Of visits.
    width : int
        Width of the codes' vectors, the queries, the memory and the features v.
    hidden : int
        Width of the recurrent networks' states.
    dropout : float
        Of the codes' vectors and in the graphs.
    """

    takes_padded: bool = True

    def __init__(self, schema: InputSchema, width: int = 64, hidden: int = 128, dropout: float = 0.3) -> None:
        super().__init__()
        self.codes = VisitCodes(schema, width, reach=0.1)
        self.drugs = schema.sizes["drugs"]
        self.dropout = nn.Dropout(dropout)
        self.diagnoses = nn.GRU(width, hidden, batch_first=True)
        self.procedures = nn.GRU(width, hidden, batch_first=True)
        self.query = nn.Sequential(nn.ReLU(), nn.Linear(2 * hidden, width))
        self.together = _DrugGraph(self.drugs, width, dropout)
        self.apart = _DrugGraph(self.drugs, width, dropout)
        pairs = cast("Sequence[Sequence[int]]", schema.settings.get("drug_interactions") or [])
        self.apart.connect(_links(pairs, self.drugs))
        self.apart_weight = nn.Parameter(torch.ones(1))
        self.out = nn.Sequential(nn.ReLU(), nn.Linear(3 * width, width))
        self.patient = PatientFeatures(schema, width) if CONTEXT in schema.columns else None
        self.output_size = width

    def forward(self, inputs: Inputs) -> Tensor:
        queries, layout = self._queries(inputs)
        query = layout.last(queries)
        memory = self.together() - self.apart_weight * self.apart()
        fact = (query @ memory.T).softmax(dim=-1) @ memory
        history = self._history(query, queries, memory, layout, inputs)
        alone = (layout.lengths <= 1).unsqueeze(-1)
        features: Tensor = self.out(torch.cat([query, fact, torch.where(alone, fact, history)], dim=-1))
        return features if self.patient is None else self.patient(features, inputs)

    def fit_inputs(self, dataset: DomainDataset) -> None:
        self.codes.fit(dataset)
        if self.patient is not None:
            self.patient.fit(dataset)
        if dataset.target.kind == "multilabel" and dataset.target.size == self.drugs:
            given = dataset.targets.to(torch.float32)
        else:
            drugs, _, bounds = two_levels("history_drugs", dataset.column("history_drugs"))
            given = self._indicators(drugs, bounds)
        self.together.connect((given.T @ given).to(self.together.graph.device))

    def _queries(self, inputs: Inputs) -> tuple[Tensor, Layout]:
        """A query for each visit, ``(visits, width)``, from the visits up to it."""
        diagnoses, procedures, layout = self.codes(inputs)
        first = layout.run(self.diagnoses, self.dropout(diagnoses))
        second = layout.run(self.procedures, self.dropout(procedures))
        return self.query(torch.cat([first, second], dim=-1)), layout

    def _history(self, query: Tensor, queries: Tensor, memory: Tensor, layout: Layout, inputs: Inputs) -> Tensor:
        """Fact 2, ``(batch, width)``: the memory of earlier visits' drugs; of no use for a first visit."""
        drugs, _, bounds = two_levels("history_drugs", inputs["history_drugs"])
        column = cast("Ragged", inputs["history_drugs"])
        known = None if column.longest is not None else [max(0, visits - 1) for visits in layout.host_lengths]
        earlier = layout_of(column, known)
        keys = queries.index_select(0, (layout.offsets[earlier.row] + earlier.position).clamp_max(layout.steps - 1))
        weights = earlier.softmax((keys * query.index_select(0, earlier.row)).sum(dim=-1))
        return earlier.total(weights.unsqueeze(-1) * (self._indicators(drugs, bounds) @ memory))

    def _indicators(self, drugs: Tensor, bounds: Tensor) -> Tensor:
        """One row of 0 and 1 for each visit, ``(visits, drugs)``."""
        visits = Ragged(drugs, bounds)
        flat = torch.zeros(len(visits) * self.drugs, device=drugs.device)
        return flat.index_fill_(0, visits.row_of_item() * self.drugs + drugs, 1.0).reshape(len(visits), self.drugs)


def _links(pairs: Sequence[Sequence[int]], drugs: int) -> Tensor:
    """Pairs of drug codes as a matrix of 0 and 1."""
    links = torch.zeros(drugs, drugs)
    if not pairs:
        return links
    if any(len(pair) != 2 for pair in pairs):
        raise ConfigError("drug_interactions is a list of pairs of drug codes, such as [[0, 3], [2, 7]]")
    # Checked as numbers, since a tensor has no values on the meta device.
    named = [int(drug) for pair in pairs for drug in pair]
    if min(named) < 0 or max(named) >= drugs:
        raise ConfigError(
            f"drug_interactions names drugs {min(named)} to {max(named)}, but the dataset has drugs 0 to {drugs - 1}"
        )
    index = torch.as_tensor(named, dtype=torch.int64).reshape(-1, 2)
    links[index[:, 0], index[:, 1]] = 1.0
    return links
