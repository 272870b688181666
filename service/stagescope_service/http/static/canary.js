// The canary: how engines and trainer score the same tokens after each weight sync.

import { nameOf, ofRun } from "./address.js";
import { badge, h, listed, quantity } from "./dom.js";
import { Figure } from "./figure.js";
import { columnFormat, count, number } from "./format.js";
import { toStep } from "./links.js";
import { part, url } from "./service.js";
import { COUNT, HEAD, NAT, RIGHT, WHEN, WIDE, table } from "./table.js";

const PAIRS = ["trainer vs engine", "decode vs prefill", "cached vs uncached", "adapter vs base",
  "engine twice", "engine vs engines", "engine vs before", "difference vs before"];
const WRONG = ["differs", "equal"];
const STATES = { equal: "differs", "not compared": "unknown" };
const verdict = (row) => badge(STATES[row.verdict] ?? row.verdict, row.verdict);
const lacking = (row) => `${count(row.not_finite)} are not finite`;

/** The versions of an attempt, by engine. */
export function canary(view, { run, attempt, cursor }) {
  const concerns = (event) => event.run === run && ["step", "finding"].includes(event.event);
  view.add(h("h1", {}, `Canary of ${nameOf(run)}`),
    h("p", {}, "Mean |d| in nats between two ways of scoring the same tokens, after each weight sync."));
  view.place(new Figure({ name: "canary", title: "By version", params: { run, attempt }, concerns }));
  view.block({
    path: url("/canary", { run, attempt, cursor, limit: 100 }),
    concerns,
    draw: ({ rows, next }) => {
      if (!rows.length && !cursor) return []; // the figure says so
      const shown = PAIRS.filter((name) => rows.some((row) => row.pairs.some(({ pair }) => pair === name)));
      return table("Versions that a canary scored", [
        ["version", (row) => h("a", { href: ofRun(run, "canary", row.version) }, row.version), { ...HEAD, ...RIGHT }],
        ["step", ({ step }) => toStep(run, { step, attempt }), RIGHT],
        ["engine", "source"],
        ["verdict", verdict],
        ...shown.map((name) => columnOf(name, rows)),
        ["cause", (row) => listed(row.causes.map((code) => h("code", {}, code)))],
        ["problem", "problem", WIDE], ["when", "wall", WHEN],
      ], rows, { key: (row) => `${row.version}/${row.source}`, next, more: "Earlier versions" });
    },
  });
}

/** The column of a pair: its numbers have one format. */
function columnOf(name, rows) {
  const pairs = new Map(rows.map((row) => [row, row.pairs.find(({ pair }) => pair === name)]));
  const format = columnFormat([...pairs.values()].map((pair) => pair?.mean));
  return [`${name}, nat`, (row) => ofPair(pairs.get(row), format), RIGHT];
}

function ofPair(pair, format) {
  if (!pair) return "";
  const title = `bound ${number(pair.bound)}, from ${pair.bound_of}; ${count(pair.tokens)} tokens`;
  return h(WRONG.includes(pair.verdict) ? "span.bad" : "span", { title }, quantity(pair.mean, "", lacking(pair), format));
}

/** One version: the sequences of each pair, the worst first. */
export function canaryVersion(view, { run, attempt, version, cursor }) {
  view.add(h("h1", {}, `Canary of ${nameOf(run)}, version ${version}`));
  view.block({
    path: url(`/canary/${part(version)}`, { run, attempt, cursor, limit: 200 }),
    draw: ({ rows, next, recorded }) => [
      table("Sequences", [
        ["pair", "pair", HEAD], ["engine", "source"], ["sequence", "sequence", RIGHT],
        ["", verdict],
        ["mean |d|", "mean", { unit: "nat", why: lacking }], ["largest |d|", "max", NAT], ["tokens", "tokens", COUNT],
        ["worst position", "position", RIGHT], ["token id", "token_id", RIGHT], ["first", "first", NAT],
        ["second", "second", NAT],
        ["", (row) => (row.parts_at === null ? "" : `other tokens from ${row.parts_at} on`)],
      ], rows, { key: (row) => `${row.source}/${row.pair}/${row.sequence}`, next, more: "Further sequences",
        empty: "No sequence was compared." }),
      table("Recorded", [
        ["side", (row) => `${row.side} ${row.source}`, HEAD],
        ["tokens", "tokens", COUNT], ["took", "seconds", { unit: "s" }],
        ["checks", (row) => row.checks.map((check) => `${check.name}: ${check.text}`).join("; "), WIDE],
        ["settings", (row) => Object.entries(row.settings).map(([name, value]) => `${name} ${value}`).join(", "),
          WIDE],
      ], recorded, { key: (row) => `${row.side}/${row.source}`, empty: "The records of old versions are removed." }),
    ],
  });
}
