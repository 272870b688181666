// What the loss did with the tokens of a step: which of them have a gradient.

import { folded, h, quantity } from "./dom.js";
import { count, isFinite } from "./format.js";
import { get } from "./service.js";
import { measured, orNothing } from "./step_numbers.js";
import { HEAD, NAT, RIGHT, table } from "./table.js";

/** Where no tensor of a step is kept. */
export const GONE = {
  rows: [], unrecorded: [], notes: [],
  note: "No tensors of this step are kept: pin a step, or request a capture, to look at its tokens.",
};

/** The mismatch by what the loss did. */
export function lossTable(view, path, concerns) {
  view.block({
    title: "Which tokens have a gradient", concerns, lazy: true, // it reads a file of every rank
    path: async (since) => {
      const found = await measured(path, "samples", { limit: 1 })(since);
      return found.none ? found : found.rows.some((row) => row.kept) ? get(path("loss"), since) : GONE;
    },
    draw: orNothing(({ rows, note, unrecorded, clipped_in: passes }) => [
      h("p", {}, note),
      rows.length > 0 && table("Mismatch by what the loss did", [
        ["tokens that were", (row) => row.fate.startsWith("clipped") && passes?.length > 2
          ? `${row.fate} in every one of ${passes.length - 1} passes` : row.fate, HEAD],
        ["gradient", (row) => (row.gradient ? "yes" : h("span.quiet", {}, row.gradient === null ? "unknown" : "none"))],
        ["tokens", (row) => quantity(row.tokens, "", "", count), RIGHT],
        ["share of tokens", (row) => percent(row.share_of_tokens), { unit: "%" }],
        ["sum of |d|", "sum_abs", NAT], ["mean |d|", "mean_abs", NAT],
        ["share of the mismatch", (row) => percent(row.share_of_mismatch), { unit: "%" }],
      ], rows, { key: (row) => row.fate }),
      passes?.length > 2 && clippedTable(passes),
      folded("What is not recorded", unrecorded.map((each) => each.record)),
    ]),
  });
}

const percent = (value) => (isFinite(value) ? 100 * value : value);

/** How many tokens so many passes of the update clip: a logged clip fraction is of each pass. */
function clippedTable(passes) {
  const tokens = passes.reduce((sum, each) => sum + each, 0);
  const most = passes.length - 1;
  const some = { name: "at least 1", tokens: tokens - passes[0] };
  const rows = passes.map((each, times) => ({ name: `${times}`, tokens: each })).slice(1);
  return table("Tokens by the passes that clip them", [
    ["clipped in", (row) => `${row.name} of ${most} passes`, HEAD],
    ["tokens", (row) => quantity(row.tokens, "", "", count), RIGHT],
    ["share of tokens", (row) => percent(row.tokens / tokens), { unit: "%" }],
  ], [some, ...rows], { key: (row) => row.name });
}
