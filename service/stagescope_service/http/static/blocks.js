// A view is made of blocks. Each asks the service for what it shows, draws it, and asks again when
// an event of the stream concerns it; what has not changed is neither sent nor drawn again.

import { h, made, patch, problem } from "./dom.js";
import { get, known } from "./service.js";

const COALESCE_MS = 200;
const NEAR = 400; // pixels: how far out of sight a block is still kept up to date
let unique = 0;

/** Watches elements that load once they are nearly in sight. */
const sight = new IntersectionObserver((entries) => {
  for (const { target, isIntersecting } of entries) {
    if (isIntersecting) target.onSight?.();
  }
}, { rootMargin: `${NEAR}px` });

function isNear(element) {
  const { top, bottom } = element.getBoundingClientRect();
  return bottom > -NEAR && top < innerHeight + NEAR;
}

/**
 * Whether an event says that a step is over and its numbers are computed, if it has any: what is about all
 * steps is then asked for, once a step.
 */
export const isOver = ({ event, aggregated }) => event === "step" && aggregated;

/** Whether an event says that somebody did one of these things, as the audit names them. */
export const isAction = ({ event, action }, ...names) => event === "action" && names.includes(action);

/** A `path` that is asked once: for what does not change, or must not be drawn anew. */
export function once(ask) {
  let answer = null;
  return () => {
    answer ??= ask().catch((error) => {
      answer = null;
      throw error;
    });
    return answer;
  };
}

/** One view in the page: its blocks, until another view is shown. */
export class View {
  constructor(root) {
    this.root = root;
    this.blocks = [];
    this.isOpen = true;
  }

  /** Add what changes by itself, if at all. */
  add(...children) {
    this.root.append(made(h("div", {}, children)));
  }

  /** Add a block; see `Block`. */
  block(options) {
    const block = new Block(options);
    this.place(block);
    return block;
  }

  /** Add something with `element`, `load(since, events)`, `concerns(event)` and perhaps `close()`. */
  place(block, parent = this.root) {
    this.blocks.push(block);
    parent.append(block.element);
    block.view = this;
    block.events = [];
    block.since = 0;
    if (block.isLazy) this.#await(block);
    else if (block.isLater) this.#loadLater(block);
    else block.ready = this.#load(block);
  }

  /** Let a block ask, and again for what came meanwhile: an older answer never follows a newer. */
  async #load(block) {
    if (block.isLoading) return;
    block.isLoading = true;
    try {
      do await block.load(block.since, block.events.splice(0));
      while (this.isOpen && block.events.length);
    } finally {
      block.isLoading = false;
    }
  }

  /** Ask once all before it is there: several questions at once slow each other. */
  async #loadLater(block) {
    await this.ready;
    if (this.isOpen) await this.#load(block);
  }

  #await(block) {
    block.element.onSight = () => {
      sight.unobserve(block.element);
      block.isLazy = false;
      block.age?.();
      // What is below the screen may wait.
      if (block.element.getBoundingClientRect().top > innerHeight) this.#loadLater(block);
      else this.#load(block);
    };
    sight.observe(block.element);
  }

  /** Whether another block says already what is wrong with this one, such as an unknown run. */
  isSaid(block, error) {
    block.wrong = error.message;
    return this.blocks.some((other) => other !== block && other.hasFailed
      && other.wrong === block.wrong && !other.element.hidden);
  }

  /** Let figures take their room, once the view stands in the page. */
  fit() {
    for (const block of this.blocks) block.fit?.();
  }

  /** Resolves once everything in sight at first has loaded. */
  get ready() {
    return Promise.allSettled(this.blocks.map((block) => block.ready));
  }

  /** Let the blocks that an event concerns ask again, soon and once, or when they are in sight. */
  notify(event) {
    for (const block of this.blocks) {
      // With the first word of a service that came back, what failed is asked for again.
      const isMissed = event.event === "hello" && (!event.resumed || block.hasFailed);
      if (!(isMissed || block.concerns(event))) continue;
      block.since = performance.now();
      block.events.push(event);
      clearTimeout(block.timer);
      if (block.isLazy || !(block.leads || isNear(block.element))) {
        this.#await(block);
      } else {
        block.timer = setTimeout(() => {
          if (this.isOpen && block.events.length) this.#load(block);
        }, COALESCE_MS);
      }
    }
  }

  /** Release a block and what it holds. */
  remove(block) {
    this.blocks = this.blocks.filter((each) => each !== block);
    clearTimeout(block.timer);
    sight.unobserve(block.element);
    block.close?.();
    block.element.remove();
  }

  /** Release all blocks. */
  close() {
    this.isOpen = false;
    for (const block of this.blocks) this.remove(block);
  }
}

/**
 * A section with a heading.
 *
 * @param title the heading, or null.
 * @param path what to ask for; a list of paths, whose answers `draw` gets as arguments; or a
 *     function (since) -> promise of an answer, or of a list of them, see `get`.
 * @param draw (data, ...) -> children for the section.
 * @param concerns (event) -> whether an event of the stream makes the answer old.
 * @param lazy whether it is asked for when it is nearly in sight.
 * @param later whether it waits for what the view shows first.
 * @param leads whether it is kept up to date out of sight, too: the rest of the view follows it.
 */
export class Block {
  constructor({ title = null, path, draw, concerns = () => false, lazy = false, later = false, leads = false, id = null, level = 2 }) {
    const label = `block-${++unique}`;
    this.element = made(h(title ? "section" : "div", { class: "block", "aria-labelledby": title && label, id },
      title && h(`h${level}`, { id: label }, title), h("div"),
      h("div.body", { "aria-busy": "true", class: lazy ? "awaited" : "" }, h("p.quiet", {}, "loading…"))));
    [this.note, this.body] = [...this.element.children].slice(-2);
    this.paths = typeof path === "function" ? null : [path].flat();
    this.ask = typeof path === "function" ? async (since) => [await path(since)].flat()
      : (since) => Promise.all(this.paths.map((each) => get(each, since)));
    this.draw = draw;
    this.concerns = concerns;
    this.isLazy = lazy;
    this.isLater = later;
    this.leads = leads;
    this.shown = null;
    const before = this.paths?.map(known);
    if (before?.length && before.every((each) => each !== undefined)) this.#show(before);
  }

  /** Ask, and draw what is new. What was drawn stays, beside why it is not kept up to date. */
  async load(since = 0) {
    try {
      this.#show(await this.ask(since));
      this.hasFailed = this.element.hidden = false;
      patch(this.note);
    } catch (error) {
      if (error.status === 401) return;
      this.hasFailed = true;
      this.element.hidden = !this.shown && this.view.isSaid(this, error);
      patch(this.note, !this.element.hidden && problem(error));
      if (!this.shown) patch(this.body);
      this.#settle();
      if (!error.problem) throw error;
    }
  }

  /** Say that what is drawn is older than what is asked for, until that is there. */
  age() {
    if (this.shown) patch(this.note, h("p.quiet", {}, "Something is newer than this: loading…"));
  }

  #show(data) {
    if (this.shown && data.every((each, at) => each === this.shown[at])) return;
    patch(this.body, this.draw(...data));
    this.shown = data;
    this.#settle();
  }

  #settle() {
    this.body.removeAttribute("aria-busy");
    this.body.classList.remove("awaited");
  }
}
