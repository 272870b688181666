// The doctor's panel: what the rulebook finds, what speaks for and against it, what to do next.

import { choose, nameOf } from "./address.js";
import { isOver } from "./blocks.js";
import { command, withCommands } from "./commands.js";
import { badge, button, form, h, quantity } from "./dom.js";
import { Figure } from "./figure.js";
import { plural, share } from "./format.js";
import { toStep } from "./links.js";
import { part, url } from "./service.js";
import { BADGE, HEAD, RIGHT, WIDE, table } from "./table.js";

const ORDER = ["found", "not measured", "not found"];

/** Whether an event makes the diagnosis of a run old. */
export const changesDiagnosis = (event, run) => event.run === run
  && (isOver(event) || ["attempt", "finding"].includes(event.event));

/** Whether a row of a diagnosis is a cause that is not over. */
export const isOpen = (row) => row.verdict === "found" && row.cause === null && row.last_step === null;

/** The state of a run in a word. Where no step has numbers, that nothing is wrong says nothing of the mismatch. */
export const stateOf = (isSick, { healthy, measured }) => isSick ? badge("found", "sick")
  : healthy === false ? badge("warning", "findings")
  : measured ? badge("ok", "healthy") : badge("unknown", "mismatch not measured");

/** The diagnosis of a run, perhaps of one step. */
export function doctor(view, { run, step = "", attempt }) {
  view.add(h("h1", {}, `Doctor of ${nameOf(run)}${attempt ? `, attempt ${attempt}` : ""}`), form({},
    (fields) => choose({ step: fields.step.value }), h("label", { for: "step" }, "At step"),
    h("input#step", { name: "step", value: step, inputmode: "numeric", size: 8, placeholder: "newest" }),
    h("button", {}, "Ask")));
  const figures = document.createElement("div");
  view.block({
    path: url(`/runs/${part(run)}/diagnosis`, { step, attempt, limit: 200 }),
    concerns: (event) => changesDiagnosis(event, run),
    draw: (answer) => {
      const { rows, healthy, text, mismatch, notes, measured_step: at } = answer;
      const sorted = [...rows].sort((a, b) => ORDER.indexOf(a.verdict) - ORDER.indexOf(b.verdict));
      const found = sorted.filter((row) => row.verdict === "found");
      const rest = sorted.filter((row) => row.verdict !== "found");
      return [
        h("p.lead", {}, stateOf(found.some(isOpen), answer), " ", withCommands(text)),
        found.filter((row) => row.cause === null).map((row) => h("article.symptom", { "data-key": row.rule },
          cause({ view, figures, run, attempt }, row, found.filter((each) => each.cause === row.rule)))),
        mismatch.length > 0 && h("details", { open: !healthy }, h("summary", {}, `The mismatch of step ${at} by its parts`),
          table("Parts of the mismatch", [
          ["part", "name", HEAD],
          ["share", (row) => quantity(row.share, "", "not measured", share), RIGHT],
          ["because", "text", WIDE],
        ], mismatch, { key: (row) => row.name })),
        notes.map((each) => h("p.quiet", { "data-key": `note ${each.rule}` },
          `No symptom, but for a comparison of two runs: ${each.text}. ${each.meaning}`)),
        h("details", {}, h("summary", {}, `${plural(rest.length, "rule")} more: nothing found, or not measured`),
          table("Other rules", [
            ["rule", "title", { ...HEAD, ...WIDE }], ["", "verdict", BADGE],
            ["because", (row) => [...row.against, ...(row.verdict === "not measured" ? row.for : [])].join("; "),
              WIDE],
            ["to measure it", (row) => (row.record ? h("code", {}, row.record) : row.waits ? "more steps are needed" : ""),
              WIDE],
          ], rest, { key: (row) => row.rule })),
      ];
    },
  });
  view.root.append(figures);
}

function cause({ view, figures, run, attempt }, row, explained) {
  const [proof, ...next] = row.next;
  const ended = row.last_step !== null;
  const title = h("h2", {}, badge(ended ? "ended" : "found"), ` ${row.sentence}`);
  return ended ? [title, evidence("Against", row.against)] : [
    title,
    proof && h("p", {}, "Prove it: ", act(proof)),
    h("p", {}, row.meaning),
    evidence("For", row.for), evidence("Against", row.against),
    next.length > 0 && [h("h3", {}, "Next"), h("ul", {}, next.map((each) => h("li", {}, act(each))))],
    explained.length > 0 && h("details", {}, h("summary", {}, `It explains ${plural(explained.length, "symptom")}`),
      explained.map((each) => h("div", { "data-key": each.rule }, h("h3", {}, each.sentence), evidence("For", each.for)))),
    row.record && h("p", {}, "To know more, record it: ", h("code", {}, row.record)),
    h("p.row", {},
      row.figure && button("Show the picture", () => picture(view, figures, row)),
      toStep(run, { step: row.since_step, attempt }, `step ${row.since_step}`),
      row.sources.length > 0 && h("span.quiet", {}, "Met by others: ", row.sources.join(", "))),
  ];
}

function picture(view, figures, row) {
  const [path, query = ""] = row.figure.split("?");
  const figure = new Figure({
    name: path.replace(/^\/figures\//, ""), title: row.title, lazy: false,
    params: Object.fromEntries(new URLSearchParams(query)),
  });
  view.place(figure);
  figures.replaceChildren(figure.element);
  figures.scrollIntoView({ block: "nearest" });
}

/** What to do: a command, or a sentence. */
const act = (text) => (text.startsWith("stagescope ") ? command(text) : text);

const evidence = (title, texts) =>
  texts.length > 0 && [h("h3", {}, title), h("ul", {}, texts.map((each) => h("li", {}, each)))];
