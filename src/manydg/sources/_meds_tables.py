"""A MEDS dataset's files: found, checked against the format, and scanned lazily."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import polars as pl

from manydg.errors import DataError, StorageError
from manydg.sources._provenance import CohortFlow
from manydg.sources._resume import hint_at_another

BIRTH = "MEDS_BIRTH"
_VALUES = ("boolean_value", "integer_value", "categorical_value")


def data_files(raw: str | Path) -> list[Path]:
    """The shards under ``data/``, sorted by name."""
    folder = Path(raw)
    if not folder.is_dir():
        raise StorageError(f"no folder at {folder}: name the root folder of a MEDS dataset")
    files = sorted((folder / "data").rglob("*.parquet")) if (folder / "data").is_dir() else []
    if not files:
        hint = hint_at_another(folder)
        raise DataError(f"{folder} is not a MEDS dataset: it has no parquet files under data/.{hint}")
    return files


def scan_events(files: list[Path]) -> pl.LazyFrame:
    """``subject_id``, ``time``, ``code`` and ``numeric_value`` of all shards, types checked file by file."""
    return pl.concat([_scan_shard(file) for file in files])


def _scan_shard(file: Path) -> pl.LazyFrame:
    with reading(file):
        scan = pl.scan_parquet(file)
        schema = scan.collect_schema()
    for name in ("subject_id", "time", "code"):
        if name not in schema:
            raise DataError(f"{file} has no column '{name}': it is not MEDS data")
    if not schema["subject_id"].is_integer():
        raise DataError(f"{file}: subject_id has type {schema['subject_id']}; MEDS has whole numbers there")
    if not isinstance(schema["time"], pl.Datetime):
        raise DataError(f"{file}: time has type {schema['time']}; MEDS has time stamps there")
    value = pl.col("numeric_value") if "numeric_value" in schema else pl.lit(None).alias("numeric_value")
    return scan.select(
        pl.col("subject_id").cast(pl.Int64),
        pl.col("time").dt.replace_time_zone(None).cast(pl.Datetime("us")),
        pl.col("code").cast(pl.String),
        value.cast(pl.Float32),
    )


@contextmanager
def reading(place: str | Path) -> Iterator[None]:
    """Turn what goes wrong while parquet files are read into an error that names the place."""
    try:
        yield
    except (pl.exceptions.PolarsError, pl.exceptions.PanicException) as error:
        raise DataError(f"{place} cannot be read as parquet ({str(error).splitlines()[0][:120]})") from None
    except OSError as error:
        raise StorageError(f"cannot read {place}: {error.strerror or error}") from None


def read_labels(path: str | Path, flow: CohortFlow) -> pl.DataFrame:
    """A MEDS label file, or a folder of them.

    Returns
    -------
    DataFrame
        ``subject_id``, ``prediction_time`` and ``label`` (boolean, integer or text), by subject and time.
    """
    rows = _read_times(path)
    present = [name for name in _VALUES if name in rows.columns and rows[name].null_count() < rows.height]
    if not present and "float_value" in rows.columns:
        raise DataError(f"{path} holds float_value labels; regression is not supported: cut them into classes first")
    if len(present) != 1:
        raise DataError(f"{path} must hold exactly one of {', '.join(_VALUES)}; found: {', '.join(present) or 'none'}")
    named = rows.select("subject_id", "prediction_time", label=pl.col(present[0])).drop_nulls()
    labels = named.unique(maintain_order=True)
    if labels.select("subject_id", "prediction_time").is_duplicated().any():
        raise DataError(f"{path} gives two different labels for one subject at one time: leave one")
    flow.add(
        "labels in the file",
        patients=labels["subject_id"].n_unique(),
        samples=labels.height,
        left_out_without_value=rows.height - named.height,
        left_out_duplicates=named.height - labels.height,
    )
    if labels.is_empty():
        raise DataError(f"{path} holds no labels")
    return labels.sort("subject_id", "prediction_time")


def read_prediction_times(path: str | Path) -> pl.DataFrame:
    """``subject_id`` and ``prediction_time`` of a label file whose labels are not needed."""
    return _read_times(path).select("subject_id", "prediction_time").drop_nulls().unique().sort(pl.all())


def _read_times(path: str | Path) -> pl.DataFrame:
    place = Path(path)
    files = sorted(place.rglob("*.parquet")) if place.is_dir() else [place]
    if not files or not files[0].is_file():
        raise StorageError(f"no label file at {place}: name a parquet file or a folder of them")
    with reading(place):
        frame = pl.concat([pl.read_parquet(file) for file in files], how="diagonal_relaxed")
    for name in ("subject_id", "prediction_time"):
        if name not in frame.columns:
            raise DataError(f"{place} has no column '{name}': it is not a MEDS label file")
    if not isinstance(frame.schema["prediction_time"], pl.Datetime) or not frame.schema["subject_id"].is_integer():
        raise DataError(f"{place}: subject_id must be whole numbers and prediction_time time stamps, as MEDS has them")
    time = pl.col("prediction_time").dt.replace_time_zone(None).cast(pl.Datetime("us"))
    return frame.with_columns(pl.col("subject_id").cast(pl.Int64), time)


def label_files(path: str | Path) -> list[Path]:
    """The files behind a label path."""
    place = Path(path)
    return sorted(place.rglob("*.parquet")) if place.is_dir() else [place]
