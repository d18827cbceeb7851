"use strict";
// Set the theme before the first paint. If the browser has no storage for local files, the choice is not saved.
const root = document.documentElement;
root.classList.add("has-script"); // long tables are shortened only if there is a script that can show all rows
const savedTheme = {
  read() { try { return localStorage.getItem("tapfm-report-theme"); } catch { return null; } },
  write(theme) { try { localStorage.setItem("tapfm-report-theme", theme); } catch { /* no storage */ } },
};
if (["light", "dark"].includes(savedTheme.read())) root.dataset.theme = savedTheme.read();

function initTheme() {
  const button = document.getElementById("theme");
  const systemDark = matchMedia("(prefers-color-scheme: dark)");
  const isDark = () => (root.dataset.theme || (systemDark.matches ? "dark" : "light")) === "dark";
  const update = () => {
    button.setAttribute("aria-pressed", String(isDark()));
    button.textContent = isDark() ? "Light" : "Dark";
    button.title = isDark() ? "Use the light theme" : "Use the dark theme";
  };
  button.addEventListener("click", () => {
    root.dataset.theme = isDark() ? "light" : "dark";
    savedTheme.write(root.dataset.theme);
    update();
  });
  systemDark.addEventListener("change", update);
  button.hidden = false;
  update();
}

function initContents() {
  const details = document.querySelector(".contents details");
  const wideScreen = matchMedia("(min-width: 64rem)");
  const update = () => { details.open = wideScreen.matches; };
  wideScreen.addEventListener("change", update);
  update();
  details.addEventListener("click", (event) => {
    if (!wideScreen.matches && event.target.closest("a")) details.open = false;
  });
  const links = new Map([...document.querySelectorAll(".contents a")].map((link) => [link.hash.slice(1), link]));
  const visible = new Set();
  const observer = new IntersectionObserver((entries) => {
    for (const entry of entries) entry.isIntersecting ? visible.add(entry.target.id) : visible.delete(entry.target.id);
    const current = [...links.keys()].find((id) => visible.has(id));
    for (const [id, link] of links) id === current ? link.setAttribute("aria-current", "true") : link.removeAttribute("aria-current");
  }, { rootMargin: "-10% 0px -60% 0px" });
  for (const section of document.querySelectorAll("main > section")) observer.observe(section);
}

// Expand all sections for printing, and collapse them again afterwards.
function initPrinting() {
  let collapsed = [];
  const expand = () => {
    if (collapsed.length) return;
    collapsed = [...document.querySelectorAll("details.collapsible:not([open])")];
    for (const details of collapsed) details.open = true;
  };
  const restore = () => {
    for (const details of collapsed) details.open = false;
    collapsed = [];
  };
  addEventListener("beforeprint", expand);
  addEventListener("afterprint", restore);
  matchMedia("print").addEventListener("change", (media) => (media.matches ? expand() : restore()));
}

// Sort and filter the table of predictions.
function initSlideTable() {
  const table = document.getElementById("slide-table");
  if (!table) return;
  const body = table.tBodies[0];
  const rows = [...body.querySelectorAll("tr")].map((element) => {
    const cells = [...element.querySelectorAll("th, td")];
    const searchText = cells.slice(0, 2).map((cell) => cell.textContent).join("\n").toLowerCase();
    return { element, cells, searchText, wrong: "wrong" in element.dataset };
  });
  const collator = new Intl.Collator("en", { numeric: true });
  const showAll = document.getElementById("show-all");
  const initialLimit = Number(table.dataset.rowsShown);
  const missing = table.dataset.missing;
  let limit = initialLimit; // rows on the screen; a print contains all rows that match the filters
  let order = rows;

  const columnValues = (column, numeric) => order.map((row) => {
    const cell = row.cells[column];
    if (!numeric) return cell.textContent;
    return cell.dataset.value === "" ? NaN : Number(cell.dataset.value);
  });
  // rank the distinct texts first, because a column may have few of them
  const rankTexts = (texts) => new Map([...new Set(texts)].sort(collator.compare).map((text, rank) => [text, rank]));
  const sort = (header) => {
    const numeric = header.dataset.sort === "number";
    const direction = header.getAttribute("aria-sort");
    const firstDirection = numeric ? "descending" : "ascending";
    const next = direction === "none" ? firstDirection : direction === "ascending" ? "descending" : "ascending";
    for (const other of table.tHead.rows[0].cells) other.setAttribute("aria-sort", other === header ? next : "none");
    const sign = next === "ascending" ? 1 : -1;
    const values = columnValues(header.cellIndex, numeric);
    const ranks = numeric ? null : rankTexts(values);
    const sortKey = (value) => (numeric ? value : value === missing ? NaN : ranks.get(value));
    const keyed = order.map((row, i) => [sortKey(values[i]), row]);
    // the sort is stable: rows with equal values keep the order of the previous sort
    keyed.sort(([a], [b]) => {
      if (Number.isNaN(a) || Number.isNaN(b)) return Number.isNaN(a) - Number.isNaN(b); // missing values come last
      return sign * (a - b);
    });
    order = keyed.map(([, row]) => row);
    body.replaceChildren(); // moving thousands of rows within a table takes Chromium seconds
    body.append(...order.map((row) => row.element));
    update();
  };
  for (const header of table.tHead.rows[0].cells) {
    const button = document.createElement("button");
    button.type = "button";
    button.textContent = header.textContent;
    button.addEventListener("click", () => sort(header));
    header.replaceChildren(button);
    header.setAttribute("aria-sort", "none");
  }

  const form = document.getElementById("slide-filters");
  const filterValue = (id) => document.getElementById(id)?.value ?? "";
  const filter = () => {
    const text = filterValue("filter-text").trim().toLowerCase();
    const selected = ["set", "target", "model"].map((name) => [name, filterValue(`filter-${name}`)]).filter(([, value]) => value);
    const wrongOnly = document.getElementById("filter-wrong").checked;
    for (const row of rows) {
      row.matches = row.searchText.includes(text) && (!wrongOnly || row.wrong)
        && selected.every(([name, value]) => row.element.dataset[name] === value);
    }
    update();
  };
  const update = () => {
    let matching = 0;
    for (const row of order) {
      row.element.hidden = !row.matches;
      row.element.classList.toggle("beyond-limit", row.matches && ++matching > limit);
    }
    const format = (number) => number.toLocaleString("en");
    const count = `${format(matching)} of ${format(rows.length)} rows`;
    document.getElementById("slide-count").textContent = matching > limit ? `${count}, first ${format(limit)} shown` : count;
    const filtered = document.getElementById("slide-filtered");
    filtered.hidden = matching === rows.length;
    filtered.textContent = `Filtered: ${count}.`;
    showAll.hidden = matching <= limit;
    showAll.textContent = `Show all ${format(matching)} rows`;
  };
  showAll.addEventListener("click", () => {
    limit = Infinity;
    update();
  });
  form.addEventListener("input", () => {
    limit = initialLimit;
    filter();
  });
  form.addEventListener("submit", (event) => event.preventDefault());
  form.hidden = false;
  filter();
}

document.addEventListener("DOMContentLoaded", () => {
  initTheme();
  initContents();
  initPrinting();
  initSlideTable();
});
