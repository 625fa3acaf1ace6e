"""The page in a real browser: no complaint, no request, and tables that sort."""

from __future__ import annotations

import base64
import hashlib
import html
import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
PHONE, DESK = 390, 1280
CHECK = """
const rows = (table) => Array.from(table.tBodies[0].rows);
const keys = (table, column) => rows(table).map((row) => row.cells[column].dataset.sort);
const seen = {sections: [], tables: [], errors: [], requests: [], wide: []};
addEventListener("error", (event) => seen.errors.push(String(event.message)));
addEventListener("securitypolicyviolation", (event) => seen.errors.push(event.violatedDirective));
addEventListener("load", () => {
  seen.sections = Array.from(document.querySelectorAll("[data-section]"), (part) => part.dataset.section);
  for (const table of document.querySelectorAll("table.sortable")) {
    table.querySelectorAll("thead button").forEach((button, column) => {
      const heading = button.closest("th");
      button.click();
      const first = {direction: heading.getAttribute("aria-sort"), keys: keys(table, column)};
      button.click();
      const second = {direction: heading.getAttribute("aria-sort"), keys: keys(table, column)};
      const others = table.querySelectorAll("th[aria-sort]").length;
      seen.tables.push({numeric: "numeric" in button.dataset, first, second, others});
    });
  }
  seen.announced = document.getElementById("said").textContent;
  seen.requests = performance.getEntriesByType("resource").map((entry) => entry.name);
  seen.width = [document.documentElement.scrollWidth, innerWidth];
  seen.small = Math.min(...Array.from(document.querySelectorAll(".panel svg text"), (text) => {
    const box = text.getScreenCTM();
    return parseFloat(getComputedStyle(text).fontSize) * Math.hypot(box.a, box.b);
  }));
  const answer = document.createElement("pre");
  answer.id = "answer";
  answer.textContent = JSON.stringify(seen);
  document.body.append(answer);
});
"""

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed: apt-get install chromium")


def browse(page: Path, folder: Path, *flags: str) -> tuple[str, str]:
    """Open a page in headless Chromium: what it printed, and what it complained of."""
    command = [
        str(CHROMIUM), "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run",
        "--disable-background-networking", "--disable-component-update", "--disable-sync", "--hide-scrollbars",
        f"--user-data-dir={folder}", "--enable-logging=stderr", "--v=0", *flags, page.as_uri(),
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=True)
    return done.stdout, done.stderr


def with_check(page: Path, copy: Path) -> Path:
    """A copy of the page with the check in it, and leave for it in the page's policy."""
    digest = base64.b64encode(hashlib.sha256(CHECK.encode()).digest()).decode()
    text = page.read_text(encoding="utf-8")
    text = text.replace("script-src ", f"script-src 'sha256-{digest}' ", 1).replace(
        "<style>", f"<script>{CHECK}</script><style>", 1
    )
    copy.write_text(text, encoding="utf-8")
    return copy


def answer(page: Path, folder: Path, width: int) -> tuple[dict[str, Any], str]:
    checked = with_check(page, folder / f"checked-{width}.html")
    dom, complaints = browse(checked, folder / f"profile-{width}", f"--window-size={width},900", "--dump-dom")
    match = re.search(r'<pre id="answer">(.*?)</pre>', dom, flags=re.DOTALL)
    assert match is not None, complaints
    return json.loads(html.unescape(match[1])), complaints


@pytest.fixture(scope="module")
def desk(report_page: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], str]:
    return answer(report_page, tmp_path_factory.mktemp("desk"), DESK)


def test_the_console_stays_silent(desk: tuple[dict[str, Any], str]) -> None:
    seen, complaints = desk
    assert seen["errors"] == []
    assert [line for line in complaints.splitlines() if "CONSOLE" in line] == []


def test_the_page_requests_nothing(desk: tuple[dict[str, Any], str]) -> None:
    assert [name for name in desk[0]["requests"] if not name.startswith("data:")] == []


def test_every_section_is_there(desk: tuple[dict[str, Any], str]) -> None:
    wanted = {"question", "cohort", "compare", "patients", "confusion", "calibration", "learning", "objectives"}
    wanted |= {"weights", "limited-data", "continual", "embedding", "orthogonality", "domain-similarity", "norms"}
    assert wanted <= set(desk[0]["sections"])


def test_every_column_of_every_table_sorts_both_ways(desk: tuple[dict[str, Any], str]) -> None:
    tables = desk[0]["tables"]
    assert len(tables) > 50
    for column in tables:
        directions = {column["first"]["direction"], column["second"]["direction"]}
        assert directions == {"ascending", "descending"}
        assert column["others"] == 1
        for state in (column["first"], column["second"]):
            keys = [key for key in state["keys"] if key != ""]
            assert state["keys"] == keys + [""] * (len(state["keys"]) - len(keys))
            if column["numeric"]:
                assert list(map(float, keys)) == sorted(map(float, keys), reverse=state["direction"] == "descending")


def test_a_sort_is_announced(desk: tuple[dict[str, Any], str]) -> None:
    assert desk[0]["announced"].startswith("Sorted by ")


def test_a_phone_shows_the_page_without_sideways_scrolling_and_letters_that_can_be_read(
    report_page: Path, tmp_path: Path
) -> None:
    # Headless Chromium has no window narrower than 500: a frame of the phone's width represents the phone.
    inner = with_check(report_page, tmp_path / "inner.html")
    frame = tmp_path / "frame.html"
    frame.write_text(
        f'<!DOCTYPE html><iframe src="{inner.name}" width="{PHONE}" height="800" style="border:0"></iframe><script>'
        'addEventListener("message", (event) => { document.body.innerHTML = "<pre id=answer></pre>";'
        'document.getElementById("answer").textContent = event.data; });</script>'
    )
    text = inner.read_text().replace("document.body.append(answer);", 'parent.postMessage(answer.textContent, "*");')
    changed = re.search(r"<script>(.*?)</script>", text, flags=re.DOTALL)
    assert changed is not None
    digest = base64.b64encode(hashlib.sha256(changed[1].encode()).digest()).decode()
    inner.write_text(re.sub(r"script-src 'sha256-[^']+'", f"script-src 'sha256-{digest}'", text, count=1))
    dom, complaints = browse(
        frame, tmp_path / "profile", "--window-size=800,900", "--virtual-time-budget=20000", "--dump-dom"
    )
    match = re.search(r'<pre id="answer">(.*?)</pre>', dom, flags=re.DOTALL)
    assert match is not None, complaints
    phone = json.loads(html.unescape(match[1]))
    assert phone["width"] == [PHONE, PHONE]
    assert phone["small"] >= 8.5


def test_it_prints(report_page: Path, tmp_path: Path) -> None:
    browse(report_page, tmp_path / "profile", f"--print-to-pdf={tmp_path / 'page.pdf'}", "--no-pdf-header-footer")
    printed = (tmp_path / "page.pdf").read_bytes()
    assert printed.startswith(b"%PDF")
    assert len(re.findall(rb"/Type\s*/Page\b", printed)) > 5
