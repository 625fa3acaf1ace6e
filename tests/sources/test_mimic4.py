"""MIMIC-IV: both of its tasks, from tables of a few rows, from the twin, and from the MIMIC-III demo in its format."""

from __future__ import annotations

import gzip
from datetime import datetime
from pathlib import Path

import numpy as np
import polars as pl
import pytest
import torch

from manydg import sources
from manydg.data.columns import Ragged
from manydg.data.dataset import DomainDataset, open_dataset
from manydg.errors import ConfigError, DataError
from manydg.sources import NewSamples, TrainedOn, mimic4, recognize
from manydg.sources._stays import STATIC_NAMES

DEMO = Path(__file__).resolve().parents[3] / "shared" / "data" / "mimic3_demo"
MAP = "ndc,atc\n00002323560,N06AX\n00002323561,A12CA01\n"
HOSPITAL = {
    "patients": "subject_id,gender,anchor_age,anchor_year\n1,M,88,2180\n2,F,50,2181\n",
    "admissions": "subject_id,hadm_id,admittime,dischtime,race\n"
    "1,11,2180-01-01 00:00:00,2180-01-10 00:00:00,WHITE - RUSSIAN\n"
    "1,12,2182-03-01 00:00:00,2182-03-20 00:00:00,WHITE - RUSSIAN\n"
    "2,21,2181-05-01 00:00:00,2181-05-09 00:00:00,HISPANIC/LATINO - CUBAN\n",
    "diagnoses_icd": "subject_id,hadm_id,seq_num,icd_code,icd_version\n"
    "1,11,1,E849,9\n1,12,1,E849 ,10\n1,12,2,i10,10\n2,21,1,4019,9\n",
    "procedures_icd": "subject_id,hadm_id,seq_num,chartdate,icd_code,icd_version\n"
    "1,11,1,2180-01-02,5491,9\n1,12,1,2182-03-02,0W9G3ZZ,10\n2,21,1,2181-05-02,5491,9\n",
    "prescriptions": "subject_id,hadm_id,starttime,drug,ndc,dose_val_rx\n"
    "1,11,2180-01-02 10:00:00,Furosemide,2323560,40\n"
    "1,12,2182-03-02 11:00:00,Calcium,2323561,10-20\n"
    "1,12,2182-03-10 11:00:00,Calcium,2323561,1\n"
    "2,21,2181-05-02 10:00:00,Calcium,2323561,1\n",
    "labevents": "labevent_id,subject_id,hadm_id,itemid,charttime,value,valuenum\n"
    "1,1,,50931,2182-03-02 10:30:00,95,95\n"
    "2,1,12,50931,2182-03-03 10:30:00,<0.5,\n"
    "3,1,12,50931,2182-03-09 10:30:00,7,7\n"
    "4,1,,50931,1999-01-01 00:00:00,7,7\n"
    "5,9,,50931,2182-03-02 10:30:00,7,7\n"
    "6,2,21,50931,,7,7\n"
    "7,2,,50931,1999-01-01 00:00:00,7,7\n",
}
INTENSIVE = {
    "icustays": "subject_id,hadm_id,stay_id,intime,outtime\n"
    "1,11,31,2180-01-02 00:00:00,2180-01-03 00:00:00\n"
    "1,12,39,2182-03-02 10:00:59,2182-03-04 10:00:00\n"
    "1,12,33,2182-03-10 10:00:00,2182-03-11 10:00:00\n"
    "2,21,34,2181-05-02 00:00:00,2181-05-03 00:00:00\n",
    "chartevents": "subject_id,hadm_id,stay_id,charttime,itemid,value,valuenum\n"
    "1,12,39,2182-03-02 12:00:00,220045,80,80\n1,11,31,2180-01-02 01:00:00,220045,70,70\n"
    "2,21,34,2181-05-02 01:00:00,220045,60,60\n1,12,33,2182-03-10 12:00:00,220045,81,81\n",
    "procedureevents": "subject_id,hadm_id,stay_id,starttime,itemid\n1,12,39,2182-03-02 13:00:00,225752\n",
}


