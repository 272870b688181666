// Weights: whether the rollout received what the trainer sent, tensor by tensor, and devices that
// hold something else than their replicas.

import { choose, ofRun, ofStep } from "./address.js";
import { badge, h, nodes, quantity, table, when } from "./dom.js";
import { count, ranges } from "./format.js";
import { part, url } from "./service.js";

const VERDICTS = ["differs", "missing", "replicas differ", "not comparable", "not compared", "agrees"];

/** The versions of an attempt's weights. */
export function weights(view, { run, attempt, cursor }) {
  view.add(h("h1", {}, `Weights of ${run}`),
    h("p", {}, h("a", { href: "#/devices" }, "Devices whose weights differed from their replicas'")));
  view.block({
    path: url("/weights", { run, attempt, cursor, limit: 100 }),
    concerns: (event) => event.run === run && ["step", "finding"].includes(event.event),
    draw: ({ rows, next }) => [
      table("Versions of the weights", [
        ["version", (row) => h("a", { href: ofRun(run, "weights", row.version) }, row.version),
          { head: true, right: true }],
        ["verdict", (row) => (row.differ || row.missing ? badge("differs")
          : row.replicas_differ ? badge("partial", "replicas differ")
          : row.not_comparable || !row.agree ? badge("unknown", "not all compared") : badge("agrees"))],
        ["step", (row) => (row.step === null ? "" : h("a", { href: ofStep(run, row.step, attempt) }, row.step)),
          { right: true }],
        ["agree", (row) => count(row.agree), { right: true }],
        ["differ", (row) => bad(row.differ), { right: true }],
        ["missing", (row) => bad(row.missing), { right: true }],
        ["not comparable", (row) => count(row.not_comparable), { right: true }],
        ["replicas differ", (row) => bad(row.replicas_differ), { right: true }],
        ["first of them", (row) => Object.entries(row.names).filter(([, names]) => names.length).map(([kind, names]) =>
          `${kind}: ${names.slice(0, 2).join(", ")}${names.length > 2 ? ", …" : ""}`).join("; "), { wide: true }],
        ["recorded by", (row) => recorders(row.ranks), { wide: true }],
        ["", (row) => (row.complete ? "" : "ranks are missing")],
        ["when", (row) => when(row.wall)],
      ], rows, { key: (row) => row.version, empty: "No weights were recorded: probe.record_weights(...) "
        + "on both sides of a weight sync." }),
      next && h("button", { type: "button", onclick: () => choose({ cursor: next }) }, "Earlier versions"),
    ],
  });
}

const bad = (value) => (value ? h("span.bad", {}, count(value)) : "0");

const recorders = (sides) => Object.entries(sides).map(([side, roles]) =>
  `${side}: ${Object.entries(roles).map(([role, ranks]) => `${role} ${ranges(ranks)}`).join(", ")}`).join("; ");

/** One version: every weight, the worst first. */
export function version(view, { run, attempt, version: own, verdict = "", cursor }) {
  view.add(h("h1", {}, `Weights of ${run}, version ${own}`), h("p.row", {},
    h("label", { for: "verdict" }, "Show"),
    h("select#verdict", { onchange: ({ target }) => choose({ verdict: target.value, cursor: null }) },
      ["", ...VERDICTS].map((each) => h("option", { value: each, selected: each === verdict }, each || "all")))));
  view.block({
    path: url(`/weights/${part(own)}`, { run, attempt, verdict, cursor, limit: 200 }),
    draw: ({ rows, next, counts, complete }) => [
      h("p.lead", {}, VERDICTS.filter((each) => counts[each]).map((each, at) =>
        [at > 0 && " ", badge(each === "replicas differ" ? "partial" : each, `${count(counts[each])} ${each}`)]),
      !complete && " (ranks are missing)"),
      table("Weights", [
        ["weight", (row) => h("code", {}, row.name), { head: true }],
        ["", (row) => badge(row.verdict)],
        ["dtype", (row) => row.dtype ?? ""],
        ["shape", (row) => (row.shape ?? []).join(" × ")],
        ["rollout ranks that differ", (row) => ranges(row.ranks)],
        ["unlike their replicas", (row) => row.odd_ranks.map((each) => `${each.role} ${each.rank}`).join(", ")],
        ["sent", (row) => h("code", {}, row.trainer ?? "–")],
        ["received", (row) => h("code", {}, row.rollout ?? "–")],
        ["why", (row) => row.reason ?? "", { wide: true }],
      ], rows, { key: (row) => `${row.name}/${row.kind}`, empty: "No weight is like that." }),
      next && h("button", { type: "button", onclick: () => choose({ cursor: next }) }, "Further weights"),
    ],
  });
}

/** Devices that hold something else than their replicas. */
export function devices(view) {
  view.add(h("h1", {}, "Devices whose weights differed from their replicas'"));
  view.block({
    path: url("/devices", { limit: 200 }),
    draw: ({ rows }) => table("Devices", [
      ["device", (row) => h("code", {}, row.device), { head: true }],
      ["outvoted", (row) => bad(row.odd), { right: true }],
      ["suspected", (row) => count(row.suspected), { right: true }],
      ["runs", (row) => nodes(row.runs.map((each, at) => [at > 0 && ", ", h("a", { href: ofRun(each) }, each)]))],
      ["last", (row) => `${row.last_run}, ${row.last_role} ${row.last_rank}, version ${row.last_version}`],
      ["tensors", (row) => quantity(row.tensors, "", "", count), { right: true }],
      ["host", (row) => row.host ?? ""],
      ["when", (row) => when(row.last_wall)],
    ], rows, { key: (row) => row.device, empty: "None was seen." }),
  });
}
