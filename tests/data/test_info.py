"""What dataset.json holds: read and written by typed models that lose nothing."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from manydg.data.dataset import from_arrays, open_dataset
from manydg.data.info import CohortStep, DatasetInfo, Provenance, SourceFile
from manydg.data.storage import read_description
from manydg.errors import DataError

INFO = DatasetInfo(
    name="mine",
    vocabularies={"codes": ["<unknown>", "a"]},
    settings={"rate": 100.0, "channels": ["Fpz", "Pz"], "session_gap": 3},
    sizes={"drugs": 7},
    test_patients=("p", "q"),
    provenance=Provenance("table", "manydg 1", (SourceFile("x.csv", 12, "ab"),), {"missing": "keep", "limit": None}),
    cohort_flow=(CohortStep("rows", {"patients": 2, "left_out": 1}),),
    other={"note": ["kept", {"as": "given"}]},
)


def test_info_survives_json() -> None:
    assert DatasetInfo.from_json(json.loads(json.dumps(INFO.to_json()))) == INFO


def test_what_is_empty_is_not_written_but_a_prepared_dataset_states_its_settings() -> None:
    assert DatasetInfo().to_json() == {}
    assert set(DatasetInfo(provenance=Provenance("table")).to_json()) == {"settings", "provenance"}


def test_source_and_session_gap_are_none_where_nothing_is_known() -> None:
    assert (INFO.source, INFO.session_gap) == ("table", 3.0)
    assert (DatasetInfo().source, DatasetInfo().session_gap) == (None, None)


def test_a_dataset_takes_info_as_a_dict_or_typed_and_keeps_it_on_disk(tmp_path: Path) -> None:
    given = from_arrays(np.zeros((2, 1)), [0, 1], ["p", "q"], info=INFO.to_json())
    assert given.info == INFO
    assert open_dataset(given.save(tmp_path / "data")).info == INFO


def test_info_that_fits_no_entry_is_refused() -> None:
    with pytest.raises(DataError, match="DatasetInfo"):
        from_arrays(np.zeros((2, 1)), [0, 1], ["p", "q"], info={"provenance": "a table"})


def test_the_description_of_a_folder_agrees_with_the_dataset(tmp_path: Path) -> None:
    dataset = from_arrays(np.zeros((3, 2)), [0, 1, 1], ["p", "q", "q"])
    description = read_description(dataset.save(tmp_path / "data"))
    assert (description.samples, description.patients, description.target) == (3, 2, dataset.target)
    assert description.content_hash == dataset.content_hash()
    assert description.files["inputs.x"].shape == (3, 2)
