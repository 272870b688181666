// The numbers of a step, or of a rank or round of it: whether they can be trusted, the few that say
// most, and all of them.

import { address, ofRun, ofStep, parse } from "./address.js";
import { badge, facts, h, quantity } from "./dom.js";
import { count, isFinite, number, plural, share } from "./format.js";
import { missingText } from "./runs.js";
import { all, get, part, url } from "./service.js";
import { HEAD, RIGHT, WIDE, table } from "./table.js";
import { explained } from "./words.js";

/** What the views of a step have in common. */
export function scope({ run, step, attempt }) {
  const asked = { run, attempt };
  return {
    asked,
    /** The path of an answer about the step; "": of the step itself. */
    path: (name, params = {}) => url(`/steps/${part(step)}${name && `/${name}`}`, { ...asked, ...params }),
    concerns: (event) => event.event === "step" && event.run === run
      && String(event.step) === String(step) && (!attempt || String(event.attempt) === String(attempt)),
  };
}

/** What is not finite under the mask: [tokens, "NaN in old"]. */
const NAMES = { nan: "NaN", posinf: "∞", neginf: "−∞" };
const brokenIn = (nonfinite) => Object.entries(nonfinite).flatMap(([stream, kinds]) =>
  Object.entries(kinds).filter(([, tokens]) => tokens > 0).map(([kind, tokens]) => [tokens, `${NAMES[kind]} in ${stream}`]));

const without = new WeakMap();

/** The numbers of a step or of a slice of it; { none: why } where it has none. */
async function numbersOf(path, slice, since) {
  const found = await get(path("", slice), since);
  if (found.numbers) return found.numbers;
  // What has not changed is the same object, so that nothing is drawn again.
  if (!without.has(found)) without.set(found, { none: found.unmeasured });
  return without.get(found);
}

/**
 * An answer about the numbers of a step. One that has none yet is told once, by the verdict: what
 * else would show them shows nothing, and is not asked for.
 * @param slice whose: { role, rank } or { round }; nothing: of the step.
 */
export const measured = (path, name, params = {}, slice = {}) => async (since) => {
  const found = await numbersOf(path, slice, since);
  if (found.none || name === "metrics") return found;
  const asked = path(name, { ...slice, ...params });
  return name === "ranks" ? all(asked, since) : get(asked, since);
};

/** Draw what is measured; of what is not, the verdict in the summary says why. */
export const orNothing = (draw) => (found) => (found.none ? h("p.quiet", {}, "No numbers yet.") : draw(found));

/**
 * The verdict on the streams, why, and what the numbers rest on.
 * @param slice whose: a rank or a round; nothing: of the step.
 * @param isShort whether what the numbers rest on is left out.
 */
export function verdict(view, path, concerns, { slice = {}, isShort = false } = {}) {
  const isRound = slice.round !== undefined;
  const ofWhole = isRound || slice.rank !== undefined ? " of the step" : "";
  view.block({
    path: measured(path, "metrics", {}, slice),
    concerns,
    draw: (found) => {
      if (found.none) {
        return h("div.verdict", {}, h("p.lead", {}, badge("not measured"), ` ${found.none.wrong}`),
          whereToLook());
      }
      const { coverage } = found;
      const left = Object.entries(coverage.tokens_left_out)
        .map(([why, tokens]) => `${count(tokens)} ${why}`);
      const broken = brokenIn(found.nonfinite).map(([tokens, what]) =>
        `${plural(tokens, "token")} ${tokens === 1 ? "is" : "are"} ${what}`);
      const unread = ["lost", "dropped", "refused", "pending"].filter((state) => coverage[`payloads_${state}`] > 0);
      return h("div.verdict", { class: broken.length > 0 && found.comparable !== "suspect" ? "broken" : found.comparable },
        h("p.lead", {}, badge(found.comparable, [found.comparable, found.cause && `: ${found.cause}`]
          .filter(Boolean).join("").replace(/_/g, " ")),
        broken.length > 0 && [" ", badge("warning", broken.join(", "))],
        ` ${found.pair.join(" against ")} in ${found.stage}`, found.role && ` of ${found.role}`),
        found.comparability.length > 0 && h("ul", {}, found.comparability
          .filter((check) => !isShort || check.verdict === "suspect").map((check) =>
            h("li", {}, h("strong", {}, check.code.replace(/_/g, " ")), `: ${check.text}`))),
        !isShort && facts([
          [`ranks${ofWhole}`, [badge(found.complete), found.missing.length > 0
            && ` without ${missingText(found.missing)}`]],
          ["tokens", isRound ? `${count(found.metrics["counts/tokens"])} of ${count(coverage.tokens)} of the step`
            : [count(coverage.tokens), coverage.tokens_sent !== null
            && ` of ${count(coverage.tokens_sent)} ${unread.length > 0 ? "that were read" : "sent"}`, left.length > 0 && ` (${left.join(", ")})`]],
          ["sequences", !isRound && count(coverage.sequences)],
          [`payloads${ofWhole}`, [`${count(coverage.payloads_ingested)} of ${count(coverage.payloads_announced)} read`,
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

/** Of a step without numbers: the views that say why. */
function whereToLook() {
  const { parts: [, run, , step], query: { attempt } } = parse(location.hash);
  const time = address(["runs", run, "steps", step], { attempt, part: "time" });
  return h("p.row", {}, h("a", { href: time }, "Who has arrived"),
    h("a", { href: ofRun(run, "lost") }, "What was lost"),
    h("a", { href: ofRun(run, "findings") }, "What was refused or not joined"));
}

/** The numbers that say most. */
export function tiles({ metrics, units, noise_floor: floor, nonfinite, complete }) {
  const why = complete === "open" ? "the step is open" : "no token counts";
  const mean = metrics["logprob_abs_diff/mean"];
  const own = floor?.["logprob_abs_diff/mean"];
  const broken = brokenIn(nonfinite).map(([tokens, what]) => `${count(tokens)} ${what}`);
  const tile = (name, value, remark = "") =>
    h("div.tile", { "data-key": name }, h("dt", {}, explained(name)), h("dd", {}, value,
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

/** A number; one that is whole has no decimals. */
const whole = (value) => (Number.isInteger(value) ? count(value) : number(value));

const halves = (names) => [names.slice(0, Math.ceil(names.length / 2)), names.slice(Math.ceil(names.length / 2))]
  .filter((some) => some.length > 0);

/** All published numbers, and the streams; `open`: not folded. */
export function everyNumber({ metrics, units, noise_floor: floor, streams, rollout_is: weights }, { open = false } = {}) {
  const names = Object.keys(metrics).sort();
  return h("details", { open }, h("summary", {}, `All ${names.length} published numbers, and the streams`),
    h("div.halves", {}, halves(names).map((some) => h("div", {}, table("Published numbers", [
      ["name", (name) => h("code", {}, name), { ...HEAD, ...WIDE }],
      ["value", (name) => quantity(metrics[name], units[name] ?? "", "", whole), RIGHT],
      ["noise floor", (name) => (floor ? quantity(floor[name] ?? null, units[name] ?? "", "", whole) : ""), RIGHT],
    ], some, { key: (name) => name, stacks: false })))),
    h("p.quiet", {}, `Importance weights: ${weights.text}.`),
    Object.entries(streams).map(([name, stream]) =>
      h("div", {}, h("h3", {}, `Stream ${name}`), facts(Object.entries(stream)
        .map(([key, value]) => [key.replace(/_/g, " "), typeof value === "object"
          ? JSON.stringify(value).replace(/["[\]]/g, "") : String(value)])))));
}
