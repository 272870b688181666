// Captures: request one, see who acknowledged it, watch it arrive.

import { address, nameOf, ofRun } from "./address.js";
import { once } from "./blocks.js";
import { badge, facts, form, gap, h, holding, made, options, patch, quantity, when } from "./dom.js";
import { byRole, bytes, count, partOf, plural, ranges, seconds } from "./format.js";
import { toCapture } from "./links.js";
import { get, part, send, url } from "./service.js";
import { BADGE, COUNT, HEAD, RIGHT, SIZE, WHEN, WIDE, table } from "./table.js";

const TASKS = ["statistics", "tensor", "structure", "nan_check"];
const LEVELS = ["L0", "L1", "mix"];
const LATE = { wait: "wait for them", go_on: "go on without them", give_up: "give up" };
const NAME = "stagescope user"; // localStorage: the name that the audit has, no secret

/** Every capture of a run. */
export function list(view, { run }, user) {
  view.add(h("h1", {}, `Captures of ${nameOf(run)}`));
  view.add(h("p.operates", {}, toCapture(run),
    user?.grade === "read" && h("span.quiet", {}, " (needs the operate token)")));
  view.block({
    path: url("/captures", { run, limit: 100 }),
    concerns: (event) => event.event === "capture" && event.run === run,
    draw: ({ rows }) => table("Captures", [
      ["capture", (row) => h("a", { href: ofRun(run, "captures", row.capture_id) }, row.capture_id), HEAD],
      ["state", "state", BADGE],
      ["stages", (row) => joined(row.spec.stages)],
      ["ranks", (row) => wanted(row.spec.ranks)],
      ["steps", (row) => wanted(row.spec.steps)],
      ["attempt", "attempt", COUNT],
      ["begins at", (row) => begins({ order: row.spec, agreement: row.spec.agreement, state: row.state })],
      ["task", (row) => row.spec.config?.task ?? (row.spec.keep.length ? "tensors" : "")],
      ["requested by", "by"], ["when", "created_wall", WHEN],
      ["over since", (row) => (row.removed_wall === null ? "" : when(row.removed_wall))],
    ], rows, { key: (row) => row.capture_id, empty: "None was requested." }),
  });
}

const joined = (value) => [value].flat().join(", ");

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
const remarks = new Map(); // capture -> what the service noted when this page requested it

/** States that stay: nothing is left to withdraw. */
const OVER = new Set(["complete", "partial", "empty", "given up", "too late", "refused", "withdrawn"]);

/** The step from which on the ranks collect; of an order for steps by number none is agreed on. */
function begins({ order, agreement, state }) {
  if (agreement.start !== null) return `step ${agreement.start}`;
  if (Array.isArray(order.steps)) return `step ${Math.min(...order.steps)}`;
  return gap(OVER.has(state) ? "no step was agreed on" : "not agreed on yet");
}

/** The progress of a capture. */
export function one(view, { run, capture: id }, user) {
  view.add(h("h1", {}, `Capture ${id}`));
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
        ["stages", joined(found.order.stages)], ["ranks", wanted(found.order.ranks)],
        ["steps", wanted(found.order.steps)],
        ["begins at", begins(found)],
        ["task", found.order.config?.task], ["level", found.order.config?.level],
        ["keeps", [...found.order.keep, ...found.order.parameters, ...found.order.gradients].join(", ")],
        ["requested by", found.order.by], ["when", when(found.created_wall)],
        ["over since", found.removed_wall !== null && [when(found.removed_wall),
          found.state === "withdrawn" && `: withdrawn by ${found.removed_by}`]],
        ["late ranks", LATE[found.order.late]],
      ]),
      found.removed_wall === null && !OVER.has(found.state) && user?.grade === "operate" && form({}, async () => {
        await send("DELETE", path, null, localStorage.getItem(NAME));
        block.load(performance.now());
      }, h("button", {}, "Withdraw")),
      found.dumps.slice(0, 1).map(({ step, attempt }) => h("p", {}, h("a", { href: operatorsOf(run, { step, attempt }) },
        `The operators of step ${step}`), `, from ${plural(found.dumps.length, "dump")}`)),
      h("h2", {}, "Who acknowledged"), acknowledged(found),
      h("h2", {}, "What arrived"), arrived(run, found),
    ],
  });
}

