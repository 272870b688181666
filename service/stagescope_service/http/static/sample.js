// One sample token by token: its mismatch, and what the loss did with each token.

import { address, note } from "./address.js";
import { once } from "./blocks.js";
import { button, facts, folded, gap, h, holding, listed, made, patch, quantity } from "./dom.js";
import { count, isFinite, plural, share } from "./format.js";
import { toCapture, toRank } from "./links.js";
import { get, part, url } from "./service.js";
import { verdict } from "./step_numbers.js";
import { FATES, segments, SHADES, TokenText } from "./token_text.js";
import { explained } from "./words.js";

/** A sample, by its uid or by the rank and row that hold it. */
export function sample(view, params) {
  const { run, step, attempt, sample: uid, role, rank, row, at } = params;
  const path = (name, more = {}) => url(`/steps/${part(step)}/${name}`, { run, attempt, ...more });
  const concerns = () => false;
  view.add(h("h1", {}, uid === "-" ? `Row ${row} of ${role} ${rank}, step ${step}` : `Sample ${uid}, step ${step}`));
  verdict(view, path, concerns, { isShort: true });
  let text = null;
  const block = view.block({
    path: once(() => get(uid === "-" ? path("row", { role, rank, row }) : path(`samples/${part(uid)}`))),
    draw: (found) => {
      text?.close();
      const panel = made(h("div.panel"));
      text = new TokenText(found, (index, isChosen) => {
        patch(panel, describe(found, index, params));
        if (isChosen) note({ at: found.positions[index] });
      });
      const named = at === undefined ? -1 : found.positions.indexOf(Number(at));
      const start = named >= 0 ? named : worst(found);
      text.choose(start, { isQuiet: at === undefined });
      patch(panel, describe(found, start, params));
      return [
        summary(found),
        prompt(found),
        legend(found),
        h("p.row", {},
          button("◂ Previous", () => text.next(-1)),
          button("Next ▸", () => text.next(1)),
          h("span", {}, text.marked.length
            ? `of ${plural(text.marked.length, "token")} with |d| over 0.1 nat or not finite`
            : "no token with |d| over 0.1 nat"),
          h("span.quiet", {}, "With the tokens focused: arrows, Page keys, n and p.")),
        h("div.tokens-and-panel", {}, holding(text.element), holding(panel)),
      ];
    },
  });
  block.close = () => text?.close();
}

/** The model's token whose |d| is largest: the first of equal ones, and the first not finite. */
function worst({ d, mask }) {
  const size = (at) => (!mask[at] ? -1 : typeof d[at] === "string" ? Infinity : Math.abs(d[at] ?? 0));
  return d.reduce((best, _, at) => (size(at) > size(best) ? at : best), 0);
}

function summary(found) {
  const inRounds = segments(found).filter(({ round }) => round !== null);
  const environment = found.mask.filter((each) => !each).length;
  const missing = found.unrecorded.map((each) => each.record);
  if (found.clipped && !found.update_ratios) {
    missing.push("the update's own ratio, which the loss clips: record log_probs of each pass in "
      + "actor_update, beside old_log_probs");
  }
  return [
    facts([
      ["tokens", [count(found.positions.length), environment ? `, ${count(environment)} of the environment` : ""]],
      ["rounds", count(inRounds.length)],
      ["group", found.group_id],
      ["prompt", found.prompt_ids ? null : "not recorded: record prompts beside responses"],
      ["text", found.texts ? null : `${found.token_ids ? "ids" : "none"}: ${found.texts_reason}`],
    ]),
    folded("What is not recorded of it", missing), folded("How this was read", found.notes),
  ];
}

/** The prompt as text, or its ids where no tokenizer is known. */
function prompt({ prompt_ids: ids, prompt_text: text }) {
  return ids && h("details.prompt", { open: true }, h("summary", {}, `Prompt, ${plural(ids.length, "token")}`),
    h("pre", { tabindex: 0, role: "region", "aria-label": "Prompt" }, text ?? ids.join(" ")));
}

/** The passes of the update that clip a token: "in 1 of 2 passes, on the high side". */
function clippedIn(passes, at) {
  const sides = passes.map((each) => each[at]);
  const clipping = sides.filter(Boolean);
  if (!clipping.length) return passes.length > 1 ? `in none of ${passes.length} passes` : "no";
  const times = passes.length > 1 ? `in ${clipping.length} of ${passes.length} passes, ` : "";
  return `${times}on the ${[...new Set(clipping)].join(" and the ")} side`;
}

/** The ratio that the policy loss clips, of each pass over the token. */
const ownRatios = (ratios, at) => listed(ratios.map((each) => quantity(each[at])), ", then ");

function legend(found) {
  const fates = new Set(found.fate);
  const marks = Object.entries(FATES).filter(([fate]) => fates.has(fate));
  return h("p.legend", {}, explained("|d| in nat: "),
    SHADES.map(([at, text]) => [h("span.t", { class: `s${at}` }, text), " "]),
    h("span.t", { class: "environment" }, "environment"), " ",
    marks.map(([text, kind]) => [h("span.t", { class: kind }, fateText(text, found)), " "]));
}

/** What the loss did; a token counts as clipped where every pass clips it. */
function fateText(fate, { clipped_passes: passes }) {
  const several = fate?.startsWith("clipped") && passes?.length > 1;
  return several ? `${fate} in every one of ${passes.length} passes` : fate;
}

/** Everything that is known of a token. */
function describe(found, at, { run, step, attempt, role, rank }) {
  const column = (name) => found[name]?.[at] ?? null;
  const [p, q, d] = ["p", "q", "d"].map((name) => (found.mask[at] ? column(name) : null));
  const [weightRaw, weight] = [column("weight_raw"), column("weight")];
  const text = column("texts");
  const own = { role, rank };
  const why = found.mask[at] ? "not recorded" : "no model token";
  const ratio = isFinite(d) ? Math.exp(d) : null;
  return [
    h("h2", {}, "Token at ", count(found.positions[at])),
    facts([
      ["text", text === null ? null : h("code", {}, JSON.stringify(text))],
      ["id", column("token_ids") === null ? gap("not recorded") : h("code", {}, column("token_ids"))],
      ["in", found.mask[at] ? `round ${found.round[at]}` : "the environment's tokens"],
      ["turn", column("turn") === null ? null : count(column("turn"))],
      ["d = p − q", quantity(d, "nat", why)],
      ["p, the trainer's", quantity(p, "nat", why)],
      ["q, the rollout's", quantity(q, "nat", why)],
      ["probabilities", isFinite(p) && isFinite(q)
        ? `${share(Math.exp(p))} against ${share(Math.exp(q))}` : gap(why)],
      ["trainer over rollout", quantity(ratio, "", why)],
      ["advantage", quantity(column("advantage"), "", why)],
      ["importance weight", weightRaw === null && weight === null ? gap(why)
        : [quantity(weightRaw, "", "not recorded"), " raw, ", quantity(weight, "", "not recorded"), " applied"]],
      ["the update's own ratio", found.mask[at] && found.update_ratios
        ? ownRatios(found.update_ratios, at) : gap(why)],
      ["that ratio is clipped", found.mask[at] && found.clipped_passes
        ? clippedIn(found.clipped_passes, at) : gap(why)],
      ["the loss", fateText(column("fate"), found)],
    ]),
    rank !== undefined && h("p.row", {},
      h("a", { href: address(["runs", run, "steps", step, "operators"], { attempt, ...own }) },
        "Operators of its rank"),
      toRank(run, { step, attempt, ...own }), toCapture(run, { ranks: rank, roles: role }, "Request a capture there")),
  ];
}
