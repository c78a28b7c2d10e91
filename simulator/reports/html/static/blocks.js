// Draws the allocator at chosen moments for the page of `simulator/html.py`: the segments one after the other as a
// tape in rows, their blocks coloured by category, free gaps left open. `page.js` calls it with what it shares.
"use strict";
globalThis.memoryBlocks = (shared) => {
  const { unpack, bytesText, countText, root, narrow } = shared;
  const FREE = -1, PENDING = -2;
  const ROW = 20, SPACE = 5;

  /** One moment's columns, unpacked once: blocks and gaps fill the segments in the order of addresses. */
  function decode(moment) {
    if (moment.columns) return moment.columns;
    const { segments, blocks } = moment;
    const size = unpack(blocks.bytes, blocks.count, blocks.unit);
    const start = new Float64Array(blocks.count + 1);
    for (let i = 0; i < blocks.count; i++) start[i + 1] = start[i] + size[i];
    const segment = unpack(segments.bytes, segments.count);
    const edge = new Float64Array(segments.count + 1);
    for (let i = 0; i < segments.count; i++) edge[i + 1] = edge[i] + segment[i];
    moment.columns = {
      size, start, edge, segment,
      kind: unpack(blocks.kind, blocks.count), name: unpack(blocks.name, blocks.count),
      merged: unpack(blocks.merged, blocks.count),
      stream: unpack(segments.stream, segments.count), expandable: unpack(segments.expandable, segments.count),
    };
    return moment.columns;
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

  const words = (name) => name.replaceAll("_", " ");

  return class Blocks {
    /** `chosen(moment)` is called when another moment is shown. */
    constructor(rank, section, chosen) {
      this.rank = rank;
      this.all = rank.moments;
      this.chosen = chosen;
      this.host = section.querySelector(".moments");
      this.host.replaceChildren();
      this.selected = 0;
      const top = this.all.list.findIndex((moment) => moment.labels.includes("peak allocated"));
      this.index = Math.max(0, top);
      this.build();
      this.show(this.index);
      new ResizeObserver(() => this.draw()).observe(this.canvas);
    }

    add(tag, properties, parent = this.host) {
      return parent.appendChild(Object.assign(document.createElement(tag), properties));
    }

    build() {
      this.add("h3", { textContent: "The allocator's segments and blocks" });
      const tools = this.add("div", { className: "tools" });
      const label = this.add("label", { textContent: "Moment " }, tools);
      this.select = this.add("select", {}, label);
      this.all.list.forEach((moment, i) => this.select.append(new Option(this.title(moment), i)));
      this.select.addEventListener("change", () => this.show(Number(this.select.value)));
      const button = (text, title, act) => {
        const element = this.add("button", { type: "button", textContent: text, title }, tools);
        element.setAttribute("aria-label", title);
        element.addEventListener("click", act);
      };
      button("◀", "Earlier moment", () => this.show(this.index - 1));
      button("▶", "Later moment", () => this.show(this.index + 1));
      button("Largest gap", "Go to the largest free piece", () => this.largestGap());
      this.facts = this.add("p", { className: "facts" });
      this.canvas = this.add("canvas", { className: "tape", tabIndex: 0 });
      this.canvas.setAttribute("role", "application");
      this.canvas.addEventListener("keydown", (event) => this.key(event));
      this.canvas.addEventListener("click", (event) => this.click(event));
      this.canvas.addEventListener("focus", () => this.draw());
      this.canvas.addEventListener("blur", () => this.draw());
      this.readout = this.add("div", { className: "readout" });
      this.readout.setAttribute("aria-live", "polite");
      this.legend = this.add("ul", { className: "legend" });
    }

    title(moment) {
      return `${moment.labels.join(", ")} (event ${countText(moment.event)})`;
    }

    get moment() { return this.all.list[this.index]; }

    show(index) {
      this.index = Math.min(Math.max(index, 0), this.all.list.length - 1);
      const moment = this.moment, { size, kind, segment } = decode(moment);
      this.select.value = this.index;
      let free = 0, largest = 0;
      for (let i = 0; i < size.length; i++) if (kind[i] === FREE) { free += size[i]; largest = Math.max(largest, size[i]); }
      const parts = [
        `At the ${moment.labels.join(", ")}, event ${countText(moment.event)}`,
        moment.phase && `phase ${moment.phase}`,
        `allocated ${bytesText(moment.allocated)}`,
        moment.active > moment.allocated && `waiting for a stream ${bytesText(moment.active - moment.allocated)}`,
        `reserved ${bytesText(moment.reserved)} in ${countText(segment.length)} segments`,
        `free in them ${bytesText(free)}, the largest piece ${bytesText(largest)}`,
      ];
      this.facts.textContent = parts.filter(Boolean).join(" · ");
      this.addLegend(free);
      this.canvas.setAttribute("aria-label",
        `Blocks. ${this.facts.textContent}. Left and right arrows go from block to block, ` +
        "up and down from segment to segment, page up and down to the moment before and after, g to the largest gap.");
      this.point(this.firstOfNote());
      this.chosen(moment);
    }

    /** The largest block: where the cursor starts. */
    firstOfNote() {
      const { size, kind } = decode(this.moment);
      let best = 0;
      for (let i = 1; i < size.length; i++) if (kind[i] !== FREE && (kind[best] === FREE || size[i] > size[best])) best = i;
      return best;
    }

    largestGap() {
      const { size, kind } = decode(this.moment);
      let best = -1;
      for (let i = 0; i < size.length; i++) if (kind[i] === FREE && (best < 0 || size[i] > size[best])) best = i;
      if (best >= 0) this.point(best);
    }

    addLegend(free) {
      this.legend.replaceChildren();
      const entry = (kind, name, bytes) => {
        const item = this.add("li", {}, this.legend);
        this.add("i", { className: `swatch ${kind}` }, item);
        item.append(`${words(name)} ${bytesText(bytes)}`);
      };
      this.all.categories
        .map((name, i) => [name, this.moment.byCategory[i]])
        .filter(([, bytes]) => bytes)
        .sort((a, b) => b[1] - a[1])
        .forEach(([name, bytes]) => entry(`c-${name}`, name, bytes));
      if (this.moment.active > this.moment.allocated) entry("pending", "waiting for a stream", this.moment.active - this.moment.allocated);
      entry("free", "free", free);
    }

    // The tape: `perRow` bytes a row.

    width() { return Math.max(240, root.dataset.print === undefined ? this.canvas.clientWidth : 690); }
    rows() { return narrow() ? 24 : 18; }

    layout() {
      const { start } = decode(this.moment);
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
      const style = getComputedStyle(root), of = (name) => style.getPropertyValue(`--${name}`).trim();
      const { size, start, kind, edge, segment } = decode(this.moment);
      const paint = this.all.categories.map((name) => of(`c-${name}`) || of("c-unknown"));
      const open = of("free"), waits = of("pending"), page = of("page"), ink = of("ink");
      for (let i = 0; i < size.length; i++) {
        context.fillStyle = kind[i] === FREE ? open : kind[i] === PENDING ? waits : paint[kind[i]];
        for (const [x, row, wide] of this.pieces(start[i], start[i + 1], plan)) {
          context.fillRect(x, row * (ROW + SPACE) + 1, Math.max(wide, 0.3), ROW - 2);
          if (wide > 3) { // a thin edge tells neighbours apart
            context.fillStyle = page;
            context.globalAlpha = 0.55;
            context.fillRect(x + wide - 0.7, row * (ROW + SPACE) + 1, 0.7, ROW - 2);
            context.globalAlpha = 1;
            context.fillStyle = kind[i] === FREE ? open : kind[i] === PENDING ? waits : paint[kind[i]];
          }
        }
      }
      context.strokeStyle = ink;
      context.lineWidth = 1;
      for (let i = 0; i < segment.length; i++) this.outline(context, edge[i], edge[i + 1], plan, 0);
      if (this.selected < size.length) {
        context.strokeStyle = ink;
        context.lineWidth = 3;
        this.outline(context, start[this.selected], start[this.selected + 1], plan, 1, page);
      }
      canvas.dataset.moment = this.index;
      canvas.dataset.blocks = size.length;
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

    point(place) {
      const { size, start, kind, name, merged, edge, segment, stream, expandable } = decode(this.moment);
      if (!size.length) {
        this.readout.textContent = "Nothing is reserved.";
        this.draw();
        return;
      }
      this.selected = Math.min(Math.max(place, 0), size.length - 1);
      const at = this.selected, holder = Math.min(placeOf(edge, start[at]), segment.length - 1);
      const what = kind[at] === FREE ? "free" : kind[at] === PENDING ? "freed, waits for another stream" : words(this.all.categories[kind[at]]);
      const many = merged[at] > 1 ? `${countText(merged[at])} small blocks, the first ${what}` : what;
      const parts = [
        name[at] >= 0 ? `${this.all.names[name[at]]} (${many})` : many[0].toUpperCase() + many.slice(1),
        bytesText(size[at]),
        `at +${bytesText(start[at] - edge[holder])} of segment ${countText(holder + 1)} of ${countText(segment.length)}`,
        `${expandable[holder] ? "expandable, " : ""}${bytesText(segment[holder])}, stream ${stream[holder]}`,
      ];
      this.readout.textContent = parts.join(" · ");
      this.draw();
    }

    /** The first block of the segment before or after this one. */
    segmentStep(step) {
      const { start, edge, segment } = decode(this.moment);
      if (!segment.length) return;
      const holder = placeOf(edge, start[this.selected]) + step;
      this.point(placeOf(start, edge[Math.min(Math.max(holder, 0), segment.length - 1)]));
    }

    click({ offsetX, offsetY }) {
      const { perRow, width, rows, total } = this.layout();
      const row = Math.min(rows - 1, Math.floor(offsetY / (ROW + SPACE)));
      this.point(placeOf(decode(this.moment).start, Math.min((row + offsetX / width) * perRow, total - 1)));
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
        PageUp: () => this.show(this.index - 1),
        PageDown: () => this.show(this.index + 1),
        g: () => this.largestGap(),
      };
      const act = acts[event.key];
      if (act) { event.preventDefault(); act(); }
    }

    /** Show the moment nearest to an event. */
    nearest(event) {
      let best = 0;
      this.all.list.forEach((moment, i, list) => {
        if (Math.abs(moment.event - event) < Math.abs(list[best].event - event)) best = i;
      });
      this.show(best);
    }
  };
};
