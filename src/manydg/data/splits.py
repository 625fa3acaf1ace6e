"""Splits by patient: no patient is on two sides, and the same seed gives the same split on every machine.

A split that is whole by patient may still leak, where one recording goes by two patients' names: :func:`find_overlap`
reports samples with identical inputs on different sides.
"""

from __future__ import annotations

import hashlib
import math
import warnings
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from manydg.data.columns import Column, Ragged, encode_patients
from manydg.data.dataset import DomainDataset
from manydg.errors import ConfigError, DataError, ManyDGWarning, StorageError
from manydg.files import read_json, write_json

SIDES = ("train", "val", "test")
SPLIT_SCHEMA = 1

EXAMPLES = 5
_CHUNK_BYTES = 1 << 22
_MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)

Indices = npt.NDArray[np.int64]
Hashes = npt.NDArray[np.uint64]
Domains = npt.NDArray[Any] | Tensor | Sequence[Any] | DomainDataset
"""The patient of each sample: one id per sample, or a dataset."""


@dataclass(frozen=True, eq=False)
class Split:
    """Samples for training, validation and test; it unpacks as ``train, val, test``.

    Attributes
    ----------
    train, val, test : int64 arrays
        Positions of samples, in ascending order.
    """

    train: Indices
    val: Indices
    test: Indices
    _codes: Indices = field(repr=False)
    _names: npt.NDArray[np.str_] = field(repr=False)

    def __iter__(self) -> Iterator[Indices]:
        return iter((self.train, self.val, self.test))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Split):
            return NotImplemented
        return all(np.array_equal(mine, theirs) for mine, theirs in zip(self, other, strict=True))

    def __hash__(self) -> int:
        return hash(tuple(side.tobytes() for side in self))

    def __repr__(self) -> str:
        counts = (f"{side} {len(getattr(self, side))} of {len(self.patients(side))} patients" for side in SIDES)
        return f"Split({', '.join(counts)})"

    def patients(self, side: str) -> npt.NDArray[np.str_]:
        """Names of the patients on a side, as :meth:`DomainDataset.subset` takes them."""
        if side not in SIDES:
            raise ConfigError(f"a split has the sides {', '.join(SIDES)}; not '{side}'")
        rows: Indices = getattr(self, side)
        return self._names[np.unique(self._codes[rows])]

    def save(self, path: str | Path, dataset: DomainDataset) -> Path:
        """Write the split as JSON, each patient under a pseudonym; all or nothing.

        Parameters
        ----------
        path : path
        dataset : DomainDataset
            The one that was split; :func:`load_split` accepts no other.
        """
        check_split(self, dataset)
        pseudonyms = np.array(dataset.pseudonyms())
        codes = dataset.domains.cpu().numpy()
        sides = {side: pseudonyms[np.unique(codes[getattr(self, side)])].tolist() for side in SIDES}
        if _rebuild(sides, dataset, Path(path)) != self:
            raise DataError("a saved split holds whole patients: some patient's samples are only partly on a side")
        content = {"schema": SPLIT_SCHEMA, "dataset_hash": dataset.content_hash(), "samples": len(dataset), **sides}
        write_json(Path(path), content)
        return Path(path)


def split_patients(
    domains: Domains, ratios: tuple[float, float, float] = (0.8, 0.1, 0.1), seed: int = 0, labels: Indices | None = None
) -> Split:
    """Split samples into training, validation and test so that each patient is on one side only.

    Patients are ranked by a hash of the seed and their id, so that the split depends on nothing else: not on the order
    of rows, the platform, ``PYTHONHASHSEED`` or the version of any library.

    Parameters
    ----------
    domains : array, Tensor or DomainDataset
        One patient id (number or text) per sample.
    ratios : three numbers
        Shares of the patients (not of the samples), rounded; a side with a share gets at least one patient.
    seed : int
    labels : array ``(patients,)`` of int, optional
        A label per patient, in the order of their codes (:func:`patient_labels`), to stratify by. The sides are as
        large as without, and each has its share of the patients of every label, to the nearest patient or two.

    Returns
    -------
    Split

    Examples
    --------
    >>> train, val, test = split_patients(np.repeat(np.arange(10), 3), seed=1)
    >>> len(train), len(val), len(test)
    (24, 3, 3)
    """
    codes, names = _patients_of(domains)
    sizes = _sizes(len(names), ratios)
    if labels is None:
        return _split_from_sides(np.repeat(np.arange(len(SIDES)), sizes), rank_patients(names, seed), codes, names)
    return _split_from_sides(_spread(sizes), rank_patients(names, seed, labels), codes, names)