const STATES = {
  asked: "not every rank has acknowledged it", agreed: "every rank of the capture has acknowledged it",
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
    return h("p", {}, `The service keeps ${order.keep.join(", ")} without asking any rank.`);
  }
  const known = ranks.filter((row) => row.acknowledged);
  const late = ranks.filter((row) => !row.acknowledged);
  return [
    h("p", {}, h("progress", { max: ranks.length || 1, value: known.length,
      "aria-label": "ranks that acknowledged" }), ` ${known.length} of ${plural(ranks.length, "rank")}`,
    unmatched.length > 0 && `; no role has ${plural(unmatched.length, "requested rank")} ${ranges(unmatched)}`),
    late.length > 0 && table("Ranks that have not acknowledged", [
      ["rank", (row) => `${row.role} ${row.rank}`, HEAD],
      ["", (row) => (row.there ? "its process lives" : badge("missing", "its process is gone"))],
      ["last heard", "last_wall", WHEN],
      ["host", (row) => row.host ?? row.node ?? gap("")],
      ["pid", (row) => row.pid ?? gap(""), RIGHT],
    ], late, { key: (row) => `${row.role}/${row.rank}` }),
  ];
}

function arrived(run, { steps, dumps, agreement, order }) {
  const alone = keepsAlone(order);
  return [
    table("Captured steps", [
      ["step", (row) => h("a", { href: address(["runs", run, "steps", row.step, ...(alone ? [] : ["operators"])],
        { attempt: row.attempt }) }, row.step), { ...HEAD, ...RIGHT }],
      ["attempt", (row) => count(row.attempt) ?? "–", RIGHT],
      ["", (row) => badge(row.state === "waiting" ? "open" : row.state, row.state)],
      [alone ? "kept of" : "collected", (row) => plural(row.collected, "rank"), RIGHT],
      ["still to come", (row) => byRole(row.waiting)],
      ["not collected", (row) => [
        ...row.gaps.map((each) => `${each.role} ${each.rank}: ${each.state}`),
        ...(row.unrecorded.length > 0 ? [`nobody recorded ${row.unrecorded.join(", ")}`] : []),
        ...(row.gap ? [row.gap] : []),
      ].join("; "), WIDE],
    ], steps, { key: (row) => `${row.attempt}/${row.step}`, empty: "No step of it has begun." }),
    dumps.length > 0 && table("Dumps", [
      ["dump of", (row) => h("a", { title: "its operators", href: operatorsOf(run, row) }, `${row.role} ${row.rank}`),
        HEAD],
      ["step", "step", RIGHT], ["stage"],
      ["part", partOf(dumps)],
      ["", (row) => badge(row.state ?? "unknown")],
      ["size", "bytes", SIZE],
      ["took", (row) => quantity(row.seconds, "", "unknown", seconds), RIGHT],
      ["where", (row) => (row.path ? h("code", {}, row.path) : gap("")), WIDE],
      ["error", "error", WIDE],
    ], dumps, { key: (row) => `${row.attempt}/${row.step}/${row.stage}/${row.role}/${row.rank}/${row.part}` }),
    estimates(agreement.estimates),
  ];
}

/** The address of the operators of a dump. */
const operatorsOf = (run, { step, attempt, role, rank, stage }) =>
  address(["runs", run, "steps", step, "operators"], { attempt, role, rank, stage });

const estimates = (rows) => rows.length > 0 && h("details", {},
  h("summary", {}, "What the ranks expect it to cost"),
  table("Estimates", [
    ["rank", (row) => `${row.role} ${row.rank}`, HEAD],
    ["stage"],
    ["a step", (row) => quantity(row.bytes ?? null, "", row.error ?? "unknown", bytes), RIGHT],
    ["takes longer by", (row) => quantity(row.seconds ?? null, "", row.error ?? "unknown", seconds), RIGHT],
    ["by", "basis"],
    ["free on its disk", "free_bytes", SIZE],
  ], rows, { key: (row) => `${row.role}/${row.rank}/${row.stage}` }));

