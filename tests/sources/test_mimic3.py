"""MIMIC-III: from tables to visits with their history."""

from __future__ import annotations

import csv
import gzip
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
import torch

from manydg import sources
from manydg.data.columns import Ragged
from manydg.data.dataset import DomainDataset, open_dataset
from manydg.errors import ConfigError, DataError, ManyDGError, ManyDGWarning, StorageError
from manydg.sources import TrainedOn, mimic3

ADMISSIONS = """SUBJECT_ID,HADM_ID,ADMITTIME,DISCHTIME
1,900,2101-01-01 10:00:00,2101-01-05 10:00:00
1,100,2102-01-01 10:00:00,2102-01-05 10:00:00
1,500,2101-06-01 10:00:00,2101-06-05 10:00:00
2,200,2110-01-01 00:00:00,2110-01-02 00:00:00
2,201,2110-02-01 00:00:00,2110-02-02 00:00:00
3,300,2110-01-01 00:00:00,2110-01-02 00:00:00
"""
DIAGNOSES = """SUBJECT_ID,HADM_ID,SEQ_NUM,ICD9_CODE
1,900,1,A
1,900,2,B
1,500,1,B
1,100,1,C
2,200,1,A
2,201,1,A
3,300,1,A
"""
PROCEDURES = """SUBJECT_ID,HADM_ID,SEQ_NUM,ICD9_CODE
1,900,1,0001
1,500,1,0002
1,100,1,0001
2,200,1,0001
2,201,1,0003
3,300,1,0001
"""
PRESCRIPTIONS = """SUBJECT_ID,HADM_ID,DRUG,NDC
1,900,x,00000000011
1,900,x,00000000011
1,900,y,00000000022
1,500,x,11
1,100,z,00000000033
1,100,q,0
2,200,x,00000000011
2,201,y,00000000022
3,300,x,00000000011
"""
MAP = "ndc,atc\n00000000011,A01AA01\n00000000022,B02BC\n33,C03C\n"


@pytest.fixture
def raw(tmp_path: Path) -> Path:
    return write_tables(tmp_path / "raw")


def write_tables(folder: Path, **changed: str) -> Path:
    folder.mkdir(exist_ok=True, parents=True)
    tables = {
        "ADMISSIONS": ADMISSIONS,
        "DIAGNOSES_ICD": DIAGNOSES,
        "PROCEDURES_ICD": PROCEDURES,
        "PRESCRIPTIONS": PRESCRIPTIONS,
    }
    for name, text in (tables | changed).items():
        (folder / f"{name}.csv").write_text(text)
    (folder / "map.csv").write_text(MAP)
    return folder


def prepare(raw: Path, **options: object) -> DomainDataset:
    out = sources.prepare("mimic3", raw, raw.parent / "out", ndc_map=raw / "map.csv", overwrite=True, **options)  # type: ignore[arg-type]
    return open_dataset(out)


def words(data: DomainDataset, column: str) -> list[list[list[str]]]:
    vocabulary = data.info.vocabularies["drugs" if column == "history_drugs" else column]
    ragged = data.column(column)
    assert isinstance(ragged, Ragged)
    return [[[vocabulary[code] for code in visit] for visit in row] for row in ragged.to_rows()]  # type: ignore[attr-defined]


def test_visits_stand_in_the_order_of_admission_not_of_their_numbers(raw: Path) -> None:
    data = prepare(raw)
    assert words(data, "diagnoses")[2] == [["A", "B"], ["B"], ["C"]]
    assert words(data, "procedures")[2] == [["0001"], ["0002"], ["0001"]]
    assert data.times is not None
    assert data.times[:3].tolist() == [0.0, 151 * 24.0, 365 * 24.0]


def test_history_holds_earlier_drugs_only_and_the_target_the_current_ones(raw: Path) -> None:
    data = prepare(raw)
    assert words(data, "history_drugs")[:3] == [[], [["A01A", "B02B"]], [["A01A", "B02B"], ["A01A"]]]
    # The second patient's visits follow the first's in the table, and know nothing of them.
    assert words(data, "history_drugs")[3:] == [[], [["A01A"]]]
    assert data.target.names == ("A01A", "B02B", "C03C")
    assert data.targets[:3].tolist() == [[1, 1, 0], [1, 0, 0], [0, 0, 1]]


