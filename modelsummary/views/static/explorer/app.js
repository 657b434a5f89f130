// The page: its bar, its keys, and what happens when something is selected, expanded or coloured.

import { byId, make } from "./format.js";
import { colourings, isDark } from "./colours.js";
import { Side, active, address, follow, state } from "./state.js";
import { drawTree, firstFound, moveInTree, startTree } from "./tree.js";
import { layOut, markSelected } from "./graph.js";
import { drawIcicle, drawMemory, drawRoofline, drawTreemap } from "./charts.js";
import { drawFacts } from "./facts.js";
import { drawChanges, drawTable } from "./table.js";
import { handOver, pngBlob, svgText } from "./picture.js";

const VIEWS = { graph: "Graph", treemap: "Treemap", icicle: "Icicle", roofline: "Roofline", memory: "Memory", changes: "Changes", table: "Table" };
const CHARTS = { treemap: drawTreemap, icicle: drawIcicle, roofline: drawRoofline, memory: drawMemory };
const LISTS = { changes: drawChanges, table: drawTable };
const LEAST_SCALE = 0.75; // of a large graph at first; below, its text cannot be read

const views = () => Object.keys(VIEWS).filter((view) => (view !== "changes" || state.diff) && (view !== "memory" || state.sides.some((side) => side.model.data.memory)));

// ------------------------------------------------------------------------------------------ canvases

const canvases = []; // one per model: {box, svg, content, zoom, drawn}

const makeCanvas = (side) => {
  const box = make("div", { class: "canvas", "data-side": side.number });
  if (state.sides.length > 1) box.append(make("div", { class: "caption" }, `${side.number ? "after" : "before"}: ${side.model.title}`));
  byId("canvases").append(box);
  const svg = d3.select(box).append("svg").attr("role", "img");
  svg.append("defs").append("marker").attr("id", `arrow${side.number || ""}`).attr("viewBox", "0 0 8 8").attr("refX", 7).attr("refY", 4)
    .attr("markerWidth", 6).attr("markerHeight", 6).attr("orient", "auto").append("path").attr("d", "M0,0.5L8,4L0,7.5z").attr("class", "arrow");
  const content = svg.append("g").attr("class", "content").attr("data-content", "");
  const zoom = d3.zoom().scaleExtent([0.05, 4])
    .filter((event) => (event.type === "wheel" ? event.ctrlKey || event.metaKey : !event.button && !event.target.closest(".toggle, .badge")))
    .on("zoom", (event) => content.attr("transform", event.transform));
  svg.call(zoom).on("dblclick.zoom", null);
  svg.on("wheel", (event) => {
    if (state.view !== "graph" || event.ctrlKey || event.metaKey) return;
    event.preventDefault();
    const factor = event.deltaMode ? 16 : 1;
    const { k } = d3.zoomTransform(svg.node());
    zoom.translateBy(svg, (-event.deltaX * factor) / k, (-event.deltaY * factor) / k);
  });
  return { box, svg, content, zoom, size: null };
};

const fit = (canvas, least = LEAST_SCALE) => {
  const { width, height } = canvas.size ?? {};
  if (!width || state.view !== "graph") return;
  const box = canvas.box.getBoundingClientRect();
  const scale = Math.max(least, Math.min(1, (box.width - 24) / width, (box.height - 24) / height));
  const x = width * scale < box.width ? (box.width - width * scale) / 2 : 12;
  const y = height * scale < box.height ? (box.height - height * scale) / 2 : 12;
  canvas.svg.call(canvas.zoom.transform, d3.zoomIdentity.translate(x, y).scale(scale));
};

// Move so that a node stays where it was on the screen, or comes into view.
const keep = (canvas, node, before) => {
  const after = placeOf(canvas, node);
  if (!after) return;
  const box = canvas.box.getBoundingClientRect();
  const { k } = d3.zoomTransform(canvas.svg.node());
  if (before) canvas.zoom.translateBy(canvas.svg, (before.left - after.left) / k, (before.top - after.top) / k);
  const now = placeOf(canvas, node);
  const dx = now.right < box.left + 20 || now.left > box.right - 20 ? box.left + box.width / 2 - (now.left + now.right) / 2 : 0;
  const dy = now.bottom < box.top + 20 || now.top > box.bottom - box.height / 4 ? box.top + box.height / 3 - now.top : 0;
  if (dx || dy) canvas.zoom.translateBy(canvas.svg, dx / k, dy / k);
};

const placeOf = (canvas, node) => canvas.content.select(`[data-node="${node}"]`).node()?.getBoundingClientRect();

