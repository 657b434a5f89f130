// The colours of nodes: by a figure, by type or kind of operator, by stage, sharding or findings, or by difference.

import { scaled } from "./format.js";
import { state } from "./state.js";

const GROUPS = ["Kind", "Stage", "Sharding", "Findings"];
const NAMED = ["Type", ...GROUPS, "Difference"];
const OF_DIFFERENCE = { added: "#2e9e5b", removed: "#d64545", changed: "#e0902a", renamed: "#3b82d6", inside: "#efc48c", shape: "#c3b8de" };
const SEVERAL = "several"; // stages or kinds inside
const GREY = "#b9bdc4"; // of these, and of rare types
const MEANING = { shape: "only shapes differ", inside: "changed inside" };
const MOST_TYPES = 9;

export const isDark = () => {
  const chosen = document.documentElement.dataset.theme;
  return chosen ? chosen === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
};

// The ways to colour the models of the page: [name, title].
export const colourings = () => {
  const [first] = state.sides;
  const figures = [...first.model.figures.values()].map((figure) => [figure.name, figure.title]);
  const groups = GROUPS.filter((name) => name in first.model.data.groups).map((name) => [name, name]);
  const difference = state.diff ? [["Difference", "Difference"]] : [];
  return [["", "Automatic"], ...figures, ["Type", "Type"], ...groups, ...difference];
};

const automatic = (model, isChart) => {
  if (state.diff) return "Difference";
  if ("Stage" in model.data.groups) return "Stage";
  if ("Sharding" in model.data.groups) return "Sharding";
  if (isChart || !model.figures.size) return "Type";
  return model.figures.has("macs") ? "macs" : [...model.figures.keys()][0];
};

// The figure that nodes show as a number: the one that they are coloured by, or multiply-adds.
export const figureOf = (model) => {
  const { figures } = model;
  const name = [state.colour, state.size, "macs", "params"].find((each) => figures.has(each));
  const figure = figures.get(name);
  return figure && { ...figure, short: { macs: "MACs", params: "params" }[name] ?? "" };
};

// What a node shows of a figure: with its equals, as they are one.
export const valueOf = (side, figure, node) => figure.total[node] * (figure.adds ? side.folding.times.get(node) ?? 1 : 1);

const onTop = (colour) => (d3.lab(colour).l > 58 ? "#111" : "#fff");

// Return {fill(node), ink(node), legend}: the colour of a node, of text on it (null: as on the page), and the legend.
export const colouring = (side, nodes, isChart = false) => {
  const { model } = side;
  const name = NAMED.includes(state.colour) || model.figures.has(state.colour) ? state.colour : automatic(model, isChart);
  if (model.figures.has(name)) return byFigure(side, model.figures.get(name), nodes);
  const label = {
    Type: (node) => typeOf(model, node),
    Kind: (node) => only(model, "Kind", node),
    Stage: (node) => only(model, "Stage", node),
    Sharding: (node) => model.group("Sharding", node),
    Findings: (node) => model.group("Findings", node),
    Difference: (node) => side.statusOf(node),
  }[name];
  return byLabel(model, name, label, nodes);
};

const typeOf = (model, node) => {
  if (model.kind(node) === "input" || model.kind(node) === "output") return "";
  return model.type(node) || model.name(node);
};

// The group of a node; of a module, that of everything inside if it is the same.
const only = (model, title, node) => {
  const inside = model.groups(title, node);
  return inside.length > 1 ? SEVERAL : inside[0] ?? "";
};

const byFigure = (side, figure, nodes) => {
  const values = nodes.map((node) => valueOf(side, figure, node));
  const most = Math.max(...values, 0);
  const dark = isDark();
  const ramp = dark ? (t) => d3.interpolateLab("#23272f", "#e8833a")(t) : (t) => d3.interpolateLab("#ffffff", "#e2701f")(t);
  const fill = (node) => {
    const value = valueOf(side, figure, node);
    return value && most ? ramp(0.08 + 0.92 * Math.sqrt(value / most)) : null;
  };
  const steps = [0, 0.25, 0.5, 0.75, 1].map((t) => ramp(0.08 + 0.92 * Math.sqrt(t)));
  const legend = most ? [{ gradient: steps, from: "0", to: scaled(most, figure.unit), title: figure.title }] : [];
  return { fill, ink: (node) => (fill(node) ? onTop(fill(node)) : null), legend };
};

const byLabel = (model, name, label, nodes) => {
  const counts = new Map();
  for (const node of nodes) {
    const each = label(node);
    if (each) counts.set(each, (counts.get(each) ?? 0) + 1);
  }
  const names = [...counts.keys()];
  if (name === "Type") names.sort((a, b) => counts.get(b) - counts.get(a));
  else names.sort((a, b) => a.localeCompare(b, undefined, { numeric: true }));
  const palette = isDark() ? d3.schemeTableau10 : d3.schemeTableau10.map((each) => d3.interpolateLab(each, "#fff")(0.25));
  const colours = new Map(names.map((each, place) => {
    if (name === "Difference") return [each, OF_DIFFERENCE[each]];
    return [each, each === SEVERAL || (name === "Type" && place >= MOST_TYPES) ? GREY : palette[place % palette.length]];
  }));
  const fill = (node) => colours.get(label(node)) ?? null;
  const text = (each) => MEANING[each] ?? (colours.get(each) !== GREY ? each : each === SEVERAL ? `several ${name.toLowerCase()}s` : "other types");
  const legend = names.map((each) => ({ colour: colours.get(each), text: text(each) }))
    .filter(({ colour }, place, all) => colour !== GREY || all.findIndex((other) => other.colour === GREY) === place);
  return { fill, ink: (node) => (fill(node) ? onTop(fill(node)) : null), legend };
};
