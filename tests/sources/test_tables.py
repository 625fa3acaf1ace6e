"""Finding and scanning CSV tables."""

from __future__ import annotations

import gzip
from pathlib import Path

import pytest

from manydg.errors import DataError, ManyDGError, ManyDGWarning, StorageError
from manydg.sources._tables import find_tables, open_table

TEXT = "ID,Name\n1,a\n2,b\n"


def write(path: Path, text: str = TEXT) -> Path:
    data = text.encode()
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
    return path


def scan(path: Path) -> list[dict[str, object]]:
    table = open_table(path, "t")
    with table.reading(["id"]):
        return table.scan(integers=["id"], texts=["name"]).collect(engine="streaming").to_dicts()


@pytest.mark.parametrize("name", ["ADMISSIONS.csv", "admissions.CSV", "Admissions.csv.gz", "ADMISSIONS.CSV.GZ"])
def test_a_table_is_found_in_any_case_and_packing(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    path.write_bytes(gzip.compress(TEXT.encode()) if name.lower().endswith("gz") else TEXT.encode())
    tables = find_tables(tmp_path, ["admissions"], source="mimic3")
    assert tables["admissions"].path == path
    assert scan(path) == [{"id": 1, "name": "a"}, {"id": 2, "name": "b"}]


def test_quotes_spaces_and_a_byte_order_mark_in_the_header_do_not_matter(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_bytes(b'\xef\xbb\xbf"id","NAME"\n1,"x, y"\n')
    assert scan(path) == [{"id": 1, "name": "x, y"}]


def test_the_same_table_twice_is_an_error(tmp_path: Path) -> None:
    write(tmp_path / "patient.csv")
    write(tmp_path / "PATIENT.csv.gz")
    with pytest.raises(DataError, match="both"):
        find_tables(tmp_path, ["patient"], source="eicu")


def test_a_missing_table_is_named_with_the_way_out(tmp_path: Path) -> None:
    write(tmp_path / "patient.csv")
    with pytest.raises(DataError, match=r"no table 'lab'.*--without lab"):
        find_tables(tmp_path, ["patient", "lab"], source="eicu", optional=["lab"])


def test_a_folder_with_another_database_is_recognised(tmp_path: Path) -> None:
    for name in ("patient", "lab", "diagnosis"):
        write(tmp_path / f"{name}.csv")
    with pytest.raises(DataError, match="looks like eicu"):
        find_tables(tmp_path, ["admissions", "prescriptions"], source="mimic3")


def test_a_folder_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="no folder"):
        find_tables(tmp_path / "nowhere", ["patient"], source="eicu")


def test_a_missing_column_is_named_with_those_that_are_there(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"no column 'name'; its columns are id, other"):
        scan(write(tmp_path / "t.csv", "id,other\n1,2\n"))


def test_a_column_twice_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="twice"):
        open_table(write(tmp_path / "t.csv", "id,ID\n1,2\n"), "t")


@pytest.mark.parametrize("name", ["t.csv", "t.csv.gz"])
def test_an_empty_file_is_an_error(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    path.write_bytes(b"")
    with pytest.raises(DataError, match=r"empty"):
        open_table(path, "t")


@pytest.mark.parametrize("share", [0.1, 0.5, 0.99])
def test_a_cut_gzip_file_is_an_error(tmp_path: Path, share: float) -> None:
    whole = gzip.compress(("id,name\n" + "".join(f"{n},{n * 7919 % 1000}\n" for n in range(200_000))).encode())
    path = tmp_path / "t.csv.gz"
    path.write_bytes(whole[: int(len(whole) * share)])
    with pytest.raises(DataError, match="cut short"):
        scan(path)


def test_a_plain_file_that_ends_in_the_middle_of_a_row_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="last row has 1 of 2 fields"):
        scan(write(tmp_path / "t.csv", TEXT + "31"))
    assert len(scan(write(tmp_path / "t.csv", TEXT + '3,"two\nlines"\n\n'))) >= 3
    with pytest.warns(ManyDGWarning, match=r"the last line of .*t.csv does not end"):
        assert len(scan(write(tmp_path / "t.csv", TEXT + "3,c"))) == 3


def test_a_file_cut_before_it_was_packed_is_an_error(tmp_path: Path) -> None:
    """The gzip file itself is whole, so only its content can tell."""
    with pytest.raises(DataError, match=r"t.csv.gz is cut short: its last row has 1 of 2 fields"):
        scan(write(tmp_path / "t.csv.gz", TEXT + "31"))
    with pytest.warns(ManyDGWarning, match=r"the last line of .*t.csv.gz does not end"):
        scan(write(tmp_path / "t.csv.gz", TEXT + "3,c"))


def test_a_decompression_bomb_stops_at_the_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("manydg.files.UNPACKED_ALWAYS", 1 << 22)
    path = write(tmp_path / "t.csv.gz", "id,name\n" + f"1,{'a' * 100}\n" * 100_000)
    with pytest.raises(DataError, match=r"t.csv.gz unpacks to more than \d MB, over 200 times its size"):
        scan(path)
    monkeypatch.setattr("manydg.files.UNPACKED_RATIO", 10_000)
    assert len(scan(path)) == 100_000
    monkeypatch.setattr("manydg.files.UNPACKED_MOST", 1 << 23)
    with pytest.raises(DataError, match="unpacks to more than 8 MB"):
        scan(path)


def test_an_id_that_is_not_a_number_is_placed_but_not_shown(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"row 2: 'id' is not a whole number") as error:
        scan(write(tmp_path / "t.csv", "id,name\n1,a\nP0815,b\n"))
    assert "P0815" not in str(error.value)


def test_a_row_with_too_many_fields_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="more fields"):
        scan(write(tmp_path / "t.csv", "id,name\n1,a,b,c\n"))


def test_a_quote_that_never_closes_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"well-formed|whole number"):
        scan(write(tmp_path / "t.csv", 'id,name\n1,"a\n2,b\n'))


def test_bytes_that_are_no_text_are_an_error(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_bytes(b"\x89PNG\r\n\x1a\n\xff\xfe")
    with pytest.raises(ManyDGError):
        scan(path)
