// Draws the page's figures in its colours; needs Plotly, which stands before it.
"use strict";
const figures = JSON.parse(document.getElementById("figures").textContent);
const ink = () => getComputedStyle(document.body).color;
for (const [name, { data, layout }] of Object.entries(figures)) {
  layout.font = { color: ink() };
  Plotly.newPlot(name, data, layout, { responsive: true, displaylogo: false });
}
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
  for (const name of Object.keys(figures)) Plotly.relayout(name, { "font.color": ink() });
});
