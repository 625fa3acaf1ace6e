"""Clinical records as sequences: one vector a visit or an event from its codes, and the patient's own features."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from typing import cast

import torch
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx
from torch.nn import functional

from manydg.backbones import Inputs, RunningMoments, Standardize
from manydg.backbones._sequences import FixedLayout, Layout, last_steps, layout_of
from manydg.data.columns import Column, Ragged, offsets_from_lengths, take
from manydg.data.dataset import CONTEXT, DomainDataset, InputSchema
from manydg.errors import ConfigError, DataError, ManyDGWarning
from manydg.files import ParsedJson

VISIT_COLUMNS = ("diagnoses", "procedures", "history_drugs")
EVENT_COLUMNS = {"event_kind": 1, "event_codes": 2, "event_values": 2}
"""With their nesting."""
_DENSE = ("static", CONTEXT)
_CODES_AT_ONCE = 1 << 22
_LARGEST_VALUE = 10.0


def step_encoder(schema: InputSchema, width: int, max_events: int) -> VisitSteps | EventSteps:
    """The encoder that turns a dataset's visits or events into steps of a sequence."""
    if "event_codes" in schema.columns:
        return EventSteps(schema, width, max_events)
    if "diagnoses" in schema.columns:
        return VisitSteps(schema, width)
    raise ConfigError(
        "this backbone takes sequences: stays of events (a column 'event_codes') or visits (a column 'diagnoses'); "
        f"the dataset has {sorted(schema.columns)}"
    )


class PatientFeatures(nn.Module):
    """Joins what a sequence says with the patient's features: the dense columns ``static`` and ``context``, where there
    are any.

    The features are standardised over training patients and go through a small net; a missing one counts as average.

    - ``width``: Of the sequence's vector and of the output.
    """

    def __init__(self, schema: InputSchema, width: int) -> None:
        super().__init__()
        known = [name for name in _DENSE if name in schema.columns and not schema.columns[name].nesting]
        self.names = tuple(known)
        self.size = sum(torch.Size(schema.columns[name].shape).numel() for name in known)
        hidden = width // 4 if self.size else 0
        if self.size:
            self.scale = Standardize(self.size)
            self.net = nn.Sequential(nn.Linear(self.size, hidden), nn.ELU())
        self.out = nn.Linear(width + hidden, width)

    def forward(self, sequence: Tensor, inputs: Inputs) -> Tensor:
        """Features ``(batch, width)`` from the sequence's vector ``(batch, width)``."""
        if self.size:
            static = torch.nan_to_num(self.scale(self._dense(inputs)), nan=0.0)
            sequence = torch.cat([sequence, self.net(static)], dim=-1)
        features: Tensor = self.out(sequence)
        return features

    def fit(self, dataset: DomainDataset) -> None:
        if self.size:
            with warnings.catch_warnings():
                # A rare group that no training patient belongs to is nothing to warn about.
                warnings.simplefilter("ignore", ManyDGWarning)
                self.scale.fit([self._dense({name: dataset.column(name) for name in self.names})])

    def _dense(self, inputs: Inputs) -> Tensor:
        columns = []
        for name in self.names:
            column = inputs[name]
            if not isinstance(column, Tensor):
                raise DataError(f"the input '{name}' must be dense: one row of patient features a sample")
            columns.append(column.flatten(1).to(torch.float32))
        return torch.cat(columns, dim=1)


def two_levels(name: str, column: object) -> tuple[Tensor, Tensor, Tensor]:
    """Parts of a column of nesting 2: codes ``(codes,)``, offsets over items, and offsets over codes."""
    if not isinstance(column, Ragged) or not isinstance(column.values, Ragged):
        raise DataError(f"input '{name}' must hold a list of code sets for every sample")
    inner = column.values
    if not isinstance(inner.values, Tensor):
        raise DataError(f"input '{name}' is nested more than twice")
    return inner.values, column.offsets, inner.offsets


class KnownCodes(nn.Module):
    """Maps codes that no training patient has, or that are outside the vocabulary, to code 0, unknown.

    - ``size``: Size of the vocabulary, code 0 included.
    """

    known: Tensor

    def __init__(self, size: int) -> None:
        super().__init__()
        self.size = size
        # One entry more than there are codes, never known, for codes outside the vocabulary.
        known = torch.ones(size + 1, dtype=torch.bool)
        known[size] = False
        self.register_buffer("known", known)

    def forward(self, codes: Tensor) -> Tensor:
        # Code -1 is the last entry too.
        inside = codes.clamp(-1, self.size)
        return inside * self.known[inside]

    def fit(self, codes: Tensor) -> None:
        """Learn from all codes of the training patients, ``(items,)``."""
        seen = torch.zeros_like(self.known)
        for piece in torch.split(codes, _CODES_AT_ONCE):
            seen[piece[(piece >= 0) & (piece < self.size)].to(seen.device)] = True
        self.known.copy_(seen)


