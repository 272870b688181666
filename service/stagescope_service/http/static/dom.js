// Makes what stands in the page, and changes it into what should stand there: with Preact, whose
// one file is beside this one.

import { Component, h as vnode, render } from "./preact.mjs";
import { choose, parse as parseAddress } from "./address.js";
import { withLinks } from "./commands.js";
import { ago, clockTime, number, seconds } from "./format.js";
import { explained } from "./words.js";

const parsed = new Map(); // selector -> its tag, id and classes

function parse(selector) {
  const [, tag, id, classes] = /^([\w-]*)(?:#([\w-]+))?((?:\.[\w-]+)*)$/.exec(selector);
  parsed.set(selector, { tag: tag || "div", id, classes: classes.slice(1).replaceAll(".", " ") });
  return parsed.get(selector);
}

/**
 * A Preact node: h("a.quiet", { href }, "text", [more, ...]), or of a component. Functions become
 * event handlers; null, undefined and false attributes and children are left out. Siblings with
 * data-key are moved with their content. What is inside an element without children is its owner's.
 * The value of an input is what it begins with: what somebody types stays.
 */
export function h(selector, attributes = {}, ...children) {
  if (typeof selector !== "string") return vnode(selector, attributes, ...children);
  const { tag, id, classes } = parsed.get(selector) ?? parse(selector);
  const given = {};
  for (const name in attributes) { // without a list of pairs: there are many cells
    const value = attributes[name];
    if (value !== null && value !== undefined && (value !== false || name === "checked")) given[name] = value;
  }
  if (tag === "input" && "value" in given) {
    given.defaultValue = given.value;
    delete given.value;
  }
  if (id) given.id = id;
  if (classes) given.class = given.class ? `${classes} ${given.class}` : classes;
  if (given["data-key"] !== undefined) given.key = given["data-key"];
  return vnode(tag, given, ...children);
}

const patched = new WeakSet();

/**
 * Let an element hold `children` with as few changes as possible, so that focus, scrolling and
 * opened details stay. What it held before the first time goes.
 */
export function patch(element, ...children) {
  if (!patched.has(element)) element.replaceChildren();
  patched.add(element);
  render(children, element);
}

/** The element of a node that is drawn once; what is inside is changed by `patch`. */
export function made(node) {
  const holder = document.createElement("div");
  render(node, holder);
  return holder.firstChild;
}

/** A node that holds an element which somebody else made. */
export const holding = (element) => h("div", { ref: (place) => {
  if (place && place.firstChild !== element) place.replaceChildren(element);
} });

/**
 * A form. `act(elements, say)` does what it is for, and returns what to show below it, if anything;
 * `say` shows something meanwhile. What is wrong is shown inside.
 */
class Form extends Component {
  submit = async (event) => {
    event.preventDefault();
    if (this.isBusy) return;
    this.isBusy = true;
    const say = (said) => this.setState({ said, wrong: null });
    try {
      say(await this.props.act(event.currentTarget.elements, say));
    } catch (error) {
      this.setState({ said: null, wrong: problem(error) });
      if (!error.problem) throw error;
    } finally {
      this.isBusy = false;
    }
  };

  render({ attributes, children }, { said, wrong }) {
    return [h("form", { class: "row", ...attributes, onsubmit: this.submit }, children,
      h("div.wrong", { role: "alert" }, wrong)), h("div", { "aria-live": "polite" }, said)];
  }
}

export const form = (attributes, act, ...children) => h(Form, { attributes, act }, children);

export const button = (text, onclick) => h("button", { type: "button", onclick }, text);

/** The options of a select, from values or [value, text]. */
export const options = (values, chosen) => values.map((each) => {
  const [value, text = value] = [each].flat();
  return h("option", { value, selected: value === chosen }, text);
});

/** A labelled choice among `values`, which the address keeps under the name `id`. */
export const picker = (id, label, values, chosen) => [h("label", { for: id }, label),
  h("select", { id, onchange: ({ target }) => choose({ [id]: target.value || null, cursor: null }) },
    options(values, chosen))];

/** Parts with commas between them. */
export const listed = (parts, between = ", ") => parts.map((each, at) => [at > 0 && between, each]);

/** Scroll a row of tabs, where it is wider than the page, to the one that is shown. */
export function showCurrent(tabs) {
  const current = tabs?.querySelector("[aria-current]");
  if (current) tabs.scrollLeft = current.offsetLeft - (tabs.clientWidth - current.offsetWidth) / 2;
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

/** Sentences that are shown to who asks for them. */
export const folded = (title, texts) => texts.length > 0
  && h("details", {}, h("summary", {}, title), h("ul", {}, texts.map((each) => h("li", {}, each))));

/** A time: how long ago, with the date and clock on hover. */
export function when(wall) {
  if (wall === null || wall === undefined) return gap("");
  const date = new Date(wall * 1000).toISOString();
  return h("time", { datetime: date, title: clockTime(wall), "data-wall": wall }, ago(wall));
}

/** How long something has lasted that goes on, in seconds when the service answered. */
export function lasting(value) {
  const since = Date.now() / 1000 - value;
  return h("time.number", { "data-since": since, datetime: `PT${Math.round(value)}S` }, seconds(value));
}

/** Update what `when` and `lasting` made; called now and then. */
export function refreshTimes() {
  for (const time of document.querySelectorAll("time[data-since]")) {
    const text = seconds(Math.round(Date.now() / 1000 - Number(time.dataset.since)));
    if (time.firstChild.data !== text) time.firstChild.data = text;
  }
  for (const time of document.querySelectorAll("time[data-wall]")) {
    const text = ago(Number(time.dataset.wall));
    if (time.firstChild.data !== text) time.firstChild.data = text; // Preact goes on using the node
  }
}

/** Names and values: [name, node or text]; those without a value are left out. */
export const facts = (pairs) =>
  h("dl.facts", {}, pairs.filter(([, value]) => ![null, undefined, "", false].includes(value))
    .map(([name, value]) => h("div", { "data-key": name }, h("dt", {}, explained(name)), h("dd", {}, value))));

/** Links of an answer; those that name no run are about the run of the page. */
function ofPage(see) {
  const { parts: [area, run] } = parseAddress(location.hash);
  return area === "runs" && run ? see.map((link) => ({ ...link, run: link.run ?? run })) : see;
}

/** An error of the service as sentences, whose links lead to the views that show the same. */
export function problem(error) {
  const { wrong, expected, advice, see = [] } = error.problem ?? { wrong: error.message };
  return h("div.problem", { role: "note" }, h("p", {}, wrong),
    expected && h("p.quiet", {}, `Expected: ${expected}`), advice && h("p.quiet", {}, withLinks(advice, ofPage(see))));
}
