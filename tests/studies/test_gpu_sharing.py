"""Workers on a GPU share it through NVIDIA's service, which is started for them and stopped after them.

The real service needs a GPU; here a small program of its name on the path writes down what it was told.
"""

from __future__ import annotations

import os
import time
import warnings
from pathlib import Path

import pytest

from manydg.errors import ManyDGWarning
from manydg.studies import engines as gpu_sharing
from manydg.studies.engines import CONTROL, LOGS, PIPES, shared_gpu


@pytest.fixture
def control(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the control program writes what it was told, with the folder that it was told to use."""
    told = tmp_path / "told"
    program = tmp_path / "bin" / CONTROL
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\necho "$* $(cat) ${PIPES}" >> {told}\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")
    monkeypatch.setattr(gpu_sharing, "_DEFAULT_PIPES", tmp_path / "none")
    monkeypatch.delenv(PIPES, raising=False)
    monkeypatch.delenv(LOGS, raising=False)
    return told


def test_a_service_of_its_own_is_started_for_the_block_and_stopped_after_it(control: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with shared_gpu():
            folder = os.environ[PIPES]
            assert Path(folder).is_dir()
            assert control.read_text().split() == ["-d", folder]
    assert control.read_text().split() == ["-d", folder, "quit", folder]
    assert PIPES not in os.environ
    assert LOGS not in os.environ
    assert not Path(folder).exists()


def test_the_service_is_stopped_when_a_study_fails(control: Path) -> None:
    with pytest.raises(RuntimeError, match="a run"), shared_gpu():
        raise RuntimeError("a run")
    assert "quit" in control.read_text()
    assert PIPES not in os.environ


def test_a_service_that_runs_already_is_used(control: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(PIPES, "elsewhere")
    with shared_gpu():
        assert os.environ[PIPES] == "elsewhere"
    assert not control.exists()
    monkeypatch.delenv(PIPES)
    default = control.parent / "none"
    default.mkdir()
    (default / "control").touch()
    with shared_gpu():
        assert PIPES not in os.environ
    assert not control.exists()


def test_where_the_service_is_not_installed_runs_take_turns_and_the_user_hears_of_it(
    control: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "")
    with pytest.warns(ManyDGWarning, match="take turns on the GPU.*not installed"), shared_gpu():
        assert PIPES not in os.environ


def test_a_service_that_will_not_start_is_left_alone(control: Path) -> None:
    (control.parent / "bin" / CONTROL).write_text("#!/bin/sh\necho no device >&2\nexit 3\n")
    with pytest.warns(ManyDGWarning, match="take turns on the GPU.*no device"), shared_gpu():
        assert PIPES not in os.environ


def test_a_service_that_stays_in_the_background_is_not_waited_for(control: Path) -> None:
    (control.parent / "bin" / CONTROL).write_text('#!/bin/sh\n[ "$1" = -d ] && sleep 60 &\n')
    start = time.monotonic()
    with shared_gpu():
        assert PIPES in os.environ
    assert time.monotonic() - start < 15
