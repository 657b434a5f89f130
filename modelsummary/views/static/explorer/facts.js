// The panel at the right: the facts of the selected node, what it is connected to, and what is expensive inside.

import { byId, full, make, percent, scaled, signed } from "./format.js";
import { figureOf } from "./colours.js";
import { state, sumOf } from "./state.js";
import { NAMES, UNITS } from "./table.js";

const MOST_LINKS = 10, MOST_EXPENSIVE = 8, MOST_TYPES = 12, MOST_TEXT = 160;

export const drawFacts = (side, act) => {
  const { model } = side;
  const node = side.selected;
  const panel = byId("facts");
  const name = model.label(node);
  const times = side.folding.count(side.shown(node));
  const parts = [
    make("h2", {}, name),
    make("p", { class: "kind" }, model.type(node) || model.kind(node), times > 1 ? make("span", { class: "times" }, `× ${times}`) : ""),
    buttons(side, node, act),
    difference(side, node),
    figures(side, node, times),
    texts(model, node),
    links(side, node, act),
    expensive(side, node, act),
    types(side, node, act),
    bookmarks(side, act),
    node ? "" : remarks(model),
  ];
  panel.replaceChildren(...parts.filter(Boolean));
};

const section = (title, ...inside) => make("section", {}, make("h3", {}, title), ...inside);

const row = (title, ...cells) => make("tr", {}, make("th", { scope: "row" }, title), ...cells.map((cell) => make("td", {}, cell)));

const buttons = (side, node, act) => {
  const { model } = side;
  const found = [];
  if (model.isOpenable(node) && node !== side.focus) {
    found.push(make("button", { onclick: () => act.toggle(side, node) }, side.open.has(side.shown(node)) ? "Collapse" : "Expand"));
    found.push(make("button", { onclick: () => act.focus(side, node), title: "Show only this module (f)" }, "Focus"));
  }
  if (model.isOpenable(node)) {
    found.push(make("button", { onclick: () => act.openAll(side, node), title: "Key e" }, "Expand all"));
  }
  found.push(make("button", { onclick: () => act.mark(side, node), title: "Key b" }, side.marked.has(node) ? "Remove bookmark" : "Bookmark"));
  const head = side.folding.head.get(side.shown(node));
  if (head !== undefined) {
    found.push(make("button", { onclick: () => act.unfold(side, node), title: "Key u" },
      side.unfolded.has(head) ? "Fold equal blocks" : "Show each"));
  }
  return make("div", { class: "buttons" }, ...found);
};

const figures = (side, node, times) => {
  const { model } = side;
  const exact = (number, unit) => make("span", { title: full(number, unit) }, scaled(number, unit));
  const rows = [...model.figures.values()].filter((figure) => figure.total[node]).map((figure) => {
    const value = figure.total[node];
    const cells = [exact(value, figure.unit), node && figure.adds ? percent(value, figure.total[0]) : ""];
    return row(figure.title, ...cells, ...(times > 1 ? [figure.adds ? exact(value * times, figure.unit) : ""] : []));
  });
  if (!rows.length) return "";
  const head = times > 1 ? make("tr", {}, make("td"), make("td", {}, "one"), make("td", {}, "share"), make("td", {}, `all ${times}`)) : "";
  return section("Figures", make("table", { class: "figures" }, head, ...rows));
};

const texts = (model, node) => {
  const rows = Object.keys(model.data.facts).filter((title) => title !== "FQN" && model.fact(title, node))
    .map((title) => row(title, long(model.fact(title, node))));
  for (const title of Object.keys(model.data.groups)) {
    const inside = model.groups(title, node);
    if (inside.length) rows.push(row(title, inside.join(", ")));
  }
  return rows.length ? section("Facts", make("table", {}, ...rows)) : "";
};

const long = (text) => (text.length <= MOST_TEXT ? text
  : make("details", {}, make("summary", {}, `${text.slice(0, MOST_TEXT)}…`), text));

const link = (side, node, act, text) => make("a", { href: "#", onclick: (event) => { event.preventDefault(); act.select(side, node, true); } },
  text ?? (side.model.label(node)));

