// Fills rows that were left out of the page when their parent is opened, shows equal rows one by one, and sorts siblings
// by a column.
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

    const button = (parent, text, title) => {
      const added = parent.appendChild(document.createElement("button"));
      added.type = "button";
      added.className = "ms-times";
      added.textContent = text;
      added.title = title;
    };

    const grid = (number) => {
      const [label, type, times, depth, , texts, shares, values] = data.rows[number];
      const line = document.createElement("div");
      line.className = "ms-grid";
      const name = add(line, "ms-name", label + " ", depth);
      add(name, "ms-class", data.strings[type]);
      if (data.strings[times]) {
        name.append(" ");
        if (data.each[number]) button(name, data.strings[times], "Show them one by one");
        else add(name, "ms-class", data.strings[times]);
      }
      texts.forEach((text, place) => {
        const cell = add(line, data.numeric[place] ? "ms-number" : "ms-text", data.strings[text]);
        if (data.numeric[place]) cell.dataset.value = values[place];
        if (shares[place]) cell.style.setProperty("--share", shares[place] + "%");
      });
      return line;
    };

    const element = (number) => {
      const line = grid(number);
      const node = data.children[number] ? document.createElement("details") : line;
      node.dataset.row = number;
      node.dataset.order = data.rows[number][4];
      if (node !== line) {
        node.dataset.lazy = "";
        node.appendChild(document.createElement("summary")).appendChild(line);
      }
      return node;
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
      if (!details.open || details.dataset.lazy === undefined) return;
      delete details.dataset.lazy;
      details.querySelector(".ms-more")?.remove();
      for (const child of data.children[details.dataset.row]) details.appendChild(element(child));
      sort(details);
    };

    const placed = (shown, before, parent) => {
      shown.open = before.open;
      fill(shown);
      sort(parent);
      return shown;
    };

    // Show equal rows one by one; the first of them gets the button that shows them as one again.
    const unfold = (node) => {
      const parent = node.parentNode, number = node.dataset.row;
      const rows = data.each[number].map(element);
      const name = rows[0].querySelector(".ms-name");
      name.append(" ");
      button(name, "fold", "Show them as one");
      rows[0].dataset.head = number;
      node.replaceWith(...rows);
      return placed(rows[0], node, parent);
    };

    const refold = (node) => {
      const parent = node.parentNode, number = node.dataset.head;
      const folded = element(number);
      node.before(folded);
      for (const each of data.each[number]) parent.querySelector(`:scope > [data-row="${each}"]`).remove();
      return placed(folded, node, parent);
    };

    root.addEventListener("click", (event) => {
      if (!event.target.matches(".ms-times")) return;
      event.preventDefault(); // the row neither opens nor closes
      const node = event.target.closest("[data-row]");
      const shown = node.dataset.head === undefined ? unfold(node) : refold(node);
      shown.querySelector(".ms-times").focus();
    });

    root.addEventListener("toggle", (event) => fill(event.target), true);
    body.querySelectorAll("details[open][data-lazy]").forEach(fill);

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
