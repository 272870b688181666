// The active rules, what fired, and what triggers may spend.

import { nameOf, ofRun } from "./address.js";
import { isAction, isOver } from "./blocks.js";
import { badge, form, h, listed, quantity } from "./dom.js";
import { bytes, count, seconds, share } from "./format.js";
import { toStep } from "./links.js";
import { send, url } from "./service.js";
import { CODE, COUNT, HEAD, RIGHT, WHEN, WIDE, table } from "./table.js";

/** Triggers of a run. */
export function triggers(view, { run }) {
  const concerns = (event) => (event.run === run && (event.event === "finding" || isOver(event)))
    || isAction(event, "set_triggers", "pin", "unpin");
  view.add(h("h1", {}, `Triggers of ${nameOf(run)}`));
  view.block({
    title: "Budgets", path: url("/triggers", { run }),
    concerns: (event) => concerns(event) || (event.run === run && event.event === "capture"),
    draw: ({ budgets }) => table("Budgets of captures", [
      ["run", "run", HEAD],
      ["captures", (row) => `${count(row.spent.captures)} of ${count(row.budget.captures)}`, RIGHT],
      ["bytes", (row) => `${bytes(row.spent.bytes)} of ${row.budget.bytes == null ? "any" : bytes(row.budget.bytes)}`,
        RIGHT],
      ["time", (row) => `${seconds(row.spent.seconds)}, ${share(row.spent.share)} of ${
        row.budget.share == null ? "any" : share(row.budget.share)}`, RIGHT],
      ["under way", (row) => listed(row.under_way.map((id) =>
        h("a", { href: ofRun(row.run, "captures", id) }, id)))],
      ["", (row) => (row.refusal ? badge("refused", row.refusal) : "there is room"), WIDE],
    ], budgets, { key: (row) => row.run, empty: ["Triggers may not request captures of any run: rules make findings and pin steps. To allow captures, "
      + "give a budget with ", h("code", {}, "runs"), " in the rules, or in the training's settings."] }),
  });
  view.block({
    title: "What fired", path: url("/triggers/firings/groups", { run, limit: 50 }),
    concerns,
    draw: ({ rows }) => table("Firings", [
      ["rule", "rule", HEAD],
      ["first", (row) => toStep(run, row, `step ${row.step}`)],
      ["attempt", "attempt", COUNT], ["where"], ["times", "firings", COUNT], ["what", "message", WIDE],
      ["then", (row) => row.outcomes.join("; "), WIDE],
      ["last", "last_wall", WHEN],
    ], rows, { key: (row) => `${row.rule}/${row.stage}/${row.role}/${row.attempt}/${row.step}`, empty: "No rule fired." }),
  });
  const tryRules = async () => {
    const { steps, rows } = await send("POST", "/triggers/test", { run });
    return [h("p", {}, `Of ${count(steps)} stored steps:`), table("Would have fired", [
      ["step", (row) => toStep(run, row), { ...HEAD, ...RIGHT }],
      ["attempt", "attempt", COUNT], ["rule"],
      ["value", (row) => quantity(row.value), RIGHT],
      ["what", "message", WIDE],
      ["", (row) => (row.fired_live ? "fired live" : "")],
    ], rows, { key: (row) => `${row.attempt}/${row.step}/${row.rule}`, empty: "nothing would have fired." })];
  };
  view.block({
    title: "Active rules", path: url("/triggers", { run }),
    concerns,
    draw: ({ rules, revision, by, source, pinned }) => [
      h("p.quiet", {}, `Revision ${count(revision)}, ${source === "set" ? "set" : `from ${source}`}${by ? ` by ${by}` : ""}.`),
      table("Rules", [
        ["rule", "name", HEAD], ["metric", "metric", CODE], ["by"],
        ["when", (row) => conditions(row.when), WIDE],
        ["for", (row) => (row.for === 1 ? "" : `${row.for} steps`)],
        ["then", (row) => Object.keys(row.actions).join(", ")],
        ["fired", "fired", COUNT],
        ["last", ({ last_fired: last }) => (last ? toStep(last.run, last, `step ${last.step}`) : "")],
      ], rules, { key: (row) => row.name }),
      pinned.length > 0 && h("p", {}, "Pinned: ",
        listed(pinned.map((each) => toStep(each.run, each, `step ${each.step}`)))),
    ],
  });
  view.add(form({ class: "row operates" }, tryRules, h("button", {}, "Try the rules on the stored steps")),
    h("p.quiet.operates", {}, "Rules are set by ", h("code", {}, "stagescope triggers set"), "; the service's API has them at ",
      h("a", { href: "docs" }, "PUT /triggers"), "."));
}

function conditions(when_) {
  return Object.entries(when_).map(([name, value]) =>
    name === "non_finite" ? "not finite"
    : name === "z_score" ? `over ${String(value.over)} σ of ${value.steps} steps`
    : name === "median_ratio" ? `over ${String(value)} × the median`
    : name === "noise_ratio" ? `over ${String(value)} × the noise floor`
    : name === "standard_errors" ? `by ${String(value)} standard errors`
    : `${name} ${String(value)}`).join(" and ");
}

