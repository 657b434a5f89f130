// Treemap, icicle, roofline and memory timeline of the module in focus, as SVG.

import { cut, fitting, full, percent, scaled, textWidth } from "./format.js";
import { colouring, figureOf } from "./colours.js";
import { state } from "./state.js";

const FONT = "11px ui-sans-serif, system-ui, sans-serif";
const SMALLEST = 3; // pixels: smaller parts are not drawn
const LEAST_ROW = 20, MOST_ROW = 46; // pixels

// A number is shown in full, or not at all.
const whole = (text, width) => (textWidth(text, FONT) <= width ? text : "");

const empty = (into, size, text) => {
  into.append("text").attr("class", "none").attr("x", size.width / 2).attr("y", size.height / 2).attr("text-anchor", "middle").text(text);
  return [];
};

// The module in focus as a hierarchy of parts that add up: equal blocks are one part with the amount of all, and a part
// of a module outside its submodules is its own.
const partsOf = (side, figure) => {
  const { model, folding } = side;
  const part = (node, count) => {
    const shown = model.children(node).filter((child) => figure.total[child] > 0 && side.shown(child) === child);
    const inside = shown.map((child) => part(child, count * (folding.times.get(child) ?? 1)));
    if (inside.length && figure.own[node] > 0) inside.push({ node, isOwn: true, inside: [], value: figure.own[node] * count });
    return { node, inside, value: inside.length ? 0 : figure.total[node] * count };
  };
  return d3.hierarchy(part(side.focus, 1), (each) => each.inside).sum((each) => each.value);
};

const areaFigure = (side) => {
  const figure = side.model.figures.get(state.size);
  return figure?.adds ? figure : [figureOf(side.model), ...side.model.figures.values()].find((each) => each?.adds);
};

const tip = (side, figure, part) => {
  const { model } = side;
  const name = model.label(part.data.node);
  const own = part.data.isOwn ? " (own)" : "";
  return `${name}${own}\n${model.type(part.data.node)}\n${figure.title}: ${full(part.value, figure.unit)} · ${percent(part.value, figure.total[0])}`;
};

const label = (side, part) => {
  const { node, isOwn } = part.data;
  const times = side.folding.times.get(node) ?? 1;
  return `${side.model.name(node)}${isOwn ? " (own)" : times > 1 ? ` × ${times}` : ""}`;
};

const boxes = (into, side, parts, look, figure, act, shape) => {
  const found = into.selectAll("g").data(parts).join("g").attr("class", (part) => `part${part.children ? " outer" : ""}`)
    .attr("data-node", (part) => (part.data.isOwn ? null : part.data.node))
    .attr("transform", (part) => `translate(${shape(part).x},${shape(part).y})`)
    .style("color", (part) => (part.children ? null : look.ink(part.data.node)))
    .on("click", (event, part) => act.select(side, part.data.node))
    .on("dblclick", (event, part) => act.focus(side, part.data.node));
  found.append("rect").attr("width", (part) => Math.max(0, shape(part).width)).attr("height", (part) => Math.max(0, shape(part).height))
    .style("fill", (part) => (part.children ? null : look.fill(part.data.node)));
  found.append("title").text((part) => tip(side, figure, part));
  return found;
};

export const drawTreemap = (into, side, size, act) => {
  const figure = areaFigure(side);
  if (!figure || !figure.total[side.focus]) return empty(into, size, figure ? `${figure.title}: none here` : "no figures");
  const root = partsOf(side, figure);
  d3.treemap().size([size.width, size.height]).paddingOuter(2).paddingTop((part) => (part.x1 - part.x0 > 50 ? 16 : 4)).paddingInner(1).round(true)(
    root.sort((a, b) => b.value - a.value));
  const parts = root.descendants().filter((part) => part.x1 - part.x0 >= SMALLEST && part.y1 - part.y0 >= SMALLEST);
  const look = colouring(side, parts.filter((part) => !part.children).map((part) => part.data.node), true);
  const shape = (part) => ({ x: part.x0, y: part.y0, width: part.x1 - part.x0, height: part.y1 - part.y0 });
  const found = boxes(into, side, parts, look, figure, act, shape);
  found.append("text").attr("x", 4).attr("y", 12)
    .text((part) => (part.y1 - part.y0 > 15 ? fitting(label(side, part), part.x1 - part.x0 - 8, FONT) : ""));
  found.filter((part) => !part.children && part.y1 - part.y0 > 30).append("text").attr("class", "small").attr("x", 4).attr("y", 25)
    .text((part) => whole(scaled(part.value, figure.unit), part.x1 - part.x0 - 8));
  return [{ text: `area: ${figure.title}` }, ...look.legend];
};

