// A table whose columns sort: of all nodes of a model, or of the differences between two.

import { cut, make, scaled, signed } from "./format.js";
import { active, state, sumOf } from "./state.js";

export const UNITS = { params: "count", macs: "count", params_bytes: "bytes", latency_ms: "ms" };
export const NAMES = { params: "Parameters", macs: "Multiply-adds", params_bytes: "Size of parameters", latency_ms: "Latency" };
const COLLATOR = new Intl.Collator(undefined, { numeric: true });
const MOST_ROWS = 500; // elements of the page
const SHOWN = ["macs", "params", "latency", "estimated_latency"]; // figures, with the ones of colour and size

// Columns are {title, of(row), text(value)}; without a text, the value is one. Numbers sort from the largest on.
const table = (columns, rows, act, redraw) => {
  const at = !state.sort ? -1 : columns.findIndex(({ title }) => title === state.sort.replace(/^-/, ""));
  const sorted = [...rows];
  if (at >= 0) {
    const { of, text } = columns[at];
    const compare = text ? (a, b) => (of(b) ?? 0) - (of(a) ?? 0) : (a, b) => COLLATOR.compare(of(a), of(b));
    sorted.sort(state.sort.startsWith("-") ? (a, b) => compare(b, a) : compare);
  }
  const sort = (title) => { state.sort = state.sort === title ? `-${title}` : state.sort === `-${title}` ? "" : title; redraw(); };
  const head = columns.map(({ title, text }, number) => make("th", {
    class: text ? "number" : null, scope: "col", "aria-sort": number !== at ? null : state.sort.startsWith("-") !== Boolean(text) ? "descending" : "ascending",
  }, title ? make("button", { onclick: () => sort(title) }, `${title}${number !== at ? "" : state.sort.startsWith("-") ? " ▴" : " ▾"}`) : ""));
  const line = (row) => {
    const select = () => act.select(row.side, row.node, true);
    return make("tr", { class: row.status ?? null, tabindex: 0, onclick: select, onkeydown: (event) => { if (event.key === "Enter") { event.stopPropagation(); select(); } } },
      ...columns.map(({ of, text, kind }) => make("td", { class: text ? "number" : kind ?? null }, text ? (of(row) ? text(of(row)) : "") : of(row))));
  };
  const more = sorted.length - MOST_ROWS;
  return [make("table", {}, make("thead", {}, make("tr", {}, ...head)), make("tbody", {}, ...sorted.slice(0, MOST_ROWS).map(line))),
    more > 0 ? make("p", {}, `and ${more.toLocaleString("en-US")} more: search, or sort by another column`) : ""];
};

// The nodes that the search finds, equal ones as one row with the sum of all.
export const drawTable = (into, act, redraw) => {
  const side = active();
  const { model } = side;
  const rows = side.rows(model.search(state.query)).map((row) => ({ ...row, side }));
  const figures = [...new Set([...SHOWN, state.colour, state.size])].filter((name) => model.figures.has(name)).map((name) => model.figures.get(name));
  const columns = [
    { title: "Name", kind: "name", of: ({ node, times }) => `${cut(model.label(node), 60)}${times > 1 ? ` × ${times}` : ""}` },
    { title: "Type", kind: "type", of: ({ node }) => model.type(node) || model.kind(node) },
    ...figures.map((figure) => ({
      title: figure.title, of: ({ node, nodes }) => (figure.adds ? sumOf(nodes, figure.total) : figure.total[node]), text: (value) => scaled(value, figure.unit),
    })),
    { title: "Output", of: ({ node }) => cut(model.fact("Output", node), 40) },
    { title: "Weights", of: ({ node }) => cut(model.fact("Parameters", node), 60) },
  ];
  into.append(make("p", {}, `${rows.length.toLocaleString("en-US")} rows; equal nodes are one`), ...table(columns, rows, act, redraw));
};

// All differences between two models.
export const drawChanges = (into, act, redraw) => {
  const { rows, totals, models } = state.diff;
  const shown = rows.filter((row) => row.status !== "shape").map((row) => {
    const number = row.nodes[1] >= 0 ? 1 : 0;
    return { ...row, side: state.sides[number], node: row.nodes[number] };
  });
  const shapes = rows.length - shown.length;
  const change = (name) => ({ title: NAMES[name], of: (row) => row.changes[name]?.[2], text: (value) => signed(value, UNITS[name]) });
  const columns = [
    { title: "", of: ({ status }) => status, kind: "mark" },
    { title: "Module", of: ({ side, node }) => side.model.label(node), kind: "name" },
    { title: "Type", of: ({ side, node }) => side.model.type(node), kind: "type" },
    { title: "Differs in", of: ({ differs }) => differs.join(", ").replaceAll("_", " ") },
    change("params"), change("macs"),
  ];
  const sum = Object.entries(totals).map(([name, [before, after, difference]]) =>
    `${NAMES[name]}: ${scaled(before, UNITS[name])} → ${scaled(after, UNITS[name])} (${signed(difference, UNITS[name])})`).join("; ");
  const text = shown.length ? `${shown.length} modules differ` : "Nothing differs";
  into.append(make("p", {}, `${models[0]} → ${models[1]}: ${text}${shapes ? `, ${shapes} more only in their shapes` : ""}. ${sum}`),
    ...(shown.length ? table(columns, shown, act, redraw) : []));
};
