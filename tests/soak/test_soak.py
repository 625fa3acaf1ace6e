"""Hundreds of kills and thousands of damaged inputs, drawn anew each time; the seed is printed for a repetition."""

from __future__ import annotations

import random
import sys

import pytest
from tests.soak import damage, kills

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform != "linux", reason="needs Linux's signals and forks"),
]


@pytest.fixture
def seed() -> int:
    return random.SystemRandom().randrange(1 << 31)


def test_killed_commands_end_as_if_nothing_had_happened(seed: int, capsys: pytest.CaptureFixture[str]) -> None:
    with capsys.disabled():
        print()
        outcome = kills.soak(300, seed)
    assert not outcome.failures, f"python -m tests.soak.kills --kills 300 --seed {seed}"
    assert sum(outcome.kills.values()) >= 300


def test_damaged_inputs_are_refused_or_read_but_never_crash(seed: int, capsys: pytest.CaptureFixture[str]) -> None:
    with capsys.disabled():
        print()
        outcome = damage.soak(2000, seed)
    assert not outcome.failures, f"python -m tests.soak.damage --inputs 2000 --seed {seed}"
