"use strict";
(() => {
  const said = document.getElementById("said");

  const value = (row, column, numeric) => {
    const text = row.cells[column].dataset.sort;
    if (text === "") return null;
    return numeric ? Number(text) : text;
  };

  const order = (numeric, down) => (a, b) => {
    if (a.key === null || b.key === null) return (a.key === null) - (b.key === null);
    const rise = numeric ? a.key - b.key : a.key.localeCompare(b.key, "en", { numeric: true });
    return down ? -rise : rise;
  };

  const sort = (table, heading, button) => {
    const numeric = "numeric" in button.dataset;
    const now = heading.getAttribute("aria-sort");
    const down = now === null ? numeric : now === "ascending";
    const body = table.tBodies[0];
    const rows = Array.from(body.rows, (row) => ({ row, key: value(row, heading.cellIndex, numeric) }));
    rows.sort(order(numeric, down));
    body.append(...rows.map((entry) => entry.row));
    table.querySelectorAll("th[aria-sort]").forEach((other) => other.removeAttribute("aria-sort"));
    heading.setAttribute("aria-sort", down ? "descending" : "ascending");
    said.textContent = `Sorted by ${button.textContent.trim()}, ${down ? "highest" : "lowest"} first`;
  };

  // A table that is wider than the page says so; only then is it a stop of the Tab key, for the arrow keys to scroll it.
  const cues = () => {
    for (const wrap of document.querySelectorAll(".table-wrap")) {
      const fits = wrap.scrollWidth <= wrap.clientWidth + 1;
      wrap.querySelector(".cue").hidden = fits;
      wrap.tabIndex = fits ? -1 : 0;
    }
  };
  addEventListener("resize", cues);
  cues();

  for (const table of document.querySelectorAll("table.sortable")) {
    for (const button of table.querySelectorAll("thead button")) {
      button.addEventListener("click", () => sort(table, button.closest("th"), button));
    }
  }
})();
