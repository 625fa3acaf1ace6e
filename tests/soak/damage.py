"""Damage files of every kind at random, give them to the command that reads them, and see that nothing worse happens.

    python -m tests.soak.damage --inputs 2000 --seed 1

A command may refuse the file with one line (exit 2), or read it: with the result of the undamaged file, or with a
warning. Files without checksums, such as a table whose digit changed, may also be read as they are, which is counted;
files of dataset and run folders may not. No command may show a traceback, be ended by a signal, run without end, or
change another file that was there.
"""

from __future__ import annotations

import argparse
import gzip
import json
import random
import re
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
from tests.soak.kills import SMALL, TABLE, arrays
from tests.soak.processes import LIBRARIES, PACKAGE, Server
from tests.soak.results import contents, raw_contents

from manydg.files import INTEGRITY, with_checksum

SECONDS = 60.0
LIMIT = 600.0
GIGABYTES = 6
LONGEST_MESSAGE = 1000
# What a command that refused may leave: what a study or run has finished.
KEPT = ("half/", "results/")
UNPRINTABLE = re.compile(r"[\x00-\x08\x0b-\x1f\x7f\x9b]")


@dataclass(frozen=True)
class Reader:
    """A command and the files it reads.

    Attributes
    ----------
    folders : tuple of str
        What the command needs of the inputs.
    damaged : tuple of str
        Patterns of the files to damage.
    checked : bool
        Whether damage must not go unnoticed: the files are covered by checksums.
    rewrites : tuple of str
        Patterns of the files there that the command itself may write anew.
    """

    name: str
    arguments: tuple[str, ...]
    folders: tuple[str, ...]
    damaged: tuple[str, ...]
    checked: bool = False
    rewrites: tuple[str, ...] = ("out*", "tmp*")
    weight: float = 1.0


def _reader(name: str, command: str, folders: str, damaged: str, **options: Any) -> Reader:
    words = {"TABLE": TABLE, "SMALL": SMALL}
    arguments = tuple(part for word in command.split() for part in words.get(word, (word,)))
    return Reader(name, arguments, tuple(folders.split()), tuple(damaged.split()), **options)


STUDY = "compare table --algorithms base,manydg --seeds 1 SMALL"
OWN = ("out*", "tmp*", "results/summary.*", "results/results.jsonl", "results/study.json", "results/runs/*")
READERS = (
    _reader("csv", "prepare table table.csv TABLE --out out", "table.csv", "table.csv"),
    _reader("csv.gz", "prepare table table.csv.gz TABLE --out out", "table.csv.gz", "table.csv.gz"),
    _reader("parquet", "prepare table table.parquet TABLE --out out", "table.parquet", "table.parquet"),
    _reader(
        "npy",
        "prepare arrays --x x.npy --y y.npy --patient who.npy --out out",
        "x.npy y.npy who.npy",
        "x.npy y.npy who.npy",
    ),
    _reader("EDF", "prepare sleep-edf raw-sleep --out out", "raw-sleep", "raw-sleep/*-PSG.edf"),
    _reader("hypnogram EDF+", "prepare sleep-edf raw-sleep --out out", "raw-sleep", "raw-sleep/*-Hypnogram.edf"),
    _reader(
        "MIMIC-III tables",
        "prepare mimic3 raw-mimic --ndc-map raw-mimic/ndc_to_atc.csv --out out",
        "raw-mimic",
        "raw-mimic/*.csv.gz raw-mimic/ndc_to_atc.csv",
    ),
    _reader(
        "MEDS tables",
        "prepare meds raw-meds --labels raw-meds/labels/readmission.parquet --out out",
        "raw-meds",
        "raw-meds/data/*.parquet raw-meds/metadata/*",
    ),
    _reader(
        "MEDS labels",
        "prepare meds raw-meds --labels raw-meds/labels/readmission.parquet --out out",
        "raw-meds",
        "raw-meds/labels/*.parquet",
    ),
    _reader("dataset, inspected", "inspect table --json", "table", "table/*", checked=True),
    _reader("dataset, trained on", "train table SMALL --out out", "table", "table/*", checked=True, weight=0.5),
    _reader("dataset, predicted", "predict run table --out out", "run table", "table/*", checked=True),
    _reader("run, predicting", "predict run table.csv --out out", "run table.csv", "run/*", checked=True, weight=2.0),
    _reader("run, exported", "export run --format torch --out out.pt2", "run", "run/*", checked=True, weight=0.2),
    _reader("run, continued", "train table --epochs 3 --batch-size 32 --out half", "half table", "half/*", checked=True,
            rewrites=("half/*", "tmp*"), weight=0.5),
    _reader("new csv, predicted", "predict run table.csv --out out", "run table.csv", "table.csv"),
    _reader(
        "results, reported", "report results --out out.html", "results", "results/*.jsonl results/*.json",
        checked=True, weight=1.5,
    ),
    _reader("runs of results, reported", "report results --out out.html", "results", "results/runs/*/*"),
    _reader(
        "results, continued", f"{STUDY} --out results", "results table", "results/*", checked=True, rewrites=OWN
    ),
    _reader(
        "runs of results, continued", f"{STUDY} --out results", "results table", "results/runs/*/*",
        checked=True, rewrites=OWN,
    ),
    _reader(
        "settings", "compare table --config settings.toml --dry-run --out out", "table settings.toml", "settings.toml"
    ),
)  # fmt: skip