export const drawIcicle = (into, side, size, act) => {
  const figure = areaFigure(side);
  if (!figure || !figure.total[side.focus]) return empty(into, size, figure ? `${figure.title}: none here` : "no figures");
  const root = partsOf(side, figure);
  const row = Math.max(LEAST_ROW, Math.min(MOST_ROW, size.height / (root.height + 1)));
  d3.partition().size([size.width, row * (root.height + 1)])(root);
  const parts = root.descendants().filter((part) => part.x1 - part.x0 >= SMALLEST / 2);
  const look = colouring(side, parts.filter((part) => !part.children).map((part) => part.data.node), true);
  const shape = (part) => ({ x: part.x0, y: part.depth * row, width: part.x1 - part.x0 - 0.5, height: row - 1 });
  const found = boxes(into, side, parts, look, figure, act, shape);
  found.append("text").attr("x", 4).attr("y", 15).text((part) => fitting(label(side, part), part.x1 - part.x0 - 8, FONT));
  if (row > 34) {
    found.append("text").attr("class", "small").attr("x", 4).attr("y", 30)
      .text((part) => whole(scaled(part.value, figure.unit), part.x1 - part.x0 - 8));
  }
  return [{ text: `width: ${figure.title}` }, ...look.legend];
};

const MARGIN = { top: 24, right: 24, bottom: 44, left: 64 };

const axes = (into, size, x, y, titles, format) => {
  const { left, bottom, top } = MARGIN;
  into.append("g").attr("class", "axis").attr("transform", `translate(0,${size.height - bottom})`).call(format.x(d3.axisBottom(x)));
  into.append("g").attr("class", "axis").attr("transform", `translate(${left},0)`).call(format.y(d3.axisLeft(y)));
  into.append("text").attr("class", "title").attr("x", size.width / 2).attr("y", size.height - 8).attr("text-anchor", "middle").text(titles[0]);
  into.append("text").attr("class", "title").attr("x", left - 48).attr("y", top - 8).text(titles[1]);
};

// The labels of points that overlap neither an earlier one, nor a point, nor the end of the picture.
const apart = (labels, right) => {
  const taken = labels.map(({ x, y, radius }) => ({ start: x - radius, end: x + radius, top: y - radius, bottom: y + radius }));
  return labels.map((label) => ({ ...label, x: label.x + label.radius + 3 })).filter(({ text, x, y }) => {
    const box = { start: x, end: x + textWidth(text, FONT), top: y - 6, bottom: y + 6 };
    const isFree = taken.every((other) => box.start > other.end || box.end < other.start || box.top > other.bottom || box.bottom < other.top);
    if (!isFree || box.end > right) return false;
    return taken.push(box);
  });
};

const deviceOf = (model) => model.data.devices.find((each) => each.name === state.device) ?? model.data.devices.find((each) => each.name.startsWith("A100")) ?? model.data.devices[0];

