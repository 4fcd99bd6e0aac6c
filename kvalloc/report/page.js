"use strict";
const data = JSON.parse(document.getElementById("data").textContent);
const dark = matchMedia("(prefers-color-scheme: dark)");
const narrow = matchMedia("(max-width: 40rem)");
const views = {};
const chosen = {};

/* On a narrow screen layers run down the page: x and y change places. */
function turned(spec) {
  const turn = (encoding) => Object.fromEntries(Object.entries(encoding).map(
    ([key, value]) => [{ x: "y", y: "x", x2: "y2", y2: "x2" }[key] || key, value]));
  return { ...spec, encoding: turn(spec.encoding || {}),
    layer: spec.layer.map((one) => ({ ...one, encoding: turn(one.encoding || {}) })) };
}

function sized(name, spec) {
  const fitted = { ...spec, width: "container" };
  if (!["budgets", "bits"].includes(name)) return { ...fitted, height: narrow.matches ? 260 : 340 };
  if (narrow.matches) return { ...turned(fitted), height: data.layers * (data.layers > 40 ? 11 : 18) };
  return { ...fitted, height: Math.max(120, 34 * data.heads) };
}

function config() {
  const theme = data.themes[dark.matches ? "dark" : "light"];
  return { ...theme, legend: { ...theme.legend, columns: narrow.matches ? 1 : 2 } };
}

async function draw() {
  for (const [name, spec] of Object.entries(data.charts)) {
    const element = document.getElementById(name);
    if (views[name]) views[name].finalize();
    const result = await vegaEmbed(element, sized(name, spec),
      { actions: false, renderer: "svg", config: config() });
    views[name] = result.view;
    for (const [signal, value] of Object.entries(chosen[name] || {})) result.view.signal(signal, value);
    await result.view.runAsync();
    element.querySelector("svg").setAttribute("aria-hidden", "true"); // the figure has a name, its marks are in tables
  }
  document.body.dataset.drawn = "yes";
}

function choose(control) {
  const values = control.dataset.values && JSON.parse(control.dataset.values);
  const value = values ? values[control.value] : "number" in control.dataset ? Number(control.value) : control.value;
  const output = document.querySelector(`output[for="${control.id}"]`);
  if (output && values) output.textContent = value;
  for (const name of control.dataset.charts.trim().split(/\s+/)) {
    (chosen[name] ||= {})[control.dataset.signal] = value;
    if (views[name]) views[name].signal(control.dataset.signal, value).runAsync();
  }
}

function size(bytes) {
  for (const [unit, power] of [["GiB", 3], ["MiB", 2], ["KiB", 1]]) {
    const value = bytes / 1024 ** power;
    if (value >= 1) return `${value.toFixed(value >= 100 ? 0 : 2)} ${unit}`;
  }
  return `${bytes} bytes`;
}

function calculate() {
  const memory = data.memory, at = Number(document.getElementById("context").value);
  const batch = Math.max(1, Math.floor(Number(document.getElementById("batch").value)) || 1);
  const full = memory.full[at] * batch;
  document.getElementById("context-text").textContent = `${memory.contexts[at].toLocaleString("en")} tokens`;
  document.getElementById("full-bytes").textContent = size(full);
  document.querySelectorAll("#kept tr").forEach((row, place) => {
    const kept = memory.kept[place][at] * batch, cells = row.querySelectorAll("td");
    cells[0].textContent = size(kept);
    cells[1].textContent = size(full - kept);
    cells[2].textContent = `${(100 * kept / full).toFixed(1)}%`;
    cells[3].firstElementChild.style.width = `${Math.min(100, 100 * kept / full)}%`;
  });
}

/* The number that a cell states, to sort by; NaN for words. */
function number(text) {
  const units = { KiB: 1024, MiB: 1024 ** 2, GiB: 1024 ** 3 };
  const stated = text.trim().match(/^[<+]?(-?[\d,.]+)(%|(?: (KiB|MiB|GiB|bytes)))?$/);
  return stated ? Number(stated[1].replaceAll(",", "")) * (units[stated[3]] ?? 1) : NaN;
}

function sort(heading) {
  const place = heading.cellIndex, body = heading.closest("table").tBodies[0];
  const up = heading.getAttribute("aria-sort") !== "ascending";
  const compare = (a, b) => {
    const [x, y] = [a, b].map((row) => row.cells[place].textContent), gap = number(x) - number(y);
    return Number.isNaN(gap) ? x.localeCompare(y, "en", { numeric: true }) : gap;
  };
  const rows = [...body.rows].sort((a, b) => (up ? 1 : -1) * compare(a, b));
  for (const other of heading.parentElement.cells) other.removeAttribute("aria-sort");
  heading.setAttribute("aria-sort", up ? "ascending" : "descending");
  body.append(...rows);
}

for (const control of document.querySelectorAll("[data-signal]")) {
  control.addEventListener("input", () => choose(control));
  choose(control);
}
for (const id of ["context", "batch"]) document.getElementById(id).addEventListener("input", calculate);
for (const table of document.querySelectorAll(".sortable")) {
  for (const row of table.rows) { // a heading stands as the column's first cell does
    for (const cell of row.cells) {
      const shown = cell.tagName === "TD" ? cell : table.tBodies[0].rows[0]?.cells[cell.cellIndex];
      const text = shown?.tagName === "TD" ? shown.textContent : "";
      cell.classList.toggle("number", ["-", "?"].includes(text) || !Number.isNaN(number(text)));
    }
  }
}
for (const button of document.querySelectorAll(".sortable th button")) {
  button.addEventListener("click", () => sort(button.closest("th")));
}
calculate();
if (globalThis.vegaEmbed) {
  requestAnimationFrame(() => setTimeout(draw));
  for (const query of [dark, narrow]) query.addEventListener("change", draw);
}
