// Runs, and one run: its course, what was found, its attempts and steps.

import { address, choose, ofRun, ofStep } from "./address.js";
import { badge, gap, h, nodes, patch, problem, quantity, table, when } from "./dom.js";
import { Figure } from "./figure.js";
import { findingsTable } from "./findings.js";
import { count, ranges } from "./format.js";
import { all, get, part, url } from "./service.js";

/** Links to files for somebody who has no access: the report of a run or step, a step's bundle. */
export function filesToSend(run, { step, attempt } = {}) {
  const asked = { step, attempt, format: "html" };
  const name = step === undefined ? run : `${run}-step-${step}`;
  const of = (what) => `/runs/${part(run)}/${what}`;
  return h("p", {}, "To send: ", h("a", { href: url(of("report"), asked), download: `${name}.html` },
    `the report of this ${step === undefined ? "run" : "step"}, one file`),
  step !== undefined && [", ", h("a", { href: url(of("bundle"), { step, attempt }),
    download: `${name}.tar.gz` }, "a bundle with its tensors and findings")]);
}

const RECENT = 12;
const PAGE = 100;
const OVERVIEW = 900; // pixels of the overview's usual panels
const MEAN = "logprob_abs_diff/mean";
const K3 = "rollout_corr/k3_kl";

/** Every run. */
export function runs(view, params, user) {
  view.add(h("h1", {}, "Runs"));
  view.block({
    path: url("/runs", { limit: 200 }),
    concerns: ({ event, closed }) => event === "attempt" || (event === "step" && closed),
    draw: ({ rows, next }) => [
      table("Runs", [
        ["run", (row) => h("a", { href: ofRun(row.run) }, row.run), { head: true }],
        ["", (row) => user?.bundle ? badge("ended", "bundle")
          : badge(row.live ? "live" : "ended", row.live ? "live" : "not live")],
        ["last closed step", (row) => row.last_closed_step === null ? gap("none is closed")
          : h("a", { href: ofStep(row.run, row.last_closed_step) }, count(row.last_closed_step)),
        { right: true }],
        ["attempts", (row) => count(row.attempts), { right: true }],
        ["last heard", (row) => when(row.last_wall)],
        ["begun", (row) => when(row.created_wall)],
      ], rows, { key: (row) => row.run, empty: NO_RUNS }),
      next && h("p.quiet", {}, "The 200 runs that were active last; /runs lists all."),
    ],
  });
}

const NO_RUNS = "No training has reported yet: stagescope_workers.init(run=...) in one does.";

/** One run. */
export function run(view, { run: name, metrics = "", smooth = "" }, user) {
  const own = (event) => event.run === name;
  view.add(h("h1", {}, name));
  view.block({
    path: `/runs/${part(name)}/attempts?limit=1`,
    concerns: (event) => own(event) && (event.event === "attempt" || (event.event === "step" && event.closed)),
    draw: ({ rows: [attempt], also_live: others }) => [
      attempt ? h("p.line", {}, user?.bundle ? badge("ended", "bundle") : badge(attempt.state), ` attempt ${attempt.attempt}`,
        attempt.resumed_from_step !== null && `, resumed from step ${attempt.resumed_from_step}`,
        attempt.end_reason && `: ${attempt.end_reason}`,
        ", last heard ", when(attempt.last_wall)) : h("p", {}, "It has no attempt yet."),
      others.length > 0 && h("p.quiet", {}, "Also live: ",
        others.map((each, at) => [at > 0 && ", ", h("a", { href: ofRun(each.run) }, each.run)])),
    ],
  });
  view.add(filesToSend(name));
  const chosen = metrics.split(",").filter(Boolean).map(decodeURIComponent);
  view.place(new Figure({
    name: "overview", params: { run: name, metric: chosen, smooth },
    title: chosen.join(", ") || "Over the steps", lazy: false, height: chosen.length ? 0 : OVERVIEW,
    opens: (at, meta) => ofStep(name, at, meta?.superseded ? meta.attempt : null),
    grows: !smooth, // an average over new steps alone would begin anew
    concerns: (event) => own(event)
      && ((event.event === "step" && event.closed && event.measured) || event.event === "attempt"),
  }));
  view.add(chooser(name, chosen, smooth));
  view.block({
    title: "Findings",
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
    draw: (found) => [
      stepsTable(found),
      found.next && h("p", {}, h("a", { href: ofRun(name, "steps") }, "All steps")),
    ],
  });
  const figures = { "rank-steps": "Mismatch by rank and step", offenders: "Prompts that are apart again and again" };
  for (const [figure, title] of Object.entries(figures)) {
    view.place(new Figure({
      name: figure, title, params: { run: name },
      opens: figure === "rank-steps" ? (at) => ofStep(name, at) : null,
      concerns: (event) => own(event) && event.event === "step" && event.measured,
    }));
  }
  view.block({
    title: "Attempts",
    path: `/runs/${part(name)}/attempts`,
    concerns: (event) => own(event) && (event.event === "attempt" || (event.event === "step" && event.closed)),
    draw: ({ rows }) => attemptsTable(name, rows, user),
  });
  view.block({
    title: "Captures",
    path: url("/captures", { run: name, limit: 5 }),
    concerns: (event) => own(event) && event.event === "capture",
    draw: ({ rows }) => [
      table("Captures", [
        ["capture", (row) => h("a", { href: ofRun(name, "captures", row.capture_id) }, row.capture_id),
          { head: true }],
        ["state", (row) => badge(row.state)],
        ["stages", (row) => [row.spec.stages].flat().join(", ")],
        ["requested by", (row) => row.by],
        ["when", (row) => when(row.created_wall)],
      ], rows, { key: (row) => row.capture_id, empty: "None was requested." }),
      h("p.operates", {}, h("a", { href: ofRun(name, "captures", "new") }, "Arm a capture")),
    ],
  });
}

