// One rank of a step, one round of it, and its samples.

import { address, ofSample } from "./address.js";
import { facts, gap, h, picker, quantity } from "./dom.js";
import { count, partOf, seconds } from "./format.js";
import { GONE } from "./gradient.js";
import { toCapture, toRank } from "./links.js";
import { everyNumber, measured, orNothing, scope, tiles, verdict } from "./step_numbers.js";
import { roundsTable, scalarsTable, tokensTable } from "./step_tables.js";
import { BADGE, COUNT, HEAD, NAT, RIGHT, WHEN, WIDE, table } from "./table.js";

/** One rank of a step. */
export function rank(view, params) {
  const { run, step: at, attempt, role, rank: own } = params;
  const { path, concerns } = scope(params);
  const slice = { role, rank: own };
  view.add(h("h1", {}, `${role} rank ${own}, step ${at}`));
  verdict(view, path, concerns, { slice });
  view.block({
    title: "Mismatch", path: measured(path, "metrics", {}, slice), concerns,
    draw: orNothing((found) => [tiles(found), everyNumber(found)]),
  });
  view.block({
    title: "Rounds", path: measured(path, "rounds", { limit: 1000 }, slice), concerns,
    draw: orNothing(roundsTable),
  });
  view.block({
    title: "Worst tokens", path: measured(path, "tokens", { limit: 128 }, slice), concerns,
    draw: orNothing((found) => tokensTable(found, params.tokens === "all")),
  });
  view.block({
    title: "Stages", path: path("stages", { ...slice, limit: 200 }), concerns, lazy: true,
    draw: ({ rows }) => table("Stages of the rank", [
      ["stage", "stage", HEAD], ["part", partOf(rows)], ["", "status", BADGE],
      ["took", (row) => quantity(row.seconds, "", row.open_seconds === null ? "" : "open", seconds), RIGHT],
      ["begun", "begin_wall", WHEN], ["policy version", "policy_version", COUNT], ["error", "error_message", WIDE],
    ], rows, { key: (row) => `${row.stage}/${row.part}`, empty: "The rank has begun no stage." }),
  });
  view.block({
    title: "Where it runs", path: measured(path, "ranks", {}, slice), concerns, lazy: true,
    draw: orNothing(({ rows: [row] }) => facts(LAYOUT.map((name) => [name.replace(/_/g, " "),
      row[name] === undefined ? null : String(row[name])]))),
  });
  view.block({
    title: "Logged numbers", path: path("scalars", { ...slice, limit: 200 }), concerns, lazy: true,
    draw: (found) => scalarsTable(found),
  });
  view.add(h("p.row", {},
    h("a", { href: address(["runs", run, "steps", at, "operators"], { attempt, ...slice }) },
      "Operators of this rank"),
    toCapture(run, { ranks: own, roles: role }, "Request a capture of this rank"),
    h("a", { href: address(["runs", run, "hangs"], slice) }, "Stacks of this rank")));
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
  const slice = { round: own };
  verdict(view, path, concerns, { slice });
  view.block({
    title: "Mismatch", path: measured(path, "metrics", {}, slice), concerns,
    draw: orNothing((found) => [tiles(found), everyNumber(found)]),
  });
  view.block({
    title: "Worst tokens of the round", path: measured(path, "tokens", { limit: 128 }, slice), concerns,
    draw: orNothing((found) => tokensTable(found, true)),
  });
}

const SORTS = { max_abs: "largest |d|", mean_abs: "mean |d|", tokens: "length" };

/** The samples of a step. */
export function samples(view, params) {
  const { run, step: at, attempt, sort = "max_abs", cursor } = params;
  const { path, concerns } = scope(params);
  view.add(h("h1", {}, `Samples of step ${at}`));
  verdict(view, path, concerns, { isShort: true });
  view.add(h("p.row", {}, picker("sort", "Sorted by", Object.entries(SORTS), sort)));
  view.block({
    path: measured(path, "samples", { sort, limit: 100, cursor }), concerns,
    draw: orNothing(({ rows, next }) => [
      !rows.some((row) => row.kept) && h("p.quiet", {}, GONE.note),
      rows.length > 0 && rows.every((row) => row.reward === null) && h("p.quiet", {}, "No reward of a sample was reported."),
      table("Samples", [
        ["sample", (row) => row.kept ? h("a", { href: ofSample(run, at, attempt, row) }, row.sample_uid ?? `row ${row.row}`)
          : row.sample_uid ?? `row ${row.row}`, HEAD],
        ["group", "group_id"],
        ["rank", (row) => toRank(run, { ...row, step: at, attempt })],
        ["rounds", (row) => count(row.rounds) ?? gap("not reported"), RIGHT],
        ["tokens", "tokens", COUNT], ["mean |d|", "mean_abs", NAT], ["largest |d|", "max_abs", NAT],
        ["not finite", (row) => row.nonfinite ? h("span.bad", {}, count(row.nonfinite)) : "0", RIGHT],
        ...(rows.some((row) => row.reward !== null) ? [["reward", "reward", { unit: "", why: () => "not reported" }]] : []),
      ], rows, { key: (row) => `${row.sample_uid}/${row.role}/${row.rank}/${row.row}`,
        empty: "No sample is known.", next, more: "More samples" }),
    ]),
  });
}