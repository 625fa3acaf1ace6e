"""What is published: the wheel, the source distribution, the container and the conda recipe."""

from __future__ import annotations

import re
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
CONDA_NAMES = {"torch": "pytorch", "matplotlib": "matplotlib-base"}
IMAGE = (ROOT / "Dockerfile").read_text(encoding="utf-8")


def test_the_conda_recipe_needs_what_the_package_needs() -> None:
    text = (ROOT / "packaging/conda/meta.yaml").read_text(encoding="utf-8")
    assert f'{{% set version = "{PROJECT["version"]}" %}}' in text
    recipe = yaml.safe_load(
        re.sub(r"\{%.*?%\}", "", text).replace("{{ version }}", "0").replace("{{ PYTHON }}", "python")
    )
    split = [re.fullmatch(r"([\w-]+)(.*)", requirement) for requirement in PROJECT["dependencies"]]
    needed = {f"{CONDA_NAMES.get(match[1], match[1])} {match[2]}" for match in split if match}
    assert set(recipe["requirements"]["run"]) == {f"python {PROJECT['requires-python']}", *needed}


def test_every_extra_is_explained_once() -> None:
    page = (ROOT / "docs/howto/install.md").read_text(encoding="utf-8")
    assert sorted(re.findall(r"^\| `manydg\[(\w+)\]` \|", page, flags=re.M)) == sorted(PROJECT["optional-dependencies"])


def test_the_image_runs_as_a_user_without_rights_and_shows_the_help() -> None:
    final = IMAGE.rpartition("FROM ")[2]
    assert re.findall(r"^USER (.*)$", final, flags=re.M) == ["manydg"]
    assert re.findall(r"^(?:ENTRYPOINT|CMD) (.*)$", final, flags=re.M) == ['["manydg"]', '["--help"]']


def test_the_image_is_built_from_files_that_exist_and_docker_is_told_to_send() -> None:
    ignored = (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines()
    copied = [name for line in re.findall(r"^COPY (?!--from)(.*) \S+$", IMAGE, flags=re.M) for name in line.split()]
    assert copied
    for name in copied:
        assert (ROOT / name).exists()
        assert f"!{name}" in ignored


@pytest.mark.slow
def test_wheel_and_source_distribution_pass_twine_and_hold_what_they_should(tmp_path: Path) -> None:
    tracked = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True, text=True).stdout
    clean = tmp_path / "clone"
    for name in filter(None, tracked.split("\0")):
        (clean / name).parent.mkdir(parents=True, exist_ok=True)
        (clean / name).write_bytes((ROOT / name).read_bytes())
    dist = tmp_path / "dist"
    subprocess.run(
        [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(dist), str(clean)],
        check=True,
        capture_output=True,
    )
    (wheel,), (source,) = dist.glob("*.whl"), dist.glob("*.tar.gz")
    subprocess.run([sys.executable, "-m", "twine", "check", "--strict", str(wheel), str(source)], check=True)
    package = {
        path.relative_to(clean / "src").as_posix() for path in (clean / "src/manydg").rglob("*") if path.is_file()
    }
    in_wheel = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    assert in_wheel == package
    assert {"manydg/py.typed", "manydg/report/page.jinja", "manydg/studies/presets/sleep-edf.toml"} <= in_wheel
    with tarfile.open(source) as archive:
        in_source = {name.partition("/")[2] for name in archive.getnames()}
    assert {f"src/{name}" for name in package} | {"LICENSE", "README.md", "pyproject.toml"} <= in_source
    assert not [name for name in in_source if re.match(r"tests|results|docs|benchmarks|scratch", name)]
