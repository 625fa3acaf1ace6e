"""DomainDataset: labelled samples of many patients, column by column, from arrays or from a folder."""

from __future__ import annotations

import hashlib
import math
import secrets
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from manydg.data.columns import (
    CATEGORIES,
    ArrayLike,
    Column,
    Frame,
    FrameEncoding,
    Ragged,
    TableRoles,
    as_frame,
    check_column,
    encode_column,
    encode_patients,
    encode_targets,
    inputs_of,
    nest,
    plan_encoding,
    signal_settings,
    take,
    times_in,
    unnest,
)
from manydg.data.info import ArrayFile, DatasetInfo, Provenance, TargetSpec, combine_checksums, offsets_file
from manydg.data.storage import METADATA, DatasetWriter, Verify, read_arrays, read_description
from manydg.data.timeline import clock_of
from manydg.errors import DataError, StorageError
from manydg.files import Json, ParsedJson

if TYPE_CHECKING:
    import polars as pl


@dataclass(frozen=True)
class Batch:
    """Rows gathered from a dataset.

    In a batch of pairs, row ``i`` and row ``i + pairs`` are two samples of one patient for every ``i < pairs``; rows
    from ``2 * pairs`` on are unpaired.
    """

    inputs: dict[str, Column]
    targets: Tensor
    domains: Tensor
    pairs: int = 0

    def __len__(self) -> int:
        return int(self.domains.shape[0])

    def to(self, device: torch.device | str) -> Batch:
        """The same rows on a device."""
        inputs = {name: column.to(device) for name, column in self.inputs.items()}
        return replace(self, inputs=inputs, targets=self.targets.to(device), domains=self.domains.to(device))