// --- requesting ------------------------------------------------------------------------------
/** The form of a new capture; its fields may come with the address. */
export function arm(view, { run, stages = "", keep = "", ...given }, user) {
  view.add(h("h1", {}, user?.bundle ? `No capture of ${nameOf(run)} can be requested here` : `Request a capture of ${nameOf(run)}`));
  if (user?.grade !== "operate") {
    view.add(h("div.problem", { role: "note" }, !user?.bundle
      ? [h("p", {}, "With the read token you can look, but not request a capture."),
        h("p.quiet", {}, "Log out, and log in with the content of operate.token.")]
      : h("p", {}, `This is ${user.bundle}, a read-only archive: no training can be reached from it.`)));
    return;
  }
  const chosen = new Set(stages.split(",").filter(Boolean));
  view.block({
    path: `/runs/${part(run)}/attempts?limit=1`,
    concerns: (event) => event.run === run && event.event === "attempt",
    draw: ({ rows: [attempt] }) => h("p", {}, badge(attempt?.state ?? "ended"), ...whoTakesIt(attempt)),
  });
  view.block({
    path: once(() => known(run)), // what somebody fills in is not drawn anew
    draw: (found) => armForm(run, found, { stages: chosen, keep, ranks: "all", roles: "", steps: "next", task: "statistics",
      level: "L1", ...given }),
  });
}

/** Whether ranks will take a capture. */
function whoTakesIt(attempt) {
  if (!attempt) return [" The run has not reported yet: a capture waits for it."];
  if (attempt.state === "live") return [` Attempt ${attempt.attempt} lives: its ranks will take the capture.`];
  return [` Attempt ${attempt.attempt} is ${attempt.state}, last heard `, when(attempt.last_wall),
    ": no rank takes a capture now. It waits for the next attempt."];
}

/** What is known before a capture: { expected: role -> stage -> ranks, costs } of the last steps. */
async function known(run) {
  const [{ rows }, { rows: costs }] = await Promise.all([
    get(url("/steps", { run, limit: 3 })), get(`/runs/${part(run)}/capture-costs`)]);
  const found = await Promise.all(rows.map(({ step, attempt }) =>
    get(url(`/steps/${step}/stages`, { run, attempt, limit: 1 }))));
  const expected = {};
  for (const each of found.reverse()) {
    for (const [role, stages] of Object.entries(each.expected)) expected[role] = { ...expected[role], ...stages };
  }
  return { expected, costs };
}

function armForm(run, found, { stages: given, keep, ranks, roles, steps, task, level }) {
  const known = [...new Set([...Object.values(found.expected).flatMap(Object.keys), ...given])].sort();
  const price = made(h("div.price", { role: "status" }));
  const tell = (filled) => patch(price, costOf(request(run, filled), found));
  const field = (id, label, control, help) => h("div.field", {},
    h("label", { for: id }, label), control, help && h("p.quiet", { id: `${id}-help` }, help));
  const text = (id, value, more = {}) =>
    h("input", { id, name: id, value, "aria-describedby": `${id}-help`, ...more });
  const select = (id, entries, chosen) => h("select", { id, name: id }, options(entries, chosen));
  const submit = async ({ user }) => {
    localStorage.setItem(NAME, user.value);
    const requested = await send("POST", "/captures?wait=0", request(run, user.form), user.value);
    // Who has not acknowledged changes: the table of ranks has it.
    remarks.set(requested.capture_id, requested.notes.filter((note) => !note.startsWith("waiting for ")));
    location.hash = ofRun(run, "captures", requested.capture_id);
  };
  const attributes = {
    class: "form", oninput: ({ currentTarget }) => tell(currentTarget), ref: (drawn) => drawn && tell(drawn),
  };
  return form(attributes, submit,
    h("fieldset", { onchange: allOrSome }, h("legend", {}, "Stages"),
      known.map((stage) => h("label.choice", {},
        h("input", { type: "checkbox", name: "stage", value: stage, defaultChecked: given.has(stage) }), ` ${stage}`)),
      h("label.choice", {}, h("input", { type: "checkbox", name: "every", defaultChecked: !given.size }), " all stages")),
    field("ranks", "Ranks", text("ranks", ranks), "all, 0,4-7, or worst(4): those with the largest mismatch of the last step"),
    field("roles", "Roles", text("roles", roles, { placeholder: "every role" }), "names, separated by commas"),
    field("steps", "Steps", text("steps", steps), "next, all, or numbers: 41,50-52"),
    field("task", "msprobe's task", select("task", [...TASKS, ["", "none: keep tensors only"]], task)),
    field("level", "Level", select("level", LEVELS, level)),
    field("keep", "Tensors to keep", text("keep", keep, { placeholder: "old_log_probs, rollout_log_probs" }),
      "names of what ranks hand over, separated by commas"),
    field("late", "Ranks that do not acknowledge", select("late", Object.entries(LATE), "wait")),
    field("user", "Your name", text("user", localStorage.getItem(NAME) ?? "", { maxlength: 100, autocomplete: "name" }),
      "who requested it stands in the audit"),
    holding(price), h("button.main", {}, "Request the capture"));
}

