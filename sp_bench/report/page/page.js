// Sorting by the columns of a table. Without this script the page lacks nothing else.
"use strict";

const DASH = "\u2013";
const UNITS = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"];

// The number that an entry begins with, in bytes where it has a binary unit; NaN for words and dashes.
function valueOf(text) {
  const found = /^\[?([-+]?[\d,]*\.?\d+(?:e[-+]?\d+)?)\S*(?:\s+([KMGTP]?i?B)\b)?/i.exec(text);
  if (!found) return NaN;
  return Number(found[1].replaceAll(",", "")) * 1024 ** Math.max(0, UNITS.indexOf(found[2]));
}

// Dashes come last in either direction.
function compare(a, b, isText, sign) {
  if (isText) {
    if ((a === DASH) !== (b === DASH)) return a === DASH ? 1 : -1;
    return sign * a.localeCompare(b, "en", { numeric: true });
  }
  const x = valueOf(a), y = valueOf(b);
  if (Number.isNaN(x) || Number.isNaN(y)) return Number.isNaN(x) - Number.isNaN(y);
  return sign * (x - y);
}

function sort(table, column, heading) {
  const sign = heading.getAttribute("aria-sort") === "ascending" ? -1 : 1;
  for (const other of table.tHead.rows[0].cells) other.removeAttribute("aria-sort");
  heading.setAttribute("aria-sort", sign === 1 ? "ascending" : "descending");
  const body = table.tBodies[0], isText = heading.classList.contains("t");
  const keyed = Array.from(body.rows, (row) => [row.cells[column].textContent.trim(), row]);
  keyed.sort((a, b) => compare(a[0], b[0], isText, sign));
  body.append(...keyed.map((pair) => pair[1]));
}

for (const table of document.querySelectorAll("table.sortable")) {
  if (table.tBodies[0].rows.length < 2) continue;
  Array.from(table.tHead.rows[0].cells).forEach((heading, column) => {
    const button = document.createElement("button");
    button.type = "button";
    button.append(...heading.childNodes);
    button.addEventListener("click", () => sort(table, column, heading));
    heading.append(button);
  });
}

// One tab stop a line where the whole line links to the same rows.
for (const row of document.querySelectorAll("table.sortable tbody tr")) {
  const [first, ...others] = row.querySelectorAll("a");
  for (const link of others) if (link.hash === first.hash) link.tabIndex = -1;
}
