"""A synthetic twin of eICU: patient and the five event tables with their columns, types and blemishes, of any size."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import polars as pl

from manydg.sources._twin_eicu_events import STATES, Stays, World, write_events
from manydg.sources._twin_tables import (
    CHUNK,
    FACTORS,
    FloatArray,
    blank_out,
    check_patients,
    new_tables,
    pick,
    repeat_rows,
    write_truth,
)

_MOST_STAYS = 4


def synthesize(out: str | Path, *, patients: int, seed: int = 0, ending: str = ".csv.gz") -> Path:
    """Write a synthetic eICU.

    A stay's latent state decides its events, its laboratory values and whether the patient comes back to intensive
    care; the patient's factor changes which codes occur and shifts the laboratory values. The blemishes are those of
    the original: text among the results, drugs without a name, orders cancelled, results after discharge, stays
    that end before they start, repeated rows, blank lines. The factors themselves are in ``truth.parquet``.

    Parameters
    ----------
    out : path
        A folder that does not exist yet.
    patients : int
        The full database has 139,367, with 200,859 unit stays; here a patient has 1.44 stays on average too.
    seed : int
    ending : {".csv.gz", ".csv"}

    Returns
    -------
    Path
        The folder.
    """
    check_patients(patients)
    rng = np.random.default_rng(seed)
    world = World.make(rng)
    factors = rng.normal(size=(patients, FACTORS))
    ids = [f"{2 + number // 100_000:03d}-{number % 100_000}" for number in range(patients)]
    with new_tables(Path(out), ending) as files:
        next_id = 141_000
        for start in range(0, patients, CHUNK):
            names = pl.Series(ids[start : start + CHUNK])
            stays = _draw_stays(rng, factors[start : start + CHUNK], next_id)
            next_id = int(stays.ids.max()) + 1
            files.append("patient", _patients(rng, stays, names))
            files.blank_line("patient")
            write_events(files, rng, world, stays)
        write_truth(files.folder, ids, factors)
    return Path(out)


def _draw_stays(rng: np.random.Generator, factors: FloatArray, first_id: int) -> Stays:
    hospital_stays = np.minimum(rng.geometric(0.83, len(factors)), 6)
    patient = np.repeat(np.arange(len(factors)), hospital_stays)
    state = rng.normal(size=(len(patient), _MOST_STAYS, STATES))
    comes_back = rng.random((len(patient), _MOST_STAYS)) < 1 / (1 + np.exp(2.2 - 1.2 * state[:, :, 0]))
    stays = 1 + np.cumprod(comes_back[:, :-1], axis=1).sum(axis=1)
    at = np.repeat(np.arange(len(patient)), stays)
    visit = np.arange(len(at)) - np.repeat(np.cumsum(stays) - stays, stays)
    length = rng.integers(600, 6000, len(at))
    gap = np.where(rng.random(len(at)) < 0.7, 0, rng.integers(30, 9000, len(at)))
    clock = np.cumsum(length + gap)
    before = clock - (length + gap)
    start = (
        before
        - np.repeat(before[np.cumsum(stays) - stays], stays)
        + np.repeat(rng.integers(1, 3000, len(patient)), stays)
    )
    # Numbers rise along the file with holes between them, and do not follow time within a hospital stay.
    ids = first_id + np.cumsum(rng.integers(1, 20, len(at)))
    swap = np.lexsort((rng.random(len(at)), at))
    return Stays(
        ids[swap], patient[at], 128_000 + first_id + at, visit, start, length, state[at, visit], factors[patient[at]]
    )


def _patients(rng: np.random.Generator, stays: Stays, names: pl.Series) -> pl.DataFrame:
    count = len(stays.ids)
    age = rng.integers(18, 100, len(names))[stays.patient]
    gender = rng.integers(0, 2, len(names))[stays.patient]
    ethnicity = rng.choice(6, len(names), p=[0.77, 0.11, 0.04, 0.02, 0.01, 0.05])[stays.patient]
    groups = ["Caucasian", "African American", "Hispanic", "Asian", "Native American", "Other/Unknown"]
    years = pl.Series(["> 89" if year > 89 else str(year) for year in age])
    frame = pl.DataFrame(
        {
            "patientunitstayid": stays.ids,
            "patienthealthsystemstayid": stays.hospital,
            "gender": pl.Series(["Female", "Male"])[gender],
            "age": years,
            "ethnicity": pl.Series(groups)[ethnicity],
            "hospitalid": rng.integers(56, 460, count),
            "wardid": rng.integers(80, 1100, count),
            "apacheadmissiondx": pick(rng, ["Sepsis, pulmonary", "Rhythm disturbance (atrial)", None], count),
            "admissionheight": rng.normal(170, 10, count).round(1),
            "hospitaladmittime24": pick(rng, ["23:36:00", "08:15:00"], count),
            "hospitaladmitoffset": -stays.start,
            "hospitaladmitsource": pick(rng, ["Emergency Department", "Floor", None], count),
            "hospitaldischargeyear": 2014 + stays.hospital % 2,
            "hospitaldischargetime24": pick(rng, ["19:20:00", "17:05:00"], count),
            "hospitaldischargeoffset": stays.length + 1000,
            "hospitaldischargelocation": pick(rng, ["Home", "Skilled Nursing Facility", None], count),
            "hospitaldischargestatus": pick(rng, ["Alive", "Alive", "Expired"], count),
            "unittype": pick(rng, ["Med-Surg ICU", "SICU", "CCU-CTICU"], count),
            "unitadmittime24": pick(rng, ["13:14:00", "20:47:00"], count),
            "unitadmitsource": pick(rng, ["Emergency Department", "ICU to SDU"], count),
            "unitvisitnumber": stays.visit + 1,
            "unitstaytype": pl.Series(["admit", "readmit"])[(stays.visit > 0).astype(np.int64)],
            "admissionweight": rng.normal(80, 20, count).round(1),
            "dischargeweight": rng.normal(80, 20, count).round(1),
            "unitdischargetime24": pick(rng, ["18:58:00", "10:00:00"], count),
            "unitdischargeoffset": np.where(rng.random(count) < 0.0005, -60, stays.length),
            "unitdischargelocation": pick(rng, ["Floor", "Home", "Step-Down Unit (SDU)"], count),
            "unitdischargestatus": pick(rng, ["Alive", "Alive", "Expired"], count),
            "uniquepid": names[stays.patient],
        }
    )
    missing = {"gender": 0.002, "age": 0.001, "ethnicity": 0.015, "admissionheight": 0.02, "dischargeweight": 0.3}
    frame = repeat_rows(rng, blank_out(rng, frame, missing), 0.0005)
    return frame[rng.permutation(frame.height)]
