// One run: its course, what was found, its attempts and steps.

import { address, choose, nameOf, ofRun, ofSample, ofStep } from "./address.js";
import { charts } from "./charts.js";
import { withCommands } from "./commands.js";
import { changesDiagnosis, isOpen, stateOf } from "./doctor.js";
import { badge, button, facts, form, gap, h, listed, quantity, when } from "./dom.js";
import { Figure } from "./figure.js";
import { findingsTable } from "./findings.js";
import { count, plural, ranges } from "./format.js";
import { toCapture, toStep } from "./links.js";
import { get, part, toFile, url } from "./service.js";
import { BADGE, COUNT, HEAD, NAT, RIGHT, WHEN, WIDE, table } from "./table.js";
import { explained } from "./words.js";

/** Links to files for somebody who has no access: the report of a run or step, a step's bundle. */
export function filesToSend(run, { step, attempt } = {}) {
  const asked = { step, attempt, format: "html" };
  const name = step === undefined ? run : `${run}-step-${step}`;
  const of = (what, query) => toFile(url(`/runs/${part(run)}/${what}`, query));
  return h("p", {}, "To send: ", h("a", { href: of("report", asked), download: `${name}.html` },
    `the report of this ${step === undefined ? "run" : "step"}, one file`),
  step !== undefined && [", ", h("a", { href: of("bundle", { step, attempt }),
    download: `${name}.tar.gz` }, "a bundle with its tensors and findings")]);
}

const RECENT = 12;
const PAGE = 100;
const MEAN = "logprob_abs_diff/mean";
const K3 = "rollout_corr/k3_kl";

/** One run. */
export function run(view, { run: name, metrics, smooth, groups }, user) {
  const own = (event) => event.run === name;
  view.add(h("h1", { title: name }, nameOf(name)));
  view.block({
    path: `/runs/${part(name)}/attempts?limit=1`,
    concerns: (event) => own(event) && (event.event === "attempt" || (event.event === "step" && event.closed)),
    draw: ({ rows: [attempt], also_live: others }) => [
      attempt ? h("p.line", {}, user?.bundle ? badge("ended", "bundle") : badge(attempt.state), ` attempt ${attempt.attempt}`,
        attempt.attempt > 1 && ` (${plural(attempt.attempt - 1, "restart")})`,
        attempt.resumed_from_step !== null && `, resumed from step ${attempt.resumed_from_step}`,
        attempt.end_reason && `: ${attempt.end_reason}`,
        ", last heard ", when(attempt.last_wall)) : h("p", {}, "It has no attempt yet."),
      others.length > 0 && h("p.quiet", {}, "Also live: ",
        listed(others.map((each) => h("a", { href: ofRun(each.run) }, each.run)))),
    ],
  });
  view.block({
    path: async (since) => (await Promise.all([
      get(url(`/runs/${part(name)}/diagnosis`, { limit: 200 }), since),
      get(`/runs/${part(name)}/worst`, since),
      pageOfSteps(name, { limit: RECENT }, since),
    ])).flat(),
    concerns: (event) => changesDiagnosis(event, name),
    draw: (diagnosis, worst, ...page) => band(name, diagnosis, worst, rowsOf(page)),
  });
  charts(view, { run: name, metrics, smooth, groups });
  view.add(filesToSend(name));
  view.block({
    title: "Findings", later: true,
    path: url("/findings/groups", { run: name, limit: 8 }),
    concerns: (event) => own(event) && event.event === "finding",
    draw: ({ rows, groups }) => [
      findingsTable(name, rows),
      h("p", {}, h("a", { href: ofRun(name, "doctor") }, "Ask the doctor"),
        " what is sick, since when, and what to do next."),
      groups > rows.length && h("p", {}, h("a", { href: ofRun(name, "findings") },
        `All ${count(groups)} kinds of findings`)),
    ],
  });
  view.block({
    title: "Newest steps",
    path: (since) => pageOfSteps(name, { limit: RECENT }, since),
    concerns: (event) => own(event) && ["step", "attempt"].includes(event.event),
    draw: (...page) => [
      stepsTable(rowsOf(page)),
      page[0].next && h("p", {}, h("a", { href: ofRun(name, "steps") }, "All steps")),
    ],
  });
  const figures = { "rank-steps": "Mismatch by rank and step", offenders: "Prompts that differ more than their steps" };
  for (const [figure, title] of Object.entries(figures)) {
    view.place(new Figure({
      name: figure, title, params: { run: name },
      opens: figure === "rank-steps" ? (at) => ofStep(name, at) : null,
      concerns: (event) => own(event) && event.event === "step" && event.measured,
    }));
  }
  view.block({
    title: "Attempts", later: true,
    path: `/runs/${part(name)}/attempts`,
    concerns: (event) => own(event) && (event.event === "attempt" || (event.event === "step" && event.closed)),
    draw: ({ rows }) => attemptsTable(name, rows, user),
  });
  view.block({
    title: "Captures", later: true,
    path: url("/captures", { run: name, limit: 5 }),
    concerns: (event) => own(event) && event.event === "capture",
    draw: ({ rows }) => [
      table("Captures", [
        ["capture", (row) => h("a", { href: ofRun(name, "captures", row.capture_id) }, row.capture_id), HEAD],
        ["state", "state", BADGE],
        ["stages", (row) => [row.spec.stages].flat().join(", ")],
        ["requested by", "by"], ["when", "created_wall", WHEN],
      ], rows, { key: (row) => row.capture_id, empty: "None was requested." }),
      h("p", {}, toCapture(name)),
    ],
  });
}