def test_patients_with_one_complete_visit_are_left_out_and_every_step_is_counted(raw: Path) -> None:
    data = prepare(raw)
    assert sorted(data.patients) == ["1", "2"]
    flow = {step.step: step.counts for step in data.info.cohort_flow}
    assert flow["patients with 2 or more complete visits"]["samples"] == 5
    assert flow["rows of prescriptions"]["left_out_without_ndc"] == 1
    assert flow["rows of prescriptions"]["left_out_repeated"] == 1
    names = {entry.name for entry in data.info.provenance.files}
    assert names == {"ADMISSIONS.csv", "DIAGNOSES_ICD.csv", "PROCEDURES_ICD.csv", "PRESCRIPTIONS.csv", "map.csv"}


def test_a_prescription_under_another_patient_s_number_is_left_out_and_counted(tmp_path: Path) -> None:
    raw = write_tables(tmp_path / "raw", PRESCRIPTIONS=PRESCRIPTIONS + "1,200,z,00000000033\n")
    data = prepare(raw)
    assert data.targets.tolist() == prepare(write_tables(tmp_path / "plain")).targets.tolist()
    flow = {step.step: step.counts for step in data.info.cohort_flow}
    assert flow["rows of prescriptions"]["left_out_unknown_admission"] == 1


def test_the_first_row_of_a_mapping_counts(raw: Path) -> None:
    (raw / "map.csv").write_text("ndc,atc\n11,none\n" + MAP.removeprefix("ndc,atc\n") + "00000000011,Z09ZZ09\n")
    assert prepare(raw).target.names == ("A01A", "B02B", "C03C")


def test_a_visit_without_procedures_is_not_complete(tmp_path: Path) -> None:
    raw = write_tables(tmp_path / "raw", PROCEDURES_ICD=PROCEDURES.replace("1,500,1,0002\n", ""))
    assert words(prepare(raw), "diagnoses")[:2] == [[["A", "B"]], [["A", "B"], ["C"]]]


def test_an_admission_that_ends_before_it_starts_is_dropped_and_counted(tmp_path: Path) -> None:
    raw = write_tables(tmp_path / "raw", ADMISSIONS=ADMISSIONS.replace("2101-06-05", "2101-05-05"))
    data = prepare(raw)
    assert len(data) == 4
    assert data.info.cohort_flow[1].counts["left_out_end_before_start"] == 1


def test_duplicate_rows_are_dropped_and_counted(tmp_path: Path) -> None:
    again = ADMISSIONS + ADMISSIONS.splitlines()[1] + "\n"
    twice = DIAGNOSES + DIAGNOSES.splitlines()[1] + "\n"
    plain = prepare(write_tables(tmp_path / "raw"))
    data = prepare(write_tables(tmp_path / "raw", ADMISSIONS=again, DIAGNOSES_ICD=twice))
    assert data.info.cohort_flow[0].counts["left_out_duplicates"] == 1
    assert data.info.cohort_flow[2].counts["left_out_repeated"] == 1
    assert data.content_hash() == plain.content_hash()


def test_an_admission_of_two_patients_is_an_error(tmp_path: Path) -> None:
    text = ADMISSIONS + "3,900,2101-01-01 10:00:00,2101-01-05 10:00:00\n"
    with pytest.raises(DataError, match="twice"):
        prepare(write_tables(tmp_path / "raw", ADMISSIONS=text))


def test_a_mapping_that_covers_under_half_is_an_error_and_leaves_nothing(raw: Path) -> None:
    (raw / "map.csv").write_text("ndc,atc\n00000000033,C03C\n")
    with pytest.raises(DataError, match=r"only 1 of 9 prescriptions.*under half"):
        prepare(raw)
    assert [path.name for path in raw.parent.iterdir()] == ["raw"]


