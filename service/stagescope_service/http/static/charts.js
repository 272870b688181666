// The charts of a run: the usual ones and those that the reader adds, then all of them in groups by
// the prefix of their names ("actor" of "actor/loss"), as W&B groups them.

import { choose, note, ofStep } from "./address.js";
import { isOver } from "./blocks.js";
import { button, form, h, patch } from "./dom.js";
import { plural } from "./format.js";
import { Panels } from "./panels.js";
import { Component } from "./preact.mjs";
import { all, get, part, url } from "./service.js";

const MOST = 12; // metrics of a figure
const TWO_COLUMNS = 1200; // pixels from which the overview has them, as in the style sheet
const OVERVIEW = [820, 1500]; // pixels that it takes with two columns, and with one
const OPEN = "stagescope groups of charts"; // localStorage: the groups that the reader opened last
const byName = (a, b) => a.localeCompare(b, "en", { numeric: true });

/** Names by their prefix: [[prefix, names], ...]; "" for those without one, which come first. */
export const groupsOf = (names) => [...Map.groupBy([...names].sort(byName), (name) =>
  (name.includes("/") ? name.slice(0, name.indexOf("/")) : ""))].sort(([a], [b]) => byName(a, b));

const metricsOf = (run, since) => all(`/runs/${part(run)}/metrics?limit=1000`, since);
const titleOf = (prefix) => prefix || "without a prefix";

/** What figures of a run over its steps have in common. */
const overSteps = (run, smooth) => ({
  name: "overview",
  opens: (at, meta) => ofStep(run, at, meta?.superseded ? meta.attempt : null),
  grows: !smooth, // an average over new steps alone would begin anew
  concerns: (event) => event.run === run && (isOver(event) || event.event === "attempt"),
});

/** Place the charts of a run in its view; the address keeps which, and which groups are open. */
export function charts(view, { run, metrics = "", smooth = "", groups }) {
  const chosen = metrics.split(",").filter(Boolean).map(decodeURIComponent);
  const draw = (names) => choose({ metrics: names.map(encodeURIComponent).join(",") || null });
  const first = new Panels({
    ...overSteps(run, smooth), params: { run, metric: chosen, smooth },
    title: chosen.join(", ") || "Over the steps", lazy: false, height: OVERVIEW[Number(innerWidth < TWO_COLUMNS)],
    button: {
      sign: "×", says: (name) => `remove the chart of ${name}`,
      act: (gone, names) => draw(names.filter((each) => each !== gone)),
    },
  });
  const add = (name) => { if (!first.names.includes(name)) draw([...first.names, name]); };
  view.place(first);
  view.add(h(Picker, { run, add }),
    h("p.row", {}, h("label", { for: "smooth" }, "Moving average over"),
      h("input#smooth", {
        name: "smooth", type: "number", min: 1, max: 10_000, value: smooth, placeholder: "no",
        onchange: ({ target }) => target.checkValidity() && choose({ smooth: target.value || null }),
      }), "steps",
      chosen.length > 0 && button("the usual charts again", () => draw([]))));
  const element = document.createElement("div");
  patch(element, h(Groups, { element, view, run, smooth, add, open: groups }));
}

let isPicking = false; // the picker stays open while charts are added

/** Adds a chart: the numbers of the run in their groups, filtered by what is typed. */
export class Picker extends Component {
  componentDidMount() {
    if (isPicking) this.load();
  }

  async load() {
    if (this.state.names) return;
    const { rows } = await metricsOf(this.props.run).catch(() => ({ rows: [] })); // the figure itself says what is wrong
    this.setState({ names: rows.map(({ name }) => name) });
  }

  render({ run, add }, { names = [], text = "" }) {
    const toggle = ({ target }) => {
      isPicking = target.open;
      if (isPicking) this.load();
    };
    const addTyped = async ({ number }) => {
      const name = number.value.trim();
      if (!name) return;
      await get(url("/series", { run, metric: name, limit: 1 }));
      add(name);
    };
    const fits = (name) => name.toLowerCase().includes(text);
    return h("details.picker", { open: isPicking, ontoggle: toggle }, h("summary", {}, "Add a chart"),
      form({}, addTyped, h("label", { for: "number" }, "Name"),
        h("input#number", {
          name: "number", size: 32, autocomplete: "off", placeholder: "a metric or a scalar",
          oninput: ({ target }) => this.setState({ text: target.value.trim().toLowerCase() }),
        }), h("button", {}, "Add")),
      h("div#numbers", { tabindex: 0, role: "region", "aria-label": "Numbers of the run" },
        groupsOf(names.filter(fits)).map(([prefix, found]) => h("div", { "data-key": prefix },
          h("h3", {}, titleOf(prefix)), found.map((name) => button(name, () => add(name)))))));
  }
}

/** All charts of a run, in groups that fold. What is folded is not asked for. */
class Groups extends Component {
  constructor(props) {
    super(props);
    this.element = props.element;
    this.isLater = true; // the first charts are higher than a screen
    this.groups = [];
    this.open = new Set((props.open ?? localStorage.getItem(OPEN) ?? "").split(",").map(decodeURIComponent));
  }

  componentDidMount() {
    this.props.view.place(this);
  }

  concerns(event) {
    return event.run === this.props.run && (isOver(event) || event.event === "attempt");
  }

  async load(since = 0) {
    const { rows } = await metricsOf(this.props.run, since);
    this.groups = groupsOf(rows.map(({ name }) => name));
    this.setState({});
  }

  close() {
    patch(this.element);
  }

  #toggle(key, isOpen) {
    if (isOpen === this.open.has(key)) return;
    this.open[isOpen ? "add" : "delete"](key);
    const text = [...this.open].filter(Boolean).map(encodeURIComponent).join(",");
    localStorage.setItem(OPEN, text);
    note({ groups: text || null });
    this.setState({});
  }

  render(props) {
    const group = ([prefix, names]) => {
      const key = `/${prefix}`; // also of names without a prefix
      const isOpen = this.open.has(key);
      return h("details", { "data-key": key, open: isOpen, ontoggle: ({ target }) => this.#toggle(key, target.open) },
        h("summary", {}, h("strong", {}, titleOf(prefix)), h("span.quiet", {}, ` ${plural(names.length, "chart")}`)),
        isOpen && h(Charts, { ...props, key: String(names), names }));
    };
    return h("section.groups", {}, this.groups.length > 0 && h("h2", {}, "All charts"), this.groups.map(group));
  }
}

/** The charts of a group, for as long as it is open. */
class Charts extends Component {
  hold = (place) => { this.holder = place; };

  componentDidMount() {
    const { view, run, smooth, add, names } = this.props;
    this.figures = [];
    for (let at = 0; at < names.length; at += MOST) {
      const metric = names.slice(at, at + MOST);
      this.figures.push(new Panels({
        ...overSteps(run, smooth), params: { run, metric, smooth }, title: metric.join(", "), isGroup: true,
        button: { sign: "↑", says: (name) => `draw ${name} among the first charts`, act: add },
      }));
    }
    this.figures.forEach((figure) => view.place(figure, this.holder));
  }

  componentWillUnmount() {
    this.figures.forEach((figure) => this.props.view.remove(figure));
  }

  render() {
    return h("div", { ref: this.hold });
  }
}
