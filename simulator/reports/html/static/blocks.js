// Draws the allocator's segments after an event one after the other as a tape in rows: their blocks coloured by
// category, free gaps left open. `moment.js` gives it the state, and is told which block is pointed at or chosen.
"use strict";
globalThis.memoryBlocks = (shared) => {
  const { bytesText, countText, root, narrow, words, tip } = shared;
  const FREE = -1, PENDING = -2;
  const ROW = 20, SPACE = 5;

  /** Blocks and the gaps between them in the order of addresses; they fill the segments. `tensor` is -1 for a gap. */
  function cellsOf(memory, { alive, segments }) {
    const { address, bytes } = memory.blocks;
    const size = [], tensor = [], start = [0], edge = [0];
    const add = (length, what) => {
      if (length <= 0) return;
      size.push(length);
      tensor.push(what);
      start.push(start[start.length - 1] + length);
    };
    let next = 0;
    for (const segment of segments) {
      let at = segment.address;
      const end = at + segment.bytes;
      for (; next < alive.length && address[alive[next]] < end; next++) {
        add(address[alive[next]] - at, FREE);
        add(bytes[alive[next]], alive[next]);
        at = address[alive[next]] + bytes[alive[next]];
      }
      add(end - at, FREE);
      edge.push(start[start.length - 1]);
    }
    return { size, tensor, start, edge, segment: segments.map((one) => one.bytes), segments };
  }

  /** The last place whose value is at most `value`. */
  function placeOf(column, value) {
    let low = 0, high = column.length - 1;
    while (low < high) {
      const middle = (low + high + 1) >> 1;
      if (column[middle] <= value) low = middle; else high = middle - 1;
    }
    return low;
  }

  return class Blocks {
    /** `hub.choose(tensor)` is called when a block is chosen, `hub.step(by)` for the moment before or after. */
    constructor(memory, host, hub) {
      Object.assign(this, { memory, host, hub, selected: 0, kinds: null });
      this.build();
      new ResizeObserver(() => this.state && this.draw()).observe(this.canvas);
    }

    add(tag, properties, parent = this.host) {
      return parent.appendChild(Object.assign(document.createElement(tag), properties));
    }

    build() {
      this.canvas = this.add("canvas", { className: "tape", tabIndex: 0 });
      this.canvas.setAttribute("role", "application");
      this.canvas.addEventListener("keydown", (event) => this.key(event));
      this.canvas.addEventListener("click", (event) => this.choose(this.cellAt(event)));
      this.canvas.addEventListener("mousemove", (event) => tip.show(event, this.lines(this.cellAt(event))));
      this.canvas.addEventListener("mouseleave", () => tip.hide());
      this.canvas.addEventListener("focus", () => this.draw());
      this.canvas.addEventListener("blur", () => this.draw());
      this.readout = this.add("div", { className: "readout" });
      this.readout.setAttribute("aria-live", "polite");
      this.legend = this.add("ul", { className: "legend" });
    }

    /** Take another state; `highlight` draws it. */
    show(state, facts) {
      this.state = state;
      this.cells = cellsOf(this.memory, state);
      this.byKind = Map.groupBy(this.cells.size.keys(), (cell) => this.kindOf(cell));
      this.addLegend();
      this.canvas.setAttribute("aria-label",
        `Blocks. ${facts}. Left and right arrows go from block to block, up and down from segment to segment, ` +
        "page up and down to the moment of note before and after, g to the largest gap, Enter chooses a block.");
      this.selected = this.largest((what) => what !== FREE);
    }

    /** Outline the block of a tensor, and let those stand out whose kind is in `kinds`. */
    highlight({ tensor = null, kinds = null }) {
      this.kinds = kinds;
      const place = tensor === null ? -1 : this.cells.tensor.indexOf(tensor);
      this.point(place < 0 ? this.selected : place);
    }

    get free() {
      const { size, tensor } = this.cells;
      let total = 0, largest = 0;
      for (let i = 0; i < size.length; i++) if (tensor[i] === FREE) { total += size[i]; largest = Math.max(largest, size[i]); }
      return { total, largest };
    }

    /** The largest cell of those whose tensor (or FREE) `wanted` takes; 0 where there is none. */
    largest(wanted) {
      const { size, tensor } = this.cells;
      let best = -1;
      for (let i = 0; i < size.length; i++) if (wanted(tensor[i]) && (best < 0 || size[i] > size[best])) best = i;
      return Math.max(best, 0);
    }

    largestGap() { this.point(this.largest((what) => what === FREE)); }

    /** A category, FREE or PENDING. */
    kindOf(cell) {
      const tensor = this.cells.tensor[cell], { blocks, kinds } = this.memory;
      if (tensor === FREE) return FREE;
      return blocks.freed[tensor] <= this.state.event ? PENDING : kinds.category[blocks.kind[tensor]];
    }

    addLegend() {
      this.legend.replaceChildren();
      const entry = (kind, name, bytes) => {
        const item = this.add("li", {}, this.legend);
        this.add("i", { className: `swatch ${kind}` }, item);
        item.append(`${words(name)} ${bytesText(bytes)}`);
      };
      const { sums, active, allocated } = this.state;
      this.memory.categories
        .map((name, i) => [name, sums[i]])
        .filter(([, bytes]) => bytes)
        .sort((a, b) => b[1] - a[1])
        .forEach(([name, bytes]) => entry(`c-${name}`, name, bytes));
      if (active > allocated) entry("pending", "waiting for a stream", active - allocated);
      entry("free", "free", this.free.total);
    }

    // The tape: `perRow` bytes a row.

    width() { return Math.max(240, root.dataset.print === undefined ? this.canvas.clientWidth : 690); }
    rows() { return narrow() ? 24 : 18; }

    layout() {
      const { start } = this.cells;
      const total = start[start.length - 1] || 1;
      return { total, rows: this.rows(), perRow: total / this.rows(), width: this.width() };
    }

    /** Rectangles (x, row, width) of the bytes from `from` to `to`. */
    *pieces(from, to, { perRow, width, rows }) {
      for (let row = Math.min(rows - 1, Math.floor(from / perRow)); row < rows && row * perRow < to; row++) {
        const left = Math.max(from, row * perRow), right = Math.min(to, (row + 1) * perRow);
        if (right > left) yield [((left - row * perRow) / perRow) * width, row, ((right - left) / perRow) * width];
      }
    }

    draw() {
      const plan = this.layout(), { rows, width } = plan;
      const ratio = devicePixelRatio || 1, height = rows * (ROW + SPACE);
      const { canvas } = this, context = canvas.getContext("2d");
      if (root.dataset.print !== undefined) canvas.style.width = `${width}px`; else canvas.style.width = "";
      canvas.width = Math.round(width * ratio);
      canvas.height = Math.round(height * ratio);
      canvas.style.height = `${height}px`;
      context.scale(ratio, ratio);
      const { size, start, edge, segment } = this.cells, colour = this.colours();
      for (const [kind, cells] of this.byKind) {
        context.fillStyle = kind === FREE ? colour.free : kind === PENDING ? colour.pending : colour.categories[kind];
        for (const i of cells) this.drawCell(context, i, plan);
      }
      context.globalAlpha = 1;
      context.strokeStyle = colour.ink;
      context.lineWidth = 1;
      for (let i = 0; i < segment.length; i++) this.outline(context, edge[i], edge[i + 1], plan, 0);
      if (this.selected < size.length) {
        context.strokeStyle = colour.ink;
        context.lineWidth = 3;
        this.outline(context, start[this.selected], start[this.selected + 1], plan, 1, colour.page);
      }
      canvas.dataset.moment = this.state.event;
      canvas.dataset.blocks = size.length;
    }

    colours() {
      const style = getComputedStyle(root), of = (name) => style.getPropertyValue(`--${name}`).trim();
      const categories = this.memory.categories.map((name) => of(`c-${name}`) || of("c-unknown"));
      return { categories, free: of("free"), pending: of("pending"), page: of("page"), ink: of("ink") };
    }

    /** A block or gap; what is not of the chosen kinds is faint. */
    drawCell(context, i, { perRow, width, rows }) {
      const { size, start, tensor } = this.cells;
      if (size[i] * width < perRow * 0.15 && i % 8) return; // invisible, one in eight stands for the rest
      if (this.kinds) context.globalAlpha = tensor[i] >= 0 && !this.kinds.has(this.memory.blocks.kind[tensor[i]]) ? 0.2 : 1;
      for (let row = Math.min(rows - 1, Math.floor(start[i] / perRow)); row < rows && row * perRow < start[i + 1]; row++) {
        const left = (Math.max(start[i] - row * perRow, 0) / perRow) * width, right = Math.min((start[i + 1] - row * perRow) / perRow, 1) * width;
        const wide = right - left;
        context.fillRect(left, row * (ROW + SPACE) + 1, wide > 3 ? wide - 0.5 : Math.max(wide, 0.3), ROW - 2);
      }
    }

    /** The edge of a range of bytes; it stays open where the range goes on in another row. */
    outline(context, from, to, plan, grow, halo) {
      for (const [x, row, wide] of this.pieces(from, to, plan)) {
        const top = row * (ROW + SPACE) + 0.5 - grow, bottom = top + ROW - 1 + 2 * grow;
        const least = halo ? Math.max(wide, 4) : wide;
        if (!halo && wide < 4) { // only a tick: its frame would hide it
          context.globalAlpha = 0.5;
          context.beginPath();
          context.moveTo(x, top);
          context.lineTo(x, bottom);
          context.lineWidth = 0.5;
          context.stroke();
          context.lineWidth = 1;
          context.globalAlpha = 1;
          continue;
        }
        const starts = row * plan.perRow <= from, ends = (row + 1) * plan.perRow >= to;
        context.beginPath();
        if (starts) { context.moveTo(x, bottom); context.lineTo(x, top); } else context.moveTo(x, top);
        context.lineTo(x + least, top);
        if (ends) context.lineTo(x + least, bottom); else context.moveTo(x + least, bottom);
        context.lineTo(x, bottom);
        if (halo) {
          const { strokeStyle, lineWidth } = context;
          context.strokeStyle = halo;
          context.lineWidth = 5;
          context.stroke();
          context.strokeStyle = strokeStyle;
          context.lineWidth = lineWidth - 1;
        }
        context.stroke();
      }
    }

    // The cursor

    /** What there is to say of a cell, line by line. */
    lines(cell) {
      const { size, start, tensor, edge, segment, segments } = this.cells;
      if (!size.length) return ["Nothing is reserved."];
      const holder = Math.min(placeOf(edge, start[cell]), segment.length - 1);
      const { expandable, stream } = segments[holder];
      const where = [
        `at +${bytesText(start[cell] - edge[holder])} of segment ${countText(holder + 1)} of ${countText(segment.length)}`,
        `${expandable ? "expandable, " : ""}${bytesText(segment[holder])}, stream ${stream}`,
      ];
      return tensor[cell] === FREE ? ["Free", bytesText(size[cell]), ...where] : [...this.hub.describe(tensor[cell]), ...where];
    }

    point(place) {
      const { size } = this.cells;
      this.selected = Math.min(Math.max(place, 0), Math.max(0, size.length - 1));
      this.readout.textContent = this.lines(this.selected).join(" · ");
      this.draw();
    }

    choose(cell) {
      this.point(cell);
      const tensor = this.cells.tensor[this.selected];
      this.hub.choose(tensor === undefined || tensor === FREE ? null : tensor);
    }

    /** The first block of the segment before or after this one. */
    segmentStep(step) {
      const { start, edge, segment } = this.cells;
      if (!segment.length) return;
      const holder = placeOf(edge, start[this.selected]) + step;
      this.point(placeOf(start, edge[Math.min(Math.max(holder, 0), segment.length - 1)]));
    }

    cellAt({ offsetX, offsetY }) {
      const { perRow, width, rows, total } = this.layout();
      const row = Math.min(rows - 1, Math.floor(offsetY / (ROW + SPACE)));
      return Math.min(placeOf(this.cells.start, Math.min((row + offsetX / width) * perRow, total - 1)), Math.max(0, this.cells.size.length - 1));
    }

    key(event) {
      if (event.ctrlKey || event.metaKey || event.altKey) return;
      const acts = {
        ArrowLeft: () => this.point(this.selected - 1),
        ArrowRight: () => this.point(this.selected + 1),
        ArrowUp: () => this.segmentStep(-1),
        ArrowDown: () => this.segmentStep(1),
        Home: () => this.point(0),
        End: () => this.point(Infinity),
        PageUp: () => this.hub.step(-1),
        PageDown: () => this.hub.step(1),
        Enter: () => this.choose(this.selected),
        g: () => this.largestGap(),
      };
      const act = acts[event.key];
      if (act) { event.preventDefault(); act(); }
    }
  };
};
