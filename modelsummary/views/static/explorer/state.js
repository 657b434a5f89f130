// What is shown: the state of the page, of each of its models, and the address that holds it.

import { Model } from "./model.js";
import { Folding, firstOpen } from "./visible.js";

export class Side {
  constructor(data, number) {
    this.number = number;
    this.model = new Model(data);
    this.unfolded = new Set();
    this.folding = new Folding(this.model, this.unfolded);
    this.atFirst = firstOpen(this.model, this.folding);
    this.open = new Set(this.atFirst);
    this.listed = new Set([0]);
    this.selected = 0;
    this.focus = 0;
    this.marked = new Set(); // bookmarks
    this.differences = new Map(); // node -> row of the differences
    this.changedInside = new Set(); // modules around nodes that differ
    this.partner = new Map(); // node -> the same module of the other model
  }

  // Note how a node differs from the other model.
  noteDifference(node, row) {
    this.differences.set(node, row);
    if (row.status === "shape") return;
    for (const each of this.model.way(node).slice(0, -1)) this.changedInside.add(each);
  }

  statusOf(node) {
    return this.differences.get(node)?.status ?? (this.changedInside.has(node) ? "inside" : "");
  }

  // Show the rows inside a node, or inside the equal one that the tree shows for it.
  list(node) { this.listed.add(node).add(this.shown(node)); }

  refold() { this.folding = new Folding(this.model, this.unfolded); }
  shown(node) { return this.folding.standsFor[node]; }

  // Open everything around a node, so that it is visible in the tree and in the graph.
  reveal(node) {
    for (const each of this.model.way(node).slice(0, -1)) {
      this.list(each);
      this.open.add(this.shown(each));
    }
    if (!this.model.contains(this.focus, node)) this.focus = 0;
  }

  // Open a module and everything inside it.
  openAll(node) {
    for (let inside = node; inside < this.model.end[node]; inside++) {
      this.setOpen(this.shown(inside), true);
      this.list(inside);
    }
  }

  // Whether the tree has a row for a node: not for one that an equal one stands for, nor for a container of such only.
  isRow(node) {
    return this.shown(node) === node && (!this.model.isTransparent(node) || this.model.children(node).some((child) => this.isRow(child)));
  }

  // The first of the equal blocks that fold a node, the nearest ones around it.
  headAround(node) {
    const around = this.model.way(node).map((each) => this.shown(each));
    return this.folding.head.get(around.findLast((each) => this.folding.times.has(each)));
  }

  // Rows for nodes, equal ones as one: [{node, times, nodes}].
  rows(nodes) {
    const rows = new Map();
    for (const node of nodes) {
      const row = rows.get(this.shown(node));
      if (row) row.nodes.push(node);
      else rows.set(this.shown(node), { node, nodes: [node] });
    }
    return [...rows.values()].map((row) => ({ ...row, times: row.nodes.length }));
  }

  setOpen(node, isOpen) {
    if (isOpen && this.model.isOpenable(node)) this.open.add(node);
    else this.open.delete(node);
  }

  // Show equal neighbours one by one, or as one again; ``head`` is the first of them.
  toggleEquals(head) {
    if (head === undefined) return;
    if (this.unfolded.has(head)) this.unfolded.delete(head);
    else this.unfolded.add(head);
    this.refold();
  }
}

const DEFAULTS = { view: "graph", colour: "", size: "", device: "", direction: "DOWN", sort: "", query: "" };
const FIELDS = Object.keys(DEFAULTS);

export const state = { ...DEFAULTS, side: 0, sides: [], diff: null };

// The sum of a figure over nodes.
export const sumOf = (nodes, values) => nodes.reduce((total, node) => total + values[node], 0);

export const active = () => state.sides[state.side];

export const address = () => {
  const side = active();
  const { model } = side;
  const parts = new URLSearchParams();
  for (const field of FIELDS) if (state[field] !== DEFAULTS[field]) parts.set(field, state[field]);
  if (state.side) parts.set("model", state.side);
  if (side.selected) parts.set("at", model.address(side.selected));
  if (side.focus) parts.set("in", model.address(side.focus));
  const numbers = (set) => [...set].sort((a, b) => a - b).join(".");
  if (numbers(side.open) !== numbers(side.atFirst)) parts.set("open", numbers(side.open));
  if (side.unfolded.size) parts.set("each", numbers(side.unfolded));
  if (side.marked.size) parts.set("marks", numbers(side.marked));
  return parts.size ? `#${parts}` : "#";
};

export const follow = (hash, views) => {
  const parts = new URLSearchParams(hash.replace(/^#/, ""));
  for (const field of FIELDS) state[field] = parts.get(field) ?? DEFAULTS[field];
  if (!views.includes(state.view)) state.view = DEFAULTS.view; // of another page
  const number = Number(parts.get("model") ?? 0);
  state.side = state.sides[number] ? number : 0;
  const side = active();
  const numbers = (text) => text.split(".").filter(Boolean).map(Number).filter((node) => node >= 0 && node < side.model.size);
  side.unfolded = new Set(numbers(parts.get("each") ?? "").filter((node) => node));
  side.marked = new Set(numbers(parts.get("marks") ?? ""));
  side.refold();
  side.open = new Set(parts.has("open") ? numbers(parts.get("open")) : side.atFirst);
  side.focus = parts.has("in") ? side.shown(side.model.find(parts.get("in"))) : 0;
  side.selected = parts.has("at") ? side.model.find(parts.get("at")) : 0;
  if (side.selected && !parts.has("open")) side.reveal(side.selected);
  for (const each of side.model.way(side.selected).slice(0, -1)) side.list(each);
};
