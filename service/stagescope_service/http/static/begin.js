// Asks at once, while the other modules come, for what every view or the one of the address needs.

import { parse } from "./address.js";
import { fetchPlotly } from "./plotly.js";
import { get, runsNamed } from "./service.js";

const DRAWN = ["rounds", "ranks", "tokens", "time"]; // parts of a step that have figures

const { parts: [area, run, ...rest], query } = parse(location.hash);

async function begin() {
  const { grade } = await get("/whoami");
  if (grade === null) return;
  if (area === "runs" && run) get(runsNamed(run)).catch(() => {});
  if ((run && !rest.length) || DRAWN.includes(query.part) || query.runs) fetchPlotly("preload");
}

begin().catch(() => {}); // the view asks again, and says what is wrong
