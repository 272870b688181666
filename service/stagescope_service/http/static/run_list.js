// The list of runs: what each is like, and those that are chosen over each other.

import { nameOf, note, noteNames, ofRun, ofStep } from "./address.js";
import { isAction } from "./blocks.js";
import { Picker } from "./charts.js";
import { badge, button, form, gap, h, holding, made, options, patch, problem } from "./dom.js";
import { Figure } from "./figure.js";
import { bytes, count, number, plural } from "./format.js";
import { Component } from "./preact.mjs";
import { get, part, send, url } from "./service.js";
import { HEAD, RIGHT, WHEN, WIDE, table } from "./table.js";

const FIRST = 50; // runs that are asked for first: more than there is room for on a screen
const PAGE = 1000; // that are asked for then
const ACTIVE = 100; // that are asked for after an event
const DRAWN = 100; // rows that are elements; further ones once somebody scrolls there
const AGAIN_MS = 2000; // while the doctor has not judged every run; each time longer
const LONGEST_MS = 30_000;
const COLOURS = 6; // of figure_style.SERIES
const SHOWN = 12; // settings, before somebody asks for all
const STATES = {
  all: ["all states", () => true],
  live: ["live", (row) => row.live],
  over: ["not live", (row) => !row.live],
  sick: ["sick", (row) => row.judgement?.healthy === false],
  healthy: ["healthy", (row) => row.judgement?.healthy === true],
  unknown: ["not measured", (row) => row.judgement?.healthy === null],
};
const NO_RUNS = "No training has reported yet: stagescope_workers.init(run=...) in one does.";

/** Every run. */
export function runs(view, query, user) {
  view.add(h("h1", {}, "Runs"));
  const element = made(h("div.block"));
  patch(element, h(RunList, { element, query, user, place: (list) => view.place(list) }));
}

class RunList extends Component {
  constructor(props) {
    super(props);
    const { element, query, user } = props;
    this.element = element;
    this.mayChange = user?.grade === "operate" && !user.bundle;
    this.words = query.q ?? "";
    this.shown = query.state in STATES ? query.state : "all";
    this.hidden = query.hidden === "1";
    this.metrics = (query.metrics ?? "").split(",").filter(Boolean);
    this.chosen = (query.runs ?? "").split(",").filter(Boolean).map(decodeURIComponent);
    this.rows = [];
    this.isRead = false;
    this.said = null; // what came of the last request
    this.asked = null; // what somebody is asked in a dialog
    this.most = DRAWN;
    this.sight = new IntersectionObserver((entries) => {
      if (entries.at(-1).isIntersecting && this.most < this.found.length) this.#draw({ most: this.most + DRAWN });
    }, { rootMargin: "600px" });
  }

  componentDidMount() {
    this.props.place(this);
  }

  componentDidUpdate() {
    this.sight.disconnect(); // observed anew, it says again whether the end is in sight
    this.sight.observe(this.element.querySelector(".end"));
  }