@dataclass(frozen=True, eq=False)
class DomainDataset:
    """Samples of many patients: named input columns, targets, and the patient of each sample.

    Build one with :func:`from_arrays`, :func:`manydg.open_dataset` or :class:`manydg.data.storage.DatasetWriter`.

    Parameters
    ----------
    columns : dict of str to Tensor or Ragged
        Input columns.
    targets : Tensor
        ``(rows,)`` or ``(rows, K)``, as ``target`` says.
    target : TargetSpec
    domains : Tensor
        ``(rows,)`` int64 patient codes, 0 to ``len(patients) - 1``.
    patients : array of str
        The patients' names in code order.
    times : Tensor, optional
        ``(rows,)`` float64: when each sample was taken, on its patient's own clock.
    info : DatasetInfo
        Metadata: vocabularies, settings such as sampling rates, provenance, cohort flow.
    metadata : dict of str to Tensor
        Values of each sample that no model sees: ``onset`` (``(rows,)`` float64, when the event of ``info.event``
        begins in the sample's session, NaN where it does not) and ``subgroups`` (``(rows, columns)`` codes of
        ``info.subgroups``).
    rows : Tensor, optional
        The rows of ``columns`` that this dataset selects; ``None`` for all, in order. Targets, domains and times are
        already those of the selection.
    """

    columns: dict[str, Column]
    targets: Tensor
    target: TargetSpec
    domains: Tensor
    patients: npt.NDArray[np.str_]
    times: Tensor | None = None
    info: DatasetInfo = field(default_factory=DatasetInfo)
    metadata: dict[str, Tensor] = field(default_factory=dict)
    rows: Tensor | None = None
    stored_hash: str | None = None
    pseudonym_key: str = ""

    def __post_init__(self) -> None:
        count = len(self.domains)
        if not self.columns:
            raise DataError("a dataset needs at least one input column")
        for name, column in self.columns.items():
            check_column(name, column)
            if self.rows is None and len(column) != count:
                raise DataError(f"column '{name}' has {len(column)} rows, but there are {count} patient ids")
        if len(self.targets) != count:
            raise DataError(f"there are {len(self.targets)} targets, but {count} patient ids")
        if self.times is not None and len(self.times) != count:
            raise DataError(f"there are {len(self.times)} times, but {count} patient ids")
        for name, values in self.metadata.items():
            if len(values) != count:
                raise DataError(f"metadata '{name}' has {len(values)} rows, but there are {count} patient ids")
        if not self.pseudonym_key:
            object.__setattr__(self, "pseudonym_key", secrets.token_hex(32))

    def __len__(self) -> int:
        return int(self.domains.shape[0])

    def __repr__(self) -> str:
        return (
            f"DomainDataset({len(self)} samples of {self.n_patients} patients, "
            f"inputs {', '.join(self.columns)}; {self.target})"
        )

    @property
    def n_patients(self) -> int:
        """Number of patients."""
        return len(self.patients)

    @property
    def device(self) -> torch.device:
        """Where the columns are."""
        return self.domains.device

    def sites(self) -> npt.NDArray[np.str_] | None:
        """The site of each patient, in code order; ``None`` unless it is known for all."""
        known = self.info.sites
        if not known or any(name not in known for name in self.patients.tolist()):
            return None
        return np.array([known[name] for name in self.patients.tolist()], dtype=str)

    def take(self, indices: Tensor, pairs: int = 0) -> Batch:
        """Gather samples by position: one vectorised gather per column, on the data's device."""
        stored = indices if self.rows is None else self.rows[indices]
        inputs = {name: take(column, stored) for name, column in self.columns.items()}
        return Batch(inputs, self.targets[indices], self.domains[indices], pairs)

    def column(self, name: str) -> Column:
        """One whole input column, gathered if this dataset is a selection."""
        column = self.columns[name]
        return column if self.rows is None else take(column, self.rows)

    def select(self, indices: Tensor | npt.NDArray[np.integer[Any]]) -> DomainDataset:
        """The samples at these positions (or where a mask is true), as a view.

        Patients without a sample are dropped and codes made dense.
        """
        index = torch.as_tensor(indices, device=self.device)
        if index.dtype == torch.bool:
            if len(index) != len(self):
                raise DataError(f"a mask of {len(index)} entries for {len(self)} samples")
            index = torch.nonzero(index).squeeze(1)
        index = index.to(torch.int64)
        present, codes = torch.unique(self.domains[index], return_inverse=True)
        return replace(
            self,
            targets=self.targets[index],
            domains=codes,
            patients=self.patients[present.cpu().numpy()],
            times=None if self.times is None else self.times[index],
            metadata={name: values[index] for name, values in self.metadata.items()},
            rows=index if self.rows is None else self.rows[index],
            stored_hash=None,
        )

    def subset(self, patients: Iterable[str]) -> DomainDataset:
        """All samples of the named patients."""
        names = np.asarray(list(patients), dtype=str)
        unknown = np.setdiff1d(names, self.patients)
        if len(unknown):
            raise DataError(f"{len(unknown)} of the {len(names)} patients asked for are not in this dataset")
        chosen = torch.as_tensor(np.isin(self.patients, names), device=self.device)
        return self.select(torch.nonzero(chosen[self.domains]).squeeze(1))

    def compact(self) -> DomainDataset:
        """The same samples, copied into new columns."""
        if self.rows is None:
            return self
        return replace(self, columns={name: self.column(name) for name in self.columns}, rows=None)

    def to(self, device: torch.device | str) -> DomainDataset:
        """The dataset with all of its data on a device."""
        whole = self.compact()
        return replace(
            whole,
            columns={name: column.to(device) for name, column in whole.columns.items()},
            targets=whole.targets.to(device),
            domains=whole.domains.to(device),
            times=None if whole.times is None else whole.times.to(device),
            metadata={name: values.to(device) for name, values in whole.metadata.items()},
        )

    def content_hash(self) -> str:
        """Sixteen hex digits that change when any value, label, patient or name in the dataset does."""
        if self.stored_hash is not None:
            return self.stored_hash
        files = {}
        for key, array in arrays_of(self).items():
            digest = hashlib.blake2b(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data, digest_size=16)
            files[key] = ArrayFile(array.nbytes, array.dtype.str, array.shape, digest.hexdigest())
        return combine_checksums(files, self.target, self.info.event)

    def learnable(self, rows: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Those of some rows that a model may be trained on: for an event to predict, only those before onset."""
        event = self.info.event
        if event is None or not event.foresee:
            return rows
        assert self.times is not None
        # NaN, no onset, is never reached.
        begun: npt.NDArray[np.bool_] = (self.times >= self.metadata["onset"]).cpu().numpy()
        return rows[~begun[rows]]

    def scored(self) -> DomainDataset:
        """The samples that a model is scored on: for an event to predict, those before onset."""
        rows = np.arange(len(self))
        kept = self.learnable(rows)
        return self if len(kept) == len(rows) else self.select(kept)

    def pseudonyms(self) -> list[str]:
        """An alias for each patient, by the dataset's random key; without the key it identifies nobody."""
        secret = bytes.fromhex(self.pseudonym_key)
        # Eight bytes: a million patients get a million different aliases.
        digests = (hashlib.blake2b(name.encode(), key=secret, digest_size=8) for name in self.patients.tolist())
        return [f"P-{digest.hexdigest()}" for digest in digests]

    def save(self, folder: str | Path, *, overwrite: bool = False) -> Path:
        """Write the dataset to a folder that :func:`manydg.open_dataset` opens; all or nothing."""
        codes, columns = self.domains.cpu().numpy(), {name: self.column(name) for name in self.columns}
        with DatasetWriter(folder, self.target, self.info, overwrite=overwrite) as writer:
            writer.append_all(
                columns, self.targets, codes, self.patients, self.times, self.pseudonym_key, self.metadata
            )
        return Path(folder)


def from_arrays(
    inputs: ArrayLike | Mapping[str, ArrayLike | Ragged] | Frame,
    targets: ArrayLike | Sequence[Any] | str,
    patients: ArrayLike | Sequence[Any] | str,
    *,
    kind: str | None = None,
    names: Sequence[str] | None = None,
    times: ArrayLike | str | None = None,
    missing: bool = False,
    rate: float | None = None,
    channels: Sequence[str] | None = None,
    categorical: Sequence[str] = (),
    info: DatasetInfo | ParsedJson | None = None,
) -> DomainDataset:
    """Build a dataset from arrays, or from a table of polars or pandas.

    Parameters
    ----------
    inputs : array ``(rows, ...)``, dict of name to array or Ragged, or DataFrame
        A single array becomes the column ``x``, or ``signal`` with a rate. The columns of a table become features as
        those of ``manydg prepare table`` do: text becomes categories, a date of birth an age.
    targets : array
        Class labels of any kind or values ``(rows,)``, votes or label indicators ``(rows, K)``. Of a table, also the
        name of a column.
    patients : array ``(rows,)``
        The patient of each sample. Of a table, also the name of a column.
    kind : {"classes", "binary", "multilabel", "votes", "regression"}, optional
        Target kind; ``regression`` predicts the number itself. Without it, ``(rows, K)`` of 0 and 1 is multi-label,
        other ``(rows, K)`` are votes, two labels that mean 0 and 1 (or false and true, no and yes) are binary, and
        anything else is classes.
    names : sequence of str, optional
        Class names in code order; without them, the sorted labels that occur. Of a regression target, its one name.
    times : array ``(rows,)``, optional
        When each sample was taken. Of a table, also the name of a column.
    missing : bool
        Whether NaN is allowed (a value that was not measured). Infinity never is.
    rate : float, optional
        Samples per second, if the inputs are signals ``(rows, channels, samples)`` in microvolts.
    channels : sequence of str, optional
        Names of their channels.
    categorical : sequence of str
        Columns of a table that look like numbers but are categories.
    info : DatasetInfo, or a dict of its entries, optional
        Metadata: vocabularies, settings, provenance.

    Examples
    --------
    >>> data = from_arrays(np.zeros((4, 2)), ["n2", "wake", "n2", "rem"], [7, 7, 9, 9])
    >>> data
    DomainDataset(4 samples of 2 patients, inputs x; classes of 3)
    """
    known, frame = DatasetInfo.of(info), as_frame(inputs)
    if missing:
        # A backbone that can take missing values is chosen.
        known = replace(known, settings={**known.settings, "missing": True})
    if frame is not None:
        roles = TableRoles.of(frame, targets, patients, times)
        targets, patients, times = roles.targets, roles.patients, roles.times
        inputs, known = _encode_frame(frame, roles, categorical, known)
        if kind == "regression" and names is None and "target" in roles.named:
            names = [roles.named["target"]]
    elif bad := [role for role, given in (("targets", targets), ("patients", patients)) if isinstance(given, str)]:
        raise DataError(f"{bad[0]} is a name, which only a table with named columns has: give an array")
    named = inputs if isinstance(inputs, Mapping) else {"x" if rate is None else "signal": cast("ArrayLike", inputs)}
    columns = {name: encode_column(name, column, missing=missing) for name, column in named.items()}
    if rate is not None:
        if not isinstance(signal := columns.get("signal"), Tensor):
            raise DataError(f"a rate is of the input 'signal'; the inputs are {sorted(columns)}")
        known = replace(known, settings={**known.settings, **signal_settings(signal.shape, rate, channels)})
    elif channels is not None:
        raise DataError("channels are of signals: give their sampling rate too (rate=)")
    codes, who = encode_patients(patients)
    values, spec = encode_targets(targets, kind, names)
    when = None if times is None else torch.from_numpy(clock_of(times))
    return DomainDataset(columns, values, spec, codes, who, when, known)


def _encode_frame(
    frame: pl.DataFrame, roles: TableRoles, categorical: Sequence[str], info: DatasetInfo
) -> tuple[dict[str, ArrayLike], DatasetInfo]:
    """The features of a table as input columns, and the info that new tables are read by."""
    features = [name for name in frame.columns if name not in roles.named.values()]
    if unknown := sorted(set(categorical) - set(features)):
        raise DataError(f"the table has no features {unknown} to take as categories; it has {features[:12]}")
    if not features:
        raise DataError("the table has no column besides targets, patients and times: there are no features")
    who = encode_patients(roles.patients)[0].numpy()
    encoding, _ = plan_encoding(frame, features, who, categorical=categorical, time=roles.named.get("time"))
    columns = {name: cast("ArrayLike", column) for name, column in inputs_of(frame, encoding).items()}
    options: dict[str, Json] = {role: name for role, name in roles.named.items() if role != "target"}
    made = info.provenance or Provenance("table", options=options)
    return columns, replace(info, settings={**info.settings, **encoding.settings()}, provenance=made)


def unlabelled(
    inputs: ArrayLike | Mapping[str, ArrayLike | Ragged] | Frame,
    schema: InputSchema,
    target: TargetSpec,
    roles: Mapping[str, str | None],
    *,
    patients: ArrayLike | Sequence[Any] | None = None,
    times: ArrayLike | None = None,
) -> DomainDataset:
    """New samples for a model of a schema; their targets mean nothing.

    - ``inputs``: As :func:`from_arrays` takes them.
    - ``roles``: Columns of a table by what they are for: ``patient``, ``time``, ``session``.
    - ``patients``, ``times`` ``(rows,)``: Instead of those columns; without any patients each sample is one of its own.
    """
    missing, frame = bool(schema.settings.get("missing")), as_frame(inputs)
    if frame is not None:
        if "features" not in schema.settings:
            raise DataError("the model was trained on arrays without names of features: give an array, not a table")
        encoding = FrameEncoding.of(schema.settings)
        if absent := [name for name in encoding.columns() if name not in frame.columns]:
            raise DataError(f"the table lacks {len(absent)} features that the model was trained on: {absent[:5]}")
        patient, time, session = (roles.get(role) for role in ("patient", "time", "session"))
        if patients is None and patient in frame.columns:
            patients = frame[str(patient)].to_list()
        if times is None and time in frame.columns:
            if session is not None:
                raise DataError(
                    f"times in '{time}' are counted within the sessions of '{session}': give times that run over all "
                    "sessions of a patient (times=), or use 'manydg predict' on the file"
                )
            times = times_in(frame[str(time)])
        inputs = cast("Mapping[str, ArrayLike]", inputs_of(frame, encoding))
    column = "signal" if "signal" in schema.columns else "x"
    named = inputs if isinstance(inputs, Mapping) else {column: cast("ArrayLike", inputs)}
    columns = {name: encode_column(name, values, missing=missing) for name, values in named.items()}
    count = len(next(iter(columns.values()))) if columns else 0
    codes, names = encode_patients(np.arange(count) if patients is None else patients)
    targets = torch.zeros((count, target.size) if target.kind in ("votes", "multilabel") else count)
    when = None if times is None else torch.from_numpy(clock_of(times))
    info = DatasetInfo(settings={key: value for key, value in schema.settings.items() if key not in _BY_TRAINING})
    return DomainDataset(columns, targets, target, codes, names, when, info)


def open_dataset(folder: str | Path, *, verify: Verify = "auto") -> DomainDataset:
    """Open a dataset folder, memory-mapped.

    Parameters
    ----------
    folder : path
    verify : {"auto", "full", "sizes"}
        ``full`` reads every byte against its checksum; ``sizes`` only compares file sizes; ``auto`` is ``full`` up to
        one gigabyte.
    """
    path = Path(folder)
    description = read_description(path)
    arrays = read_arrays(path, description.files, verify)
    names = arrays.pop("patients")
    tensors = {key: torch.from_numpy(array) for key, array in arrays.items()}
    domains = tensors["domains"]
    # The checksums of a large folder are not compared whenever it is opened.
    if len(domains) and not 0 <= int(domains.min()) <= int(domains.max()) < len(names):
        raise StorageError(f"{path / 'domains.npy'} is damaged, it names patients there are not: prepare it again")
    columns = {}
    for name, nesting in description.columns.items():
        levels = [tensors[offsets_file(name, level)] for level in range(nesting)]
        columns[name] = nest(levels, tensors[f"inputs.{name}"])
    return DomainDataset(
        columns=columns,
        targets=tensors["targets"],
        target=description.target,
        domains=domains,
        patients=np.array(names),
        times=tensors.get("times"),
        metadata={key.removeprefix(METADATA): values for key, values in tensors.items() if key.startswith(METADATA)},
        info=description.info,
        stored_hash=description.content_hash,
        pseudonym_key=description.pseudonym_key,
    )


def arrays_of(dataset: DomainDataset) -> dict[str, npt.NDArray[Any]]:
    """Every array a dataset consists of, under the name it has on disk."""
    arrays: dict[str, npt.NDArray[Any]] = {}
    for name in dataset.columns:
        levels, items = unnest(dataset.column(name))
        for level, offsets in enumerate(levels):
            arrays[offsets_file(name, level)] = offsets.cpu().numpy()
        arrays[f"inputs.{name}"] = items.cpu().numpy()
    arrays["targets"] = dataset.targets.cpu().numpy()
    arrays["domains"] = dataset.domains.cpu().numpy()
    # Through a list, so that the names' type is as wide as the longest, as it is on disk.
    arrays["patients"] = np.array(dataset.patients.tolist(), dtype=np.str_)
    if dataset.times is not None:
        arrays["times"] = dataset.times.cpu().numpy()
    arrays |= {f"{METADATA}{name}": values.cpu().numpy() for name, values in dataset.metadata.items()}
    return arrays


# The input columns a model was built for, as JSON values: enough to rebuild a backbone without the data.


TRUST = "context_weight"
"""The column with the weight of a patient's own statistics, from 0 to 1, ``(rows, 1)``. It weighs other columns and is
no measurement: tables of measurements leave it out."""
CONTEXT = "context"
"""The prefix of the names of columns that hold patient context."""
_LARGEST_SIZE = 1 << 28
"""Values of a sample, or words of a vocabulary, beyond which a model's description is not believed."""
_BY_TRAINING = frozenset({"context", "sequence"})
"""Settings that a training adds to those of its data."""
_OF_THE_DATA = frozenset({"session_gap"})
"""Settings that describe one dataset alone: new data may have others."""


@dataclass(frozen=True)
class ColumnSchema:
    """One input column: element type, shape of one item, and the number of ragged levels above the items."""

    dtype: str
    shape: tuple[int, ...]
    nesting: int = 0

    def __str__(self) -> str:
        lists = f" in lists {self.nesting} deep" if self.nesting else ""
        return f"{' x '.join(map(str, self.shape)) or 'one'} {self.dtype} a sample{lists}"


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
        others = {TRUST, CATEGORIES} if self.categories() else {TRUST}
        return {name: column for name, column in self.columns.items() if name not in others}

    def categories(self) -> dict[str, int]:
        """The number of levels of each position of the column of categories, by the feature's name."""
        levels = self.settings.get(CATEGORIES)
        if not isinstance(levels, dict) or CATEGORIES not in self.columns:
            return {}
        return {name: len(words) for name, words in levels.items() if isinstance(words, list)}

    def without_context(self) -> InputSchema:
        """The same schema without the columns of patient context."""
        return replace(self, columns={n: column for n, column in self.columns.items() if not n.startswith(CONTEXT)})

    def to_json(self) -> dict[str, Json]:
        """As :meth:`from_json` reads it."""
        columns: dict[str, Json] = {
            name: {"dtype": column.dtype, "shape": list(column.shape), "nesting": column.nesting}
            for name, column in self.columns.items()
        }
        return {"columns": columns, "sizes": dict(self.sizes), "settings": dict(self.settings)}

    @staticmethod
    def from_json(value: ParsedJson) -> InputSchema:
        """A schema from JSON values; a plain error where they describe no columns."""
        columns = {
            name: ColumnSchema(str(entry["dtype"]), tuple(entry["shape"]), entry["nesting"])
            for name, entry in value["columns"].items()
        }
        for name, column in columns.items():
            if not isinstance(getattr(torch, column.dtype, None), torch.dtype):
                raise ValueError(f"input '{name}' is of the unknown type '{column.dtype}'")
            counts = [*column.shape, column.nesting]
            if not all(_is_size(count) for count in counts) or math.prod(column.shape) > _LARGEST_SIZE:
                raise ValueError(f"input '{name}' has the impossible shape {list(column.shape)}")
        if not columns:
            raise ValueError("there are no inputs")
        if bad := [name for name, size in value["sizes"].items() if not _is_size(size)]:
            raise ValueError(f"'{bad[0]}' has the impossible size {value['sizes'][bad[0]]!r}")
        return InputSchema(columns, value["sizes"], dict(value["settings"]))

    def check(self, given: InputSchema) -> None:
        """Raise if data of another schema are given to a model of this one."""
        missing = sorted(set(self.columns) - set(given.columns))
        extra = sorted(set(given.columns) - set(self.columns))
        if missing or extra:
            raise DataError(
                f"the model was trained on the inputs {sorted(self.columns)}; "
                f"missing here: {missing or 'none'}, not known to it: {extra or 'none'}"
            )
        for key, value in self.settings.items():
            if key in given.settings and given.settings[key] != value and key != CATEGORIES:
                raise DataError(_difference(key, given.settings[key], value))
        for name, column in self.columns.items():
            if given.columns[name] != column:
                raise DataError(f"input '{name}' is {given.columns[name]} here, but the model was trained on {column}")
        for key, size in self.sizes.items():
            if key in given.sizes and given.sizes[key] != size:
                raise DataError(f"'{key}' has {given.sizes[key]} entries here, but the model was trained on {size}")
        if given.settings.get("missing") and not self.settings.get("missing"):
            raise DataError("some values are missing here, but the model was trained on complete data: fill them in")
        if self.settings.get(CATEGORIES) != given.settings.get(CATEGORIES, self.settings.get(CATEGORIES)):
            raise DataError(
                "the categories have other levels here than in what the model was trained on: predict from the table "
                "itself ('manydg predict RUN TABLE'), which is encoded as the model's"
            )


def _is_size(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= _LARGEST_SIZE


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
