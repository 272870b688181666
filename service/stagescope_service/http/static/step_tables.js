// The tables of a step: its rounds, ranks, tokens, stages and logged numbers.

import { choose, ofRank, ofSample, ofStep } from "./address.js";
import { badge, button, gap, h, quantity } from "./dom.js";
import { byRole, count, isFinite, number, plural, seconds } from "./format.js";
import { toRank } from "./links.js";
import { missingText } from "./runs.js";
import { COUNT, HEAD, NAT, PLAIN, RIGHT, WIDE, table } from "./table.js";

const WORST_RANKS = 16;
const WORST_TOKENS = 16;

/** The columns of the numbers of some tokens; every one comes with the verdict on them. */
const MISMATCH = [
  ["verdict", (row) => badge(row.comparable, (row.cause ?? row.comparable).replace(/_/g, " "))],
  ["tokens", "tokens", COUNT], ["mean |d|", "abs_diff_mean", NAT], ["largest |d|", "abs_diff_max", NAT],
  ["k3 KL", "k3_kl", NAT], ["|Δ prob.|", "probs_diff_mean", PLAIN], ["correlation", "pearson", PLAIN],
  ["over 1 nat", "over_1", COUNT],
  ["not finite", (row) => row.nonfinite ? h("span.bad", {}, count(row.nonfinite)) : "0", RIGHT],
];

/** The round whose mean |d| is largest, as `per_round/max_round_diff` has it; null: there are not two. */
function worstRound(rows) {
  const known = rows.filter((row) => row.round !== undefined && isFinite(row.abs_diff_mean));
  if (known.length < 2) return null;
  return known.reduce((most, row) => (row.abs_diff_mean > most.abs_diff_mean ? row : most));
}

export function roundsTable({ run, step: at, attempt, rows, whole }) {
  const worst = worstRound(rows);
  const times = worst && whole.abs_diff_mean > 0 ? worst.abs_diff_mean / whole.abs_diff_mean : null;
  return [worst && h("p", {}, `Of ${plural(rows.length, "round")}, round ${worst.round} is the worst: mean |d| `,
    quantity(worst.abs_diff_mean, "nat"),
    isFinite(times) && `, ${number(times)} times that of the whole step`,
    worst.comparable === "unknown" ? ` (of ${plural(worst.tokens, "token")}: too few to judge).` : "."),
  table("Rounds", [
    ["round", (row) => row.round === undefined ? "all"
      : h("a", { href: ofStep(run, at, attempt, "rounds", row.round) }, row.round),
    { ...HEAD, ...RIGHT }],
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

export function ranksTable({ run, step: at, attempt, rows }, isAll) {
  const sorted = [...rows].sort(worstFirst);
  const shown = isAll ? sorted : sorted.slice(0, WORST_RANKS);
  return [
    h("p.quiet", {}, shown.length < rows.length ? `The ${shown.length} worst of ${count(rows.length)}. `
      : `${plural(rows.length, "rank")}, the worst first. `,
    shown.length < rows.length && button("Show all", () => choose({ ranks: "all" }))),
    table("Ranks", [
      ["rank", (row) => toRank(run, { ...row, step: at, attempt }), HEAD],
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

export function tokensTable(found, isAll) {
  const { run, step: at, attempt, rows } = found;
  const broken = rows.filter((row) => row.kind === "nonfinite");
  const ordered = [...broken, ...rows.filter((row) => row.kind !== "nonfinite")];
  const shown = isAll ? ordered : ordered.slice(0, WORST_TOKENS);
  return [
    h("p.quiet", {}, badge(found.comparable), " ", broken.length > 0 && `${plural(broken.length, "token")} not finite, first. `,
      found.texts_reason && rows.length > 0 && `Tokens are shown by their ids: ${found.texts_reason}. `,
      shown.length < rows.length && button(`Show all ${rows.length} that are kept`, () => choose({ tokens: "all" }))),
    table("Worst tokens", [
      ["sample", (row) => h("a", { href: ofSample(run, at, attempt, { ...row, at: row.position }) },
        row.sample_uid ?? `row ${row.row}`), HEAD],
      ["position", "position", COUNT],
      ["token", (row) => tokenText(row)],
      ["round", "round", COUNT], ["|d|", "abs_diff", { unit: "nat", why: () => "not finite" }],
      ["p (trainer)", "p", NAT], ["q (rollout)", "q", NAT],
      ["rank", (row) => toRank(run, { ...row, step: at, attempt })],
    ], shown, { key: (row) => `${row.kind}/${row.sample_uid}/${row.rank}/${row.row}/${row.position}` }),
  ];
}

export function stagesTable({ run, step: at, attempt, rows, next }) {
  const groups = Map.groupBy(rows, (row) => `${row.role}/${row.stage}`);
  const slowest = (found) => found.filter((row) => row.seconds !== null)
    .reduce((most, row) => (most === null || row.seconds > most.seconds ? row : most), null);
  const middle = (found) => {
    const sorted = found.map((row) => row.seconds).filter((each) => each !== null).sort((a, b) => a - b);
    return sorted.length ? sorted[Math.floor((sorted.length - 1) / 2)] : null;
  };
  return [
    next && h("p.quiet", {}, `Of the first ${count(rows.length)} parts; /steps/{step}/stages lists all.`),
    table("Stages", [
      ["stage", ([, found]) => found[0].stage, HEAD],
      ["role", ([, found]) => found[0].role],
      ["ended", ([, found]) => count(found.filter((row) => row.status === "ok").length), RIGHT],
      ["not ended", ([, found]) => {
        const rest = found.filter((row) => row.status !== "ok");
        return rest.length ? [badge(rest[0].status), ` ${missingText(rest)}`] : "";
      }],
      ["median", ([, found]) => quantity(middle(found), "", "none ended", seconds), RIGHT],
      ["slowest", ([, found]) => {
        const worst = slowest(found);
        return worst === null ? gap("") : [seconds(worst.seconds), " ", h("a", {
          href: ofRank(run, at, attempt, worst.role, worst.rank),
        }, `rank ${worst.rank}`)];
      }, RIGHT],
      ["error", ([, found]) => found.find((row) => row.error_type)?.error_message ?? "", WIDE],
    ], [...groups], { key: ([key]) => key, empty: "No stage has begun." }),
  ];
}

export function scalarsTable({ rows, next }) {
  const groups = Map.groupBy(rows, (row) => `${row.name}/${row.stage ?? ""}/${row.role}`);
  const finite = (found) => found.map((row) => row.value).filter(isFinite);
  const odd = (found) => found.filter((row) => !isFinite(row.value));
  return [
    next && h("p.quiet", {}, `The first ${count(rows.length)}; /steps/{step}/scalars lists all.`),
    table("Logged numbers", [
      ["name", ([, found]) => found[0].name, HEAD],
      ["stage", ([, found]) => found[0].stage ?? "of the step"],
      ["role", ([, found]) => found[0].role],
      ["values", ([, found]) => count(found.length), RIGHT],
      ["mean", ([, found]) => quantity(odd(found)[0]?.value
        ?? finite(found).reduce((sum, each) => sum + each, 0) / finite(found).length), RIGHT],
      ["lowest", ([, found]) => quantity(finite(found).length ? Math.min(...finite(found)) : null), RIGHT],
      ["highest", ([, found]) => quantity(finite(found).length ? Math.max(...finite(found)) : null), RIGHT],
      ["not finite", ([, found]) => odd(found).length
        ? h("span.bad", {}, byRole(odd(found))) : ""],
    ], [...groups], { key: ([key]) => key, empty: "No rank logged a number." }),
  ];
}