  /** Draw what changed. */
  #draw(changes = {}) {
    Object.assign(this, changes);
    this.setState({});
  }

  concerns(change) {
    const { event, closed, run } = change;
    return event === "attempt" || (event === "step" && closed) || isAction(change, "change_run", "delete_run", "run_deleted")
      || (event === "finding" && this.rows.some((row) => row.run === run));
  }

  /** Ask for all pages, and draw each as it comes; after an event for the first alone: what is active comes first. */
  async load(since = 0, events = []) {
    clearTimeout(this.timer);
    const gone = events.filter((event) => isAction(event, "run_deleted")).map((event) => event.run);
    if (this.chosen.some((run) => gone.includes(run))) this.#choose(this.chosen.filter((run) => !gone.includes(run)));
    const { figure } = this;
    const isOld = (event) => event.event === "hello" || (this.chosen.includes(event.run) && !isAction(event, "delete_run"));
    if (figure && (!figure.shown || events.some(isOld))) figure.load(since);
    const rows = [];
    const isPart = this.isRead && events.length > 0 && events.every((event) => !["hello", "action"].includes(event.event));
    try {
      for (let cursor = ""; cursor !== null;) {
        const limit = isPart ? ACTIVE : cursor ? PAGE : FIRST;
        const page = await get(url("/runs/overview", { limit, hidden: true, cursor }), since);
        rows.push(...page.rows);
        cursor = isPart ? null : page.next;
        if (cursor && rows.length > this.rows.length) this.#show(rows);
      }
      if (isPart) {
        const fresh = new Set(rows.map((row) => row.run));
        rows.push(...this.rows.filter((row) => !fresh.has(row.run)));
      }
      this.#show(rows);
      if (this.hasFailed) this.#draw({ said: null, hasFailed: false });
    } catch (error) {
      if (error.status === 401) return;
      this.#draw({ said: problem(error), hasFailed: true });
      if (!error.problem) throw error;
    }
    const waits = rows.some((row) => !row.judgement?.current && row.deleting_wall === null);
    this.pause = events.length || !waits ? AGAIN_MS : Math.min(1.5 * (this.pause ?? AGAIN_MS), LONGEST_MS);
    if (waits && this.view.isOpen) this.timer = setTimeout(() => this.load(performance.now()), this.pause);
  }

  close() {
    clearTimeout(this.timer);
    this.sight.disconnect();
    patch(this.element);
  }

  fit() {
    this.figure?.fit();
  }

  #show(rows) {
    noteNames(rows);
    this.#draw({ rows: [...rows], isRead: true });
  }

  render() {
    const words = this.words.toLowerCase().split(/\s+/).filter(Boolean);
    const fits = (row) => {
      if (!words.length) return STATES[this.shown][1](row);
      const text = [row.run, row.display_name, row.judgement?.sentence, JSON.stringify(row.settings ?? {})]
        .join(" ").toLowerCase();
      return STATES[this.shown][1](row) && words.every((word) => text.includes(word));
    };
    const found = this.rows.filter((row) => (this.hidden || !row.hidden || this.chosen.includes(row.run)) && fits(row));
    this.found = found;
    const hidden = this.rows.filter((row) => row.hidden).length;
    return [
      this.#tools(),
      this.chosen.length > 0 && h(Compared, {
        key: JSON.stringify([this.chosen, this.metrics]), runs: this.chosen, metrics: this.metrics,
        hold: (figure) => { this.figure = figure; },
        draw: (metrics) => { note({ metrics: metrics.join(",") || null }); this.#draw({ metrics }); },
        leave: () => this.#choose([]),
      }),
      h("div", { role: "status" }, this.said),
      h("p.quiet", { role: "status" }, this.isRead && [`${found.length} of ${plural(this.rows.length, "run")}`,
        hidden && !this.hidden && `${hidden} hidden`].filter(Boolean).join(", ")),
      h("div.run-list", { "aria-busy": this.isRead ? null : "true" },
        this.isRead ? this.#table(found.slice(0, this.most)) : h("p.quiet", {}, "loading…")),
      h("div.end"),
      this.asked && this.#dialog(this.asked),
    ];
  }

  #tools() {
    const refine = (changes) => {
      this.#draw({ ...changes, most: DRAWN });
      note({ q: this.words || null, state: this.shown === "all" ? null : this.shown, hidden: this.hidden ? 1 : null });
    };
    return h("form.row", { onsubmit: (event) => event.preventDefault() },
      h("label", { for: "words" }, "Find"),
      h("input#words", { type: "search", size: 24, value: this.words, placeholder: "name, setting or cause",
        oninput: ({ target }) => refine({ words: target.value }) }),
      h("select#state", { "aria-label": "state", onchange: ({ target }) => refine({ shown: target.value }) },
        options(Object.entries(STATES).map(([key, [text]]) => [key, text]), this.shown)),
      h("label.choice", {}, h("input", { type: "checkbox", checked: this.hidden,
        onchange: ({ target }) => refine({ hidden: target.checked }) }), " hidden runs"));
  }

  #table(found) {
    const isBundle = Boolean(this.props.user?.bundle);
    const without = (run) => this.chosen.filter((each) => each !== run);
    return table("Runs", [
      ["", (row) => h("input", { type: "checkbox", checked: this.chosen.includes(row.run),
        "aria-label": `draw ${nameOf(row.run)}`,
        onchange: ({ target }) => this.#choose([...without(row.run), ...(target.checked ? [row.run] : [])]) })],
      ["run", (row) => [this.chosen.includes(row.run) && dot(this.chosen.indexOf(row.run)),
        h("a", { href: ofRun(row.run), title: row.run }, nameOf(row.run)),
        row.hidden && h("span.quiet", {}, " hidden")], { ...HEAD, ...WIDE }],
      ["", (row) => isBundle ? badge("ended", "bundle") : badge(row.live ? "live" : "ended", row.live ? "live" : "not live")],
      ["verdict", verdict, WIDE],
      ["findings", (row) => findings(row), WIDE],
      ["mean |d|, nat", (row) => spark(row, "abs_diff", "mean |d|")],
      ["reward", (row) => spark(row, "reward", row.spark?.reward_name ?? "reward")],
      ["last step", (row) => row.last_closed_step === null ? gap("none")
        : h("a", { href: ofStep(row.run, row.last_closed_step) }, count(row.last_closed_step)), RIGHT],
      ["heard", "last_wall", WHEN],
      ["", (row) => this.mayChange && row.deleting_wall === null ? this.#menu(row) : ""],
    ], found, { key: (row) => row.run, rowClass: (row) => row.hidden ? "old" : "",
      empty: this.rows.length ? "No run is like that." : NO_RUNS });
  }

  /** Draw these runs over each other. */
  #choose(chosen) {
    note({ runs: chosen.map(encodeURIComponent).join(",") || null });
    this.#draw({ chosen });
  }

  // --- changes ----------------------------------------------------------------------------------
  #menu(row) {
    const path = `/runs/${part(row.run)}`;
    const change = async (body) => {
      await send("PATCH", path, body);
      this.load(performance.now());
    };
    const choice = (word, act) => button(word, () => this.#try(act));
    return h("details.menu.operates", {}, h("summary", { "aria-label": `change ${nameOf(row.run)}` }, "⋯"),
      h("div", { onclick: ({ target }) => { target.closest("details").open = false; } },
        choice("Rename", async () => this.#ask(`Rename ${nameOf(row.run)}`,
          h("input", { name: "text", size: 40, maxlength: 300, value: nameOf(row.run), "aria-label": "name" }),
          "Rename", (text) => change({ display_name: text === row.run ? null : text || null }))),
        choice(row.hidden ? "Show" : "Hide", () => change({ hidden: !row.hidden })),
        choice("Delete…", () => this.#askToDelete(row, path))));
  }

  /** Do something, and say what is wrong. */
  #try = (act) => void act().catch((error) => this.#draw({ said: problem(error) }));

  /** Ask twice: with what goes, and for the run's name. */
  async #askToDelete(row, path) {
    const takes = await send("DELETE", url(path, { dry_run: true }));
    const size = `${plural(takes.attempts, "attempt")}, ${plural(takes.steps, "step")}, `
      + `${plural(takes.catalogue_rows, "row")} of the catalogue, ${plural(takes.files, "file")} (${bytes(takes.bytes)})`;
    this.#ask(`Delete ${nameOf(row.run)}?`, h("p", {}, `${size}. Nothing brings it back.`), "Delete it", () =>
      this.#ask(`Delete ${nameOf(row.run)} for good?`, h("label", {}, `Type ${row.run} `,
        h("input", { name: "text", size: 30, autocomplete: "off" })), "Delete for good", (text) => text === row.run
        ? this.#try(() => this.#delete(row, path))
        : problem({ message: `That is not ${row.run}: nothing is deleted.` })));
  }

  async #delete(row, path) {
    let done;
    do done = await send("DELETE", url(path, { wait: 10 }));
    while (!done.deleted && !done.problem);
    this.#choose(this.chosen.filter((each) => each !== row.run));
    await this.load(performance.now());
    const shrunk = done.catalogue_bytes === null ? "the database server uses the space again"
      : `the catalogue takes ${bytes(done.catalogue_bytes)}, before ${bytes(done.previous_catalogue_bytes)}`;
    this.#draw({ said: h("p", {}, done.problem
      ? `${nameOf(row.run)} is not deleted yet, and the service tries again: ${done.problem}`
      : `${nameOf(row.run)} is deleted: ${plural(done.catalogue_rows, "row")} and ${plural(done.files, "file")} of `
        + `${bytes(done.bytes)} are free; ${shrunk}.`, done.left.map((each) => ` ${each}.`)) });
  }

  /** Ask something in a dialog, which stays where `then(text)` returns what is wrong. */
  #ask(title, content, word, then) {
    this.#draw({ asked: { title, content, word, then } });
  }

  #dialog(asked) {
    const leave = () => this.asked === asked && this.#draw({ asked: null });
    return h("dialog", { "data-key": asked.title, onclose: leave,
      ref: (dialog) => dialog && !dialog.open && dialog.showModal() },
    form({ class: "" }, async ({ text }) => {
      const wrong = await asked.then(text?.value.trim());
      if (!wrong) leave();
      return wrong;
    }, h("h2", {}, asked.title), asked.content, h("p.row", {}, h("button.main", {}, asked.word),
      button("Cancel", leave))));
  }
}

