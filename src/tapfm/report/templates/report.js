"use strict";
// The theme first, before anything is painted. Without storage (some browsers, for files) it is not remembered.
const root = document.documentElement;
root.classList.add("script"); // long tables show their first rows: those who have no script see all of them
const remembered = {
  read() { try { return localStorage.getItem("tapfm-report-theme"); } catch { return null; } },
  write(theme) { try { localStorage.setItem("tapfm-report-theme", theme); } catch { /* not remembered */ } },
};
if (["light", "dark"].includes(remembered.read())) root.dataset.theme = remembered.read();

function themes() {
  const button = document.getElementById("theme");
  const night = matchMedia("(prefers-color-scheme: dark)");
  const isDark = () => (root.dataset.theme || (night.matches ? "dark" : "light")) === "dark";
  const show = () => {
    button.setAttribute("aria-pressed", String(isDark()));
    button.textContent = isDark() ? "Light" : "Dark";
    button.title = isDark() ? "Show dark on light" : "Show light on dark";
  };
  button.addEventListener("click", () => {
    root.dataset.theme = isDark() ? "light" : "dark";
    remembered.write(root.dataset.theme);
    show();
  });
  night.addEventListener("change", show);
  button.hidden = false;
  show();
}

function contents() {
  const details = document.querySelector(".contents details");
  const wide = matchMedia("(min-width: 64rem)");
  const fit = () => { details.open = wide.matches; };
  wide.addEventListener("change", fit);
  fit();
  details.addEventListener("click", (event) => {
    if (!wide.matches && event.target.closest("a")) details.open = false;
  });
  const links = new Map([...document.querySelectorAll(".contents a")].map((link) => [link.hash.slice(1), link]));
  const seen = new Set();
  const watcher = new IntersectionObserver((entries) => {
    for (const entry of entries) entry.isIntersecting ? seen.add(entry.target.id) : seen.delete(entry.target.id);
    const here = [...links.keys()].find((id) => seen.has(id));
    for (const [id, link] of links) id === here ? link.setAttribute("aria-current", "true") : link.removeAttribute("aria-current");
  }, { rootMargin: "-10% 0px -60% 0px" });
  for (const section of document.querySelectorAll("main > section")) watcher.observe(section);
}

// On paper everything is open, and as it was afterwards.
function printing() {
  let shut = [];
  const open = () => {
    if (shut.length) return;
    shut = [...document.querySelectorAll("details.fold:not([open])")];
    for (const each of shut) each.open = true;
  };
  const close = () => {
    for (const each of shut) each.open = false;
    shut = [];
  };
  addEventListener("beforeprint", open);
  addEventListener("afterprint", close);
  matchMedia("print").addEventListener("change", (media) => (media.matches ? open() : close()));
}

function slides() {
  const table = document.getElementById("slide-table");
  if (!table) return;
  const body = table.tBodies[0];
  const rows = [...body.querySelectorAll("tr")].map((row) => {
    const cells = [...row.querySelectorAll("th, td")];
    const text = cells.slice(0, 2).map((cell) => cell.textContent).join("\n").toLowerCase();
    return { row, cells, text, wrong: "wrong" in row.dataset };
  });
  const names = new Intl.Collator("en", { numeric: true });
  const more = document.getElementById("slide-more");
  const { few, absent } = { few: Number(table.dataset.few), absent: table.dataset.absent };
  let most = few; // rows on the screen; paper has all that fit the filters
  let order = rows;

  const values = (column, numeric) => order.map((each) => {
    const cell = each.cells[column];
    if (!numeric) return cell.textContent;
    return cell.dataset.v === "" ? NaN : Number(cell.dataset.v);
  });
  // equal texts, of which a column may have few, are compared once
  const places = (texts) => new Map([...new Set(texts)].sort(names.compare).map((text, place) => [text, place]));
  const sort = (header) => {
    const numeric = header.dataset.by === "number";
    const now = header.getAttribute("aria-sort");
    const first = numeric ? "descending" : "ascending";
    const next = now === "none" ? first : now === "ascending" ? "descending" : "ascending";
    for (const other of table.tHead.rows[0].cells) other.setAttribute("aria-sort", other === header ? next : "none");
    const sign = next === "ascending" ? 1 : -1;
    const found = values(header.cellIndex, numeric);
    const place = numeric ? null : places(found);
    // equal ones stay as they are on the screen: sort by one column, then by another
    const keyed = order.map((each, i) => [numeric ? found[i] : found[i] === absent ? NaN : place.get(found[i]), each]);
    keyed.sort(([a], [b]) => {
      if (Number.isNaN(a) || Number.isNaN(b)) return Number.isNaN(a) - Number.isNaN(b); // nothing comes last
      return sign * (a - b);
    });
    order = keyed.map(([, each]) => each);
    body.replaceChildren(); // emptied first: to move thousands of rows within a table takes Chromium seconds
    body.append(...order.map((each) => each.row));
    show();
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
  const chosen = (id) => document.getElementById(id)?.value ?? "";
  const filter = () => {
    const text = chosen("filter-text").trim().toLowerCase();
    const wanted = ["where", "target", "model"].map((name) => [name, chosen(`filter-${name}`)]).filter(([, each]) => each);
    const wrongOnly = document.getElementById("filter-wrong").checked;
    for (const each of rows) {
      each.fits = each.text.includes(text) && (!wrongOnly || each.wrong) && wanted.every(([name, one]) => each.row.dataset[name] === one);
    }
    show();
  };
  const show = () => {
    let fitting = 0;
    for (const each of order) {
      each.row.hidden = !each.fits;
      each.row.classList.toggle("later", each.fits && ++fitting > most);
    }
    const count = (number) => number.toLocaleString("en");
    const all = `${count(fitting)} of ${count(rows.length)}`;
    document.getElementById("slide-count").textContent = fitting > most ? `${all}, the first ${count(most)} shown` : all;
    const filtered = document.getElementById("slide-filtered");
    filtered.hidden = fitting === rows.length;
    filtered.textContent = `Filtered: ${all} lines.`;
    more.hidden = fitting <= most;
    more.textContent = `Show all ${count(fitting)}`;
  };
  more.addEventListener("click", () => {
    most = Infinity;
    show();
  });
  form.addEventListener("input", () => {
    most = few;
    filter();
  });
  form.addEventListener("submit", (event) => event.preventDefault());
  form.hidden = false;
  filter();
}

document.addEventListener("DOMContentLoaded", () => {
  themes();
  contents();
  printing();
  slides();
});
