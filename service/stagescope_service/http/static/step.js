// One step: its parts under their tabs, the steps before and after it, and what is kept of it.

import { address, AGAIN, nameOf, ofRun, ofStep, parse } from "./address.js";
import { isAction, isOver } from "./blocks.js";
import { badge, form, h, listed, made, picker } from "./dom.js";
import { Figure } from "./figure.js";
import { findingsTable } from "./findings.js";
import { partOf } from "./format.js";
import { lossTable } from "./gradient.js";
import { toCapture } from "./links.js";
import { routingParts } from "./routing.js";
import { filesToSend } from "./runs.js";
import { all, get, send, toFile, url } from "./service.js";
import { everyNumber, measured, orNothing, scope, tiles, verdict } from "./step_numbers.js";
import { ranksTable, roundsTable, scalarsTable, stagesTable, tokensTable } from "./step_tables.js";
import { HEAD, SIZE, WIDE, table } from "./table.js";

const FEW = 3; // earlier attempts that are named
const ANATOMY = {
  place: "place in the round", end: "distance to the round's end", position: "absolute position",
  probability: "probability", lattice: "lattice of d", staleness: "staleness",
  engine: "engine instance", routing: "layers with other experts",
};

/** A step; `latest` is the newest one that is measured, also when another one is. */
export function step(view, params, user) {
  if (params.step !== "latest") {
    showStep(view, params, user);
    return;
  }
  let shown;
  view.add(h("h1", {}, `Newest step of ${nameOf(params.run)}`));
  view.block({
    path: (since) => newestStep(params, since), leads: true,
    concerns: (event) => event.event === "step" && event.run === params.run
      && (isOver(event) || shown === undefined),
    draw: (own) => {
      if (own === null) return h("p", {}, "No step has begun.");
      if (shown !== undefined) dispatchEvent(new Event(AGAIN));
      else showStep(view, { ...params, step: own, isLatest: true }, user);
      shown = own;
      return [];
    },
  });
}

/** The newest step that is measured; where none of the newest is, the newest that has begun. */
async function newestStep({ run, attempt }, since) {
  const { rows } = await get(url("/steps", { run, attempt, limit: 20 }), since);
  const current = rows.filter((row) => attempt || row.superseded_by === null);
  return (current.find((row) => row.measured) ?? current[0] ?? { step: null }).step;
}

function showStep(view, params, user) {
  const { run, step: number_ } = params;
  const { asked, path, concerns } = scope(params);
  const figure = (name, title, more = {}, parent = view.root) => view.place(new Figure({
    name, title, concerns, params: { ...asked, step: number_, ...more },
  }), parent);
  view.add(params.isLatest ? h("p.lead", {}, `Step ${number_}`) : h("h1", {}, `Step ${number_} of ${nameOf(run)}`));
  let isNewest = true; // until a later step is known
  view.block({
    path: path(""),
    concerns: (event) => concerns(event)
      || (isNewest && event.event === "step" && event.run === run && event.step > Number(number_)),
    draw: (found) => {
      isNewest = !found.later;
      return neighbourLinks(params, found);
    },
  });
  view.add(partLinks(params));
  const show = PARTS[params.part]?.show ?? PARTS.summary.show;
  show({ view, params, user, path, concerns, figure });
}

/** The parts of a step's view, each under a tab. */
const PARTS = {
  summary: { title: "Summary", show: ({ view, params: { run, step: at, attempt }, path, concerns }) => {
    verdict(view, path, concerns);
    view.block({
      path: url("/findings", { run, step: at, attempt, limit: 20 }),
      concerns: (event) => ["finding", "step"].includes(event.event) && concerns({ ...event, event: "step" }),
      draw: ({ rows }) => rows.length > 0 && [
        h("h2", {}, "Found at this step"), findingsTable(run, rows)],
    });
    view.block({
      path: measured(path, "metrics"), concerns,
      draw: (found) => !found.none && [h("h2", {}, "Mismatch"), tiles(found)],
    });
    view.add(filesToSend(run, { step: at, attempt }));
  } },
  rounds: { title: "Rounds", show: ({ view, params: { by = "place" }, path, concerns, figure }) => {
    view.block({
      title: "Rounds", path: measured(path, "rounds", { limit: 1000 }), concerns,
      draw: orNothing(roundsTable),
    });
    figure("rounds", "Mismatch by round, against the steps before");
    view.add(h("h2#anatomy", {}, "Anatomy of the mismatch"),
      h("p.row", {}, picker("by", "by", Object.entries(ANATOMY), by)));
    figure("anatomy", `Mismatch by ${ANATOMY[by] ?? by}`, { by });
  } },
  routing: { title: "Routing", show: ({ view, path, concerns, figure }) => {
    routingParts(view, path, concerns,
      () => figure("routing", "Tokens with another expert, by layer and round"));
  } },
  ranks: { title: "Ranks", show: ({ view, params, path, concerns, figure }) => {
    view.block({
      title: "Ranks", path: measured(path, "ranks", { limit: 1000 }), concerns,
      draw: orNothing((found) => ranksTable(found, params.ranks === "all")),
    });
    figure("rank-rounds", "Mismatch by rank and round", { metric: params.metric });
  } },
  tokens: { title: "Tokens", show: ({ view, params, path, concerns, figure }) => {
    view.add(h("p", {}, h("a", { href: ofStep(params.run, params.step, params.attempt, "samples") },
      "Samples of the step, token by token")));
    view.block({
      title: "Worst tokens", path: measured(path, "tokens", { limit: 128 }), concerns,
      draw: orNothing((found) => tokensTable(found, params.tokens === "all")),
    });
    const pair = made(h("div.halves"));
    view.root.append(pair);
    figure("distribution", "Distribution of |d|", { of: params.of }, pair);
    figure("density", "p against q", {}, pair);
  } },
  gradient: { title: "Gradient", show: ({ view, path, concerns }) => lossTable(view, path, concerns) },
  time: { title: "Time", show: ({ view, params: { run, step: at }, path, concerns, figure }) => {
    figure("timeline", "Stages by rank");
    view.add(h("p", {}, h("a", { href: toFile(path("timeline")), download: `${run}-step-${at}.json` },
      "The timeline as a trace for Perfetto or chrome://tracing")));
    view.block({
      title: "Stages", path: (since) => all(path("stages", { limit: 1000 }), since), concerns, lazy: true,
      draw: (found) => stagesTable(found),
    });
  } },
  numbers: { title: "Numbers", show: ({ view, path, concerns }) => {
    view.block({
      title: "Published numbers", path: measured(path, "metrics"), concerns,
      draw: orNothing((found) => everyNumber(found, { open: true })),
    });
    view.block({
      title: "Logged numbers", path: (since) => all(path("scalars", { limit: 1000 }), since), concerns, lazy: true,
      draw: (found) => scalarsTable(found),
    });
  } },
  files: { title: "Files", show: ({ view, params, user, path, concerns }) => kept(view, params, path, concerns, user) },
};

