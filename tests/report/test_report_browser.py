"""The page in a real browser: no complaint, no request, tables that sort, nothing cut, and no violation of axe."""

from __future__ import annotations

import base64
import hashlib
import html
import json
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest

from manydg.report import write_report

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
PHONE, DESK, PAPER = 390, 1280, 688
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
  // What scrolls sideways without saying so, what is cut, and what is wider than the page.
  const named = (part) => `${part.tagName}.${part.className} ${part.textContent.trim().slice(0, 40)}`;
  const all = Array.from(document.body.querySelectorAll("*:not(svg *):not(.unseen):not(.skip)"));
  const scrolls = (part) => part.scrollWidth > part.clientWidth + 1 && part.clientWidth > 0;
  const flow = (part) => getComputedStyle(part).overflowX;
  const silent = (part) => !part.querySelector(".cue")?.checkVisibility();
  seen.silent = all.filter((part) => scrolls(part) && flow(part) === "auto" && silent(part)).map(named);
  seen.scrolling = all.filter((part) => scrolls(part) && flow(part) === "auto").length;
  seen.cut = all.filter((part) => scrolls(part) && ["hidden", "clip"].includes(flow(part))).map(named);
  seen.cut.push(...Array.from(document.querySelectorAll(".panel svg text")).filter((text) => {
    const box = text.getBoundingClientRect(), frame = text.closest("svg").getBoundingClientRect();
    return box.left < frame.left - 1 || box.right > frame.right + 1;
  }).map((text) => `text ${text.textContent} of ${text.closest(".panel").querySelector(".panel-title").textContent}`));
  const inScroller = (part) => part.closest(".table-wrap") && flow(part.closest(".table-wrap")) === "auto";
  seen.wide = all.filter((part) => !inScroller(part) && part.getBoundingClientRect().right > innerWidth + 1).map(named);
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


