// Draws what is in use as an icicle: bytes by module path or by stack, the outermost on top. `moment.js` gives it the
// state; a click or Enter goes into a node and chooses the blocks below it.
"use strict";
globalThis.memoryFlame = (shared) => {
  const { bytesText, countText, root, words, tip, isLayer, textOf, fitted } = shared;
  const ROW = 20, LEAST = 1, FONT = '12px system-ui, "Segoe UI", sans-serif';
  const DEEPEST = 40;

  /** A node: its bytes, blocks, bytes by category, kinds of blocks, parts by name; layers that stand as one. */
  const node = (name, above) => ({ name, above, bytes: 0, count: 0, sums: new Map(), kinds: [], parts: new Map(), layers: null });

  function grow(one, kind, category, bytes, count) {
    one.bytes += bytes;
    one.count += count;
    one.sums.set(category, (one.sums.get(category) ?? 0) + bytes);
    one.kinds.push(kind);
  }

  /** The tree of a state; `by` module or stack, numbered layers as one where `fold`, all frames where `all`. */
  function treeOf(memory, state, { by, fold, all }) {
    const { blocks, kinds } = memory;
    const bytes = new Float64Array(kinds.count), count = new Int32Array(kinds.count);
    for (const i of state.alive) if (blocks.freed[i] > state.event) { bytes[blocks.kind[i]] += blocks.bytes[i]; count[blocks.kind[i]]++; }
    const whole = node("all", null);
    for (let kind = 0; kind < kinds.count; kind++) {
      if (!count[kind]) continue;
      let at = whole;
      grow(at, kind, kinds.category[kind], bytes[kind], count[kind]);
      for (const part of memory.path(kind, by, all)) {
        const layer = fold && by === "module" && isLayer(part), name = layer ? "*" : part;
        if (!at.parts.has(name)) at.parts.set(name, node(name, at));
        at = at.parts.get(name);
        if (layer) (at.layers ??= new Set()).add(part);
        grow(at, kind, kinds.category[kind], bytes[kind], count[kind]);
      }
    }
    return whole;
  }

  /** `32 × layers.*`, or the name. */
  const label = (one) => (one.layers ? (one.layers.size > 1 ? `${one.layers.size} × ${one.above.name}.*` : `${one.above.name}.${[...one.layers][0]}`) : one.name);
  const pathText = (one) => (one.above?.above ? `${pathText(one.above)} › ${label(one)}` : label(one));
  const pathKey = (one) => (one ? `${pathKey(one.above)}\u0000${one.name}` : "");

  return class Flame {
    /** `hub.chooseKinds(kinds, words)` is called when a node is chosen (null: all of them). */
    constructor(memory, host, hub) {
      Object.assign(this, { memory, host, hub, by: "module", fold: true, all: false, query: "", marked: null });
      this.zoomed = this.cursor = ""; // keys of the nodes that are gone into and pointed at
      if (memory.stacks.length && !memory.names.some((name) => !name.includes("@"))) this.by = "stack";
      this.build();
      new ResizeObserver(() => this.state && this.layout()).observe(this.canvas);
    }

    add(tag, properties, parent = this.host) {
      return parent.appendChild(Object.assign(document.createElement(tag), properties));
    }

    build() {
      this.add("h3", { textContent: "In use, by module and stack" });
      const tools = this.add("div", { className: "tools" });
      if (this.memory.stacks.length) this.addChoice(tools);
      this.box(tools, "layers as one", "fold");
      if (this.memory.stacks.length) this.box(tools, "frames of libraries", "all");
      const back = this.add("button", { type: "button", textContent: "All", title: "Out of the node, to all" }, tools);
      back.addEventListener("click", () => this.goInto(this.tree));
      this.canvas = this.add("canvas", { className: "flame", tabIndex: 0 });
      this.canvas.setAttribute("role", "application");
      this.canvas.addEventListener("mousemove", (event) => { const one = this.nodeAt(event); if (one) tip.show(event, this.lines(one)); else tip.hide(); });
      this.canvas.addEventListener("mouseleave", () => tip.hide());
      this.canvas.addEventListener("click", (event) => { const one = this.nodeAt(event); if (one) this.goInto(one); });
      this.canvas.addEventListener("keydown", (event) => this.key(event));
      for (const name of ["focus", "blur"]) this.canvas.addEventListener(name, () => this.draw());
      this.readout = this.add("div", { className: "readout" });
      this.readout.setAttribute("aria-live", "polite");
    }

    addChoice(tools) {
      const select = this.add("select", { ariaLabel: "By module or by stack" }, tools);
      for (const by of ["module", "stack"]) select.append(new Option(`by ${by}`, by, by === this.by, by === this.by));
      select.addEventListener("change", () => { this.by = select.value; this.zoomed = this.cursor = ""; this.show(this.state); });
    }

    box(tools, text, key) {
      const input = this.add("input", { type: "checkbox", checked: this[key] }, this.add("label", {}, tools));
      input.parentElement.append(text);
      input.addEventListener("change", () => { this[key] = input.checked; this.zoomed = ""; this.show(this.state); });
    }

    show(state) {
      this.state = state;
      this.tree = treeOf(this.memory, state, this);
      this.layout();
    }

    /** Let the path of a tensor stand out. */
    highlight({ tensor = null }) {
      this.marked = tensor === null ? null : this.memory.blocks.kind[tensor];
      this.draw();
    }

    /** Let nodes stand out whose name has the text of a search. */
    find(query) {
      this.query = textOf(query);
      this.draw();
    }

    // Where nodes stand

    /** Boxes (node, x, row, width) of what is wide enough to be seen, below the node that is gone into. */
    layout() {
      const width = Math.max(240, root.dataset.print === undefined ? this.canvas.clientWidth : 690);
      this.boxes = [];
      this.byKey = new Map();
      const place = (one, x, row, wide) => {
        this.boxes.push({ one, x, row, wide });
        this.byKey.set(pathKey(one), this.boxes.length - 1);
        let at = x;
        for (const part of row < DEEPEST ? [...one.parts.values()].sort((a, b) => b.bytes - a.bytes) : []) {
          const share = (wide * part.bytes) / (one.bytes || 1);
          if (share < LEAST) break;
          place(part, at, row + 1, share);
          at += share;
        }
      };
      let top = this.tree;
      for (const name of this.zoomed.split("\u0000").slice(2)) top = top.parts.get(name) ?? top;
      const above = [];
      for (let one = top.above; one; one = one.above) above.unshift(one);
      above.forEach((one, row) => this.boxes.push({ one, x: 0, row, wide: width, above: true }));
      place(top, 0, above.length, width);
      if (!this.byKey.has(this.cursor)) this.cursor = pathKey(top);
      this.rows = 1 + Math.max(...this.boxes.map(({ row }) => row));
      this.width = width;
      this.draw();
    }

    draw() {
      if (!this.boxes) return;
      const { canvas } = this, ratio = devicePixelRatio || 1, height = this.rows * ROW;
      canvas.width = Math.round(this.width * ratio);
      canvas.height = Math.round(height * ratio);
      canvas.style.height = `${height}px`;
      const context = canvas.getContext("2d");
      context.scale(ratio, ratio);
      context.font = FONT;
      context.textBaseline = "middle";
      const style = getComputedStyle(root), of = (name) => style.getPropertyValue(`--${name}`).trim();
      const colour = { page: of("page"), ink: of("ink"), soft: of("soft"), categories: this.memory.categories.map((name) => of(`c-${name}`) || of("c-unknown")) };
      for (const box of this.boxes) this.drawBox(context, box, colour);
      this.readout.textContent = this.lines(this.pointed).join(" · ");
      canvas.dataset.nodes = this.boxes.length;
      canvas.dataset.top = label(this.top);
      canvas.setAttribute("aria-label",
        "What is in use as an icicle. Arrows move: down into a part, up out of it, left and right beside it; Enter goes into it, Escape out.");
    }

    drawBox(context, { one, x, row, wide, above }, colour) {
      const y = row * ROW, found = this.query && label(one).toLowerCase().includes(this.query);
      const [most] = [...one.sums].sort((a, b) => b[1] - a[1])[0] ?? [0];
      const marked = this.marked !== null && one.kinds.includes(this.marked);
      context.globalAlpha = this.query && !found ? 0.18 : above ? 0.3 : 0.62;
      context.fillStyle = colour.categories[most] ?? colour.soft;
      context.fillRect(x, y, Math.max(wide - 0.7, 0.5), ROW - 1);
      context.globalAlpha = 1;
      if (marked || found) {
        context.fillStyle = colour.ink;
        context.fillRect(x, y + ROW - 3, Math.max(wide - 0.7, 0.5), 2);
      }
      if (one === this.pointed && document.activeElement === this.canvas) {
        context.strokeStyle = colour.ink;
        context.lineWidth = 2;
        context.strokeRect(x + 1, y + 1, Math.max(wide - 2.7, 1), ROW - 3);
      }
      if (wide < 26) return;
      context.fillStyle = colour.ink;
      context.fillText(fitted(context, [`${label(one)}  ${bytesText(one.bytes)}`, label(one)], wide - 8), x + 4, y + ROW / 2);
    }

    // The cursor

    get top() { return this.boxes.find(({ above }) => !above).one; }
    get pointed() { return this.boxes[this.byKey.get(this.cursor)]?.one ?? this.top; }

    nodeAt({ offsetX, offsetY }) {
      const row = Math.floor(offsetY / ROW);
      return this.boxes.find((box) => box.row === row && box.x <= offsetX && offsetX < box.x + box.wide)?.one;
    }

    lines(one) {
      const shares = [...one.sums].sort((a, b) => b[1] - a[1]).slice(0, 4)
        .map(([category, bytes]) => `${words(this.memory.categories[category])} ${((100 * bytes) / (one.bytes || 1)).toFixed(0)} %`);
      const share = (100 * one.bytes) / (this.tree.bytes || 1);
      return [pathText(one), `${bytesText(one.bytes)}, ${share.toFixed(1)} % of ${bytesText(this.tree.bytes)}, ${countText(one.count)} block${one.count === 1 ? "" : "s"}`, shares.join(", ")];
    }

    /** Show a node over the whole width, and choose its blocks. */
    goInto(one) {
      this.zoomed = this.cursor = pathKey(one);
      this.layout();
      this.hub.chooseKinds(one.above ? new Set(one.kinds) : null, pathText(one));
    }

    beside(step) {
      const one = this.pointed, parts = one.above ? [...one.above.parts.values()].sort((a, b) => b.bytes - a.bytes) : [one];
      return parts[Math.min(Math.max(parts.indexOf(one) + step, 0), parts.length - 1)];
    }

    key(event) {
      if (event.ctrlKey || event.metaKey || event.altKey) return;
      const to = (one) => {
        const key = one && pathKey(one);
        if (one && this.byKey.has(key)) { this.cursor = key; this.draw(); }
      };
      const acts = {
        ArrowDown: () => to([...this.pointed.parts.values()].sort((a, b) => b.bytes - a.bytes)[0]),
        ArrowUp: () => to(this.pointed.above),
        ArrowLeft: () => to(this.beside(-1)),
        ArrowRight: () => to(this.beside(1)),
        Enter: () => this.goInto(this.pointed),
        Escape: () => this.goInto(this.top.above ?? this.tree),
      };
      const act = acts[event.key];
      if (act) { event.preventDefault(); act(); }
    }
  };
};
