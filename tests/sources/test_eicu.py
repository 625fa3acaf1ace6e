"""eICU: from tables to unit stays as sequences of events."""

from __future__ import annotations

import csv
import gzip
import math
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
import torch
from typer.testing import CliRunner

from manydg import sources
from manydg.cli import app
from manydg.data.columns import Ragged
from manydg.data.dataset import DomainDataset, open_dataset
from manydg.errors import ConfigError, DataError, StorageError
from manydg.sources import Options, TrainedOn, eicu
from manydg.sources._preparing import CohortFlow
from manydg.sources._stays import EventReader
from manydg.sources._tables import Table, open_table

HEADER = (
    "patientunitstayid,patienthealthsystemstayid,gender,age,ethnicity,hospitaladmitoffset,unitdischargeoffset,"
    "unitvisitnumber,hospitaldischargeyear,uniquepid\n"
)
TABLES = {
    "patient": HEADER
    + "20,1,Male,> 89,Caucasian,-10,1000,1,2014,p-1\n"
    + "10,1,Male,> 89,Caucasian,-1010,500,2,2014,p-1\n"
    + "30,2,Female,61,,-5,2000,1,2015,p-1\n"
    + "40,3,,,Martian,-5,2000,1,2015,p-2\n",
    "diagnosis": "diagnosisid,patientunitstayid,diagnosisoffset,diagnosisstring,icd9code\n"
    'a,20,50,"renal|ARF","584.9, N17.9"\n'
    "b,20,50,RENAL|arf,\n"
    "c,10,1,cardio|chf,428.0\n"
    "d,30,1,cardio|chf,428.0\n"
    "e,40,1,cardio|chf,428.0\n",
    "lab": "labid,patientunitstayid,labresultoffset,labname,labresult,labresulttext\n"
    "1,20,-30,sodium,140.5,140.5\n"
    "2,20,-30,troponin,,<0.02\n"
    "3,20,60,sodium,,neg\n"
    "4,20,5000,sodium,120,120\n"
    "5,99,10,sodium,120,120\n",
    "medication": "medicationid,patientunitstayid,drugstartoffset,drugordercancelled,drugname,drughiclseqno,dosage,"
    "frequency\n"
    '1,20,50,No,ASPIRIN EC,1820,"1,000 mg",Daily\n'
    "2,20,50,No,,2812.0,PYXIS,\n"
    "3,20,50,Yes,MORPHINE,1,5,Once\n"
    "4,20,50,No,,,5,Once\n",
    "physicalExam": "physicalexamid,patientunitstayid,physicalexamoffset,physicalexampath\n1,20,50,notes/GCS\n",
    "treatment": "treatmentid,patientunitstayid,treatmentoffset,treatmentstring\n1,20,1000,renal|dialysis\n",
}


def invoke(*arguments: object) -> None:
    """Run a command to its end."""
    done = CliRunner().invoke(app, [str(argument) for argument in arguments])
    assert done.exit_code == 0, done.output


def write_tables(folder: Path, **changed: str) -> Path:
    folder.mkdir(exist_ok=True)
    for name, text in (TABLES | changed).items():
        (folder / f"{name}.csv").write_text(text)
    return folder


@pytest.fixture
def raw(tmp_path: Path) -> Path:
    return write_tables(tmp_path / "raw")


def prepare(raw: Path, **options: object) -> DomainDataset:
    return open_dataset(sources.prepare("eicu", raw, raw.parent / "out", overwrite=True, **options))  # type: ignore[arg-type]


def test_ids_of_patients_are_text(tmp_path: Path) -> None:
    plain = prepare(write_tables(tmp_path / "plain"))
    text = TABLES["patient"].replace("p-1", "1000").replace("p-2", "01000")
    assert prepare(write_tables(tmp_path / "raw", patient=text)).patients.tolist() == ["01000", "1000"]
    assert len(plain.patients) == 2


