// The doctor's panel: what the rulebook finds, what speaks for and against it, what to do next.

import { choose } from "./address.js";
import { badge, h, quantity, table } from "./dom.js";
import { Figure } from "./figure.js";
import { plural, share } from "./format.js";
import { part, url } from "./service.js";

const ORDER = ["found", "not measured", "not found"];

/** The diagnosis of a run, perhaps of one step. */
export function doctor(view, { run, step = "", attempt }) {
  view.add(h("h1", {}, `Doctor: ${run}${attempt ? `, attempt ${attempt}` : ""}`), h("form.row", {
    onsubmit: (event) => {
      event.preventDefault();
      choose({ step: event.target.step.value });
    },
  }, h("label", { for: "step" }, "At step"),
  h("input#step", { name: "step", value: step, inputmode: "numeric", size: 8, placeholder: "newest" }),
  h("button", {}, "Ask")));
  const figures = h("div");
  view.block({
    path: url(`/runs/${part(run)}/diagnosis`, { step, attempt, limit: 200 }),
    concerns: (event) => event.run === run && event.event === "step" && event.closed && event.measured,
    draw: ({ rows, text, mismatch, notes, measured_step: at }) => {
      const sorted = [...rows].sort((a, b) => ORDER.indexOf(a.verdict) - ORDER.indexOf(b.verdict));
      const found = sorted.filter((row) => row.verdict === "found");
      const rest = sorted.filter((row) => row.verdict !== "found");
      return [
        h("p.lead", {}, text),
        mismatch.length > 0 && h("p", {}, `The mismatch of step ${at} taken apart:`),
        mismatch.length > 0 && table("Parts of the mismatch", [
          ["part", (row) => row.name, { head: true }],
          ["share", (row) => quantity(row.share, "", "not measured", share), { right: true }],
          ["because", (row) => row.text, { wide: true }],
        ], mismatch, { stacks: true, key: (row) => row.name }),
        found.length === 0 && h("p.lead", {}, badge("ok", "nothing found"), " by the rules whose data is there"),
        found.map((row) => h("article.symptom", { "data-key": row.rule }, symptom(view, figures, row))),
        notes.map((each) => h("p.quiet", { "data-key": `note ${each.rule}` },
          `No symptom, but for a comparison of two runs: ${each.text}. ${each.meaning}`)),
        h("details", {}, h("summary", {}, `${plural(rest.length, "rule")} more: nothing found, or not measured`),
          table("Other rules", [
            ["rule", (row) => row.title, { head: true, wide: true }],
            ["", (row) => badge(row.verdict)],
            ["because", (row) => [...row.against, ...(row.verdict === "not measured" ? row.for : [])].join("; "),
              { wide: true }],
            ["to record it", (row) => (row.record ? h("code", {}, row.record) : ""), { wide: true }],
          ], rest, { stacks: true, key: (row) => row.rule })),
      ];
    },
  });
  view.add(figures);
}

function symptom(view, figures, row) {
  return [
    h("h2", {}, badge("found", `${share(row.sure)} sure`), ` ${row.title}`),
    h("p", {}, row.meaning),
    h("p", {}, [row.where, row.since_step !== null && `since step ${row.since_step}`,
      row.last_step !== null && `last seen in step ${row.last_step}`].filter(Boolean).join(", ")),
    evidence("For", row.for), evidence("Against", row.against),
    row.next.length > 0 && [h("h3", {}, "Next"), h("ul", {}, row.next.map((each) =>
      h("li", {}, each.startsWith("stagescope ") ? h("code", {}, each) : each)))],
    row.record && h("p", {}, "To know more, record it: ", h("code", {}, row.record)),
    row.figure && h("p", {}, h("button", { type: "button", onclick: () => {
      const [path, query = ""] = row.figure.split("?");
      figures.replaceChildren();
      const figure = new Figure({
        name: path.replace(/^\/figures\//, ""), title: row.title, lazy: false,
        params: Object.fromEntries(new URLSearchParams(query)),
      });
      view.place(figure);
      figures.append(figure.element);
      figures.scrollIntoView({ block: "nearest" });
    } }, "Show the picture")),
    row.sources.length > 0 && h("p.quiet", {}, "Met by others: ", row.sources.join(", ")),
  ];
}

const evidence = (title, texts) =>
  texts.length > 0 && [h("h3", {}, title), h("ul", {}, texts.map((each) => h("li", {}, each)))];
