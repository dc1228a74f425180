// Shows what the pickers choose. Numbers and sentences come from `data`; nothing is compared or averaged here.

const data = JSON.parse(document.getElementById("data").textContent);
const NAMES = data.pickers.map((picker) => picker.name);
const PICKERS = Object.fromEntries(data.pickers.map((picker) => [picker.name, picker]));
const QUANTITIES = Object.fromEntries(data.quantities.map((quantity) => [quantity.name, quantity]));
const PANELS = { left: "tokens_per_s", right: "ratio" };
const OF_LINE = ["gpus", "gpu", "link", "kernel"]; // pickers that a line's own words do not have
const SHAPES = { circle: "\u25cf", square: "\u25a0", "triangle-up": "\u25b2", diamond: "\u25c6", "triangle-down": "\u25bc", cross: "\u271a" };
const DASHES = [[], [6, 3], [2, 2], [8, 3, 2, 3]];
const MOST = 300; // lines of the table, and of the legend; CSV and LaTeX have all
const MANY = 3000; // marks, from which on they are pixels instead of vectors
const order = new Intl.Collator("en", { numeric: true }).compare;
const $ = (id) => document.getElementById(id);
let view = {}, shown = [], labels = [], drawn = 0; // picker or panel -> choice; cells; line -> label; how often

const text = (column, i) => column.words[column.of[i]];
const word = (name, i) => text(PICKERS[name], i);
const key = (i) => `${word("campaign", i)}/${data.rows[i][0].replace(".parquet", "")}`;
const number = (value) => value.toLocaleString("en", { maximumSignificantDigits: 4 });

function element(tag, content = "", more = {}) {
  const made = Object.assign(document.createElement(tag), more);
  made.append(...[content].flat());
  return made;
}

function matching(choice) {
  const chosen = NAMES.filter((name) => choice[name]).map((name) => [PICKERS[name].of, PICKERS[name].words.indexOf(choice[name])]);
  return data.tokens.map((_, i) => i).filter((i) => chosen.every(([of, at]) => of[i] === at));
}

// Where nothing matches, the other pickers are opened, the last one first.
function choose(name, value) {
  delete view.cell;
  if (value) view[name] = value; else delete view[name];
  for (const other of [...NAMES].reverse()) {
    if (matching(view).length) break;
    if (other !== name) delete view[other];
  }
  show("pushState");
}

const pick = (i) => { view.cell = key(i); show("pushState"); };

function read() {
  const asked = Object.fromEntries(new URLSearchParams(location.hash.slice(1)));
  view = { ...PANELS };
  if (!Object.keys(asked).length) Object.assign(view, data.open);
  for (const name of NAMES) if (PICKERS[name].words.includes(asked[name])) view[name] = asked[name];
  for (const name in PANELS) if (asked[name] in QUANTITIES) view[name] = asked[name];
  if (asked.cell) view.cell = asked.cell;
  if (!matching(view).length) view = { ...PANELS };
}

function interval(quantity, i) {
  const [value, low, high] = [quantity.values[i], quantity.low[i], quantity.high[i]];
  if (value === null) return "";
  return number(value) + (low === null ? "" : ` [${number(low)}, ${number(high)}]`);
}

// A line's method and what tells it from the other lines that are shown.
function label() {
  const lines = [...new Set(shown.map((i) => data.line[i]))];
  const first = Object.fromEntries([...shown].reverse().map((i) => [data.line[i], i]));
  const settings = [...new Set(lines.map((line) => data.lines[line].setting))].map((s) => data.settings[s]);
  const shared = settings.reduce((so_far, parts) => so_far.filter((part) => parts.includes(part)));
  const apart = OF_LINE.filter((name) => new Set(lines.map((line) => PICKERS[name].of[first[line]])).size > 1);
  labels = [];
  for (const line of lines) {
    const { name, setting } = data.lines[line];
    const parts = data.settings[setting].filter((part) => !shared.includes(part));
    labels[line] = [name, ...apart.map((each) => word(each, first[line])).filter((each) => !parts.includes(each)), ...parts].join(", ");
  }
  const of = {}, styles = new Map();
  for (const line of lines.sort((a, b) => order(labels[a], labels[b]))) {
    const colour = text(data.colour, first[line]);
    const n = of[colour] = (of[colour] ?? -1) + 1;
    styles.set(line, { colour, shape: Object.keys(SHAPES)[n % 6], dash: DASHES[n % 4] });
  }
  return styles;
}