export const drawRoofline = (into, side, size, act) => {
  const { model } = side;
  const figure = (name) => model.figures.get(name);
  const device = deviceOf(model);
  if (!figure("macs") || !figure("bytes_read") || !device) return empty(into, size, "a roofline needs multiply-adds and bytes: pass an input");
  const time = figure("latency") ?? figure("estimated_latency");
  const points = [];
  for (let node = side.focus; node < model.end[side.focus]; node++) {
    if (side.shown(node) !== node || model.kind(node) !== "module") continue;
    const macs = model.children(node).reduce((sum, child) => sum + (model.kind(child) === "function" ? figure("macs").own[child] : 0), figure("macs").own[node]);
    const moved = figure("bytes_read").own[node] + (figure("bytes_written")?.own[node] ?? 0);
    if (!macs || !moved) continue;
    const intensity = (2 * macs) / moved;
    const roof = Math.min(device.peak, intensity * device.bandwidth);
    const seconds = time ? time.own[node] / 1000 : 0;
    points.push({ node, intensity, flops: 2 * macs, roof, speed: seconds ? (2 * macs) / seconds : roof, isTimed: seconds > 0 });
  }
  if (!points.length) return empty(into, size, "no multiply-adds here");
  const ridge = device.peak / device.bandwidth;
  const reach = d3.extent([...points.map((each) => each.intensity), ridge]);
  const x = d3.scaleLog([reach[0] / 2, reach[1] * 3], [MARGIN.left, size.width - MARGIN.right]);
  const slowest = Math.min(...points.map((each) => each.speed), x.domain()[0] * device.bandwidth);
  const y = d3.scaleLog([slowest / 2, device.peak * 2], [size.height - MARGIN.bottom, MARGIN.top]);
  const few = (axis) => axis.ticks(6, "~s");
  axes(into, size, x, y, ["FLOP per byte moved", "FLOP/s"], { x: few, y: few });
  const corner = [x.domain()[0], ridge, x.domain()[1]];
  into.append("path").attr("class", "roof").attr("d", d3.line()(corner.map((each) => [x(each), y(Math.min(device.peak, each * device.bandwidth))])));
  into.append("text").attr("class", "title").attr("x", size.width - MARGIN.right).attr("y", MARGIN.top - 8).attr("text-anchor", "end")
    .text(`${device.name}, ${device.dtype}: ${scaled(device.peak)}FLOP/s, ${scaled(device.bandwidth)}B/s`);
  const look = colouring(side, points.map((each) => each.node), true);
  const most = Math.max(...points.map((each) => each.flops));
  const radius = (point) => 3 + 11 * Math.sqrt(point.flops / most);
  into.append("g").selectAll("circle").data(points.sort((a, b) => b.flops - a.flops)).join("circle").attr("class", "point")
    .attr("data-node", (each) => each.node).attr("cx", (each) => x(each.intensity)).attr("cy", (each) => y(each.speed))
    .attr("r", radius).style("fill", (each) => look.fill(each.node))
    .on("click", (event, each) => act.select(side, each.node))
    .append("title").text((each) => `${model.label(each.node)}\n${scaled(each.flops)} FLOP, ${each.intensity.toFixed(1)} FLOP/B\n`
      + `limited by ${each.intensity < ridge ? "memory" : "compute"}: at best ${scaled(each.roof)}FLOP/s${each.isTimed ? `, reached ${scaled(each.speed)}FLOP/s` : ""}`);
  const names = apart(points.map((point) => ({ text: cut(model.label(point.node), 30), x: x(point.intensity), y: y(point.speed) + 4, radius: radius(point) })), size.width);
  into.append("g").selectAll("text").data(names).join("text").attr("class", "point-name").attr("x", (name) => name.x).attr("y", (name) => name.y)
    .text((name) => name.text);
  const how = time ? time.title.toLowerCase() : "the roof, as nothing was timed";
  const above = points.filter((each) => each.speed > 1.01 * each.roof).length;
  const why = "the time is of a faster device or dtype, or bytes stayed in a cache";
  return [{ text: `height: ${how}; area: FLOP` }, ...(above ? [{ text: `${above} above the roof: ${why}` }] : []), ...look.legend];
};

