// Whether rollout and trainer chose the same experts in a step.

import { ofSample } from "./address.js";
import { badge, h } from "./dom.js";
import { isFinite } from "./format.js";
import { get } from "./service.js";
import { measured, orNothing } from "./step_numbers.js";
import { COUNT, HEAD, NAT, WIDE, table } from "./table.js";

const percent = (value) => (isFinite(value) ? 100 * value : null);
const SHARE = { unit: "%" };

/** A block of what is known of a step's routes; `draw` draws the answer. */
const block = (view, path, concerns, title, draw, none) => view.block({
  title, concerns,
  path: async (since) => {
    const found = await measured(path, "metrics")(since);
    if (found.none) return found;
    try {
      return await get(path("routing", { limit: 1000 }), since);
    } catch (error) {
      if (error.status !== 404) throw error;
      return { unrecorded: error.message };
    }
  },
  draw: orNothing((found) => (found.unrecorded ? none(found.unrecorded) : draw(found))),
});

/** The answer, and what is wrong with the routes. */
export const routingText = (view, path, concerns) => block(view, path, concerns,
  "Experts of rollout and trainer", (found) => [
    h("p", {}, found.text),
    found.faults.map((fault) => h("p", {}, badge("warning", fault.kind), " ", fault.text)),
  ], (why) => h("p.quiet", {}, why));

/** The tables of layers and of the worst tokens. */
export const routingTables = (view, path, concerns) => block(view, path, concerns, "Layers", tables, () => []);

const tables = (found) => [
  table("Layers", [
    ["layer", "layer", HEAD], ["tokens", "tokens", COUNT],
    ["same experts", (row) => percent(row.agreement), SHARE],
    ["order only", (row) => percent(row.order_only), SHARE],
    ["equal experts", (row) => percent(row.slots), SHARE],
    ["without a choice", (row) => (row.rollout_unset || row.trainer_unset
      ? `rollout ${row.rollout_unset}, trainer ${row.trainer_unset}` : "")],
  ], found.rows, { key: (row) => row.layer }),
  found.worst.length > 0 && table("Worst tokens with their experts", [
    ["sample", (row) => (row.sample_uid === null ? `row ${row.row}`
      : h("a", { href: ofSample(found.run, found.step, found.attempt, row) }, row.sample_uid)), HEAD],
    ["position", "position"], ["|d|", "abs_diff", NAT],
    ["layers that differ: rollout, trainer", (row) => row.differing
      .map((each) => `${each.layer}: ${each.rollout.join(" ")}, ${each.trainer.join(" ")}`).join("; ") || "none", WIDE],
  ], found.worst, { key: (row) => `${row.sample_uid ?? row.row}/${row.position}`, isNamed: true }),
];