def events(data: DomainDataset, row: int) -> list[tuple[str, float, list[tuple[str, float | None]]]]:
    words, kinds = data.info.vocabularies["events"], data.info.settings["event_kinds"]
    kind, time, codes, values = (
        data.column(name).to_rows()[row]  # type: ignore[union-attr]
        for name in ("event_kind", "event_time", "event_codes", "event_values")
    )
    return [
        (kinds[k], t, [(words[c], None if math.isnan(v) else round(v, 4)) for c, v in zip(cs, vs, strict=True)])
        for k, t, cs, vs in zip(kind, time, codes, values, strict=True)
    ]


def test_events_stand_in_time_order_with_every_feature_the_paper_lists(raw: Path) -> None:
    assert events(prepare(raw), 0) == [
        ("lab", -30.0, [("lab:sodium", 140.5), ("lab:troponin", 0.02)]),
        (
            "diagnosis",
            50.0,
            [("diagnosis_string:renal|arf", None), ("diagnosis_icd:584.9", None), ("diagnosis_icd:n17.9", None)],
        ),
        (
            "medication",
            50.0,
            [("medication:aspirin ec", 1000.0), ("medication:hicl 2812", None), ("medication_frequency:daily", None)],
        ),
        ("physical_exam", 50.0, [("physical_exam:notes/gcs", None)]),
        ("lab", 60.0, [("lab:sodium", None)]),
        ("treatment", 1000.0, [("treatment:renal|dialysis", None)]),
    ]


def test_what_is_left_out_is_counted(raw: Path) -> None:
    flow = {step.step: step.counts for step in prepare(raw).info.cohort_flow}
    labs, drugs = flow["rows of lab"], flow["rows of medication"]
    assert (labs["rows"], labs["left_out_after_discharge"], labs["left_out_other_stay"]) == (5, 1, 1)
    assert (labs["values_from_text"], labs["values_missing"]) == (1, 1)
    assert (drugs["left_out_cancelled"], drugs["left_out_without_name"], drugs["doses_missing"]) == (1, 1, 1)


@pytest.mark.parametrize(
    ("name", "number", "expected"),
    [("", "1820", "hicl 1820"), ("", " 1820.0 ", "hicl 1820"), ('" Aspirin "', "1820", "aspirin"), ("", "", None)]
    + [("", '""', None), ("", "  ", None), ('""', "", None), ('"  "', "", None)],
)
def test_a_drug_is_known_by_its_name_or_else_by_its_number(
    raw: Path, name: str, number: str, expected: str | None
) -> None:
    header = TABLES["medication"].splitlines()[0]
    write_tables(raw, medication=f"{header}\n1,20,50,No,{name},{number},5,Once\n2,20,60,No,MORPHINE,7,5,Once\n")
    words = prepare(raw).info.vocabularies["events"]
    drugs = [word.partition(":")[2] for word in words if word.startswith("medication:")]
    assert drugs == sorted(filter(None, [expected, "morphine"]))


@pytest.mark.parametrize(("cell", "cancelled"), [("Yes", 1), ("YES", 1), (" yes ", 1), ("No", 0), ("", 0), ("yes?", 0)])
def test_an_order_is_cancelled_if_it_says_yes(raw: Path, cell: str, cancelled: int) -> None:
    header = TABLES["medication"].splitlines()[0]
    write_tables(raw, medication=f"{header}\n1,20,50,{cell},ASPIRIN,,5,Once\n2,20,60,No,MORPHINE,7,5,Once\n")
    data = prepare(raw)
    flow = {step.step: step.counts for step in data.info.cohort_flow}
    assert flow["rows of medication"]["left_out_cancelled"] == cancelled
    given = {code for kind, _, codes in events(data, 0) if kind == "medication" for code, _ in codes}
    assert ("medication:aspirin" in given) is not bool(cancelled)


@pytest.mark.parametrize(
    ("result", "text", "value"),
    [("1.5", "9", 1.5), ("", "<2", 2.0), ("inf", "3", 3.0), ("nan", "", None), ("1e39", "", None), (">7", "", 7.0)]
    + [("neg", "4", 4.0), ("5", "", 5.0), ("", "", None)],
)
def test_a_result_is_its_number_or_else_its_text(raw: Path, result: str, text: str, value: float | None) -> None:
    header = TABLES["lab"].splitlines()[0]
    write_tables(raw, lab=f"{header}\n1,20,50,sodium,{result},{text}\n2,20,60,sodium,140,140\n")
    found = [codes[0][1] for kind, at, codes in events(prepare(raw), 0) if kind == "lab" and at == 50]
    assert found == [value]


