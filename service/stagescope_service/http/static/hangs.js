// Who holds up the others, and what every process is doing.

import { choose, nameOf } from "./address.js";
import { badge, button, form, gap, h, lasting, quantity, when } from "./dom.js";
import { count, plural, seconds } from "./format.js";
import { toRank, toStep } from "./links.js";
import { get, part, send, url } from "./service.js";
import { HEAD, RIGHT, table } from "./table.js";

const NOTHING = {}; // of a run without a step

/** A collective that cannot finish: what is wrong, and the line of each of its ranks. */
function collective({ message, verdict, waiting, missing }) {
  const places = [...waiting.map((at) => ["waits", at]), ...missing.map((at) => ["missing", at])];
  return h("div.collective", {},
    h("p", {}, badge(verdict === "behind" ? verdict : "error", verdict), " ", message),
    places.length > 0 && table("Lines of its ranks", [
      ["ranks", ([, at]) => at.ranks.join(", "), HEAD],
      ["", ([what]) => what],
      ["line", ([, at]) => at.place ?? gap("not known")],
      ["stage", ([, at]) => at.stage ?? ""],
      ["layout", ([, at]) => at.layout],
    ], places, { key: ([what, at]) => `${what}/${at.ranks[0]}` }));
}

/** Of a training that is over nobody waits: that is no good news. */
const nobodyIsStuck = (state) => (state === "live" ? badge("ok", "nobody is stuck")
  : badge(state, state === "ended" ? "the attempt ended" : "no process reports"));

/** The step that is looked at; an attempt that has just begun has none. */
const inStep = ({ step }) => (step === null ? "" : ` in step ${step}`);

/** Stuck ranks and stacks of a run. */
export function hangs(view, { run, role, rank }, user) {
  view.add(h("h1", {}, `Hangs of ${nameOf(run)}`));
  view.block({
    title: "Who holds up the others",
    path: async (since) => (await get(url("/steps", { run, limit: 1 }), since)).rows.length
      ? Promise.all([get(url("/steps/latest/stuck", { run, limit: 500 }), since),
        get(`/runs/${part(run)}/attempts?limit=1`, since)]) : NOTHING,
    concerns: (event) => event.run === run && ["step", "finding", "attempt"].includes(event.event),
    draw: (found, attempts) => found === NOTHING ? h("p.quiet", {}, "No step has begun.") : [
      h("p.lead", {}, found.rows.length
        ? [badge("error", `${plural(found.rows.length, "rank")} stuck`), inStep(found)]
        : found.collectives.length ? [badge("error", "a collective cannot finish"), inStep(found)]
        : [nobodyIsStuck(attempts.rows[0].state), inStep(found), found.note && `: ${found.note}`]),
      found.collectives.map(collective),
      found.rows.length > 0 && table("Stuck ranks", [
        ["rank", (row) => toRank(run, { ...row, attempt: found.attempt }), HEAD],
        ["step", ({ step }) => toStep(run, { step, attempt: found.attempt }), RIGHT],
        ["stage", (row) => row.stage || "between stages"],
        ["", "status"],
        ["quiet for", (row) => row.seconds === null ? "" : lasting(row.seconds), RIGHT],
        ["usual", (row) => quantity(row.usual_seconds, "", "not known", seconds), RIGHT],
        ["others", (row) => `${row.ranks_ended} of ${row.ranks} ended, ${row.ranks_begun} begun`],
        ["process", (row) => badge(row.process === "live" ? "live" : "missing", row.process)],
        ["host", (row) => [row.host ?? gap(""), row.pid && `, pid ${row.pid}`]],
      ], found.rows, { key: (row) => `${row.step}/${row.stage}/${row.role}/${row.rank}/${row.part}` }),
      found.findings.length > 0 && h("p.quiet", {}, "Before: ", found.findings.map((each) => each.message).join("; ")),
    ],
  });
  const stacks = view.block({
    title: rank ? `Stacks of ${role} ${rank}` : "Stacks",
    path: url("/stacks", { run, role, rank, limit: 100 }),
    concerns: (event) => event.run === run && event.event === "finding",
    draw: ({ rows, next }) => [
      rank && h("p", {}, button("Stacks of every rank", () => choose({ role: null, rank: null }))),
      user?.grade === "operate" ? form({}, take, h("button", {}, "Take stacks now"),
        h("span.quiet", {}, "of every thread; a rank that is blocked answers too"))
        : h("p.quiet.operates", {}, "The operate token may take stacks."),
      rows.length === 0 && h("p.quiet", {}, "None were taken."),
      rows.map((row) => h("details", { "data-key": `${row.request_id}/${row.incarnation}` },
        h("summary", {}, `${row.role} ${row.rank}`, row.step !== null && `, step ${row.step}`,
          row.stage && `, in ${row.stage}`, " ", badge(row.state === "answered" ? "ok" : "missed", row.state),
          " ", when(row.answered_wall ?? row.wall), row.reason && `: ${row.reason === "ordered" ? "requested" : row.reason}`),
        (row.threads ?? []).map((thread) => [
          h("h3", {}, thread.name ?? `thread ${thread.ident}`, thread.is_training && " (training)"),
          h("pre", { tabindex: 0 }, thread.stack ?? "no stack")]))),
      next && h("p.quiet", {}, `The ${count(rows.length)} newest; /stacks lists all.`),
    ],
  });
  async function take(_, say) {
    say(h("p.quiet", {}, "asking every process…"));
    const found = await send("POST", "/stacks", {
      run, ...(role ? { role } : {}), ...(rank ? { ranks: [Number(rank)] } : {}),
    });
    stacks.load(performance.now());
    return h("p", {}, `${plural(found.rows.length, "rank")} answered`,
      found.not_answered.length > 0 && `; not ${found.not_answered.map((each) =>
        `${each.role ?? "rank"} ${each.rank} (${each.reason})`).join(", ")}`);
  }
}