def write(folder: Path, **changed: str | None) -> Path:
    """The modules of a small database; a table may be changed, or left out with None."""
    for module, tables in (("hosp", HOSPITAL), ("icu", INTENSIVE)):
        (folder / module).mkdir(parents=True, exist_ok=True)
        for name, text in tables.items():
            content = changed.get(name, text)
            if content is not None:
                (folder / module / f"{name}.csv").write_text(content)
    (folder / "map.csv").write_text(MAP)
    return folder


def readmission(tmp_path: Path, **changed: str | None) -> DomainDataset:
    raw = write(tmp_path / "raw", **changed)
    return open_dataset(sources.prepare("mimic4", raw, tmp_path / "out", task="readmission"))


def drugs(tmp_path: Path, **changed: str | None) -> DomainDataset:
    raw = write(tmp_path / "raw", **changed)
    return open_dataset(
        sources.prepare("mimic4", raw, tmp_path / "out", task="drugs", ndc_map=raw / "map.csv", min_visits=1)
    )


def events(data: DomainDataset | NewSamples, row: int) -> list[tuple[float, str, float | None]]:
    """Minute, code and value of everything in a stay."""
    columns = {name: data.columns[name] for name in ("event_time", "event_codes", "event_values")}
    time, codes, values = (column.take(torch.tensor([row])) for column in columns.values())
    assert isinstance(time, Ragged)
    assert isinstance(codes.values, Ragged)
    assert isinstance(values.values, Ragged)
    words = list(data.info.vocabularies["events"]) if isinstance(data, DomainDataset) else []
    numbers = values.values.values.tolist()
    minutes = np.repeat(np.asarray(time.values), codes.values.lengths.numpy()).tolist()
    names = [words[code] for code in codes.values.values.tolist()]
    return [(m, n, None if v != v else round(v, 3)) for m, n, v in zip(minutes, names, numbers, strict=True)]


def test_a_stay_holds_what_happened_in_it_and_what_earlier_admissions_were_coded_with(tmp_path: Path) -> None:
    data = readmission(tmp_path)
    # Patient 1's stays in the order of time: 31, 39, 33; then patient 2's.
    day = 24 * 60
    assert events(data, 0) == [(60.0, "chart:220045", 70.0), (600.0, "medication:furosemide", 40.0)]
    second = events(data, 1)
    assert [event[1] for event in second[:2]] == ["diagnosis_icd:9:E849", "procedure_icd:9:5491"]
    ended = datetime(2180, 1, 10) - datetime(2182, 3, 2, 10, 0)
    assert second[0][0] == ended.total_seconds() / 60
    assert second[2:] == [
        (30.0, "lab:50931", 95.0),
        (60.0, "medication:calcium", 15.0),
        (120.0, "chart:220045", 80.0),
        (180.0, "procedure:225752", None),
        (day + 30.0, "lab:50931", 0.5),
    ]


def test_codes_of_the_admission_itself_are_no_input(tmp_path: Path) -> None:
    data = readmission(tmp_path)
    assert not any("10:" in name for row in range(len(data)) for _, name, _ in events(data, row))


def test_another_stay_of_the_patient_within_fifteen_days_is_a_readmission(tmp_path: Path) -> None:
    data = readmission(tmp_path)
    assert data.targets.tolist() == [0, 1, 0, 0]
    assert data.patients.tolist() == ["1", "2"]
    assert np.allclose(np.asarray(data.times)[:3], [0, 18970.0, 19162.0], atol=0.02)
    raw, out = tmp_path / "raw", tmp_path / "years"
    long = open_dataset(sources.prepare("mimic4", raw, out, task="readmission", within_days=900.0))
    assert long.targets.tolist() == [1, 1, 0, 0]


