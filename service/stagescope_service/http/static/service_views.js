// Lost data of a run, the engines that the service knows, and who did what.

import { choose, ofRun } from "./address.js";
import { badge, button, h, listed, quantity } from "./dom.js";
import { bytes, seconds } from "./format.js";
import { toRank, toStep } from "./links.js";
import { url } from "./service.js";
import { CODE, COUNT, HEAD, RIGHT, WHEN, WIDE, table } from "./table.js";

/** What was announced and never arrived. */
export function lost(view, { run, attempt, cursor }) {
  view.add(h("h1", {}, `Lost data of ${run}`),
    h("p.quiet", {}, "What ranks announced and what never arrived, and what they had to drop. "
      + "Nothing is lost without a row here."));
  view.block({
    path: url("/losses/groups", { run, attempt, cursor, limit: 100 }),
    concerns: (event) => event.run === run && event.event === "step",
    draw: ({ rows, next }) => table("Lost data", [
      ["what", "kind", HEAD], ["lost", "count", COUNT],
      ["size", (row) => quantity(row.bytes || null, "", "unknown", bytes), RIGHT],
      ["why", "reason", WIDE],
      ["where", (row) => [row.where, row.stage && `, ${row.stage}`, row.role && `, ${row.role}`]],
      ["first", (row) => [toStep(run, row, `step ${row.step}`), " ",
        row.step !== null && row.rank !== null && row.role && toRank(run, row)]],
      ["attempt", "attempt", COUNT], ["last", "last_wall", WHEN],
    ], rows, { key: (row) => row.loss_id, empty: "Nothing was lost.", next }),
  });
}

/** The registered engines. */
export function engines(view, { check }) {
  view.add(h("h1", {}, "Engines"), h("p.operates", {},
    button("Ask each for its health now", () => choose({ check: "1" }))));
  view.block({
    path: url("/engines", { limit: 200, check: check ? true : null }),
    draw: ({ rows }) => table("Engines", [
      ["engine", "name", HEAD],
      ["", (row) => [badge(row.state), row.reason && ` ${row.reason}`]],
      ["kind", (row) => [row.kind ?? "", row.version && ` ${row.version}`]],
      ["serves", "model"], ["URL", "url", CODE],
      ["used by", (row) => listed(row.used_by.map((each) => h("a", { href: ofRun(each) }, each)))],
      ["answered in", (row) => quantity(row.answered_seconds ?? null, "", "not asked", seconds), RIGHT],
      ["asked", "checked_wall", WHEN], ["note", "note", WIDE], ["registered by", "by"],
    ], rows, { key: (row) => row.name, empty: "None is registered: stagescope engines add URL." }),
  });
}

/** Who changed what; for admins. */
export function audit(view, { cursor }) {
  view.add(h("h1", {}, "Audit"), h("p.quiet", {}, "Who changed what, the newest first: the name of the "
    + "token, or of the person whom the proxy names, and what the sender called itself."));
  view.block({
    path: url("/audit", { cursor, limit: 100 }),
    draw: ({ rows, next }) => table("Audit", [
      ["when", "wall", WHEN], ["who", "by", HEAD], ["what", "action"],
      ["run", ({ detail }) => detail?.run && h("a", { href: ofRun(detail.run) }, detail.run)],
      ["in full", (row) => h("details", {}, h("summary", {}, "show"),
        h("pre", {}, JSON.stringify(row.detail, null, 1))), WIDE],
    ], rows, { key: (row) => row.audit_id, empty: "Nobody changed anything yet.", next }),
  });
}