def patient_labels(dataset: DomainDataset) -> Indices:
    """The label of each patient for stratified splits, ``(patients,)``: the class that most of the samples have, the
    first of several; of a binary target, whether any sample is positive.

    Examples
    --------
    >>> from manydg.data.dataset import from_arrays
    >>> x, who = torch.arange(6.0)[:, None], ["a", "a", "a", "b", "b", "b"]
    >>> patient_labels(from_arrays(x, [0, 1, 0, 0, 0, 0], who, kind="binary")).tolist()
    [1, 0]
    >>> patient_labels(from_arrays(x, [0, 1, 0, 2, 1, 2], who, kind="classes")).tolist()
    [0, 2]
    """
    if dataset.target.kind == "multilabel":
        raise ConfigError("patients of a multi-label target have no single label to stratify by: leave --stratify out")
    if dataset.target.kind == "regression":
        raise ConfigError("a regression target has no classes to stratify patients by: leave --stratify out")
    targets, codes = dataset.targets.cpu(), dataset.domains.cpu().numpy()
    classes = (targets.argmax(dim=1) if targets.ndim == 2 else targets).numpy().astype(np.int64)
    counts = np.zeros((dataset.n_patients, dataset.target.size), np.int64)
    np.add.at(counts, (codes, classes), 1)
    return (counts[:, 1] > 0).astype(np.int64) if dataset.target.kind == "binary" else counts.argmax(axis=1)


def split_named(domains: Domains, *, train: Iterable[Any], val: Iterable[Any], test: Iterable[Any]) -> Split:
    """The split with these patients for training, validation and test; all others are left out.

    - ``domains``: One patient id per sample.
    """
    codes, names = _patients_of(domains)
    rows = []
    for side, given in zip(SIDES, (train, val, test), strict=True):
        wanted = sorted({str(patient) for patient in given})
        chosen = np.isin(names, wanted)
        if chosen.sum() != len(wanted):
            raise DataError(f"some of the {len(wanted)} patients named for {side} are not in the data")
        rows.append(np.flatnonzero(chosen[codes]))
    split = Split(rows[0], rows[1], rows[2], codes, names)
    check_split(split, domains)
    return split


def patient_folds(domains: Domains, folds: int = 5, seed: int = 0, labels: Indices | None = None) -> list[Split]:
    """Splits for cross-validation by patient.

    The ranked patients (see :func:`split_patients`) are divided into ``folds`` groups of nearly equal size. Split ``i``
    tests on group ``i``, validates on the next one (after the last comes the first) and trains on the rest, so that
    each patient is tested exactly once and validates exactly once.

    Parameters
    ----------
    domains : array, Tensor or DomainDataset
        One patient id per sample.
    folds : int
        At least 3: one group to test, one to validate, one to train.
    seed : int
    labels : array ``(patients,)`` of int, optional
        As for :func:`split_patients`: patients of each label are spread over the groups.

    Returns
    -------
    list of Split
    """
    if folds < 3:
        raise ConfigError(f"{folds} folds leave no patients to train on after test and validation: use 3 or more")
    codes, names = _patients_of(domains)
    if len(names) < folds:
        raise DataError(f"{folds} folds need at least {folds} patients; there are {len(names)}")
    ranking = rank_patients(names, seed, labels)
    group = np.arange(len(names)) % folds
    splits = []
    for fold in range(folds):
        sides = np.where(group == fold, 2, np.where(group == (fold + 1) % folds, 1, 0))
        splits.append(_split_from_sides(sides, ranking, codes, names))
    return splits


def split_sites(dataset: DomainDataset, ratios: tuple[float, float, float], seed: int) -> Split:
    """The split in which whole sites train, validate and test; shares are of the sites."""
    return _of_patients(split_patients(_site_of_sample(dataset), ratios, seed), dataset)


def site_folds(dataset: DomainDataset, folds: int, seed: int = 0) -> list[Split]:
    """Splits for cross-validation by site; with as many folds as sites it is leave-one-site-out.

    Sites are dealt as patients are in :func:`patient_folds`.
    """
    sites = _site_of_sample(dataset)
    count = len(np.unique(sites))
    if count < folds:
        raise DataError(f"{folds} folds need at least {folds} sites; there are {count}")
    return [_of_patients(split, dataset) for split in patient_folds(sites, folds, seed)]


