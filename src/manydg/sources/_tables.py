"""CSV tables of clinical databases: found in any case, plain or gzipped, and scanned column by column."""

from __future__ import annotations

import csv
import gzip
import io
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import polars as pl

from manydg.data.columns import parse_numbers
from manydg.errors import DataError, StorageError
from manydg.files import GZIP, broken_file, check_whole
from manydg.sources._preparing import CohortFlow, hint_at_another

_ENDINGS = (".csv", ".csv.gz")
_HEADER_LIMIT = 1 << 20


@dataclass(frozen=True)
class Table:
    """One CSV file of a database.

    - ``name``: The table's name in lower case.
    - ``columns``: Column names in lower case, and as the file spells them.
    """

    name: str
    path: Path
    columns: Mapping[str, str]

    def require(self, *names: str) -> None:
        """Raise if a column is missing."""
        for name in names:
            if name not in self.columns:
                raise DataError(
                    f"{self.path} has no column '{name}'; its columns are {', '.join(self.columns)}: "
                    f"give the table as the database distributes it"
                )

    def scan(self, *, integers: Sequence[str] = (), texts: Sequence[str] = ()) -> pl.LazyFrame:
        """The named columns as a lazy frame with lower-case names; everything else is skipped while parsing."""
        self.require(*integers, *texts)
        frame = pl.scan_csv(
            self.path, infer_schema=False, schema_overrides={self.columns[name]: pl.Int64 for name in integers}
        )
        return frame.select(pl.col(self.columns[name]).alias(name) for name in (*integers, *texts))

    def collect(self, *, integers: Sequence[str] = (), texts: Sequence[str] = ()) -> pl.DataFrame:
        """The named columns of all rows; a table without rows is an error."""
        with self.reading(integers):
            rows = self.scan(integers=integers, texts=texts).collect(engine="streaming")
        if rows.is_empty():
            raise DataError(f"{self.path} holds no rows: download it again")
        return rows

    def distinct(
        self, rows: pl.DataFrame, key: str, patient: str, flow: CohortFlow, step: str, nameless: int
    ) -> pl.DataFrame:
        """Rows each once, counted as a step; two rows of one ``key`` with other content are an error.

        - ``nameless``: How many rows were left out before because they lack an id.
        """
        once = rows.unique(maintain_order=True)
        if once[key].n_unique() < once.height:
            raise DataError(f"{self.path}: a {key} is there twice with other content: download it again")
        repeated = rows.height - once.height
        flow.count(step, once[patient], left_out_without_id=nameless, left_out_duplicates=repeated)
        return once

    @contextmanager
    def reading(self, integers: Sequence[str] = ()) -> Iterator[None]:
        """Turn whatever goes wrong while a scan is collected into an error that says where and why."""
        try:
            yield
        except (pl.exceptions.PolarsError, pl.exceptions.PanicException, UnicodeError) as error:
            raise self._explain(error, integers) from None
        except OSError as error:
            raise broken_file(self.path, error) from None

    def _explain(self, error: BaseException, integers: Sequence[str]) -> DataError:
        text = str(error)
        if isinstance(error, pl.exceptions.NoDataError):
            return DataError(f"{self.path} is empty: download it again")
        if "more fields" in text:
            return DataError(f"{self.path} has a row with more fields than its header: download it again")
        return self._bad_integer(integers) or DataError(
            f"{self.path} is not a well-formed CSV table (quotes that do not close, or text that is not UTF-8): "
            "download it again"
        )

    def _bad_integer(self, integers: Sequence[str]) -> DataError | None:
        # The cell itself may identify someone, so the message gives its row only.
        for name in integers:
            cell = pl.col(self.columns[name])
            cells = pl.scan_csv(self.path, infer_schema=False, row_index_name="#row").select("#row", cell)
            bad = cells.filter(cell.is_not_null() & cell.cast(pl.Int64, strict=False).is_null()).head(1)
            try:
                rows = bad.collect(engine="streaming")
            except (pl.exceptions.PolarsError, pl.exceptions.PanicException, OSError):
                return None
            if rows.height:
                return DataError(f"{self.path}, row {int(rows['#row'][0]) + 1}: '{name}' is not a whole number")
        return None


def find_tables(
    raw: str | Path, wanted: Sequence[str], *, source: str, optional: Sequence[str] = (), without: Sequence[str] = ()
) -> dict[str, Table]:
    """Find a database's tables in a folder.

    - ``raw``: The folder; file names may be in any case and end in ``.csv`` or ``.csv.gz``.
    - ``wanted``: Lower-case table names.
    - ``source``: The database asked for.
    - ``optional``: Tables that one may do without.
    - ``without``: Those that the user does without.
    """
    folder = Path(raw)
    if not folder.is_dir():
        raise StorageError(f"no folder at {folder}: name the folder that holds the {source} tables")
    present = _tables_in(folder)
    needed = [name for name in wanted if name not in without]
    if not set(needed) & set(present):
        hint = hint_at_another(folder)
        raise DataError(
            f"{folder} holds none of the {source} tables ({', '.join(needed)}): name the right folder.{hint}"
        )
    if missing := [name for name in needed if name not in present]:
        name = missing[0]
        remedy = f", or prepare the data without it (--without {name})" if name in optional else ""
        raise DataError(
            f"{folder} has no table '{name}' (neither {name}.csv nor {name}.csv.gz, in any case): put it there{remedy}"
        )
    return {name: open_table(present[name], name) for name in needed}


