// The graph: laid out by elkjs, drawn as SVG.

import { cut, scaled, textWidth } from "./format.js";
import { colouring, figureOf, valueOf } from "./colours.js";
import { state } from "./state.js";
import { markLabels, markSkips, visibleGraph } from "./visible.js";

const FONT = "12px ui-sans-serif, system-ui, sans-serif";
const SMALL = "10.5px ui-sans-serif, system-ui, sans-serif";
const LINE = 14, PAD = 10, HEAD = 26, LONGEST_NAME = 34;
const LEFT_OF_NAME = 26; // of an opened module
const RIGHT_OF_TOGGLE = 8; // by which texts are moved
const MOST_NODES = 1500;
const FEW_NODES = 80; // up to which there is time for the better layout
const FAST = { "elk.layered.nodePlacement.strategy": "BRANDES_KOEPF", "elk.layered.thoroughness": "1" };
const LAYOUT = {
  "elk.algorithm": "layered",
  "elk.hierarchyHandling": "INCLUDE_CHILDREN",
  "elk.layered.considerModelOrder.strategy": "NODES_AND_EDGES",
  "elk.layered.spacing.nodeNodeBetweenLayers": "26",
  "elk.layered.spacing.edgeNodeBetweenLayers": "12",
  "elk.layered.mergeEdges": "true",
  "elk.spacing.nodeNode": "16",
  "elk.spacing.edgeNode": "12",
  "elk.spacing.edgeEdge": "8",
  "elk.edgeRouting": "ORTHOGONAL",
  "org.eclipse.elk.json.shapeCoords": "ROOT",
  "org.eclipse.elk.json.edgeCoords": "ROOT",
};

// Without edges, modules stand in rows.
const ROWS = {
  "elk.algorithm": "rectpacking",
  "elk.spacing.nodeNode": "16",
  "org.eclipse.elk.json.shapeCoords": "ROOT",
};

let elk = null;

// Lay out what is visible of a model, and return a function that draws it into an SVG group.
export const layOut = async (side) => {
  const { model, folding } = side;
  const graph = visibleGraph(model, folding, side.open, side.focus);
  const items = [];
  const collect = (item) => { items.push(item); item.inside.forEach(collect); };
  const tops = graph.root.inside.length ? graph.root.inside : [graph.root];
  [...graph.outside, ...tops].forEach(collect);
  if (items.length > MOST_NODES) return { tooMany: items.length };
  markLabels(model, graph);
  markSkips(model, graph);
  const labelled = new Map(items.filter((item) => !item.isOpen).map((item) => [item.node, item]));
  for (const edge of graph.edges) {
    if (edge.isLabel && labelled.has(edge.target)) (labelled.get(edge.target).labels ??= []).push(edge);
  }
  const lines = graph.edges.filter((edge) => !labelled.get(edge.target)?.labels?.includes(edge));
  const leaves = items.filter((item) => !item.isOpen).map((item) => item.node);
  const look = colouring(side, leaves);
  const scale = sizes(side, leaves);
  for (const item of items) describe(side, item, scale);
  elk ??= new ELK();
  const root = {
    id: "root",
    layoutOptions: model.edgeCount ? {
      ...LAYOUT,
      "elk.direction": state.direction,
      ...(items.length > FEW_NODES ? FAST : { "elk.layered.nodePlacement.strategy": "NETWORK_SIMPLEX" }),
    } : ROWS,
    children: [...graph.outside, ...tops].map((item) => forElk(item, model.edgeCount ? {} : ROWS)),
    edges: lines.map((edge, place) => ({ id: `e${place}`, sources: [`n${edge.source}`], targets: [`n${edge.target}`] })),
  };
  const placed = await elk.layout(root);
  const boxes = new Map();
  const note = (box) => { boxes.set(box.id, box); (box.children ?? []).forEach(note); };
  (placed.children ?? []).forEach(note);
  return {
    width: placed.width, height: placed.height,
    legend: [...look.legend,
      ...(lines.some((edge) => edge.isSkip) ? [{ colour: "var(--skip)", text: "skip connections" }] : []),
      ...(lines.length < graph.edges.length ? [{ text: "← takes what goes everywhere" }] : [])],
    draw: (into, act) => draw(into, side, items, lines, placed, boxes, look, act),
  };
};

const sizes = (side, nodes) => {
  const figure = side.model.figures.get(state.size);
  if (!figure) return () => 1;
  const most = Math.max(...nodes.map((node) => valueOf(side, figure, node)), 0);
  return (node) => (most ? 0.8 + 1.7 * Math.sqrt(valueOf(side, figure, node) / most) : 1);
};