SETTINGS = """
[training]
epochs = 2
batch_size = 32
lr = 0.001

[backbone]
name = "mlp"

[algorithms.manydg]
mmd = 1.0
"""


# Damage


def flip_bits(content: bytes, rng: random.Random) -> bytes:
    changed = bytearray(content)
    for _ in range(rng.choice((1, 1, 2, 8, 64))):
        if changed:
            changed[rng.randrange(len(changed))] ^= 1 << rng.randrange(8)
    return bytes(changed)


def truncate(content: bytes, rng: random.Random) -> bytes:
    return content[: rng.randrange(len(content) + 1)]


def empty(content: bytes, rng: random.Random) -> bytes:
    return b""


def delete_block(content: bytes, rng: random.Random) -> bytes:
    start, stop = _block(content, rng)
    return content[:start] + content[stop:]


def repeat_block(content: bytes, rng: random.Random) -> bytes:
    start, stop = _block(content, rng)
    return content[:stop] + content[start:]


def insert_bytes(content: bytes, rng: random.Random) -> bytes:
    at = rng.randrange(len(content) + 1)
    return content[:at] + rng.randbytes(rng.choice((1, 1, 3, 200))) + content[at:]


def fill_with_nul(content: bytes, rng: random.Random) -> bytes:
    start, stop = rng.choice(((0, len(content)), _block(content, rng)))
    return content[:start] + bytes(stop - start) + content[stop:]


def convert_line_ends(content: bytes, rng: random.Random) -> bytes:
    return content.replace(b"\n", b"\r\n")


def change_encoding(content: bytes, rng: random.Random) -> bytes:
    text = content.decode("latin-1")
    at = rng.randrange(len(text) + 1)
    with_accents = text[:at] + "é\u00ff" + text[at:]
    return rng.choice((text.encode("utf-16"), with_accents.encode("latin-1"), b"\xef\xbb\xbf" + content))


HUGE = (b"1e400", b"-1e39", b"inf", b"NaN", b"", b"9" * 30, b"-1", b"0", b"1e9", b"null", b'"x"', b"[]", b"=1+1")


def change_number(content: bytes, rng: random.Random) -> bytes:
    """One number of a text, or what looks like one, becomes another."""
    numbers = list(re.finditer(rb"-?\d+(\.\d+)?(e-?\d+)?", content))
    if not numbers:
        return flip_bits(content, rng)
    number = rng.choice(numbers)
    return content[: number.start()] + rng.choice(HUGE) + content[number.end() :]


def change_json(content: bytes, rng: random.Random) -> bytes:
    """One value of a JSON object, or of a line of them, is of another type, gone, or another one's."""
    try:
        lines = [json.loads(content)] if content[:1] == b"{" and b"\n{" not in content else None
        lines = lines or [json.loads(line) for line in content.splitlines()]
        places = [place for line in lines for place in _places(line)]
        holder, key = rng.choice(places)
    except (ValueError, IndexError):
        return change_number(content, rng)
    values: tuple[Any, ...] = (None, -1, 0, 1e308, 1 << 70, "x", "", [], {}, [[]], True, float("nan"), _deep(), "../..")
    if rng.random() < 0.2:
        del holder[key]
    else:
        holder[key] = rng.choice((*values, rng.choice([h[k] for h, k in places])))
    return "\n".join(json.dumps(line) for line in lines).encode() + b"\n"


