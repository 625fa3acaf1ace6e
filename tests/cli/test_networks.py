"""No command talks to anybody: neither Python nor a library in C looks up a host or connects to one."""

from __future__ import annotations

import json
import os
import re
import shutil
import stat
import subprocess
import sys
from pathlib import Path

import pytest

# All commands one after the other, in one process and the workers it starts.
DRIVER = """
import json, os, sys
heard = []
def listen(event, arguments):
    if event in ("socket.connect", "socket.getaddrinfo", "socket.gethostbyname", "socket.sendto", "socket.bind"):
        heard.append([event, repr(arguments[1:])])
if __name__ == "__main__":
    sys.addaudithook(listen)
    from manydg.cli import main
    for command in json.loads(sys.argv[1]):
        sys.argv = ["manydg", *command]
        try:
            main()
        except SystemExit as stop:
            if stop.code:
                print("failed:", command, file=sys.stderr)
                sys.exit(stop.code)
    # A library that reports at its leisure gets the time to do so.
    import time
    time.sleep(3)
    with open("heard.json", "w") as file:
        json.dump(heard, file)
"""
SMALL = ("--device", "cpu", "--epochs", "1")
COMMANDS = [
    ["demo", "--out", "demo", "--patients", "20", "--seeds", "1", "--workers", "1", *SMALL],
    ["synthesize", "sleep-edf", "--patients", "6", "--hours", "0.3", "--nights", "1", "--out", "raw"],
    ["prepare", "sleep-edf", "raw", "--out", "data", "--workers", "2"],
    ["inspect", "data"],
    ["train", "data", "--out", "run", "--algorithm", "base", *SMALL],
    ["compare", "data", "--out", "study", "--algorithms", "base", "--seeds", "1", *SMALL],
    ["predict", "run", "raw", "--out", "predicted"],
    ["report", "study", "--out", "report.html"],
    ["export", "run", "--out", "model.onnx"],
    ["export", "run", "--format", "torch", "--out", "model.pt2"],
]
TRACED = shutil.which("strace") is not None and sys.platform == "linux"


@pytest.fixture(scope="module")
def watched(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with what was heard of all commands: by Python's audit hook, and by strace where there is one."""
    pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    folder = tmp_path_factory.mktemp("network")
    (folder / "driver.py").write_text(DRIVER)
    program = [sys.executable, "driver.py", json.dumps(COMMANDS)]
    trace = ["strace", "-f", "--seccomp-bpf", "-e", "trace=connect,sendto,sendmsg,sendmmsg,bind", "-o", "trace"]
    # Without the variables by which a user may have silenced a library already.
    silenced = ("ORT_DISABLE_TELEMETRY", "RAY_USAGE_STATS_ENABLED")
    environment = {name: value for name, value in os.environ.items() if name not in silenced}
    done = subprocess.run(
        [*(trace if TRACED else []), *program], cwd=folder, env={**environment, "OMP_NUM_THREADS": "1"},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    if TRACED and "ptrace" in done.stderr and not (folder / "heard.json").exists():
        done = subprocess.run(program, cwd=folder, env=environment, capture_output=True, text=True, check=False)
        (folder / "trace").unlink(missing_ok=True)
    assert done.returncode == 0, done.stderr
    return folder


def test_no_command_makes_python_look_up_or_connect_to_a_host(watched: Path) -> None:
    heard = [entry for entry in json.loads((watched / "heard.json").read_text()) if "AF_UNIX" not in str(entry)]
    assert [entry for entry in heard if not re.search(r"'/|b'\\x00|127\.0\.0\.1|::1", entry[1])] == []


def test_no_command_makes_a_library_look_up_or_connect_to_a_host(watched: Path) -> None:
    if not (watched / "trace").exists():
        pytest.skip("strace is not installed or may not trace: what libraries in C do is not seen")
    lines = (watched / "trace").read_text().splitlines()
    assert lines, "strace saw nothing"
    internet = [line for line in lines if "AF_INET" in line]
    assert [line for line in internet if not re.search(r'"127\.0\.0\.1"|"::1"|"::ffff:127\.0\.0\.1"', line)] == []


RAY = """
import os, subprocess, sys
from pathlib import Path
from manydg.jobs import Job, RayEngine, using

if __name__ == "__main__":
    with using(RayEngine()) as engine:
        [(job, length)] = engine.run(len, [Job("one", (), "four")])
        assert length == 4
        import ray
        folder = Path(ray._private.worker._global_node.get_temp_dir_path())
        print("folder", folder.parent, oct(folder.parent.stat().st_mode & 0o777))
        pids = set()
        for process in Path("/proc").glob("[0-9]*"):
            try:
                if str(folder).encode() in (process / "cmdline").read_bytes() or int(process.name) == os.getpid():
                    pids.add(process.name)
            except OSError:
                pass
        inodes = set()
        for pid in pids:
            for fd in Path("/proc", pid, "fd").iterdir():
                try:
                    inodes.add(os.readlink(fd))
                except OSError:
                    pass
        for table in ("tcp", "tcp6"):
            for line in Path("/proc/net", table).read_text().splitlines()[1:]:
                fields = line.split()
                if fields[3] == "0A" and f"socket:[{fields[9]}]" in inodes:
                    print("listens", fields[1].partition(":")[0])
        print("usage", os.environ["RAY_USAGE_STATS_ENABLED"], "processes", len(pids))
    print("left", folder.parent.exists())
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_ray_on_this_machine_listens_to_this_machine_alone_and_keeps_its_files_private(tmp_path: Path) -> None:
    pytest.importorskip("ray")
    (tmp_path / "driver.py").write_text(RAY)
    done = subprocess.run(
        [sys.executable, "driver.py"], cwd=tmp_path, capture_output=True, text=True, check=False
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    lines = [line.split() for line in done.stdout.splitlines()]
    listens = {line[1] for line in lines if line[0] == "listens"}
    assert listens
    assert listens <= {"0100007F", "0000000000000000FFFF00000100007F", "00000000000000000000000001000000"}, done.stdout
    (mode,) = [line[2] for line in lines if line[0] == "folder"]
    assert mode == oct(stat.S_IRWXU)
    assert ["left", "False"] in lines
    assert [line[1] for line in lines if line[0] == "usage"] == ["0"]
