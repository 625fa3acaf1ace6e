"""New EEG samples without votes: from arrays to a model's inputs."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import polars as pl
import torch

from manydg.data.columns import Column
from manydg.errors import DataError, ManyDGWarning
from manydg.sources._iiic_parts import Part, group_files, open_signals, read_patients
from manydg.sources._iiic_reading import check_unit
from manydg.sources._iiic_rules import Rules
from manydg.sources._resume import wrong_folder


def prepare_for_prediction(
    raw: str | Path, settings: Mapping[str, Any]
) -> tuple[dict[str, Column], pl.DataFrame, npt.NDArray[np.str_]]:
    """New samples as a trained model's inputs.

    Parameters
    ----------
    raw : path
        As for preparing, but without votes. Where nothing says whose the samples are, they are of one patient.
    settings : dict
        ``info["settings"]`` of the training dataset; its ``scale`` turns stored values into microvolts.

    Returns
    -------
    columns : dict
        ``signal``, ``(rows, 16, 2000)``.
    rows : DataFrame
        ``part`` (where there are several) and ``row`` of each sample; those that are not finite are left out.
    patients : array ``(rows,)``
    """
    folder, scale = Path(raw), float(settings.get("scale", 1.0))
    groups = {name: files for name, files in group_files(folder).items() if "signals" in files}
    if not groups:
        raise wrong_folder(folder, "IIIC signals (signals.npy)")
    parts = [
        Part(name or folder.resolve().name, files["signals"], None, files.get("patients"))
        for name, files in sorted(groups.items())
    ]
    signals, rows, patients = zip(*(_read_part(part, scale) for part in parts), strict=True)
    numbered = pl.concat(rows)
    if not numbered.height:
        raise DataError(f"{folder}: not one sample is finite throughout, so there is nothing to predict from")
    whole = signals[0] if len(signals) == 1 else np.concatenate(signals)
    return {"signal": torch.from_numpy(whole)}, numbered, np.concatenate(patients)


def _read_part(part: Part, scale: float) -> tuple[npt.NDArray[np.float32], pl.DataFrame, npt.NDArray[np.str_]]:
    stored = open_signals(part)
    check_unit(part, stored[:32], Rules(scale=scale))
    finite = np.array([bool(np.isfinite(sample).all()) for sample in stored], bool)
    if not finite.all():
        note = f"{part.signals}: {int((~finite).sum())} of {len(stored)} samples hold values that are not finite"
        warnings.warn(f"{note}; they get no prediction", ManyDGWarning, stacklevel=4)
    patients = read_patients(part, len(stored))[finite]
    signal = np.asarray(stored[finite], np.float32) * np.float32(scale)
    rows = np.flatnonzero(finite)
    return signal, pl.DataFrame({"part": [part.name] * len(rows), "row": rows}), patients
