// A figure whose panels share the steps as one plot for each panel: in two columns where there is
// room, with one crosshair and one zoom.

import { h, made, patch } from "./dom.js";
import { Figure } from "./figure.js";
import { explained } from "./words.js";

const HEIGHT = 190; // pixels of a panel
const MARGIN = { l: 60, r: 12, t: 28, b: 30 };

/**
 * The panels of a figure: { name, figure }; the last one holds the marks and has no name. The legend
 * names the attempts, so that their boundaries need no text.
 */
export function split({ data, layout }) {
  const axes = Object.keys(layout).filter((name) => /^yaxis\d*$/.test(name))
    .sort((a, b) => Number(a.slice(5) || 1) - Number(b.slice(5) || 1));
  const headings = layout.annotations?.filter((each) => each.name === "heading") ?? [];
  const others = layout.annotations?.filter((each) => each.name !== "heading") ?? [];
  const rest = Object.fromEntries(Object.entries(layout).filter(([name]) => !axes.includes(name)));
  return axes.map((axis, at) => {
    const { domain = [0, 1], ...yaxis } = layout[axis];
    const within = ({ y, yref }) => yref === "paper" && y > domain[0] && y < domain[1];
    const annotations = others.filter(within)
      .map((each) => ({ ...each, y: (each.y - domain[0]) / (domain[1] - domain[0]) }));
    const name = plain(headings[at]?.text ?? "");
    const height = name ? HEIGHT : Math.round((domain[1] - domain[0]) * plotHeight(layout)) + 60;
    return {
      name,
      figure: {
        data: data.filter((trace) => (trace.yaxis ?? "y") === axis.replace("axis", ""))
          .map((trace) => ({ ...trace, yaxis: "y", showlegend: false })),
        layout: {
          ...rest, annotations, yaxis, height,
          xaxis: {
            ...layout.xaxis, anchor: "y", title: { text: name ? "" : layout.xaxis.title?.text },
            showspikes: true, spikemode: "across", spikesnap: "hovered data", spikethickness: 1, spikedash: "solid",
          },
          margin: MARGIN, showlegend: false, hovermode: name ? "x" : "closest",
        },
      },
    };
  });
}

const hasValue = ({ data }) => data.some(({ y }) => y?.some((each) => each !== null));

const numberOf = (panel) => panel.replace(/ \([\w ]+\)$/, "");

const plain = (markup) => new DOMParser().parseFromString(markup, "text/html").body.textContent;

const plotHeight = ({ height, margin }) => height - (margin?.t ?? 40) - (margin?.b ?? 60);

/** What the lines of the panels mean. */
function legend(data) {
  const groups = new Map(data.filter((trace) => trace.mode !== "markers" && trace.legendgroup)
    .map((trace) => [trace.legendgroup, trace.line]));
  return groups.size < 2 ? [] : [...groups].map(([name, { color, dash, width }]) =>
    h("span.key", {}, h("i", { class: dash === "solid" || !dash ? "" : "dotted",
      style: { borderColor: color, borderTopWidth: `${Math.max(2, width)}px` } }), name));
}

/**
 * A figure in panels; see `Figure`.
 *
 * @param button beside a panel's name: { sign, says(name), act(name, names) }.
 * @param isGroup whether it is one of several below a common heading: without caption, notes, marks.
 */
export class Panels extends Figure {
  constructor({ button, isGroup = false, ...options }) {
    super(options);
    this.button = button;
    this.isGroup = isGroup;
    this.keys = made(h("p.keys", { "data-key": "legend" }));
  }

  /** The numbers that are drawn; several panels may be of one, each of a stage and role. */
  get names() {
    return [...new Set(split(this.shown?.figure ?? { layout: {} }).map(({ name }) => numberOf(name)))].filter(Boolean);
  }

  plotsOf(figure) {
    this.plot.classList.add("panels");
    this.plot.style.minHeight = "";
    const found = split(figure);
    // Of a run without numbers the caption says so: the usual panels would all be empty.
    const isEmpty = !this.params.metric?.length && found.every((part) => !part.name || !hasValue(part.figure));
    const parts = found.filter(({ name }) => (name ? !isEmpty : !this.isGroup));
    const { sign, says, act } = this.button;
    const before = new Map([...this.plot.children].map((each) => [each.dataset.key, each]));
    const held = parts.map(({ name }) => before.get(name) ?? made(h("div.panel-plot", { "data-key": name },
      name && h("h3", {}, explained(name), h("button.plain", { type: "button", "aria-label": says(name),
        title: says(name), onclick: () => act(numberOf(name), this.names) }, sign)), h("div"))));
    patch(this.keys, legend(figure.data));
    const all = [this.keys, ...held];
    if (all.some((each, at) => each !== this.plot.children[at])) this.plot.replaceChildren(...all);
    return parts.map((part, at) => [held[at].lastChild, part.figure]);
  }

  follow(plot) {
    super.follow(plot);
    const others = () => this.plots.filter((each) => each !== plot && each.data);
    const alone = (work) => { // what it does to the others, they do not do again
      if (this.isLeading) return;
      this.isLeading = true;
      try { work(); } finally { this.isLeading = false; }
    };
    const { Fx, relayout } = window.Plotly;
    plot.on("plotly_hover", ({ points: [point] }) => alone(() =>
      others().forEach((each) => Fx.hover(each, { xval: point.x }, ["xy"]))));
    plot.on("plotly_unhover", () => alone(() => others().forEach((each) => Fx.unhover(each))));
    plot.on("plotly_relayout", (change) => {
      const range = change["xaxis.range"] ?? (change["xaxis.range[0]"] === undefined ? null
        : [change["xaxis.range[0]"], change["xaxis.range[1]"]]);
      if (!range) return;
      others().forEach((each) => {
        if (String(each.layout.xaxis.range) !== String(range)) relayout(each, { "xaxis.range": range });
      });
    });
  }
}