def forge(content: bytes, rng: random.Random) -> bytes:
    """The checksums of JSON objects are those of what they hold now, as whoever forges a folder would make them."""
    lines = content.splitlines() if content[:1] == b"{" else []
    try:
        values = [json.loads(line) for line in lines]
    except ValueError:
        return content
    return b"".join(json.dumps(_with_new_checksum(value)).encode() + b"\n" for value in values)


def _with_new_checksum(value: Any) -> Any:
    before = value.pop(INTEGRITY, None) if isinstance(value, dict) else None
    return value if before is None else with_checksum(value, before.get("files") if isinstance(before, dict) else {})


def _places(value: Any) -> list[tuple[Any, Any]]:
    items = list(value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ())
    return [(value, key) for key, _ in items] + [place for _, entry in items for place in _places(entry)]


def _deep() -> list[Any]:
    value: list[Any] = []
    for _ in range(200):
        value = [value]
    return value


def inside_gzip(damage: Damage) -> Damage:
    """The same done to what is compressed, so that the file itself is whole."""

    def damaged(content: bytes, rng: random.Random) -> bytes:
        try:
            return gzip.compress(damage(gzip.decompress(content), rng))
        except (OSError, EOFError):
            return damage(content, rng)

    return damaged


def _block(content: bytes, rng: random.Random) -> tuple[int, int]:
    start = rng.randrange(len(content) + 1)
    return start, min(len(content), start + rng.choice((1, 2, 16, 256, 4096)))


Damage = Callable[[bytes, random.Random], bytes]
TO_BYTES: tuple[Damage, ...] = (
    flip_bits, flip_bits, truncate, empty, delete_block, repeat_block, insert_bytes, fill_with_nul, convert_line_ends,
    change_encoding, change_number,
)  # fmt: skip


def damage(path: Path, others: Sequence[Path], rng: random.Random) -> str:
    """Damage a file in place; what was done."""
    content = path.read_bytes()
    kind = rng.random()
    if kind < 0.04:
        path.unlink()
        if rng.random() < 0.3:
            path.mkdir()
            return "replaced by a folder"
        return "removed"
    if kind < 0.1 and others:
        other = rng.choice(others)
        path.write_bytes(other.read_bytes())
        return f"replaced by {other.name}"
    how = rng.choice(TO_BYTES)
    if path.suffix in (".json", ".jsonl", ".toml") and rng.random() < 0.5:
        how = rng.choice((change_json, change_number))
    elif path.suffix == ".gz" and rng.random() < 0.5:
        how = inside_gzip(how)
    changed = how(content, rng)
    if how is change_json and rng.random() < 0.3:
        how, changed = forge, forge(changed, rng)
    path.write_bytes(changed)
    return "not changed" if changed == content else getattr(how, "__name__", "damaged").replace("_", " ")


# Inputs


def write_inputs(folder: Path, run: Callable[[Sequence[str]], None], server: Server) -> None:
    """Valid files of every kind."""
    x, y, who = arrays(0)
    stages = np.array(["N1", "N2", "W"])[y]
    table = pl.DataFrame({"patient": [f"p{k}" for k in who], "stage": stages, **{f"f{k}": x[:, k] for k in range(5)}})
    table.write_csv(folder / "table.csv")
    table.write_parquet(folder / "table.parquet")
    (folder / "table.csv.gz").write_bytes(gzip.compress((folder / "table.csv").read_bytes()))
    for name, array in (("x", x), ("y", y), ("who", who)):
        np.save(folder / f"{name}.npy", array)
    (folder / "settings.toml").write_text(SETTINGS, encoding="utf-8")
    for command in (
        "synthesize sleep-edf --patients 2 --nights 1 --hours 0.25 --out raw-sleep",
        "synthesize mimic3 --patients 40 --out raw-mimic",
        "synthesize meds --patients 30 --out raw-meds",
    ):
        run(command.split())
    run(["prepare", "table", "table.csv", *TABLE, "--out", "table"])
    run(["train", "table", *SMALL, "--out", "run"])
    run([*STUDY.split()[:2], "--algorithms", "base,manydg", "--seeds", "1", *SMALL, "--out", "results"])
    half_a_run(folder, server)