/** The state of a run in one line: healthy, or the first cause; and where to look first. */
function band(name, diagnosis, worst, steps) {
  const causes = diagnosis.rows.filter(isOpen);
  const [first] = causes;
  const more = causes.length - 1;
  const newest = steps.find((row) => row.mean?.verdict);
  const { step, token } = worst;
  const look = first ? "suspect" : diagnosis.healthy && diagnosis.measured ? "comparable" : "";
  return h("div.verdict", { class: look },
    h("p.lead", {}, stateOf(Boolean(first), diagnosis), " ", first ? first.sentence : withCommands(diagnosis.text)),
    diagnosis.healthy === false && h("p.row", {}, h("a", { href: ofRun(name, "doctor") },
      first ? `How to prove it${more > 0 ? `, and ${more} more ${more > 1 ? "causes" : "cause"}` : ""}` : "Ask the doctor"),
    first?.since_step != null && h("a", { href: ofStep(name, first.since_step) }, `step ${first.since_step}, where it began`)),
    facts([
      ["streams", newest ? [badge(newest.mean.verdict), ` in step ${newest.step}`] : "no step is measured"],
      ["worst step", step && [toStep(name, { step: step.step }, `step ${step.step}`), explained(", mean |d| "), quantity(step.abs_diff, "nat")]],
      ["worst token", token && [token.position === null ? `step ${token.step}`
        : h("a", { href: ofSample(name, token.step, null, { ...token, at: token.position }) },
          `token ${token.position} of step ${token.step}`), explained(", |d| "), quantity(token.abs_diff, "nat")]],
    ]));
}

function attemptsTable(name, rows, user) {
  const before = new Map(rows.map((row, at) => [row.attempt, rows[at + 1]?.attempt]));
  return table("Attempts", [
    ["attempt", "attempt", { ...HEAD, ...COUNT }],
    ["", (row) => user?.bundle && row.state === "live" ? badge("ended", "was live") : badge(row.state)],
    ["steps", (row) => row.first_step === null ? gap("none")
      : `${row.first_step} to ${row.last_closed_step ?? "–"}`],
    ["resumed from", (row) => row.resumed_from_step === null ? "the start" : `step ${row.resumed_from_step}`],
    ["repeated", (row) => row.superseded.map((each) =>
      `from step ${each.from_step} by attempt ${each.by}`).join("; ") || "nothing", WIDE],
    ["begun", "begun", WHEN],
    ["ended", (row) => row.ended === null ? "no" : [when(row.ended),
      row.end_reason && `: ${row.end_reason}`], WIDE],
    ["processes", "processes", COUNT],
    ["", (row) => h("a", { href: address(["runs", name, "doctor"], { attempt: row.attempt }) }, "ask the doctor")],
    ["", (row) => before.get(row.attempt) === undefined ? "" : h("a", {
      href: address(["runs", name, "comparisons"],
        { a: `${name}@${before.get(row.attempt)}`, b: `${name}@${row.attempt}` }),
          title: `since attempt ${before.get(row.attempt)}`,
    }, "what changed")],
  ], rows, { key: (row) => row.attempt, empty: "None." });
}

