// Opens the appendix for links into it, and sorts its tables. Without this script the page lacks nothing else.
"use strict";

function reveal() {
  const target = location.hash.length > 1 && document.getElementById(location.hash.slice(1));
  if (!target) return;
  for (let each = target; each; each = each.parentElement) if (each.tagName === "DETAILS") each.open = true;
  target.scrollIntoView();
}

addEventListener("hashchange", reveal);
reveal();

// The number that an entry begins with; NaN for words and dashes.
function valueOf(text) {
  const found = /^[-+]?[\d,]*\.?\d+(?:e[-+]?\d+)?/i.exec(text);
  return found ? Number(found[0].replaceAll(",", "")) : NaN;
}

function sort(table, column, heading) {
  const sign = heading.getAttribute("aria-sort") === "ascending" ? -1 : 1;
  for (const other of table.tHead.rows[0].cells) other.removeAttribute("aria-sort");
  heading.setAttribute("aria-sort", sign === 1 ? "ascending" : "descending");
  const keyed = Array.from(table.tBodies[0].rows, (row) => [row.cells[column].textContent.trim(), row]);
  keyed.sort(([a], [b]) => {
    const x = valueOf(a), y = valueOf(b);
    if (Number.isNaN(x) || Number.isNaN(y)) {
      return Number.isNaN(x) - Number.isNaN(y) || sign * a.localeCompare(b, "en", { numeric: true });
    }
    return sign * (x - y);
  });
  table.tBodies[0].append(...keyed.map((pair) => pair[1]));
}

for (const table of document.querySelectorAll("table.plain")) {
  if (table.tBodies[0].rows.length < 2 || table.tBodies[0].querySelector("[id]")) continue;
  Array.from(table.tHead.rows[0].cells).forEach((heading, column) => {
    const button = document.createElement("button");
    button.type = "button";
    button.append(...heading.childNodes);
    button.addEventListener("click", () => sort(table, column, heading));
    heading.append(button);
  });
}
