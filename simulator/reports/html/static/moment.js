// One moment of a rank: its blocks, its icicle and its tensors, kept at the same event and the same choice. `page.js`
// draws the timeline above it, and is told which event is shown and which tensor is chosen.
"use strict";
globalThis.memoryMoment = (shared) => {
  const { bytesText, countText, words, tip } = shared;
  const Blocks = globalThis.memoryBlocks(shared), Flame = globalThis.memoryFlame(shared), Alive = globalThis.memoryAlive(shared);

  return class Moment {
    /** `hooks`: `shown(event)`, `chosen(tensor, memory)`, and `phase(event)` for the name of the phase. */
    constructor(memory, section, hooks) {
      Object.assign(this, { memory, hooks, host: section.querySelector(".moments"), choice: {} });
      this.host.replaceChildren();
      this.build();
      const top = memory.moments.find(({ labels }) => labels.includes("peak allocated")) ?? memory.moments[0];
      this.show(top?.event ?? 0);
    }

    add(tag, properties, parent = this.host) {
      return parent.appendChild(Object.assign(document.createElement(tag), properties));
    }

    build() {
      this.add("h3", { textContent: "The allocator's segments and blocks" });
      this.addTools(this.add("div", { className: "tools" }));
      this.facts = this.add("p", { className: "facts" });
      const blocks = this.add("div", { className: "tapes" });
      const flame = this.add("div", { className: "flames" }), alive = this.add("div", { className: "alive" });
      this.blocks = new Blocks(this.memory, blocks, this);
      this.flame = new Flame(this.memory, flame, this);
      this.alive = new Alive(this.memory, alive, this);
      this.views = [this.blocks, this.flame, this.alive];
    }

    addTools(tools) {
      this.select = this.add("select", {}, this.add("label", { textContent: "Moment " }, tools));
      this.select.append(new Option("any", -1));
      this.memory.moments.forEach(({ labels, event }, i) => this.select.append(new Option(`${labels.join(", ")} (event ${countText(event)})`, i)));
      this.select.addEventListener("change", () => this.select.value >= 0 && this.show(this.memory.moments[this.select.value].event));
      this.number = this.add("input", { type: "number", min: 0, max: Math.max(0, this.memory.events - 1) }, this.add("label", { textContent: "event " }, tools));
      this.number.addEventListener("change", () => this.show(Number(this.number.value)));
      const button = (text, title, act) => {
        const element = this.add("button", { type: "button", textContent: text, title, ariaLabel: title }, tools);
        element.addEventListener("click", act);
      };
      button("◀", "One event earlier", () => this.show(this.state.event - 1));
      button("▶", "One event later", () => this.show(this.state.event + 1));
      button("Largest gap", "Go to the largest free piece", () => this.blocks.largestGap());
    }

    /** Show the state after an event. */
    show(event) {
      const started = performance.now();
      tip.hide();
      const state = (this.state = this.memory.at(Math.min(Math.max(Math.round(event) || 0, -1), this.memory.events - 1)));
      const place = this.memory.moments.findIndex((moment) => moment.event === state.event);
      this.select.value = place;
      this.number.value = state.event;
      this.facts.textContent = this.words(state, place);
      for (const view of this.views) view.show(state, this.facts.textContent);
      this.blocks.highlight(this.choice);
      this.hooks.shown(state.event);
      this.host.dataset.event = state.event;
      this.host.dataset.took = performance.now() - started;
    }

    /** The moment of note before (-1) or after (1). */
    step(by) {
      const { moments } = this.memory, { event } = this.state;
      const found = by > 0 ? moments.find((one) => one.event > event) : moments.findLast((one) => one.event < event);
      if (found) this.show(found.event);
    }

    words(state, place) {
      const { allocated, active, reserved, segments } = state;
      const moment = this.memory.moments[place], phase = this.hooks.phase(state.event);
      const free = this.freeIn(state);
      return [
        moment ? `At the ${moment.labels.join(", ")}, event ${countText(state.event)}` : `After event ${countText(state.event)}`,
        phase && `phase ${phase}`,
        `allocated ${bytesText(allocated)}`,
        active > allocated && `waiting for a stream ${bytesText(active - allocated)}`,
        `reserved ${bytesText(reserved)} in ${countText(segments.length)} segments`,
        `free in them ${bytesText(free)}`,
      ].filter(Boolean).join(" · ");
    }

    freeIn({ reserved, active }) { return reserved - active; }

    // What the views tell

    /** Choose a tensor (null: none): where it is not alive, its birth is shown. */
    choose(tensor) {
      this.choice = { ...this.choice, tensor };
      const { born, died } = this.memory.blocks, { event } = this.state;
      if (tensor !== null && !(born[tensor] <= event && event < died[tensor])) this.show(born[tensor]);
      this.spread();
    }

    /** Choose kinds of blocks (null: none). */
    chooseKinds(kinds, name = "") {
      this.choice = { ...this.choice, kinds, name };
      this.spread();
    }

    spread() {
      for (const view of this.views) view.highlight(this.choice);
      this.hooks.chosen(this.choice.tensor ?? null, this.memory);
      this.host.dataset.chosen = this.choice.tensor ?? "";
    }

    /** A text is searched: the icicle shows where it is. */
    find(query) { this.flame.find(query); }

    // What there is to say of a tensor

    /** A tensor in lines, the innermost frames of its stack last. */
    describe(tensor) {
      const { memory } = this, { bytes, slack, freed } = memory.blocks;
      const asked = slack[tensor] ? `, ${bytesText(bytes[tensor] - slack[tensor])} asked for` : "";
      const category = words(memory.category(tensor)), stack = memory.stack(tensor).map(shared.frameText);
      return [
        memory.name(tensor) ? `${memory.name(tensor)} (${category})` : category[0].toUpperCase() + category.slice(1),
        `${bytesText(bytes[tensor])}${asked}`,
        ...(freed[tensor] <= this.state.event ? ["freed, waits for another stream"] : []),
        this.life(tensor),
        ...stack.slice(0, 8),
        ...(stack.length > 8 ? [`and ${stack.length - 8} frames more`] : []),
      ];
    }

    since(tensor) {
      const born = this.memory.blocks.born[tensor], phase = born < 0 ? "" : this.hooks.phase(born);
      return born < 0 ? "before the first event" : `event ${countText(born)}${phase ? `, ${phase}` : ""}`;
    }

    life(tensor) {
      const { died } = this.memory.blocks;
      return `from ${this.since(tensor)} to ${died[tensor] >= this.memory.events ? "the end" : `event ${countText(died[tensor])}`}`;
    }

    draw() {
      this.blocks.draw();
      this.flame.layout();
    }
  };
};
