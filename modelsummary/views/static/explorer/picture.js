// The picture that is shown as SVG or PNG: to the clipboard, or as a file where the browser refuses.

const STYLED = ["fill", "stroke", "stroke-width", "stroke-dasharray", "opacity", "font", "text-anchor", "color", "fill-opacity", "stroke-opacity", "visibility"];

// A copy of the picture that needs no style sheet.
export const svgText = (svg) => {
  const copy = svg.cloneNode(true);
  const originals = svg.querySelectorAll("*"), copies = copy.querySelectorAll("*");
  originals.forEach((element, place) => {
    const style = getComputedStyle(element);
    copies[place].setAttribute("style", STYLED.map((name) => `${name}:${style.getPropertyValue(name)}`).join(";"));
    copies[place].removeAttribute("class");
  });
  copy.querySelectorAll(".grip, .toggle").forEach((element) => element.remove());
  const box = svg.querySelector(".content").getBBox();
  const edge = 12;
  const [width, height] = [box.width + 2 * edge, box.height + 2 * edge];
  copy.setAttribute("xmlns", "http://www.w3.org/2000/svg");
  copy.setAttribute("viewBox", `${box.x - edge} ${box.y - edge} ${width} ${height}`);
  copy.setAttribute("width", width);
  copy.setAttribute("height", height);
  copy.querySelector("[data-content]").removeAttribute("transform");
  const paper = copy.ownerDocument.createElementNS("http://www.w3.org/2000/svg", "rect");
  for (const [name, value] of Object.entries({ x: box.x - edge, y: box.y - edge, width, height, fill: getComputedStyle(document.body).backgroundColor })) {
    paper.setAttribute(name, value);
  }
  copy.insertBefore(paper, copy.firstChild);
  return new XMLSerializer().serializeToString(copy);
};

const MOST_PIXELS = 8192;

export const pngBlob = async (svg) => {
  const text = svgText(svg);
  const image = new Image();
  image.src = `data:image/svg+xml;charset=utf-8,${encodeURIComponent(text)}`;
  await image.decode();
  const scale = Math.min(2, MOST_PIXELS / Math.max(image.width, image.height));
  const canvas = document.createElement("canvas");
  canvas.width = image.width * scale;
  canvas.height = image.height * scale;
  canvas.getContext("2d").drawImage(image, 0, 0, canvas.width, canvas.height);
  return new Promise((resolve) => { canvas.toBlob(resolve, "image/png"); });
};

// Copy, or save; return what was done.
export const handOver = async (blob, name, copies) => {
  try {
    await copies();
    return "copied";
  } catch {
    const link = document.createElement("a");
    link.href = URL.createObjectURL(blob);
    link.download = name;
    link.click();
    setTimeout(() => URL.revokeObjectURL(link.href), 10000);
    return `saved as ${name}`;
  }
};
