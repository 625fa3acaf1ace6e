"""What the tests of experiments share."""

from __future__ import annotations

import pytest

from manydg.studies import patient_cost


@pytest.fixture(autouse=True)
def few_patients(monkeypatch: pytest.MonkeyPatch) -> None:
    """A million patients take minutes and gigabytes; what is measured is the same with a few."""
    monkeypatch.setattr(patient_cost, "PATIENTS", (10, 200))