class CodeMeans(nn.Module):
    """Mean embedding of the codes of each item (a visit); zero for an item without any.

    - ``reach``: The embeddings start between minus and plus this number.
    """

    def __init__(self, size: int, width: int, reach: float = 1.0) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.empty(size, width).uniform_(-reach, reach))

    def forward(self, codes: Tensor, offsets: Tensor) -> Tensor:
        """Pooled vectors ``(items, width)``."""
        counts = (offsets[1:] - offsets[:-1]).clamp_min(1).unsqueeze(-1)
        return pooled_sum(self.table, codes, offsets) / counts


class CodeValues(nn.Module):
    """Standardises measured values per code, with mean and deviation of the training patients.

    A value that is missing, of a code that never varies there, or of the unknown code, becomes 0; one further than ten
    deviations from the mean counts as ten, since most such are typing errors.

    - ``size``: Size of the vocabulary.
    """

    mean: Tensor
    scale: Tensor

    def __init__(self, size: int) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(size))
        self.register_buffer("scale", torch.ones(size))

    def forward(self, values: Tensor, codes: Tensor) -> Tensor:
        scaled = (values - self.mean[codes]) * self.scale[codes]
        return torch.nan_to_num(scaled, nan=0.0).clamp(-_LARGEST_VALUE, _LARGEST_VALUE)

    def fit(self, values: Tensor, codes: Tensor) -> None:
        """Learn from all values and codes of the training patients, ``(items,)`` each."""
        moments = RunningMoments(self.mean)
        for piece, owner in self._pieces(values, codes):
            count, total, squares = (torch.zeros_like(moments.mean) for _ in range(3))
            count.index_add_(0, owner, torch.ones_like(piece))
            total.index_add_(0, owner, piece)
            mean = total / count.clamp_min(1)
            squares.index_add_(0, owner, (piece - mean[owner]).square())
            moments.add(count, mean, squares)
        mean, variance = moments.mean, moments.variance
        constant = (moments.count < 2) | (variance <= 1e-13 * mean.square().clamp_min(1e-13))
        constant[0] = True
        self.mean.copy_(mean)
        self.scale.copy_(torch.where(constant, 0.0, variance.clamp_min(1e-300).rsqrt()))

    def _pieces(self, values: Tensor, codes: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        for piece, owner in zip(torch.split(values, _CODES_AT_ONCE), torch.split(codes, _CODES_AT_ONCE), strict=True):
            usable = torch.isfinite(piece) & (owner >= 0) & (owner < len(self.mean))
            yield piece[usable].to(self.mean.device, torch.float64), owner[usable].to(self.mean.device)


class _PooledSum(torch.autograd.Function):
    """``embedding_bag`` whose gradient can be differentiated again, which torch's own cannot.

    A second table is pooled with weights; its gradient shares the sorting of the codes, which takes a GPU longest.
    """

    @staticmethod
    def forward(
        table: Tensor, codes: Tensor, offsets: Tensor, weighted: Tensor | None, weights: Tensor | None
    ) -> Tensor:
        pooled = functional.embedding_bag(codes, table, offsets, mode="sum", include_last_offset=True)
        if weighted is None:
            return pooled
        return pooled + functional.embedding_bag(
            codes, weighted, offsets, mode="sum", per_sample_weights=weights, include_last_offset=True
        )

    @staticmethod
    def setup_context(ctx: FunctionCtx, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        table, codes, offsets, _, weights = inputs
        ctx.save_for_backward(codes, offsets, weights)
        ctx.size = table.shape[0]  # type: ignore[attr-defined]

    @staticmethod
    def backward(ctx: FunctionCtx, grad: Tensor) -> tuple[Tensor, None, None, Tensor | None, None]:
        codes, offsets, weights = ctx.saved_tensors  # type: ignore[attr-defined]
        row, size = Ragged(codes, offsets).row_of_item(), ctx.size  # type: ignore[attr-defined]
        items = grad.index_select(0, row)
        if weights is None:
            return torch.ops.aten.embedding_dense_backward(items, codes, size, -1, False), None, None, None, None
        if torch.is_grad_enabled():
            # Is differentiated again: each table on its own, which decides the rounding.
            apart = (items, grad.index_select(0, row) * weights.unsqueeze(-1))
            first, second = (torch.ops.aten.embedding_dense_backward(part, codes, size, -1, False) for part in apart)
            return first, None, None, second, None
        both = torch.cat([items, items * weights.unsqueeze(-1)], dim=1)
        first, second = torch.ops.aten.embedding_dense_backward(both, codes, size, -1, False).chunk(2, dim=1)
        return first, None, None, second, None


def pooled_sum(
    table: Tensor, codes: Tensor, offsets: Tensor, weighted: Tensor | None = None, weights: Tensor | None = None
) -> Tensor:
    """Sum of the codes' vectors in each bag, with those of a second table times the codes' weights; zero where empty.

    - ``table``, ``weighted`` ``(codes, width)``
    - ``codes``, ``weights`` ``(items,)``: No gradient reaches the weights.
    - ``offsets``: Tensor ``(bags + 1,)``
    - returns ``(bags, width)``
    """
    weights = None if weights is None else weights.to(table.dtype)
    pooled: Tensor = _PooledSum.apply(table, codes, offsets, weighted, weights)  # type: ignore[no-untyped-call]
    return pooled


class VisitCodes(nn.Module):
    """Mean embeddings of the diagnoses and of the procedures of each visit.

    - ``reach``: The embeddings start between minus and plus this number.
    """

    def __init__(self, schema: InputSchema, width: int, reach: float = 1.0) -> None:
        super().__init__()
        check_visit_schema(schema)
        self.known_diagnoses = KnownCodes(schema.sizes["diagnoses"])
        self.known_procedures = KnownCodes(schema.sizes["procedures"])
        self.diagnoses = CodeMeans(schema.sizes["diagnoses"], width, reach)
        self.procedures = CodeMeans(schema.sizes["procedures"], width, reach)
        with torch.no_grad():
            # Training may never meet the unknown code: it must not start with a random vector.
            self.diagnoses.table[0] = 0.0
            self.procedures.table[0] = 0.0

    def forward(self, inputs: Inputs) -> tuple[Tensor, Tensor, Layout]:
        """Vectors of diagnoses and of procedures, ``(visits, width)`` each, and the layout of the visits."""
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
    """One vector a visit: its diagnoses, its procedures, and the drugs of the visit before."""

    def __init__(self, schema: InputSchema, width: int) -> None:
        super().__init__()
        self.codes = VisitCodes(schema, width)
        self.drugs = CodeMeans(schema.sizes["drugs"], width)
        self.join = nn.Linear(3 * width, width)

    def forward(self, inputs: Inputs) -> tuple[Tensor, Layout]:
        """Vectors ``(visits, width)``, and the layout of the visits in the samples."""
        diagnoses, procedures, layout = self.codes(inputs)
        drugs, earlier, bounds = two_levels("history_drugs", inputs["history_drugs"])
        pooled = self.drugs(drugs, bounds)
        history = Ragged(pooled, earlier)
        # The drugs of a sample's visit i are known at its visit i + 1.
        visit = layout.offsets[history.row_of_item()] + history.position_of_item() + 1
        before = torch.zeros_like(diagnoses).index_copy(0, visit, pooled)
        joined: Tensor = self.join(torch.cat([diagnoses, procedures, before], dim=-1))
        return joined, layout

    def fit(self, dataset: DomainDataset) -> None:
        self.codes.fit(dataset)


def check_visit_schema(schema: InputSchema) -> None:
    """Raise if a dataset's inputs are not visits with codes and earlier drugs."""
    wrong = [name for name in VISIT_COLUMNS if name not in schema.columns or schema.columns[name].nesting != 2]
    if wrong:
        raise ConfigError(
            f"this backbone takes visits: columns {list(VISIT_COLUMNS)}, each a list of code sets; "
            f"missing or of another kind: {wrong}"
        )
    unknown = [name for name in ("diagnoses", "procedures", "drugs") if name not in schema.sizes]
    if unknown:
        raise ConfigError(f"the dataset names no vocabulary for {unknown}: add it to info['vocabularies']")


def check_visits(dataset: DomainDataset) -> None:
    """Raise if the columns disagree: visits must be equally many, with drugs for all of them but the current one."""
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


class EventSteps(nn.Module):
    """One vector an event, made by the encoder of the event's kind from what its fields hold.

    A field (the names of medications, say) is pooled into the sum of its codes' vectors plus that of its codes' value
    vectors times the standardised values. For laboratory results that is a linear layer on the vector of all tests'
    results together with one on which tests were done. The fields of a kind are joined and go through two layers.

    - ``schema``: ``settings["event_kinds"]`` names the kinds and ``settings["code_fields"]`` the fields: each has a
      name, its kind, and the range ``start`` to ``stop`` of its codes. Without them all events are of one kind with one
      field.
    - ``max_events``: A stay's last events that are kept.
    """

    slot_of_code: Tensor

    def __init__(self, schema: InputSchema, width: int, max_events: int) -> None:
        super().__init__()
        check_event_schema(schema)
        if max_events < 1:
            raise ConfigError(f"max_events is {max_events}; a stay needs at least one")
        self.width, self.max_events = width, max_events
        size = schema.sizes["events"]
        slot_of_code, slots = _slots(schema.settings, size)
        self.slots = max(slots)
        self.register_buffer("slot_of_code", slot_of_code, persistent=False)
        self.known, self.values = KnownCodes(size), CodeValues(size)
        self.presence = nn.Parameter(torch.randn(size, width) * width**-0.5)
        self.amount = nn.Parameter(torch.randn(size, width) * width**-0.5)
        with torch.no_grad():
            # Training may never meet the unknown code: it must not start with a random vector.
            self.presence[0] = 0.0
        self.encoders = nn.ModuleList(
            nn.Sequential(nn.Linear(count * width, width), nn.ELU(), nn.Linear(width, width), nn.ELU())
            for count in slots
        )

    def forward(self, inputs: Inputs) -> tuple[Tensor, Layout]:
        """Vectors ``(events, width)``, and the layout of the events in the stays."""
        kinds, codes, values, layout = self._last_events(inputs)
        encode = self._encode_all if isinstance(layout, FixedLayout) else self._encode
        return encode(self._pool(codes, values), kinds), layout

    def fit(self, dataset: DomainDataset) -> None:
        """Learn which codes are known, and the values' scale, from training patients."""
        codes, _, bounds = two_levels("event_codes", dataset.column("event_codes"))
        values, _, other_bounds = two_levels("event_values", dataset.column("event_values"))
        if not torch.equal(bounds, other_bounds):
            raise DataError("event_codes and event_values must run in parallel: one value, or NaN, for every code")
        self.known.fit(codes)
        self.values.fit(values, codes)

    def shorten(self, columns: Mapping[str, Column]) -> dict[str, Column]:
        """The columns without the events that would not be looked at anyway."""
        kinds = columns["event_kind"]
        if not isinstance(kinds, Ragged) or not len(kinds) or int(kinds.lengths.max()) <= self.max_events:
            return dict(columns)
        kept, offsets = last_steps(kinds.offsets, self.max_events)
        return {
            name: Ragged(take(column.values, kept), offsets)
            if isinstance(column, Ragged) and torch.equal(column.offsets, kinds.offsets)
            else column
            for name, column in columns.items()
        }

    def _last_events(self, inputs: Inputs) -> tuple[Tensor, Ragged, Ragged, Layout]:
        kinds, codes, values = (inputs[name] for name in EVENT_COLUMNS)
        if not (isinstance(kinds, Ragged) and isinstance(codes, Ragged) and isinstance(values, Ragged)):
            raise DataError(f"the inputs {list(EVENT_COLUMNS)} must be ragged columns")
        kind, code, value = kinds.values, codes.values, values.values
        if not (isinstance(kind, Tensor) and isinstance(code, Ragged) and isinstance(value, Ragged)):
            raise DataError("event_kind holds one number an event; event_codes and event_values hold a list an event")
        if kinds.longest is not None:
            if kinds.longest > self.max_events:
                raise DataError(f"a stay of a batch of fixed shape has more than {self.max_events} events")
            return kind, code, value, layout_of(kinds)
        lengths = kinds.lengths.tolist()
        if max(lengths, default=0) <= self.max_events:
            return kind, code, value, Layout(kinds.offsets, lengths)
        kept, offsets = last_steps(kinds.offsets, self.max_events)
        shortened = [min(length, self.max_events) for length in lengths]
        return kind[kept], code.take(kept), value.take(kept), Layout(offsets, shortened)

    def _pool(self, codes: Ragged, values: Ragged) -> Tensor:
        """Sum of the codes' vectors per event and field, ``(events, slots * width)``."""
        flat, measured = cast("Tensor", codes.values), cast("Tensor", values.values)
        known = self.known(flat)
        scaled = self.values(measured, known)
        offsets = codes.offsets
        if self.slots > 1:
            slot = self.slot_of_code[flat.clamp(0, len(self.slot_of_code) - 1)]
            bag = codes.row_of_item() * self.slots + slot
            bag, order = torch.sort(bag, stable=True)
            known, scaled = known[order], scaled[order]
            sizes = torch.zeros(len(codes) * self.slots, dtype=torch.int64, device=bag.device)
            offsets = offsets_from_lengths(sizes.index_add(0, bag, torch.ones_like(bag)))
        pooled = pooled_sum(self.presence, known, offsets, self.amount, scaled)
        return pooled.reshape(len(codes), self.slots * self.width)

    def _encode(self, pooled: Tensor, kinds: Tensor) -> Tensor:
        """Each event through the encoder of its kind: events sorted by kind, one matrix product a kind."""
        if len(self.encoders) == 1:
            encoded: Tensor = self.encoders[0](pooled)
            return encoded
        kinds = kinds.clamp(0, len(self.encoders) - 1)
        order = torch.argsort(kinds, stable=True)
        sizes = torch.zeros(len(self.encoders), dtype=torch.int64, device=kinds.device)
        counts = sizes.index_add(0, kinds, torch.ones_like(kinds)).tolist()
        groups = torch.split(pooled.index_select(0, order), counts)
        parts = [
            encoder(group[:, : encoder[0].in_features])  # type: ignore[index]
            for encoder, group in zip(self.encoders, groups, strict=True)
        ]
        joined = torch.cat(parts)
        return torch.empty_like(joined).index_copy(0, order, joined)

    def _encode_all(self, pooled: Tensor, kinds: Tensor) -> Tensor:
        """The same without asking the device how many events are of which kind.

        The layers of all kinds are one wide product each, of which every event takes its own kind's part.
        """
        kinds = kinds.clamp(0, len(self.encoders) - 1)
        own = torch.arange(len(kinds), device=kinds.device) * len(self.encoders) + kinds
        encoded = pooled
        for index in (0, 2):
            layers = [cast("nn.Linear", encoder[index]) for encoder in self.encoders]  # type: ignore[index]
            wide = encoded.shape[-1]
            weights = [layer.weight for layer in layers]
            if any(layer.in_features < wide for layer in layers):
                weights = [functional.pad(weight, (0, wide - weight.shape[1])) for weight in weights]
            weight = torch.cat(weights)
            of_all = functional.linear(encoded, weight, torch.cat([layer.bias for layer in layers]))
            encoded = functional.elu(of_all.reshape(-1, self.width).index_select(0, own))
        return encoded


def check_event_schema(schema: InputSchema) -> None:
    """Raise if a dataset's inputs are not stays of events."""
    wrong = [
        n for n, nesting in EVENT_COLUMNS.items() if n not in schema.columns or schema.columns[n].nesting != nesting
    ]
    if wrong:
        raise ConfigError(
            f"this backbone takes stays of events: columns {list(EVENT_COLUMNS)}; missing or of another kind: {wrong}"
        )
    if "events" not in schema.sizes:
        raise ConfigError("the dataset names no vocabulary of events: add it to info['vocabularies']['events']")


def _slots(settings: ParsedJson, size: int) -> tuple[Tensor, list[int]]:
    """The index of each code's field among the fields of its kind, and the number of fields of each kind."""
    kinds = settings.get("event_kinds") or ["event"]
    slots = [0] * len(kinds)
    slot_of_code = torch.zeros(size, dtype=torch.int64)
    for field in settings.get("code_fields") or []:
        kind, start, stop = int(field["kind"]), int(field["start"]), int(field["stop"])
        if not (0 <= kind < len(kinds) and 0 <= start <= stop <= size):
            raise ConfigError(
                f"the field '{field['name']}' has codes {start} to {stop} of kind {kind}; "
                f"the dataset has {size} codes and {len(kinds)} kinds"
            )
        slot_of_code[start:stop] = slots[kind]
        slots[kind] += 1
    return slot_of_code, [max(1, count) for count in slots]