export const drawMemory = (into, side, size, act) => {
  const { model } = side;
  const memory = model.data.memory;
  if (!memory) return empty(into, size, "no timeline: pass memory=stats.memory() to explore");
  const count = memory.operator.length;
  const names = Object.keys(memory.held);
  const held = names.map((name) => { let sum = 0; return memory.held[name].map((change) => (sum += change)); });
  const x = d3.scaleLinear([0, count], [MARGIN.left, size.width - MARGIN.right]);
  const y = d3.scaleLinear([0, memory.peak * 1.06], [size.height - MARGIN.bottom, MARGIN.top]);
  const layers = d3.stack().keys(d3.range(names.length)).value((point, key) => held[key][point])(d3.range(count));
  const colours = d3.schemeTableau10;
  axes(into, size, x, y, ["operator", ""], { x: (axis) => axis.ticks(8), y: (axis) => axis.ticks(6).tickFormat((value) => scaled(value, "bytes")) });
  const area = d3.area().x((_, place) => x(place)).y0((each) => y(each[0])).y1((each) => y(each[1])).curve(d3.curveStepAfter);
  into.append("g").selectAll("path").data(layers).join("path").attr("d", area).style("fill", (_, place) => colours[place % 10])
    .append("title").text((_, place) => names[place]);
  const inside = (node) => node >= 0 && model.contains(side.selected, node);
  const spans = [];
  memory.node.forEach((node, place) => {
    if (!inside(node) || !side.selected) return;
    if (spans.length && spans.at(-1)[1] === place) spans.at(-1)[1] = place + 1;
    else spans.push([place, place + 1]);
  });
  into.append("g").selectAll("rect").data(spans).join("rect").attr("class", "span").attr("y", MARGIN.top)
    .attr("height", size.height - MARGIN.top - MARGIN.bottom).attr("x", ([start]) => x(start)).attr("width", ([start, end]) => Math.max(1, x(end) - x(start)));
  const totals = d3.range(count).map((place) => d3.sum(held, (each) => each[place]));
  const peak = totals.indexOf(Math.max(...totals));
  into.append("line").attr("class", "peak").attr("x1", x(peak)).attr("x2", x(peak)).attr("y1", y(totals[peak])).attr("y2", size.height - MARGIN.bottom);
  into.append("text").attr("class", "title").attr("x", x(peak)).attr("y", y(totals[peak]) - 6).attr("text-anchor", peak > count * 0.7 ? "end" : "start")
    .text(`peak ${scaled(totals[peak], "bytes")} at ${model.memoryText("operator", peak)}`);
  const phases = d3.range(count).filter((place) => !place || memory.phase[place] !== memory.phase[place - 1]);
  into.append("g").selectAll("line").data(phases.slice(1)).join("line").attr("class", "peak").attr("x1", x).attr("x2", x).attr("y1", MARGIN.top - 14).attr("y2", size.height - MARGIN.bottom);
  const room = (place, number) => (x(phases[number + 1] ?? count) - x(place)) - 6;
  into.append("g").selectAll("text").data(phases).join("text").attr("class", "title").attr("x", (place) => x(place) + 3).attr("y", MARGIN.top - 6)
    .text((place, number) => fitting(model.memoryText("phase", place), room(place, number), FONT));
  into.append("rect").attr("class", "grip").attr("x", MARGIN.left).attr("y", MARGIN.top).attr("width", size.width - MARGIN.left - MARGIN.right)
    .attr("height", size.height - MARGIN.top - MARGIN.bottom)
    .on("click", (event) => { const node = memory.node[Math.floor(x.invert(d3.pointer(event)[0]))]; if (node >= 0) act.select(side, node); })
    .on("mousemove", (event) => {
      const place = Math.max(0, Math.min(count - 1, Math.floor(x.invert(d3.pointer(event)[0]))));
      const node = memory.node[place];
      const where = node < 0 ? "" : ` in ${cut(model.label(node), 60)}`;
      act.say(`${model.memoryText("operator", place)}${where}, ${model.memoryText("phase", place)}: ${full(totals[place], "bytes")}`);
    });
  const isVisible = (place) => Math.max(...held[place]) * size.height > memory.peak; // a pixel
  return names.map((name, place) => ({ colour: colours[place % 10], text: name })).filter((_, place) => isVisible(place));
};
