// Figures of the service, drawn by Plotly in the colours of the page, each with its numbers as a
// table for those who cannot see it.

import { once } from "./blocks.js";
import { h, nodes, patch, problem } from "./dom.js";
import { number } from "./format.js";
import { get, known, url } from "./service.js";

const MAX_ROWS = 500;
const CONFIG = {
  responsive: true, displaylogo: false, displayModeBar: false, doubleClick: "reset",
  showTips: false, scrollZoom: false,
};
let loading = null;
const drawn = new Set();

/** Load Plotly, once; it is as large as all else together. */
export function plotly() {
  loading ??= new Promise((done, fail) => {
    const script = h("script", { src: new URL("plotly.min.js", import.meta.url).href });
    script.onload = () => done(window.Plotly);
    script.onerror = () => { loading = null; fail(new Error("plotly.min.js could not be loaded")); };
    document.head.append(script);
  });
  return loading;
}

/** Whether the service draws a figure of this name: others are not asked for. */
async function isDrawn(name) {
  const { rows } = await everyFigure();
  return rows.some((row) => row.name === name);
}

const everyFigure = once(() => get("/figures"));

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
    this.caption = h("figcaption", {}, h("strong", {}, title));
    this.note = h("div");
    this.plot = h("div.plot", { role: "img", "aria-label": title });
    if (height) this.plot.style.minHeight = `${height}px`;
    this.numbers = h("details", { ontoggle: () => this.#list() }, h("summary", {}, "as numbers"));
    this.numbers.hidden = true;
    this.element = h("figure", {}, this.caption, this.note, this.plot, this.numbers);
    this.shown = null;
    const before = known(this.path);
    if (before) this.#show(before);
  }

  /** Ask, and draw what is new. */
  async load(since = 0, events = []) {
    const steps = events.map((each) => (each.event === "step" ? each.step : -Infinity));
    const first = Math.min(...steps);
    try {
      if (!await isDrawn(this.name)) {
        patch(this.note, nodes(h("p.quiet", {}, "This service does not draw this figure.")));
        this.plot.classList.add("empty");
        return;
      }
      const isGrown = this.grows && this.shown && Number.isFinite(first);
      await this.#show(isGrown ? await this.#grown(first, since) : await get(this.path, since));
      this.hasFailed = this.element.hidden = false;
      this.plot.classList.remove("empty");
    } catch (error) {
      if (error.status === 401) return;
      this.hasFailed = true;
      this.element.hidden = !this.shown && this.view.isSaid(this, error);
      patch(this.note, this.element.hidden ? [] : nodes(problem(error)));
      this.plot.classList.add("empty");
      if (!error.problem) throw error;
    }
  }

  /** The figure with the steps from one on as they are now; the others are not sent again. */
  async #grown(step, since) {
    const news = await get(url(`/figures/${this.name}`, { ...this.params, from: step }), since);
    const figure = joined(this.shown.figure, news.figure, step);
    // With another panel or attempt, or a panel's first value, it is another drawing.
    return figure ? { ...this.shown, figure } : get(this.path, since);
  }

  async #show(answer) {
    // An empty figure says it itself.
    const isDrawn_ = answer.figure.data.length > 0;
    patch(this.note, nodes(answer.note && isDrawn_ && h("p.quiet", {}, answer.note),
      this.opens && isDrawn_ && h("p.quiet", {}, "A click on a point opens its step; so do the steps in "
        + "“as numbers”.")));
    if (answer === this.shown) return;
    this.shown = answer;
    patch(this.caption, nodes(h("strong", {}, answer.title)));
    this.plot.setAttribute("aria-label", answer.note ? `${answer.title}: ${answer.note}` : answer.title);
    this.plot.style.minHeight = `${answer.figure.layout.height ?? 320}px`;
    this.numbers.hidden = false;
    drawn.add(this);
    await this.redraw();
    this.#list();
  }

  /** Draw in the colours of now. */
  async redraw() {
    const Plotly = await plotly();
    if (!this.shown || !drawn.has(this)) return;
    const { figure } = this.shown;
    const { data, layout } = innerWidth < NARROW ? narrowed(figure) : figure;
    await Plotly.react(this.plot, data, themed(layout), CONFIG);
    if (this.opens && !this.isFollowed) this.#follow();
  }

  /** Let a click on a point lead to where it is from; the table of numbers has links. */
  #follow() {
    this.isFollowed = true;
    this.plot.on("plotly_click", ({ points: [point] }) => {
      const to = point && this.#addressOf(point.x, point.data);
      if (to) location.hash = to;
    });
    this.plot.on("plotly_hover", () => this.plot.classList.add("opens"));
    this.plot.on("plotly_unhover", () => this.plot.classList.remove("opens"));
  }

  #addressOf(x, trace) {
    return this.opens && Number.isInteger(x) ? this.opens(x, trace.meta) : null;
  }

  /** Take the room that there is: a view may have been drawn before it stood in the page. */
  fit() {
    if (this.plot.data) window.Plotly.Plots.resize(this.plot);
  }

  #list() {
    if (!this.numbers.open || !this.shown) return;
    const [summary] = this.numbers.children;
    const lists = this.shown.figure.data.map((trace, at) =>
      listed(trace, at, (x) => this.#addressOf(x, trace)));
    this.numbers.replaceChildren(summary, ...lists);
  }

  close() {
    drawn.delete(this);
    if (window.Plotly && this.plot.data) window.Plotly.purge(this.plot);
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
  return { data: [...data, ...added.values()], layout: { ...figure.layout, xaxis: { ...xaxis, range } } };
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
function listed(trace, at, link) {
  const name = trace.name || `series ${at + 1}`;
  const columns = ["x", "y", "text", "hovertext"].filter((each) => isColumn(trace[each]));
  const read = columns.map((each) => values(trace[each]));
  if (isColumn(trace.z)) return listedMatrix(name, trace, link);
  const shown = (column, value) => (column === "x" && link(value)
    ? h("a", { href: link(value) }, cell(value)) : cell(value));
  const length = Math.max(0, ...read.map((each) => each.length));
  const rows = Array.from({ length: Math.min(length, MAX_ROWS) }, (_, row) => row);
  return h("div.scroll", { tabindex: 0, role: "region", "aria-label": name },
    h("table", {},
      h("caption", {}, length > MAX_ROWS ? `${name}: the last ${MAX_ROWS} of ${length}` : name),
      h("thead", {}, h("tr", {}, columns.map((each) => h("th", { scope: "col" }, each)))),
      h("tbody", {}, rows.map((row) => h("tr", {}, read.map((each, of) =>
        h("td", {}, shown(columns[of], each[row + Math.max(0, length - MAX_ROWS)]))))))));
}

function listedMatrix(name, { x, y, z }, link) {
  const [across, down, matrix] = [values(x), values(y), values(z)];
  return h("div.scroll", { tabindex: 0, role: "region", "aria-label": name },
    h("table", {}, h("caption", {}, name),
      h("thead", {}, h("tr", {}, h("td"), across.map((each) => h("th", { scope: "col" },
        link(each) ? h("a", { href: link(each) }, cell(each)) : cell(each))))),
      h("tbody", {}, matrix.slice(0, MAX_ROWS).map((row, at) =>
        h("tr", {}, h("th", { scope: "row" }, cell(down[at] ?? at)),
          values(row).map((each) => h("td", {}, cell(each))))))));
}

const cell = (value) =>
  value === null || value === undefined ? "–"
  : typeof value === "number" ? number(value) : String(value).replace(/<[^>]*>/g, " ");
