// Talks to the service: answers with their ETags, problems as errors, the stream of changes.

/** An answer that is no success; `problem` has `status`, `wrong`, `expected`, `advice`. */
export class ServiceError extends Error {
  constructor(problem) {
    super(problem.detail ?? problem.wrong);
    this.problem = problem;
    this.status = problem.status;
  }
}

const MAX_KEPT = 300;
const FRESH_MS = 1000;
const LATER = new Set([429, 503]); // over the token's limit, busy: the service says when to ask again
const MAX_TIMES = 20; // an answer that is computed for long is asked for again
const kept = new Map(); // path -> { data, tag, began }
const asking = new Map(); // path -> { began, answer }
let onLogin = () => {};

/** Call `callback` where an answer says that nobody is logged in. */
export const whenLoggedOut = (callback) => { onLogin = callback; };

/** Forget every answer: another user may see others. */
export const forget = () => kept.clear();

/** A path with query parameters; those without a value are left out, lists are repeated. */
export function url(path, params = {}) {
  const query = new URLSearchParams();
  for (const [name, value] of Object.entries(params)) {
    for (const each of Array.isArray(value) ? value : [value]) {
      if (each !== null && each !== undefined && each !== "") query.append(name, each);
    }
  }
  const text = query.toString();
  return text ? `${path}?${text}` : path;
}

/** The address of an answer for links, relative to the page: a proxy may serve it below a path. */
export const toFile = (path) => `.${path}`;

/** The part of a path that stands for one name. */
export const part = (name) => encodeURIComponent(name);

/** The path of the runs that a name of an address means. */
export const runsNamed = (name) => url("/runs", { name, hidden: true });

/** The last answer of a path, if there was one. */
export const known = (path) => kept.get(path)?.data;

/**
 * The answer of a path. One that has not changed is the same object as before: the service then
 * sends its status alone.
 * @param since when (performance.now()) something changed that it must show; 0: nothing did.
 */
export function get(path, since = 0) {
  const before = kept.get(path);
  if (before && before.began >= (since || performance.now() - FRESH_MS)) {
    return Promise.resolve(before.data);
  }
  const running = asking.get(path);
  if (running && running.began >= since) return running.answer;
  const began = performance.now();
  const answer = ask(path, began).finally(() => {
    if (asking.get(path)?.began === began) asking.delete(path);
  });
  asking.set(path, { began, answer });
  return answer;
}

async function ask(path, began) {
  const before = kept.get(path);
  const headers = before?.tag ? { "If-None-Match": before.tag } : {};
  let response = await reach(path, { headers, cache: "no-store" });
  for (let times = 0; LATER.has(response.status) && times < MAX_TIMES; times++) {
    const seconds = Number(response.headers.get("Retry-After")) || 1;
    await new Promise((done) => setTimeout(done, 1000 * seconds));
    response = await reach(path, { headers, cache: "no-store" });
  }
  if (response.status === 304 && before) {
    before.began = began;
    return before.data;
  }
  const data = await read(response);
  kept.delete(path);
  kept.set(path, { data, tag: response.headers.get("ETag"), began });
  if (kept.size > MAX_KEPT) kept.delete(kept.keys().next().value);
  return data;
}

/**
 * The rows of a list, page by page, as the first page with all rows.
 * @param most rows after which it stops: `next` then tells that there are more.
 */
export async function all(path, since = 0, most = 20_000) {
  const first = await get(path, since);
  if (!first.next) return first;
  const rows = [...first.rows];
  const joined = path.includes("?") ? "&" : "?";
  let next = first.next;
  while (next && rows.length < most) {
    const page = await get(`${path}${joined}cursor=${part(next)}`, since);
    rows.push(...page.rows);
    next = page.next;
  }
  return { ...first, rows, next };
}