const tellTooMany = (canvas, count, width, height) => {
  canvas.svg.call(canvas.zoom.transform, d3.zoomIdentity);
  canvas.content.selectChildren().remove();
  [`${count.toLocaleString("en-US")} nodes are too many to draw:`, "collapse or focus on a module, or show equal ones as one"].forEach((line, place) =>
    canvas.content.append("text").attr("class", "none").attr("x", width / 2).attr("y", height / 2 + 20 * place).attr("text-anchor", "middle").text(line));
};

let turn = 0; // a newer drawing replaces one that is still being laid out

const drawStage = async ({ fits = false, anchor = null } = {}) => {
  const mine = ++turn;
  const isList = state.view in LISTS;
  byId("canvases").classList.toggle("list", isList);
  byId("canvases").querySelector(".changes")?.remove();
  for (const canvas of canvases) canvas.box.hidden = isList;
  if (isList) {
    const box = byId("canvases").appendChild(make("div", { class: "changes" }));
    LISTS[state.view](box, act, () => draw());
    drawLegend([]);
    return;
  }
  const legend = [];
  for (const [number, canvas] of canvases.entries()) {
    const side = state.sides[number];
    const before = anchor && number === state.side ? placeOf(canvas, anchor) : null;
    const { width, height } = canvas.box.getBoundingClientRect();
    canvas.svg.attr("width", width).attr("height", height).attr("aria-label", `${VIEWS[state.view]} of ${side.model.title}`);
    if (state.view === "graph") {
      const laid = await layOut(side);
      if (mine !== turn) return;
      if (laid.tooMany) {
        tellTooMany(canvas, laid.tooMany, width, height);
        return;
      }
      laid.draw(canvas.content, act);
      canvas.size = laid;
      addTo(legend, laid.legend);
      if (!side.model.edgeCount) addTo(legend, [{ text: "modules in their order; edges are not known" }]);
      if (fits) fit(canvas);
      if (!fits || side.selected) keep(canvas, (number === state.side && anchor) || side.shown(side.selected), before);
    } else {
      canvas.svg.call(canvas.zoom.transform, d3.zoomIdentity);
      canvas.content.selectChildren().remove();
      addTo(legend, CHARTS[state.view](canvas.content, side, { width, height }, act));
    }
    markSelected(canvas.content, side);
  }
  drawLegend(legend);
};

// Two models share one legend.
const addTo = (legend, more) => {
  legend.push(...more.filter((each) => !legend.some((other) => other.text === each.text && other.title === each.title)));
};

const drawLegend = (legend) => {
  byId("legend").replaceChildren(...legend.map((each) => {
    if (each.gradient) {
      return make("span", {}, `${each.title}: ${each.from} `, make("i", { class: "ramp", style: `background: linear-gradient(to right, ${each.gradient.join(",")})` }), ` ${each.to}`);
    }
    return make("span", {}, each.colour ? make("i", { style: `background: ${each.colour}` }) : "", each.text);
  }));
};

// ------------------------------------------------------------------------------------------- actions

const say = (text) => {
  byId("said").textContent = text;
  clearTimeout(say.timer);
  say.timer = setTimeout(() => { byId("said").textContent = ""; }, 4000);
};

const noteAddress = () => {
  try {
    history.replaceState(null, "", address());
  } catch { /* a frame of a notebook has no address */ }
};

// The same module of the other model, or the closest one around it.
const partnerOf = (side, node) => {
  for (let each = node; each >= 0; each = side.model.parent[each]) if (side.partner.has(each)) return side.partner.get(each);
  return 0;
};

const othersOf = (side) => (state.diff ? state.sides.filter((other) => other !== side) : []);

// Select in the other model what is selected in this one.
const mirror = (side) => {
  for (const other of othersOf(side)) {
    other.selected = partnerOf(side, side.selected);
    other.reveal(other.selected);
  }
};

// Open in the other model what is open in this one.
const mirrorOpen = (side) => {
  for (const other of othersOf(side)) {
    for (const node of side.open) if (side.partner.has(node)) other.setOpen(other.shown(side.partner.get(node)), true);
  }
};