def test_a_mapping_without_the_columns_or_codes_is_an_error(raw: Path) -> None:
    (raw / "map.csv").write_text("product,atc\n1,A01A\n")
    with pytest.raises(DataError, match="no column 'ndc'"):
        prepare(raw)
    (raw / "map.csv").write_text("ndc,atc\n1,nonsense\n")
    with pytest.raises(DataError, match="maps no NDC"):
        prepare(raw)


@pytest.mark.parametrize("column", ["ICD9_CODE", "HADM_ID"])
def test_a_missing_column_is_an_error(tmp_path: Path, column: str) -> None:
    raw = write_tables(tmp_path / "raw", DIAGNOSES_ICD=DIAGNOSES.replace(column, "SOMETHING"))
    with pytest.raises(DataError, match=f"no column '{column.lower()}'"):
        prepare(raw)


def test_an_id_that_is_not_a_number_is_an_error(tmp_path: Path) -> None:
    raw = write_tables(tmp_path / "raw", PRESCRIPTIONS=PRESCRIPTIONS.replace("2,201", "2,two"))
    with pytest.raises(DataError, match=r"PRESCRIPTIONS.csv, row 8: 'hadm_id' is not a whole number"):
        prepare(raw)


def test_a_missing_table_and_a_cut_one_are_errors_that_leave_nothing(raw: Path) -> None:
    whole = gzip.compress(DIAGNOSES.encode())
    (raw / "DIAGNOSES_ICD.csv").unlink()
    with pytest.raises(DataError, match="no table 'diagnoses_icd'"):
        prepare(raw)
    (raw / "DIAGNOSES_ICD.csv.gz").write_bytes(whole[:-12])
    with pytest.raises(DataError, match="cut short"):
        prepare(raw)
    assert not (raw.parent / "out").exists()


def test_the_wrong_database_in_the_folder_is_recognised(tmp_path: Path) -> None:
    for name in ("patient", "lab", "treatment"):
        (tmp_path / f"{name}.csv").write_text("a\n1\n")
    with pytest.raises(DataError, match="looks like eicu"):
        sources.prepare("mimic3", tmp_path, tmp_path / "out", ndc_map=tmp_path / "map.csv")


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


def test_only_the_most_frequent_diagnoses_may_be_kept(raw: Path) -> None:
    data = prepare(raw, max_diagnoses=1)
    assert data.info.vocabularies["diagnoses"] == ["<unknown>", "A"]


def test_a_list_of_drugs_and_a_limit_of_patients_narrow_the_cohort(raw: Path) -> None:
    (raw / "drugs.txt").write_text("A01A\nB02B\n")
    assert prepare(raw, drugs=raw / "drugs.txt").target.names == ("A01A", "B02B")
    assert prepare(raw, limit_patients=1).patients.tolist() == ["1"]
    with pytest.raises(ConfigError, match="min_visits"):
        prepare(raw, min_visits=0)
    with pytest.raises(DataError, match="9 or more complete visits"):
        prepare(raw, min_visits=9)


def test_interactions_are_read_by_atc_and_by_compound(raw: Path) -> None:
    (raw / "ddi.csv").write_text("atc_1,atc_2\nB02BC,A01AA01\nA01AA,B02B\nX99X,A01A\nC03C,C03CA01\n")
    assert prepare(raw, ddi=raw / "ddi.csv").info.settings["drug_interactions"] == [[0, 1]]
    (raw / "stitch.csv").write_text("STITCH 1,STITCH 2,Side Effect Name\nCID1,CID2,rare\nCID1,CID3,rare\n")
    (raw / "cid.csv").write_text("CID1,A01AA01,C03CA01\nCID2,B02BC02\n")
    data = prepare(raw, ddi=raw / "stitch.csv", ddi_atc=raw / "cid.csv")
    assert data.info.settings["drug_interactions"] == [[0, 1], [1, 2]]
    with pytest.raises(DataError, match="--ddi-atc"):
        prepare(raw, ddi=raw / "stitch.csv")


def new_visits(raw: Path, trained: TrainedOn, ndc_map: Path | None) -> tuple[dict[str, Any], pl.DataFrame, Any]:
    (samples,) = mimic3.Mimic3().for_prediction(raw, trained, mimic3.DrugMapOptions(ndc_map))
    return samples.columns, samples.rows, samples.patients