// The texts of a node, and its size.
const describe = (side, item, scale) => {
  const { model, folding } = side;
  const { node } = item;
  const kind = model.kind(node);
  const figure = figureOf(model);
  const value = figure ? valueOf(side, figure, node) : 0;
  const name = cut(model.callName(node), LONGEST_NAME);
  item.times = folding.times.get(node) ?? 1;
  item.isRound = kind !== "module" && kind !== "range";
  const type = kind === "module" && model.type(node) !== model.name(node) ? cut(model.type(node), LONGEST_NAME) : "";
  item.lines = [name];
  if (!item.isRound && type) item.lines.push(type);
  if (kind === "input" && name !== "input") item.lines.push("input");
  const shape = model.fact("Output", node);
  if (!item.isOpen && shape && !item.isOutside) item.lines.push(cut(shape, LONGEST_NAME));
  if (!item.isOpen && value) item.lines.push(`${scaled(value, figure.unit)} ${figure.short}`);
  item.labels = (item.labels ?? []).map((edge) => ({ edge, text: cut(`← ${model.callName(edge.source)}`, LONGEST_NAME) }));
  item.lines.push(...item.labels.map(({ text }) => text));
  item.badge = item.times > 1 ? Math.ceil(textWidth(`× ${item.times}`, `600 ${SMALL}`)) + 16 : 0;
  if (item.isOpen) {
    item.width = LEFT_OF_NAME + Math.ceil(textWidth(name, `600 ${FONT}`) + (type ? 8 + textWidth(type, SMALL) : 0)) + PAD + item.badge;
    item.height = HEAD;
    return;
  }
  const widest = Math.max(textWidth(name, `600 ${FONT}`) + item.badge, ...item.lines.slice(1).map((line) => textWidth(line, SMALL)));
  const factor = scale(node);
  item.width = Math.ceil((widest + 2 * PAD + (model.isOpenable(node) && !item.isOutside ? 24 : 0)) * Math.max(1, factor));
  item.height = Math.ceil((item.lines.length * LINE + 12) * Math.max(0.9, factor));
};

const forElk = (item, options) => {
  const node = { id: `n${item.node}`, width: item.width, height: item.height };
  if (item.inside.length) {
    node.children = item.inside.map((inner) => forElk(inner, options));
    node.layoutOptions = {
      ...options,
      "elk.padding": `[top=${HEAD + 10},left=14,bottom=14,right=14]`,
      "elk.nodeSize.constraints": "MINIMUM_SIZE",
      "elk.nodeSize.minimum": leastSize(item, options),
    };
  }
  return node;
};

// The layered layout takes the height for the width of graphs that run downwards.
const leastSize = (item, options) => {
  const sizes = [item.width, HEAD + 20];
  return `(${(options === ROWS || state.direction === "RIGHT" ? sizes : sizes.reverse()).join(",")})`;
};

