"""CSV tables of clinical databases: found in any case, plain or gzipped, and scanned column by column."""

from __future__ import annotations

import csv
import gzip
import io
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import polars as pl

from manydg.errors import DataError, StorageError

_SIGNATURES: dict[str, frozenset[str]] = {
    "mimic3": frozenset({"admissions", "diagnoses_icd", "procedures_icd", "prescriptions", "icustays"}),
    "eicu": frozenset({"patient", "diagnosis", "treatment", "physicalexam", "medication", "lab"}),
}
_ENDINGS = (".csv", ".csv.gz")
_HEADER_LIMIT = 1 << 20
_TAIL = 1 << 16


@dataclass(frozen=True)
class Table:
    """One CSV file of a database.

    Parameters
    ----------
    name : str
        The table's name in lower case.
    path : Path
    columns : dict of str to str
        Column names in lower case, and as the file spells them.
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
            self.path,
            infer_schema=False,
            schema_overrides={self.columns[name]: pl.Int64 for name in integers},
        )
        return frame.select(pl.col(self.columns[name]).alias(name) for name in (*integers, *texts))

    @contextmanager
    def reading(self, integers: Sequence[str] = ()) -> Iterator[None]:
        """Turn whatever goes wrong while a scan is collected into an error that says where and why."""
        try:
            yield
        except (pl.exceptions.PolarsError, pl.exceptions.PanicException, UnicodeError) as error:
            raise self._explain(error, integers) from None
        except OSError as error:
            raise _broken_file(self.path, error) from None

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
        # The cell itself may identify someone, so the message gives its place only.
        for name in integers:
            cell = pl.col(self.columns[name])
            rows = pl.scan_csv(self.path, infer_schema=False, row_index_name="#row").select("#row", cell)
            bad = rows.filter(cell.is_not_null() & cell.cast(pl.Int64, strict=False).is_null()).head(1)
            try:
                found = bad.collect(engine="streaming")
            except (pl.exceptions.PolarsError, pl.exceptions.PanicException, OSError):
                return None
            if found.height:
                return DataError(f"{self.path}, row {int(found['#row'][0]) + 1}: '{name}' is not a whole number")
        return None


def find_tables(
    raw: str | Path, wanted: Sequence[str], *, source: str, without: Sequence[str] = ()
) -> dict[str, Table]:
    """Find a database's tables in a folder.

    Parameters
    ----------
    raw : path
        The folder; file names may be in any case and end in ``.csv`` or ``.csv.gz``.
    wanted : sequence of str
        Lower-case table names.
    source : str
        The database asked for, to name another one that lies there instead.
    without : sequence of str
        Wanted tables that the user does without.
    """
    folder = Path(raw)
    if not folder.is_dir():
        raise StorageError(f"no folder at {folder}: name the folder that holds the {source} tables")
    present = _tables_in(folder)
    needed = [name for name in wanted if name not in without]
    if not set(needed) & set(present):
        raise _wrong_folder(folder, source, needed, present)
    missing = [name for name in needed if name not in present]
    if missing:
        raise DataError(
            f"{folder} has no table '{missing[0]}' (neither {missing[0]}.csv nor {missing[0]}.csv.gz, in any case)"
            f"{_remedy(source, missing[0])}"
        )
    return {name: open_table(present[name], name) for name in needed}


def _remedy(source: str, table: str) -> str:
    if source == "eicu" and table != "patient":
        return f": put it there, or say that you do without it (--without {table})"
    return ": put it there"


def open_table(path: Path, name: str) -> Table:
    """One CSV file with its header read and checked."""
    header = read_header(path)
    columns: dict[str, str] = {}
    for spelt in header:
        lower = spelt.strip().lower()
        if lower in columns:
            raise DataError(f"{path} has the column '{lower}' twice: it is damaged, download it again")
        columns[lower] = spelt
    if path.suffix.lower() != ".gz":
        _check_last_row(path, len(header))
    return Table(name, path, columns)


def _check_last_row(path: Path, fields: int) -> None:
    """Raise if a plain file ends in the middle of a row; a gzip file knows by itself whether it is whole."""
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - _TAIL))
        lines = file.read().decode("utf-8", "replace").splitlines()
    last = next((line for line in reversed(lines[1:]) if line.strip()), "")
    # With an odd number of quotes the row began on an earlier line, in a text that holds a line break.
    if not last or last.count('"') % 2 or "\0" in last:
        return
    try:
        found = len(next(csv.reader([last]), []))
    except csv.Error:
        return
    if found < fields:
        raise DataError(f"{path} is cut short: its last row has {found} of {fields} fields: download it again")


def read_header(path: Path) -> list[str]:
    """The column names in a CSV file's first line."""
    try:
        with path.open("rb") as raw:
            packed = raw.read(2) == b"\x1f\x8b"
            raw.seek(0)
            stream: Any = gzip.GzipFile(fileobj=raw) if packed else raw
            line = stream.readline(_HEADER_LIMIT).decode("utf-8-sig")
    except (OSError, EOFError, zlib.error) as error:
        raise _broken_file(path, error) from None
    except UnicodeDecodeError:
        raise DataError(f"{path} does not begin with a line of text: it is not a CSV table") from None
    try:
        names = next(csv.reader(io.StringIO(line)), []) if "\0" not in line else []
    except csv.Error:
        raise DataError(f"{path} does not begin with a line of column names: it is not a CSV table") from None
    if not any(name.strip() for name in names):
        raise DataError(f"{path} is empty: download it again")
    return names


def _tables_in(folder: Path) -> dict[str, Path]:
    found: dict[str, Path] = {}
    for path in sorted(folder.iterdir()):
        ending = next((end for end in _ENDINGS if path.name.lower().endswith(end)), None)
        if ending is None or not path.is_file():
            continue
        name = path.name.lower()[: -len(ending)]
        if name in found:
            raise DataError(f"both {found[name].name} and {path.name} in {folder} hold the table '{name}': leave one")
        found[name] = path
    return found


def _wrong_folder(folder: Path, source: str, needed: Sequence[str], present: Mapping[str, Path]) -> DataError:
    seen = [name for name, tables in _SIGNATURES.items() if name != source and len(tables & set(present)) >= 2]
    if (folder / "metadata" / "codes.parquet").exists():
        seen.append("meds")
    if any(path.suffix.lower() == ".edf" for path in folder.iterdir()):
        seen.append("sleep-edf")
    hint = f"; it looks like {seen[0]} (manydg prepare {seen[0]})" if seen else ""
    return DataError(f"{folder} holds none of the {source} tables ({', '.join(needed)}){hint}: name the right folder")


def _broken_file(path: Path, error: BaseException) -> DataError | StorageError:
    if path.suffix.lower() == ".gz" and not isinstance(error, FileNotFoundError | PermissionError):
        return DataError(f"{path} is cut short or is not a whole gzip file: download it again")
    return StorageError(f"cannot read {path}: {getattr(error, 'strerror', None) or error}")
