// Two attempts, runs or steps held against each other.

import { address, choose as go, nameOf, note } from "./address.js";
import { badge, form, h } from "./dom.js";
import { Figure } from "./figure.js";
import { count, plural } from "./format.js";
import { get, part, send, url } from "./service.js";
import { HEAD, PLAIN, RIGHT, WIDE, table } from "./table.js";

const AGAIN_MS = 2000;
const MOST = 20; // rows to look for likely pairs in

/** The choice of two sides, and what differs between them. */
export function choose(view, { run, a = "", b = "" }) {
  view.add(h("h1", {}, `Comparisons of ${nameOf(run)}`));
  const side = (name, value, example) => h("span", {}, h("label", { for: name }, name.toUpperCase()), " ",
    h("input", { id: name, name, value, required: true, placeholder: example, size: 28 }));
  if (!a || !b) view.add(h("p", {}, "What changed between two starts, two runs or two steps: "
    + "settings, curves, and the tensors that are kept. Choose a pair, or name two sides."));
  view.add(form({}, (sides) => go({ a: sides.a.value.trim(), b: sides.b.value.trim() }), side("a", a, `${run}@1`),
    side("b", b, `${run}@2:40`), h("button", {}, "Compare")),
  h("p.quiet", {}, "A side is RUN, RUN@ATTEMPT or RUN@ATTEMPT:STEP."));
  if (!a || !b) {
    view.block({
      title: "Likely pairs",
      path: (since) => Promise.all([`/runs/${part(run)}/attempts`, url("/runs", { limit: MOST }),
        url("/steps", { run, limit: MOST })].map((path) => get(path, since))),
      concerns: (event) => event.run === run && event.event === "attempt",
      draw: (attempts, runs, steps) => pairs(run, attempts.rows, runs.rows, steps.rows),
    });
    return;
  }
  const attempts = [a, b].map((each) => each.replace(/:\d+$/, ""));
  view.block({
    title: "What differs between the attempts", path: url("/diff", { a: attempts[0], b: attempts[1], limit: 200 }),
    draw: ({ rows, counts, unknown, note: unseen, next }) => [
      h("p", {}, Object.entries(counts).map(([weight, size]) => `${count(size)} that may change ${weight}`).join(", ")
        || "Nothing that is known differs.", unknown.length > 0 && ` ${unknown.join(" and ").toUpperCase()} recorded no fingerprint.`),
      rows.length > 0 && table("Differences", [
        ["what", (row) => `${row.area}: ${row.name}`, { ...HEAD, ...WIDE }],
        ["may change", (row) => badge(row.weight === "numbers" ? "partial" : "info", row.weight)],
        ["A", (row) => shown(row.a), WIDE], ["B", (row) => shown(row.b), WIDE],
      ], rows, { key: (row) => `${row.area}/${row.name}` }),
      next && h("p.quiet", {}, "The first 200; /diff lists all."),
      unseen && h("p.quiet", {}, `Not compared: ${unseen}.`),
    ],
  });
  view.place(new Figure({
    name: "comparison", title: "The two over their steps", lazy: false, params: { run, a, b },
  }));
  const compare = async (_, say) => {
    note({ tensors: "1" });
    say(h("p.quiet", {}, "comparing…"));
    for (;;) {
      try {
        return drawn(await send("POST", "/comparisons", { a, b }), a, b);
      } catch (error) {
        if (error.status !== 503 || !view.isOpen) throw error;
        say(h("p.quiet", {}, `${error.problem.wrong}…`));
        await new Promise((done) => setTimeout(done, AGAIN_MS));
      }
    }
  };
  view.add(h("h2", {}, "Kept tensors"), form({}, compare, h("button", {}, "Compare what is kept")));
}

/** Links to what people compare: an attempt with the one before, the run with others, two steps. */
function pairs(run, attempts, runs, steps) {
  const link = (a, b, why) => h("li", {}, h("a", { href: address(["runs", run, "comparisons"], { a, b }) },
    `${a} with ${b}`), h("span.quiet", {}, ` ${why}`));
  const measured = steps.filter((row) => row.measured && row.superseded_by === null);
  const [last, before] = measured.map((row) => `${run}@${row.attempt}:${row.step}`);
  const links = [
    attempts.slice(0, -1).map(({ attempt }, at) =>
      link(`${run}@${attempts[at + 1].attempt}`, `${run}@${attempt}`, "before and after a restart")),
    before && link(before, last, "the newest two measured steps"),
    runs.filter((row) => row.run !== run).slice(0, 4).map((row) => link(row.run, run, "another run")),
  ].flat().filter(Boolean);
  return links.length > 0 ? h("ul", {}, links)
    : h("p.quiet", {}, "There is one start of one run so far, and no two measured steps.");
}

const shown = (value) =>
  value === null || value === undefined ? h("span.quiet", {}, "none")
  : h("code", {}, typeof value === "object" ? JSON.stringify(value) : String(value));

function drawn({ verdict, reason, pairs }, a, b) {
  return [
    h("p.lead", {}, badge(verdict === "same" || verdict === "within noise" ? "ok" : "differs", verdict), ` ${reason}`),
    pairs.map((pair) => [
      pair.first && h("p", {}, h("strong", {}, "First difference: "), `${pair.first.section}/${pair.first.name} at the `
        + `${pair.first.station}: ${pair.first.reason}`),
      pair.causes.length > 0 && [h("h3", {}, "Likely causes"), h("ol", {}, pair.causes.map((cause) =>
        h("li", {}, h("strong", {}, cause.title), `: ${cause.evidence}`, h("ul", {}, cause.checks.map((check) =>
          h("li", {}, check))))))],
      pair.findings.length > 0 && h("ul", {}, pair.findings.map((found) => h("li", {}, found.message))),
      table("Tensors", [
        ["tensor", ([section, row]) => `${section}/${row.name}`, HEAD],
        ["", ([, row]) => badge(["same", "within noise"].includes(row.verdict) ? "ok" : "differs", row.verdict)],
        ["values", ([, row]) => count(row.statistics.pairs), RIGHT],
        ["differ", ([, row]) => count(row.statistics.unequal), RIGHT],
        ["largest |d|", ([, row]) => row.statistics.max_abs, PLAIN],
        ["mean |d|", ([, row]) => row.statistics.mean_abs, PLAIN],
        ["why", ([, row]) => row.reason, WIDE],
      ], pair.sections.flatMap(({ section, tensors }) => tensors.map((row) => [section, row])),
      { key: ([section, row]) => `${section}/${row.name}/${row.step}`, empty: "Neither side keeps a tensor." }),
    ]),
    h("p", {}, h("a", { href: `comparisons/page?a=${part(a)}&b=${part(b)}` },
      `The whole comparison as a page of its own, with ${plural(pairs.length, "pair")}`)),
  ];
}
