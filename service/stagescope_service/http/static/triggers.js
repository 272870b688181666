// The rules in force, what fired, and what triggers may spend.

import { ofRun, ofStep } from "./address.js";
import { badge, h, nodes, patch, problem, quantity, table, when } from "./dom.js";
import { bytes, count, number, seconds, share } from "./format.js";
import { send, url } from "./service.js";

/** Triggers of a run. */
export function triggers(view, { run }) {
  view.add(h("h1", {}, `Triggers of ${run}`));
  view.block({
    title: "Budgets", path: url("/triggers", { run }),
    concerns: (event) => event.run === run && ["capture", "finding"].includes(event.event),
    draw: ({ budgets }) => table("Budgets of captures", [
      ["run", (row) => row.run, { head: true }],
      ["captures", (row) => `${count(row.spent.captures)} of ${count(row.budget.captures)}`, { right: true }],
      ["bytes", (row) => `${bytes(row.spent.bytes)} of ${row.budget.bytes == null ? "any" : bytes(row.budget.bytes)}`,
        { right: true }],
      ["time", (row) => `${seconds(row.spent.seconds)}, ${share(row.spent.share)} of ${
        row.budget.share == null ? "any" : share(row.budget.share)}`, { right: true }],
      ["under way", (row) => row.under_way.map((id, at) => [at > 0 && ", ",
        h("a", { href: ofRun(row.run, "captures", id) }, id)])],
      ["", (row) => (row.refusal ? badge("refused", row.refusal) : "there is room"), { wide: true }],
    ], budgets, { key: (row) => row.run, empty: ["No run may be captured by triggers: rules make "
      + "findings and pin steps. ", h("code", {}, "runs"), " in the rules, or the training's settings, ",
      "give a budget."] }),
  });
  view.block({
    title: "What fired", path: url("/triggers/firings/groups", { run, limit: 50 }),
    concerns: (event) => event.run === run && event.event === "finding",
    draw: ({ rows }) => table("Firings", [
      ["rule", (row) => row.rule, { head: true }],
      ["first", (row) => h("a", { href: ofStep(run, row.step, row.attempt) }, `step ${row.step}`)],
      ["where", (row) => row.where],
      ["times", (row) => count(row.firings), { right: true }],
      ["what", (row) => row.message, { wide: true }],
      ["then", (row) => row.outcomes.join("; "), { wide: true }],
      ["last", (row) => when(row.last_wall)],
    ], rows, { key: (row) => `${row.rule}/${row.stage}/${row.role}/${row.step}`, empty: "No rule fired." }),
  });
  const result = h("div", { "aria-live": "polite" });
  const tryRules = async (event) => {
    event.preventDefault();
    try {
      const found = await send("POST", "/triggers/test", { run });
      patch(result, nodes(h("p", {}, `Of ${count(found.steps)} stored steps:`), table("Would have fired", [
        ["step", (row) => h("a", { href: ofStep(run, row.step, row.attempt) }, row.step), { head: true, right: true }],
        ["rule", (row) => row.rule],
        ["value", (row) => quantity(row.value), { right: true }],
        ["what", (row) => row.message, { wide: true }],
        ["", (row) => (row.fired_live ? "fired live" : "")],
      ], found.rows, { key: (row) => `${row.attempt}/${row.step}/${row.rule}`, empty: "nothing would have fired." })));
    } catch (error) {
      patch(result, nodes(problem(error)));
    }
  };
  view.block({
    title: "Rules in force", path: url("/triggers", { run }),
    concerns: (event) => event.run === run && event.event === "finding",
    draw: ({ rules, revision, by, source, pinned }) => [
      h("p.quiet", {}, `Revision ${count(revision)}, from ${source}${by ? `, by ${by}` : ""}.`),
      table("Rules", [
        ["rule", (row) => row.name, { head: true }],
        ["metric", (row) => h("code", {}, row.metric)],
        ["by", (row) => row.by],
        ["when", (row) => conditions(row.when), { wide: true }],
        ["for", (row) => (row.for === 1 ? "" : `${row.for} steps`)],
        ["then", (row) => Object.keys(row.actions).join(", ")],
        ["fired", (row) => count(row.fired), { right: true }],
        ["last", (row) => (row.last_fired ? h("a", {
          href: ofStep(row.last_fired.run, row.last_fired.step, row.last_fired.attempt),
        }, `step ${row.last_fired.step}`) : "")],
      ], rules, { key: (row) => row.name }),
      pinned.length > 0 && h("p", {}, "Pinned: ", pinned.map((each, at) => [at > 0 && ", ",
        h("a", { href: ofStep(each.run, each.step, each.attempt) }, `step ${each.step}`)])),
    ],
  });
  view.add(h("form.operates", { onsubmit: tryRules }, h("button", {}, "Try the rules on the stored steps")), result,
    h("p.quiet.operates", {}, "Rules are set by ", h("code", {}, "stagescope triggers set"), "; the service's API has them at ",
      h("a", { href: "docs" }, "PUT /triggers"), "."));
}

function conditions(when_) {
  return Object.entries(when_).map(([name, value]) =>
    name === "non_finite" ? "not finite"
    : name === "z_score" ? `over ${number(value.over)} σ of ${value.steps} steps`
    : name === "median_ratio" ? `over ${number(value)} × the median`
    : name === "noise_ratio" ? `over ${number(value)} × the noise floor`
    : name === "standard_errors" ? `by ${number(value)} standard errors`
    : `${name} ${number(value)}`).join(" and ");
}

