// The tree at the left: only the rows on the screen are elements, so that 100,000 nodes are no burden.

import { byId, fitting, full, make, percent, scaled } from "./format.js";
import { figureOf } from "./colours.js";
import { active, state } from "./state.js";

const ROW = 24; // pixels
const FONT = "12.5px ui-sans-serif, system-ui, sans-serif";
let rows = []; // {node, level, times}
let act = {};

export const startTree = (actions) => {
  act = actions;
  const tree = byId("tree");
  tree.addEventListener("scroll", draw);
  new ResizeObserver(draw).observe(tree);
};

const list = (side) => {
  const { model } = side;
  if (state.query.trim()) {
    return side.rows(model.search(state.query)).map((row) => ({ ...row, level: 0, isFound: true }));
  }
  const found = [];
  const add = (node, level) => {
    found.push({ node, level, times: side.folding.times.get(node) ?? 1 });
    if (side.listed.has(node)) model.children(node).filter((child) => side.isRow(child)).forEach((child) => add(child, level + 1));
  };
  add(0, 0);
  return found;
};

export const drawTree = (scrolls = true) => {
  const side = active();
  const tree = byId("tree");
  rows = list(side);
  let inner = tree.firstElementChild;
  if (!inner) inner = tree.appendChild(make("div", { class: "rows", role: "presentation" }));
  inner.style.height = `${rows.length * ROW}px`;
  const place = placeOf(side.selected);
  if (scrolls && place >= 0) {
    const top = place * ROW;
    if (top < tree.scrollTop) tree.scrollTop = top;
    else if (top + ROW > tree.scrollTop + tree.clientHeight) tree.scrollTop = top + ROW - tree.clientHeight;
  }
  draw();
};

const placeOf = (node) => {
  const exact = rows.findIndex((row) => row.node === node);
  return exact >= 0 ? exact : rows.findIndex((row) => active().shown(node) === row.node);
};

const draw = () => {
  const tree = byId("tree"), inner = tree.firstElementChild;
  if (!inner) return;
  const first = Math.max(0, Math.floor(tree.scrollTop / ROW) - 5);
  const last = Math.min(rows.length, Math.ceil((tree.scrollTop + tree.clientHeight) / ROW) + 5);
  const selected = placeOf(active().selected);
  if (selected >= 0) tree.setAttribute("aria-activedescendant", "selected-row");
  inner.replaceChildren(...rows.slice(first, last).map((row, place) => element(row, first + place, selected)));
  if (!rows.length && state.query.trim()) inner.replaceChildren(make("div", { class: "none" }, "nothing found"));
};

const element = ({ node, level, times, isFound }, place, selectedPlace) => {
  const side = active();
  const { model } = side;
  const figure = figureOf(model);
  const value = figure ? figure.total[node] * (figure.adds ? times : 1) : 0;
  const whole = figure ? figure.total[0] : 0;
  const share = figure?.adds && whole ? (100 * value) / whole : 0;
  const isOpenable = model.isOpenable(node) && !isFound;
  const selected = selectedPlace === place;
  const status = side.statusOf(node);
  const width = byId("tree").clientWidth - 13 * level - 42 - (value ? 55 : 0) - (times > 1 ? 38 : 0);
  const name = fitting(isFound ? model.label(node) : model.name(node), width, FONT);
  const type = model.type(node) === name ? "" : model.type(node);
  const isMarked = [...side.marked].some((marked) => marked === node || side.shown(marked) === node);
  const row = make("div", {
    class: `row${selected ? " selected" : ""}${status ? ` ${status}` : ""}${model.data.nodes.called[node] ? "" : " idle"}`,
    id: selected ? "selected-row" : null,
    role: "treeitem", "aria-level": level + 1, "aria-selected": selected,
    "aria-expanded": isOpenable ? side.listed.has(node) : null,
    style: `top: ${place * ROW}px; --level: ${level}; --share: ${share}%`,
    onclick: () => act.select(side, node), ondblclick: () => act.toggle(side, node),
  },
  make("span", { class: "twisty", onclick: (event) => { event.stopPropagation(); act.list(side, node); } },
    isOpenable ? (side.listed.has(node) ? "▾" : "▸") : ""),
  make("span", { class: `name ${model.kind(node)}`, title: model.label(node) }, `${isMarked ? "★ " : ""}${name}`),
  make("span", { class: "type" }, type));
  if (times > 1) {
    row.append(make("button", { class: "times", title: "Show them one by one (u)", tabindex: -1,
      onclick: (event) => { event.stopPropagation(); act.unfold(side, side.headAround(node)); } }, `× ${times}`));
  } else if (!isFound && side.unfolded.has(node)) {
    row.append(make("button", { class: "times", title: "Show them as one (u)", tabindex: -1,
      onclick: (event) => { event.stopPropagation(); act.unfold(side, node); } }, "fold"));
  }
  if (figure && value) {
    row.append(make("span", { class: "value", title: `${figure.title}: ${full(value, figure.unit)} ${percent(value, whole)}` },
      scaled(value, figure.unit)));
  }
  return row;
};

// Arrow keys: the node to select, and whether to open or close the row.
export const moveInTree = (key) => {
  const side = active();
  const place = Math.max(0, placeOf(side.selected));
  const row = rows[place];
  if (!row) return;
  const { model } = side;
  if (key === "ArrowDown" && rows[place + 1]) act.select(side, rows[place + 1].node);
  if (key === "ArrowUp" && rows[place - 1]) act.select(side, rows[place - 1].node);
  if (key === "ArrowRight" && model.isOpenable(row.node)) {
    if (!side.listed.has(row.node)) act.list(side, row.node);
    else if (rows[place + 1]) act.select(side, rows[place + 1].node);
  }
  if (key === "ArrowLeft") {
    if (side.listed.has(row.node) && model.isOpenable(row.node)) act.list(side, row.node);
    else if (model.parent[row.node] >= 0) act.select(side, model.parent[row.node]);
  }
};

export const firstFound = () => rows[0]?.node;