def test_new_visits_get_the_training_vocabulary_and_need_no_drugs_of_their_own(raw: Path, tmp_path: Path) -> None:
    data = prepare(raw)
    new = write_tables(
        tmp_path / "new",
        ADMISSIONS="SUBJECT_ID,HADM_ID,ADMITTIME,DISCHTIME\n7,70,2101-01-01 00:00:00,\n7,71,2102-01-01 00:00:00,\n",
        DIAGNOSES_ICD="SUBJECT_ID,HADM_ID,ICD9_CODE\n7,70,B\n7,71,C\n7,71,NEW\n",
        PROCEDURES_ICD="SUBJECT_ID,HADM_ID,ICD9_CODE\n7,70,0001\n7,71,0002\n",
        PRESCRIPTIONS="SUBJECT_ID,HADM_ID,NDC\n7,70,22\n",
    )
    info = data.info
    trained = TrainedOn("mimic3", info.settings, info.vocabularies)
    columns, rows, _ = new_visits(new, trained, raw / "map.csv")
    assert rows["hadm_id"].to_list() == [70, 71]
    assert rows["earlier_visits"].to_list() == [0, 1]
    assert columns["diagnoses"].to_rows() == [[[2]], [[2], [0, 3]]]  # type: ignore[union-attr]
    assert columns["history_drugs"].to_rows() == [[], [[1]]]  # type: ignore[union-attr]
    with pytest.raises(ConfigError, match="--ndc-map"):
        new_visits(new, trained, None)
    with pytest.raises(DataError, match="trained on eicu"):
        new_visits(new, TrainedOn("eicu"), raw / "map.csv")


NEW = {
    "ADMISSIONS": "SUBJECT_ID,HADM_ID,ADMITTIME,DISCHTIME\n7,70,2101-01-01 00:00:00,\n8,80,2102-01-01 00:00:00,\n",
    "DIAGNOSES_ICD": "SUBJECT_ID,HADM_ID,ICD9_CODE\n7,70,B\n8,80,C\n",
    "PROCEDURES_ICD": "SUBJECT_ID,HADM_ID,ICD9_CODE\n7,70,0001\n8,80,0002\n",
}
AGAIN = {
    "ADMISSIONS": NEW["ADMISSIONS"] + "8,81,2103-01-01 00:00:00,\n",
    "DIAGNOSES_ICD": NEW["DIAGNOSES_ICD"] + "8,81,C\n",
    "PROCEDURES_ICD": NEW["PROCEDURES_ICD"] + "8,81,0002\n",
}


@pytest.mark.parametrize(
    "prescriptions",
    [None, "SUBJECT_ID,HADM_ID,NDC\n", "SUBJECT_ID,HADM_ID,NDC\n7,70,99999\n8,80,\n"],
    ids=["no table", "no rows", "no mapped one"],
)
@pytest.mark.parametrize("mapped", [True, False])
def test_new_patients_without_mapped_prescriptions_are_predicted(
    raw: Path, tmp_path: Path, prescriptions: str | None, mapped: bool
) -> None:
    info = prepare(raw).info
    trained = TrainedOn("mimic3", info.settings, info.vocabularies)
    new = tmp_path / "new"
    new.mkdir()
    for name, text in (NEW | ({} if prescriptions is None else {"PRESCRIPTIONS": prescriptions})).items():
        (new / f"{name}.csv").write_text(text)
    columns, rows, _ = new_visits(new, trained, raw / "map.csv" if mapped else None)
    assert rows["hadm_id"].to_list() == [70, 80]
    assert columns["history_drugs"].to_rows() == [[], []]


