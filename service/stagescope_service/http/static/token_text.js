// The text of a sample, a token at a time. Only the lines in sight are elements, so that a sample
// of any length scrolls; lines break as in text, at each change between rounds and environment.

import { h, made, patch } from "./dom.js";

const LINE = 26; // pixels, as in style.css
const GUTTER = 92;
const OVERSCAN = 10; // lines beyond the edges
const PADDING = 4; // of a token, both sides together
const BOUNDS = [0.001, 0.01, 0.05, 0.1, 0.5, 1, 5]; // nat: where one shade of |d| ends
const MARKED = 4; // shades from here on are searched for
const SHOWN = { "\n": "⏎", "\r": "␍", "\t": "⇥", "": "∅" };

/** How a token is drawn, for its mismatch. */
export function shade(d) {
  if (d === null || d === undefined) return -1;
  if (typeof d === "string" || !Number.isFinite(d)) return BOUNDS.length + 1;
  const size = Math.abs(d);
  let at = 0;
  while (at < BOUNDS.length && size >= BOUNDS[at]) at++;
  return at;
}

/** The shades with what they stand for, for the legend. */
export const SHADES = [...BOUNDS.map((bound, at) => [at, `< ${bound}`]),
  [BOUNDS.length, `≥ ${BOUNDS.at(-1)}`], [BOUNDS.length + 1, "not finite"]];

/** What the loss did with a token -> how it is marked. */
export const FATES = {
  "clipped low": "clipped-low", "clipped high": "clipped-high", rejected: "rejected",
  "zero weight": "no-gradient", "zero advantage": "no-gradient",
  unknown: "unknown",
};

/** Segments of a row: rounds, and the environment's tokens between them. */
export function segments(sample) {
  const found = [];
  for (let at = 0; at < sample.positions.length; at++) {
    const round = sample.mask[at] ? sample.round[at] : null;
    const last = found.at(-1);
    if (last && last.round === round) last.to = at + 1;
    else found.push({ round, from: at, to: at + 1 });
  }
  return found;
}

const Drawn = ({ draw }) => draw();

/**
 * @param sample columns of `/steps/{step}/samples/{uid}`.
 * @param onPoint (index, isChosen) is called with the token under the pointer or chosen by the
 *     keyboard or a click.
 */