def _site_of_sample(dataset: DomainDataset) -> npt.NDArray[np.str_]:
    sites = dataset.sites()
    if sites is None:
        raise DataError(
            "the dataset does not say of which site its patients are: prepare it with the column of the site "
            "('manydg prepare table ... --site COL'), or split by patient"
        )
    if (count := len(np.unique(sites))) < 3:
        raise DataError(f"the dataset has {count} site(s): training, validation and test need one each at least")
    of_sample: npt.NDArray[np.str_] = sites[dataset.domains.cpu().numpy()]
    return of_sample


def _of_patients(split: Split, dataset: DomainDataset) -> Split:
    """The same samples on the same sides, as a split of the dataset's patients."""
    return Split(split.train, split.val, split.test, *_patients_of(dataset))


def load_split(path: str | Path, dataset: DomainDataset) -> Split:
    """Read a split that :meth:`Split.save` wrote, for the dataset it was made of."""
    file = Path(path)
    content = read_json(file, remedy="make it again", missing=f"there is no split at {file}")
    try:
        sides = {side: [str(name) for name in content[side]] for side in SIDES}
        version, split_hash = content["schema"], content["dataset_hash"]
    except (KeyError, TypeError):
        raise StorageError(f"{file} is damaged or not a split: make it again") from None
    if version != SPLIT_SCHEMA:
        raise StorageError(f"{file} has schema version {version}, this program reads {SPLIT_SCHEMA}: make it again")
    if split_hash != dataset.content_hash():
        raise DataError(
            f"{file} is a split of another dataset (content {split_hash}, this one is {dataset.content_hash()}): "
            "split this one, or open the dataset that the split was made of"
        )
    return _rebuild(sides, dataset, file)


def check_split(split: Split, domains: Domains) -> None:
    """Raise if a position does not exist or occurs twice, or if a patient is on two sides.

    The patient is named by pseudonym where ``domains`` is a dataset, and by two of its rows in any case.
    """
    codes, names = _patients_of(domains)
    every = np.concatenate(list(split))
    if len(every) and (every.min() < 0 or every.max() >= len(codes)):
        wrong = every.min() if every.min() < 0 else every.max()
        raise DataError(f"the split names sample {wrong}, but there are {len(codes)} samples: it is of other data")
    present = np.zeros((len(SIDES), len(names)), dtype=bool)
    for number, side in enumerate(split):
        present[number, codes[side]] = True
    doubled = np.flatnonzero(present.sum(axis=0) > 1)
    if len(doubled):
        patient = int(doubled[0])
        sides = [SIDES[number] for number in np.flatnonzero(present[:, patient])]
        rows = [int(getattr(split, side)[codes[getattr(split, side)] == patient][0]) for side in sides]
        alias = f"patient {domains.pseudonyms()[patient]}" if isinstance(domains, DomainDataset) else "a patient"
        sides_and_rows = " and ".join(f"{side} (sample {row})" for side, row in zip(sides, rows, strict=True))
        raise DataError(f"{alias} is on two sides of the split, {sides_and_rows}: split by patient with split_patients")
    if len(np.unique(every)) != len(every):
        raise DataError("the split names some samples twice on one side: split by patient with split_patients")


def _patients_of(domains: Domains) -> tuple[Indices, npt.NDArray[np.str_]]:
    """A code per sample, and the patients' names in code order."""
    if isinstance(domains, DomainDataset):
        return domains.domains.cpu().numpy(), domains.patients
    codes, names = encode_patients(domains.cpu() if isinstance(domains, Tensor) else domains)
    return codes.numpy(), names


def rank_patients(names: npt.NDArray[np.str_], seed: int, labels: Indices | None = None) -> Indices:
    """Patient codes in the order of a keyed hash of their names; those of one label together, where there are any."""
    key = str(int(seed)).encode()
    if len(key) > hashlib.blake2b.MAX_KEY_SIZE:
        raise ConfigError(f"the seed {seed} is too long: use a smaller number")
    digests = [hashlib.blake2b(name.encode(), key=key, digest_size=16).digest() for name in names.tolist()]
    ranking = np.array(sorted(range(len(names)), key=digests.__getitem__), dtype=np.int64)
    return ranking if labels is None else ranking[np.argsort(labels[ranking], kind="stable")]


def _spread(sizes: Indices) -> Indices:
    """The side of each rank, so that every run of ranks has its share of each side: the side that is furthest behind.

    Examples
    --------
    >>> _spread(np.array([3, 1, 1])).tolist()
    [0, 1, 0, 2, 0]
    """
    sides, given = [], np.zeros(len(sizes))
    for rank in range(1, int(sizes.sum()) + 1):
        sides.append(int(np.argmax(sizes * rank / sizes.sum() - given)))
        given[sides[-1]] += 1
    return np.array(sides, dtype=np.int64)


