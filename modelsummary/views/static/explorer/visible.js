// What of a model is visible: equal blocks as one, modules that are opened, and the edges between what is shown.

// Which node stands for each: the same one of the first of equal blocks.
export class Folding {
  constructor(model, unfolded) {
    this.model = model;
    this.standsFor = Int32Array.from({ length: model.size }, (_, node) => node);
    this.times = new Map(); // node -> how often it and its equals come
    this.head = new Map(); // node that can be unfolded or folded -> first node of its run
    this.run = new Int32Array(model.size).fill(-1);
    this.instance = new Int32Array(model.size);
    this.#fold(0, unfolded);
  }

  #fold(node, unfolded) {
    const { model } = this;
    const level = model.level(node);
    for (let start = 0; start < level.length;) {
      const head = level[start];
      const [period, times] = model.runs.get(head) ?? [1, 1];
      const isFolded = times > 1 && !unfolded.has(head);
      for (let place = 0; place < period * times; place++) {
        const item = level[start + place];
        if (times > 1) this.head.set(item, head);
        if (!isFolded || place < period) {
          this.#fold(item, unfolded);
          if (isFolded) this.times.set(item, times);
        } else {
          this.#copy(level[start + (place % period)], item);
        }
        if (isFolded) {
          this.run[item] = head;
          this.instance[item] = Math.floor(place / period);
        }
      }
      start += period * times;
    }
  }

  #copy(first, other) {
    for (let inside = 0; first + inside < this.model.end[first]; inside++) {
      this.standsFor[other + inside] = this.standsFor[first + inside];
      this.run[other + inside] = this.run[first + inside];
      this.instance[other + inside] = this.instance[first + inside];
    }
  }

  // Whether an edge leads from one of equal blocks to another one of them.
  isBetweenEquals(source, target) {
    let [a, b] = [source, target];
    const { outer } = this.model;
    const depth = (node) => { let count = 0; for (let each = node; each >= 0; each = outer[each]) count++; return count; };
    let [over, under] = [depth(a), depth(b)];
    for (; over > under; over--) a = outer[a];
    for (; under > over; under--) b = outer[b];
    while (outer[a] !== outer[b]) [a, b] = [outer[a], outer[b]];
    return this.run[a] >= 0 && this.run[a] === this.run[b] && this.instance[a] !== this.instance[b];
  }

  // How often a node comes in the model: its own equals, and those of the modules around it.
  count(node) {
    let count = 1;
    for (let each = node; each >= 0; each = this.model.outer[each]) count *= this.times.get(each) ?? 1;
    return count;
  }
}

// The visible graph: nodes with the nodes inside them, and edges [source, target, edges of the model].
export const visibleGraph = (model, folding, open, focus) => {
  const where = new Int32Array(model.size).fill(-1);
  const show = (node) => {
    const isOpen = model.isOpenable(node) && (open.has(node) || node === focus);
    where.fill(node, node, model.end[node]);
    const inside = isOpen ? model.level(node).filter((each) => folding.standsFor[each] === each).map(show) : [];
    return { node, isOpen, inside };
  };
  const root = show(focus);
  const outside = new Map(); // nodes around the focus that pass something to it or take something
  const ends = (node) => {
    const shown = where[folding.standsFor[node]];
    if (shown >= 0) return shown;
    const apart = folding.standsFor[model.apart(node, focus)];
    outside.set(apart, { node: apart, isOpen: false, inside: [], isOutside: true });
    return apart;
  };
  const edges = new Map();
  const { source, target } = model.data.edges;
  for (let edge = 0; edge < source.length; edge++) {
    const [first, second] = [folding.standsFor[source[edge]], folding.standsFor[target[edge]]];
    if (where[first] < 0 && where[second] < 0) continue;
    if (where[first] === where[second]) continue;
    const [a, b] = [ends(source[edge]), ends(target[edge])];
    if (a === b || model.contains(a, b) || model.contains(b, a)) continue;
    if (folding.isBetweenEquals(source[edge], target[edge])) continue;
    const key = a * model.size + b;
    if (!edges.has(key)) edges.set(key, { source: a, target: b, of: [] });
    edges.get(key).of.push(edge);
  }
  return { root, outside: [...outside.values()], edges: [...edges.values()] };
};

const grouped = (edges, from, to) => {
  const groups = new Map();
  for (const edge of edges) groups.set(edge[from], [...(groups.get(edge[from]) ?? []), edge[to]]);
  return groups;
};

const MANY = 3;

// Mark the edges of inputs that go everywhere, such as a time step: they join the path of another input again and again,
// more often than that input. All but the first are drawn as labels.
export const markLabels = (model, graph) => {
  const next = grouped(graph.edges, "source", "target"), before = grouped(graph.edges, "target", "source");
  const join = (target) => {
    const seen = new Set();
    while (before.get(target).length === 1 && next.get(target)?.length === 1 && !seen.has(target)) {
      seen.add(target);
      [target] = next.get(target);
    }
    return target;
  };
  const joins = (node) => [...new Set((next.get(node) ?? []).map(join))].sort((a, b) => model.order[a] - model.order[b]);
  const reached = (node) => {
    const seen = new Set([node]);
    for (const each of seen) for (const target of next.get(each) ?? []) seen.add(target);
    return seen;
  };
  for (const [source, targets] of next) {
    const joined = joins(source);
    if (joined.length < MANY) continue;
    const after = reached(source);
    const joinsAnother = before.get(joined[0]).some((other) => !after.has(other) && !reached(other).has(source)
      && joins(other).length < joined.length);
    if (!joinsAnother) continue;
    const first = targets.reduce((a, b) => (model.order[b] < model.order[a] ? b : a));
    for (const edge of graph.edges) edge.isLabel ||= edge.source === source && edge.target !== first;
    for (const edge of graph.edges) edge.isFirst ||= edge.source === source && edge.target === first;
  }
};

// Mark skip connections: edges beside which a longer way leads from the source to the target.
export const markSkips = (model, graph) => {
  const next = grouped(graph.edges, "source", "target");
  for (const edge of graph.edges) {
    if (edge.isLabel || edge.isFirst || model.kind(edge.target) === "output") continue;
    const pending = next.get(edge.source).filter((node) => node !== edge.target);
    const seen = new Set([edge.source, ...pending]);
    while (pending.length && !edge.isSkip) {
      for (const node of next.get(pending.pop()) ?? []) {
        if (node === edge.target) edge.isSkip = true;
        else if (!seen.has(node)) pending.push(node);
        seen.add(node);
      }
    }
  }
};

const FEW = 40; // nodes of the first picture

// The modules to open at first: level by level, as long as the picture stays small.
export const firstOpen = (model, folding) => {
  const open = new Set([0]);
  const macs = model.figures.get("macs")?.total;
  const inside = (node) => model.level(node).filter((each) => folding.standsFor[each] === each);
  let level = inside(0);
  let count = level.length;
  while (level.length) {
    const openable = level.filter((node) => model.isOpenable(node) && model.kind(node) === "module" && !model.isStep(node)
      && (!macs?.[0] || macs[node])); // such as rotary arithmetic
    const deeper = openable.flatMap(inside);
    if (!deeper.length || count - openable.length + deeper.length > FEW) break;
    openable.forEach((node) => open.add(node));
    count += deeper.length - openable.length;
    level = deeper;
  }
  return open;
};
