"""What the tests of experiments share."""

from __future__ import annotations

import pytest

from manydg.studies.catalogue import runtime


@pytest.fixture(autouse=True)
def few_patients(monkeypatch: pytest.MonkeyPatch) -> None:
    """A million patients take minutes and gigabytes; what is measured is the same with a few."""
    monkeypatch.setattr(runtime, "PATIENTS", (10, 200))