def test_a_history_that_is_not_known_is_warned_of_or_its_mapping_asked_for(raw: Path, tmp_path: Path) -> None:
    info = prepare(raw).info
    trained = TrainedOn("mimic3", info.settings, info.vocabularies)
    new = tmp_path / "new"
    new.mkdir()
    for name, text in AGAIN.items():
        (new / f"{name}.csv").write_text(text)
    with pytest.warns(ManyDGWarning, match="no table of prescriptions: earlier visits without known drugs are not"):
        _, rows, _ = new_visits(new, trained, None)
    assert rows["earlier_visits"].to_list() == [0, 0, 0]
    (new / "PRESCRIPTIONS.csv").write_text("SUBJECT_ID,HADM_ID,NDC\n8,80,99999\n8,81,99999\n")
    with pytest.raises(ConfigError, match=r"the drugs of 1 earlier visits need a mapping .*--ndc-map"):
        new_visits(new, trained, None)
    with pytest.warns(ManyDGWarning, match=r"map.csv maps only 0 of 2 prescriptions"):
        new_visits(new, trained, raw / "map.csv")


@pytest.mark.parametrize("other", ["01000", "1e3", "12345678901234567890123"])
def test_ids_of_patients_are_text(tmp_path: Path, other: str) -> None:
    tables = {}
    for name, text in (
        ("ADMISSIONS", ADMISSIONS),
        ("DIAGNOSES_ICD", DIAGNOSES),
        ("PROCEDURES_ICD", PROCEDURES),
        ("PRESCRIPTIONS", PRESCRIPTIONS),
    ):
        header, *rows = text.strip().split("\n")
        column = header.upper().split(",").index("SUBJECT_ID")
        renamed = []
        for row in rows:
            cells = row.split(",")
            cells[column] = {"1": "1000", "2": other}.get(cells[column], cells[column])
            renamed.append(",".join(cells))
        tables[name] = "\n".join([header, *renamed]) + "\n"
    plain = prepare(write_tables(tmp_path / "plain" / "raw"))
    data = prepare(write_tables(tmp_path / "renamed" / "raw", **tables))
    assert len(data) == len(plain)
    new_name = {"1": "1000", "2": other}
    assert sorted(data.patients) == sorted(new_name.get(name, name) for name in plain.patients)
    for old in plain.patients:
        one = plain.select(plain.domains == plain.patients.tolist().index(old))
        two = data.select(data.domains == data.patients.tolist().index(new_name.get(old, old)))
        assert words(one, "diagnoses") == words(two, "diagnoses")
        assert one.targets.tolist() == two.targets.tolist()


def test_the_training_tables_give_the_same_inputs_at_prediction(raw: Path) -> None:
    data = prepare(raw)
    info = data.info
    trained = TrainedOn("mimic3", info.settings, info.vocabularies)
    columns, _, patients = new_visits(raw, trained, raw / "map.csv")
    known = np.isin(patients.astype(str), data.patients)
    for name in ("diagnoses", "procedures", "history_drugs"):
        ragged, trained = columns[name], data.column(name)
        assert isinstance(ragged, Ragged)
        assert isinstance(trained, Ragged)
        assert ragged.take(torch.from_numpy(np.flatnonzero(known))).to_rows() == trained.to_rows()


def read(folder: Path, name: str) -> list[dict[str, str]]:
    with gzip.open(folder / f"{name}.csv.gz", "rt") as file:
        return list(csv.DictReader(file))


def test_the_demo_gives_what_a_plain_loop_over_its_rows_gives(shared_data: Path, tmp_path: Path) -> None:
    folder, mapping = shared_data / "mimic3_demo", shared_data / "drug_mapping" / "ndc_to_atc.csv"
    with mapping.open() as file:
        atc = {row["ndc"]: row["atc"][:4] for row in reversed(list(csv.DictReader(file)))}
    codes: dict[str, dict[str, set[str]]] = {name: defaultdict(set) for name in ("d", "p", "m")}
    for row in read(folder, "DIAGNOSES_ICD"):
        codes["d"][row["hadm_id"]].add(row["icd9_code"])
    for row in read(folder, "PROCEDURES_ICD"):
        codes["p"][row["hadm_id"]].add(row["icd9_code"])
    for row in read(folder, "PRESCRIPTIONS"):
        if row["ndc"] in atc:
            codes["m"][row["hadm_id"]].add(atc[row["ndc"]])
    visits = defaultdict(list)
    for row in sorted(read(folder, "ADMISSIONS"), key=lambda row: row["admittime"]):
        if all(codes[kind][row["hadm_id"]] for kind in "dpm"):
            visits[row["subject_id"]].append(row["hadm_id"])
    expected = [
        (patient, [sorted(codes["d"][visit]) for visit in found[: at + 1]], sorted(codes["m"][found[at]]))
        for patient, found in sorted(visits.items(), key=lambda item: int(item[0]))
        if len(found) >= 2
        for at in range(len(found))
    ]
    data = open_dataset(sources.prepare("mimic3", folder, tmp_path / "out", ndc_map=mapping))
    drugs = [[data.target.names[k] for k in np.flatnonzero(row)] for row in data.targets.numpy()]
    patients = data.patients[data.domains.numpy()].tolist()
    assert list(zip(patients, words(data, "diagnoses"), drugs, strict=True)) == expected


