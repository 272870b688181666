// Captures: arm one, see who acknowledged it, watch it arrive.

import { address, ofRun } from "./address.js";
import { once } from "./blocks.js";
import { badge, facts, gap, h, nodes, patch, problem, quantity, table, when } from "./dom.js";
import { bytes, count, partOf, plural, ranges, seconds } from "./format.js";
import { get, part, send, url } from "./service.js";

const TASKS = ["statistics", "tensor", "structure", "nan_check"];
const LEVELS = ["L0", "L1", "mix"];
const LATE = { wait: "wait for them", go_on: "go on without them", give_up: "give up" };
const NAME = "stagescope user"; // localStorage: the name that the audit has, no secret

/** Every capture of a run. */
export function list(view, { run }, user) {
  view.add(h("h1", {}, `Captures of ${run}`));
  view.add(h("p.operates", {}, h("a", { href: ofRun(run, "captures", "new") }, "Arm a capture"),
    user?.grade === "read" && h("span.quiet", {}, " (needs the operate token)")));
  view.block({
    path: url("/captures", { run, limit: 100 }),
    concerns: (event) => event.event === "capture" && event.run === run,
    draw: ({ rows }) => table("Captures", [
      ["capture", (row) => h("a", { href: ofRun(run, "captures", row.capture_id) }, row.capture_id),
        { head: true }],
      ["state", (row) => badge(row.state)],
      ["stages", (row) => listed(row.spec.stages)],
      ["ranks", (row) => wanted(row.spec.ranks)],
      ["steps", (row) => wanted(row.spec.steps)],
      ["task", (row) => row.spec.config?.task ?? (row.spec.keep.length ? "tensors" : "")],
      ["requested by", (row) => row.by],
      ["when", (row) => when(row.created_wall)],
      ["removed", (row) => (row.removed_wall === null ? "no" : when(row.removed_wall))],
    ], rows, { key: (row) => row.capture_id, empty: "None was requested." }),
  });
}

const listed = (value) => [value].flat().join(", ");

/** Ranks or steps of a request as text. */
function wanted(value) {
  if (Array.isArray(value)) return ranges(value);
  if (value === null || typeof value !== "object") return String(value);
  if (value.worst !== undefined) return `the ${value.worst} worst`;
  if (value.next !== undefined) return value.next === 1 ? "the next" : `the next ${value.next}`;
  return `every ${value.every}${value.start === null || value.start === undefined ? ""
    : ` from ${value.start}`}${value.count ? `, ${value.count} times` : ""}`;
}

// --- one capture ------------------------------------------------------------------------------
const remarks = new Map(); // capture -> what the service noted when this page armed it

/** States that stay: nothing is left to withdraw. */
const OVER = new Set(["complete", "partial", "empty", "given up", "too late", "refused", "withdrawn"]);

/** The step from which on the ranks collect; of an order for steps by number none is agreed on. */
function begins({ order, agreement }) {
  if (agreement.start !== null) return `step ${agreement.start}`;
  if (Array.isArray(order.steps)) return `step ${Math.min(...order.steps)}`;
  return gap("not agreed on yet");
}

/** The progress of a capture. */
export function one(view, { run, capture: id }, user) {
  view.add(h("h1", {}, `Capture ${id}`));
  const failed = h("div", { role: "alert" });
  const path = `/captures/${part(id)}`;
  const block = view.block({
    path,
    concerns: (event) => (event.event === "capture" && event.capture_id === id)
      || (event.event === "step" && event.run === run && event.closed),
    draw: (found) => [
      h("p.lead", {}, badge(found.state),
        ` ${(keepsAlone(found.order) && KEPT[found.state]) || (STATES[found.state] ?? "")}`,
        found.reason && `: ${found.reason}`),
      (remarks.get(id) ?? []).map((note) => h("p.quiet", {}, note)),
      facts([
        ["stages", listed(found.order.stages)], ["ranks", wanted(found.order.ranks)],
        ["steps", wanted(found.order.steps)],
        ["begins at", begins(found)],
        ["task", found.order.config?.task], ["level", found.order.config?.level],
        ["keeps", [...found.order.keep, ...found.order.parameters, ...found.order.gradients].join(", ")],
        ["requested by", found.order.by], ["when", when(found.created_wall)],
        ["removed", found.removed_wall === null ? null : [when(found.removed_wall), ` by ${found.removed_by}`]],
        ["late ranks", LATE[found.order.late]],
      ]),
      found.removed_wall === null && !OVER.has(found.state) && user?.grade === "operate" && h("p", {},
        h("button", { type: "button", onclick: async () => {
          try {
            await send("DELETE", path, null, localStorage.getItem(NAME));
            block.load(performance.now());
          } catch (error) {
            patch(failed, nodes(problem(error)));
          }
        } }, "Withdraw")),
      h("h2", {}, "Who acknowledged"), acknowledged(found),
      h("h2", {}, "What arrived"), arrived(run, found),
    ],
  });
  view.add(failed);
}

