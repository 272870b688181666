// The frame of the page: which view an address shows, the login, the stream.

import { address, AGAIN, nameOf, noteNames, ofRun, ofStep, parse } from "./address.js";
import { isAction, View } from "./blocks.js";
import { canary, canaryVersion } from "./canary.js";
import * as captures from "./captures.js";
import * as comparisons from "./comparisons.js";
import { doctor } from "./doctor.js";
import { button, h, made, patch, problem, refreshTimes, showCurrent } from "./dom.js";
import { finding, findings } from "./findings.js";
import { hangs } from "./hangs.js";
import { login } from "./login.js";
import { operators } from "./operators.js";
import { fetchPlotly } from "./plotly.js";
import { runs } from "./run_list.js";
import { run, steps } from "./runs.js";
import { sample } from "./sample.js";
import { audit, engines, lost } from "./service_views.js";
import { forget, get, part, runsNamed, send, Stream, url, whenLoggedOut } from "./service.js";
import { rank, round, samples } from "./slices.js";
import { step } from "./step.js";
import { triggers } from "./triggers.js";
import { devices, version, weights } from "./weights.js";

const ROUTES = [
  ["", runs],
  ["runs", runs],
  ["engines", engines],
  ["audit", audit],
  ["devices", devices],
  ["runs/:run", run],
  ["runs/:run/steps", steps],
  ["runs/:run/findings", findings],
  ["runs/:run/findings/:finding", finding],
  ["runs/:run/captures", captures.list],
  ["runs/:run/captures/new", captures.arm],
  ["runs/:run/captures/:capture", captures.one],
  ["runs/:run/triggers", triggers],
  ["runs/:run/hangs", hangs],
  ["runs/:run/weights", weights],
  ["runs/:run/weights/:version", version],
  ["runs/:run/canary", canary],
  ["runs/:run/canary/:version", canaryVersion],
  ["runs/:run/lost", lost],
  ["runs/:run/losses", (_, { run: name, ...query }) =>
    location.replace(address(["runs", name, "lost"], query))], // its earlier address
  ["runs/:run/comparisons", comparisons.choose],
  ["runs/:run/doctor", doctor],
  ["runs/:run/steps/:step", step],
  ["runs/:run/steps/:step/samples", samples],
  ["runs/:run/steps/:step/samples/:sample", sample],
  ["runs/:run/steps/:step/ranks/:role/:rank", rank],
  ["runs/:run/steps/:step/rounds/:round", round],
  ["runs/:run/steps/:step/operators", operators],
].map(([pattern, show]) => ({ pattern: pattern.split("/").filter(Boolean), show }));

const TABS = [
  ["Overview"], ["Steps", "steps"], ["Findings", "findings"], ["Doctor", "doctor"],
  ["Captures", "captures"], ["Triggers", "triggers"], ["Hangs", "hangs"], ["Weights", "weights"],
  ["Canary", "canary"], ["Lost data", "lost"], ["Comparisons", "comparisons"],
];

const PATIENCE_MS = 1500;
const GREETING_MS = 300;
const place = (id) => document.getElementById(id);
const state = { view: null, user: null, archive: null, stream: "connecting", hash: null, since: 0 };

// --- views ------------------------------------------------------------------------------------
function find(parts) {
  for (const { pattern, show } of ROUTES) {
    if (pattern.length !== parts.length) continue;
    const params = {};
    const fits = pattern.every((each, at) =>
      each.startsWith(":") ? (params[each.slice(1)] = parts[at]) !== undefined : each === parts[at]);
    if (fits) return { show, params };
  }
  return null;
}

/**
 * Show the view of the address. What is shown stays until it is known that there is such a run and
 * step, and of the same view until the new is there.
 */
function show() {
  const { parts, query } = parse(location.hash);
  const found = find(parts);
  const before = state.hash && parse(state.hash).parts.join("/");
  const isSame = before === parts.join("/");
  state.hash = location.hash;
  const old = state.view;
  const main = place("main");
  const root = document.createElement("div");
  const view = new View(root);
  state.view = view;
  drawWhere(parts, query);
  const params = { ...query, ...found?.params };
  const put = () => {
    old?.close();
    if (state.view !== view) return;
    main.replaceChildren(root);
    view.fit();
    root.querySelectorAll("nav").forEach(showCurrent);
    main.dataset.address = location.hash;
    const heading = root.querySelector("h1");
    document.title = [heading?.textContent, "stagescope"].filter(Boolean).join(" · ");
    if (isSame) return;
    window.scrollTo(0, 0);
    heading?.setAttribute("tabindex", "-1");
    if (before !== null) heading?.focus({ preventScroll: true });
  };
  const draw = (lacking) => {
    if (state.view !== view) return; // somebody went elsewhere meanwhile
    if (lacking) sayWhatIsThere(view, params, lacking);
    else if (found) found.show(view, params, state.user);
    else view.add(h("h1", {}, "No such view"), h("p", {}, "The address names no view of this page. ",
      h("a", { href: "#/" }, "All runs")));
    if (lacking) place("tabs").hidden ||= lacking.isRun;
    if (!isSame) put();
    else Promise.race([view.ready, new Promise((done) => setTimeout(done, PATIENCE_MS))]).then(put);
  };
  if (isKnown(params)) draw();
  else lackingOf(params, state.since).then(draw, () => draw()); // the view itself says what is wrong
  state.since = 0;
}

