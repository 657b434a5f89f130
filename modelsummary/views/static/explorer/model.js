// One model: its nodes in depth-first order, so that a node and everything inside it are neighbours.

const pattern = (word) => {
  try {
    return new RegExp(word, "i");
  } catch { // not yet, or not meant as one
    return new RegExp(word.replace(/[.*+?^${}()|[\]\\]/g, "\\$&"), "i");
  }
};

export class Model {
  constructor(data) {
    this.data = data;
    this.title = data.title;
    this.size = data.nodes.parent.length;
    this.parent = data.nodes.parent;
    this.order = data.nodes.order;
    this.runs = new Map(data.runs.map(([head, period, times]) => [head, [period, times]]));
    this.end = new Int32Array(this.size); // one past the last node inside
    for (let node = this.size - 1; node >= 0; node--) {
      this.end[node] = Math.max(this.end[node], node + 1);
      const parent = this.parent[node];
      if (parent >= 0) this.end[parent] = Math.max(this.end[parent], this.end[node]);
    }
    this.outer = this.#outer();
    this.steps = new Set([...data.edges.source, ...data.edges.target]);
    this.figures = new Map(data.figures.map((figure) => [figure.name, this.#summed(figure)]));
    this.fqns = new Map();
    for (let node = this.size - 1; node >= 0; node--) {
      if (this.kind(node) === "module" && !this.fact("Call", node)) this.fqns.set(this.fact("FQN", node), node);
    }
  }

  #text(place) { return this.data.texts[place]; }
  kind(node) { return this.#text(this.data.nodes.kind[node]); }
  name(node) { return this.#text(this.data.nodes.name[node]); }
  // The name among the calls of a module: the path through containers that nothing calls, as ``down_blocks.0``.
  callName(node) {
    const parent = this.parent[node];
    return parent > 0 && this.isTransparent(parent) ? `${this.callName(parent)}.${this.name(node)}` : this.name(node);
  }
  type(node) { return this.#text(this.data.nodes.type[node]); }
  fact(title, node) { return title in this.data.facts ? this.#text(this.data.facts[title][node]) : ""; }
  group(title, node) { return title in this.data.groups ? this.#text(this.data.groups[title][node]) : ""; }
  // The groups of a node and of everything inside.
  groups(title, node) {
    const texts = Array.from({ length: this.end[node] - node }, (_, inside) => this.group(title, node + inside));
    return [...new Set(texts)].filter(Boolean).sort((a, b) => a.localeCompare(b, undefined, { numeric: true }));
  }
  tensors(edge) { return this.#text(this.data.edges.tensors[edge]); }
  memoryText(fact, point) { return this.#text(this.data.memory[fact][point]); }

  get edgeCount() { return this.data.edges.source.length; }
  isStep(node) { return this.steps.has(node); } // its dataflow inside is not known
  isOpenable(node) { return this.end[node] > node + 1; }
  contains(outer, node) { return outer <= node && node < this.end[outer]; }

  // A container that nothing calls, such as a ModuleList: its children belong to the level around it.
  isTransparent(node) {
    return node > 0 && this.data.nodes.called[node] === 2;
  }

  children(node) {
    const found = [];
    for (let child = node + 1; child < this.end[node]; child = this.end[child]) found.push(child);
    return found;
  }

  // The calls of a module in the order in which they ran, through containers that nothing calls.
  level(node) {
    const found = this.children(node).flatMap((child) => (this.isTransparent(child) ? this.level(child) : [child]));
    return found.sort((a, b) => this.order[a] - this.order[b] || a - b);
  }

  // The module around each node, without containers that nothing calls.
  #outer() {
    const outer = new Int32Array(this.size).fill(-1);
    for (let node = 1; node < this.size; node++) {
      const parent = this.parent[node];
      outer[node] = this.isTransparent(parent) ? outer[parent] : parent;
    }
    return outer;
  }

  #summed(figure) {
    const total = Float64Array.from(figure.own);
    if (figure.adds) {
      for (let node = this.size - 1; node > 0; node--) total[this.parent[node]] += total[node];
    }
    return { ...figure, total };
  }

  // The nodes from the model down to this one.
  way(node) {
    const found = [];
    for (let each = node; each >= 0; each = this.parent[each]) found.unshift(each);
    return found;
  }

  // The FQN of a node; of one that has none, the module around it and its name.
  label(node) {
    const fqn = this.fact("FQN", node);
    if (fqn || !node) return fqn || this.title;
    const around = this.fact("FQN", this.outer[node]);
    return around ? `${around} › ${this.name(node)}` : this.name(node);
  }

  // A text that finds the node again: the FQN and the call, or the number of what has no FQN.
  address(node) {
    if (this.kind(node) !== "module") return `@${node}`;
    const call = this.fact("Call", node);
    return call ? `@${node}` : this.fact("FQN", node);
  }

  find(address) {
    const number = /^@(\d+)$/.exec(address);
    if (number) return +number[1] < this.size ? +number[1] : 0;
    return this.fqns.get(address) ?? 0;
  }

  // Nodes whose FQN, name or type matches every word of the query, a regular expression.
  search(query) {
    const words = query.split(/\s+/).filter(Boolean).map(pattern);
    const nodes = [];
    for (let node = 0; node < this.size; node++) {
      const texts = [this.fact("FQN", node), this.name(node), this.type(node)];
      if (words.every((word) => texts.some((text) => word.test(text)))) nodes.push(node);
    }
    return nodes;
  }

  // What a module takes from and passes to others: [other node, tensors], the others as high up as they are apart.
  neighbours(node) {
    const { source, target } = this.data.edges;
    const taken = new Map(), passed = new Map();
    const add = (map, other, edge) => {
      const shown = this.apart(other, node);
      if (!map.has(shown)) map.set(shown, new Set());
      map.get(shown).add(this.tensors(edge));
    };
    for (let edge = 0; edge < this.edgeCount; edge++) {
      const from = this.contains(node, source[edge]), to = this.contains(node, target[edge]);
      if (to && !from) add(taken, source[edge], edge);
      if (from && !to) add(passed, target[edge], edge);
    }
    return { taken: [...taken], passed: [...passed] };
  }

  // The outermost module around one node that does not hold another one.
  apart(node, other) {
    let found = node;
    while (this.outer[found] >= 0 && !this.contains(this.outer[found], other)) found = this.outer[found];
    return found;
  }
}