/** What the overview draws: numbers by name, and a moving average. The address keeps both. */
function chooser(run, chosen, smooth) {
  const draw = (names) => choose({ metrics: names.map(encodeURIComponent).join(",") || null });
  const known = h("datalist#numbers");
  const wrong = h("div");
  const names = () => all(`/runs/${part(run)}/metrics?limit=1000`).then(({ rows }) => rows);
  const list = async () => {
    if (known.children.length) return;
    const rows = await names().catch(() => []); // the figure itself says what is wrong
    known.replaceChildren(...rows.map(({ name, kind, unit }) =>
      h("option", { value: name }, [kind, unit].filter(Boolean).join(", "))));
  };
  const add = async (event) => {
    event.preventDefault();
    const name = event.target.number.value.trim();
    if (!name || chosen.includes(name)) return;
    try {
      await get(url("/series", { run, metric: name, limit: 1 }));
      draw([...chosen, name]);
    } catch (error) {
      if (!error.problem) throw error;
      patch(wrong, nodes(problem(error)));
    }
  };
  return h("div", {},
    h("form.row", { onsubmit: add },
      h("label", { for: "number" }, "Draw another number"),
      h("input#number", {
        name: "number", list: "numbers", size: 32, autocomplete: "off",
        placeholder: "a metric or a scalar", onfocus: list,
      }), known, h("button", {}, "Draw"),
      h("label", { for: "smooth" }, "moving average over"),
      h("input#smooth", {
        name: "smooth", type: "number", min: 1, max: 10_000, value: smooth, placeholder: "no",
        onchange: ({ target }) => target.checkValidity() && choose({ smooth: target.value || null }),
      }), "steps"),
    chosen.length > 0 && h("p.row", {}, "Drawn:", chosen.map((name) =>
      h("button", { type: "button", "aria-label": `do not draw ${name}`,
        onclick: () => draw(chosen.filter((each) => each !== name)) }, `${name} ×`)),
    h("button", { type: "button", onclick: () => draw([]) }, "the usual numbers again")), wrong);
}

function attemptsTable(name, rows, user) {
  const before = new Map(rows.map((row, at) => [row.attempt, rows[at + 1]?.attempt]));
  return table("Attempts", [
    ["attempt", (row) => count(row.attempt), { head: true, right: true }],
    ["", (row) => user?.bundle && row.state === "live" ? badge("ended", "was live") : badge(row.state)],
    ["steps", (row) => row.first_step === null ? gap("none")
      : `${row.first_step} to ${row.last_closed_step ?? "–"}`],
    ["resumed from", (row) => row.resumed_from_step === null ? "the start" : `step ${row.resumed_from_step}`],
    ["repeated since", (row) => row.superseded.map((each) =>
      `from step ${each.from_step} by attempt ${each.by}`).join("; ") || "nothing"],
    ["begun", (row) => when(row.begun)],
    ["ended", (row) => row.ended === null ? "no" : [when(row.ended),
      row.end_reason && `: ${row.end_reason}`]],
    ["processes", (row) => count(row.processes), { right: true }],
    ["", (row) => h("a", { href: address(["runs", name, "doctor"], { attempt: row.attempt }) }, "ask the doctor")],
    ["", (row) => before.get(row.attempt) === undefined ? "" : h("a", {
      href: address(["runs", name, "comparisons"],
        { a: `${name}@${before.get(row.attempt)}`, b: `${name}@${row.attempt}` }),
    }, `what changed since attempt ${before.get(row.attempt)}`)],
  ], rows, { key: (row) => row.attempt, empty: "None." });
}