export class TokenText {
  constructor(sample, onPoint) {
    this.sample = sample;
    this.onPoint = onPoint;
    this.size = sample.positions.length;
    this.shades = Int8Array.from(sample.d, (d, at) => (sample.mask[at] ? shade(d) : -1));
    this.chosen = -1;
    this.lines = new Map();
    this.element = made(h("div.reader", {},
      h("div.tokens", {
        role: "listbox", tabindex: 0, "aria-label": `${this.size} tokens, by position`,
        onkeydown: (event) => this.#key(event), onscroll: () => this.#ask(),
        onpointermove: (event) => this.#point(event, false), onclick: (event) => this.#point(event, true),
      }, h("div.lines")),
      h("canvas.map", { "aria-hidden": "true", width: 14, onclick: (event) => this.#jump(event) })));
    [this.text, this.map] = this.element.children;
    this.layer = this.text.firstChild;
    this.width = 0;
    this.watch = new ResizeObserver(() => this.#layout());
    this.watch.observe(this.text);
  }

  /** Indices of tokens that are worth a look: large |d| or not finite. */
  get marked() {
    this.found ??= [...this.shades.keys()].filter((at) => this.shades[at] >= MARKED);
    return this.found;
  }

  close() {
    this.watch.disconnect();
    cancelAnimationFrame(this.frame);
  }

  // --- lines ---------------------------------------------------------------------------------
  #shown(at) {
    const text = this.sample.texts?.[at];
    if (text === undefined || text === null) return String(this.sample.token_ids?.[at] ?? "·");
    // Of texts that are not printable the reader sees that there is something.
    return text.replace(/[\u0000-\u001f\u007f]/g, (each) => SHOWN[each] ?? "·") || SHOWN[""];
  }

  /** Break the text into lines of the present width. */
  #layout() {
    const width = this.text.clientWidth;
    if (!width || width === this.width) return;
    const first = this.width ? this.#firstShown() : null;
    this.width = width;
    const measure = measuring(this.text);
    const room = width - GUTTER - 8;
    const gap = this.sample.texts ? 0 : 6; // ids need space between them
    this.starts = [];
    this.labels = [];
    for (const [index, { round, from, to }] of segments(this.sample).entries()) {
      let left = 0;
      for (let at = from; at < to; at++) {
        const text = this.#shown(at);
        const wide = measure(text) + PADDING + gap;
        const isFirst = at === from;
        if (isFirst || (left + wide > room && left > 0)) {
          this.starts.push(at);
          this.labels.push(isFirst ? { round, isNew: index > 0 } : null);
          left = 0;
        }
        left += this.sample.texts?.[at]?.includes("\n") ? room : wide;
      }
    }
    this.layer.style.height = `${this.starts.length * LINE}px`;
    this.lines.clear();
    if (first !== null) this.text.scrollTop = this.#lineOf(first) * LINE;
    this.#draw();
    this.#drawMap();
    if (this.waiting !== undefined) this.choose(this.waiting);
  }

  #firstShown() {
    return this.starts[Math.min(this.starts.length - 1, Math.floor(this.text.scrollTop / LINE))];
  }

  #lineOf(at) {
    let [low, high] = [0, this.starts.length];
    while (high - low > 1) {
      const middle = (low + high) >> 1;
      if (this.starts[middle] <= at) low = middle;
      else high = middle;
    }
    return low;
  }

  #ask() {
    this.frame ||= requestAnimationFrame(() => { this.frame = 0; this.#draw(); });
  }

  #draw() {
    if (!this.starts) return;
    const top = Math.floor(this.text.scrollTop / LINE);
    const first = Math.max(0, top - OVERSCAN);
    const last = Math.min(this.starts.length, top + Math.ceil(this.text.clientHeight / LINE) + OVERSCAN);
    const lines = Array.from({ length: last - first }, (_, at) => this.#line(first + at));
    patch(this.layer, lines);
    this.lines = new Map(lines.map((line) => [line.key, line]));
  }

  /** A line; one that is drawn already is the same node, which Preact does not look at again. */
  #line(index) {
    return this.lines.get(index) ?? h(Drawn, { key: index, draw: () => this.#drawLine(index) });
  }

  #drawLine(index) {
    const [from, to = this.size] = this.starts.slice(index, index + 2);
    const label = this.labels[index];
    return h("div.token-line", { role: "presentation", style: { top: `${index * LINE}px` } },
      h("span.gutter", { class: label ? "label" : "", "aria-hidden": "true" },
        !label ? this.sample.positions[from] : label.round === null ? "environment" : `round ${label.round}`),
      Array.from({ length: to - from }, (_, at) => this.#token(from + at)));
  }

  #token(at) {
    const isChosen = at === this.chosen;
    const kind = this.sample.mask[at] ? `s${this.shades[at]}` : "environment";
    return h("span.t", {
      id: `token-${at}`, "data-at": at, role: "option", "aria-selected": String(isChosen),
      "aria-label": isChosen ? this.described(at) : null,
      class: [kind, FATES[this.sample.fate[at]] ?? "", isChosen ? "chosen" : "", this.sample.texts ? "" : "id"].join(" "),
    }, this.#shown(at));
  }

  /** One row of pixels a few tokens: the largest mismatch among them. */
  #drawMap() {
    const height = this.text.clientHeight;
    const scale = devicePixelRatio || 1;
    this.map.height = height * scale;
    this.map.style.height = `${height}px`;
    const context = this.map.getContext("2d");
    const colours = SHADES.map(([at]) =>
      getComputedStyle(document.documentElement).getPropertyValue(`--shade-${at}`).trim());
    context.clearRect(0, 0, this.map.width, this.map.height);
    for (let row = 0; row < this.map.height; row++) {
      const from = Math.floor((row / this.map.height) * this.size);
      const to = Math.max(from + 1, Math.floor(((row + 1) / this.map.height) * this.size));
      let worst = -1;
      for (let at = from; at < Math.min(to, this.size); at++) worst = Math.max(worst, this.shades[at]);
      if (worst < 1) continue;
      context.fillStyle = colours[worst];
      context.fillRect(0, row, this.map.width, 1);
    }
  }

  // --- choosing ------------------------------------------------------------------------------
  /** Choose a token by its index and show it. */
  choose(at, { isQuiet = false } = {}) {
    if (!this.starts) {
      this.waiting = at;
      return;
    }
    this.waiting = undefined;
    this.lines.delete(this.#lineOf(this.chosen));
    this.chosen = Math.max(0, Math.min(this.size - 1, at));
    this.lines.delete(this.#lineOf(this.chosen));
    const top = this.#lineOf(this.chosen) * LINE;
    const { scrollTop, clientHeight } = this.text;
    if (top < scrollTop || top + LINE > scrollTop + clientHeight) {
      this.text.scrollTop = Math.max(0, top - clientHeight / 3);
    }
    this.#draw();
    this.text.setAttribute("aria-activedescendant", `token-${this.chosen}`);
    if (!isQuiet) this.onPoint(this.chosen, true);
  }

  /** Choose the next marked token in a direction (1 or -1), round the ends. */
  next(direction) {
    if (!this.marked.length) return;
    const ordered = direction > 0 ? this.marked : [...this.marked].reverse();
    const further = ordered.find((at) => direction * (at - this.chosen) > 0);
    this.choose(further ?? ordered[0]);
  }

  /** A token and its mismatch as a sentence, for those who hear it. */
  described(at) {
    const d = this.sample.d[at];
    const kind = this.sample.mask[at] ? `round ${this.sample.round[at]}` : "environment";
    const size = d === null ? "no mismatch" : `d ${d}`;
    return [this.#shown(at), `position ${this.sample.positions[at]}`, kind, size, this.sample.fate[at]].join(", ");
  }

  #point(event, isChosen) {
    const at = event.target.dataset?.at;
    if (at === undefined) return;
    if (isChosen) this.choose(Number(at));
    else if (Number(at) !== this.pointed) {
      this.pointed = Number(at);
      this.onPoint(this.pointed, false);
    }
  }

  #jump(event) {
    const { top, height } = this.map.getBoundingClientRect();
    this.choose(Math.floor(((event.clientY - top) / height) * this.size));
  }

  #key(event) {
    if (event.ctrlKey || event.metaKey || event.altKey || !this.starts) return;
    const at = Math.max(0, this.chosen);
    const line = this.#lineOf(at);
    const inLine = at - this.starts[line];
    const page = Math.max(1, Math.floor(this.text.clientHeight / LINE) - 1);
    const toLine = (other) => {
      const index = Math.max(0, Math.min(this.starts.length - 1, other));
      const end = (this.starts[index + 1] ?? this.size) - 1;
      return Math.min(this.starts[index] + inLine, end);
    };
    const moves = {
      ArrowRight: () => at + (this.chosen < 0 ? 0 : 1), ArrowLeft: () => at - 1,
      ArrowDown: () => toLine(line + 1), ArrowUp: () => toLine(line - 1),
      PageDown: () => toLine(line + page), PageUp: () => toLine(line - page),
      Home: () => 0, End: () => this.size - 1,
    };
    if (event.key === "n" || event.key === "p") this.next(event.key === "n" ? 1 : -1);
    else if (moves[event.key]) this.choose(moves[event.key]());
    else return;
    event.preventDefault();
  }
}

/** Returns a function from text to its width in pixels, in the font of an element. */
function measuring(element) {
  const context = document.createElement("canvas").getContext("2d");
  const { fontSize, fontFamily } = getComputedStyle(element);
  context.font = `${fontSize} ${fontFamily}`;
  const known = new Map();
  return (text) => {
    let width = known.get(text);
    if (width === undefined) {
      width = context.measureText(text).width;
      known.set(text, width);
    }
    return width;
  };
}