const dot = (at) => h(`span.dot.c${at % COLOURS}`, { "aria-hidden": "true" });

/** Runs over each other: their curves, and the settings in which they differ. */
class Compared extends Component {
  figure = new Figure({
    name: "runs", title: "Runs over each other", lazy: false, height: 470,
    params: { run: this.props.runs, metric: this.props.metrics },
  });

  componentDidMount() {
    this.props.hold(this.figure);
    this.figure.load();
    if (this.props.runs.length < 2) return;
    get(url("/runs/settings", { run: this.props.runs })).then(
      (settings) => this.setState({ settings }), (error) => this.setState({ wrong: problem(error) }));
  }

  componentWillUnmount() {
    this.props.hold(null);
    this.figure.close();
  }

  render({ runs: chosen, metrics, draw, leave }) {
    return h("section.compared", { "aria-label": "Runs over each other" },
      h("div", {}, holding(this.figure.element),
        h(Picker, { run: chosen[0], add: (name) => draw([...metrics, name]) }),
        h("p.row", {}, metrics.length > 0 && button("the usual numbers", () => draw([])), button("Choose none", leave))),
      h("div.settings", {}, this.#settings(this.state)));
  }

  #settings({ settings, wrong, isAll }) {
    if (this.props.runs.length < 2) {
      return h("p.quiet", {}, "Choose another run: its curves and the settings that differ appear here.");
    }
    if (!settings) return wrong;
    const { rows, runs: names, same } = settings;
    const text = (value) => value === null ? gap("") : typeof value === "object" ? JSON.stringify(value) : String(value);
    return [
      h("h2", {}, "Settings that differ"),
      table("Settings that differ", [
        ["setting", "name", { ...HEAD, ...WIDE }],
        ...names.map((run, at) => [[dot(at), nameOf(run)], (row) => text(row.values[at]), WIDE]),
      ], isAll ? rows : rows.slice(0, SHOWN), { key: (row) => `${row.area}/${row.name}`, empty: "None that they reported." }),
      !isAll && rows.length > SHOWN && button(`All ${rows.length}`, () => this.setState({ isAll: true })),
      h("p.quiet", {}, `${count(same)} are the same.`),
    ];
  }
}

function verdict(row) {
  if (row.deleting_wall !== null) return badge("open", "being deleted");
  if (row.judgement === null) return badge("open", "the doctor looks");
  const { healthy, title, sentence, current } = row.judgement;
  if (healthy === null) return badge("unknown", "mismatch not measured");
  if (healthy) return current ? badge("ok", "healthy") : badge("open", "the doctor looks again");
  return [badge("error", "sick"), " ", h("a", { href: ofRun(row.run, "doctor"), title: sentence },
    sentence ?? title ?? "warnings or errors that no rule explains")];
}

function findings({ run, findings: { error, warning } }) {
  if (!error && !warning) return "";
  return h("a.bare", { href: ofRun(run, "findings"), title: "kinds of findings that are not over" },
    error > 0 && badge("error", plural(error, "error")), error > 0 && warning > 0 && " ",
    warning > 0 && badge("warning", plural(warning, "warning")));
}

const [ACROSS, HIGH] = [88, 20];

/** A curve in small and its last number; a step without a number is a gap, one that is not finite a mark. */
function spark({ spark: found }, name, label) {
  const all = found?.[name] ?? [];
  const finite = all.filter((each) => typeof each === "number");
  const last = all.findLast((each) => each !== null);
  if (last === undefined) return "";
  const [low, high] = [Math.min(...finite), Math.max(...finite)];
  const x = (at) => (2 + at * (ACROSS - 4) / Math.max(all.length - 1, 1)).toFixed(1);
  const y = (value) => (HIGH - 3 - (value - low) * (HIGH - 6) / (high - low || 1)).toFixed(1);
  let path = "";
  const marks = [];
  all.forEach((value, at) => {
    if (typeof value === "string") marks.push(h("circle.odd", { cx: x(at), cy: 3, r: 2.5 }));
    if (typeof value !== "number") return;
    const goesOn = typeof all[at - 1] === "number";
    path += `${goesOn ? "L" : "M"}${x(at)} ${y(value)}`;
    if (!goesOn && typeof all[at + 1] !== "number") marks.push(h("circle", { cx: x(at), cy: y(value), r: 1.5 }));
  });
  const text = `${label} from step ${found.steps[0]} to ${found.steps.at(-1)}`
    + (finite.length ? `: ${number(low)} to ${number(high)}` : "");
  return [h("span.spark", { role: "img", "aria-label": text, title: text },
    h("svg", { width: ACROSS, height: HIGH, viewBox: `0 0 ${ACROSS} ${HIGH}` }, h("path", { d: path }), marks)),
  " ", h("span.number", { class: typeof last === "string" ? "bad" : "" }, number(last))];
}