const act = {
  say,
  select(side, node, moves = false) {
    const isOther = state.side !== side.number;
    state.side = side.number;
    side.selected = node;
    const wasVisible = visibleIn(side, node);
    side.reveal(node);
    mirror(side);
    if (state.view in LISTS && moves) state.view = "graph";
    if (state.view === "graph" && !wasVisible) draw({ anchor: side.shown(node) });
    else {
      drawPanels(isOther);
      if (state.view === "memory" || moves) drawStage();
      else canvases.forEach((canvas, number) => markSelected(canvas.content, state.sides[number]));
    }
    noteAddress();
  },
  toggle(side, node) {
    state.side = side.number;
    const shown = side.shown(node);
    const isOpen = !side.open.has(shown);
    side.setOpen(shown, isOpen);
    for (const other of othersOf(side)) {
      if (side.partner.has(shown)) other.setOpen(other.shown(side.partner.get(shown)), isOpen);
    }
    draw({ anchor: shown });
  },
  focus(side, node) {
    state.side = side.number;
    side.focus = side.model.isOpenable(node) ? side.shown(node) : side.focus;
    side.selected = node;
    for (const other of othersOf(side)) other.focus = other.shown(partnerOf(side, side.focus));
    draw({ fits: true });
  },
  list({ listed }, node) {
    if (!listed.delete(node)) listed.add(node);
    drawTree(false);
  },
  unfold(side, node) {
    side.toggleEquals(side.folding.head.get(side.shown(node)));
    draw({ anchor: side.shown(node) });
  },
  openAll(side, node) {
    state.side = side.number;
    side.openAll(node);
    mirrorOpen(side);
    draw({ anchor: side.shown(node) });
  },
  mark(side, node) {
    if (!side.marked.delete(node)) side.marked.add(node);
    drawPanels();
    noteAddress();
  },
  search(text) {
    state.query = byId("search").value = text;
    if (state.view === "table") return draw();
    drawTree();
    return noteAddress();
  },
};

const visibleIn = (side, node) => side.model.contains(side.focus, node)
  && side.model.way(side.shown(node)).slice(1, -1).every((each) => side.open.has(each) || side.model.isTransparent(each) || !side.model.contains(side.focus, each) || each === side.focus);

const drawPanels = () => {
  document.body.dataset.view = state.view;
  for (const tab of byId("views").children) tab.setAttribute("aria-selected", tab.dataset.view === state.view);
  for (const canvas of canvases) canvas.box.classList.toggle("active", state.sides.length > 1 && +canvas.box.dataset.side === state.side);
  for (const button of byId("sides").children) button.setAttribute("aria-pressed", +button.dataset.side === state.side);
  byId("colour-label").hidden = state.view === "memory" || state.view === "changes";
  if (byId("search").value !== state.query) byId("search").value = state.query;
  byId("device-label").hidden = state.view !== "roofline";
  byId("size-label").hidden = state.view === "roofline" || state.view === "memory" || state.view === "changes";
  byId("colour").value = state.colour;
  byId("size").value = state.size;
  drawCrumbs();
  drawTree();
  drawFacts(active(), act);
};

const drawCrumbs = () => {
  const side = active();
  const way = side.focus ? side.model.way(side.focus) : [];
  byId("crumbs").replaceChildren(...way.flatMap((node, place) => [
    place ? " › " : "", make("button", { onclick: () => act.focus(side, node) }, side.model.name(node)),
  ]).filter(Boolean));
};

const draw = async (how) => {
  drawPanels();
  noteAddress();
  await drawStage(how);
  document.body.dataset.drawn = "true";
};

// --------------------------------------------------------------------------------- controls and keys

const setView = (view) => {
  if (!views().includes(view)) return;
  state.view = view;
  draw({ fits: true });
};

const setTheme = () => {
  document.documentElement.dataset.theme = isDark() ? "light" : "dark";
  draw();
};

const choice = (id, options, change) => {
  byId(id).replaceChildren(...options.map(([value, title]) => make("option", { value }, title)));
  byId(id).addEventListener("change", (event) => { state[id] = event.target.value; change(); });
};

const copyPicture = async (kind) => {
  const svg = canvases[state.view === "graph" ? state.side : 0].svg.node();
  if (state.view in LISTS) return say("there is no picture in this view");
  const text = svgText(svg);
  const name = `${active().model.title}-${state.view}.${kind}`;
  if (kind === "svg") {
    return say(`SVG ${await handOver(new Blob([text], { type: "image/svg+xml" }), name, () => navigator.clipboard.writeText(text))}`);
  }
  const blob = await pngBlob(svg);
  return say(`PNG ${await handOver(blob, name, () => navigator.clipboard.write([new ClipboardItem({ "image/png": blob })]))}`);
};

const zoomBy = (factor) => { for (const canvas of canvases) canvas.zoom.scaleBy(canvas.svg, factor); };

