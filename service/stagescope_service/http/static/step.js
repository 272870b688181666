// One step: whether its numbers can be trusted, the numbers, and where they come from; and the
// same of one rank, one round, and the samples of the step.

import { address, AGAIN, choose, ofRank, ofRun, ofSample, ofStep } from "./address.js";
import { badge, facts, gap, h, quantity, table, when } from "./dom.js";
import { Figure } from "./figure.js";
import { findingsTable } from "./findings.js";
import { bytes, count, isFinite, number, partOf, plural, seconds, share } from "./format.js";
import { filesToSend, missingText } from "./runs.js";
import { all, get, part, send, url } from "./service.js";

const WORST_RANKS = 16;
const WORST_TOKENS = 16;
const ANATOMY = {
  place: "place in the round", end: "distance to the round's end", position: "absolute position",
  probability: "probability", lattice: "lattice of d", staleness: "staleness",
  engine: "engine instance",
};

/** What the views of a step have in common. */
function scope({ run, step, attempt }) {
  const asked = { run, attempt };
  return {
    asked,
    path: (name, params = {}) => url(`/steps/${part(step)}/${name}`, { ...asked, ...params }),
    concerns: (event) => event.event === "step" && event.run === run
      && String(event.step) === String(step) && (!attempt || String(event.attempt) === String(attempt)),
  };
}

/**
 * An answer about the numbers of a step. One that has none yet is told once, by the verdict: what
 * else would show them shows nothing, and is not asked for.
 */
const measured = (path, name, params) => async (since) => {
  const found = await numbersOf(path, since);
  return found.none ? found : name === "ranks" ? all(path(name, params), since) : get(path(name, params), since);
};

const without = new Map();

async function numbersOf(path, since) {
  try {
    return await get(path("metrics"), since);
  } catch (error) {
    if (error.status !== 404 || error.problem.reason !== "not_measured") throw error;
    const key = `${path("metrics")} ${error.problem.wrong}`;
    if (!without.has(key)) without.set(key, { none: error.problem });
    return without.get(key);
  }
}

const orNothing = (draw) => (found) => (found.none ? h("p.quiet", {}, "No numbers yet.") : draw(found));

// --- the step ---------------------------------------------------------------------------------
/** A step; `latest` is the newest one that is measured, also when another one is. */
export function step(view, params, user) {
  if (params.step !== "latest") {
    showStep(view, params, user);
    return;
  }
  let shown;
  view.add(h("h1", {}, `Newest step of ${params.run}`));
  view.block({
    path: (since) => newestMeasured(params, since), leads: true,
    concerns: ({ event, run, measured }) => event === "step" && run === params.run && measured,
    draw: (own) => {
      if (own === null) return h("p", {}, "No step is measured yet.");
      if (shown !== undefined) dispatchEvent(new Event(AGAIN));
      else showStep(view, { ...params, step: own, isLatest: true }, user);
      shown = own;
      return [];
    },
  });
}

async function newestMeasured({ run, attempt }, since) {
  const found = await get(url("/series", { metric: "counts/tokens", run, attempt, limit: 20 }), since);
  const values = found.series[0]?.values ?? [];
  const at = values.findLastIndex((value) => value !== null);
  return at < 0 ? null : found.steps[at];
}