def test_the_label_is_another_stay_of_the_same_hospital_stay_within_fifteen_days(raw: Path) -> None:
    data = prepare(raw)
    assert data.targets.tolist() == [1, 0, 0, 0]
    assert data.patients[data.domains].tolist() == ["p-1", "p-1", "p-1", "p-2"]
    assert data.times is not None
    assert data.times.tolist() == [0, 1, 2, 0]


@pytest.mark.parametrize(
    ("start", "min_gap", "label"),
    [(15 * 1440 - 1, 0, 1), (15 * 1440, 0, 0), (1000, 0, 1), (1000, 1, 0), (1060, 60, 1), (1060, 61, 0), (0, 0, 0)],
)
def test_window_and_gap_decide_the_label_to_the_minute(tmp_path: Path, start: int, min_gap: float, label: int) -> None:
    first = "20,1,Male,60,Caucasian,-10,1000,1,2014,p-1\n"
    later = f"10,1,Male,60,Caucasian,{-10 - start},500,2,2014,p-1\n"
    pair = "50,9,Male,60,Caucasian,-10,10,1,2014,p-9\n51,9,Male,60,Caucasian,-9000,10,2,2014,p-9\n"
    extra = TABLES["diagnosis"] + "f,50,1,x,\ng,51,1,x,\n"
    raw = write_tables(tmp_path / "raw", patient=HEADER + first + later + pair, diagnosis=extra)
    assert prepare(raw, min_gap=min_gap).targets[0] == label


def test_static_features_say_what_is_missing(raw: Path) -> None:
    data = prepare(raw)
    names = data.info.settings["static_names"]
    rows = [{name for name, value in zip(names, row, strict=True) if value} for row in data.column("static").tolist()]  # type: ignore[union-attr]
    assert rows[0] == {"age_over_100", "male", "ethnicity_caucasian"}
    assert rows[2] == {"age_over_100", "ethnicity_missing"}
    assert rows[3] == {"age_missing", "gender_missing", "ethnicity_missing"}
    assert data.column("static")[0, 0] == pytest.approx(0.9)  # type: ignore[index]


def test_code_fields_tile_the_vocabulary(raw: Path) -> None:
    info = prepare(raw).info
    end = 1
    for field in info.settings["code_fields"]:
        assert field["start"] == end
        end = field["stop"]
        assert all(word.startswith(field["name"] + ":") for word in info.vocabularies["events"][field["start"] : end])
    assert end == len(info.vocabularies["events"])


def test_the_last_events_are_kept_and_short_stays_left_out(raw: Path) -> None:
    data = prepare(raw, max_events=2)
    assert [time for _, time, _ in events(data, 0)] == [60.0, 1000.0]
    with pytest.raises(DataError, match="nothing to learn"):
        prepare(raw, min_events=6)
    with pytest.raises(DataError, match="99 or more events"):
        prepare(raw, min_events=99)


def test_a_rare_code_counts_as_unknown(raw: Path) -> None:
    data = prepare(raw, min_count=2)
    assert data.info.vocabularies["events"] == [
        "<unknown>",
        "diagnosis_string:cardio|chf",
        "diagnosis_string:renal|arf",
        "diagnosis_icd:428.0",
        "lab:sodium",
    ]
    assert events(data, 0)[0][2] == [("<unknown>", 0.02), ("lab:sodium", 140.5)]


def test_a_missing_table_must_be_named(raw: Path) -> None:
    (raw / "lab.csv").unlink()
    with pytest.raises(DataError, match="--without lab"):
        prepare(raw)
    data = prepare(raw, without=["lab"])
    assert data.info.provenance.options["without"] == ["lab"]
    assert all(kind != "lab" for kind, _, _ in events(data, 0))
    with pytest.raises(ConfigError, match="did you mean 'lab'"):
        prepare(raw, without=["labs"])
    with pytest.raises(ConfigError, match="keep at least one"):
        prepare(raw, without=["lab", "diagnosis", "medication", "physicalExam", "treatment"])