const STATES = {
  asked: "not every rank has acknowledged it", agreed: "every rank that is to collect knows it",
  complete: "every rank collected every step", partial: "some ranks did not collect",
  empty: "no rank did these stages in its steps", "given up": "it was not begun",
  "too late": "its steps had begun", refused: "it is not carried out", withdrawn: "it is no longer active",
};

// Of a capture that only keeps what is recorded anyway.
const KEPT = {
  asked: "it waits for a step of the training", agreed: "it waits for its steps",
  complete: "all that was recorded of it is kept", partial: "not all that was recorded of it is kept",
  empty: "no rank recorded it in these stages",
};

function keepsAlone({ config, config_path: path, parameters, gradients }) {
  return config === null && path === null && !parameters?.length && !gradients?.length;
}

function acknowledged({ ranks, unmatched_ranks: unmatched, order }) {
  if (keepsAlone(order)) {
    return h("p", {}, `The service keeps ${order.keep.join(", ")} by itself: no rank is asked.`);
  }
  const known = ranks.filter((row) => row.acknowledged);
  const late = ranks.filter((row) => !row.acknowledged);
  return [
    h("p", {}, h("progress", { max: ranks.length || 1, value: known.length,
      "aria-label": "ranks that acknowledged" }), ` ${known.length} of ${plural(ranks.length, "rank")}`,
    unmatched.length > 0 && `; no role has ${plural(unmatched.length, "requested rank")} ${ranges(unmatched)}`),
    late.length > 0 && table("Ranks that have not acknowledged", [
      ["rank", (row) => `${row.role} ${row.rank}`, { head: true }],
      ["", (row) => (row.there ? "its process lives" : badge("missing", "its process is gone"))],
      ["last heard", (row) => when(row.last_wall)],
      ["host", (row) => row.host ?? row.node ?? gap("")],
      ["pid", (row) => row.pid ?? gap(""), { right: true }],
    ], late, { key: (row) => `${row.role}/${row.rank}` }),
  ];
}

function arrived(run, { steps, dumps, agreement, order }) {
  const alone = keepsAlone(order);
  return [
    table("Captured steps", [
      ["step", (row) => h("a", { href: address(["runs", run, "steps", row.step, ...(alone ? [] : ["operators"])],
        { attempt: row.attempt }) }, row.step), { head: true, right: true }],
      ["attempt", (row) => count(row.attempt) ?? "–", { right: true }],
      ["", (row) => badge(row.state === "waiting" ? "open" : row.state, row.state)],
      [alone ? "kept of" : "collected", (row) => plural(row.collected, "rank"), { right: true }],
      ["may still", (row) => byRole(row.waiting)],
      ["did not", (row) => [
        ...row.gaps.map((each) => `${each.role} ${each.rank}: ${each.state}`),
        ...(row.unrecorded.length > 0 ? [`nobody recorded ${row.unrecorded.join(", ")}`] : []),
        ...(row.gap ? [row.gap] : []),
      ].join("; "), { wide: true }],
    ], steps, { key: (row) => `${row.attempt}/${row.step}`, empty: "No step of it has begun." }),
    dumps.length > 0 && table("Dumps", [
      ["dump of", (row) => `${row.role} ${row.rank}`, { head: true }],
      ["step", (row) => row.step, { right: true }],
      ["stage", (row) => row.stage],
      ["part", partOf(dumps)],
      ["", (row) => badge(row.state ?? "unknown")],
      ["size", (row) => quantity(row.bytes, "", "unknown", bytes), { right: true }],
      ["took", (row) => quantity(row.seconds, "", "unknown", seconds), { right: true }],
      ["where", (row) => (row.path ? h("code", {}, row.path) : gap("")), { wide: true }],
      ["error", (row) => row.error ?? "", { wide: true }],
    ], dumps, { stacks: true, key: (row) => `${row.attempt}/${row.step}/${row.stage}/${row.role}/${row.rank}/${row.part}` }),
    estimates(agreement.estimates),
  ];
}

function byRole(ranks) {
  const roles = [...new Set(ranks.map((each) => each.role))];
  return roles.map((role) => `${role} ${ranges(ranks.filter((each) => each.role === role)
    .map((each) => each.rank))}`).join("; ");
}

const estimates = (rows) => rows.length > 0 && h("details", {},
  h("summary", {}, "What the ranks expect it to cost"),
  table("Estimates", [
    ["rank", (row) => `${row.role} ${row.rank}`, { head: true }],
    ["stage", (row) => row.stage ?? ""],
    ["a step", (row) => quantity(row.bytes ?? null, "", row.error ?? "unknown", bytes), { right: true }],
    ["takes longer by", (row) => quantity(row.seconds ?? null, "", row.error ?? "unknown", seconds), { right: true }],
    ["by", (row) => row.basis ?? ""],
    ["free on its disk", (row) => quantity(row.free_bytes ?? null, "", "unknown", bytes), { right: true }],
  ], rows, { key: (row) => `${row.role}/${row.rank}/${row.stage}` }));