function showStep(view, params, user) {
  const { run, step: number_, attempt } = params;
  const { asked, path, concerns } = scope(params);
  const figure = (name, title, more = {}) => view.place(new Figure({
    name, title, concerns, params: { ...asked, step: number_, ...more },
  }));
  view.add(params.isLatest ? h("p.lead", {}, `Step ${number_}`) : h("h1", {}, `Step ${number_} of ${run}`));
  view.block({
    path: (since) => neighbours(params, since),
    concerns,
    draw: (found) => neighbourLinks(params, found),
  });
  verdict(view, path, concerns);
  view.add(filesToSend(run, { step: number_, attempt }));
  view.block({
    path: url("/findings", { run, step: number_, attempt, limit: 20 }),
    concerns: (event) => ["finding", "step"].includes(event.event) && concerns({ ...event, event: "step" }),
    draw: ({ rows }) => rows.length > 0 && [
      h("h2", {}, "Found at this step"), findingsTable(run, rows)],
  });
  view.block({
    title: "Mismatch", path: measured(path, "metrics"), concerns,
    draw: orNothing((found) => [tiles(found), everyNumber(found)]),
  });
  view.block({
    title: "Rounds", path: measured(path, "rounds", { limit: 1000 }), concerns, lazy: true,
    draw: orNothing(roundsTable),
  });
  figure("rounds", "Mismatch by round, against the steps before");
  lossTable(view, path, concerns);
  view.block({
    title: "Ranks", path: measured(path, "ranks", { limit: 1000 }), concerns, lazy: true,
    draw: orNothing((found) => ranksTable(found, params.ranks === "all")),
  });
  figure("rank-rounds", "Mismatch by rank and round", { metric: params.metric });
  view.block({
    title: "Worst tokens", path: measured(path, "tokens", { limit: 128 }), concerns, lazy: true,
    draw: orNothing((found) => tokensTable(found, params.tokens === "all")),
  });
  view.add(h("p", {}, h("a", { href: ofStep(run, number_, attempt, "samples") },
    "Samples of the step, token by token")));
  figure("distribution", "Distribution of |d|", { of: params.of });
  figure("density", "p against q");
  view.add(h("h2", {}, "Time"));
  figure("timeline", "Stages by rank");
  view.add(h("p", {}, h("a", { href: path("timeline"), download: `${run}-step-${number_}.json` },
    "The timeline as a trace for Perfetto or chrome://tracing")));
  view.block({
    title: "Stages", path: (since) => all(path("stages", { limit: 1000 }), since), concerns, lazy: true,
    draw: (found) => stagesTable(found),
  });
  anatomy(view, params, asked, concerns);
  view.block({
    title: "Logged numbers", path: (since) => all(path("scalars", { limit: 1000 }), since), concerns, lazy: true,
    draw: (found) => scalarsTable(found),
  });
  kept(view, params, path, concerns, user);
}

/**
 * The verdict on the streams, why, and what the numbers rest on.
 * @param slice whose: a rank or a round; nothing: of the step.
 * @param isShort whether what the numbers rest on is left out.
 */
export function verdict(view, path, concerns, { slice = {}, isShort = false } = {}) {
  view.block({
    path: measured(path, "metrics", slice),
    concerns,
    draw: (found) => {
      if (found.none) {
        return h("div.verdict", {}, h("p.lead", {}, badge("not measured"), ` ${found.none.wrong}`),
          h("p.quiet", {}, found.none.advice));
      }
      const { coverage } = found;
      const left = Object.entries(coverage.tokens_left_out)
        .map(([why, tokens]) => `${count(tokens)} ${why}`);
      const unread = ["lost", "dropped", "refused", "pending"].filter((state) => coverage[`payloads_${state}`] > 0);
      return h("div.verdict", { class: found.comparable },
        h("p.lead", {}, badge(found.comparable, [found.comparable, found.cause && `: ${found.cause}`]
          .filter(Boolean).join("").replace(/_/g, " ")),
        ` ${found.pair.join(" against ")} in ${found.stage}`, found.role && ` of ${found.role}`),
        found.comparability.length > 0 && h("ul", {}, found.comparability
          .filter((check) => !isShort || check.verdict === "suspect").map((check) =>
            h("li", {}, h("strong", {}, check.code.replace(/_/g, " ")), `: ${check.text}`))),
        !isShort && facts([
          ["ranks", [badge(found.complete), found.missing.length > 0
            && ` without ${missingText(found.missing)}`]],
          ["tokens", [count(coverage.tokens), coverage.tokens_sent !== null
            && ` of ${count(coverage.tokens_sent)} ${unread.length > 0 ? "that were read" : "sent"}`, left.length > 0 && ` (${left.join(", ")})`]],
          ["sequences", count(coverage.sequences)],
          ["payloads", [`${count(coverage.payloads_ingested)} of ${count(coverage.payloads_announced)} read`,
            ...unread.map((state) => `, ${count(coverage[`payloads_${state}`])} ${state}`)]],
          ["gap", found.gap],
          ["attempt", [count(found.attempt), found.superseded_by !== null
            && [`: attempt ${found.superseded_by} repeats this step (`,
              h("a", { href: ofStep(found.run, found.step, found.superseded_by) }, "see it"), ")"]]],
          ["begun again", found.begun_again.map((each) =>
            `${each.role} ${each.ranks.join(", ")}: both passes count`).join("; ")],
          ["unaccounted", coverage.tokens_unaccounted ? plural(coverage.tokens_unaccounted, "token") : null],
        ]));
    },
  });
}