function panel(quantity, styles, width) {
  const values = shown.filter((i) => quantity.values[i] !== null || data.oom[i]).map((i) => {
    const weak = word("grade", i) === "C", { colour, shape, dash } = styles.get(data.line[i]);
    const said = [labels[data.line[i]], `${data.tokens[i].toLocaleString("en")} tokens`, data.oom[i] ? "out of memory" : interval(quantity, i)];
    return {
      i, x: data.tokens[i], y: quantity.values[i], low: quantity.low[i], high: quantity.high[i], line: data.line[i],
      colour: weak ? "#999999" : colour, own: colour, shape, dash, weak, hollow: word("evidence", i) !== "measured",
      picked: key(i) === view.cell, oom: data.oom[i], said: `${said.join(", ")} (${word("grade", i) || text(data.why, i)})`,
    };
  });
  values.sort((a, b) => b.weak - a.weak); // what is weak lies below
  const lengths = [...new Set(shown.map((i) => data.tokens[i]))].sort((a, b) => a - b);
  const x = { field: "x", type: "quantitative", scale: { type: "log", base: 2, domain: [lengths[0] / 1.15, lengths.at(-1) * 1.15], nice: false },
    axis: { title: "tokens", grid: false, labelOverlap: "greedy", labelSeparation: 6, values: lengths, labelExpr: "datum.value % 1024 ? format(datum.value, ',') : format(datum.value / 1024, ',') + 'K'" } };
  const heights = values.flatMap((each) => [each.y, each.low, each.high]).filter((each) => each !== null);
  const [least, most] = [Math.min(...heights), Math.max(...heights)], air = least === most ? 1.5 : Math.max(1.002, (most / least) ** 0.06);
  const scale = { type: "log", nice: false, ...(heights.length ? { domain: [least / air, most * air] } : {}) };
  const axis = { title: null, tickCount: 6, labelOverlap: true, labelExpr: "format(datum.value, datum.value < 1 ? '~g' : '~s')" };
  const y = (field) => ({ field, type: "quantitative", scale, axis });
  const ink = { field: "colour", type: "nominal", scale: null };
  return {
    title: { text: quantity.head, anchor: "start", fontSize: 13 }, width, height: 300, data: { values },
    layer: [
      { transform: [{ filter: "datum.y !== null" }], mark: { type: "line", opacity: 0.6, strokeWidth: 1.5 },
        encoding: { x, y: y("y"), detail: { field: "line" }, color: { field: "own", type: "nominal", scale: null }, strokeDash: { field: "dash", type: "nominal", scale: null } } },
      { transform: [{ filter: "datum.low !== null" }], mark: { type: "rule", strokeWidth: 2 }, encoding: { x, y: y("low"), y2: { field: "high" }, color: ink } },
      { transform: [{ filter: "datum.y !== null" }], mark: { type: "point", filled: true, cursor: "pointer", opacity: 1, strokeWidth: 1.5 },
        encoding: {
          x, y: y("y"), shape: { field: "shape", type: "nominal", scale: null }, tooltip: { field: "said" }, stroke: ink,
          fill: { condition: { test: "datum.hollow", value: "#ffffff" }, ...ink },
          size: { condition: { test: "datum.picked", value: 260 }, value: 70 },
        } },
      { transform: [{ filter: "datum.oom" }], mark: { type: "text", text: "\u2715", fontSize: 14, fontWeight: "bold", cursor: "pointer", baseline: "bottom" },
        encoding: { x, y: { value: 300 }, color: ink, tooltip: { field: "said" } } },
    ],
  };
}

