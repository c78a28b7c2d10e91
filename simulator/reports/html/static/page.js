// Draws memory over time for the page of `simulator/reports/html/page.py`: reads the packed series of every rank, thins
// the part in view to what the screen can show (lows and highs of every column of pixels are kept), and hands it to
// uPlot. `moment.js` draws below it what stood after the event that is chosen.
"use strict";
(() => {
  const root = document.documentElement;
  const note = (message) => { root.dataset.errors = `${root.dataset.errors ?? ""}${message}\n`; };
  addEventListener("error", (event) => note(event.message));
  addEventListener("securitypolicyviolation", (event) => note(`blocked: ${event.violatedDirective}`));

  const { ranks, chooser } = JSON.parse(document.getElementById("data").textContent);
  const sections = [...document.querySelectorAll(".rank")];
  const narrow = () => innerWidth <= 600;

  // Numbers ----------------------------------------------------------------------------------------------------------

  /** The columns that `series.pack` wrote: base64 of varints of zigzag-coded differences. */
  function unpack(text, count, unit = 1) {
    const bytes = atob(text);
    const values = new Float64Array(count);
    let at = 0, sum = 0;
    for (let i = 0; i < count; i++) {
      let code = 0, scale = 1, byte;
      do {
        byte = bytes.charCodeAt(at++);
        code += (byte & 127) * scale;
        scale *= 128;
      } while (byte > 127);
      sum += code % 2 ? -(code + 1) / 2 : code / 2;
      values[i] = sum * unit;
    }
    return values;
  }

  /** One rank's columns; the last point is repeated at the end of the trace, so that every step has a width. */
  function decode(rank) {
    if (rank.columns) return rank.columns;
    const { points, unit, events } = rank;
    const event = unpack(rank.event, points);
    const allocated = unpack(rank.allocated, points, unit);
    const above = unpack(rank.above, points, unit);
    const reserved = unpack(rank.reserved, points, unit);
    const time = rank.time === null ? null : unpack(rank.time, points);
    const extend = (column, end) => {
      const longer = new Float64Array(points ? points + 1 : 0).fill(end);
      longer.set(column);
      return longer;
    };
    const held = rank.categories.map(({ name, unit: one, bytes }) => {
      const values = unpack(bytes, points, one);
      return { name, values: extend(values, points ? values[points - 1] : 0) };
    });
    let below = null; // each stands on those before it
    for (const one of held) {
      one.top = below ? one.values.map((value, i) => value + below[i]) : one.values;
      below = one.top;
    }
    const last = (column) => (points ? column[points - 1] : 0);
    const { count } = rank.phases;
    const phase = Object.fromEntries(["name", "step", "start", "stop"].map((key) => [key, unpack(rank.phases[key], count)]));
    rank.columns = {
      event: extend(event, events),
      time: time && extend(time, last(time)),
      allocated: extend(allocated, last(allocated)),
      active: extend(above.map((value, i) => value + allocated[i]), last(allocated) + last(above)),
      reserved: extend(reserved, last(reserved)),
      held,
      regions: regionsOf(rank.regions),
      phases: Array.from({ length: count }, (_, i) => ({
        name: rank.names[phase.name[i]], step: phase.step[i], start: phase.start[i], stop: phase.stop[i],
      })),
    };
    return rank.columns;
  }

  function regionsOf({ count, names, ...packed }) {
    const columns = Object.fromEntries(Object.entries(packed).map(([key, text]) => [key, unpack(text, count)]));
    return Array.from({ length: count }, (_, i) => ({
      name: names[columns.name[i]], start: columns.start[i], stop: columns.stop[i], depth: columns.depth[i],
    }));
  }

  /** The first place in a sorted column whose value is at least `value`. */
  function lowerBound(column, value) {
    let low = 0, high = column.length;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (column[middle] < value) low = middle + 1; else high = middle;
    }
    return low;
  }

  function bytesText(count, digits = 2) {
    if (Math.abs(count) < 1024) return `${count} B`;
    const units = ["KiB", "MiB", "GiB", "TiB", "PiB", "EiB"];
    let power = 0;
    do { count /= 1024; power++; } while (Math.abs(count) >= 1024 && power < units.length);
    return `${count.toFixed(digits)} ${units[power - 1]}`;
  }

  /** Labels of an axis: all in the unit of the largest tick, with as few digits as tell them apart. */
  function labels(ticks, units) {
    const most = Math.max(...ticks.map(Math.abs), 0);
    const [unit, scale] = units.findLast(([, size]) => size <= most) ?? units[0];
    const values = ticks.map((tick) => tick / scale);
    const digits = [0, 1, 2, 3].find((count) => values.every((value) => Math.abs(value - value.toFixed(count)) < 1e-9));
    if (digits === undefined && units === COUNT_UNITS) return ticks.map(countText);
    return values.map((value) => (value ? `${value.toFixed(digits ?? 4)}${unit}` : "0"));
  }

  const BYTE_UNITS = [" B", " KiB", " MiB", " GiB", " TiB", " PiB", " EiB"].map((unit, i) => [unit, 1024 ** i]);
  const COUNT_UNITS = [["", 1], ["k", 1e3], ["M", 1e6]];
  const TIME_UNITS = [[" ns", 1], [" µs", 1e3], [" ms", 1e6], [" s", 1e9]];

  const countText = (count) => count.toLocaleString("en-US");

  const STEPS = Array.from({ length: 54 }, (_, i) => [1, 2, 5][i % 3] * 10 ** (Math.floor(i / 3) - 2));

  function timeText(ns) {
    const [unit, scale] = TIME_UNITS.findLast(([, size]) => size <= ns) ?? TIME_UNITS[0];
    return `${+(ns / scale).toFixed(3)}${unit}`;
  }

  const words = (name) => name.replaceAll("_", " ");

  const DEEPEST_REGION = 3; // drawn; the words have all
  const phaseText = (phase) => (phase.step < 0 ? phase.name : `${phase.name} · step ${phase.step}`);

  // Colours ----------------------------------------------------------------------------------------------------------

  function colours() {
    const style = getComputedStyle(root);
    const names = ["page", "ink", "soft", "line", "band", "allocated", "active", "reserved", "limit", "oom", "c-unknown"];
    return Object.fromEntries(names.map((name) => [name, style.getPropertyValue(`--${name}`).trim()]));
  }

  /** The order of the stack from the bottom: what stays longest lies lowest. */
  const STACK = ["parameter", "buffer", "optimizer_state", "gradient", "input", "workspace", "communication", "activation", "temporary", "unknown"];
  const height = (name) => (STACK.indexOf(name) + STACK.length + 1) % (STACK.length + 1);
  ranks.forEach((rank) => rank.categories.sort((a, b) => height(a.name) - height(b.name)));

  /** The box at the pointer: one line of text a line. */
  const tip = {
    box: document.body.appendChild(Object.assign(document.createElement("div"), { className: "tip", hidden: true, role: "tooltip" })),
    show({ clientX, clientY }, lines) {
      this.box.replaceChildren(...lines.filter(Boolean).map((text) => Object.assign(document.createElement("div"), { textContent: text })));
      this.box.hidden = false;
      const { offsetWidth: wide, offsetHeight: high } = this.box;
      this.box.style.left = `${Math.max(4, Math.min(clientX + 14, document.documentElement.clientWidth - wide - 4))}px`;
      this.box.style.top = `${clientY + 18 + high > innerHeight ? Math.max(4, clientY - high - 10) : clientY + 18}px`;
    },
    hide() { this.box.hidden = true; },
  };

  // One plot ---------------------------------------------------------------------------------------------------------

  /** Pixels of the axis below and of the room for labels above what is drawn. */
  const AXIS = 44, ROOM = 66;
  /** So many events in view are drawn one by one. */
  const CLOSE = 5000;
  const FONT = '12px system-ui, "Segoe UI", sans-serif';

  class Plot {
    constructor(rank, section) {
      this.rank = rank;
      this.full = this.columns = decode(rank);
      this.memory = null; // what knows every event, once it is read
      this.byTime = false;
      this.fitHeight = false;
      this.byCategory = this.columns.held.length > 0;
      this.demand = rank.demand && decode(rank.demand);
      this.waits = !this.byCategory || this.columns.active.some((value, i) => value > this.columns.allocated[i]);
      this.moment = null; // the event that is shown below
      this.notable = []; // events of note
      this.life = null; // born, died and colour of the chosen tensor
      this.showLimit = rank.peakReserved.bytes >= rank.limit / 4;
      this.cursor = null; // place in the columns
      this.host = section.querySelector(".plot");
      this.host.replaceChildren();
      this.addTools();
      this.canvas = this.add("div", { className: "canvas", tabIndex: 0 });
      this.canvas.setAttribute("role", "application");
      this.canvas.setAttribute("aria-label",
        `Memory over time of ${rank.label}: ${rank.peak.text} allocated and ${rank.peakReserved.text} reserved at most. ` +
        "Arrow keys move the cursor, plus and minus zoom, 0 shows all, p goes to the peak, Enter shows what stands at the cursor, comma and full stop the event before and after.");
      this.canvas.addEventListener("keydown", (event) => this.key(event));
      this.readout = this.add("div", { className: "readout" });
      this.readout.setAttribute("aria-live", "polite");
      this.legend = this.add("ul", { className: "legend" });
      this.reset();
      this.build();
      new ResizeObserver(() => this.resize()).observe(this.canvas);
    }

    add(tag, properties, parent = this.host) {
      return parent.appendChild(Object.assign(document.createElement(tag), properties));
    }

    addTools() {
      const tools = this.add("div", { className: "tools" });
      const button = (text, title, act) => {
        const element = this.add("button", { type: "button", textContent: text, title }, tools);
        element.setAttribute("aria-label", title);
        element.addEventListener("click", act);
      };
      button("−", "Zoom out", () => this.zoom(2));
      button("+", "Zoom in", () => this.zoom(0.5));
      button("◀", "Earlier", () => this.pan(-0.5));
      button("▶", "Later", () => this.pan(0.5));
      button("All", "Show all", () => this.reset());
      button("Peak", "Go to the peak", () => this.toPeak());
      const box = (text, key) => {
        const label = this.add("label", {}, tools);
        const input = this.add("input", { type: "checkbox", checked: this[key] }, label);
        input.addEventListener("change", () => { this[key] = input.checked; if (key === "byTime") this.reset(); else if (key === "byCategory") this.build(); else this.refresh(); });
        label.append(text);
      };
      if (this.byCategory) box("by category", "byCategory");
      box("limit", "showLimit");
      box("fit height", "fitHeight");
      if (this.columns.time) box("by time", "byTime");
    }

    addLegend() {
      this.legend.replaceChildren();
      const entry = (name, words, dash, kind) => {
        const item = this.add("li", {}, this.legend);
        const swatch = this.add("i", { className: kind ? `swatch ${kind}` : "" }, item);
        if (!kind) { swatch.style.borderTopStyle = dash; swatch.style.borderTopColor = `var(--${name})`; }
        item.append(words);
      };
      if (this.byCategory) for (const { name } of [...this.columns.held].reverse()) entry(name, words(name), "", `c-${name}`);
      else entry("allocated", "allocated", "solid");
      if (this.waits) entry("active", "active (allocated, or waiting for a stream)", "dotted");
      entry("reserved", "reserved", "solid");
      entry("limit", "device limit", "dashed");
      if (this.demand) {
        entry("oom", "reserved on a GPU without end", "dotted");
        entry("oom", "allocated there", "solid");
      }
    }

    // What is in view

    get x() { return this.byTime ? this.columns.time : this.columns.event; }
    get all() { return this.byTime ? this.full.time : this.full.event; }
    get left() { return this.all[0] ?? 0; }
    get right() {
      const ends = [this.all, this.demand?.[this.byTime ? "time" : "event"]].map((x) => x?.[x.length - 1] ?? 0);
      return Math.max(...ends, this.left + 1);
    }

    /** Close up, where not all events are among the points, take every event of the range and of as much beside it. */
    chooseColumns() {
      const [from, to] = this.range, { events, points } = this.rank, known = this.columns.event;
      const close = this.memory && !this.byTime && points < events && to - from <= CLOSE;
      if (close && this.columns !== this.full && known[0] <= from && known[known.length - 1] >= to) return;
      const event = this.cursor === null ? null : known[this.cursor], wide = to - from;
      this.columns = close ? this.everyEvent(Math.max(0, Math.floor(from - wide)), Math.min(events - 1, Math.ceil(to + wide))) : this.full;
      if (event !== null) this.cursor = Math.max(0, lowerBound(this.columns.event, event + 1) - 1);
    }

    /** Columns as `decode` makes them, of every event from `from` to `to`; the last stands twice, so that it has a width. */
    everyEvent(from, to) {
      const found = this.memory.series(from, to);
      const longer = (column) => Float64Array.from({ length: column.length + 1 }, (_, i) => column[Math.min(i, column.length - 1)]);
      const held = [];
      for (const { name } of this.full.held) {
        const values = longer(found.sums[this.memory.categories.indexOf(name)]), below = held.at(-1)?.top;
        held.push({ name, values, top: below ? values.map((value, i) => value + below[i]) : values });
      }
      const event = Float64Array.from({ length: to - from + 2 }, (_, i) => from + i);
      return { ...this.full, event, time: null, allocated: longer(found.allocated), active: longer(found.active), reserved: longer(found.reserved), held };
    }

    /** The x of an event that is drawn. */
    place(event) {
      if (this.demand && event > this.rank.events) return this.placeWanted(event);
      const at = Math.min(lowerBound(this.columns.event, event), this.x.length - 1);
      return at < 0 ? 0 : this.x[at];
    }

    reset() {
      this.range = [this.left, this.right];
      if (this.plot) this.refresh();
    }

    setRange(from, to) {
      const least = this.byTime ? Math.max(1, (this.right - this.left) / 1e7) : 4;
      const whole = this.right - this.left;
      const width = Math.min(Math.max(to - from, least), whole);
      const middle = (from + to) / 2;
      const start = Math.min(Math.max(middle - width / 2, this.left), this.right - width);
      this.range = [start, start + width];
      this.refresh();
    }

    zoom(factor) {
      const [from, to] = this.range;
      const at = this.cursor === null ? NaN : this.x[this.cursor];
      const pivot = at >= from && at <= to ? at : (from + to) / 2;
      this.setRange(pivot - (pivot - from) * factor, pivot + (to - pivot) * factor);
    }

    pan(share) {
      const width = this.range[1] - this.range[0];
      this.setRange(this.range[0] + share * width, this.range[1] + share * width);
    }

    toPeak() {
      if (!this.x.length) return;
      const { event } = this.rank.peak, x = this.byTime ? this.place(event) : Math.max(0, event);
      const width = Math.min(this.range[1] - this.range[0], (this.right - this.left) / 20);
      this.setRange(x - width / 2, x + width / 2);
      this.moveTo(Math.min(lowerBound(this.columns.event, event), this.x.length - 1));
    }

    /** Places in the columns to draw: the lows and highs of every one of `buckets` stretches of the range. */
    visible(buckets) {
      const { allocated, reserved, active } = this.columns;
      const x = this.x, [from, to] = this.range;
      const first = Math.max(lowerBound(x, from) - 1, 0);
      const stop = Math.min(lowerBound(x, to) + 2, x.length);
      if (stop - first <= buckets * 4) return Array.from({ length: stop - first }, (_, i) => first + i);
      const places = [];
      const width = (to - from) / buckets;
      for (let at = first; at < stop;) {
        const bucket = Math.floor((x[at] - from) / width);
        const picks = new Set([at]);
        let lowA = at, highA = at, lowR = at, highR = at, highV = at, end = at;
        for (; end < stop && Math.floor((x[end] - from) / width) === bucket; end++) {
          if (allocated[end] < allocated[lowA]) lowA = end;
          if (allocated[end] > allocated[highA]) highA = end;
          if (reserved[end] < reserved[lowR]) lowR = end;
          if (reserved[end] > reserved[highR]) highR = end;
          if (active[end] > active[highV]) highV = end;
        }
        for (const pick of [lowA, highA, lowR, highR, highV, end - 1]) picks.add(pick);
        places.push(...[...picks].sort((a, b) => a - b));
        at = end;
      }
      return places;
    }

    /** Least and most bytes of the axis: above all that is drawn lies room for the labels. */
    heights() {
      const { allocated, reserved } = this.columns;
      const { limit, peakReserved } = this.rank;
      const most = this.demand ? this.rank.demand.peak : 0;
      let low = 0, high = Math.max(peakReserved.bytes, this.showLimit ? limit : 0, most, 1024);
      if (this.fitHeight && this.places.length) {
        [low, high] = [Infinity, 0];
        for (const at of this.places) { low = Math.min(low, allocated[at]); high = Math.max(high, reserved[at]); }
        low = Math.max(0, low - Math.max(high - low, 1024) * 0.12);
      }
      const whole = this.height() - AXIS;
      return [low, low + Math.max(high - low, 1024) * (whole / (whole - ROOM))];
    }

    data() {
      this.chooseColumns();
      const { allocated, active, reserved } = this.columns;
      this.places = this.visible(Math.max(200, Math.min(2000, Math.round(this.width()))));
      const column = (values) => this.places.map((at) => values[at]);
      const areas = this.byCategory ? [...this.columns.held].reverse().map(({ top }) => column(top)) : [];
      return [column(this.x), column(reserved), ...areas, column(active), column(allocated)];
    }

    // Drawing

    width() { return Math.max(240, root.dataset.print === undefined ? this.canvas.clientWidth : 690); }
    height() { return narrow() ? 300 : 380; }

    build() {
      this.plot?.destroy();
      const colour = (this.colour = colours());
      const stepped = uPlot.paths.stepped({ align: 1 });
      const axis = { stroke: colour.soft, grid: { stroke: colour.line, width: 1 }, ticks: { stroke: colour.line, width: 1 }, font: FONT };
      const data = this.data();
      const style = getComputedStyle(root);
      const areas = this.byCategory ? [...this.columns.held].reverse() : [];
      this.addLegend();
      this.plot = new uPlot({
        width: this.width(), height: this.height(), legend: { show: false }, padding: [8, 22, 0, 0],
        scales: {
          x: { time: false, auto: false, range: () => this.range },
          y: { auto: false, range: () => this.heights() },
        },
        axes: [
          {
            ...axis, size: 36, space: 76,
            incrs: () => (this.byTime ? STEPS : STEPS.filter(Number.isInteger)),
            values: (_, ticks) => labels(ticks, this.byTime ? TIME_UNITS : COUNT_UNITS),
          },
          {
            ...axis, size: (_, texts) => 24 + 7 * Math.max(5, ...(texts ?? []).map((text) => text.length)), incrs: Array.from({ length: 60 }, (_, i) => 2 ** i),
            values: (_, ticks) => labels(ticks, BYTE_UNITS),
          },
        ],
        series: [
          {},
          { stroke: colour.reserved, fill: `${colour.reserved}1f`, width: 1.5, paths: stepped, points: { show: false } },
          ...areas.map(({ name }) => ({
            fill: style.getPropertyValue(`--c-${name}`).trim() || colour["c-unknown"], width: 0, paths: stepped, points: { show: false },
          })),
          { show: this.waits, stroke: colour.active, dash: [2, 3], width: 1.5, paths: stepped, points: { show: false } },
          { stroke: areas.length ? colour.ink : colour.allocated, fill: areas.length ? undefined : `${colour.allocated}59`, width: areas.length ? 1 : 1.5, paths: stepped, points: { show: false } },
        ],
        cursor: {
          drag: { x: true, y: false, setScale: false, click: () => {} }, // `dragged` tells a click from a drag
          dataIdx: (plot, _, near, x) => (near > 0 && plot.data[0][near] > x ? near - 1 : near), // values hold until the next event
          bind: {
            dblclick: () => () => { this.reset(); return null; },
            mousedown: (_, __, select) => (event) => (this.whole || event.shiftKey ? select(event) : this.drag(event)),
          },
        },
        hooks: {
          drawClear: [() => this.drawBands(), () => this.drawDemand()],
          draw: [() => this.drawMarks(), () => this.drawRegions()],
          setSelect: [(plot) => this.select(plot)],
        },
      }, data, this.canvas);
      this.listen(this.plot.over);
      this.momentLine = this.add("div", { className: "moment-line" }, this.plot.over);
      this.lifeBar = this.add("div", { className: "life-bar" }, this.plot.over);
      this.placeMarks();
      this.point(this.cursor ?? Math.min(lowerBound(this.columns.event, this.rank.peak.event), this.x.length - 1));
      this.mark(data);
    }

    /** What the mouse does over the plot. */
    listen(over) {
      over.addEventListener("click", ({ offsetX }) => { if (!this.dragged) this.pick?.(this.eventAt(offsetX)); });
      over.addEventListener("mousemove", (event) => {
        const x = this.plot.posToVal(event.offsetX, "x");
        this.point(this.places[this.places.findLastIndex((at) => this.x[at] <= x)]);
        tip.show(event, this.readout.textContent.split(" · "));
      });
      over.addEventListener("mouseleave", () => tip.hide());
      over.addEventListener("wheel", (event) => this.wheel(event), { passive: false });
    }

    get whole() { return this.range[1] - this.range[0] >= this.right - this.left; }

    /** The event at a place of the plot: any, not only those that are drawn. */
    eventAt(offset) {
      const x = this.plot.posToVal(offset, "x");
      if (!this.byTime) return Math.min(Math.max(Math.floor(x), 0), this.rank.events - 1);
      return this.columns.event[Math.max(0, lowerBound(this.x, x) - 1)];
    }

    /** Zoom around the pointer; sideways, or with Shift, move along. */
    wheel(event) {
      const along = event.deltaX || (event.shiftKey ? event.deltaY : 0);
      if (!along && this.whole && event.deltaY > 0) return; // nothing to zoom out: the page scrolls
      event.preventDefault();
      if (along) return this.pan(along / 1000);
      const factor = Math.exp(Math.min(Math.max(event.deltaY, -200), 200) / 400), [from, to] = this.range;
      const pivot = this.plot.posToVal(event.offsetX, "x");
      this.setRange(pivot - (pivot - from) * factor, pivot + (to - pivot) * factor);
    }

    /** Move along while the button is held. */
    drag({ clientX, button }) {
      if (button) return;
      const [from, to] = this.range, each = (to - from) / this.plot.over.clientWidth;
      this.dragged = false;
      const move = (event) => {
        const by = (clientX - event.clientX) * each;
        this.dragged ||= Math.abs(clientX - event.clientX) > 3;
        if (this.dragged) this.setRange(from + by, to + by);
      };
      addEventListener("mousemove", move);
      addEventListener("mouseup", () => { removeEventListener("mousemove", move); setTimeout(() => { this.dragged = false; }); }, { once: true });
    }

    refresh() {
      const data = this.data();
      const [low, high] = this.heights();
      this.plot.batch(() => {
        this.plot.setData(data, false);
        this.plot.setScale("y", { min: low, max: high });
        this.plot.setScale("x", { min: this.range[0], max: this.range[1] });
      });
      this.moveLine();
      this.placeMarks();
      this.mark(data);
    }

    /** Says on the page what is drawn, for tests and for the curious. */
    mark(data) {
      this.canvas.dataset.drawn = data[0].length;
      this.canvas.dataset.from = this.range[0];
      this.canvas.dataset.to = this.range[1];
    }

    resize() {
      if (!this.canvas.clientWidth || this.width() === this.plot.width) return;
      this.plot.setSize({ width: this.width(), height: this.height() });
      this.refresh();
    }

    select(plot) {
      const { left, width } = plot.select;
      if (width < 4) return;
      this.dragged = true;
      setTimeout(() => { this.dragged = false; });
      plot.setSelect({ left: 0, top: 0, width: 0, height: 0 }, false);
      this.setRange(plot.posToVal(left, "x"), plot.posToVal(left + width, "x"));
    }

    /** Run `draw` with the canvas scaled to CSS pixels and clipped to the plot's area, and `below` pixels more. */
    paint(draw, below = 0) {
      const { ctx, bbox } = this.plot, ratio = devicePixelRatio || 1;
      const area = { left: bbox.left / ratio, top: bbox.top / ratio, width: bbox.width / ratio, height: bbox.height / ratio };
      ctx.save();
      ctx.beginPath();
      ctx.rect(bbox.left, bbox.top, bbox.width, bbox.height + below * ratio);
      ctx.clip();
      ctx.scale(ratio, ratio);
      ctx.font = FONT;
      ctx.textAlign = "left";
      const x = (value) => this.plot.valToPos(value, "x", true) / ratio;
      const y = (value) => this.plot.valToPos(value, "y", true) / ratio;
      draw(ctx, area, x, y);
      ctx.restore();
    }

    /** The phases in view: each with its edges in pixels. */
    *phasesInView(area, x) {
      const { phases } = this.demand ?? this.columns, [from, to] = this.range;
      for (let i = 0; i < phases.length; i++) {
        const start = this.place(phases[i].start), stop = this.place(phases[i].stop);
        if (stop < from || start > to) continue;
        const left = Math.max(x(start), area.left), right = Math.min(x(stop), area.left + area.width);
        if (right - left >= 1) yield [phases[i], left, right, i];
      }
    }

    drawBands() {
      this.paint((ctx, area, x) => {
        ctx.fillStyle = this.colour.band;
        for (const [, left, right, i] of this.phasesInView(area, x)) if (i % 2) ctx.fillRect(left, area.top, right - left, area.height);
      });
    }

    // What is wanted beyond a failure

    /** The x of an event that a rank never came to. */
    placeWanted(event) {
      const { time, event: events } = this.demand;
      return this.byTime ? time[Math.min(lowerBound(events, event), time.length - 1)] : event;
    }

    /** Memory that the rank would reserve and allocate on a GPU without end, from where it fails on its own. */
    drawDemand() {
      if (!this.demand) return;
      this.drawWanted(this.demand.reserved, [2, 3]);
      this.drawWanted(this.demand.allocated, []);
    }

    drawWanted(values, dash) {
      const { event } = this.demand, xs = this.demand[this.byTime ? "time" : "event"];
      const [from, to] = this.range;
      const first = Math.max(lowerBound(event, this.rank.events) - 1, lowerBound(xs, from) - 1, 0);
      const stop = Math.min(lowerBound(xs, to) + 2, xs.length);
      this.paint((ctx, area, x, y) => {
        const bottom = area.top + area.height;
        const corners = [];
        for (let at = first; at < stop; at++) {
          if (corners.length) corners.push([x(xs[at]), corners.at(-1)[1]]);
          corners.push([x(xs[at]), y(values[at])]);
        }
        if (corners.length < 2) return;
        ctx.beginPath();
        corners.forEach(([cx, cy], i) => (i ? ctx.lineTo(cx, cy) : ctx.moveTo(cx, cy)));
        ctx.strokeStyle = this.colour.oom;
        ctx.lineWidth = dash.length ? 1.5 : 0.75;
        ctx.setLineDash(dash);
        ctx.stroke();
        ctx.lineTo(corners.at(-1)[0], bottom);
        ctx.lineTo(corners[0][0], bottom);
        ctx.closePath();
        ctx.fillStyle = `${this.colour.oom}1f`;
        ctx.fill();
      });
    }

    /** What the program has named itself: bars below the axis, the outermost on top. */
    drawRegions() {
      const [from, to] = this.range;
      this.paint((ctx, area, x) => {
        for (const { start, stop, depth } of this.columns.regions) {
          const first = this.place(start), last = this.place(stop);
          if (last < from || first > to || depth >= DEEPEST_REGION) continue;
          const left = Math.max(x(first), area.left), right = Math.min(x(last), area.left + area.width);
          ctx.fillStyle = depth % 2 ? this.colour.soft : this.colour.ink;
          ctx.fillRect(left, area.top + area.height + 1 + 3 * depth, Math.max(right - left - 0.5, 0.5), 2);
        }
      }, 1 + 3 * DEEPEST_REGION);
    }

    /** The names of the phases, above the lines of the grid. */
    drawNames(ctx, area, x) {
      ctx.textBaseline = "top";
      let clear = -Infinity; // where the next label may begin
      for (const [phase, left, right] of this.phasesInView(area, x)) {
        if (right - left < 22 || left < clear) continue;
        const text = fitted(ctx, [phaseText(phase), phase.name], right - left - 8);
        if (text) {
          ctx.globalAlpha = 0.85;
          ctx.fillStyle = this.colour.page;
          ctx.fillRect(left + 2, area.top + 2, ctx.measureText(text).width + 4, 16);
          ctx.globalAlpha = 1;
          ctx.fillStyle = this.colour.soft;
          ctx.fillText(text, left + 4, area.top + 4);
        }
        clear = left + 20;
      }
    }

    drawMarks() {
      this.paint((ctx, area, x, y) => {
        this.drawNames(ctx, area, x);
        this.taken = [];
        this.drawLimit(ctx, area, y);
        this.drawOoms(ctx, area, x);
        this.drawMoments(ctx, area, x);
        this.drawDemandPeak(ctx, area, x, y);
        this.drawPeaks(ctx, area, x, y);
      });
    }

    /** Text above the data, in a row of its own where others are in the way, with a line down to what it names. */
    label(ctx, area, text, atX, atY, ink) {
      const width = ctx.measureText(text).width, right = area.left + area.width;
      const left = Math.min(Math.max(atX - width / 2, area.left + 5), right - width - 5);
      let top = area.top + 20;
      const clash = () => this.taken.some((box) => left < box.right + 6 && box.left < left + width + 6 && Math.abs(top - box.top) < 15);
      for (let tries = 0; tries < 2 && clash(); tries++) top += 15;
      this.taken.push({ left, right: left + width, top });
      ctx.textBaseline = "top";
      ctx.fillStyle = ink;
      ctx.fillText(text, left, top);
      ctx.strokeStyle = ink;
      ctx.lineWidth = 0.7;
      if (atY > top + 14) line(ctx, Math.min(Math.max(atX, left), left + width), top + 14, atX, atY);
    }

    drawLimit(ctx, area, y) {
      const { rank, colour } = this, right = area.left + area.width;
      if (!this.showLimit && rank.limit >= this.heights()[1]) return;
      const at = y(rank.limit);
      ctx.strokeStyle = colour.limit;
      ctx.lineWidth = 1.5;
      ctx.setLineDash([8, 5]);
      line(ctx, area.left, at, right, at);
      ctx.setLineDash([]);
      this.label(ctx, area, `limit ${bytesText(rank.limit)}`, right, 0, colour.limit);
    }

    drawDemandPeak(ctx, area, x, y) {
      if (!this.demand) return;
      const { peak, words } = this.rank.demand;
      const value = this.demand[this.byTime ? "time" : "event"][this.demand.reserved.indexOf(peak)];
      if (value >= this.range[0] && value <= this.range[1]) this.label(ctx, area, words, x(value), y(peak), this.colour.oom);
    }

    drawPeaks(ctx, area, x, y) {
      const { rank, colour } = this;
      if (!this.x.length) return;
      const inView = (value) => value >= this.range[0] && value <= this.range[1];
      const reservedAt = this.place(rank.peakReserved.event), allocatedAt = this.place(rank.peak.event);
      if (inView(reservedAt)) {
        const [cx, cy] = [x(reservedAt), y(rank.peakReserved.bytes)];
        this.label(ctx, area, `peak ${rank.peakReserved.text} reserved`, cx, cy - 6, colour.ink);
        shape(ctx, colour.reserved, colour.page, [[cx, cy - 6], [cx + 6, cy], [cx, cy + 6], [cx - 6, cy]]);
      }
      if (inView(allocatedAt)) {
        const [cx, cy] = [x(allocatedAt), y(rank.peak.bytes)];
        this.label(ctx, area, `peak ${rank.peak.text} allocated`, cx, cy - 7, colour.ink);
        shape(ctx, colour.allocated, colour.page, [[cx, cy - 7], [cx + 7, cy + 5], [cx - 7, cy + 5]]);
      }
    }

    /** Small marks at the bottom where something is of note. */
    drawMoments(ctx, area, x) {
      const bottom = area.top + area.height;
      for (const event of this.notable) {
        const value = this.place(event), at = x(value);
        if (event < 0 || value < this.range[0] || value > this.range[1]) continue;
        shape(ctx, this.colour.ink, this.colour.page, [[at, bottom - 8], [at + 4, bottom], [at - 4, bottom]]);
      }
    }

    /** Put the line of the event that is shown, and the bar of the chosen tensor's life, where they belong. */
    placeMarks() {
      const [from, to] = this.range, wide = this.plot.over.clientWidth;
      const x = (event) => ((this.exact(event) - from) / (to - from)) * wide;
      const at = x(this.moment ?? -1);
      this.momentLine.hidden = this.moment === null || this.moment < 0 || at < 0 || at > wide;
      this.momentLine.style.left = `${at}px`;
      this.lifeBar.hidden = !this.life || x(this.life.died) < 0 || x(this.life.born) > wide;
      if (!this.life) return;
      const left = Math.max(0, x(this.life.born)), right = Math.min(wide, x(this.life.died));
      this.lifeBar.className = `life-bar c-${this.life.category}`;
      Object.assign(this.lifeBar.style, { left: `${left}px`, width: `${Math.max(4, right - left)}px` });
    }

    /** The x of any event. */
    exact(event) { return this.byTime ? this.place(event) : event; }

    /** The event at the cursor. */
    get event() { return this.columns.event[this.cursor] ?? 0; }

    drawOoms(ctx, area, x) {
      let last = -Infinity, named = false;
      for (const event of this.rank.ooms) {
        const value = this.place(event), at = x(value);
        if (value < this.range[0] || value > this.range[1] || at - last < 2) continue;
        last = at;
        ctx.strokeStyle = this.colour.oom;
        ctx.lineWidth = 1.5;
        line(ctx, at, area.top, at, area.top + area.height);
        line(ctx, at - 5, area.top + area.height - 11, at + 5, area.top + area.height - 1);
        line(ctx, at + 5, area.top + area.height - 11, at - 5, area.top + area.height - 1);
        if (!named) this.label(ctx, area, "out of memory", at, 0, this.colour.oom);
        named = true;
      }
    }

    // Cursor

    /** Say what stood at the point `at` of the columns. */
    point(at) {
      const { event, time, allocated, active, reserved, held } = this.columns;
      if (!event.length || at === undefined || at < 0) { this.readout.textContent = "No events."; return; }
      this.cursor = at;
      const index = Math.min(event[at], this.rank.events - 1);
      const phase = this.phaseOf(index);
      const parts = [`Event ${countText(index)}`];
      if (time) parts.push(timeText(time[at]));
      if (phase) parts.push(phase);
      parts.push(`allocated ${bytesText(allocated[at])}`, `active ${bytesText(active[at])}`, `reserved ${bytesText(reserved[at])}`);
      const most = held.map(({ name, values }) => [name, values[at]]).filter(([, bytes]) => bytes > 0).sort((a, b) => b[1] - a[1]);
      if (most.length) parts.push(most.slice(0, 4).map(([name, bytes]) => `${words(name)} ${bytesText(bytes)}`).join(", "));
      this.readout.textContent = parts.join(" · ");
    }

    /** The phase of an event in words, and the regions that it is in, outermost first. */
    phaseOf(event) {
      const within = (one) => one.start <= event && event < one.stop;
      const phase = this.columns.phases.findLast(within);
      const regions = this.columns.regions.filter(within).map(({ name }) => name);
      return [phase ? phaseText(phase) : "", regions.join(" › ")].filter(Boolean).join(" · ");
    }

    /** Put the cursor's line where the cursor is, or away where that is out of view. */
    moveLine() {
      const x = this.cursor === null ? NaN : this.x[this.cursor];
      const seen = x >= this.range[0] && x <= this.range[1];
      this.plot.setCursor({ left: seen ? this.plot.valToPos(x, "x") : -10, top: seen ? 10 : -10 });
    }

    moveTo(at) {
      this.point(at);
      this.moveLine();
    }

    /** Move the cursor by `step` of the points in view, and the view with it. */
    step(step) {
      const here = this.places.findIndex((at) => at >= this.cursor);
      const next = (here < 0 ? this.places.length - 1 : here) + step;
      const at = this.places[Math.min(Math.max(next, 0), this.places.length - 1)];
      if (this.x[at] < this.range[0] || this.x[at] > this.range[1]) this.pan(step < 0 ? -0.5 : 0.5);
      this.moveTo(at);
    }

    key(event) {
      if (event.ctrlKey || event.metaKey || event.altKey || !this.x.length) return;
      const far = Math.max(1, Math.round(this.places.length / 20));
      const acts = {
        ArrowLeft: () => this.step(event.shiftKey ? -far : -1),
        ArrowRight: () => this.step(event.shiftKey ? far : 1),
        PageUp: () => this.pan(-0.8),
        PageDown: () => this.pan(0.8),
        Home: () => { this.setRange(this.left, this.left + this.range[1] - this.range[0]); this.moveTo(0); },
        End: () => { this.setRange(this.right - this.range[1] + this.range[0], this.right); this.moveTo(this.x.length - 1); },
        "+": () => this.zoom(0.5), "=": () => this.zoom(0.5),
        "-": () => this.zoom(2), "_": () => this.zoom(2),
        0: () => this.reset(),
        p: () => this.toPeak(),
        Enter: () => this.pick?.(this.event),
        ",": () => this.pick?.((this.moment ?? 0) - 1),
        ".": () => this.pick?.((this.moment ?? 0) + 1),
      };
      const act = acts[event.key];
      if (act) { event.preventDefault(); act(); }
    }
  }

  function line(ctx, x0, y0, x1, y1) {
    ctx.beginPath();
    ctx.moveTo(x0, y0);
    ctx.lineTo(x1, y1);
    ctx.stroke();
  }

  function shape(ctx, fill, edge, corners) {
    ctx.beginPath();
    corners.forEach(([x, y], i) => (i ? ctx.lineTo(x, y) : ctx.moveTo(x, y)));
    ctx.closePath();
    ctx.fillStyle = fill;
    ctx.strokeStyle = edge;
    ctx.lineWidth = 1.5;
    ctx.fill();
    ctx.stroke();
  }

  /** The first of `texts` that is at most `width` wide, or the last one cut to it; nothing where no letter fits. */
  function fitted(ctx, texts, width) {
    for (const text of texts) if (ctx.measureText(text).width <= width) return text;
    let text = texts[texts.length - 1].slice(0, 80);
    while (text && ctx.measureText(`${text}…`).width > width) text = text.slice(0, -1);
    return text.length > 1 ? `${text}…` : "";
  }

  // Choosing a rank --------------------------------------------------------------------------------------------------

  const plots = new Map(), moments = new Map();
  const Moment = globalThis.memoryMoment({ bytesText, countText, root, narrow, words, tip, fitted, ...globalThis.memoryOf });

  /** The plot of a rank, and its moment where the page has the lives of its blocks; each shows the other's event. */
  async function draw(index) {
    const plot = new Plot(ranks[index], sections[index]);
    plots.set(index, plot);
    const lives = document.getElementById(`lives-${index}`).textContent;
    if (!lives || !ranks[index].events) return;
    const memory = await globalThis.memoryOf.load(lives);
    plot.memory = memory;
    plot.notable = memory.moments.map(({ event }) => event);
    plot.refresh();
    const moment = new Moment(memory, sections[index], {
      phase: (event) => plot.phaseOf(event),
      shown: (event) => { plot.moment = event; plot.placeMarks(); },
      chosen: (tensor) => { plot.life = tensor === null ? null : { born: memory.blocks.born[tensor], died: memory.blocks.died[tensor], category: memory.category(tensor) }; plot.placeMarks(); },
    });
    moments.set(index, moment);
    plot.pick = (event) => moment.show(event);
  }

  function show(index) {
    sections.forEach((section, i) => { section.hidden = i !== index; });
    let done = null;
    if (plots.has(index)) { plots.get(index).build(); moments.get(index)?.draw(); }
    else done = draw(index);
    document.querySelectorAll(".multiples button").forEach((button, i) => button.setAttribute("aria-pressed", i === index));
    const select = document.querySelector("#chooser select");
    if (select) select.value = index;
    return done;
  }

  /** A rank's memory in a few pixels: reserved as a line, allocated as an area, all ranks on one scale. */
  function sparkline(canvas, rank, top) {
    const ratio = devicePixelRatio || 1, width = 150, height = 52;
    const { event, allocated, reserved } = decode(rank);
    const colour = colours(), ctx = canvas.getContext("2d");
    canvas.width = width * ratio;
    canvas.height = height * ratio;
    ctx.scale(ratio, ratio);
    const lows = new Float64Array(width).fill(-1), highs = new Float64Array(width).fill(-1);
    for (let i = 0; i < event.length; i++) {
      const column = Math.min(width - 1, Math.floor((event[i] / Math.max(1, rank.events)) * width));
      lows[column] = Math.max(lows[column], allocated[i]);
      highs[column] = Math.max(highs[column], reserved[i]);
    }
    let low = 0, high = 0;
    for (let column = 0; column < width; column++) {
      if (lows[column] >= 0) [low, high] = [lows[column], highs[column]];
      const y = (bytes) => height - 1 - (bytes / top) * (height - 4);
      ctx.fillStyle = colour.allocated;
      ctx.fillRect(column, y(low), 1, height - y(low));
      ctx.fillStyle = colour.reserved;
      ctx.fillRect(column, y(high) - 1, 1, 2);
    }
  }

  function addChooser() {
    const nav = document.getElementById("chooser");
    if (ranks.length < 2) return;
    nav.hidden = false;
    const label = nav.appendChild(document.createElement("label"));
    label.append(`${chooser}:`);
    const select = label.appendChild(document.createElement("select"));
    const multiples = nav.appendChild(Object.assign(document.createElement("div"), { className: "multiples" }));
    ranks.forEach((rank, i) => {
      const text = `${rank.label}: ${rank.peakReserved.text}${rank.oom ? " ✕ out of memory" : ""}`;
      select.append(new Option(text, i));
      const button = multiples.appendChild(Object.assign(document.createElement("button"), { type: "button", tabIndex: -1 }));
      button.appendChild(document.createElement("canvas"));
      button.appendChild(Object.assign(document.createElement("span"), { textContent: text }));
      button.addEventListener("click", () => show(i));
    });
    select.addEventListener("change", () => show(Number(select.value)));
  }

  function drawSparklines() {
    const top = Math.max(1, ...ranks.map((rank) => rank.peakReserved.bytes));
    document.querySelectorAll(".multiples canvas").forEach((canvas, i) => sparkline(canvas, ranks[i], top));
  }

  function recolour() {
    drawSparklines();
    plots.forEach((plot, i) => { if (!sections[i].hidden) plot.build(); });
    moments.forEach((moment, i) => { if (!sections[i].hidden) moment.draw(); });
  }

  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", recolour);
  addEventListener("beforeprint", () => { root.dataset.print = ""; recolour(); });
  addEventListener("afterprint", () => { delete root.dataset.print; recolour(); });

  addChooser();
  drawSparklines();
  root.dataset.ranks = ranks.length;
  const ready = () => { root.dataset.ready = "true"; };
  if (ranks.length) show(0).then(ready, (error) => { note(error.message); ready(); }); else ready();
})();