/** All steps, a page at a time. */
export function steps(view, { run: name, cursor }) {
  const go = (fields) => { location.hash = ofStep(name, fields.step.value || "latest"); };
  view.add(h("h1", {}, `Steps of ${nameOf(name)}`),
    form({}, go, h("label", { for: "go" }, "Go to step"),
      h("input#go", { name: "step", inputmode: "numeric", size: 10 }), h("button", {}, "Go")));
  view.block({
    path: (since) => pageOfSteps(name, { limit: PAGE, cursor }, since),
    concerns: (event) => !cursor && event.run === name && ["step", "attempt"].includes(event.event),
    draw: (...page) => [
      stepsTable(rowsOf(page)),
      page[0].note && h("p.quiet", {}, page[0].note),
      h("p.row", {},
        cursor && button("Newest steps", () => choose({ cursor: null })),
        page[0].next && button("Earlier steps", () => choose({ cursor: page[0].next }))),
    ],
  });
}

/** A page of steps, and what the two numbers that say most are in them; see `rowsOf`. */
async function pageOfSteps(run, page, since) {
  const listed = await get(url("/steps", { run, ...page }), since);
  const numbers = listed.rows.map((row) => row.step);
  const window = { run, superseded: true, from: Math.min(...numbers), to: Math.max(...numbers) };
  return [listed, ...await Promise.all([MEAN, K3].map((metric) =>
    listed.rows.some((row) => row.measured)
      ? get(url("/series", { metric, ...window }), since).catch(() => null) : null))];
}

/** The rows of a page of steps, each with its numbers and their verdict. */
function rowsOf([{ rows }, ...series]) {
  const [mean, k3] = series.map((each) => new Map(each?.steps.map((step, at) =>
    [`${each.attempts[at]}/${step}`, {
      value: each.series[0]?.values[at], verdict: each.comparable[at],
      suspects: each.suspects[at], nonfinite: each.nonfinite[at], reason: each.reasons[at],
    }])));
  return rows.map((row) => {
    const key = `${row.attempt}/${row.step}`;
    return { ...row, mean: mean.get(key), k3: k3.get(key) };
  });
}

/** Why a closed step has no number; of an open one its verdict says it. */
const reasonOf = (row) =>
  row.closed_wall === null ? "" : row.gap ?? row.mean?.reason ?? "no rank handed over both streams";

function stepsTable(rows) {
  return table("Steps", [
    ["step", (row) => toStep(row.run, row), { ...HEAD, ...RIGHT }],
    ["attempt", "attempt", COUNT],
    ["verdict", (row) => verdictOf(row)],
    ["mean |d|", (row) => row.mean?.value ?? null, NAT],
    ["k3 KL", (row) => row.k3?.value ?? null, NAT],
    ["ranks", (row) => [badge(row.complete), row.missing.length > 0 && h("span.quiet", {},
      ` ${row.closed_wall === null ? "waits for" : "without"} ${missingText(row.missing)}`)], WIDE],
    ["remarks", (row) => remarks(row), WIDE],
    ["closed", (row) => row.closed_wall === null ? "open" : when(row.closed_wall)],
  ], rows, {
    key: (row) => `${row.attempt}/${row.step}`, empty: "No step has begun.",
    rowClass: (row) => (row.superseded_by === null ? "" : "old"),
  });
}

/** The verdict on a step's streams. It is on the finite tokens, so it is not good if others are not. */
function verdictOf({ mean, closed_wall: closed }) {
  if (!mean?.verdict) return badge(closed ? "not measured" : "open");
  const text = [mean.verdict, ...mean.suspects].join(": ").replace(/_/g, " ");
  if (!mean.nonfinite) return badge(mean.verdict, text);
  return badge(mean.verdict === "suspect" ? "suspect" : "warning",
    `${text}; ${plural(mean.nonfinite, "token")} not finite`);
}

function remarks(row) {
  const found = [
    row.superseded_by !== null && `repeated by ${row.superseded_by}`,
    (row.mean?.value ?? null) === null ? reasonOf(row) : row.gap, row.begun_again.length > 0 && "begun again within its attempt",
    row.lost > 0 && `${count(row.lost)} lost`, row.pinned && "pinned",
  ].filter(Boolean);
  return found.length ? listed(found.map(explained), "; ") : "";
}

/** Missing ranks as text: "actor 3, 5 in actor_update". */
export function missingText(missing, most = 3) {
  const groups = Map.groupBy(missing, ({ role, stage }) => JSON.stringify([role, stage]));
  const texts = [...groups.values()].map((found) =>
    `${found[0].role} ${ranges(found.map(({ rank }) => rank))} in ${found[0].stage}`);
  return texts.slice(0, most).join("; ") + (texts.length > most ? "; …" : "");
}
