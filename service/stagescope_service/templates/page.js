// Draws the page's figures in its colours; needs Plotly, which stands before it.
"use strict";
const figures = JSON.parse(document.getElementById("figures").textContent);
const ink = () => getComputedStyle(document.body).color;
const NARROW = 560; // pixels: a line of the legend holds one entry, where there is room for two
const LEGEND_LINE = 24;

function narrowed(data, layout) {
  if (innerWidth >= NARROW || layout.legend?.yref !== "container" || !layout.height) return layout;
  const entries = new Set(data.filter((trace) => trace.showlegend !== false)
    .map((trace) => trace.legendgroup || trace.name));
  const more = LEGEND_LINE * Math.floor(entries.size / 2);
  const margin = { ...layout.margin, b: (layout.margin?.b ?? 80) + more };
  return { ...layout, margin, height: layout.height + more };
}

for (const [name, { data, layout }] of Object.entries(figures)) {
  layout.font = { color: ink() };
  Plotly.newPlot(name, data, narrowed(data, layout), { responsive: true, displaylogo: false });
}
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
  for (const name of Object.keys(figures)) Plotly.relayout(name, { "font.color": ink() });
});