// --- what an address names and is not there ---------------------------------------------------
const MOST_NAMED = 8;
const there = new Set(); // runs and steps that were seen
const keyOf = ({ run, attempt = "", step }) => (step === undefined ? run : `${run}/${attempt}/${step}`);
const isKnown = (params) => params.run === undefined
  || (there.has(params.run) && (params.step === undefined || params.step === "latest"
    || there.has(keyOf(params))));

/** Show the same view at the address with the run's stored name; nothing else is to be drawn. */
function goTo(run) {
  const { parts: [, , ...rest], query } = parse(location.hash);
  location.replace(address(["runs", run, ...rest], query));
  return new Promise(() => {});
}

/**
 * What to say of a run, attempt or step that is not there; null where it is. It asks for lists
 * alone, which are there in any case: a browser reports every answer that is an error.
 */
async function lackingOf(params, since = 0) {
  const { run, attempt, step } = params;
  const { rows: found } = await get(runsNamed(run), since);
  if (!found.some((row) => row.run === run)) {
    if (found.length) return goTo(found[0].run);
    const { rows } = await get(url("/runs", { limit: MOST_NAMED, hidden: true }), since);
    return { isRun: true, sentence: `There is no run ${run} in this service.`, links: [
      ["All runs", "#/"], ...rows.map((row) => [row.display_name || row.run, ofRun(row.run)])] };
  }
  noteNames(found);
  drawWhere(...Object.values(parse(location.hash)));
  there.add(run);
  if (isKnown(params)) return null;
  const attemptsOf = async () => (await get(`/runs/${part(run)}/attempts`, since)).rows;
  let attempts = attempt === undefined ? null : await attemptsOf();
  const own = attempts?.find((row) => String(row.attempt) === attempt);
  if (attempts && !own) {
    return { sentence: `Run ${nameOf(run)} has no attempt ${attempt}.`,
      links: [[`run ${nameOf(run)}, attempts 1 to ${attempts[0].attempt}`, ofRun(run)]] };
  }
  const isNumber = /^\d{1,18}$/.test(step);
  const asked = { run, attempt, limit: 1 };
  const near = isNumber ? (await get(url("/steps", { ...asked, to: step }), since)).rows[0] : null;
  if (near && String(near.step) === String(Number(step))) {
    there.add(keyOf(params));
    return null;
  }
  attempts ??= await attemptsOf();
  const newest = (await get(url("/steps", asked), since)).rows[0];
  const firsts = (own ? [own] : attempts).map((row) => row.first_step).filter((each) => each !== null);
  const of = attempt === undefined ? `Run ${nameOf(run)}` : `Attempt ${attempt} of run ${nameOf(run)}`;
  if (!newest) return { sentence: `${of} has no step yet.`, links: [[run, ofRun(run)]] };
  const named = new Map([["first", Math.min(...firsts)], ["last", newest.step]]);
  if (near && near.step !== newest.step) named.set("the one before", near.step);
  return { sentence: `${of} has no step ${step}.`, links: [
    ...[...named].map(([what, each]) => [`${what}: step ${each}`, ofStep(run, each, attempt)]),
    ["all its steps", ofRun(run, "steps")]] };
}

/** Say that something is not there and lead to what is; it is shown as soon as it is there. */
function sayWhatIsThere(view, params, { sentence, links }) {
  const begins = ({ event, run }) => ["step", "attempt"].includes(event) && run === params.run;
  view.add(h("h1", {}, sentence.replace(/\.$/, "")), h("p.row", {}, "Go to:",
    links.map(([text, href]) => h("a", { href }, text))));
  view.place({
    element: document.createElement("div"), concerns: begins,
    load: async (since, events) => {
      if (events.length && await lackingOf(params, since) === null) dispatchEvent(new Event(AGAIN));
    },
  });
}

/** Show the view again after somebody renamed or deleted its run. */
function followRun(event) {
  const { params } = find(parse(location.hash).parts) ?? {};
  if (!params?.run || event.run !== params.run || !isAction(event, "change_run", "run_deleted")) return;
  there.clear();
  state.since = performance.now();
  dispatchEvent(new Event(AGAIN));
}

