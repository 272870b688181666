// What the service found: causes with the steps and ranks that they concern, and one finding.

import { ofRun } from "./address.js";
import { badge, facts, h, picker, when } from "./dom.js";
import { count, number, plural } from "./format.js";
import { toCapture, toRank, toStep } from "./links.js";
import { part, url } from "./service.js";
import { COUNT, HEAD, RIGHT, WHEN, WIDE, table } from "./table.js";

const ONLY = ["error", "warning", "info"];

/** Findings of a run, grouped by cause. */
export function findings(view, { run, only = "", attempt = "", cursor }) {
  view.add(h("h1", {}, `Findings of ${run}`), h("p.row", {},
    picker("only", "Show", [...new Set(["", ...ONLY, only])].map((each) =>
      [each, ONLY.includes(each) ? `${each}s` : each || "all"]), only)));
  view.block({
    path: url("/findings/groups", { run, attempt, only, cursor, limit: 100 }),
    concerns: (event) => event.run === run && event.event === "finding",
    draw: ({ rows, groups, grouped, truncated, next }) => [
      h("p.quiet", {}, `${plural(groups, "cause")} of ${plural(grouped, "finding")}`,
        truncated && ", the newest; more are left out", "."),
      findingsTable(run, rows, next),
    ],
  });
}

/** Where a finding, or a group of them, is. */
const placeOf = ({ where, step, role, rank, stage }) => [
  where || [step !== null && `step ${step}`, role, rank !== null && `rank ${rank}`].filter(Boolean).join(" ") || "the run",
  stage && `, ${stage}`,
];

/** A table of findings, or of groups of them. */
export const findingsTable = (run, rows, next) => table("Findings", [
  ["", (row) => badge(row.severity ?? "info")],
  ["finding", (row) => h("a", { href: ofRun(run, "findings", row.finding_id) }, row.message ?? row.kind),
    { ...HEAD, ...WIDE }],
  ["where", (row) => placeOf(row)],
  ["attempt", "attempt", COUNT],
  ["times", (row) => count(row.count ?? row.findings ?? 1), RIGHT],
  ["last seen", "last_wall", WHEN],
  ["", (row) => (row.over_wall === null ? "" : ["over since ", when(row.over_wall)])],
], rows, { key: (row) => row.finding_id, empty: "Nothing was found.", next });

/** One finding with its evidence. */
export function finding(view, { run, finding: id }) {
  view.add(h("h1", {}, "Finding"));
  view.block({
    path: `/findings/${part(id)}`,
    concerns: (event) => event.event === "finding" && event.finding_id === id,
    draw: (row) => [
      h("p.lead", {}, badge(row.severity ?? "info"), " ", row.message),
      row.advice && h("p", {}, h("strong", {}, "What to try: "), row.advice),
      facts([
        ["kind", row.kind],
        ["where", row.group.where || "the run"],
        ["step", row.attempt !== null && toStep(run, row)],
        ["rank", row.step !== null && row.rank !== null && row.role !== null && toRank(run, row)],
        ["stage", row.stage],
        ["attempt", count(row.attempt)],
        ["seen", [count(row.count ?? 1), " times, first ", when(row.first_wall), ", last ",
          when(row.last_wall)]],
        ["over", row.over_wall === null ? "no" : when(row.over_wall)],
        ["findings of this cause", count(row.group.findings)],
      ]),
      row.evidence && [h("h2", {}, "Evidence"), tree(row.evidence)],
      row.step !== null && h("p", {}, toCapture(run, { stages: row.stage, ranks: row.rank, roles: row.role },
        "Request a capture of this stage and rank")),
    ],
  });
}

/** Nested facts as lists. */
export function tree(value) {
  if (Array.isArray(value)) {
    if (value.every((each) => each === null || typeof each !== "object")) {
      return value.map((each) => leaf(each)).join(", ") || "none";
    }
    return h("ul", {}, value.map((each) => h("li", {}, tree(each))));
  }
  if (value !== null && typeof value === "object") {
    return facts(Object.entries(value).map(([name, each]) => [name.replace(/_/g, " "), tree(each)]));
  }
  return leaf(value);
}

const leaf = (value) =>
  value === null ? "–" : typeof value === "number" && !Number.isInteger(value) ? number(value)
  : String(value);