def test_the_demo_counts_are_those_in_the_docs(shared_data: Path, tmp_path: Path) -> None:
    mapping = shared_data / "drug_mapping" / "ndc_to_atc.csv"
    data = open_dataset(sources.prepare("mimic3", shared_data / "mimic3_demo", tmp_path / "out", ndc_map=mapping))
    assert (len(data), data.n_patients) == (36, 11)
    assert {name: len(found) for name, found in data.info.vocabularies.items()} == {
        "diagnoses": 228,
        "procedures": 58,
        "drugs": 88,
    }


def test_a_twin_goes_through_in_either_packing_and_the_same_seed_gives_the_same_bytes(tmp_path: Path) -> None:
    hashes = []
    for name, ending in (("one", ".csv"), ("two", ".csv.gz"), ("three", ".csv")):
        twin = sources.synthesize("mimic3", tmp_path / name, patients=60, seed=3, ending=ending)
        out = sources.prepare("mimic3", twin, tmp_path / f"{name}-out", ndc_map=twin / "ndc_to_atc.csv")
        hashes.append(open_dataset(out).content_hash())
    assert hashes[0] == hashes[1] == hashes[2]
    for path in (tmp_path / "one").iterdir():
        assert path.read_bytes() == (tmp_path / "three" / path.name).read_bytes()


def test_a_twin_has_the_blemishes_of_the_original_and_factors_that_show(tmp_path: Path) -> None:
    twin = sources.synthesize("mimic3", tmp_path / "twin", patients=1500, seed=0)
    data = open_dataset(sources.prepare("mimic3", twin, tmp_path / "out", ndc_map=twin / "ndc_to_atc.csv"))
    flow = {step.step: step.counts for step in data.info.cohort_flow}
    drugs = flow["rows of prescriptions"]
    assert drugs["left_out_without_ndc"] > 0
    assert 0.03 < drugs["left_out_not_in_mapping"] / drugs["rows"] < 0.2
    assert flow["admissions in the table"]["patients"] == 1500
    assert data.n_patients < 500
    truth = pl.read_parquet(twin / "truth.parquet")
    assert truth.height == 1500
    overlap_within, overlap_across = _overlaps(data)
    assert overlap_within > overlap_across + 0.02


def _overlaps(data: DomainDataset) -> tuple[float, float]:
    """Mean Jaccard overlap of the drugs of a patient's first two visits, and of two patients' first visits."""
    targets, domains = data.targets.numpy() > 0, data.domains.numpy()
    first = np.flatnonzero(np.diff(domains, prepend=-1))
    a, b, c = targets[first], targets[first + 1], targets[np.roll(first, 1)]
    return tuple(float(((a & x).sum(1) / (a | x).sum(1)).mean()) for x in (b, c))  # type: ignore[return-value]


def test_nothing_is_written_where_a_dataset_stands_already(raw: Path) -> None:
    sources.prepare("mimic3", raw, raw.parent / "out", ndc_map=raw / "map.csv")
    with pytest.raises(StorageError, match="already exists"):
        sources.prepare("mimic3", raw, raw.parent / "out", ndc_map=raw / "map.csv")


def test_a_synthetic_folder_is_never_half_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(pl.DataFrame, "write_csv", full)
    with pytest.raises(ManyDGError, match="disk is full"):
        sources.synthesize("mimic3", tmp_path / "twin", patients=5)
    assert list(tmp_path.iterdir()) == []
