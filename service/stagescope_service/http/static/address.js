// Addresses of views: all state of a view is in the part of the URL after #.

/** The event by which a view asks to be shown anew, at the same address. */
export const AGAIN = "stagescope-again";

/** The address of a view: address(["runs", run], { attempt }). */
export function address(parts, query = {}) {
  const chosen = Object.entries(query).filter(([, value]) =>
    value !== null && value !== undefined && value !== "");
  const text = new URLSearchParams(chosen).toString();
  return `#/${parts.map(encodeURIComponent).join("/")}${text ? `?${text}` : ""}`;
}

/** What an address names: { parts, query }. */
export function parse(hash) {
  const [path, text = ""] = hash.replace(/^#\/?/, "").split(/\?(.*)/s);
  let parts = [];
  try {
    parts = path.split("/").filter(Boolean).map(decodeURIComponent);
  } catch { /* an address that no view made */ }
  return { parts, query: Object.fromEntries(new URLSearchParams(text)) };
}

/** Change parts of the query of the view that is shown, without showing it anew. */
export function note(changes) {
  const { parts, query } = parse(location.hash);
  history.replaceState(null, "", address(parts, { ...query, ...changes }));
}

/** Go to the same view with other parts of its query. */
export function choose(changes) {
  const { parts, query } = parse(location.hash);
  location.hash = address(parts, { ...query, ...changes });
}

const shown = new Map(); // stored names of runs -> the names that people gave them
/** Remember how runs of GET /runs are shown. */
export const noteNames = (rows) => rows.forEach((row) => shown.set(row.run, row.display_name || row.run));
/** The name of a run for people; its stored name is in addresses and commands. */
export const nameOf = (run) => shown.get(run) ?? run;

export const ofRun = (run, ...rest) => address(["runs", run, ...rest]);
export const ofStep = (run, step, attempt, ...rest) =>
  address(["runs", run, "steps", step, ...rest], { attempt });
export const ofRank = (run, step, attempt, role, rank) =>
  ofStep(run, step, attempt, "ranks", role, rank);
/** Of a sample: by its uid, or by the rank and row that hold it. */
export const ofSample = (run, step, attempt, { sample_uid: uid, role, rank, row, at }) =>
  address(["runs", run, "steps", step, "samples", uid || "-"],
    { attempt, role, rank, row: uid ? null : row, at });