def _sizes(patients: int, ratios: Sequence[float]) -> Indices:
    """Patients per side by the largest remainder, none of them zero where its share is not."""
    shares = np.asarray(ratios, dtype=np.float64)
    if shares.shape != (3,) or not np.isfinite(shares).all() or (shares < 0).any() or shares.sum() <= 0:
        raise ConfigError(f"ratios are three shares for train, val and test, none negative; got {tuple(ratios)}")
    needed = int((shares > 0).sum())
    if patients < needed:
        raise DataError(
            f"a split into {needed} sides needs at least {needed} patients; there {'is' if patients == 1 else 'are'} "
            f"{patients}: give more patients, or a share of 0 to a side"
        )
    exact = shares / shares.sum() * patients
    sizes: Indices = np.floor(exact + 1e-9).astype(np.int64)
    by_remainder = np.argsort(-(exact - sizes).round(9), kind="stable")
    sizes[by_remainder[: patients - sizes.sum()]] += 1
    for side in np.flatnonzero((shares > 0) & (sizes == 0)):
        sizes[np.argmax(sizes)] -= 1
        sizes[side] = 1
    return sizes


def _split_from_sides(side_of_rank: Indices, ranking: Indices, codes: Indices, names: npt.NDArray[np.str_]) -> Split:
    side_of_patient = np.empty(len(names), dtype=np.int64)
    side_of_patient[ranking] = side_of_rank
    side_of_sample = side_of_patient[codes]
    train, val, test = (np.flatnonzero(side_of_sample == number) for number in range(len(SIDES)))
    return Split(train, val, test, codes, names)


def _rebuild(sides: dict[str, list[str]], dataset: DomainDataset, file: Path) -> Split:
    code_of = {alias: code for code, alias in enumerate(dataset.pseudonyms())}
    side_of_patient = np.full(dataset.n_patients, -1, dtype=np.int64)
    for number, side in enumerate(SIDES):
        for alias in sides[side]:
            if alias not in code_of:
                raise DataError(
                    f"{file}: patient {alias} is not in this dataset, or the dataset was prepared anew and lost the "
                    "key of its pseudonyms: take the folder it was made from, or make the split again"
                )
            if side_of_patient[code_of[alias]] not in (-1, number):
                other = SIDES[side_of_patient[code_of[alias]]]
                raise DataError(f"{file}: patient {alias} is on two sides, {other} and {side}; make the split again")
            side_of_patient[code_of[alias]] = number
    codes = dataset.domains.cpu().numpy()
    side_of_sample = side_of_patient[codes]
    train, val, test = (np.flatnonzero(side_of_sample == number) for number in range(len(SIDES)))
    return Split(train, val, test, codes, dataset.patients)


@dataclass(frozen=True)
class Occurrence:
    """A sample: its side of the split, its row in the dataset and its patient's pseudonym."""

    side: str
    row: int
    patient: str

    def __str__(self) -> str:
        return f"row {self.row} of {self.patient} ({self.side})"


@dataclass(frozen=True)
class Overlap:
    """Samples that two sides of a split share; false if there are none.

    - ``samples``: Samples whose inputs also occur on another side.
    - ``contents``: How many distinct inputs these are.
    - ``examples``: The first few, each with a sample of another side.
    - ``patients``: Pseudonyms of the patients concerned.
    """

    samples: int
    contents: int
    examples: tuple[tuple[Occurrence, Occurrence], ...]
    patients: tuple[str, ...]

    def __bool__(self) -> bool:
        return self.samples > 0

    def __str__(self) -> str:
        if not self:
            return "no sample occurs on two sides of the split"
        shown = "; ".join(f"{left} = {right}" for left, right in self.examples)
        return (
            f"{self.samples} samples of {len(self.patients)} patients have inputs that also occur on another side of "
            f"the split ({self.contents} different ones): {shown}. Are some patients known by two names?"
        )


