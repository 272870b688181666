// Whether rollout and trainer chose the same experts in a step.

import { ofSample } from "./address.js";
import { badge, h } from "./dom.js";
import { isFinite } from "./format.js";
import { measured, orNothing } from "./step_numbers.js";
import { COUNT, HEAD, NAT, WIDE, table } from "./table.js";

const percent = (value) => (isFinite(value) ? 100 * value : null);
const SHARE = { unit: "%" };

/**
 * The answer, the heat map, and the tables; of a step without routes what to record. Nothing is
 * asked for that is not there.
 * @param picture places the heat map.
 */
export function routingParts(view, path, concerns, picture) {
  let isShown = false;
  const block = (title, draw) => view.block({
    title, concerns, path: measured(path, "routing", { limit: 1000 }), draw: orNothing(draw),
  });
  view.block({
    path: measured(path, "metrics"), concerns,
    draw: orNothing(({ metrics }) => {
      if (!("routing/agreement" in metrics)) {
        return h("p.quiet", {}, "No routes of experts are recorded: record rollout_routed_experts and "
          + "trainer_routed_experts beside the log-probs.");
      }
      if (isShown) return [];
      isShown = true;
      block("Experts of rollout and trainer", answer);
      picture();
      block("Layers", tables);
      return [];
    }),
  });
}

const answer = (found) => [
  h("p", {}, found.text),
  found.faults.map((fault) => h("p", {}, badge("warning", fault.kind), " ", fault.text)),
];

/** What a layer's routes match, where they are not those of the same token and layer. */
function matches({ agreement, earlier, later, best_other: other, best_other_agreement: ofOther }) {
  if (agreement === null || agreement >= 0.9) return "";
  return [["the token before", earlier], ["the token after", later], [`layer ${other}`, ofOther]]
    .filter(([, share]) => share >= 0.2).map(([name, share]) => `${name}: ${(100 * share).toFixed(1)} %`).join(", ");
}

const tables = (found) => [
  table("Layers", [
    ["layer", "layer", HEAD], ["tokens", "tokens", COUNT],
    ["same experts", (row) => percent(row.agreement), SHARE],
    ["order only", (row) => percent(row.order_only), SHARE],
    ["equal experts", (row) => percent(row.slots), SHARE],
    ["without a choice", (row) => (row.rollout_unset || row.trainer_unset
      ? `rollout ${row.rollout_unset}, trainer ${row.trainer_unset}` : "")],
    ["trainer's experts that match instead", matches],
  ], found.rows, { key: (row) => row.layer }),
  found.worst.length > 0 && table("Worst tokens with their experts", [
    ["sample", (row) => (row.sample_uid === null ? `row ${row.row}`
      : h("a", { href: ofSample(found.run, found.step, found.attempt, row) }, row.sample_uid)), HEAD],
    ["position", "position"], ["|d|", "abs_diff", NAT],
    ["layers that differ: rollout, trainer", (row) => row.differing
      .map((each) => `${each.layer}: ${each.rollout.join(" ")}, ${each.trainer.join(" ")}`).join("; ")
      || (row.lacks.length ? `no route of the ${row.lacks.join(" and the ")}` : "none"), WIDE],
  ], found.worst, { key: (row) => `${row.sample_uid ?? row.row}/${row.position}`, isNamed: true }),
];