def half_a_run(folder: Path, server: Server) -> None:
    """A run that was killed after an epoch."""
    for _ in range(20):
        process = server.start(["train", "table", "--epochs", "3", "--batch-size", "32", "--out", "half"], folder)
        while not (folder / "half" / "checkpoint.safetensors").exists() and process.wait(0.002) is None:
            pass
        if not (folder / "half" / "run.json").exists():
            process.kill()
            if not (folder / "half" / "run.json").exists():
                return
        shutil.rmtree(folder / "half")
    raise RuntimeError("the run always ended before it was killed")


# The soak


@dataclass
class Outcome:
    """How often each reader refused, read the same, warned, or read something else."""

    counts: dict[str, Counter[str]] = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)

    def add(self, reader: Reader, what: str) -> None:
        self.counts.setdefault(reader.name, Counter())[what] += 1

    def lines(self, seed: int, seconds: float) -> list[str]:
        """Counts for a reader."""
        total: Counter[str] = sum(self.counts.values(), Counter())
        return [
            *(f"  {name}: {_in_words(counts)}" for name, counts in sorted(self.counts.items())),
            f"seed {seed}: {sum(total.values())} damaged inputs in {seconds:.0f} s: {_in_words(total)}; "
            f"{len(self.failures)} failures",
            *(f"FAILURE {failure}" for failure in self.failures),
        ]


def _in_words(counts: Counter[str]) -> str:
    return ", ".join(f"{count} {what}" for what, count in counts.most_common())


