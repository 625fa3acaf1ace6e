"""The input columns a model was built for, as JSON values: enough to rebuild a backbone without the data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from manydg.data.columns import unnest
from manydg.data.dataset import DomainDataset
from manydg.errors import DataError
from manydg.files import Json, ParsedJson

TRUST = "context_weight"
"""The column with the weight of a patient's own statistics, from 0 to 1, ``(rows, 1)``. It weighs other columns and is
no measurement: tables of measurements leave it out."""
CONTEXT = "context"
"""The prefix of the names of columns that hold patient context."""
_OF_THE_DATA = frozenset({"session_gap"})
"""Settings that describe one dataset alone: new data may have others."""


@dataclass(frozen=True)
class ColumnSchema:
    """One input column: element type, shape of one item, and the number of ragged levels above the items."""

    dtype: str
    shape: tuple[int, ...]
    nesting: int = 0


@dataclass(frozen=True)
class InputSchema:
    """The input columns of a dataset.

    Parameters
    ----------
    columns : dict of str to ColumnSchema
    sizes : dict of str to int
        Vocabulary size of each coded column, and other counts a backbone is built from.
    settings : dict
        Plain facts that must hold at prediction too: sampling rate, channel names, units, feature names.
    """

    columns: Mapping[str, ColumnSchema]
    sizes: Mapping[str, int] = field(default_factory=dict)
    settings: Mapping[str, Json] = field(default_factory=dict)

    @staticmethod
    def of(dataset: DomainDataset) -> InputSchema:
        """The schema of a dataset; its info supplies sizes of vocabularies and settings."""
        columns = {}
        for name, column in dataset.columns.items():
            levels, items = unnest(column)
            dtype = str(items.dtype).removeprefix("torch.")
            columns[name] = ColumnSchema(dtype, tuple(items.shape[1:]), len(levels))
        info = dataset.info
        sizes = {name: len(words) for name, words in info.vocabularies.items()} | dict(info.sizes)
        settings = {key: value for key, value in info.settings.items() if key not in _OF_THE_DATA}
        return InputSchema(columns, sizes, settings)

    def measurements(self) -> dict[str, ColumnSchema]:
        """The columns that a table of measurements is made of."""
        return {name: column for name, column in self.columns.items() if name != TRUST}

    def without_context(self) -> InputSchema:
        """The same schema without the columns of patient context."""
        return replace(self, columns={n: column for n, column in self.columns.items() if not n.startswith(CONTEXT)})

    def to_json(self) -> dict[str, Json]:
        columns: dict[str, Json] = {
            name: {"dtype": column.dtype, "shape": list(column.shape), "nesting": column.nesting}
            for name, column in self.columns.items()
        }
        return {"columns": columns, "sizes": dict(self.sizes), "settings": dict(self.settings)}

    @staticmethod
    def from_json(value: ParsedJson) -> InputSchema:
        columns = {
            name: ColumnSchema(entry["dtype"], tuple(entry["shape"]), entry["nesting"])
            for name, entry in value["columns"].items()
        }
        return InputSchema(columns, value["sizes"], value["settings"])

    def check(self, given: InputSchema) -> None:
        """Raise if data of another schema are given to a model of this one."""
        missing = sorted(set(self.columns) - set(given.columns))
        extra = sorted(set(given.columns) - set(self.columns))
        if missing or extra:
            raise DataError(
                f"the model was trained on the inputs {sorted(self.columns)}; "
                f"missing here: {missing or 'none'}, not known to it: {extra or 'none'}"
            )
        for name, column in self.columns.items():
            if given.columns[name] != column:
                raise DataError(f"input '{name}' is {given.columns[name]} here, but the model was trained on {column}")
        for key, size in self.sizes.items():
            if key in given.sizes and given.sizes[key] != size:
                raise DataError(f"'{key}' has {given.sizes[key]} entries here, but the model was trained on {size}")
        if given.settings.get("missing") and not self.settings.get("missing"):
            raise DataError("some values are missing here, but the model was trained on complete data: fill them in")
        for key, value in self.settings.items():
            if key in given.settings and given.settings[key] != value:
                raise DataError(_difference(key, given.settings[key], value))


def _difference(key: str, here: Json, trained: Json) -> str:
    """What differs in a setting: of long lists of names, only the names that do."""
    if not (isinstance(here, list) and isinstance(trained, list) and all(isinstance(x, str) for x in here + trained)):
        return f"{key} is {here!r} here, but the model was trained on {trained!r}"
    missing = [name for name in trained if name not in set(here)]
    extra = [name for name in here if name not in set(trained)]
    if not missing and not extra:
        return f"{key} have another order here than in what the model was trained on: {here[:5]}, not {trained[:5]}"
    return (
        f"{key} differ from the model's; missing here: {missing[:5] or 'none'}, not known to it: {extra[:5] or 'none'}"
    )
