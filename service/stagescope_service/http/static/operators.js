// The operators of a step's dumps: where a rank first went wrong, and every call in its order.

import { choose } from "./address.js";
import { badge, form, h, quantity } from "./dom.js";
import { Figure } from "./figure.js";
import { bytes, count, partOf, plural, ranges } from "./format.js";
import { toCapture } from "./links.js";
import { get, part, url } from "./service.js";
import { CODE, COUNT, HEAD, PLAIN, RIGHT, WIDE, table } from "./table.js";

/** The last two parts of a path: "/a/b/model/block.py:23 in forward" is "model/block.py:23 in forward". */
const shortPath = (source) => source.replace(/^\S*\/(?=[^/\s]+\/[^/\s]+)/, "");
/** Whether a dump was read and all of it is finite: such dumps are one line together. */
const isFine = (row) => !row.name && !row.reason && row.state !== "announced";

/** "27 dumps: no non-finite value (actor 0-1 in actor_update)". */
function allFine(rows) {
  const places = Map.groupBy(rows, ({ role, stage }) => `in ${stage} of ${role}`);
  const named = [...places].map(([key, found]) => `${key} ${ranges(found.map(({ rank }) => rank))}`).join("; ");
  return [badge("ok", plural(rows.length, "dump")), `: no non-finite value (${named}).`];
}

const NOTHING = { earliest: null, tables: [], rows: [], next: null };

/** Operators of a step, perhaps of one rank and stage. */
export function operators(view, params) {
  const { run, step, attempt, role, rank, stage, name, nonfinite, cursor, against, at } = params;
  const asked = { run, attempt, role, stage };
  const path = (rest, more = {}) => url(`/steps/${part(step)}/operators${rest}`, { ...asked, ...more });
  const concerns = (event) => event.event === "capture" && event.run === run;
  const of = [role, rank, stage && `in ${stage}`].filter(Boolean).join(" ");
  view.add(h("h1", {}, `Operators of step ${step}${of && `, ${of}`}`));
  const dumps = url(`/steps/${part(step)}/dumps`, { run, attempt, limit: 1 });
  view.block({
    title: "First result that is not finite", concerns,
    // A step without a dump has no operators to ask for.
    path: async (since) => (await get(dumps, since)).rows.length ? get(path("/non-finite"), since) : NOTHING,
    draw: ({ earliest, rows }) => [
      earliest ? h("p.lead", {}, badge("found", earliest.certain === false ? "perhaps" : "found"), " ",
        h("code", {}, earliest.name), earliest.parent && [" in ", h("code", {}, earliest.parent)], ` has ${earliest.non_finite} in its ${earliest.section}`,
        ` on ${plural(earliest.together.length, "rank")}`, earliest.source && [", at ", h("code", {}, earliest.source)])
        : rows.length > 0 && h("p.lead", {}, badge("not found"), " All results that were read are finite, or masks."),
      rows.length > 0 && table("By rank", [
        ["rank", (row) => `${row.role} ${row.rank}`, HEAD],
        ["stage"],
        ["part", partOf(rows)],
        ["first operator", (row) => (row.name ? h("code", {}, row.name)
          : row.reason ?? (row.state === "announced" ? "being read" : "none")), WIDE],
        ["holds", "non_finite"],
        ["inputs before it", (row) => (row.bad_inputs ?? []).map((each) =>
          `${each.section} ${each.index ?? ""}: ${each.non_finite}`).join("; ") || "finite", WIDE],
      ], rows.filter((row) => !isFine(row)), {
        key: (row) => `${row.stage}/${row.role}/${row.rank}/${row.part}/${row.capture_id}`, empty: "" }),
      rows.some(isFine) && h("p", {}, allFine(rows.filter(isFine))),
      !rows.length && [h("p.quiet", {}, "Nothing was captured at this step."), h("p", {}, toCapture(run))],
    ],
  });
  view.place(new Figure({
    name: "operators", title: "Values in execution order", params: { ...asked, step, rank }, concerns,
  }));
  view.add(form({}, ({ against: other, at: of }) => choose({ against: other.value, at: of.value || null }),
    h("label", { for: "against" }, "Compare with run"), h("input#against", { name: "against", value: against ?? "" }),
    h("label", { for: "at" }, "step"), h("input#at", { name: "at", type: "number", min: "0", value: at ?? step }),
    h("button", {}, "Compare")));
  if (against) {
    // All ranks together, so that runs of other parallel layouts compare, too.
    const other = { b_run: against, b_step: at, ...(rank === undefined ? { b_ranks: "all" } : {}) };
    view.place(new Figure({
      name: "operator-divergence", title: `Compared with ${against}`, concerns,
      params: { ...asked, step, ...(rank === undefined ? { ranks: "all" } : { rank }), ...other },
    }));
  }
  view.add(form({}, ({ name: text, nonfinite: box }) =>
    choose({ name: text.value, nonfinite: box.checked ? "1" : null, cursor: null }),
    h("label", { for: "name" }, "Name contains"), h("input#name", { name: "name", value: name ?? "" }),
    h("label", {}, h("input", { type: "checkbox", name: "nonfinite", defaultChecked: Boolean(nonfinite) }),
      " only what is not finite"), h("button", {}, "Show")));
  view.block({
    title: "Calls", concerns,
    path: async (since) => (await get(dumps, since)).rows.length
      ? get(path("", { rank, name, non_finite: nonfinite ? true : null, limit: 100, cursor }), since) : NOTHING,
    draw: ({ tables, rows, next }) => [
      table("Dumps", [
        ["dump", (row) => `${row.role} ${row.rank}, ${row.stage}`, HEAD],
        ["part", partOf(tables)],
        ["", (row) => [row.state, row.truncated ? ", cut off" : ""]],
        ["calls", (row) => count(row.calls) ?? "–", RIGHT],
        ["not finite", (row) => count(row.non_finite_rows) ?? "–", RIGHT],
        ["size", (row) => quantity(row.bytes, "", "not read", bytes), RIGHT],
        ["", "reason", WIDE],
      ], tables, { key: (row) => `${row.stage}/${row.role}/${row.rank}/${row.part}/${row.capture_id}`,
        empty: "There is no dump of it." }),
      tables.length > 0 && table("Operator calls in execution order", [
        ["order", "order", COUNT], ["call", "name", { ...HEAD, ...CODE, ...WIDE }],
        ["what", (row) => [row.section, row.index && ` ${row.index}`]],
        ["dtype", (row) => row.dtype ?? row.type ?? ""],
        ["shape", (row) => (row.shape ? row.shape.join(" × ") : "")],
        ["min", "min", PLAIN], ["max", "max", PLAIN], ["mean", "mean", PLAIN], ["norm", "norm", PLAIN],
        ["", (row) => (row.non_finite ? h("span.bad", {}, row.non_finite) : "")],
        ["at", (row) => (row.source ? h("span", { title: row.source }, shortPath(row.source)) : ""), WIDE],
      ], rows, { key: (row) => `${row.role}/${row.rank}/${row.order}/${row.section}/${row.index}/${row.name}`,
        empty: "No call is like that.", next, more: "Further calls" }),
    ],
  });
}
