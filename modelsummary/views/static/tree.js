// Fills rows that were left out of the page when their parent is opened, and sorts siblings by a column.
(() => {
  for (const root of document.querySelectorAll(".modelsummary:not([data-ready])")) {
    root.dataset.ready = "";
    const data = JSON.parse(root.querySelector(".ms-data").textContent);
    const body = root.querySelector(".ms-body");
    let column = -1, descending = true;

    const add = (parent, name, text, depth) => {
      const cell = parent.appendChild(document.createElement("span"));
      cell.className = name;
      cell.textContent = text;
      if (depth !== undefined) cell.style.setProperty("--depth", depth);
      return cell;
    };

    const grid = (row) => {
      const [label, type, depth, texts, shares, values] = row;
      const line = document.createElement("div");
      line.className = "ms-grid";
      const name = add(line, "ms-name", label + " ", depth);
      add(name, "ms-class", data.strings[type]);
      texts.forEach((text, place) => {
        const cell = add(line, data.numeric[place] ? "ms-number" : "ms-text", data.strings[text]);
        if (data.numeric[place]) cell.dataset.value = values[place];
        if (shares[place]) cell.style.setProperty("--share", shares[place] + "%");
      });
      return line;
    };

    const element = (number) => {
      const line = grid(data.rows[number]);
      if (!data.children[number]) {
        line.dataset.order = number;
        return line;
      }
      const details = document.createElement("details");
      details.dataset.order = details.dataset.row = number;
      details.appendChild(document.createElement("summary")).appendChild(line);
      return details;
    };

    const value = (node) => {
      const line = node.matches(".ms-grid") ? node : node.querySelector(".ms-grid");
      const cell = line.children[column];
      return cell.dataset.value === undefined ? cell.textContent : Number(cell.dataset.value);
    };

    const compare = (a, b) =>
      typeof a === "string" ? a.localeCompare(b, undefined, {numeric: true}) : a - b;

    const sort = (parent) => {
      const rows = [...parent.children].filter((node) => node.dataset.order !== undefined);
      const keyed = rows.map((node) => [column < 0 ? 0 : value(node), +node.dataset.order, node]);
      keyed.sort((a, b) => compare(a[0], b[0]) * (descending ? -1 : 1) || a[1] - b[1]);
      for (const [, , node] of keyed) parent.appendChild(node);
      for (const node of rows) if (node.matches("details")) sort(node);
    };

    const fill = (details) => {
      const number = details.dataset.row;
      if (!details.open || number === undefined) return;
      delete details.dataset.row;
      details.querySelector(".ms-more")?.remove();
      for (const child of data.children[number]) details.appendChild(element(child));
      sort(details);
    };

    root.addEventListener("toggle", (event) => fill(event.target), true);
    body.querySelectorAll("details[open][data-row]").forEach(fill);

    const buttons = root.querySelectorAll(".ms-head button");
    buttons.forEach((button, place) => button.addEventListener("click", () => {
      const state = button.getAttribute("aria-sort");
      buttons.forEach((each) => each.removeAttribute("aria-sort"));
      column = state === "ascending" ? -1 : place;
      descending = state === null;
      if (column >= 0) button.setAttribute("aria-sort", descending ? "descending" : "ascending");
      sort(body);
    }));
  }
})();