const links = (side, node, act) => {
  if (!node || !side.model.edgeCount) return "";
  const { taken, passed } = side.model.neighbours(node);
  const list = (title, kind, found) => {
    if (!found.length) return "";
    const lines = found.slice(0, MOST_LINKS).map(([other, tensors]) => {
      const text = [...tensors][0] + (tensors.size > 1 ? ` and ${tensors.size - 1} more` : "");
      return make("li", {}, link(side, other, act), make("span", { class: "type" }, text));
    });
    if (found.length > MOST_LINKS) lines.push(make("li", { class: "type" }, `and ${found.length - MOST_LINKS} more`));
    return make("div", { class: kind }, section(title, make("ul", {}, ...lines)));
  };
  const both = [list("Takes from", "taken", taken), list("Passes to", "passed", passed)].filter(Boolean);
  return both.length ? make("div", {}, ...both) : "";
};

// The parts inside with the largest own figure; of equal ones the first, with all of them.
const expensive = (side, node, act) => {
  const { model } = side;
  const figure = figureOf(model);
  if (!figure?.adds || !figure.total[node] || !model.isOpenable(node)) return "";
  const inside = [...figure.own.keys()].filter((each) => model.contains(node, each) && figure.own[each]);
  const rows = side.rows(inside).map((row) => ({ ...row, value: sumOf(row.nodes, figure.own) }));
  const found = rows.sort((a, b) => b.value - a.value).slice(0, MOST_EXPENSIVE);
  const most = found[0]?.value;
  return section(`Most ${figure.title.toLowerCase()}`, make("ul", { class: "bars" }, ...found.map(({ node, times, value }) =>
    make("li", { style: `--share: ${(100 * value) / most}%` }, link(side, node, act), times > 1 ? make("span", { class: "times" }, `× ${times}`) : "",
      make("span", { class: "value" }, `${scaled(value, figure.unit)} · ${percent(value, figure.total[0])}`)))));
};

const types = (side, node, act) => {
  const { model } = side;
  if (!model.isOpenable(node)) return "";
  const counts = new Map();
  for (let each = node + 1; each < model.end[node]; each++) {
    if (model.isOpenable(each) || ["input", "output"].includes(model.kind(each))) continue;
    const type = model.type(each) || model.name(each);
    counts.set(type, (counts.get(type) ?? 0) + 1);
  }
  const found = [...counts].sort((a, b) => b[1] - a[1]);
  const rows = found.slice(0, MOST_TYPES).map(([type, count]) => row(
    make("a", { href: "#", onclick: (event) => { event.preventDefault(); act.search(type); } }, type), count.toLocaleString("en-US")));
  if (found.length > MOST_TYPES) rows.push(row("others", found.slice(MOST_TYPES).reduce((sum, [, count]) => sum + count, 0).toLocaleString("en-US")));
  return rows.length ? section("Operators and layers inside", make("table", { class: "figures" }, ...rows)) : "";
};

const bookmarks = (side, act) => (side.marked.size
  ? section("Bookmarks", make("ul", {}, ...[...side.marked].map((node) => make("li", {}, link(side, node, act))))) : "");

const remarks = (model) => (model.data.remarks.length
  ? section("Remarks", make("ul", {}, ...model.data.remarks.map((line) => make("li", {}, line)))) : "");

const difference = (side, node) => {
  if (!state.diff) return "";
  const totals = node === 0 ? Object.entries(state.diff.totals).map(([name, change]) => changeRow(name, change)) : [];
  const found = side.differences.get(node);
  if (!found && !totals.length) return "";
  const rows = found && node ? Object.entries(found.changes).filter(([, change]) => change[2]).map(([name, change]) => changeRow(name, change)) : totals;
  const what = found ? make("p", { class: `status ${found.status}` }, said(found)) : "";
  return section("Difference", what, rows.length ? make("table", { class: "figures" }, make("tr", {}, make("td"), ...["before", "after", "change"].map((title) => make("td", {}, title))), ...rows) : "");
};

const changeRow = (name, [before, after, change]) => {
  const text = (value) => (value === null ? "–" : scaled(value, UNITS[name]));
  return row(NAMES[name] ?? name, text(before), text(after), change === null ? "–" : signed(change, UNITS[name], scaled));
};

const said = ({ status, differs }) => ({
  added: "only in the second model", removed: "only in the first model", renamed: "renamed",
  changed: `differs in ${differs.join(", ").replaceAll("_", " ")}`, shape: "same module, other shapes",
}[status]);