def find_overlap(dataset: DomainDataset, split: Split) -> Overlap:
    """Find samples with identical inputs on different sides of a split.

    Rows are compared by a 64-bit hash of all their input columns: among a million, two different ones are taken for one
    once in 37 million datasets. Two missing values (NaN) are equal.

    - ``split``: Of that dataset.
    """
    rows = np.concatenate(list(split))
    sides = np.repeat(np.arange(len(SIDES)), [len(side) for side in split])
    shared, group = _spanning(_hash_samples(dataset, rows), sides)
    if len(shared) == 0:
        return Overlap(0, 0, (), ())
    pseudonyms = dataset.pseudonyms()
    codes = dataset.domains.cpu().numpy()
    patients = tuple(pseudonyms[code] for code in np.unique(codes[rows[shared]]))

    def occurrence(index: int) -> Occurrence:
        row = int(rows[index])
        return Occurrence(SIDES[sides[index]], row, pseudonyms[codes[row]])

    examples = []
    _, starts = np.unique(group, return_index=True)
    for start in starts[:EXAMPLES]:
        members = shared[group == group[start]]
        other = members[sides[members] != sides[members[0]]][0]
        examples.append((occurrence(members[0]), occurrence(other)))
    return Overlap(len(shared), len(starts), tuple(examples), patients)


def warn_of_overlap(dataset: DomainDataset, split: Split) -> Overlap:
    """Warn (:class:`ManyDGWarning`) if identical samples are on two sides of a split."""
    overlap = find_overlap(dataset, split)
    if overlap:
        warnings.warn(str(overlap), ManyDGWarning, stacklevel=2)
    return overlap


def _spanning(hashes: Hashes, sides: Indices) -> tuple[Indices, Indices]:
    """Where the hashes are that occur on two sides, sorted by hash, and a number for each hash."""
    _, group = np.unique(hashes, return_inverse=True)
    seen = np.zeros((len(SIDES), group.max(initial=-1) + 1), dtype=bool)
    seen[sides, group] = True
    chosen = np.flatnonzero((seen.sum(axis=0) > 1)[group])
    order = chosen[np.argsort(group[chosen], kind="stable")]
    return order, group[order]


def _hash_samples(dataset: DomainDataset, rows: Indices) -> Hashes:
    dense = [column for column in dataset.columns.values() if isinstance(column, Tensor)]
    step = max(1, min(1 << 16, _CHUNK_BYTES // max(sum(column[:1].nbytes for column in dense), 1)))
    pieces = [_hash_rows(dataset, rows[start : start + step]) for start in range(0, len(rows), step)]
    return np.concatenate([np.zeros(0, dtype=np.uint64), *pieces])


def _hash_rows(dataset: DomainDataset, rows: Indices) -> Hashes:
    inputs = dataset.take(torch.from_numpy(rows).to(dataset.device)).inputs
    total = np.zeros(len(rows), dtype=np.uint64)
    for column in inputs.values():
        total = _mix(total * _MULTIPLIER + _hash_column(column.to("cpu")))
    return total


def _hash_column(column: Column) -> Hashes:
    """A hash of each row, ``(rows,)``; sums wrap around at 64 bits."""
    if not isinstance(column, Ragged):
        return _hash_dense(column)
    items = _hash_column(column.values)
    position = column.position_of_item().numpy().astype(np.uint64)
    running = np.concatenate([np.zeros(1, np.uint64), np.cumsum(_mix(items + position * _MULTIPLIER), dtype=np.uint64)])
    offsets = column.offsets.numpy()
    lengths = column.lengths.numpy().astype(np.uint64)
    return _mix(running[offsets[1:]] - running[offsets[:-1]] + lengths)


def _hash_dense(column: Tensor) -> Hashes:
    flat = _flat(column).numpy()
    if flat.dtype.kind == "f":
        # Values that are equal must have equal bits: minus zero becomes zero, and every NaN the same NaN.
        flat = np.where(np.isnan(flat), np.float32(np.nan), flat + np.float32(0.0)).astype(np.float32).view(np.uint32)
    bits = flat.astype(np.uint64)
    position = np.arange(1, bits.shape[1] + 1, dtype=np.uint64) * _MULTIPLIER
    # Each position has an odd multiplier of its own; the shift brings the product's well-mixed upper half down.
    bits *= _mix(position) | np.uint64(1)
    bits ^= bits >> np.uint64(32)
    return _mix(np.sum(bits, axis=1, dtype=np.uint64))


def _flat(column: Tensor) -> Tensor:
    return column.reshape(len(column), math.prod(column.shape[1:]))


def _mix(bits: Hashes) -> Hashes:
    """Spread every bit over all 64 (the finaliser of splitmix64)."""
    bits = (bits ^ (bits >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    bits = (bits ^ (bits >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed: Hashes = bits ^ (bits >> np.uint64(31))
    return mixed