/** All steps, a page at a time. */
export function steps(view, { run: name, cursor }) {
  const go = (event) => {
    event.preventDefault();
    location.hash = ofStep(name, event.target.step.value || "latest");
  };
  view.add(h("h1", {}, `Steps of ${name}`),
    h("form.row", { onsubmit: go }, h("label", { for: "go" }, "Go to step"),
      h("input#go", { name: "step", inputmode: "numeric", size: 10 }), h("button", {}, "Go")));
  view.block({
    path: (since) => pageOfSteps(name, { limit: PAGE, cursor }, since),
    concerns: (event) => !cursor && event.run === name && ["step", "attempt"].includes(event.event),
    draw: (found) => [
      stepsTable(found),
      h("p.row", {},
        cursor && h("button", { type: "button", onclick: () => choose({ cursor: null }) }, "Newest steps"),
        found.next && h("button", { type: "button", onclick: () => choose({ cursor: found.next }) },
          "Earlier steps")),
    ],
  });
}

let lastPage = null;

/** A page of steps with the verdict and the two numbers that say most. */
async function pageOfSteps(run, page, since) {
  const listed = await get(url("/steps", { run, ...page }), since);
  const numbers = listed.rows.map((row) => row.step);
  const window = { run, superseded: true, from: Math.min(...numbers), to: Math.max(...numbers) };
  const series = await Promise.all([MEAN, K3].map((metric) =>
    numbers.length && listed.rows.some((row) => row.measured)
      ? get(url("/series", { metric, ...window }), since).catch(() => null) : null));
  const parts = [listed, ...series];
  // What has not changed is the same object, so that nothing is drawn again.
  if (lastPage && parts.every((each, at) => each === lastPage.parts[at])) return lastPage.page;
  const found = series.map((each) => new Map(each?.steps.map((step, at) =>
    [`${each.attempts[at]}/${step}`, {
      value: each.series[0]?.values[at], verdict: each.comparable[at],
      suspects: each.suspects[at], reason: each.reasons[at],
    }])));
  const rows = listed.rows.map((row) => ({
    ...row, mean: found[0].get(`${row.attempt}/${row.step}`),
    k3: found[1].get(`${row.attempt}/${row.step}`),
  }));
  lastPage = { parts, page: { ...listed, rows } };
  return lastPage.page;
}

/** Why a closed step has no number; of an open one its verdict says it. */
const reasonOf = (row, found) =>
  row.closed_wall === null ? "" : row.gap ?? found?.reason ?? "no rank handed over both streams";

function stepsTable({ rows }) {
  const number = (row, found) => quantity(found?.value ?? null, "nat", reasonOf(row, found));
  return table("Steps", [
    ["step", (row) => h("a", { href: ofStep(row.run, row.step, row.attempt) }, row.step),
      { head: true, right: true }],
    ["attempt", (row) => [count(row.attempt), row.superseded_by !== null
      && h("span.quiet", {}, ` repeated by ${row.superseded_by}`)]],
    ["verdict", (row) => row.mean?.verdict
      ? badge(row.mean.verdict, [row.mean.verdict, ...row.mean.suspects].join(": ").replace(/_/g, " "))
      : badge(row.closed_wall ? "not measured" : "open", row.closed_wall ? "not measured" : "open")],
    ["mean |d|", (row) => number(row, row.mean), { right: true }],
    ["k3 KL", (row) => number(row, row.k3), { right: true }],
    ["ranks", (row) => [badge(row.complete), row.missing.length > 0 && h("span.quiet", {},
      ` without ${missingText(row.missing)}`)]],
    ["remarks", (row) => remarks(row).join("; ")],
    ["closed", (row) => row.closed_wall === null ? "open" : when(row.closed_wall)],
  ], rows, {
    key: (row) => `${row.attempt}/${row.step}`, empty: "No step has begun.",
    rowClass: (row) => (row.superseded_by === null ? "" : "old"),
  });
}

function remarks(row) {
  return [
    row.measured && row.gap, row.begun_again.length > 0 && "begun again within its attempt",
    row.losses > 0 && `${count(row.losses)} lost`, row.pinned && "pinned",
  ].filter(Boolean);
}

/** Missing ranks as text: "actor 3, 5 in actor_update". */
export function missingText(missing, most = 3) {
  const groups = new Map();
  for (const { role, stage, rank } of missing) {
    const key = `${role}\u0000${stage}`;
    groups.set(key, [...(groups.get(key) ?? []), rank]);
  }
  const texts = [...groups].map(([key, found]) => {
    const [role, stage] = key.split("\u0000");
    return `${role} ${ranges(found)} in ${stage}`;
  });
  return texts.slice(0, most).join("; ") + (texts.length > most ? "; …" : "");
}