def open_table(path: Path, name: str) -> Table:
    """One CSV file with its header read and checked."""
    header = read_header(path)
    columns: dict[str, str] = {}
    for spelt in header:
        lower = spelt.strip().lower()
        if lower in columns:
            raise DataError(f"{path} has the column '{lower}' twice: it is damaged, download it again")
        columns[lower] = spelt
    check_whole(path, len(header))
    return Table(name, path, columns)


def read_header(path: Path) -> list[str]:
    """The column names in a CSV file's first line."""
    try:
        with path.open("rb") as raw:
            packed = raw.read(2) == GZIP
            raw.seek(0)
            stream: Any = gzip.GzipFile(fileobj=raw) if packed else raw
            line = stream.readline(_HEADER_LIMIT).decode("utf-8-sig")
    except (OSError, EOFError, zlib.error) as error:
        raise broken_file(path, error) from None
    except UnicodeDecodeError:
        raise DataError(f"{path} does not begin with a line of text: it is not a CSV table") from None
    try:
        names = next(csv.reader(io.StringIO(line)), []) if "\0" not in line else []
    except csv.Error:
        raise DataError(f"{path} does not begin with a line of column names: it is not a CSV table") from None
    if not any(name.strip() for name in names):
        raise DataError(f"{path} is empty: download it again")
    return names


def table_names(folder: Path) -> set[str]:
    """The names of the CSV tables in a folder, in lower case."""
    return {name for path in folder.iterdir() if (name := _table_name(path)) is not None}


def _tables_in(folder: Path) -> dict[str, Path]:
    tables: dict[str, Path] = {}
    for path in sorted(folder.iterdir()):
        name = _table_name(path)
        if name is None:
            continue
        if name in tables:
            raise DataError(f"both {tables[name].name} and {path.name} in {folder} hold the table '{name}': leave one")
        tables[name] = path
    return tables


def _table_name(path: Path) -> str | None:
    lower = path.name.lower()
    ending = next((end for end in _ENDINGS if lower.endswith(end)), None)
    return None if ending is None or not path.is_file() else lower[: -len(ending)]


def limit_patients(frame: pl.DataFrame, patient: str, limit: int | None, flow: CohortFlow) -> pl.DataFrame:
    """The rows of the first so many patients; ``patient`` is the column of their ids."""
    if limit is None:
        return frame
    kept = frame.filter(pl.col(patient).rank("dense") <= limit)
    flow.count(f"limited to {limit} patients", kept[patient])
    return kept


# Fast look-ups from the texts and ids of raw tables to numbers.


Array = npt.NDArray[Any]
_TABLE_LIMIT = 1 << 27


class CategoryMap:
    """Looks up what each category of a column is converted to, converting every category once.

    - ``convert``: From a Series of different texts to an array of the same length.
    - ``dtype``: Of the result.
    """

    def __init__(self, convert: Callable[[pl.Series], Array], dtype: npt.DTypeLike) -> None:
        self._convert = convert
        self._known = np.zeros(0, bool)
        self._values = np.zeros(0, dtype)
        self._anchor: pl.Series | None = None

    def __call__(self, column: pl.Series) -> Array:
        """Convert a categorical column without nulls, ``(rows,)``; every column must have the same categories."""
        if self._anchor is None:
            # polars forgets a numbering, and begins another, once no column with it is alive.
            self._anchor = column.clear()
        codes = column.to_physical().to_numpy()
        if not len(codes):
            return self._values[:0]
        top = int(codes.max()) + 1
        if top > len(self._known):
            size = max(top, 2 * len(self._known))
            self._known = np.append(self._known, np.zeros(size - len(self._known), bool))
            self._values = np.append(self._values, np.zeros(size - len(self._values), self._values.dtype))
        new = ~self._known[codes]
        if new.any():
            words = column.filter(pl.Series(new)).unique()
            at = words.to_physical().to_numpy()
            self._values[at] = self._convert(words.cast(pl.String))
            self._known[at] = True
        values: Array = self._values[codes]
        return values


class SampleIndex:
    """Finds the sample of an id: by a table where ids are small numbers, else by bisection."""

    def __init__(self, ids: npt.NDArray[np.int64]) -> None:
        self._order = np.argsort(ids, kind="stable")
        self._sorted = ids[self._order]
        self._table: npt.NDArray[np.int32] | None = None
        if len(ids) and self._sorted[0] >= 0 and self._sorted[-1] < _TABLE_LIMIT:
            self._table = np.full(int(self._sorted[-1]) + 2, -1, np.int32)
            self._table[ids] = np.arange(len(ids), dtype=np.int32)

    def __call__(self, ids: npt.NDArray[np.int64]) -> Array:
        """The number of each id's sample, -1 for an id that is not known."""
        if self._table is not None:
            last = len(self._table) - 1
            entry: Array = self._table[np.where((ids >= 0) & (ids < last), ids, last)]
            return entry
        at = np.minimum(np.searchsorted(self._sorted, ids), len(self._sorted) - 1)
        position: Array = np.where(self._sorted[at] == ids, self._order[at], -1)
        return position


# Doses as pharmacies write them


def parse_doses(texts: pl.Series) -> pl.Series:
    """Read each dosage as a number; some hospitals write a unit's code number after the dose (``5 3`` is 5).

    Examples
    --------
    >>> parse_doses(pl.Series(["5 3", "40 mg", "1,000 mL", "PYXIS"])).to_list()
    [5.0, 40.0, 1000.0, None]
    """
    return parse_numbers(texts.cast(pl.String).str.replace(r"^(\s*\S+)\s+\d+\s*$", "$1"))