/** The numbers that say most. */
function tiles({ metrics, units, noise_floor: floor, nonfinite, complete }) {
  const why = complete === "open" ? "the step is open" : "no token counts";
  const mean = metrics["logprob_abs_diff/mean"];
  const own = floor?.["logprob_abs_diff/mean"];
  const broken = Object.entries(nonfinite).flatMap(([stream, kinds]) =>
    Object.entries(kinds).filter(([, tokens]) => tokens > 0)
      .map(([kind, tokens]) => `${count(tokens)} ${kind} in ${stream}`));
  const tile = (name, value, remark = "") =>
    h("div.tile", { "data-key": name }, h("dt", {}, name), h("dd", {}, value,
      remark && h("span.remark", {}, remark)));
  const of = (name) => quantity(metrics[name] ?? null, units[name] ?? "", why);
  // Of a rank or a round fewer numbers are published: what is not among them has no tile.
  const published = (name, label, remark) =>
    (name in metrics || complete === "open") && tile(label, of(name), remark);
  return h("dl.tiles", {},
    tile("mean |d|", of("logprob_abs_diff/mean"), isFinite(own)
      ? own > 0 && isFinite(mean) ? `${number(mean / own)} times the noise floor ${number(own)}`
        : `noise floor ${number(own)}`
      : "noise floor not measured: hand over recomputed_log_probs"),
    published("logprob_abs_diff/p99", "99 % of |d| below"),
    tile("largest |d|", of("logprob_abs_diff/max")),
    tile("KL (k3)", of("rollout_corr/k3_kl")),
    tile("KL (k1)", of("rollout_corr/kl")),
    tile("mean |Δ probability|", of("training/rollout_probs_diff_mean")),
    tile("correlation", of("training/rollout_actor_probs_pearson_corr")),
    tile("ratio outside 0.5 to 2", quantity(metrics["tail/ratio_outside_0.5_2_share"] ?? null, "", why, share),
      plural(metrics["tail/ratio_outside_0.5_2_count"] ?? 0, "token")),
    published("calibration/z", "calibration z", "beyond ±6 the rollout sampled from another distribution"),
    tile("not finite", broken.length ? h("span.bad", {}, broken.join(", ")) : quantity(0, "tokens")),
    published("rounding/abs_diff_floor", "rounding alone", "about what the dtypes add to mean |d|"));
}

