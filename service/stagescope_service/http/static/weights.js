// Weights: whether the rollout received what the trainer sent, tensor by tensor, and devices that
// hold something else than their replicas.

import { nameOf, ofRun } from "./address.js";
import { badge, h, listed, picker, quantity } from "./dom.js";
import { count, ranges } from "./format.js";
import { toStep } from "./links.js";
import { part, url } from "./service.js";
import { BADGE, CODE, COUNT, HEAD, RIGHT, WHEN, WIDE, table } from "./table.js";

const VERDICTS = ["differs", "missing", "replicas differ", "not comparable", "not compared", "agrees"];

/** Whether an event may come with weights of a run. */
const concerning = (run) => (event) => event.run === run && ["step", "finding", "attempt"].includes(event.event);

/** The versions of an attempt's weights. */
export function weights(view, { run, attempt, cursor }) {
  view.add(h("h1", {}, `Weights of ${nameOf(run)}`),
    h("p", {}, h("a", { href: "#/devices" }, "Devices whose weights differed from their replicas'")));
  view.block({
    path: url("/weights", { run, attempt, cursor, limit: 100 }),
    concerns: concerning(run),
    draw: ({ rows, next }) => table("Versions of the weights", [
      ["version", (row) => h("a", { href: ofRun(run, "weights", row.version) }, row.version), { ...HEAD, ...RIGHT }],
      ["verdict", (row) => (row.differ || row.missing ? badge("differs")
        : row.replicas_differ ? badge("partial", "replicas differ")
        : row.not_comparable || !row.agree ? badge("unknown", "not all compared") : badge("agrees"))],
      ["step", ({ step }) => toStep(run, { step, attempt }), RIGHT],
      ["agree", "agree", COUNT],
      ["differ", (row) => bad(row.differ), RIGHT],
      ["missing", (row) => bad(row.missing), RIGHT],
      ["not comparable", "not_comparable", COUNT],
      ["replicas differ", (row) => bad(row.replicas_differ), RIGHT],
      ["first of them", (row) => Object.entries(row.names).filter(([, names]) => names.length).map(([kind, names]) =>
        `${kind}: ${names.slice(0, 2).join(", ")}${names.length > 2 ? ", …" : ""}`).join("; "), WIDE],
      ["recorded by", (row) => recorders(row.ranks), WIDE],
      ["", (row) => (row.complete ? "" : "ranks are missing")],
      ["when", "wall", WHEN],
    ], rows, { key: (row) => row.version, next, more: "Earlier versions", empty: "No weights were recorded: "
      + "probe.record_weights(...) on both sides of a weight sync." }),
  });
}

const bad = (value) => (value ? h("span.bad", {}, count(value)) : "0");

const recorders = (sides) => Object.entries(sides).map(([side, roles]) =>
  Object.entries(roles).map(([role, ranks]) => `${role === side ? "" : `${side}: `}${role} ${ranges(ranks)}`).join(", ")).join("; ");

/** One version: every weight, the worst first. */
export function version(view, { run, attempt, version: own, verdict = "", cursor }) {
  view.add(h("h1", {}, `Weights of ${nameOf(run)}, version ${own}`), h("p.row", {},
    picker("verdict", "Show", [["", "all"], ...VERDICTS], verdict)));
  view.block({
    path: url(`/weights/${part(own)}`, { run, attempt, verdict, cursor, limit: 200 }),
    concerns: concerning(run),
    draw: ({ rows, next, counts, complete }) => [
      h("p.lead", {}, listed(VERDICTS.filter((each) => counts[each]).map((each) =>
        badge(each === "replicas differ" ? "partial" : each, `${count(counts[each])} ${each}`)), " "),
      !complete && " (ranks are missing)"),
      table("Weights", [
        ["weight", "name", { ...HEAD, ...CODE }], ["", "verdict", BADGE], ["dtype"],
        ["shape", (row) => (row.shape ?? []).join(" × ")],
        ["rollout ranks that differ", (row) => ranges(row.ranks)],
        ["unlike their replicas", (row) => row.odd_ranks.map((each) => `${each.role} ${each.rank}`).join(", ")],
        ["sent", (row) => h("code", {}, row.trainer ?? "–")],
        ["received", (row) => h("code", {}, row.rollout ?? "–")],
        ["why", "reason", WIDE],
      ], rows, { key: (row) => `${row.name}/${row.kind}`, empty: "No weight is like that.", next, more: "Further weights" }),
    ],
  });
}

/** Devices that hold something else than their replicas. */
export function devices(view) {
  view.add(h("h1", {}, "Devices whose weights differed from their replicas'"),
    h("p.quiet", {}, "Outvoted: in how many versions most replicas had other weights. "
      + "Suspected: in how many the replicas differed and no majority says which is wrong."));
  view.block({
    path: url("/devices", { limit: 200 }),
    draw: ({ rows }) => table("Devices", [
      ["device", "device", { ...HEAD, ...CODE }],
      ["outvoted", (row) => bad(row.odd), RIGHT],
      ["suspected", "suspected", COUNT],
      ["runs", (row) => listed(row.runs.map((each) => h("a", { href: ofRun(each) }, each)))],
      ["last", (row) => `${row.last_run}, ${row.last_role} ${row.last_rank}, version ${row.last_version}`],
      ["tensors", (row) => quantity(row.tensors, "", "", count), RIGHT],
      ["host"], ["when", "last_wall", WHEN],
    ], rows, { key: (row) => row.device, empty: "None was seen." }),
  });
}