/** The way to the view: runs, run, step, ... */
function drawWhere(parts, query) {
  const trail = [["stagescope", "#/"]];
  const [, name, area, id, kind, ...rest] = parts;
  if (parts[0] === "runs" && name) trail.push([nameOf(name), ofRun(name)]);
  else if (parts[0] && parts[0] !== "runs") trail.push([parts[0], address([parts[0]])]);
  if (area === "steps" && id) {
    const attempt = query.attempt ? ` (attempt ${query.attempt})` : "";
    trail.push([`step ${id}${attempt}`, ofStep(name, id, query.attempt)]);
    if (kind === "ranks") trail.push([rest.join(" "), location.hash]);
    else if (kind === "rounds") trail.push([`round ${rest[0]}`, location.hash]);
    else if (kind === "samples") {
      trail.push(["samples", ofStep(name, id, query.attempt, "samples")]);
      if (rest[0]) trail.push([rest[0] === "-" ? `row ${query.row}` : rest[0], location.hash]);
    } else if (kind) trail.push([kind, location.hash]);
  } else if (area) {
    trail.push([TABS.find(([, tab]) => tab === area)?.[0].toLowerCase() ?? area, ofRun(name, area)]);
    if (id) trail.push([id, location.hash]);
  }
  patch(place("where"), h("ol", {}, trail.map(([text, href], at) =>
    h("li", {}, h("a", { href, "aria-current": at === trail.length - 1 ? "page" : null }, text)))));
  const tabs = place("tabs");
  tabs.hidden = parts[0] !== "runs" || !name;
  patch(tabs, !tabs.hidden && TABS.map(([text, tab]) => h("a", {
    href: tab ? ofRun(name, tab) : ofRun(name),
    "aria-current": tab === area ? "true" : null,
  }, text)));
  showCurrent(tabs);
}

// --- session ----------------------------------------------------------------------------------
function drawSession() {
  const isLive = state.stream === "live";
  const { archive } = state; // what is shown in place of a service
  document.body.classList.toggle("archive", Boolean(archive));
  patch(place("session"),
    archive ? h("span.stream.quiet", { title: "nothing changes in it, and no training can be reached from it" },
      h("a", { href: state.user?.opens ?? "#/" }, `read-only archive: ${archive}`))
    : h("span.stream", { class: isLive ? "good" : "quiet", title: "whether the page follows the service" },
      h("span", { "aria-hidden": "true" }, isLive ? "● " : "○ "), state.stream),
    state.user && !archive && h("a", { href: "#/engines" }, "engines"),
    state.user?.role === "admin" && !archive && h("a", { href: "#/audit" }, "audit"),
    h("a", { href: "guide/" }, "Guide"),
    h("a", { href: "docs" }, "API"),
    state.user && !archive && h("span.quiet", {},
      [state.user.person ?? state.user.token, `may ${state.user.grade}`].filter(Boolean).join(", ")),
    // Whom the proxy names logs out there.
    state.user && !state.user.person && button("Log out", leave));
}

/** Let the page hold this and no view. */
const showAlone = (node) => place("main").replaceChildren(made(h("div", {}, node)));

async function enter(since = performance.now()) {
  try {
    state.user = await get("/whoami", since);
  } catch (error) {
    showAlone(problem(error));
    setTimeout(() => enter(), 2000);
    return;
  }
  state.archive = state.user.bundle;
  if (state.user.grade === null) {
    askForLogin();
    return;
  }
  if (state.archive) state.user.grade = "read"; // whichever its token is of: nothing can be operated
  if (state.archive && !location.hash) location.replace(state.user.opens); // what it was made for
  drawSession();
  if (!state.archive) { // in one nothing changes
    stream.open();
    // What a view asks before the stream is there may be old already, and would be asked again.
    await Promise.race([stream.greeted, new Promise((done) => setTimeout(done, GREETING_MS))]);
    if (state.user === null) return; // somebody logged out meanwhile
  }
  show();
  state.view.ready.then(() => (window.requestIdleCallback ?? setTimeout)(() => fetchPlotly("prefetch")));
}

async function leave() {
  await send("POST", "/logout");
  askForLogin();
}

function askForLogin() {
  stream.close();
  forget();
  state.user = null;
  state.view?.close();
  state.view = null;
  place("tabs").hidden = true;
  patch(place("where"), h("ol", {}, h("li", {}, h("a", { href: "#/" }, "stagescope"))));
  state.stream = "not logged in";
  drawSession();
  document.title = "Log in · stagescope";
  showAlone(login(() => enter(), state.archive));
  place("main").querySelector("input").focus();
}

const stream = new Stream((event) => {
  state.view?.notify(event);
  followRun(event);
  const { params } = find(parse(location.hash).parts) ?? {};
  if (event.event === "step" && event.closed && event.measured && event.run === params?.run) {
    place("said").textContent = `step ${event.step} is measured: ${event.verdict}`;
  }
}, (text) => {
  state.stream = text;
  drawSession();
});

whenLoggedOut(() => { if (!document.querySelector("#login")) askForLogin(); });
addEventListener("hashchange", () => { if (state.user && location.hash !== state.hash) show(); });
addEventListener(AGAIN, show);
document.querySelector(".skip").onclick = (event) => {
  event.preventDefault(); // the part after # is the address of the view
  place("main").focus();
};
setInterval(refreshTimes, 5000);
drawSession();
enter(0); // begin.js has asked
