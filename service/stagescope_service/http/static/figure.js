// Figures of the service, drawn by Plotly in the colours of the page, each with its numbers as a
// table for those who cannot see it.

import { h, made, patch, problem } from "./dom.js";
import { number } from "./format.js";
import { plotly } from "./plotly.js";
import { get, known, url } from "./service.js";
import { HEAD, table } from "./table.js";
import { explained } from "./words.js";

const MAX_ROWS = 500;
const CONFIG = {
  responsive: true, displaylogo: false, displayModeBar: true, doubleClick: "reset",
  showTips: false, scrollZoom: false, modeBarButtons: [["zoom2d", "pan2d", "resetScale2d", "toImage"]],
};
const drawn = new Set();

const NARROW = 560; // pixels
const LEGEND_LINE = 24;

const style = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

/** What a figure takes from the page: so it is readable in light and dark. */
function themed(layout) {
  const ink = style("--ink");
  return {
    ...layout,
    title: undefined, // it is the caption, which wraps
    autosize: true,
    width: undefined,
    uirevision: "same", // what somebody zoomed to stays when steps are added
    font: { ...layout.font, color: ink },
    modebar: { bgcolor: "rgba(0,0,0,0)", color: style("--quiet"), activecolor: style("--link") },
    hoverlabel: {
      ...layout.hoverlabel, bgcolor: style("--raised"), bordercolor: style("--line"),
      font: { ...layout.hoverlabel?.font, color: ink },
    },
  };
}

/** What is drawn where the page is narrow: headings from its edge, one entry of the legend a line. */
function narrowed({ data, layout }) {
  const left = 8 - (layout.margin?.l ?? 80);
  const annotations = layout.annotations?.map((each) =>
    each.name === "heading" ? { ...each, xshift: left, yshift: 6 } : each);
  if (layout.legend?.yref !== "container" || !layout.height) return { data, layout: { ...layout, annotations } };
  const entries = new Set(data.filter((trace) => trace.showlegend !== false)
    .map((trace) => trace.legendgroup || trace.name));
  const more = LEGEND_LINE * Math.floor(entries.size / 2); // the service left room for two a line
  const margin = { ...layout.margin, b: (layout.margin?.b ?? 80) + more };
  return { data, layout: { ...layout, annotations, margin, height: layout.height + more } };
}

matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
  for (const figure of drawn) figure.redraw();
});

/**
 * A figure as a block of a view.
 *
 * @param name of `/figures/{name}`.
 * @param params of its query.
 * @param title stands until the service's own is known.
 * @param concerns (event) -> whether an event makes it old.
 * @param grows whether its x axis are steps: of a new step only that is asked for.
 * @param opens (x, meta) -> the address that a point leads to, of the `meta` of its trace.
 * @param height pixels that it is expected to take: what stands below is then not asked for as if
 *     it were in sight, and does not move.
 */
