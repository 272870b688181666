// Lost data of a run, the engines that the service knows, and who did what.

import { choose, nameOf, ofRun } from "./address.js";
import { isAction } from "./blocks.js";
import { badge, button, h, listed, quantity, when } from "./dom.js";
import { bytes, seconds } from "./format.js";
import { toRank, toStep } from "./links.js";
import { url } from "./service.js";
import { CODE, COUNT, HEAD, RIGHT, WHEN, WIDE, table } from "./table.js";

/** What was announced and never arrived. */
export function lost(view, { run, attempt, cursor }) {
  view.add(h("h1", {}, `Lost data of ${nameOf(run)}`),
    h("p.quiet", {}, "What ranks announced and the service never received, and what they had to drop. "
      + "Everything that is lost has a row here."));
  view.block({
    path: url("/losses/groups", { run, attempt, cursor, limit: 100 }),
    concerns: (event) => event.run === run && ["step", "attempt"].includes(event.event),
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
    concerns: (event) => isAction(event, "add_engine", "remove_engine"),
    draw: ({ rows }) => table("Engines", [
      ["engine", "name", HEAD],
      ["", (row) => [badge(row.state), row.reason && ` ${row.reason}`]],
      ["kind", (row) => [row.kind, row.version].filter(Boolean).join(" ")],
      ["serves", "model", WIDE], ["URL", "url", CODE],
      ["used by", (row) => listed(row.used_by.map((each) => h("a", { href: ofRun(each) }, each)))],
      ["answered in", (row) => isAsked(row) ? quantity(row.answered_seconds ?? null, "", "no answer", seconds) : "", RIGHT],
      ["asked", (row) => isAsked(row) ? when(row.checked_wall) : ""], ["note", "note", WIDE],
      ["registered by", "by", WIDE],
    ], rows, { key: (row) => row.name, empty: "None is registered: stagescope engines add URL." }),
  });
}

const isAsked = (row) => (row.checked_wall ?? null) !== null;

/** Who changed what; for admins. */
export function audit(view, { cursor }) {
  view.add(h("h1", {}, "Audit"), h("p.quiet", {}, "Who changed what, the newest first. A change has the "
    + "name of its access token, or of the user that the proxy names, and the name that its sender gave."));
  view.block({
    path: url("/audit", { cursor, limit: 100 }),
    concerns: ({ event }) => event === "action",
    draw: ({ rows, next }) => table("Audit", [
      ["when", "wall", WHEN], ["who", "by", HEAD], ["what", "action"],
      ["run", ({ detail }) => detail?.run && h("a", { href: ofRun(detail.run) }, detail.run)],
      ["", (row) => h("details", {}, h("summary", {}, "in full"),
        h("pre", {}, JSON.stringify(row.detail, null, 1))), WIDE],
    ], rows, { key: (row) => row.audit_id, empty: "Nobody changed anything yet.", next }),
  });
}