function everyNumber({ metrics, units, noise_floor: floor, streams, rollout_is: weights }) {
  const names = Object.keys(metrics).sort();
  return h("details", {}, h("summary", {}, `All ${names.length} published numbers, and the streams`),
    table("Published numbers", [
      ["name", (name) => h("code", {}, name), { head: true }],
      ["value", (name) => quantity(metrics[name], units[name] ?? ""), { right: true }],
      ["noise floor", (name) => (floor ? quantity(floor[name] ?? null, units[name] ?? "") : gap("")),
        { right: true }],
    ], names, { key: (name) => name }),
    h("p.quiet", {}, `Importance weights: ${weights.text}.`),
    Object.entries(streams).map(([name, stream]) =>
      h("div", {}, h("h3", {}, `Stream ${name}`), facts(Object.entries(stream)
        .map(([key, value]) => [key.replace(/_/g, " "), typeof value === "object"
          ? JSON.stringify(value).replace(/["[\]]/g, "") : String(value)])))));
}

// --- where to go from here --------------------------------------------------------------------
let lastNeighbours = { key: null };

async function neighbours({ run, step: own, attempt }, since) {
  const window = { from: Math.max(0, Number(own) - 50), to: Number(own) + 50 };
  const found = await get(url("/series", { metric: "counts/tokens", run, attempt, ...window }), since)
    .catch(() => ({ steps: [] }));
  let { earlier, later } = around(found.steps, own);
  const others = {}; // that are of another attempt: the one in force
  if (attempt && (earlier === undefined || later === undefined)) {
    const inForce = await get(url("/series", { metric: "counts/tokens", run, ...window }), since)
      .catch(() => ({ steps: [] }));
    const near = around(inForce.steps, own);
    if (earlier === undefined) earlier = others.earlier = near.earlier;
    if (later === undefined) later = others.later = near.later;
  }
  const key = [run, earlier, later, own, attempt].join();
  // What has not changed is the same object, so that nothing is drawn again.
  if (key !== lastNeighbours.key) lastNeighbours = { key, earlier, later, others };
  return lastNeighbours;
}

const around = (steps, own) => ({
  earlier: steps.filter((each) => each < own).at(-1), later: steps.find((each) => each > own),
});

const neighbourLinks = ({ run, step: own, attempt, isLatest }, { earlier, later, others }) => h("p.row", {},
  earlier === undefined ? h("span.quiet", {}, "no earlier step")
    : h("a", { href: ofStep(run, earlier, others.earlier === undefined ? attempt : null), rel: "prev" }, `← step ${earlier}`),
  later === undefined ? h("span.quiet", {}, "no later step")
    : h("a", { href: ofStep(run, later, others.later === undefined ? attempt : null), rel: "next" }, `step ${later} →`),
  isLatest ? h("a", { href: ofStep(run, own, attempt) }, `stay at step ${own}`)
    : h("a", { href: ofStep(run, "latest") }, "follow the newest step"));

// --- tables -----------------------------------------------------------------------------------
const GONE = {
  rows: [], unrecorded: [], notes: [],
  note: "No tensors of this step are kept: pin a step, or arm a capture, to look at its tokens.",
};

function lossTable(view, path, concerns) {
  view.block({
    title: "What the loss did with it", concerns, lazy: true, // it reads a file of every rank
    path: async (since) => {
      const found = await measured(path, "samples", { limit: 1 })(since);
      return found.none ? found : found.rows.some((row) => row.kept) ? get(path("loss"), since) : GONE;
    },
    draw: orNothing(({ rows, note, unrecorded, clipped_in: passes }) => [
      h("p", {}, note),
      rows.length > 0 && table("Mismatch by what the loss did", [
        ["tokens that were", (row) => row.fate.startsWith("clipped") && passes?.length > 2
          ? `${row.fate} in every one of ${passes.length - 1} passes` : row.fate, { head: true }],
        ["gradient", (row) => (row.gradient ? "yes" : h("span.quiet", {}, row.gradient === null ? "unknown" : "none"))],
        ["tokens", (row) => quantity(row.tokens, "", "", count), { right: true }],
        ["share of tokens", (row) => quantity(row.share_of_tokens, "", "", share), { right: true }],
        ["sum of |d|", (row) => quantity(row.sum_abs, "nat"), { right: true }],
        ["mean |d|", (row) => quantity(row.mean_abs, "nat"), { right: true }],
        ["share of the mismatch", (row) => quantity(row.share_of_mismatch, "", "", share), { right: true }],
      ], rows, { key: (row) => row.fate }),
      passes?.length > 2 && clippedTable(passes),
      unrecorded.length > 0 && h("details", {}, h("summary", {}, "What is not recorded"),
        h("ul", {}, unrecorded.map((each) => h("li", {}, each.record)))),
    ]),
  });
}

/** How many tokens so many passes of the update clip: a logged clip fraction is of each pass. */
function clippedTable(passes) {
  const tokens = passes.reduce((sum, each) => sum + each, 0);
  const most = passes.length - 1;
  const some = { name: "at least 1", tokens: tokens - passes[0] };
  const rows = passes.map((each, times) => ({ name: `${times}`, tokens: each })).slice(1);
  return table("Tokens by the passes that clip them", [
    ["clipped in", (row) => `${row.name} of ${most} passes`, { head: true }],
    ["tokens", (row) => quantity(row.tokens, "", "", count), { right: true }],
    ["share of tokens", (row) => quantity(row.tokens / tokens, "", "", share), { right: true }],
  ], [some, ...rows], { key: (row) => row.name });
}

/** The columns of the numbers of some tokens; every one comes with the verdict on them. */
const MISMATCH = [
  ["verdict", (row) => badge(row.comparable, (row.cause ?? row.comparable).replace(/_/g, " "))],
  ["tokens", (row) => count(row.tokens), { right: true }],
  ["mean |d|", (row) => quantity(row.abs_diff_mean, "nat"), { right: true }],
  ["largest |d|", (row) => quantity(row.abs_diff_max, "nat"), { right: true }],
  ["k3 KL", (row) => quantity(row.k3_kl, "nat"), { right: true }],
  ["|Δ prob.|", (row) => quantity(row.probs_diff_mean), { right: true }],
  ["correlation", (row) => quantity(row.pearson), { right: true }],
  ["over 1 nat", (row) => count(row.over_1), { right: true }],
  ["not finite", (row) => row.nonfinite ? h("span.bad", {}, count(row.nonfinite)) : "0", { right: true }],
];

/** The round whose mean |d| is largest, as `per_round/max_round_diff` has it; null: none is apart. */
function worstRound(rows) {
  const known = rows.filter((row) => row.round !== undefined && isFinite(row.abs_diff_mean));
  if (known.length < 2) return null;
  return known.reduce((most, row) => (row.abs_diff_mean > most.abs_diff_mean ? row : most));
}

function roundsTable({ run, step: at, attempt, rows, whole }) {
  const worst = worstRound(rows);
  const times = worst && whole.abs_diff_mean > 0 ? worst.abs_diff_mean / whole.abs_diff_mean : null;
  return [worst && h("p", {}, `Of ${plural(rows.length, "round")}, round ${worst.round} is the worst: mean |d| `,
    quantity(worst.abs_diff_mean, "nat"),
    isFinite(times) && `, ${number(times)} times that of the whole step`,
    worst.comparable === "unknown" ? ` (of ${plural(worst.tokens, "token")}: too few to judge).` : "."),
  table("Rounds", [
    ["round", (row) => row.round === undefined ? "all"
      : h("a", { href: ofStep(run, at, attempt, "rounds", row.round) }, row.round),
    { head: true, right: true }],
    ["", (row) => (row === worst ? badge("warning", "worst") : "")],
    ...MISMATCH,
  ], [...rows, whole], {
    key: (row) => row.round ?? "all", rowClass: (row) => (row === worst ? "marked" : ""),
  })];
}

const asNumber = (value) =>
  isFinite(value) ? value : value === "inf" ? Infinity : value === "nan" ? Infinity : -Infinity;
const worstFirst = (a, b) =>
  b.nonfinite - a.nonfinite || asNumber(b.abs_diff_mean) - asNumber(a.abs_diff_mean);

function ranksTable({ run, step: at, attempt, rows }, isAll) {
  const sorted = [...rows].sort(worstFirst);
  const shown = isAll ? sorted : sorted.slice(0, WORST_RANKS);
  return [
    h("p.quiet", {}, shown.length < rows.length ? `The ${shown.length} worst of ${count(rows.length)}. `
      : `${plural(rows.length, "rank")}, the worst first. `,
    shown.length < rows.length && h("button", { type: "button", onclick: () => choose({ ranks: "all" }) },
      "Show all")),
    table("Ranks", [
      ["rank", (row) => h("a", { href: ofRank(run, at, attempt, row.role, row.rank) },
        `${row.role} ${row.rank}`), { head: true }],
      ...MISMATCH,
      ["host", (row) => row.host ?? row.node ?? row.node_id ?? gap("")],
      ["place", (row) => ["dp", "tp", "pp", "cp", "ep"].filter((name) => row[`${name}_rank`] !== undefined)
        .map((name) => `${name} ${row[`${name}_rank`]}`).join(" ")],
      ["remark", (row) => (row.parts_counted ? "" : "a replica counts instead")],
    ], shown, { key: (row) => `${row.role}/${row.rank}` }),
  ];
}

/** A token's text, its id after it; the id alone where no tokenizer is known. */
function tokenText({ text, token_id: id }) {
  if (id === null) return gap("no responses");
  if (text === null) return h("code", {}, id);
  return [h("code", {}, JSON.stringify(text)), " ", h("span.quiet", {}, id)];
}

function tokensTable(found, isAll) {
  const { run, step: at, attempt, rows } = found;
  const broken = rows.filter((row) => row.kind === "nonfinite");
  const ordered = [...broken, ...rows.filter((row) => row.kind !== "nonfinite")];
  const shown = isAll ? ordered : ordered.slice(0, WORST_TOKENS);
  return [
    h("p.quiet", {}, broken.length > 0 && `${plural(broken.length, "token")} not finite, first. `,
      found.texts_reason && rows.length > 0 && `Ids for texts: ${found.texts_reason}. `,
      shown.length < rows.length && h("button", { type: "button", onclick: () => choose({ tokens: "all" }) },
        `Show all ${rows.length} that are kept`)),
    table("Worst tokens", [
      ["sample", (row) => h("a", { href: ofSample(run, at, attempt, { ...row, at: row.position }) },
        row.sample_uid ?? `row ${row.row}`), { head: true }],
      ["position", (row) => count(row.position), { right: true }],
      ["token", (row) => tokenText(row)],
      ["round", (row) => count(row.round), { right: true }],
      ["|d|", (row) => quantity(row.abs_diff, "nat", "not finite"), { right: true }],
      ["p (trainer)", (row) => quantity(row.p), { right: true }],
      ["q (rollout)", (row) => quantity(row.q), { right: true }],
      ["rank", (row) => row.rank === null ? gap("its process is not known")
        : h("a", { href: ofRank(run, at, attempt, row.role, row.rank) }, `${row.role} ${row.rank}`)],
      ["verdict", () => badge(found.comparable)],
    ], shown, { key: (row) => `${row.kind}/${row.sample_uid}/${row.rank}/${row.row}/${row.position}` }),
  ];
}

function stagesTable({ run, step: at, attempt, rows, next }) {
  const groups = new Map();
  for (const row of rows) {
    const key = `${row.role}/${row.stage}`;
    groups.set(key, [...(groups.get(key) ?? []), row]);
  }
  const slowest = (found) => found.filter((row) => row.seconds !== null)
    .reduce((most, row) => (most === null || row.seconds > most.seconds ? row : most), null);
  const middle = (found) => {
    const sorted = found.map((row) => row.seconds).filter((each) => each !== null).sort((a, b) => a - b);
    return sorted.length ? sorted[Math.floor((sorted.length - 1) / 2)] : null;
  };
  return [
    next && h("p.quiet", {}, `Of the first ${count(rows.length)} parts; /steps/{step}/stages lists all.`),
    table("Stages", [
      ["stage", ([, found]) => found[0].stage, { head: true }],
      ["role", ([, found]) => found[0].role],
      ["ended", ([, found]) => count(found.filter((row) => row.status === "ok").length), { right: true }],
      ["not ended", ([, found]) => {
        const rest = found.filter((row) => row.status !== "ok");
        return rest.length ? [badge(rest[0].status), ` ${missingText(rest)}`] : "";
      }],
      ["median", ([, found]) => quantity(middle(found), "", "none ended", seconds), { right: true }],
      ["slowest", ([, found]) => {
        const worst = slowest(found);
        return worst === null ? gap("") : [seconds(worst.seconds), " ", h("a", {
          href: ofRank(run, at, attempt, worst.role, worst.rank),
        }, `rank ${worst.rank}`)];
      }, { right: true }],
      ["error", ([, found]) => found.find((row) => row.error_type)?.error_message ?? "", { wide: true }],
    ], [...groups], { key: ([key]) => key, empty: "No stage has begun." }),
  ];
}

function scalarsTable({ rows, next }) {
  const groups = new Map();
  for (const row of rows) {
    const key = `${row.name}/${row.stage ?? ""}/${row.role}`;
    groups.set(key, [...(groups.get(key) ?? []), row]);
  }
  const finite = (found) => found.map((row) => row.value).filter(isFinite);
  const odd = (found) => found.filter((row) => !isFinite(row.value)).map((row) => row);
  return [
    next && h("p.quiet", {}, `The first ${count(rows.length)}; /steps/{step}/scalars lists all.`),
    table("Logged numbers", [
      ["name", ([, found]) => found[0].name, { head: true }],
      ["stage", ([, found]) => found[0].stage ?? "of the step"],
      ["role", ([, found]) => found[0].role],
      ["values", ([, found]) => count(found.length), { right: true }],
      ["mean", ([, found]) => quantity(odd(found)[0]?.value
        ?? finite(found).reduce((sum, each) => sum + each, 0) / finite(found).length), { right: true }],
      ["lowest", ([, found]) => quantity(finite(found).length ? Math.min(...finite(found)) : null), { right: true }],
      ["highest", ([, found]) => quantity(finite(found).length ? Math.max(...finite(found)) : null), { right: true }],
      ["not finite", ([, found]) => odd(found).length
        ? h("span.bad", {}, odd(found).slice(0, 5).map((row) => `${row.role} ${row.rank}`).join(", ")) : ""],
    ], [...groups], { key: ([key]) => key, empty: "No rank logged a number." }),
  ];
}

// --- anatomy and kept files -------------------------------------------------------------------
function anatomy(view, { run, step: at, by = "place" }, asked, concerns) {
  view.add(h("h2#anatomy", {}, "Anatomy of the mismatch"), h("p.row", {},
    h("label", { for: "by" }, "by"),
    h("select#by", { onchange: ({ target }) => choose({ by: target.value }) },
      Object.entries(ANATOMY).map(([value, text]) =>
        h("option", { value, selected: value === by }, text)))));
  view.place(new Figure({
    name: "anatomy", title: `Mismatch by ${ANATOMY[by] ?? by}`, params: { ...asked, step: at, by }, concerns,
  }));
}

function kept(view, { run, step: at, attempt }, path, concerns, user) {
  const block = view.block({
    title: "Kept files and captures", path: [path("kept"), path("dumps")], lazy: true,
    concerns: (event) => concerns(event) || (event.event === "capture" && event.run === run),
    draw: (files, dumps) => [
      h("p", {}, files.pinned ? "The step is pinned: what it holds stays. "
        : "The step is not pinned: the ring drops its tensors when it needs room. ",
      user?.grade === "operate" && h("button", { type: "button", onclick: async () => {
        await send(files.pinned ? "DELETE" : "PUT", path("pin"));
        block.load(performance.now());
      } }, files.pinned ? "Unpin" : "Pin the step")),
      table("Kept files", [
        ["file", (row) => h("code", {}, row.path.split("/").at(-1)), { head: true }],
        ["holds", (row) => row.sections.join(", ")],
        ["rank", (row) => (row.rank === null ? "" : `${row.role} ${row.rank}`)],
        ["size", (row) => quantity(row.bytes, "", "unknown", bytes), { right: true }],
        ["", (row) => row.state],
      ], files.rows, { key: (row) => row.path, empty: "No file is kept." }),
      table("Dumps", [
        ["capture", (row) => row.capture_id === "local" ? "local"
          : h("a", { href: ofRun(run, "captures", row.capture_id) }, row.capture_id), { head: true }],
        ["stage", (row) => row.stage],
        ["part", partOf(dumps.rows)],
        ["rank", (row) => `${row.role} ${row.rank}`],
        ["", (row) => badge(row.state ?? "unknown")],
        ["size", (row) => quantity(row.bytes, "", "unknown", bytes), { right: true }],
        ["", (row) => h("a", { href: address(["runs", run, "steps", at, "operators"],
          { attempt, role: row.role, rank: row.rank, stage: row.stage }) }, "operators")],
        ["error", (row) => row.error ?? "", { wide: true }],
      ], dumps.rows, { key: (row) => `${row.capture_id}/${row.stage}/${row.role}/${row.rank}/${row.part}`,
        empty: "Nothing was captured at this step." }),
      h("p.operates", {}, h("a", { href: ofRun(run, "captures", "new") }, "Arm a capture")),
    ],
  });
}

// --- a rank, a round, samples -----------------------------------------------------------------
/** One rank of a step. */
export function rank(view, params) {
  const { run, step: at, attempt, role, rank: own } = params;
  const { path, concerns } = scope(params);
  const slice = { role, rank: own };
  view.add(h("h1", {}, `${role} rank ${own}, step ${at}`));
  verdict(view, path, concerns, { slice });
  view.block({
    title: "Mismatch", path: path("metrics", slice), concerns,
    draw: (found) => [tiles(found), everyNumber(found)],
  });
  view.block({
    title: "Rounds", path: path("rounds", { ...slice, limit: 1000 }), concerns,
    draw: (found) => roundsTable(found),
  });
  view.block({
    title: "Worst tokens", path: path("tokens", { ...slice, limit: 128 }), concerns,
    draw: (found) => tokensTable(found, params.tokens === "all"),
  });
  view.block({
    title: "Stages", path: path("stages", { ...slice, limit: 200 }), concerns, lazy: true,
    draw: ({ rows }) => table("Stages of the rank", [
      ["stage", (row) => row.stage, { head: true }],
      ["part", partOf(rows)],
      ["", (row) => badge(row.status)],
      ["took", (row) => quantity(row.seconds, "", row.open_seconds === null ? "" : "open", seconds), { right: true }],
      ["begun", (row) => when(row.begin_wall)],
      ["policy version", (row) => count(row.policy_version) ?? "", { right: true }],
      ["error", (row) => row.error_message ?? "", { wide: true }],
    ], rows, { key: (row) => `${row.stage}/${row.part}`, empty: "The rank has begun no stage." }),
  });
  view.block({
    title: "Where it runs", path: path("ranks", slice), concerns, lazy: true,
    draw: ({ rows: [row] }) => facts(LAYOUT.map((name) => [name.replace(/_/g, " "),
      row[name] === undefined ? null : String(row[name])])),
  });
  view.block({
    title: "Logged numbers", path: path("scalars", { ...slice, limit: 200 }), concerns, lazy: true,
    draw: (found) => scalarsTable(found),
  });
  view.add(h("p.row", {},
    h("a", { href: address(["runs", run, "steps", at, "operators"], { attempt, ...slice }) },
      "Operators of this rank"),
    h("a.operates", { href: `${ofRun(run, "captures", "new")}?${new URLSearchParams({ ranks: own, roles: role })}` },
      "Arm a capture of this rank"),
    h("a", { href: `${ofRun(run, "hangs")}?${new URLSearchParams({ role, rank: own })}` },
      "Stacks of this rank")));
}

const LAYOUT = [
  "host", "node", "node_id", "pid", "device_kind", "device_index", "device_serial", "world_size",
  "data_rank", "dp_rank", "dp_size", "tp_rank", "tp_size", "pp_rank", "pp_size", "cp_rank", "cp_size",
  "ep_rank", "ep_size", "engine", "engine_version", "framework", "framework_version",
];

/** One round of a step. */
export function round(view, params) {
  const { step: at, round: own } = params;
  const { path, concerns } = scope(params);
  view.add(h("h1", {}, `Round ${own}, step ${at}`));
  verdict(view, path, concerns, { slice: { round: own } });
  view.block({
    title: "Mismatch", path: path("metrics", { round: own }), concerns,
    draw: (found) => [tiles(found), everyNumber(found)],
  });
  view.block({
    title: "Worst tokens of the round", path: path("tokens", { round: own, limit: 128 }), concerns,
    draw: (found) => tokensTable(found, true),
  });
}

const SORTS = { max_abs: "largest |d|", mean_abs: "mean |d|", tokens: "length" };

/** The samples of a step. */
export function samples(view, params) {
  const { run, step: at, attempt, sort = "max_abs", cursor } = params;
  const { path, concerns } = scope(params);
  view.add(h("h1", {}, `Samples of step ${at}`));
  verdict(view, path, concerns, { isShort: true });
  view.add(h("p.row", {}, h("label", { for: "sort" }, "Sorted by"),
    h("select#sort", { onchange: ({ target }) => choose({ sort: target.value, cursor: null }) },
      Object.entries(SORTS).map(([value, text]) =>
        h("option", { value, selected: value === sort }, text)))));
  view.block({
    path: measured(path, "samples", { sort, limit: 100, cursor }), concerns,
    draw: orNothing(({ rows, next }) => [
      !rows.some((row) => row.kept) && h("p.quiet", {}, GONE.note),
      table("Samples", [
        ["sample", (row) => row.kept ? h("a", { href: ofSample(run, at, attempt, row) }, row.sample_uid ?? `row ${row.row}`)
          : row.sample_uid ?? `row ${row.row}`, { head: true }],
        ["group", (row) => row.group_id ?? ""],
        ["rank", (row) => (row.rank === null ? gap("its process is not known")
          : h("a", { href: ofRank(run, at, attempt, row.role, row.rank) }, `${row.role} ${row.rank}`))],
        ["rounds", (row) => count(row.rounds) ?? gap("not reported"), { right: true }],
        ["tokens", (row) => count(row.tokens), { right: true }],
        ["mean |d|", (row) => quantity(row.mean_abs, "nat"), { right: true }],
        ["largest |d|", (row) => quantity(row.max_abs, "nat"), { right: true }],
        ["not finite", (row) => row.nonfinite ? h("span.bad", {}, count(row.nonfinite)) : "0", { right: true }],
        ["reward", (row) => quantity(row.reward, "", "not reported"), { right: true }],
      ], rows, { key: (row) => `${row.sample_uid}/${row.role}/${row.rank}/${row.row}`,
        empty: "No sample is known." }),
      next && h("button", { type: "button", onclick: () => choose({ cursor: next }) }, "More samples"),
    ]),
  });
}
