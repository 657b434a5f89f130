// Text and elements: numbers with units, and the elements of the page. Names from a model are always set as text.

const PREFIXES = [[1e15, "P"], [1e12, "T"], [1e9, "G"], [1e6, "M"], [1e3, "K"]];

export const scaled = (value, unit) => {
  if (unit === "ms") return value >= 1000 ? `${(value / 1000).toFixed(2)} s` : `${+value.toPrecision(3)} ms`;
  const [factor, prefix] = PREFIXES.find(([factor]) => Math.abs(value) >= factor) ?? [1, ""];
  const number = factor === 1 ? String(+value.toPrecision(3)) : (value / factor).toFixed(value / factor < 10 ? 2 : 1);
  if (unit === "bytes") return `${number} ${prefix === "K" ? "k" : prefix}B`;
  return prefix ? `${number} ${prefix}` : number;
};

export const full = (value, unit) => {
  if (unit === "ms") return scaled(value, unit);
  const whole = Number.isInteger(value) ? value.toLocaleString("en-US") : scaled(value, unit);
  return unit === "bytes" ? `${whole} B` : whole;
};

export const percent = (part, whole) => {
  if (!whole) return "";
  const share = (100 * part) / whole;
  return share > 0 && share < 0.1 ? "< 0.1 %" : `${share.toFixed(1)} %`;
};

export const signed = (value, unit, write = full) => `${value > 0 ? "+" : value < 0 ? "−" : "±"}${write(Math.abs(value), unit)}`;

// An element with attributes, and with texts or elements inside.
export const make = (name, attributes = {}, ...inside) => {
  const element = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) {
    if (key.startsWith("on")) element.addEventListener(key.slice(2), value);
    else if (value !== null && value !== false) element.setAttribute(key, value === true ? "" : value);
  }
  element.append(...inside.filter((each) => each !== null && each !== ""));
  return element;
};

export const byId = (id) => document.getElementById(id);

const canvas = typeof document === "undefined" ? null : document.createElement("canvas").getContext("2d");
const widths = new Map();

export const textWidth = (text, font) => {
  const key = font + text;
  if (!widths.has(key)) {
    canvas.font = font;
    widths.set(key, canvas.measureText(text).width);
  }
  return widths.get(key);
};

// The beginning and the end of a text: a path says where, its last name what.
export const cut = (text, most) => (text.length <= most ? text
  : `${text.slice(0, Math.ceil((most - 1) / 2))}…${text.slice(text.length - Math.floor((most - 1) / 2))}`);

// As much of a text as fits into a width in pixels; nothing if that says nothing.
export const fitting = (text, width, font) => {
  if (textWidth(text, font) <= width) return text;
  let most = Math.floor((text.length * width) / textWidth(text, font));
  while (most > 2 && textWidth(cut(text, most), font) > width) most -= 1;
  return most > 2 ? cut(text, most) : "";
};
