// Losses of a run, the engines that the service knows, and who did what.

import { choose, ofRank, ofRun, ofStep } from "./address.js";
import { badge, h, quantity, table, when } from "./dom.js";
import { bytes, count, seconds } from "./format.js";
import { url } from "./service.js";

/** What was announced and never arrived. */
export function losses(view, { run, attempt, cursor }) {
  view.add(h("h1", {}, `Losses of ${run}`),
    h("p.quiet", {}, "What ranks announced and what never arrived, and what they had to drop. "
      + "Nothing is lost without a row here."));
  view.block({
    path: url("/losses/groups", { run, attempt, cursor, limit: 100 }),
    concerns: (event) => event.run === run && event.event === "step",
    draw: ({ rows, next }) => [
      table("Losses", [
        ["what", (row) => row.kind, { head: true }],
        ["lost", (row) => count(row.count), { right: true }],
        ["size", (row) => quantity(row.bytes || null, "", "unknown", bytes), { right: true }],
        ["why", (row) => row.reason ?? "", { wide: true }],
        ["where", (row) => [row.where, row.stage && `, ${row.stage}`, row.role && `, ${row.role}`]],
        ["first", (row) => [row.step !== null && h("a", { href: ofStep(run, row.step, row.attempt) }, `step ${row.step}`),
          row.step !== null && row.rank !== null && row.role && [" ",
            h("a", { href: ofRank(run, row.step, row.attempt, row.role, row.rank) }, `${row.role} ${row.rank}`)]]],
        ["attempt", (row) => count(row.attempt) ?? "", { right: true }],
        ["last", (row) => when(row.last_wall)],
      ], rows, { key: (row) => row.loss_id, empty: "Nothing was lost." }),
      next && h("button", { type: "button", onclick: () => choose({ cursor: next }) }, "More"),
    ],
  });
}

/** The registered engines. */
export function engines(view, { check }) {
  view.add(h("h1", {}, "Engines"), h("p.operates", {},
    h("button", { type: "button", onclick: () => choose({ check: "1" }) }, "Ask each for its health now")));
  view.block({
    path: url("/engines", { limit: 200, check: check ? true : null }),
    draw: ({ rows }) => table("Engines", [
      ["engine", (row) => row.name, { head: true }],
      ["", (row) => [badge(row.state), row.reason && ` ${row.reason}`]],
      ["kind", (row) => [row.kind ?? "", row.version && ` ${row.version}`]],
      ["serves", (row) => row.model ?? ""],
      ["URL", (row) => h("code", {}, row.url)],
      ["used by", (row) => row.used_by.map((each, at) => [at > 0 && ", ", h("a", { href: ofRun(each) }, each)])],
      ["answered in", (row) => quantity(row.answered_seconds ?? null, "", "not asked", seconds), { right: true }],
      ["asked", (row) => when(row.checked_wall)],
      ["note", (row) => row.note ?? "", { wide: true }],
      ["registered by", (row) => row.by],
    ], rows, { key: (row) => row.name, empty: "None is registered: stagescope engines add URL." }),
  });
}

const RUN_OF = ({ detail }) => detail?.run ?? null;

/** Who changed what; for admins. */
export function audit(view, { cursor }) {
  view.add(h("h1", {}, "Audit"), h("p.quiet", {}, "Who changed what, the newest first: the name of the "
    + "token, or of the person whom the proxy names, and what the sender called itself."));
  view.block({
    path: url("/audit", { cursor, limit: 100 }),
    draw: ({ rows, next }) => [
      table("Audit", [
        ["when", (row) => when(row.wall)],
        ["who", (row) => row.by ?? "", { head: true }],
        ["what", (row) => row.action ?? ""],
        ["run", (row) => RUN_OF(row) && h("a", { href: ofRun(RUN_OF(row)) }, RUN_OF(row))],
        ["in full", (row) => h("details", {}, h("summary", {}, "show"),
          h("pre", {}, JSON.stringify(row.detail, null, 1))), { wide: true }],
      ], rows, { key: (row) => String(row.audit_id), empty: "Nobody changed anything yet." }),
      next && h("button", { type: "button", onclick: () => choose({ cursor: next }) }, "More"),
    ],
  });
}