// --- arming -----------------------------------------------------------------------------------
/** The form of a new capture; its fields may come with the address. */
export function arm(view, { run, stages = "", ranks = "all", roles = "", steps = "next", task = "statistics" }, user) {
  view.add(h("h1", {}, user?.bundle ? `No capture of ${run} can be armed here` : `Arm a capture of ${run}`));
  if (user?.grade !== "operate") {
    view.add(h("div.problem", { role: "note" }, !user?.bundle
      ? [h("p", {}, "The read token looks and arms nothing."),
        h("p.quiet", {}, "Log out, and log in with the content of operate.token.")]
      : h("p", {}, `This is ${user.bundle}, a read-only archive: no training can be reached from it.`)));
    return;
  }
  const given = new Set(stages.split(",").filter(Boolean));
  view.block({
    path: once(() => stagesOf(run)), // what somebody fills in is not drawn anew
    draw: (found) => form(run, { known: [...new Set([...found, ...given])].sort(), given, ranks, roles, steps, task }),
  });
}

/** The stages of a run, as its last steps had them. */
async function stagesOf(run) {
  const { rows } = await get(url("/steps", { run, limit: 3 }));
  const found = await Promise.all(rows.map(({ step, attempt }) =>
    get(url(`/steps/${step}/stages`, { run, attempt, limit: 1 }))));
  return found.flatMap(({ expected }) => Object.values(expected).flatMap(Object.keys));
}

function form(run, { known, given, ranks, roles, steps, task }) {
  const failed = h("div", { role: "alert" });
  const field = (id, label, control, help) => h("div.field", {},
    h("label", { for: id }, label), control, help && h("p.quiet", { id: `${id}-help` }, help));
  const text = (id, value, more = {}) =>
    h("input", { id, name: id, value, "aria-describedby": `${id}-help`, ...more });
  const options = (entries, chosen) => entries.map(([value, label]) =>
    h("option", { value, selected: value === chosen }, label ?? value));
  const submit = async (event) => {
    event.preventDefault();
    const fields = event.target.elements;
    localStorage.setItem(NAME, fields.user.value);
    try {
      const made = await send("POST", "/captures?wait=0", request(run, event.target), fields.user.value);
      // Who has not acknowledged changes: the table of ranks has it.
      remarks.set(made.capture_id, made.notes.filter((note) => !note.startsWith("waiting for ")));
      location.hash = ofRun(run, "captures", made.capture_id);
    } catch (error) {
      patch(failed, nodes(problem(error)));
      failed.scrollIntoView({ block: "nearest" });
    }
  };
  return h("form.form", { onsubmit: submit },
    h("fieldset", { onchange: allOrSome }, h("legend", {}, "Stages"),
      known.map((stage) => h("label.choice", {},
        h("input", { type: "checkbox", name: "stage", value: stage, checked: given.has(stage) }), ` ${stage}`)),
      h("label.choice", {}, h("input", { type: "checkbox", name: "every", checked: !given.size }), " all stages")),
    field("ranks", "Ranks", text("ranks", ranks), "all, 0,4-7, or worst(4): those with the largest mismatch of the last step"),
    field("roles", "Roles", text("roles", roles, { placeholder: "every role" }), "names, separated by commas"),
    field("steps", "Steps", text("steps", steps), "next, all, or numbers: 41,50-52"),
    field("task", "msprobe's task", h("select", { id: "task", name: "task" },
      options([...TASKS.map((each) => [each]), ["", "none: keep tensors only"]], task))),
    field("level", "Level", h("select", { id: "level", name: "level" }, options(LEVELS.map((each) => [each]), "L1"))),
    field("keep", "Tensors to keep", text("keep", "", { placeholder: "old_log_probs, rollout_log_probs" }),
      "names of what ranks hand over, separated by commas"),
    field("late", "Ranks that do not acknowledge", h("select", { id: "late", name: "late" },
      options(Object.entries(LATE), "wait"))),
    field("user", "Your name", text("user", localStorage.getItem(NAME) ?? "", { maxlength: 100, autocomplete: "name" }),
      "who armed it stands in the audit"),
    failed,
    h("button.main", { type: "submit" }, "Arm the capture"));
}

/** "all stages" and the stages exclude each other. */
function allOrSome({ target }) {
  if (!target.checked) return;
  for (const box of target.form.querySelectorAll("input[name=stage], input[name=every]")) {
    if (target.name === "every" ? box !== target : box.name === "every") box.checked = false;
  }
}

/** The body of `POST /captures` from the form. */
function request(run, form_) {
  const fields = form_.elements;
  const names = (text) => text.split(",").map((each) => each.trim()).filter(Boolean);
  const stages = [...form_.querySelectorAll("input[name=stage]:checked")].map((each) => each.value);
  const keep = names(fields.keep.value);
  return {
    run,
    stages: stages.length ? stages : "all",
    ranks: fields.ranks.value.trim() || "all",
    steps: fields.steps.value.trim() || "next",
    late: fields.late.value,
    ...(fields.roles.value.trim() ? { roles: names(fields.roles.value) } : {}),
    ...(fields.task.value ? { task: fields.task.value, level: fields.level.value } : {}),
    ...(keep.length ? { keep } : {}),
  };
}
