"""Damaged CSV tables: whatever comes in, only our own errors come out, and nothing half-written is left."""

from __future__ import annotations

import contextlib
import gzip
import tempfile
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from manydg import sources
from manydg.errors import ManyDGError

# A last line that does not end is warned of, and read.
pytestmark = pytest.mark.filterwarnings("ignore::manydg.errors.ManyDGWarning")

MIMIC = {
    "ADMISSIONS": "SUBJECT_ID,HADM_ID,ADMITTIME,DISCHTIME\n"
    + "".join(f"{p},{p}{v},210{v}-01-01 10:00:00,210{v}-01-05 10:00:00\n" for p in (1, 2) for v in (1, 2)),
    "DIAGNOSES_ICD": "SUBJECT_ID,HADM_ID,ICD9_CODE\n"
    + "".join(f'{p},{p}{v},"40{c}"\n' for p in (1, 2) for v in (1, 2) for c in (1, 2)),
    "PROCEDURES_ICD": "SUBJECT_ID,HADM_ID,ICD9_CODE\n" + "".join(f"{p},{p}{v},1\n" for p in (1, 2) for v in (1, 2)),
    "PRESCRIPTIONS": "SUBJECT_ID,HADM_ID,NDC\n" + "".join(f"{p},{p}{v},1{v}\n" for p in (1, 2) for v in (1, 2)),
    "map": "ndc,atc\n11,A01AA\n12,B02BC\n",
}
EICU = {
    "patient": "patientunitstayid,patienthealthsystemstayid,gender,age,ethnicity,hospitaladmitoffset,"
    "unitdischargeoffset,unitvisitnumber,hospitaldischargeyear,uniquepid\n"
    "1,1,Male,60,Asian,-1,900,1,2014,a\n2,1,Male,60,Asian,-901,900,2,2014,a\n3,2,Female,> 89,,-1,900,1,2014,b\n",
    "lab": "patientunitstayid,labresultoffset,labname,labresult,labresulttext\n"
    '1,5,sodium,140,140\n2,5,sodium,,"<0.02"\n3,5,glucose,,"1,000"\n',
}
WITHOUT = ["diagnosis", "medication", "physicalexam", "treatment"]
DAMAGE = st.one_of(
    st.binary(min_size=1, max_size=6),
    st.sampled_from(
        [b'"', b",", b"\n", b"\r\n", b"\0", b"\xff\xfe", b"-", b"9" * 25, b"NaN", b"1e400", b'","', b"\n\n\n", b";"]
    ),
)


@st.composite
def damaged(draw: st.DrawFn, tables: dict[str, str]) -> tuple[str, bytes, bool]:
    """One table with bytes replaced, put in, or cut off; plain or gzipped (and then perhaps cut again)."""
    name = draw(st.sampled_from(sorted(tables)))
    data = bytearray(tables[name].encode())
    for _ in range(draw(st.integers(1, 3))):
        at = draw(st.integers(0, len(data)))
        data[at : at + draw(st.integers(0, 8))] = draw(DAMAGE)
    if draw(st.booleans()):
        del data[draw(st.integers(0, len(data))) :]
    packed = draw(st.booleans())
    content = gzip.compress(bytes(data)) if packed else bytes(data)
    if packed and draw(st.booleans()):
        content = content[: draw(st.integers(0, len(content)))]
    return name, content, packed


def write(folder: Path, tables: dict[str, str], name: str, content: bytes, packed: bool) -> None:
    for table, text in tables.items():
        if table != name:
            (folder / f"{table}.csv").write_text(text)
    ending = ".csv.gz" if packed and name != "map" else ".csv"
    (folder / f"{name}{ending}").write_bytes(content)


def survives(source: str, name: str, content: bytes, packed: bool) -> None:
    with tempfile.TemporaryDirectory() as place:
        raw = Path(place) / "raw"
        raw.mkdir()
        write(raw, MIMIC if source == "mimic3" else EICU, name, content, packed)
        out, finished = Path(place) / "out", False
        with contextlib.suppress(ManyDGError):
            if source == "mimic3":
                sources.prepare("mimic3", raw, out, ndc_map=raw / "map.csv")
            else:
                sources.prepare("eicu", raw, out, without=WITHOUT)
            finished = True
        assert {path.name for path in Path(place).iterdir()} == ({"raw", "out"} if finished else {"raw"})


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(damaged(MIMIC))
def test_damaged_mimic3_tables_raise_only_our_errors(case: tuple[str, bytes, bool]) -> None:
    survives("mimic3", *case)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(damaged(EICU))
def test_damaged_eicu_tables_raise_only_our_errors(case: tuple[str, bytes, bool]) -> None:
    survives("eicu", *case)


def test_the_undamaged_tables_are_good(tmp_path: Path) -> None:
    write(tmp_path, MIMIC | EICU, "", b"", False)
    (tmp_path / ".csv").unlink()
    assert sources.prepare("mimic3", tmp_path, tmp_path / "m", ndc_map=tmp_path / "map.csv").is_dir()
    assert sources.prepare("eicu", tmp_path, tmp_path / "e", without=WITHOUT).is_dir()


FOUND: list[tuple[str, str, bytes, bool]] = [
    # A lone carriage return before the header made the csv module raise an error of its own.
    ("eicu", "lab", b"\r" + EICU["lab"].encode(), False),
]


@pytest.mark.parametrize("case", FOUND)
def test_what_fuzzing_found_stays_mended(case: tuple[str, str, bytes, bool]) -> None:
    survives(*case)