def test_a_stay_that_ends_before_it_starts_is_dropped_and_counted(tmp_path: Path) -> None:
    raw = write_tables(tmp_path / "raw", patient=TABLES["patient"].replace("-5,2000,1,2015,p-2", "-5,-1,1,2015,p-2"))
    data = prepare(raw)
    assert data.patients.tolist() == ["p-1"]
    assert data.info.cohort_flow[1].counts["left_out_end_before_start"] == 1


def test_duplicate_rows_and_blank_lines_change_nothing_but_the_counts(tmp_path: Path) -> None:
    plain = prepare(write_tables(tmp_path / "raw"))
    twice = {name: text + "\n" + text.splitlines()[1] + "\n\n" for name, text in TABLES.items()}
    data = prepare(write_tables(tmp_path / "raw", **twice))
    assert data.content_hash() == plain.content_hash()
    assert data.info.cohort_flow[0].counts["left_out_duplicates"] == 1
    assert data.info.cohort_flow[0].counts["left_out_without_id"] == 2


def test_a_stay_twice_with_other_content_is_an_error(tmp_path: Path) -> None:
    text = TABLES["patient"] + "20,1,Female,50,,-10,1000,1,2014,p-7\n"
    with pytest.raises(DataError, match="twice"):
        prepare(write_tables(tmp_path / "raw", patient=text))


def test_the_order_of_rows_and_files_does_not_matter(tmp_path: Path) -> None:
    plain = prepare(write_tables(tmp_path / "raw"))
    turned = {}
    for name, text in TABLES.items():
        header, *rows = text.splitlines()
        turned[name] = "\n".join([header, *reversed(rows)]) + "\n"
    assert prepare(write_tables(tmp_path / "raw", **turned)).content_hash() == plain.content_hash()


@pytest.mark.parametrize("table", [name for name in TABLES if name != "patient"])
def test_a_cut_table_is_an_error_that_leaves_nothing(raw: Path, table: str) -> None:
    (raw / f"{table}.csv").unlink()
    (raw / f"{table}.csv.gz").write_bytes(gzip.compress(TABLES[table].encode())[:-9])
    with pytest.raises(DataError, match="cut short"):
        prepare(raw)
    assert [path.name for path in raw.parent.iterdir()] == ["raw"]


def test_an_id_or_a_time_that_is_not_a_number_is_an_error(tmp_path: Path) -> None:
    raw = write_tables(tmp_path / "raw", lab=TABLES["lab"].replace("2,20,-30", "2,20,soon"))
    with pytest.raises(DataError, match=r"lab.csv, row 2: 'labresultoffset' is not a whole number"):
        prepare(raw)


def test_a_missing_column_is_an_error(tmp_path: Path) -> None:
    raw = write_tables(tmp_path / "raw", medication=TABLES["medication"].replace("frequency", "how often"))
    with pytest.raises(DataError, match="no column 'frequency'"):
        prepare(raw)