/** What a request will cost, as far as earlier dumps of the run tell. */
function costOf({ stages, roles, ranks, task, level, keep }, { expected, costs }) {
  if (!task) {
    return h("p", {}, keep ? "It costs the ranks nothing: the service keeps what they record anyway."
      : "It collects nothing: choose a task, or tensors to keep.");
  }
  const parts = Object.entries(expected).filter(([role]) => !roles || roles.includes(role))
    .flatMap(([role, own]) => Object.entries(own).map(([stage, all]) => ({ role, stage, ranks: sizeOf(ranks, all) })))
    .filter(({ stage, ranks: size }) => (stages === "all" || stages.includes(stage)) && size > 0)
    .map((each) => ({ ...each, cost: costs.find((row) => row.role === each.role && row.stage === each.stage
      && row.task === task && row.level === level) }));
  const told = parts.filter(({ cost }) => cost);
  const untold = [...new Set(parts.filter(({ cost }) => !cost).map(({ stage }) => stage))];
  const newest = told.map(({ cost }) => cost).sort((a, b) => b.attempt - a.attempt || b.step - a.step)[0];
  const longer = Object.values(Object.groupBy(told, ({ role }) => role)).map((own) =>
    own.reduce((sum, { cost }) => (cost.seconds === null ? null : sum + cost.seconds), 0));
  return [
    told.length > 0 && h("p", {}, "About ", h("strong", {}, bytes(told.reduce((sum, each) => sum + each.cost.bytes * each.ranks, 0))),
      ` a step on ${plural(Math.max(...told.map((each) => each.ranks)), "rank")}`, longer.includes(null) ? ""
        : [", and each step takes ", h("strong", {}, seconds(Math.max(...longer))), " longer"],
      `: the largest cost of earlier dumps of the run, up to step ${newest.step} of attempt ${newest.attempt}.`),
    untold.length > 0 && h("p", {}, `Cost of ${untold.join(", ")} not known: no dump of this run yet with task ${task}, level ${level}.`),
    !parts.length && h("p", {}, "Cost not known: no rank of the last steps has such a stage."),
    h("p.quiet", {}, "Each rank estimates the cost before it begins. What does not fit on its disk is refused."),
  ];
}

/** How many of `all` ranks a request asks. */
function sizeOf(asked, all) {
  const worst = /^worst\((\d+)\)$/.exec(asked);
  if (worst) return Math.min(Number(worst[1]), all.length);
  if (asked === "all") return all.length;
  const spans = asked.split(",").map((each) => each.split("-").map(Number));
  return all.filter((rank) => spans.some(([from, to = from]) => from <= rank && rank <= to)).length;
}

/** "all stages" and the stages exclude each other. */
function allOrSome({ target }) {
  if (!target.checked) return;
  for (const box of target.form.querySelectorAll("input[name=stage], input[name=every]")) {
    if (target.name === "every" ? box !== target : box.name === "every") box.checked = false;
  }
}

/** The body of `POST /captures` from the form. */
function request(run, filled) {
  const fields = new FormData(filled);
  const stages = fields.getAll("stage");
  const [keep, roles] = ["keep", "roles"].map((name) =>
    fields.get(name).split(",").map((each) => each.trim()).filter(Boolean));
  return {
    run,
    stages: stages.length ? stages : "all",
    ranks: fields.get("ranks").trim() || "all",
    steps: fields.get("steps").trim() || "next",
    late: fields.get("late"),
    ...(roles.length ? { roles } : {}),
    ...(fields.get("task") ? { task: fields.get("task"), level: fields.get("level") } : {}),
    ...(keep.length ? { keep } : {}),
  };
}