def test_age_gender_and_race_are_of_the_time_of_the_stay(tmp_path: Path) -> None:
    static = readmission(tmp_path).columns["static"]
    rows = [dict(zip(STATIC_NAMES, row, strict=True)) for row in np.asarray(static).round(3).tolist()]
    assert [round(row["age_over_100"], 2) for row in rows] == [0.88, 0.9, 0.9, 0.5]
    assert [row["male"] for row in rows] == [1, 1, 1, 0]
    assert [row["ethnicity_caucasian"] for row in rows] == [1, 1, 1, 0]
    assert rows[3]["ethnicity_hispanic"] == 1


def test_rows_of_no_stay_and_without_a_time_are_counted(tmp_path: Path) -> None:
    steps = {step.step: step.counts for step in readmission(tmp_path).info.cohort_flow}
    lab = steps["rows of labevents"]
    assert (lab["rows"], lab["left_out_other_stay"]) == (7, 3)
    assert (lab["left_out_without_time"], lab["left_out_after_discharge"], lab["values_from_text"]) == (1, 1, 1)


def test_one_text_in_both_versions_of_icd_is_two_codes(tmp_path: Path) -> None:
    data = drugs(tmp_path)
    assert list(data.info.vocabularies["diagnoses"]) == ["<unknown>", "10:E849", "10:I10", "9:4019", "9:E849"]
    assert list(data.info.vocabularies["procedures"]) == ["<unknown>", "10:0W9G3ZZ", "9:5491"]
    assert data.target.names == ("A12C", "N06A")
    assert data.targets.tolist() == [[0.0, 1.0], [1.0, 0.0], [1.0, 0.0]]


@pytest.mark.parametrize("task", ["drugs", "readmission"])
def test_new_files_become_the_same_inputs(task: str, tmp_path: Path) -> None:
    raw = sources.synthesize("mimic4", tmp_path / "raw", patients=60, seed=3)
    mapping = {"ndc_map": raw / "ndc_to_atc.csv"}
    options: dict[str, object] = {"task": task} | (dict(mapping) if task == "drugs" else {})
    data = open_dataset(sources.prepare("mimic4", raw, tmp_path / "out", **options))
    trained = TrainedOn("mimic4", data.info.settings, data.info.vocabularies)
    (new,) = mimic4.Mimic4().for_prediction(raw, trained, mimic4.DrugMapOptions(**mapping))
    assert set(new.columns) == set(data.columns)
    of_patient = {str(name): new.patients.astype(str) == str(name) for name in data.patients}
    domains = np.asarray(data.domains)
    for code, name in enumerate(data.patients[:10]):
        theirs, mine = np.flatnonzero(of_patient[str(name)]), np.flatnonzero(domains == code)
        if task == "readmission":
            same = torch.equal(_flat(new.columns["event_codes"], theirs), _flat(data.columns["event_codes"], mine))
            assert same
            assert len(theirs) == len(mine)
        else:
            assert len(theirs) >= len(mine)
    if task == "readmission":
        assert new.rows.columns == ["stay_id"]
        assert 0.05 < float(data.targets.float().mean()) < 0.5


def _flat(column: object, rows: np.ndarray[tuple[int], np.dtype[np.int64]]) -> torch.Tensor:
    assert isinstance(column, Ragged)
    taken = column.take(torch.from_numpy(rows)).values
    assert isinstance(taken, Ragged)
    return torch.as_tensor(taken.values)


def test_gzipped_tables_in_one_folder_give_the_same_dataset(tmp_path: Path) -> None:
    raw = write(tmp_path / "raw")
    flat = tmp_path / "flat"
    flat.mkdir()
    for path in sorted(raw.glob("*/*.csv")):
        (flat / f"{path.name}.gz").write_bytes(gzip.compress(path.read_bytes()))
    one = open_dataset(sources.prepare("mimic4", raw, tmp_path / "a", task="readmission"))
    two = open_dataset(sources.prepare("mimic4", flat, tmp_path / "b", task="readmission"))
    assert [events(one, row) for row in range(4)] == [events(two, row) for row in range(4)]
    source = recognize(raw)
    assert source is not None
    assert source.name == "mimic4"


