// What was held and in use after any event, for the page of `simulator/reports/html/page.py`: reads the lives of blocks
// and segments (`lives.py`) into typed columns. They are sorted by address and birth, and what lies at one address lives
// one after the other: a state is one binary search an address, and nothing is kept from one moment to the next.
"use strict";
globalThis.memoryOf = (() => {
  /** The bytes of base64 text. */
  function fromBase64(text) {
    const letters = atob(text), bytes = new Uint8Array(letters.length);
    for (let i = 0; i < letters.length; i++) bytes[i] = letters.charCodeAt(i);
    return bytes;
  }

  async function inflate(bytes) {
    const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"));
    return new Uint8Array(await new Response(stream).arrayBuffer());
  }

  /** A column that `series.varints` wrote: zigzag-coded differences. */
  function column(bytes, at, count, Kind, unit = 1) {
    const values = new Kind(count);
    let sum = 0;
    for (let i = 0; i < count; i++) {
      let byte = bytes[at++], code = byte & 127, scale = 128;
      for (; byte > 127; scale *= 128) { byte = bytes[at++]; code += (byte & 127) * scale; }
      sum += code % 2 ? -(code + 1) / 2 : code / 2;
      values[i] = sum * unit;
    }
    return values;
  }

  /** Columns with values above 2^31, or sums of such; the unit of some is 512 bytes. */
  const WIDE = { address: 512, bytes: 512, slack: 1 };

  function columns(bytes, at, head) {
    const found = {};
    for (const [group, { count, bytes: sizes }] of Object.entries(head.columns)) {
      found[group] = { count };
      for (const [name, length] of Object.entries(sizes)) {
        found[group][name] = column(bytes, at, count, WIDE[name] ? Float64Array : Int32Array, WIDE[name]);
        at += length;
      }
    }
    return found;
  }

  /** Ends from lengths, in place: `died` is when a block is gone, `freed` when it is freed and may wait for a stream. */
  function ends({ blocks, segments }) {
    for (const held of [blocks, segments]) {
      held.died = held.life;
      for (let i = 0; i < held.count; i++) held.died[i] += held.born[i];
    }
    blocks.freed = blocks.wait;
    for (let i = 0; i < blocks.count; i++) blocks.freed[i] = blocks.died[i] - blocks.wait[i];
  }

  /** Where each address begins. */
  function addresses({ address, count }) {
    const found = new Int32Array(count + 1);
    let most = 0;
    for (let i = 0; i < count; i++) if (!i || address[i] !== address[i - 1]) found[most++] = i;
    found[most] = count;
    return found.slice(0, most + 1);
  }

  const LAYER = /^\d{1,9}$/, DEEPEST = 24;
  const OPERATOR = /^(?:aten|prims|c10d|_c10d_functional|torch\w*|cuda|nccl)(?:\.|::|$)/;
  const split = (module) => module.split(".", DEEPEST).filter(Boolean);

  /** The path of a name: `a.b: aten.mm` is `a`, `b`, `aten.mm`; `forward@model.py:9` is one part. */
  function pathOf(name) {
    const [module, ...what] = name.split(": ");
    if (OPERATOR.test(module)) return ["(no module)", name];
    return [...(module.includes("@") || module.includes("/") ? [module] : split(module)), ...(what.length ? [what.join(": ")] : [])];
  }

  /** `file:line:function` as `function file:line`, the file without its folder. */
  const frameText = (frame) => frame.replace(/^(.*?):(\d+):(.*)$/, (_, file, line, name) => `${name} ${file.split(/[/\\]/).pop()}:${line}`);

  const SIZE = /^([<>=]?)=?(\d+(?:\.\d+)?)\s*([kmgt]?)i?b?$/i;

  /** The least and most bytes that a word of a search asks for (`>10MiB`, `4MiB`), or null where it is text. */
  function condition(word) {
    const found = SIZE.exec(word);
    if (!found || (!found[1] && !found[3])) return null;
    const bytes = found[2] * 1024 ** " kmgt".indexOf(found[3].toLowerCase() || " ");
    return { ">": [bytes, Infinity], "<": [0, bytes] }[found[1]] ?? [bytes * 0.99, bytes * 1.01];
  }

  /** A query: words to be found, and the range of sizes. */
  function asked(query) {
    const words = query.trim().split(/\s+/).filter(Boolean), ranges = words.map(condition);
    const sizes = ranges.filter(Boolean);
    return {
      texts: words.filter((_, i) => !ranges[i]).map((word) => word.toLowerCase()),
      least: Math.max(0, ...sizes.map(([least]) => least)), largest: Math.min(Infinity, ...sizes.map(([, most]) => most)),
    };
  }

  class Memory {
    constructor(head, { blocks, segments, kinds }) {
      Object.assign(this, head, { blocks, segments, kinds });
      for (const held of [blocks, segments]) held.first = addresses(held);
      this.paths = new Map();
      this.texts = null;
    }

    /** The blocks in use after `event`, by address (pending ones too), the segments held, and sums. */
    at(event) {
      const { blocks, segments } = this;
      const sums = new Float64Array(this.categories.length);
      let allocated = 0, active = 0;
      const alive = living(blocks, event);
      for (const i of alive) {
        active += blocks.bytes[i];
        if (blocks.freed[i] <= event) continue;
        allocated += blocks.bytes[i];
        sums[this.kinds.category[blocks.kind[i]]] += blocks.bytes[i];
      }
      const held = joined(segments, living(segments, event));
      const reserved = held.reduce((sum, one) => sum + one.bytes, 0);
      return { event, alive, segments: held, allocated, active, reserved, sums };
    }

    /** Allocated, active, reserved bytes and those of each category after every event from `from` to `to`. */
    series(from, to) {
      const { blocks, segments, kinds } = this, count = to - from + 1;
      const fresh = () => new Float64Array(count), sums = this.categories.map(fresh);
      const found = { allocated: fresh(), active: fresh(), reserved: fresh(), sums };
      const add = (column, event, bytes) => { if (event >= from && event <= to) column[event - from] += bytes; };
      for (let i = 0; i < blocks.count; i++) {
        if (blocks.born[i] > to || blocks.died[i] < from) continue;
        const bytes = blocks.bytes[i], held = sums[kinds.category[blocks.kind[i]]];
        for (const column of [found.allocated, held]) { add(column, blocks.born[i], bytes); add(column, blocks.freed[i], -bytes); }
        add(found.active, blocks.born[i], bytes);
        add(found.active, blocks.died[i], -bytes);
      }
      for (let i = 0; i < segments.count; i++) {
        add(found.reserved, segments.born[i], segments.bytes[i]);
        add(found.reserved, segments.died[i], -segments.bytes[i]);
      }
      const before = this.at(from - 1);
      const total = (column, start) => { for (let i = 0; i < count; i++) column[i] = start += column[i]; };
      for (const name of ["allocated", "active", "reserved"]) total(found[name], before[name]);
      sums.forEach((column, category) => total(column, before.sums[category]));
      return found;
    }

    category(i) { return this.categories[this.kinds.category[this.blocks.kind[i]]]; }

    name(i) { return this.names[this.kinds.name[this.blocks.kind[i]]] ?? ""; }

    /** The frames of a block's stack, the innermost first. */
    stack(i) { return (this.stacks[this.kinds.stack[this.blocks.kind[i]]] ?? []).map((frame) => this.frames[frame]); }

    /** The path of a kind of block in a tree: by `module`, or by `stack`, the outermost frame first. */
    path(kind, by, all) {
      if (by === "module" && this.kinds.name[kind] < 0) return ["(no name)", this.categories[this.kinds.category[kind]].replaceAll("_", " ")];
      const key = `${by} ${all}`;
      let known = this.paths.get(key);
      if (!known) this.paths.set(key, (known = []));
      return (known[kind] ??= by === "module" ? pathOf(this.names[this.kinds.name[kind]]) : this.stackPath(kind, all));
    }

    stackPath(kind, all) {
      const stack = this.stacks[this.kinds.stack[kind]];
      if (!stack) return ["(no stack)"];
      const own = all ? stack : stack.filter((frame) => !this.foreign[frame]);
      return (own.length ? own : stack).map((frame) => frameText(this.frames[frame])).reverse();
    }

    /** What is searched in, by kind: category, name and stack. */
    lower() {
      this.texts ??= Array.from(this.kinds.category, (category, kind) => [
        this.categories[category], this.names[this.kinds.name[kind]] ?? "",
        ...(this.stacks[this.kinds.stack[kind]] ?? []).map((frame) => this.frames[frame]),
      ].join("\n").toLowerCase());
      return this.texts;
    }

    /** The largest `most` blocks of `among` (all where null) that a query finds and `kinds` has, and how many it finds. */
    search(query, among, most, kinds = null) {
      const { texts, least, largest } = asked(query);
      const fits = Uint8Array.from(this.lower(), (text, kind) => (!kinds || kinds.has(kind)) && texts.every((word) => text.includes(word)));
      const { kind, bytes, count } = this.blocks, whole = among ? among.length : count;
      let best = [], floor = -1, found = 0, total = 0;
      const trim = () => { best = best.sort((a, b) => bytes[b] - bytes[a]).slice(0, most); };
      for (let place = 0; place < whole; place++) {
        const i = among ? among[place] : place, size = bytes[i];
        if (size < least || size > largest || !fits[kind[i]]) continue;
        found++;
        total += size;
        if (size <= floor) continue;
        if (best.push(i) > 20 * most) { trim(); floor = bytes[best[most - 1]]; }
      }
      trim();
      return { found, total, best };
    }
  }

  /** Places of what lives after `event`: at each address the last that was born, if it is not dead. */
  function living({ born, died, first }, event) {
    const found = new Int32Array(first.length);
    let most = 0;
    for (let group = 0; group + 1 < first.length; group++) {
      let low = first[group], high = first[group + 1] - 1;
      if (born[low] > event) continue;
      while (low < high) {
        const middle = (low + high + 1) >> 1;
        if (born[middle] <= event) low = middle; else high = middle - 1;
      }
      if (died[low] > event) found[most++] = low;
    }
    return found.subarray(0, most);
  }

  /** Segments; adjoining pages of one stream are one. */
  function joined(segments, places) {
    const found = [];
    for (const i of places) {
      const one = { address: segments.address[i], bytes: segments.bytes[i], stream: segments.stream[i], expandable: segments.expandable[i] };
      const last = found[found.length - 1];
      const adjoins = last && last.address + last.bytes === one.address && last.expandable && one.expandable && last.stream === one.stream;
      if (adjoins) last.bytes += one.bytes; else found.push(one);
    }
    return found;
  }

  /** Reads a rank's lives. */
  async function load(text) {
    const bytes = await inflate(fromBase64(text));
    const length = new DataView(bytes.buffer).getUint32(0, true);
    const head = JSON.parse(new TextDecoder().decode(bytes.subarray(4, 4 + length)));
    const found = columns(bytes, 4 + length, head);
    ends(found);
    return new Memory(head, found);
  }

  return { load, frameText, isLayer: (part) => LAYER.test(part), textOf: (query) => asked(query).texts.join(" ") };
})();