// Select the next or the previous module that differs from the other model.
const nextDifference = (step) => {
  const side = active();
  const found = [...side.differences].filter(([, row]) => row.status !== "shape").map(([node]) => node).sort((a, b) => a - b);
  if (!found.length) return say("no differences in this model");
  const next = step > 0 ? found.find((node) => node > side.selected) : found.findLast((node) => node < side.selected);
  return act.select(side, next ?? found.at(step > 0 ? 0 : -1));
};

const KEYS = {
  "/": () => byId("search").focus(),
  Enter: () => act.toggle(active(), active().selected),
  f: () => act.focus(active(), active().selected),
  Backspace: () => act.focus(active(), Math.max(0, active().model.outer[active().focus])),
  u: () => act.unfold(active(), active().selected),
  e: () => act.openAll(active(), active().selected),
  b: () => act.mark(active(), active().selected),
  n: () => nextDifference(1),
  p: () => nextDifference(-1),
  r: () => { state.direction = state.direction === "DOWN" ? "RIGHT" : "DOWN"; draw({ fits: true }); },
  d: setTheme,
  "?": () => byId("keys").showModal(),
  "+": () => zoomBy(1.25),
  "=": () => zoomBy(1.25),
  "-": () => zoomBy(0.8),
  0: () => canvases.forEach((canvas) => fit(canvas, 0.05)),
};

const onKey = (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey || byId("keys").open) return;
  const isField = event.target.matches("input, select, textarea");
  if (isField) {
    if (event.target.id !== "search") return;
    if (event.key === "Escape") { act.search(""); byId("tree").focus(); }
    if (event.key === "Enter" && firstFound() !== undefined) { act.select(active(), firstFound(), true); byId("tree").focus(); }
    if (event.key === "ArrowDown") byId("tree").focus();
    return;
  }
  if (event.key.startsWith("Arrow")) moveInTree(event.key);
  else if (KEYS[event.key] && !(event.key === "Enter" && event.target.matches("button, a"))) KEYS[event.key]();
  else if (/^[1-7]$/.test(event.key)) setView(views()[event.key - 1]);
  else return;
  event.preventDefault();
};

// --------------------------------------------------------------------------------------------- start

const start = () => {
  const data = JSON.parse(byId("data").textContent);
  state.sides = data.models.map((model, number) => new Side(model, number));
  state.diff = data.diff;
  for (const row of data.diff?.rows ?? []) {
    row.nodes.forEach((node, number) => { if (node >= 0) state.sides[number].noteDifference(node, row); });
  }
  for (const [before, after] of data.diff?.pairs ?? []) {
    state.sides[0].partner.set(before, after);
    state.sides[1].partner.set(after, before);
  }
  const [first] = state.sides;
  byId("title").textContent = state.sides.map((side) => side.model.title).join(" → ");
  byId("views").append(...views().map((view, place) => make("button", {
    role: "tab", "data-view": view, title: `Key ${place + 1}`, onclick: () => setView(view),
  }, VIEWS[view])));
  if (state.sides.length > 1) {
    byId("sides").append(...state.sides.map((side) => make("button", {
      "data-side": side.number, onclick: () => { state.side = side.number; draw(); },
    }, side.number ? "after" : "before")));
  }
  choice("colour", colourings(), () => draw());
  choice("size", [["", "Equal"], ...[...first.model.figures.values()].map((figure) => [figure.name, figure.title])], () => draw());
  choice("device", first.model.data.devices.map((each) => [each.name, each.name]), () => draw());
  byId("device").value = first.model.data.devices.find((each) => each.name.startsWith("A100"))?.name ?? "";
  byId("search").addEventListener("input", (event) => act.search(event.target.value));
  byId("theme").addEventListener("click", setTheme);
  byId("help").addEventListener("click", () => byId("keys").showModal());
  byId("copy-svg").addEventListener("click", () => copyPicture("svg"));
  byId("copy-png").addEventListener("click", () => copyPicture("png"));
  document.addEventListener("keydown", onKey);
  startTree(act);
  state.sides.forEach((side) => canvases.push(makeCanvas(side)));
  const goTo = (hash) => { follow(hash, views()); mirrorOpen(active()); mirror(active()); return draw({ fits: true }); };
  addEventListener("hashchange", () => goTo(location.hash));
  let width = innerWidth;
  new ResizeObserver(() => { if (innerWidth !== width || state.view !== "graph") { width = innerWidth; drawStage({ fits: true }); } }).observe(byId("stage"));
  goTo(location.hash).then(() => { document.body.dataset.ready = "true"; });
};

start();
