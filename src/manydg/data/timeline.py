"""A patient's samples in the order of time, as sequence models read them."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass

import torch
from torch import Tensor

from manydg.data.dataset import CONTEXT, DomainDataset
from manydg.data.patient_context import Timeline
from manydg.errors import ConfigError, DataError, unknown_name
from manydg.files import Json, ParsedJson

ORDER, PAUSE = f"{CONTEXT}_order", f"{CONTEXT}_pause"
"""The columns that :func:`add_order` adds."""
DIRECTIONS = ("offline", "causal")
SEQUENCES = {"gru": 1, "transformer": 2, "conv": 7}
"""The networks that read a session's samples in order, and how many layers they have by default."""
_LONGEST_PAUSE = 10.0
_SIZES = {"crop": (2, 1 << 20), "width": (1, 1 << 14), "layers": (1, 32)}


@dataclass(frozen=True)
class SequenceOptions:
    """How a patient's samples are read in order.

    Parameters
    ----------
    kind : {"gru", "transformer", "conv"}
        The network that reads the samples of a session: gated recurrent units; attention to neighbours by content and
        distance; or dilated convolutions.
    direction : {"offline", "causal"}
        Whether the output of a sample draws on the whole session, or on the samples up to it.
    crop : int
        Consecutive samples that training reads at a time, about; predictions read whole sessions.
    width : int
        Values of a layer, for each direction.
    layers : int
        By default 1 for ``gru``, 2 for ``transformer`` and 7 for ``conv``.
    dropout : float
        Between layers, and before the output.
    gap : float, optional
        A pause longer than this begins a new session, which is read anew. By default the dataset's setting
        ``session_gap``; without one, all samples of a patient are one session.
    pause : float, optional
        The usual time from one sample to the next, by default the median of the training patients.
    """

    kind: str = "gru"
    direction: str = "offline"
    crop: int = 128
    width: int = 128
    layers: int = 1
    dropout: float = 0.3
    gap: float | None = None
    pause: float | None = None

    def __post_init__(self) -> None:
        for name, known in (("kind", tuple(SEQUENCES)), ("direction", DIRECTIONS)):
            if getattr(self, name) not in known:
                raise unknown_name(f"{name} of sequence", str(getattr(self, name)), known)
        for name, (fewest, most) in _SIZES.items():
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or not fewest <= value <= most:
                raise ConfigError(
                    f"the {name} of a sequence is {value!r}; it must be a whole number from {fewest} to {most}"
                )
        for name, low, high in (("dropout", 0.0, 1.0), ("gap", 0.0, math.inf), ("pause", 0.0, math.inf)):
            value = getattr(self, name)
            if value is not None and (isinstance(value, bool) or not isinstance(value, int | float)):
                raise ConfigError(f"the {name} of a sequence is {value!r}; it must be a number")
            if value is not None and not low <= value < high:
                raise ConfigError(f"the {name} of a sequence is {value}; it must be from {low:g} to less than {high:g}")

    @staticmethod
    def from_mapping(kind: str, given: ParsedJson) -> SequenceOptions:
        """Options by name, as a configuration has them."""
        names = {field.name for field in dataclasses.fields(SequenceOptions)} - {"kind"}
        for name in given:
            if name not in names:
                raise unknown_name("option of sequence", name, names)
        return SequenceOptions(kind, **{"layers": SEQUENCES.get(kind, 1), **given})

    @staticmethod
    def from_json(value: ParsedJson) -> SequenceOptions:
        return SequenceOptions.from_mapping(value["kind"], {name: v for name, v in value.items() if name != "kind"})

    def to_json(self) -> dict[str, Json]:
        return dataclasses.asdict(self)


def add_order(dataset: DomainDataset, options: SequenceOptions, training: Tensor | None = None) -> DomainDataset:
    """The dataset with two more columns, by which a network can read each session's samples in the order of time.

    ``context_order`` numbers the samples: the next sample of the same session has the next number, and between two
    sessions a number is left out, so that two rows belong together where their numbers follow one another. Samples of
    the same time are in the order of the dataset. ``context_pause`` is the logarithm of the time since the session's
    last sample, in units of the usual pause; 0 for the first.

    Parameters
    ----------
    dataset : DomainDataset
        With times.
    options : SequenceOptions
    training : Tensor, optional
        Rows of the training patients, whose median pause is the usual one where the options give none; by default all.
    """
    if dataset.times is None:
        raise DataError(
            "a sequence model needs the time of every sample, and the dataset has none: prepare it with times (--time)"
        )
    whole = dataset.compact()
    gap = options.gap if options.gap is not None else dataset.info.session_gap
    timeline = Timeline.of(whole.domains, whole.times, gap)
    position = torch.arange(len(timeline), device=whole.device)
    first = timeline.session == position
    since = torch.where(first, 0.0, torch.diff(timeline.times, prepend=timeline.times[:1]))
    within = ~first
    if training is not None:
        known = torch.zeros_like(first)
        known[training.to(whole.device)] = True
        within &= known[timeline.order]
    usual = options.pause
    if usual is None:
        usual = float(since[within].median()) if bool(within.any()) else 1.0
    order, pause = torch.empty_like(position), torch.empty(len(timeline), 1, device=whole.device)
    order[timeline.order] = position + torch.cumsum(first, 0)
    relative = (since / (usual if usual > 0 else 1.0)).log1p().clamp_max(_LONGEST_PAUSE)
    pause[timeline.order] = relative.to(torch.float32).unsqueeze(1)
    chosen = dataclasses.replace(options, gap=gap, pause=usual)
    info = dataclasses.replace(whole.info, settings={**whole.info.settings, "sequence": chosen.to_json()})
    return dataclasses.replace(
        whole, columns={**whole.columns, ORDER: order, PAUSE: pause}, info=info, stored_hash=None
    )