def test_bad_input_is_one_line_that_names_file_and_remedy(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"diagnoses_icd.csv, row 4: 'icd_version' is '11': known are 9 and 10"):
        drugs(tmp_path / "a", diagnoses_icd=HOSPITAL["diagnoses_icd"].replace("4019,9", "4019,11"))
    with pytest.raises(DataError, match=r"procedures_icd.csv, row 2: 'icd_version' is empty"):
        readmission(tmp_path / "b", procedures_icd=HOSPITAL["procedures_icd"].replace("ZZ,10", "ZZ,"))
    with pytest.raises(DataError, match=r"hosp has no table 'admissions' \(neither admissions.csv nor"):
        drugs(tmp_path / "c", admissions=None)
    with pytest.raises(DataError, match=r"icu has no table 'chartevents' .*--without chartevents"):
        readmission(tmp_path / "d", chartevents=None)
    with pytest.raises(DataError, match=r"diagnoses_icd.csv has no column 'icd_code'; its columns are .*icd9_code"):
        drugs(tmp_path / "e", diagnoses_icd="subject_id,hadm_id,seq_num,icd9_code\n1,11,1,4019\n")
    with pytest.raises(DataError, match=r"labevents.csv: no row has a time such as 2180-07-23 14:00:00"):
        readmission(tmp_path / "f", labevents=HOSPITAL["labevents"].replace("2182-03-0", "03/0").replace("1999-", ""))
    with pytest.raises(DataError, match=r"icustays.csv: none of 4 stays has an intime such as"):
        readmission(tmp_path / "g", icustays=INTENSIVE["icustays"].replace(":", "h"))
    with pytest.raises(DataError, match=r"icustays.csv, row 1: 'stay_id' is not a whole number"):
        readmission(tmp_path / "h", icustays=INTENSIVE["icustays"].replace("1,11,31,", "1,11,x31,"))
    assert not list(tmp_path.glob("*/out"))


def test_options_of_the_other_task_are_refused(tmp_path: Path) -> None:
    raw = write(tmp_path / "raw")
    with pytest.raises(ConfigError, match=r"a mapping from NDC to ATC: name a CSV table .*--ndc-map"):
        sources.prepare("mimic4", raw, tmp_path / "out", task="drugs")
    with pytest.raises(ConfigError, match="min_visits is not an option of --task readmission"):
        sources.prepare("mimic4", raw, tmp_path / "out", task="readmission", min_visits=3)
    with pytest.raises(ConfigError, match="within_days is not an option of --task drugs"):
        sources.prepare("mimic4", raw, tmp_path / "out", task="drugs", ndc_map=raw / "map.csv", within_days=30.0)


@pytest.mark.skipif(not DEMO.is_dir(), reason="the MIMIC-III demo is not in ../shared/data")
def test_the_mimic_3_demo_in_the_format_of_mimic_4_gives_the_same_cohort(tmp_path: Path) -> None:
    hospital = tmp_path / "raw" / "hosp"
    hospital.mkdir(parents=True)
    for name in mimic4.TABLES:
        (file,) = (path for path in DEMO.iterdir() if path.name.lower().split(".")[0] == name)
        frame = pl.read_csv(file, infer_schema=False).rename(str.lower)
        if "icd9_code" in frame.columns:
            frame = frame.rename({"icd9_code": "icd_code"}).with_columns(icd_version=pl.lit("9"))
        frame.write_csv(hospital / f"{name}.csv.gz", compression="gzip")
    mapping = DEMO.parent / "drug_mapping" / "ndc_to_atc.csv"
    three = open_dataset(sources.prepare("mimic3", DEMO, tmp_path / "three", ndc_map=mapping))
    four = open_dataset(sources.prepare("mimic4", tmp_path / "raw", tmp_path / "four", task="drugs", ndc_map=mapping))
    assert (len(four), four.n_patients) == (36, 11)
    assert torch.equal(four.targets, three.targets)
    words = [f"9:{word}" for word in three.info.vocabularies["diagnoses"][1:]]
    assert list(four.info.vocabularies["diagnoses"][1:]) == words