def test_after_a_full_disk_the_same_command_goes_on(raw: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("os.fsync", full)
        with pytest.raises(StorageError, match="disk is full"):
            prepare(raw)
    assert {path.name for path in raw.parent.iterdir()} == {"raw", ".out.work"}
    prepare(raw)
    assert {path.name for path in raw.parent.iterdir()} == {"raw", "out"}


def new_stays(raw: Path, trained: TrainedOn) -> tuple[dict[str, Any], pl.DataFrame]:
    (samples,) = eicu.Eicu().for_prediction(raw, trained, Options())
    return samples.columns, samples.rows


def test_new_stays_get_the_training_vocabulary(raw: Path, tmp_path: Path) -> None:
    data = prepare(raw, max_events=2)
    settings, vocabularies = data.info.settings, data.info.vocabularies
    columns, rows = new_stays(raw, TrainedOn("eicu", settings, vocabularies))
    assert rows["patientunitstayid"].to_list() == [20, 10, 30, 40]
    for name in ("event_kind", "event_time", "event_codes"):
        assert columns[name].to_rows() == data.column(name).to_rows()  # type: ignore[union-attr]
    assert torch.equal(columns["static"], torch.as_tensor(data.column("static")))  # type: ignore[arg-type]
    new = write_tables(tmp_path / "new", treatment="patientunitstayid,treatmentoffset,treatmentstring\n20,9,new\n")
    columns, _ = new_stays(new, TrainedOn("eicu", settings | {"max_events": 99}, vocabularies))
    assert [0] in columns["event_codes"].to_rows()[0]  # type: ignore[union-attr]
    with pytest.raises(DataError, match="trained on mimic3"):
        new_stays(new, TrainedOn("mimic3"))


def read(folder: Path, name: str) -> list[dict[str, str]]:
    with gzip.open(folder / f"{name}.csv.gz", "rt") as file:
        return [row for row in csv.DictReader(file) if row["patientunitstayid"]]


def test_the_demo_with_labs_gives_what_a_plain_loop_over_its_rows_gives(shared_data: Path, tmp_path: Path) -> None:
    folder = shared_data / "eicu_demo_with_lab"
    stays = {row["patientunitstayid"]: row for row in read(folder, "patient")}
    found: dict[str, dict[tuple[int, str], set[str]]] = defaultdict(lambda: defaultdict(set))

    def note(row: dict[str, str], kind: str, time: str, words: list[str]) -> None:
        stay, minute = row["patientunitstayid"], int(row[time])
        if minute <= int(stays[stay]["unitdischargeoffset"]):
            found[stay][minute, kind] |= {word.strip().lower() for word in words if word.strip()}

    for row in read(folder, "lab"):
        note(row, "lab", "labresultoffset", ["lab:" + row["labname"]])
    for row in read(folder, "treatment"):
        note(row, "treatment", "treatmentoffset", ["treatment:" + row["treatmentstring"]])
    for row in read(folder, "physicalExam"):
        note(row, "physical_exam", "physicalexamoffset", ["physical_exam:" + row["physicalexampath"]])
    for row in read(folder, "diagnosis"):
        icd = [f"diagnosis_icd:{code.strip()}" for code in row["icd9code"].split(",") if code.strip()]
        note(row, "diagnosis", "diagnosisoffset", ["diagnosis_string:" + row["diagnosisstring"].strip(), *icd])
    for row in read(folder, "medication"):
        number = row["drughiclseqno"].removesuffix(".0")
        name = row["drugname"] or (f"hicl {number}" if number else "")
        if name and row["drugordercancelled"] != "Yes":
            often = [f"medication_frequency:{row['frequency'].strip()}"] if row["frequency"].strip() else []
            note(row, "medication", "drugstartoffset", ["medication:" + name.strip(), *often])

    data = open_dataset(sources.prepare("eicu", folder, tmp_path / "out", max_events=None))
    _, rows = new_stays(folder, TrainedOn("eicu", data.info.settings, data.info.vocabularies))
    assert len(rows) == len(found) == 171
    for at, stay in enumerate(rows["patientunitstayid"].cast(pl.String)):
        seen = events(data, at)
        expected = sorted(found[stay].items())
        assert [(time, kind) for kind, time, _ in seen] == [key for key, _ in expected]
        assert [{word for word, _ in codes} for _, _, codes in seen] == [words for _, words in expected]


def test_the_demo_gives_the_same_in_batches_of_any_size(
    shared_data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = shared_data / "eicu_demo_with_lab"
    whole = open_dataset(sources.prepare("eicu", folder, tmp_path / "whole"))
    monkeypatch.setattr("manydg.sources._stays._BATCH", 600)
    assert open_dataset(sources.prepare("eicu", folder, tmp_path / "pieces")).content_hash() == whole.content_hash()


def test_the_demo_results_are_the_numbers_in_its_rows(shared_data: Path, tmp_path: Path) -> None:
    folder = shared_data / "eicu_demo_with_lab"
    end = {row["patientunitstayid"]: int(row["unitdischargeoffset"]) for row in read(folder, "patient")}
    expected: dict[str, set[float]] = defaultdict(set)
    for row in read(folder, "lab"):
        if int(row["labresultoffset"]) <= end[row["patientunitstayid"]]:
            value = row["labresult"] or row["labresulttext"].lstrip("<>= ")
            expected["lab:" + row["labname"].lower()].add(float(np.float32(float(value))))
    data = open_dataset(sources.prepare("eicu", folder, tmp_path / "out", max_events=None))
    codes, values = data.column("event_codes"), data.column("event_values")
    flat = [np.asarray(column.values.values) for column in (codes, values) if isinstance(column, Ragged)]  # type: ignore[union-attr]
    words = data.info.vocabularies["events"]
    found: dict[str, set[float]] = defaultdict(set)
    for code, value in zip(*flat, strict=True):
        if words[code].startswith("lab:"):
            found[words[code]].add(float(value))
    assert found == expected


def test_the_demo_counts_are_those_in_the_docs(shared_data: Path, tmp_path: Path) -> None:
    data = open_dataset(sources.prepare("eicu", shared_data / "eicu_demo", tmp_path / "a", without=["lab"]))
    assert (len(data), data.n_patients, int(data.targets.sum())) == (2365, 1810, 301)
    data = open_dataset(sources.prepare("eicu", shared_data / "eicu_demo_with_lab", tmp_path / "b"))
    assert (len(data), data.n_patients, int(data.targets.sum())) == (171, 100, 29)
    with pytest.raises(DataError, match="no table 'lab'"):
        sources.prepare("eicu", shared_data / "eicu_demo", tmp_path / "c")


def test_a_twin_goes_through_in_either_packing_with_any_number_of_workers(tmp_path: Path) -> None:
    hashes = set()
    for name, ending, workers in (("one", ".csv", 1), ("two", ".csv.gz", 2)):
        twin = sources.synthesize("eicu", tmp_path / name, patients=40, seed=3, ending=ending)
        hashes.add(
            open_dataset(sources.prepare("eicu", twin, tmp_path / f"{name}-out", workers=workers)).content_hash()
        )
    assert len(hashes) == 1


def test_a_twin_carries_its_patients_factors_in_the_laboratory_values(tmp_path: Path) -> None:
    twin = sources.synthesize("eicu", tmp_path / "twin", patients=150, seed=0)
    data = open_dataset(sources.prepare("eicu", twin, tmp_path / "out"))
    codes, values = data.column("event_codes"), data.column("event_values")
    assert isinstance(codes, Ragged)
    assert isinstance(values, Ragged)
    field = next(field for field in data.info.settings["code_fields"] if field["name"] == "lab")
    stays = [{code: [] for code in range(field["start"], field["stop"])} for _ in range(len(data))]  # type: list[dict[int, list[float]]]
    for row, (cs, vs) in enumerate(zip(codes.to_rows(), values.to_rows(), strict=True)):
        for event_codes, event_values in zip(cs, vs, strict=True):  # type: ignore[call-overload]
            for code, value in zip(event_codes, event_values, strict=True):
                if code in stays[row] and value > 0:
                    stays[row][code].append(math.log(value))
    means = np.array([[np.mean(v) if v else np.nan for v in stay.values()] for stay in stays])
    means -= np.nanmean(means, axis=0)
    domains = data.domains.numpy()
    same = np.flatnonzero(domains[1:] == domains[:-1])
    within = np.nanmean(np.abs(means[same] - means[same + 1]))
    across = np.nanmean(np.abs(means[same] - means[np.roll(same, 1)]))
    assert within < 0.9 * across
    assert 0.05 < float(data.targets.float().mean()) < 0.3


def test_a_killed_run_goes_on_with_the_tables_it_had_read(raw: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = prepare(raw).content_hash()
    reads: list[str] = []
    read_table = EventReader.read

    def killed_at_medication(self: EventReader, table: Table) -> dict[str, int]:
        if table.name == "medication":
            raise KeyboardInterrupt
        return read_table(self, table)

    def noted(self: EventReader, table: Table) -> dict[str, int]:
        reads.append(table.name)
        return read_table(self, table)

    for changed in ("", "f,20,50,new|one,\n"):
        (raw / "diagnosis.csv").write_text(TABLES["diagnosis"])
        monkeypatch.setattr(EventReader, "read", killed_at_medication)
        with pytest.raises(KeyboardInterrupt):
            sources.prepare("eicu", raw, raw.parent / "again", overwrite=True)
        if changed:
            (raw / "diagnosis.csv").write_text(TABLES["diagnosis"] + changed)
        reads.clear()
        monkeypatch.setattr(EventReader, "read", noted)
        data = open_dataset(sources.prepare("eicu", raw, raw.parent / "again", overwrite=True))
        assert "lab" not in reads
        assert "medication" in reads
        assert ("diagnosis" in reads) == bool(changed)
        assert ("diagnosis_string:new|one" in data.info.vocabularies["events"]) == bool(changed)
        assert (data.content_hash() == plain) == (not changed)
        assert not list(raw.parent.glob(".again*"))


def test_the_hospital_of_each_patient_is_kept_where_the_table_has_it(tmp_path: Path) -> None:
    lines = TABLES["patient"].splitlines()
    hospitals = ["hospitalid", "73", "73", "66", "90"]
    text = "".join(f"{line},{hospital}\n" for line, hospital in zip(lines, hospitals, strict=True))
    folder = write_tables(tmp_path / "raw", patient=text)
    sources.prepare("eicu", folder, tmp_path / "out")
    assert open_dataset(tmp_path / "out").info.sites == {"p-1": "73", "p-2": "90"}
    sources.prepare("eicu", write_tables(tmp_path / "plain"), tmp_path / "without")
    assert open_dataset(tmp_path / "without").sites() is None


@pytest.mark.slow
def test_later_stays_and_other_patients_never_reach_a_prediction_with_context(tmp_path: Path) -> None:
    """Through the commands: train with the context of earlier stays, change a later stay's raw events, predict."""
    invoke("synthesize", "eicu", "--patients", 40, "--patient-effect", 3, "--ending", ".csv", "--out", tmp_path / "raw")
    invoke("prepare", "eicu", tmp_path / "raw", "--out", tmp_path / "data")
    small = ("--epochs", 1, "--backbone", "gru", "--backbone-option", "width=8", "--config", "none", "--stratify")
    invoke("train", tmp_path / "data", "--algorithm", "base", "--context", "causal", *small, "--out", tmp_path / "run")
    invoke("predict", tmp_path / "run", tmp_path / "raw", "--out", tmp_path / "before")
    stays = eicu.read_stays(open_table(tmp_path / "raw" / "patient.csv", "patient"), CohortFlow())
    several = stays.filter(pl.len().over("patient") >= 3)
    mine = several.filter(pl.col("patient") == several["patient"][0])
    changed = mine["stay"][1]
    exams = pl.read_csv(tmp_path / "raw" / "physicalExam.csv", infer_schema=False)
    other = exams["physicalexampath"][0]
    here = pl.col("patientunitstayid") == str(changed)
    exams.with_columns(physicalexampath=pl.when(here).then(pl.lit(other)).otherwise("physicalexampath")).write_csv(
        tmp_path / "raw" / "physicalExam.csv"
    )
    invoke("predict", tmp_path / "run", tmp_path / "raw", "--out", tmp_path / "after")
    before, after = (pl.read_csv(tmp_path / name / "predictions.csv") for name in ("before", "after"))
    moved = before.filter(before["p_readmitted"] != after["p_readmitted"])["patientunitstayid"].to_list()
    assert set(moved) == set(mine["stay"][1:].to_list()), "the stay itself and what comes after it, nothing else"


def test_hospital_stays_of_one_year_are_neither_earlier_nor_later(tmp_path: Path) -> None:
    rows = [
        *("1,1,,,,-10,100,1,2014,p-1", "2,1,,,,-900,100,2,2014,p-1"),
        *("3,2,,,,-10,100,1,2014,p-2", "4,2,,,,-900,100,2,2014,p-2", "5,3,,,,-10,100,1,2014,p-2"),
        *("6,4,,,,-10,100,1,2015,p-2", "7,4,,,,-900,100,2,2015,p-2"),
    ]
    folder = write_tables(tmp_path / "raw", patient=HEADER + "".join(f"{row}\n" for row in rows))
    stays = eicu.read_stays(open_table(folder / "patient.csv", "patient"), CohortFlow())
    times = dict(zip(stays["stay"].to_list(), stays["time"].to_list(), strict=True))
    assert times[1] < times[2], "within a hospital stay the order is known"
    assert times[3] == times[4] == times[5]
    assert times[5] < times[6] < times[7], "and so is that of the years"
