// Makes elements, and changes what stands in the page into what should stand there.

import { ago, clockTime, number } from "./format.js";

/**
 * An element: h("a.quiet", { href }, "text", [more, ...]). Functions become event handlers; null,
 * undefined and false attributes and children are left out.
 */
export function h(selector, attributes = {}, ...children) {
  const [, tag, rest] = /^([a-z0-9-]*)(.*)$/.exec(selector);
  const element = document.createElement(tag || "div");
  for (const part of rest.match(/[.#][^.#]+/g) ?? []) {
    if (part[0] === "#") element.id = part.slice(1);
    else element.classList.add(part.slice(1));
  }
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (typeof value === "function") element[name] = value;
    else if (name === "class") element.classList.add(...value.split(" ").filter(Boolean));
    else if (name === "value" || name === "checked" || name === "selected") element[name] = value;
    else element.setAttribute(name, value === true ? "" : value);
  }
  append(element, children);
  return element;
}

function append(element, children) {
  for (const child of children) {
    if (child === null || child === undefined || child === false) continue;
    if (Array.isArray(child)) append(element, child);
    else element.append(child);
  }
}

/** Nodes of what `h` takes as children. */
export function nodes(...children) {
  const holder = document.createElement("div");
  append(holder, children);
  return [...holder.childNodes];
}

/**
 * Let an element hold `fresh` nodes with as few changes as possible, so that focus, scrolling and
 * opened details stay. Children with data-key are moved with their content; what is inside an
 * element with data-own is its owner's. Elements that stay get the handlers of the fresh ones, which
 * must not refer to other fresh elements.
 */
export function patch(element, fresh) {
  const keyed = new Map();
  for (const child of element.children) {
    if (child.dataset.key !== undefined) keyed.set(child.dataset.key, child);
  }
  let at = element.firstChild;
  for (const wanted of fresh) {
    const key = wanted.dataset?.key;
    const match = key === undefined ? (at && isAlike(at, wanted) ? at : null) : keyed.get(key);
    if (match && isAlike(match, wanted)) {
      if (match === at) at = at.nextSibling;
      else element.insertBefore(match, at);
      change(match, wanted);
    } else {
      element.insertBefore(wanted, at);
    }
  }
  while (at) {
    const next = at.nextSibling;
    at.remove();
    at = next;
  }
}

const HANDLERS = ["onclick", "onchange", "oninput", "onsubmit", "onkeydown", "ontoggle"];

function isAlike(a, b) {
  if (a.nodeType !== b.nodeType) return false;
  return a.nodeType !== Node.ELEMENT_NODE
    || (a.tagName === b.tagName && a.dataset.key === b.dataset.key);
}

function change(old, wanted) {
  if (old.nodeType !== Node.ELEMENT_NODE) {
    if (old.data !== wanted.data) old.data = wanted.data;
    return;
  }
  for (const { name } of [...old.attributes]) {
    // The reader opened it: what is drawn anew does not close it.
    if (!wanted.hasAttribute(name) && name !== "open") old.removeAttribute(name);
  }
  for (const { name, value } of wanted.attributes) {
    if (old.getAttribute(name) !== value) old.setAttribute(name, value);
  }
  for (const name of HANDLERS) {
    if (old[name] !== wanted[name]) old[name] = wanted[name];
  }
  if (old.dataset.own === undefined) patch(old, [...wanted.childNodes]);
}

// --- parts of pages ---------------------------------------------------------------------------
/** What stands where a number is not known: a dash and the reason. */
export const gap = (reason) =>
  h("span.gap", {}, "–", reason ? h("span.why", {}, ` ${reason}`) : h("span.hidden", {}, "not measured"));

/** A number with its unit, or the gap where there is none. */
export function quantity(value, unit = "", reason = "", format = number) {
  const text = format(value);
  if (text === null) return gap(reason);
  const isOdd = typeof value === "string" || Number.isNaN(value);
  return h("span.number", { class: isOdd ? "bad" : "" }, text, unit && h("span.unit", {}, `\u00a0${unit}`));
}

const MARKS = {
  exact: ["≡", "good"], comparable: ["✓", "good"], suspect: ["✕", "bad"],
  "not measured": ["–", "quiet"], unknown: ["?", "quiet"], complete: ["✓", "good"],
  partial: ["!", "warn"], open: ["…", "quiet"], error: ["✕", "bad"], warning: ["!", "warn"],
  info: ["i", "quiet"], found: ["✕", "bad"], "not found": ["✓", "good"], live: ["●", "good"],
  ended: ["■", "quiet"], silent: ["!", "warn"], agrees: ["✓", "good"], differs: ["✕", "bad"],
  missing: ["✕", "bad"], failed: ["✕", "bad"], missed: ["!", "warn"], truncated: ["!", "warn"],
  agreed: ["●", "good"], asked: ["…", "quiet"], done: ["✓", "good"], refused: ["✕", "bad"],
  "given up": ["✕", "bad"], "too late": ["✕", "bad"], up: ["✓", "good"], unreachable: ["✕", "bad"],
  refuses: ["✕", "bad"], unfinished: ["✕", "bad"], ok: ["✓", "good"],
};

/** A word of a verdict or state with its mark: never told by colour alone. */
export function badge(word, text = word) {
  const [mark, kind] = MARKS[word] ?? ["", "quiet"];
  return h("span.badge", { class: kind }, mark && h("span", { "aria-hidden": "true" }, `${mark} `), text);
}

/** A time: how long ago, with the date and clock on hover. */
export function when(wall) {
  if (wall === null || wall === undefined) return gap("");
  const date = new Date(wall * 1000).toISOString();
  return h("time", { datetime: date, title: clockTime(wall), "data-wall": wall }, ago(wall));
}

/** Update what `when` made; called now and then. */
export function refreshTimes() {
  for (const time of document.querySelectorAll("time[data-wall]")) {
    const text = ago(Number(time.dataset.wall));
    if (time.textContent !== text) time.textContent = text;
  }
}

/**
 * A table that scrolls on its own. Columns are [heading, cell(row) -> node or text, options] with
 * options `right` (numbers), `head` (the cell names its row) and `wide` (wraps). A column whose
 * cells are all "" is left out. With `stacks` the rows of a narrow page are blocks, each cell with
 * its heading, so that nothing has to be scrolled into sight.
 */
export function table(caption, columns, rows, { key, empty = "none", rowClass, stacks = false } = {}) {
  if (!rows.length) return h("p.quiet", {}, empty);
  const shown = columns.map(([heading, cell, options = {}]) => [heading, rows.map(cell), options])
    .filter(([, cells]) => cells.some((cell) => cell !== ""));
  const cells = (at) => shown.map(([heading, own, options]) =>
    h(options.head ? "th" : "td", {
      scope: options.head ? "row" : null,
      "data-heading": stacks && !options.head && heading && own[at] !== "" ? heading : null,
      class: [options.right ? "right" : "", options.wide ? "wrap" : ""].join(" "),
    }, own[at]));
  return h("div.scroll", { tabindex: 0, role: "region", "aria-label": caption },
    h("table", { class: stacks ? "stacks" : "" },
      h("caption.hidden", {}, caption),
      h("thead", {}, h("tr", {}, shown.map(([heading, , options]) =>
        h("th", { scope: "col", class: options.right ? "right" : "" }, heading)))),
      h("tbody", {}, rows.map((row, at) =>
        h("tr", { "data-key": key ? key(row) : at, class: rowClass ? rowClass(row) : "" }, cells(at))))));
}

/** Names and values: [name, node or text]; those without a value are left out. */
export const facts = (pairs) =>
  h("dl.facts", {}, pairs.filter(([, value]) => value !== null && value !== undefined && value !== "")
    .map(([name, value]) => h("div", { "data-key": name }, h("dt", {}, name), h("dd", {}, value))));

/** An error of the service as sentences. */
export function problem(error) {
  const { wrong, expected, advice } = error.problem ?? { wrong: error.message };
  return h("div.problem", { role: "note" }, h("p", {}, wrong),
    expected && h("p.quiet", {}, `Expected: ${expected}`), advice && h("p.quiet", {}, advice));
}