function partLinks({ run, step: at, attempt, part: shown = "summary" }) {
  const { parts, query } = parse(location.hash);
  const links = Object.entries(PARTS).map(([part, { title }]) => h("a", {
    href: address(parts, { ...query, part: part === "summary" ? null : part }),
    "aria-current": part === shown ? "true" : null,
  }, title));
  links.splice(-1, 0, h("a", { href: ofStep(run, at, attempt, "operators") }, "Operators"));
  return h("nav.parts", { "aria-label": "Parts of the step" }, links);
}

function neighbourLinks({ run, step: own, attempt, isLatest }, { earlier, later, repeats }) {
  const link = (found, rel, text) => h("a", { rel,
    href: ofStep(run, found.step, String(found.attempt) === attempt ? attempt : null) }, text);
  return h("p.row", {},
    earlier ? link(earlier, "prev", `← step ${earlier.step}`) : h("span.quiet", {}, "no earlier step"),
    later ? link(later, "next", `step ${later.step} →`) : h("span.quiet", {}, "no later step"),
    isLatest ? h("a", { href: ofStep(run, own, attempt) }, `stay at step ${own}`)
      : h("a", { href: ofStep(run, "latest") }, "follow the newest step"),
    repeats.length > 0 && h("span", {}, "it repeats that of attempt ",
      listed(repeats.slice(0, FEW).map((each) => h("a", { href: ofStep(run, own, each) }, each))),
      repeats.length > FEW && ` and ${repeats.length - FEW} earlier`));
}

function kept(view, { run, step: at, attempt }, path, concerns, user) {
  const block = view.block({
    title: "Kept files and captures", path: [path("kept"), path("dumps")], lazy: true,
    concerns: (event) => concerns(event) || isAction(event, "pin", "unpin")
      || (event.event === "capture" && event.run === run),
    draw: (files, dumps) => [
      form({}, async () => {
        await send(files.pinned ? "DELETE" : "PUT", path("pin"));
        block.load(performance.now());
      }, files.pinned ? "The step is pinned: what it holds stays."
        : "The step is not pinned: the ring drops its tensors when it needs room.",
      user?.grade === "operate" && h("button", {}, files.pinned ? "Unpin" : "Pin the step")),
      table("Kept files", [
        ["file", (row) => h("code", {}, row.path.split("/").at(-1)), HEAD],
        ["holds", (row) => row.sections.join(", ")],
        ["rank", (row) => (row.rank === null ? "" : `${row.role} ${row.rank}`)],
        ["size", "bytes", SIZE], ["", "state"],
      ], files.rows, { key: (row) => row.path, empty: "No file is kept." }),
      table("Dumps", [
        ["capture", (row) => row.capture_id === "local" ? "local"
          : h("a", { href: ofRun(run, "captures", row.capture_id) }, row.capture_id), HEAD],
        ["stage"], ["part", partOf(dumps.rows)],
        ["rank", (row) => `${row.role} ${row.rank}`],
        ["", (row) => badge(row.state ?? "unknown")],
        ["size", "bytes", SIZE],
        ["", (row) => h("a", { href: address(["runs", run, "steps", at, "operators"],
          { attempt, role: row.role, rank: row.rank, stage: row.stage }) }, "operators")],
        ["error", "error", WIDE],
      ], dumps.rows, { key: (row) => `${row.capture_id}/${row.stage}/${row.role}/${row.rank}/${row.part}`,
        isNamed: true, empty: "Nothing was captured at this step." }),
      h("p", {}, toCapture(run)),
    ],
  });
}