const draw = (into, side, items, lines, placed, boxes, look, act) => {
  const { model } = side;
  into.selectChildren().remove();
  for (const item of items) item.box = boxes.get(`n${item.node}`);
  const groups = items.filter((item) => item.inside.length);
  const boxesOf = into.append("g").selectAll("g").data(groups).join("g").attr("class", (item) => `module open ${statusOf(side, item)}`);
  boxesOf.append("rect").attr("class", "frame").attr("rx", 8).each(place);
  const edges = into.append("g").selectAll("g").data(placed.edges ?? []).join("g")
    .attr("class", (edge) => `edge${lines[+edge.id.slice(1)].isSkip ? " skip" : ""}`)
    .attr("data-source", (edge) => edge.sources[0].slice(1))
    .attr("data-target", (edge) => edge.targets[0].slice(1));
  edges.append("path").attr("class", "line").attr("d", path).attr("marker-end", "url(#arrow)");
  edges.append("path").attr("class", "grip").attr("d", path)
    .append("title").text((edge) => said(model, lines[+edge.id.slice(1)]));
  const heads = into.append("g").selectAll("g").data(groups).join("g").attr("class", "head")
    .attr("transform", (item) => `translate(${item.box.x},${item.box.y})`).attr("data-node", (item) => item.node);
  heads.append("rect").attr("class", "bar").attr("x", 1).attr("y", 1).attr("width", (item) => item.box.width - 2).attr("height", HEAD).attr("rx", 7);
  heads.append("text").attr("class", "name").attr("x", LEFT_OF_NAME).attr("y", 17)
    .text((item) => item.lines[0])
    .append("tspan").attr("class", "small").attr("dx", 8).text((item) => item.lines[1] ?? "");
  const leaves = items.filter((item) => !item.inside.length);
  const nodes = into.append("g").selectAll("g").data(leaves).join("g")
    .attr("class", (item) => `node ${model.kind(item.node)} ${item.isOutside ? "outside" : ""} ${statusOf(side, item)} ${model.data.nodes.called[item.node] ? "" : "idle"}`)
    .attr("transform", (item) => `translate(${item.box.x},${item.box.y})`)
    .attr("data-node", (item) => item.node)
    .style("color", (item) => look.ink(item.node));
  nodes.filter((item) => item.times > 1).append("rect").attr("class", "shape behind")
    .attr("x", 4).attr("y", 4).attr("width", (item) => item.box.width).attr("height", (item) => item.box.height)
    .attr("rx", 6).style("fill", (item) => look.fill(item.node));
  nodes.append("rect").attr("class", "shape").attr("width", (item) => item.box.width).attr("height", (item) => item.box.height)
    .attr("rx", (item) => (item.isRound ? 14 : 6)).style("fill", (item) => look.fill(item.node));
  const openable = (item) => model.isOpenable(item.node) && !item.isOutside;
  nodes.each(function texts(item) {
    const group = d3.select(this);
    const top = (item.box.height - item.lines.length * LINE) / 2 + 11;
    item.lines.forEach((line, number) => group.append("text").attr("class", number ? "small" : "name")
      .attr("x", item.box.width / 2 + (openable(item) ? RIGHT_OF_TOGGLE : 0)).attr("y", top + number * LINE).attr("text-anchor", "middle").text(line));
    const labels = group.selectAll("text").filter((_, number) => number >= item.lines.length - item.labels.length).data(item.labels);
    labels.attr("class", "small edge").attr("data-source", ({ edge }) => edge.source).attr("data-target", item.node)
      .on("click", (event, { edge }) => { event.stopPropagation(); act.select(side, edge.source); })
      .append("title").text(({ edge }) => said(model, edge));
  });
  nodes.append("title").text((item) => model.label(item.node));
  for (const selection of [nodes, heads]) {
    const badges = selection.filter((item) => item.times > 1).append("g").attr("class", "badge")
      .attr("transform", (item) => `translate(${item.box.width - item.badge + 14},-8)`)
      .on("click", (event, item) => { event.stopPropagation(); act.unfold(side, item.node); });
    badges.append("rect").attr("width", (item) => item.badge).attr("height", 17).attr("rx", 8.5);
    badges.append("text").attr("x", (item) => item.badge / 2).attr("y", 12.5).attr("text-anchor", "middle").text((item) => `× ${item.times}`);
    badges.append("title").text("Equal blocks: show them one by one");
  }
  const toggle = (selection, y) => {
    const button = selection.append("g").attr("class", "toggle").attr("transform", `translate(5,${y})`)
      .on("click", (event, item) => { event.stopPropagation(); act.toggle(side, item.node); });
    button.append("rect").attr("width", 14).attr("height", 14).attr("rx", 3);
    button.append("text").attr("x", 7).attr("y", 11).attr("text-anchor", "middle").text((item) => (item.isOpen ? "−" : "+"));
  };
  toggle(nodes.filter(openable), 5);
  toggle(heads, 6);
  for (const selection of [nodes, heads]) {
    selection.on("click", (event, item) => act.select(side, item.node));
    selection.on("dblclick", (event, item) => { event.stopPropagation(); act.toggle(side, item.node); });
  }
};

function place(item) {
  d3.select(this).attr("x", item.box.x).attr("y", item.box.y).attr("width", item.box.width).attr("height", item.box.height);
}

const statusOf = (side, item) => side.statusOf(item.node);

const said = (model, edge) => {
  const tensors = [...new Set(edge.of.map((each) => model.tensors(each)))];
  return `${model.callName(edge.source)} → ${model.callName(edge.target)}\n${tensors.slice(0, 6).join("\n")}${tensors.length > 6 ? "\n…" : ""}`;
};

const ROUND = 5; // radius of the corners of edges

const path = (edge) => edge.sections.map(({ startPoint, bendPoints = [], endPoint }) => {
  const points = [startPoint, ...bendPoints, endPoint];
  let text = `M${points[0].x},${points[0].y}`;
  for (let at = 1; at < points.length - 1; at++) {
    const [before, here, after] = [points[at - 1], points[at], points[at + 1]];
    const toward = (other) => {
      const length = Math.hypot(other.x - here.x, other.y - here.y) || 1;
      const step = Math.min(ROUND, length / 2) / length;
      return `${here.x + (other.x - here.x) * step},${here.y + (other.y - here.y) * step}`;
    };
    text += `L${toward(before)}Q${here.x},${here.y} ${toward(after)}`;
  }
  return `${text}L${points.at(-1).x},${points.at(-1).y}`;
}).join("");

// Mark the selected node and its edges.
export const markSelected = (into, side) => {
  const selected = side.shown(side.selected);
  into.selectAll("[data-node]").classed("selected", function isSelected() { return +this.dataset.node === selected; });
  const inside = (node) => side.model.contains(selected, +node) && selected > 0;
  into.selectAll(".edge")
    .classed("taken", function isTaken() { return inside(this.dataset.target) && !inside(this.dataset.source); })
    .classed("passed", function isPassed() { return inside(this.dataset.source) && !inside(this.dataset.target); });
};