class Soak:
    """Valid inputs in ``inputs``; the damaged ones of the moment in ``now``."""

    def __init__(self, folder: Path, seed: int, readers: Sequence[Reader] = READERS) -> None:
        self.folder, self.readers, self.seed = folder, readers, seed
        self._server = Server(folder / "logs", [*LIBRARIES, *PACKAGE], GIGABYTES)
        self._wholes: dict[str, tuple[str, dict[str, str]]] = {}
        self.outcome = Outcome()

    def prepare(self) -> None:
        """Write the inputs and have every command read them undamaged."""
        inputs = self.folder / "inputs"
        inputs.mkdir(parents=True)
        write_inputs(inputs, lambda arguments: self._run(arguments, inputs), self._server)
        shutil.rmtree(inputs / "tmp")
        for reader in self.readers:
            folder = self._copy(reader)
            out = self._run(reader.arguments, folder)
            self._server.preload()
            self._wholes[reader.name] = (out, contents(folder))

    def run(self, inputs: int, only: Sequence[int] = ()) -> Outcome:
        """Damage so many inputs, or only those of some numbers."""
        weights = [reader.weight for reader in self.readers]
        for number in only or range(inputs):
            rng = random.Random(f"{self.seed} {number}")
            self._one(number, rng.choices(self.readers, weights)[0], rng)
        return self.outcome

    def close(self) -> None:
        self._server.close()

    def _one(self, number: int, reader: Reader, rng: random.Random) -> None:
        folder = self._copy(reader)
        files = [path for path in sorted(folder.rglob("*")) if path.is_file()]
        damaged = [path for path in files if any(fnmatch(_name(path, folder), pattern) for pattern in reader.damaged)]
        path = rng.choice(damaged)
        how = damage(path, [other for other in files if other != path], rng)
        before = raw_contents(folder)
        process = self._server.start(reader.arguments, folder)
        code = process.wait(SECONDS)
        if code is None:
            process.kill()
        # A checksum tells nothing of a forgery.
        judged = replace(reader, checked=reader.checked and how != forge.__name__)
        what, reason = self._judge(judged, folder, _name(path, folder), before, code, process.out, process.err)
        self.outcome.add(reader, what)
        if reason:
            failure = f"{number} {reader.name}: {_name(path, folder)} {how}: {reason}"
            print(f"FAILURE {failure}", file=sys.stderr, flush=True)
            self.outcome.failures.append(failure)

    def _judge(
        self, reader: Reader, folder: Path, path: str, before: dict[str, str], code: int | None, out: str, err: str
    ) -> tuple[str, str]:
        """What happened in a word, and why it is a failure where it is one."""
        if code not in (0, 2):
            tracebacks = "".join(file.read_text() for file in (folder / "tmp").glob("manydg-*.txt"))
            return "failed", f"exit {code}: {(tracebacks or err)[-900:]}"
        if "Traceback" in err or UNPRINTABLE.search(err):
            return "failed", f"exit {code} with a traceback or control characters: {err[-1500:]!r}"
        after = raw_contents(folder)
        lost = [
            name
            for name, digest in before.items()
            if after.get(name) != digest and not any(fnmatch(name, pattern) for pattern in reader.rewrites)
        ]
        if lost:
            return "failed", f"exit {code}, changed or removed {lost}"
        if code == 2:
            messages = [line for line in err.splitlines() if re.match(r"manydg: (?!note:|warning:)", line)]
            left = [name for name in after.keys() - before if not name.startswith(KEPT)]
            if len(messages) != 1 or err.splitlines()[-1] != messages[0] or len(messages[0]) > LONGEST_MESSAGE:
                return "failed", f"not one line: {err[:500]}"
            return ("failed", f"refused and left {left}") if left else ("refused", "")
        return self._compare(reader, folder, path, out, err)

    def _compare(self, reader: Reader, folder: Path, path: str, out: str, err: str) -> tuple[str, str]:
        whole_out, whole = self._wholes[reader.name]
        result = contents(folder, leave_out=path)
        differ = {name for name in whole.keys() | result.keys() if whole.get(name) != result.get(name)} - {path}
        # Where a command writes files these are its result, and what it prints is how it went.
        if not differ and (out == whole_out or "--out" in reader.arguments):
            return "read the same", ""
        # A study tells of a run that failed among its results, with the reason.
        if "note:" in err or "warning" in err.lower() or "failed: " in out:
            return "warned", ""
        if reader.checked:
            return "failed", f"read silently with another result: {sorted(differ)[:5]}"
        return "read as it is", ""

    def _copy(self, reader: Reader) -> Path:
        folder = self.folder / "now"
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        for name in reader.folders:
            source = self.folder / "inputs" / name
            (shutil.copytree if source.is_dir() else shutil.copy)(source, folder / name)
        return folder

    def _run(self, arguments: Sequence[str], folder: Path) -> str:
        process = self._server.start(arguments, folder)
        code = process.wait(LIMIT)
        if code != 0:
            raise RuntimeError(f"manydg {' '.join(arguments)}: exit {code}: {process.err}")
        return process.out


def _name(path: Path, folder: Path) -> str:
    return path.relative_to(folder).as_posix()


def soak(
    inputs: int, seed: int, names: Sequence[str] = (), only: Sequence[int] = (), keep: Path | None = None
) -> Outcome:
    """Damage ``inputs`` inputs, print the counts, and return them."""
    start = time.monotonic()
    readers = [reader for reader in READERS if not names or reader.name in names]
    with tempfile.TemporaryDirectory(prefix="damage-") as folder:
        work = Soak(Path(keep or folder) / "work", seed, readers)
        try:
            work.prepare()
            print(f"undamaged results after {time.monotonic() - start:.0f} s", file=sys.stderr, flush=True)
            outcome = work.run(inputs, only)
        finally:
            work.close()
    print("\n".join(outcome.lines(seed, time.monotonic() - start)), flush=True)
    return outcome


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--inputs", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(1 << 31))
    parser.add_argument("--reader", action="append", default=[], help="only this reader; may be repeated")
    parser.add_argument(
        "--only", type=int, action="append", default=[], help="only the input of this number; may be repeated"
    )
    parser.add_argument("--keep", type=Path, help="folder to work in, which stays")
    given = parser.parse_args()
    return int(bool(soak(given.inputs, given.seed, given.reader, given.only, given.keep).failures))


if __name__ == "__main__":
    sys.exit(main())