async function draw(styles) {
  const mine = ++drawn, wide = $("panels").clientWidth, beside = wide > 700;
  const width = Math.max(200, (beside ? wide / 2 : wide) - 60);
  const panels = ["left", "right"].map((name) => panel(QUANTITIES[view[name]], styles, width));
  const spec = { $schema: "https://vega.github.io/schema/vega-lite/v6.json", background: "white", [beside ? "hconcat" : "vconcat"]: panels, bounds: "flush", spacing: 70, config: { view: { stroke: "#dddddd" }, font: "system-ui, sans-serif" } };
  const made = await vegaEmbed("#panels", spec, { ast: true, actions: false, renderer: shown.length > MANY ? "canvas" : "svg" });
  if (mine === drawn) made.view.addEventListener("click", (_, item) => item?.datum?.said && pick(item.datum.i));
}

function sentence(verdict) {
  const grade = element("span", verdict.mark, { className: "grade" });
  return [verdict.bold ? element("b", verdict.text) : verdict.text, " ", grade, element("small", verdict.where)];
}

// Only verdicts on cells that are shown; the best is the first. Of a picked cell, its own.
function judge() {
  const there = new Set(shown), picked = shown.find((i) => key(i) === view.cell);
  const found = data.verdicts.filter((verdict) => verdict.cells.every((i) => there.has(i)));
  const near = found.filter((v) => picked !== undefined && v.cells.some((i) => data.line[i] === data.line[picked] && data.tokens[i] === data.tokens[picked]));
  const first = near[0] ?? found[0];
  $("verdict").className = first && !first.weak ? "" : "weak";
  $("verdict").replaceChildren(...(first ? sentence(first) : ["No verdict: no two methods or stacks that are shown ran in one campaign with equal options."]));
  const others = found.filter((verdict) => verdict !== first);
  $("others").hidden = !others.length;
  $("others").firstChild.textContent = `${others.length} more verdicts on what is shown`;
  $("others").lastChild.replaceChildren(...others.map((v) => element("li", sentence(v), { className: v.weak ? "weak" : "" })));
}

function detail() {
  const i = shown.find((each) => key(each) === view.cell);
  $("cell").hidden = i === undefined;
  if (i === undefined) return;
  const campaign = word("campaign", i), files = data.rows[i];
  const numbers = data.quantities.filter((q) => q.values[i] !== null).map((q) => `${q.head}: ${interval(q, i)}`);
  $("cell").replaceChildren(
    element("h2", `${labels[data.line[i]]}, ${data.tokens[i].toLocaleString("en")} tokens`),
    element("div", `Grade ${word("grade", i) || "\u2013"}: ${text(data.why, i)}. ${numbers.join("; ")}.`),
    element("div", NAMES.map((name) => `${PICKERS[name].head}: ${word(name, i) || "\u2013"}`).join("; ")),
    element("div", data.settings[data.lines[data.line[i]].setting].join(", "), { className: "soft" }),
    element("div", `Rows of results/${campaign}:`), element("pre", files.join("\n")),
    element("div", "All columns of a row, and the command that repeats it:"), element("pre", `sp-bench show ${files[0].slice(0, 12)} results/${campaign}`),
    ...(data.commands[campaign] ?? []).map((command) => element("pre", command, { title: "the campaign was run by this" })),
  );
}

function sorted() {
  return [...shown].sort((a, b) => order(labels[data.line[a]], labels[data.line[b]]) || data.tokens[a] - data.tokens[b]);
}

function table() {
  const two = [QUANTITIES[view.left], QUANTITIES[view.right]];
  const line = (tag, texts) => element("tr", texts.map((each) => element(tag, each)));
  $("shown").firstChild.textContent = `${shown.length} cells are shown, as a table`;
  $("shown").querySelector("thead").replaceChildren(line("th", ["method", "tokens", ...two.map((q) => q.head), "grade"]));
  $("shown").querySelector("tbody").replaceChildren(...sorted().slice(0, MOST).map((i) => {
    const name = element("button", labels[data.line[i]], { type: "button", onclick: () => pick(i) });
    return line("td", [name, data.tokens[i].toLocaleString("en"), ...two.map((q) => interval(q, i) || (data.oom[i] ? "out of memory" : "")), word("grade", i)]);
  }));
}

