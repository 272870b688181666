// Commands of the terminal on the page: one to copy, and the view that shows the same.

import { address, ofRun } from "./address.js";
import { h } from "./dom.js";

const COPIED_MS = 1500;

/** The words of a command line; quotes hold words together, and a comment is left out. */
const words = (line) =>
  [...line.replace(/\s+# .*$/, "").matchAll(/(?:[^\s'"]|'[^']*'|"[^"]*")+/g)].map(([word]) => word.replace(/['"]/g, ""));

/** { name, given, options } of a command line; null where it is none of stagescope. */
function read(line) {
  const [program, name, ...rest] = words(line);
  if (program !== "stagescope" || !name) return null;
  const given = [];
  const options = {};
  while (rest.length) {
    const word = rest.shift();
    if (!word.startsWith("--")) given.push(word);
    else options[word.slice(2)] = rest.length && !rest[0].startsWith("--") ? rest.shift() : true;
  }
  return { name, given, options };
}

const isStep = (word) => /^(\d+|latest)$/.test(word); // not STEP, which stands for one

/** A view of a step's part: the first word of the command is the step. */
const ofPart = (part, own = () => ({})) => ({ run, given: [step = "latest"], options }) =>
  (run && isStep(step) ? address(["runs", run, "steps", step],
    { attempt: options.attempt, part, ...own(options) }) : null);
const belowStep = (kind) => ({ run, given: [step = "latest"], options }) =>
  (run && isStep(step) ? address(["runs", run, "steps", step, kind],
    { attempt: options.attempt, role: options.role, rank: options.rank, stage: options.stage }) : null);
const ofArea = (area, own = () => ({})) => ({ run, given, options }) =>
  (run ? address(["runs", run, ...(area ? [area] : [])], { attempt: options.attempt, ...own(options, given) }) : null);
/** Of commands whose first word is the run. */
const ofNamed = (area, own) => (command) => ofArea(area, own)({ ...command, run: command.given[0] ?? command.run });

const anatomy = ({ by }) => ({ by: by === "turn" ? null : by }); // the table of rounds has the turns
/** What the form of a capture holds; a command with another option is no link. */
const FORM = ["run", "stages", "roles", "ranks", "steps", "task", "level", "keep"];

/** Command -> (what was read of it) -> the address of the view that shows the same, or null. */
const VIEWS = {
  rounds: ofPart("rounds", anatomy), anatomy: ofPart("rounds", anatomy), routing: ofPart("routing"), ranks: ofPart("ranks"),
  tokens: ofPart("tokens"), gradient: ofPart("gradient"), loss: ofPart("gradient"), stages: ofPart("time"),
  metrics: ofPart("numbers"), scalars: ofPart("numbers"), kept: ofPart("files"), dumps: ofPart("files"),
  samples: belowStep("samples"), operators: belowStep("operators"), "non-finite": belowStep("operators"),
  runs: () => address(["runs"]), engines: () => address(["engines"]), devices: () => address(["devices"]),
  attempts: ofNamed(), steps: ofArea("steps"), series: ofArea("", (_, [name]) => ({ metrics: name })),
  findings: ofArea("findings", ({ only }) => ({ only })), captures: ofArea("captures"),
  triggers: ofArea("triggers"), stuck: ofArea("hangs"), stacks: ofArea("hangs"),
  weights: ofArea("weights"), canary: ofNamed("canary"), lost: ofArea("lost"), losses: ofArea("lost"),
  doctor: ofNamed("doctor", ({ step }) => ({ step })),
  progress: ({ run, given: [id] }) => (run && id ? ofRun(run, "captures", id) : null),
  diff: ({ given: [a, b] }) => (a && b ? address(["runs", a.replace(/[@:].*$/, ""), "comparisons"], { a, b }) : null),
  capture: ({ run, options }) => {
    if (!run || Object.keys(options).some((name) => !FORM.includes(name))) return null;
    const { run: _, ...fields } = options;
    return address(["runs", run, "captures", "new"], fields);
  },
};

/** The address of the view that shows what a command prints; null where none does. */
export function viewOf(line) {
  const command = read(line);
  if (!command || !Object.hasOwn(VIEWS, command.name)) return null;
  return VIEWS[command.name]({ ...command, run: command.options.run });
}

/** A command, linked to the view that shows the same, with a button that copies it. */
export function command(line) {
  const [, text, remark] = /^(.*?)(?:\s+# (.*))?$/s.exec(line);
  const href = viewOf(text);
  const code = h("code", {}, text);
  return h("span.command", {},
    href ? h("a", { href, title: "the view that shows the same" }, code) : code,
    h("button.copy", { type: "button", title: "Copy the command", onclick: copy }, "copy"),
    remark && h("span.quiet", {}, ` ${remark}`));
}

/** A sentence whose commands in brackets can be followed and copied. */
export const withCommands = (sentence) => sentence.split(/(?<=\()(stagescope [^()]*)(?=\))/)
  .map((each, at) => (at % 2 ? command(each) : each));

/** Noun of the API's paths -> the command, where it has another name. */
const RENAMED = { losses: "lost", loss: "gradient" };
const lineOf = ({ noun, step, name, query, run, attempt }) => [
  "stagescope", RENAMED[noun] ?? noun, step ?? name,
  ...Object.entries({ ...query, run, attempt }).map(([option, value]) => value != null && `--${option.replace(/_/g, "-")} ${value}`),
].filter((word) => word != null && word !== false).join(" ");

/** A sentence of the service with its links, `see`, as commands where a view shows the same. */
export const withLinks = (sentence, see) => see.filter((link) => viewOf(lineOf(link))).reduce((parts, link) =>
  parts.flatMap((each) => {
    const at = typeof each === "string" ? each.indexOf(link.path) : -1;
    return at < 0 ? [each] : [each.slice(0, at), command(lineOf(link)), each.slice(at + link.path.length)];
  }), [sentence]);

async function copy({ currentTarget: button }) {
  const code = button.parentElement.querySelector("code");
  const isCopied = await toClipboard(code);
  button.textContent = isCopied ? "copied" : "selected";
  setTimeout(() => { button.textContent = "copy"; }, COPIED_MS);
}

/** Whether the text of an element is in the clipboard; if not, it is selected. */
async function toClipboard(element) {
  try {
    await navigator.clipboard.writeText(element.textContent);
    return true;
  } catch { /* a browser gives the clipboard to https and to this machine alone */ }
  getSelection().selectAllChildren(element);
  return document.execCommand("copy");
}
