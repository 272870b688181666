// Tables, and the options of their columns.

import { choose } from "./address.js";
import { badge, button, h, quantity, when } from "./dom.js";
import { bytes, columnFormat, count } from "./format.js";
import { explained } from "./words.js";

/**
 * A table that scrolls on its own. Columns are [heading, cell, options]. A cell is (row) -> node or
 * text, or the name of a field, which is the heading if it is left out, and drawn by `as`. Options are
 * `right` (numbers), `head` (the cell names its row) and `wide` (wraps). With `unit`, "" for none, a
 * cell is a number: all of the column have one format, and `why(row)` says why one is not
 * known. A column whose cells are all "" is left out. With `stacks` the rows of a narrow page are
 * blocks, each cell with its heading, so that nothing has to be scrolled into sight. `isNamed` shows
 * the caption to all. `next` is the cursor of further rows, to which a button named `more` leads.
 */
export function table(caption, columns, rows, {
  key, empty = "none", rowClass, stacks = true, isNamed = false, next = null, more = "More",
} = {}) {
  if (!rows.length) return h("p.quiet", {}, empty);
  const shown = columns.map((column) => drawn(column, rows))
    .filter(([, cells]) => cells.some((cell) => cell !== ""));
  const cells = (at) => shown.map(([heading, own, options]) =>
    h(options.head ? "th" : "td", {
      scope: options.head ? "row" : null,
      "data-heading": stacks && !options.head && own[at] !== "" && textOf(heading) || null,
      class: options.right ? "right" : options.wide && "wrap",
    }, own[at]));
  return [h("div.scroll", { tabindex: 0, role: "region", "aria-label": caption },
    h("table", { class: stacks ? "stacks" : "" },
      h("caption", { class: isNamed ? "" : "hidden" }, caption),
      h("thead", {}, h("tr", {}, shown.map(([heading, , options]) =>
        h("th", { scope: "col", class: options.right ? "right" : "" }, explained(heading))))),
      h("tbody", {}, rows.map((row, at) =>
        h("tr", { "data-key": key ? key(row) : at, class: rowClass ? rowClass(row) : "" }, cells(at)))))),
  next && button(more, () => choose({ cursor: next }))];
}

/** The words of a heading, which may have a sign beside them. */
const textOf = (heading) => [heading].flat().filter((each) => typeof each === "string").join("");

/** A column with its cells in place of what makes them. */
function drawn([heading, cell = heading, options = {}], rows) {
  const { as = (value) => value ?? "" } = options;
  const values = rows.map((row) => (typeof cell === "function" ? cell(row)
    : options.unit === undefined ? as(row[cell]) : row[cell]));
  const { unit, why } = options;
  if (unit === undefined) return [heading, values, options];
  const format = columnFormat(values);
  return [unit ? `${heading}, ${unit}` : heading,
    values.map((value, at) => quantity(value, "", why?.(rows[at]), format)), { ...options, right: true }];
}

/** Options of columns. */
export const HEAD = { head: true };
export const WIDE = { wide: true };
export const RIGHT = { right: true };
export const NAT = { unit: "nat" };
export const PLAIN = { unit: "" };
export const COUNT = { ...RIGHT, as: (value) => count(value) ?? "" };
export const SIZE = { ...RIGHT, as: (value) => quantity(value, "", "unknown", bytes) };
export const WHEN = { as: when };
export const BADGE = { as: (word) => badge(word) };
export const CODE = { as: (text) => h("code", {}, text ?? "–") };