function csv() {
  const quoted = (value) => (/[",\n\r]/.test(value) ? `"${String(value).replaceAll('"', '""')}"` : value);
  const heads = ["line", "tokens", ...NAMES, ...data.quantities.flatMap((q) => [q.name, `${q.name}_low`, `${q.name}_high`]), "out_of_memory", "grade", "why", "rows"];
  const lines = sorted().map((i) => [
    labels[data.line[i]], data.tokens[i], ...NAMES.map((name) => word(name, i)),
    ...data.quantities.flatMap((q) => [q.values[i], q.low[i], q.high[i]]), data.oom[i], word("grade", i), text(data.why, i), data.rows[i].join(" "),
  ]);
  return [heads, ...lines].map((line) => line.map((each) => quoted(each ?? "")).join(",")).join("\n") + "\n";
}

function latex() {
  const special = { "\\": "\\textbackslash{}", "~": "\\textasciitilde{}", "^": "\\textasciicircum{}", "<": "\\textless{}", ">": "\\textgreater{}", "|": "\\textbar{}", "\u2013": "--" };
  const plain = (each) => String(each).replace(/[\\~^<>|\u2013{}$&#%_]/g, (c) => special[c] ?? `\\${c}`).replace(/[^ -~]/g, "?");
  const two = [QUANTITIES[view.left], QUANTITIES[view.right]];
  const line = (texts) => `${texts.map(plain).join(" & ")} \\\\`;
  const lines = sorted().map((i) => line([labels[data.line[i]], data.tokens[i].toLocaleString("en"), ...two.map((q) => interval(q, i) || (data.oom[i] ? "out of memory" : "\u2013")), word("grade", i) || "\u2013"]));
  return ["% Needs \\usepackage{booktabs}", "\\begin{tabular}{@{}lrrrl@{}}", "\\toprule", line(["method", "tokens", ...two.map((q) => q.head), "grade"]), "\\midrule", ...lines, "\\bottomrule", "\\end{tabular}", ""].join("\n");
}

function save(name, content) {
  const link = element("a", "", { download: name, href: URL.createObjectURL(new Blob([content], { type: "text/plain" })) });
  link.click();
  URL.revokeObjectURL(link.href);
}

function pickers() {
  const made = data.pickers.map((picker) => {
    const there = new Set(matching({ ...view, [picker.name]: undefined }).map((i) => picker.of[i]));
    const options = picker.words.map((each, at) => [each, at]).filter(([each]) => each).sort(([a], [b]) => order(a, b));
    const select = element("select", [
      element("option", "all", { value: "" }),
      ...options.map(([each, at]) => element("option", there.has(at) ? each : `(${each})`, { value: each, selected: view[picker.name] === each })),
    ], { id: `of-${picker.name}`, onchange: (event) => choose(picker.name, event.target.value) });
    return element("label", [picker.head, select]);
  });
  for (const name in PANELS) {
    const options = data.quantities.map((q) => element("option", q.head, { value: q.name, selected: view[name] === q.name }));
    const select = element("select", options, { id: `of-${name}`, onchange: (event) => { view[name] = event.target.value; show("pushState"); } });
    made.push(element("label", [`${name} panel`, select], { className: "panel" }));
  }
  const focused = document.activeElement.id;
  $("pickers").replaceChildren(...made);
  if (focused.startsWith("of-")) $(focused).focus();
}

function show(how = "replaceState") {
  shown = matching(view);
  history[how](null, "", `#${new URLSearchParams(view)}`);
  const styles = label();
  pickers();
  judge();
  $("legend").replaceChildren(...[...styles].slice(0, MOST).map(([line, { shape, colour }]) => {
    const swatch = element("span", `${SHAPES[shape]} `);
    swatch.style.color = colour;
    return element("li", [swatch, labels[line]]);
  }));
  detail();
  table();
  return draw(styles);
}

$("pdf").onclick = () => print();
$("csv").onclick = () => save("explorer.csv", csv());
$("latex").onclick = () => save("explorer.tex", latex());
$("reset").onclick = () => { history.pushState(null, "", "#"); read(); show(); };
addEventListener("popstate", () => { read(); show(); });
addEventListener("resize", () => draw(label()));
read();
show();