class Keyboard:
    """A page in Chromium, whose keys are pressed over the DevTools pipe."""

    def __init__(self, page: Path, profile: Path, width: int) -> None:
        self._answers, there = os.pipe()
        here, self._asks = os.pipe()
        command = [str(CHROMIUM), "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"]
        command += ["--no-first-run", f"--user-data-dir={profile}", "--remote-debugging-pipe", "about:blank"]
        # Chromium reads its file 3 and writes its file 4.
        shell = ["bash", "-c", f'exec "$@" 3<&{here} 4>&{there}', "bash", *command]
        self._process = subprocess.Popen(shell, pass_fds=(here, there), stderr=subprocess.DEVNULL)
        os.close(here)
        os.close(there)
        self._sent, self._session = 0, {}
        target = self("Target.createTarget", url="about:blank")["targetId"]
        self._session = {"sessionId": self("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]}
        self("Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1, mobile=False)
        still = {"name": "prefers-reduced-motion", "value": "reduce"}  # so that the page need not be waited for
        self("Emulation.setEmulatedMedia", features=[still])
        self("Page.navigate", url=page.as_uri())
        while self.ask("document.readyState + location.protocol") != "completefile:":
            pass

    def __call__(self, method: str, **parameters: Any) -> dict[str, Any]:
        self._sent += 1
        message = {"id": self._sent, "method": method, "params": parameters} | self._session
        os.write(self._asks, json.dumps(message).encode() + b"\0")
        while True:
            text = b""
            while not text.endswith(b"\0"):
                more = os.read(self._answers, 1)
                assert more, "Chromium ended"
                text += more
            if (answer := json.loads(text[:-1])).get("id") == self._sent:
                result: dict[str, Any] = answer["result"]
                return result

    def ask(self, script: str) -> Any:
        return self("Runtime.evaluate", expression=script, returnByValue=True)["result"].get("value")

    def press(self, key: str, code: int, text: str = "") -> None:
        for kind in ("keyDown", "keyUp"):
            letter = {"text": text} if text and kind == "keyDown" else {}
            self("Input.dispatchKeyEvent", type=kind, key=key, windowsVirtualKeyCode=code, **letter)

    def close(self) -> None:
        self._session = {}
        self("Browser.close")
        self._process.wait()
        os.close(self._asks)
        os.close(self._answers)


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


def in_frame(page: Path, tmp_path: Path, width: int) -> dict[str, Any]:
    """What the check sees in a frame of some width: headless Chromium has no window narrower than 500."""
    inner = with_check(page, tmp_path / "inner.html")
    frame = tmp_path / "frame.html"
    frame.write_text(
        f'<!DOCTYPE html><iframe src="{inner.name}" width="{width}" height="800" style="border:0"></iframe><script>'
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
    seen: dict[str, Any] = json.loads(html.unescape(match[1]))
    return seen


def test_a_phone_shows_the_page_without_sideways_scrolling_and_letters_that_can_be_read(
    report_page: Path, tmp_path: Path
) -> None:
    phone = in_frame(report_page, tmp_path, PHONE)
    assert phone["width"] == [PHONE, PHONE]
    assert phone["small"] >= 8.5
    assert phone["scrolling"] > 0
    assert (phone["silent"], phone["cut"], phone["wide"]) == ([], [], [])


def test_a_desktop_shows_all_of_the_page(desk: tuple[dict[str, Any], str]) -> None:
    seen = desk[0]
    assert (seen["silent"], seen["cut"], seen["wide"]) == ([], [], [])


def test_nothing_is_wider_than_the_printed_page(report_page: Path, tmp_path: Path) -> None:
    printed = tmp_path / "printed.html"
    printed.write_text(report_page.read_text(encoding="utf-8").replace("@media print", "@media all"), encoding="utf-8")
    seen = in_frame(printed, tmp_path, PAPER)
    assert (seen["width"], seen["cut"], seen["wide"], seen["scrolling"]) == ([PAPER, PAPER], [], [], 0)


def test_axe_finds_no_violation_of_contrast_names_keyboard_or_structure(maker: Any, tmp_path: Path) -> None:
    for dataset, kind in (("sleep-edf", "classes"), ("stays", "binary")):
        for algorithm in ("manydg", "base", "boosting"):
            for seed in range(2):
                maker.run(dataset, kind, algorithm, seed, skill=1.2)
    maker.write({}, {})
    axe = files("axe_core_python").joinpath("axe.min.js").read_text(encoding="utf-8")
    ask = (
        'axe.run(document).then((result) => { const answer = document.createElement("pre"); answer.id = "answer"; '
        "answer.textContent = JSON.stringify({passes: result.passes.map((rule) => rule.id), "
        "violations: result.violations.map((rule) => [rule.id, rule.nodes.length, rule.nodes[0].html.slice(0, 200)])});"
        "document.body.append(answer); });"
    )
    text = write_report(tmp_path, tmp_path / "report.html").read_text(encoding="utf-8")
    text = re.sub(r'<meta http-equiv="Content-Security-Policy"[^>]*>', "", text)
    page = tmp_path / "axe.html"
    page.write_text(text.replace("</body>", f"<script>{axe}</script><script>{ask}</script></body>"), encoding="utf-8")
    # As wide as a tablet, so that some tables scroll.
    dom, complaints = browse(
        page, tmp_path / "axe", "--window-size=700,900", "--virtual-time-budget=120000", "--dump-dom"
    )
    match = re.search(r'<pre id="answer">(.*?)</pre>', dom, flags=re.DOTALL)
    assert match is not None, complaints
    seen = json.loads(html.unescape(match[1]))
    assert seen["violations"] == []
    assert {"color-contrast", "button-name", "scrollable-region-focusable", "bypass"} <= set(seen["passes"])


@pytest.fixture
def keyboard(maker: Any, tmp_path: Path) -> Iterator[Keyboard]:
    """A page of one small comparison, so narrow that some of its tables scroll."""
    for algorithm in ("manydg", "base", "boosting"):
        for seed in range(2):
            maker.run("sleep-edf", "classes", algorithm, seed, skill=1.2)
    maker.write({}, {})
    browser = Keyboard(write_report(tmp_path, tmp_path / "report.html"), tmp_path / "keyboard", 600)
    yield browser
    browser.close()


STOPS = "Array.from(document.querySelectorAll('a[href], button, summary, .table-wrap[tabindex=\"0\"]'))"
FOCUS = f"""(() => {{
  const part = document.activeElement, box = part.getBoundingClientRect(), style = getComputedStyle(part);
  const seen = box.width > 0 && box.bottom > 0 && box.top < innerHeight && box.right > 0 && box.left < innerWidth;
  return [{STOPS}.indexOf(part), seen && style.outlineStyle === "solid" && parseFloat(style.outlineWidth) >= 2];
}})()"""


def test_tab_reaches_every_link_button_and_scrolling_table_once_in_order_with_a_visible_focus(
    keyboard: Keyboard,
) -> None:
    count = keyboard.ask(f"{STOPS}.length")
    scrolling = keyboard.ask("document.querySelectorAll('.table-wrap[tabindex=\"0\"]').length")
    wide = (
        "Array.from(document.querySelectorAll('.table-wrap')).filter((wrap) => wrap.scrollWidth > wrap.clientWidth + 1)"
    )
    assert scrolling == keyboard.ask(f"{wide}.length") > 0
    assert count > 50
    stops = []
    for _ in range(count):
        keyboard.press("Tab", 9)
        stops.append(keyboard.ask(FOCUS))
    assert stops == [[number, True] for number in range(count)]


def test_enter_space_and_arrows_work_on_what_has_the_focus(keyboard: Keyboard) -> None:
    keyboard.press("Tab", 9)
    assert keyboard.ask("document.activeElement.className") == "skip"
    keyboard.press("Enter", 13, "\r")
    assert keyboard.ask("location.hash") == "#content"
    keyboard.press("Tab", 9)  # past the skipped header, to the first table or its first heading
    assert keyboard.ask("document.getElementById('content').contains(document.activeElement)")
    for key, code, text, order in (("Enter", 13, "\r", "descending"), (" ", 32, " ", "ascending")):
        keyboard.ask("document.querySelector('button[data-numeric]').focus()")
        keyboard.press(key, code, text)
        assert keyboard.ask("document.querySelector('button[data-numeric]').closest('th').ariaSort") == order
    for key, code, text, opened in (("Enter", 13, "\r", True), (" ", 32, " ", False)):
        keyboard.ask("document.querySelector('summary').focus()")
        keyboard.press(key, code, text)
        assert keyboard.ask("document.querySelector('details').open") is opened
    keyboard.ask("document.querySelector('.table-wrap[tabindex=\"0\"]').focus({preventScroll: true})")
    for _ in range(3):
        keyboard.press("ArrowRight", 39)
    moved = "new Promise((done) => setTimeout(() => done(document.activeElement.scrollLeft), 500))"
    answer = keyboard("Runtime.evaluate", expression=moved, returnByValue=True, awaitPromise=True)
    assert answer["result"]["value"] > 0


def test_it_prints(report_page: Path, tmp_path: Path) -> None:
    browse(report_page, tmp_path / "profile", f"--print-to-pdf={tmp_path / 'page.pdf'}", "--no-pdf-header-footer")
    printed = (tmp_path / "page.pdf").read_bytes()
    assert printed.startswith(b"%PDF")
    assert len(re.findall(rb"/Type\s*/Page\b", printed)) > 5
