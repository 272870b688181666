// What the service found: causes with the steps and ranks that they concern, and one finding.

import { nameOf, ofRun } from "./address.js";
import { withLinks } from "./commands.js";
import { badge, facts, h, picker, when } from "./dom.js";
import { count, number, plural } from "./format.js";
import { toCapture, toRank, toStep } from "./links.js";
import { part, url } from "./service.js";
import { COUNT, HEAD, RIGHT, WHEN, WIDE, table } from "./table.js";

const ONLY = ["error", "warning", "info"];

/** Findings of a run, grouped by cause. */
export function findings(view, { run, only = "", attempt = "", cursor }) {
  view.add(h("h1", {}, `Findings of ${nameOf(run)}`), h("p.row", {},
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
  where || [step !== null && `step ${step}`, role && [role, rank].filter((each) => each !== null).join(" ")]
    .filter(Boolean).join(", ") || "the run",
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
  view.add(h("h1", {}, `Finding of ${nameOf(run)}`));
  view.block({
    path: `/findings/${part(id)}`,
    concerns: (event) => event.event === "finding" && event.finding_id === id,
    draw: (row) => [
      h("p.lead", {}, badge(row.severity ?? "info"), " ", row.message),
      row.advice && h("p", {}, h("strong", {}, "What to try: "), withLinks(row.advice, row.see)),
      facts([
        ["kind", row.kind],
        ["where", row.step === null && (row.group.where || "the run")],
        ["step", row.attempt !== null && toStep(run, row)],
        ["rank", row.step !== null && row.rank !== null && row.role !== null && toRank(run, row)],
        ["stage", row.stage],
        ["attempt", count(row.attempt)],
        ["seen", row.count > 1 ? [plural(row.count, "time"), ", first ", when(row.first_wall), ", last ",
          when(row.last_wall)] : when(row.last_wall)],
        ["over since", row.over_wall !== null && when(row.over_wall)],
        ["findings of this cause", row.group.findings > 1 && count(row.group.findings)],
      ]),
      hasFacts(row.evidence) && [h("h2", {}, "Evidence"), tree(row.evidence)],
      row.stage && h("p", {}, toCapture(run, { stages: row.stage, ranks: row.rank, roles: row.role },
        `Request a capture of this stage${row.rank === null ? "" : " and rank"}`)),
    ],
  });
}

const isNested = (value) => value !== null && typeof value === "object";
const isEmpty = (value) => value === null || (isNested(value) && !Object.keys(value).length);
const hasFacts = (evidence) => !isEmpty(evidence ?? null)
  && (!isNested(evidence) || Object.values(evidence).some((each) => !isEmpty(each)));
const words = (name) => name.replace(/_/g, " ");
const FEW = 2; // facts that are read in one line with others

/** Nested facts: those of one line first, then each that is longer below its name; none is empty. */
export function tree(value) {
  if (!isNested(value)) return leaf(value);
  if (Array.isArray(value)) return value.some((each) => isNested(each) && !Array.isArray(each)) ? rowsOf(value) : leaf(value);
  const known = Object.entries(value).filter(([, each]) => !isEmpty(each));
  const isLong = (each) => isNested(each) && (Array.isArray(each) ? each.some((one) => isNested(one) && !Array.isArray(one))
    : Object.values(each).some(isNested) || Object.keys(each).length > FEW);
  return [facts(known.filter(([, each]) => !isLong(each)).map(([name, each]) => [words(name), leaf(each)])),
    known.filter(([, each]) => isLong(each)).map(([name, each]) => [h("h3", {}, words(name)), tree(each)])];
}

/** A list of facts as a table: what each has is a column. */
function rowsOf(list) {
  const rows = list.map((each) => (isNested(each) ? each : { value: each }));
  const names = [...new Set(rows.flatMap((row) => Object.keys(row)))];
  return table("Evidence", names.map((name) => [words(name), (row) => (isEmpty(row[name] ?? null) ? "" : leaf(row[name]))]), rows);
}

/** A fact in one line: "> 0.02, median ratio 3"; a list in a list is a place: "actor 3, actor 5". */
const leaf = (value) =>
  value === null ? "–"
  : Array.isArray(value) ? value.map((each) => (Array.isArray(each) ? each.map(leaf).join(" ") : leaf(each))).join(", ")
  : isNested(value) ? Object.entries(value).map(([name, each]) => `${words(name)} ${leaf(each)}`).join(", ")
  : typeof value === "number" && !Number.isInteger(value) ? number(value) : String(value);