export class Figure {
  constructor({
    name, params, title, concerns = () => false, lazy = true, grows = false, opens = null, height = 0,
  }) {
    this.path = url(`/figures/${name}`, params);
    this.name = name;
    this.params = params;
    this.concerns = concerns;
    this.isLazy = lazy;
    this.grows = grows;
    this.opens = opens;
    this.element = made(h("figure", {}, h("figcaption", {}, h("strong", {}, explained(title))), h("div"),
      h("div.plot", { role: "group", "aria-label": title, style: height ? { minHeight: `${height}px` } : null }),
      h("details", { hidden: true, ontoggle: () => this.#list() }, h("summary", {}, "as numbers"), h("div"))));
    [this.caption, this.note, this.plot, this.numbers] = this.element.children;
    this.shown = null;
    this.plots = []; // that are drawn
    const before = known(this.path);
    if (before) this.#show(before);
  }

  /** Ask, and draw what is new. */
  async load(since = 0, events = []) {
    const steps = events.map((each) => (each.event === "step" ? each.step : -Infinity));
    const first = Math.min(...steps);
    try {
      const isGrown = this.grows && this.shown && !this.hasFailed && Number.isFinite(first);
      const answer = isGrown ? this.#grown(first, since) : get(this.path, since);
      plotly().catch(() => {}); // while the answer is awaited
      await this.#show(await answer);
      this.hasFailed = this.element.hidden = false;
      this.plot.classList.remove("empty");
    } catch (error) {
      if (error.status === 401) return;
      this.hasFailed = true;
      this.element.hidden = !this.shown && this.view?.isSaid(this, error);
      patch(this.note, !this.element.hidden && problem(error));
      this.plot.classList.add("empty");
      if (!error.problem) throw error;
    }
  }

  /**
   * The figure with the steps from one on as they are now; the others are not sent again. The step before
   * them is: some of its scalars may have come after it was over.
   */
  async #grown(first, since) {
    const step = Math.max(...this.shown.figure.data.map(({ x }) =>
      values(x).findLast((each) => each < first) ?? -Infinity));
    if (!Number.isFinite(step)) return get(this.path, since);
    const news = await get(url(`/figures/${this.name}`, { ...this.params, from: step }), since);
    const figure = joined(this.shown.figure, news.figure, step);
    // With another panel or attempt, or a panel's first value, it is another drawing.
    return figure ? { ...this.shown, figure } : get(this.path, since);
  }

  async #show(answer) {
    const isDrawn = answer.figure.data.length > 0;
    this.plot.hidden = !isDrawn; // empty axes are a picture of nothing: the note says why
    const note = answer.note ?? (isDrawn ? null : "Nothing to draw yet.");
    patch(this.note, (!this.isGroup || !isDrawn) && [note && h("p.quiet", {}, note),
      this.opens && isDrawn && h("p.quiet", {}, "A click on a point opens its step; so do the steps in "
        + "“as numbers”.")]);
    if (answer === this.shown) return;
    this.shown = answer;
    patch(this.caption, h("strong", {}, explained(answer.title)));
    this.plot.setAttribute("aria-label", answer.note ? `${answer.title}: ${answer.note}` : answer.title);
    this.plot.style.minHeight = `${answer.figure.layout.height ?? 320}px`;
    this.numbers.hidden = !isDrawn;
    drawn.add(this);
    if (isDrawn) await this.redraw();
    this.#list();
  }

  /** The plots of a figure: an element and what it shows, for each. */
  plotsOf(figure) {
    return [[this.plot, innerWidth < NARROW ? narrowed(figure) : figure]];
  }

  /** Draw in the colours of now. */
  async redraw() {
    const Plotly = await plotly();
    if (!this.shown || !drawn.has(this)) return;
    const plots = this.plotsOf(this.shown.figure);
    for (const gone of this.plots.splice(0)) {
      if (!plots.some(([plot]) => plot === gone)) Plotly.purge(gone);
    }
    for (const [plot, { data, layout }] of plots) {
      const isNew = !plot.data;
      this.plots.push(plot);
      await Plotly.react(plot, data, themed(layout), CONFIG);
      if (isNew) this.follow(plot);
    }
  }

  /** Let a click on a point lead to where it is from; the table of numbers has links. */
  follow(plot) {
    if (!this.opens) return;
    plot.on("plotly_click", ({ points, event }) => {
      const above = event.clientY - plot.getBoundingClientRect().top;
      const away = ({ y, yaxis }) => Math.abs(yaxis._offset + yaxis.d2p(y) - above);
      const [point] = [...points].sort((a, b) => away(a) - away(b)); // of several at one step
      const to = point && this.#addressOf(point.x, point.data);
      if (to) location.hash = to;
    });
    plot.on("plotly_hover", () => plot.classList.add("opens"));
    plot.on("plotly_unhover", () => plot.classList.remove("opens"));
  }

  #addressOf(x, trace) {
    return this.opens && Number.isInteger(x) ? this.opens(x, trace.meta) : null;
  }

  /** Take the room that there is: a view may have been drawn before it stood in the page. */
  fit() {
    for (const plot of this.plots) window.Plotly.Plots.resize(plot);
  }

  #list() {
    if (!this.numbers.open || !this.shown) return;
    patch(this.numbers.lastChild, this.shown.figure.data.map((trace, at) =>
      asTable(trace, at, (x) => this.#addressOf(x, trace))));
  }

  close() {
    drawn.delete(this);
    for (const plot of this.plots) window.Plotly.purge(plot);
  }
}

// --- what is inside of figures ----------------------------------------------------------------
const TYPES = {
  f8: Float64Array, f4: Float32Array, i4: Int32Array, u4: Uint32Array, i2: Int16Array,
  u2: Uint16Array, i1: Int8Array, u1: Uint8Array,
};

/** The values of a trace's column: a list, or bytes in base64 as newer plotlys write them. */
export function values(column) {
  if (Array.isArray(column)) return column;
  if (!column?.bdata) return column === undefined ? [] : [column];
  const bytes = Uint8Array.from(atob(column.bdata), (each) => each.charCodeAt(0));
  const flat = [...new TYPES[column.dtype](bytes.buffer)];
  const [rows, columns] = String(column.shape ?? "").split(",").map(Number);
  if (!columns) return flat;
  return Array.from({ length: rows }, (_, at) => flat.slice(at * columns, (at + 1) * columns));
}

const isColumn = (value) => Array.isArray(value) || Boolean(value?.bdata);

/** What must be the same, so that traces of one figure can be continued by those of another. */
const frameOf = ({ layout }) => JSON.stringify([layout.shapes?.length,
  ...Object.keys(layout).filter((name) => name.startsWith("yaxis")).sort()
    .map((name) => [name, layout[name].domain, layout[name].title?.text, layout[name].ticktext])]);

/**
 * A figure whose points from `step` on are those of `news`: traces with the same `uid` are of the
 * same line. Null where `news` has other axes, boundaries of attempts, or a panel's first line.
 */
export function joined(figure, news, step) {
  const added = new Map(news.data.map((trace) => [trace.uid, trace]));
  const data = figure.data.map((trace) => {
    const more = added.get(trace.uid) ?? {};
    added.delete(trace.uid);
    return isColumn(trace.x) ? grownTrace(trace, more, step) : trace;
  });
  const filled = new Set(figure.data.map((trace) => trace.yaxis));
  const isSame = [...added.values()].every((trace) => filled.has(trace.yaxis));
  const { xaxis } = figure.layout;
  if (!isSame || !xaxis.range || frameOf(figure) !== frameOf(news)) return null;
  const range = [xaxis.range[0], Math.max(xaxis.range[1], news.layout.xaxis.range[1])];
  return {
    data: raised([...data, ...added.values()]),
    layout: { ...figure.layout, xaxis: { ...xaxis, range } },
  };
}

/** Traces whose marks stand at the largest value of their axis; new steps alone may have none. */
function raised(data) {
  const tops = new Map();
  for (const { yaxis, y, meta } of data) {
    if (meta?.at_top || !isColumn(y)) continue;
    const finite = values(y).filter(Number.isFinite);
    tops.set(yaxis, finite.reduce((top, each) => Math.max(top, each), tops.get(yaxis) ?? -Infinity));
  }
  return data.map((trace) => {
    const top = tops.get(trace.yaxis);
    return trace.meta?.at_top && Number.isFinite(top)
      ? { ...trace, y: values(trace.x).map(() => top) } : trace;
  });
}

function grownTrace(trace, more, step) {
  const steps = values(trace.x);
  const stays = steps.map((x) => !(x >= step));
  const later = values(more.x).map((x) => x >= step);
  const grow = (old, fresh) => {
    if (isColumn(old) && values(old).length === steps.length) {
      return [...values(old).filter((_, at) => stays[at]),
        ...values(fresh).filter((_, at) => later[at])];
    }
    if (old && typeof old === "object" && !isColumn(old)) {
      return Object.fromEntries(Object.entries(old).map(([name, each]) =>
        [name, grow(each, fresh?.[name])]));
    }
    return old;
  };
  return grow(trace, more);
}

/**
 * A trace as a table.
 * @param link (x) -> the address of what x names, or null.
 */
function asTable(trace, at, link) {
  const name = trace.name || `series ${at + 1}`;
  const linked = (value) => (link(value) ? h("a", { href: link(value) }, cell(value)) : cell(value));
  if (isColumn(trace.z)) {
    const [across, down, matrix] = [trace.x, trace.y, trace.z].map(values);
    return table(name, [["", ([head]) => cell(head), HEAD],
      ...across.slice(0, values(matrix[0]).length).map((each, of) => [linked(each), ([, row]) => cell(row[of])])],
    matrix.slice(0, MAX_ROWS).map((row, of) => [down[of] ?? of, values(row)]), { isNamed: true });
  }
  const columns = ["x", "y", "text", "hovertext"].filter((each) => isColumn(trace[each]));
  const read = columns.map((each) => values(trace[each]));
  const length = Math.max(0, ...read.map((each) => each.length));
  const rows = Array.from({ length: Math.min(length, MAX_ROWS) }, (_, row) => row + Math.max(0, length - MAX_ROWS));
  return table(length > MAX_ROWS ? `${name}: the last ${MAX_ROWS} of ${length}` : name,
    columns.map((each, of) => [each, (row) => (each === "x" ? linked : cell)(read[of][row])]), rows,
    { isNamed: true, empty: `${name}: none` });
}

const cell = (value) =>
  value === null || value === undefined ? "–"
  : typeof value === "number" ? number(value) : String(value).replace(/<[^>]*>/g, " ");
