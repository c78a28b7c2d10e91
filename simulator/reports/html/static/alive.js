// The table of tensors in use after an event, and the search among them or among all that ever were. `moment.js` gives
// it the state; choosing a row chooses the tensor everywhere.
"use strict";
globalThis.memoryAlive = (shared) => {
  const { bytesText, countText, words } = shared;
  const MOST = 30;

  return class Alive {
    /** `hub.choose(tensor)` is called when a row is chosen, `hub.find(query)` when another text is searched. */
    constructor(memory, host, hub) {
      Object.assign(this, { memory, host, hub, kinds: null, chosen: null, ever: false });
      this.build();
    }

    add(tag, properties, parent = this.host) {
      return parent.appendChild(Object.assign(document.createElement(tag), properties));
    }

    build() {
      this.add("h3", { textContent: "Tensors" });
      const tools = this.add("div", { className: "tools" });
      this.input = this.add("input", { type: "search", placeholder: "name, category, >10MiB", ariaLabel: "Search for a tensor by name, category, frame or size" }, tools);
      this.input.addEventListener("input", () => { this.list(); this.hub.find(this.input.value); });
      const box = this.add("input", { type: "checkbox" }, this.add("label", {}, tools));
      box.parentElement.append("at any time");
      box.addEventListener("change", () => { this.ever = box.checked; this.list(); });
      this.clear = this.add("button", { type: "button", textContent: "", hidden: true }, tools);
      this.clear.addEventListener("click", () => this.hub.chooseKinds(null));
      this.facts = this.add("p", { className: "facts" });
      this.facts.setAttribute("aria-live", "polite");
      const table = this.add("table", {}, this.add("div", { className: "scroll" }));
      const head = this.add("tr", {}, this.add("thead", {}, table));
      for (const [name, kind] of [["tensor", ""], ["category", ""], ["block", "num"], ["allocated", ""], ["life", "life"]]) this.add("th", { textContent: name, scope: "col", className: kind }, head);
      this.body = this.add("tbody", {}, table);
    }

    show(state) {
      this.state = state;
      this.list();
    }

    /** Mark a tensor's row; list those of `kinds` alone. */
    highlight({ tensor = null, kinds = null, name = "" }) {
      this.chosen = tensor;
      this.kinds = kinds;
      this.clear.hidden = !kinds;
      this.clear.textContent = `✕ ${name.length > 60 ? `…${name.slice(-59)}` : name}`;
      this.list();
    }

    list() {
      const started = performance.now();
      const among = this.ever ? null : this.state.alive;
      const { found, total, best } = this.memory.search(this.input.value, among, MOST, this.kinds);
      const rest = found > best.length ? `, the largest ${countText(best.length)} are listed` : "";
      this.facts.textContent = `${countText(found)} tensor${found === 1 ? "" : "s"} ${this.ever ? "at any time" : "in use"}, ${bytesText(total)}${rest}`;
      const rows = this.chosen === null || best.includes(this.chosen) ? best : [this.chosen, ...best];
      this.body.replaceChildren(...rows.map((tensor) => this.row(tensor)));
      this.host.dataset.found = found;
      this.host.dataset.took = performance.now() - started;
    }

    row(tensor) {
      const row = Object.assign(document.createElement("tr"), { className: tensor === this.chosen ? "chosen" : "" });
      const button = this.add("button", { type: "button", className: "plain", textContent: this.memory.name(tensor) || "(no name)" }, this.add("td", { className: "long" }, row));
      button.setAttribute("aria-pressed", tensor === this.chosen);
      button.addEventListener("click", () => this.hub.choose(tensor === this.chosen ? null : tensor));
      const category = this.memory.category(tensor), cell = this.add("td", {}, row);
      this.add("i", { className: `swatch c-${category}` }, cell);
      cell.append(` ${words(category)}`);
      this.add("td", { className: "num", textContent: bytesText(this.memory.blocks.bytes[tensor]) }, row);
      this.add("td", { textContent: this.hub.since(tensor) }, row);
      this.life(tensor, this.add("td", { className: "life", title: this.hub.life(tensor) }, row));
      return row;
    }

    /** When a tensor lives, as a bar over the whole time. */
    life(tensor, cell) {
      const { born, died } = this.memory.blocks, whole = Math.max(1, this.memory.events);
      const from = (100 * Math.max(0, born[tensor])) / whole, wide = Math.max(0.8, (100 * (died[tensor] - Math.max(0, born[tensor]))) / whole);
      const svg = cell.appendChild(document.createElementNS("http://www.w3.org/2000/svg", "svg"));
      svg.setAttribute("class", "bar");
      svg.setAttribute("aria-hidden", "true");
      const rect = svg.appendChild(document.createElementNS("http://www.w3.org/2000/svg", "rect"));
      for (const [name, value] of Object.entries({ x: `${Math.min(from, 99.2)}%`, width: `${wide}%`, height: "100%", class: `c-${this.memory.category(tensor)}` })) rect.setAttribute(name, value);
    }
  };
};