/** Send something that changes the service, under the user's own name; returns the answer. */
export async function send(method, path, body, user) {
  const headers = { "Content-Type": "application/json" };
  if (user) headers["X-Stagescope-User"] = user;
  const response = await reach(path, { method, headers, body: body && JSON.stringify(body) });
  return response.status === 204 ? null : read(response);
}

async function reach(path, options) {
  try {
    return await fetch(toFile(path), { credentials: "same-origin", ...options });
  } catch {
    throw new ServiceError({
      status: 0, wrong: "the service does not answer",
      advice: "it may be restarting, or the tunnel to it is closed; the page asks again by itself",
    });
  }
}

async function read(response) {
  const data = await response.json().catch(() => null);
  if (response.ok) return data;
  const problem = data ?? { wrong: `the service answered ${response.status}` };
  if (response.status === 401) onLogin();
  throw new ServiceError({ ...problem, status: response.status });
}

// --- the stream -------------------------------------------------------------------------------
const HIDDEN_MS = 60_000;
const SLOWEST_MS = 30_000;
const SILENT_MS = 40_000; // the service sends something every 15 s

/**
 * Reads /stream for as long as the page is looked at; continues after interruptions.
 * @param onEvent is called with { event, ...fields }; `hello` with resumed false means that
 *     something may have been missed.
 * @param onState is called with "live", "connecting", "paused" or a sentence on what is wrong.
 */
export class Stream {
  constructor(onEvent, onState) {
    this.onEvent = onEvent;
    this.onState = onState;
    this.lastId = null;
    this.failures = 0;
    this.hiding = 0;
    this.greeted = new Promise((done) => { this.greet = done; }); // for the first time
    document.addEventListener("visibilitychange", () => this.#lookedAt());
  }

  /** Begin to listen, if nothing does. */
  open() {
    if (this.abort) return;
    this.abort = new AbortController();
    this.#listen(this.abort.signal);
  }

  /** Stop listening. */
  close() {
    this.abort?.abort();
    this.abort = null;
  }

  // A browser opens six connections to a service: pages in the background leave theirs to others.
  #lookedAt() {
    clearTimeout(this.hiding);
    if (document.hidden) {
      this.hiding = setTimeout(() => { this.close(); this.onState("paused"); }, HIDDEN_MS);
    } else if (this.wanted) {
      this.open();
    }
  }

  async #listen(signal) {
    this.wanted = true;
    while (!signal.aborted) {
      this.onState("connecting");
      try {
        await this.#readOnce(signal);
      } catch (error) {
        if (signal.aborted) return;
        if (error.status === 401) {
          this.close();
          return;
        }
        if (error.problem) this.onState(error.problem.wrong);
      }
      this.failures += 1;
      const pause = Math.min(SLOWEST_MS, 500 * 2 ** Math.min(this.failures, 8));
      await new Promise((done) => setTimeout(done, pause));
    }
  }

  async #readOnce(signal) {
    const headers = this.lastId ? { "Last-Event-ID": this.lastId } : {};
    const silent = new AbortController();
    const until = AbortSignal.any([signal, silent.signal]);
    const response = await reach("/stream", { headers, signal: until, cache: "no-store" });
    if (!response.ok) await read(response);
    const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
    let text = "";
    for (;;) {
      const timer = setTimeout(() => silent.abort(), SILENT_MS);
      const { value, done } = await reader.read().finally(() => clearTimeout(timer));
      if (done) return;
      text += value;
      const events = text.split("\n\n");
      text = events.pop();
      events.forEach((each) => this.#take(each));
    }
  }

  #take(text) {
    const fields = {};
    for (const line of text.split("\n")) {
      const colon = line.indexOf(": ");
      if (colon > 0) fields[line.slice(0, colon)] = line.slice(colon + 2);
    }
    if (!fields.data) return;
    if (fields.id) this.lastId = fields.id;
    if (fields.event === "hello") {
      this.failures = 0;
      this.onState("live");
      this.greet();
    }
    this.onEvent({ event: fields.event, ...JSON.parse(fields.data) });
  }
}
