// Numbers, times and sizes as text: four significant digits, a unit, and never 0 for what is
// not known. Answers spell numbers that are not finite "nan", "inf" and "-inf".

const SPELLED = { nan: "NaN", inf: "∞", "-inf": "−∞" };
const DIGITS = 4;
const LEAST_PERCENT = 1e-6;
const LEAST_FIXED = 1e-4; // in a column: 0.000123 beside 0.01234 reads better than powers of ten
const LEAST_LARGE = 1e6;

/** Whether an answer's number is there and finite. */
export const isFinite = (value) => typeof value === "number" && Number.isFinite(value);

/** A number with four significant digits; null where there is none. */
export function number(value) {
  if (value === null || value === undefined) return null;
  if (typeof value === "string") return SPELLED[value] ?? value;
  if (!Number.isFinite(value)) return Number.isNaN(value) ? "NaN" : value > 0 ? "∞" : "−∞";
  if (value === 0) return "0";
  const size = Math.abs(value);
  return minus(size < 1e-3 || size >= LEAST_LARGE ? exponential(value) : fixed(value));
}

/** One format for the numbers of a column: four significant digits, all fixed or all scientific. */
export function columnFormat(values) {
  const sizes = values.filter(isFinite).map(Math.abs).filter((size) => size > 0);
  const isFixed = sizes.every((size) => size >= LEAST_FIXED && size < LEAST_LARGE);
  return (value) => !isFinite(value) || value === 0 ? number(value)
    : minus(isFixed ? fixed(value) : exponential(value));
}

/** A count: all digits, in groups of three. */
export const count = (value) =>
  value === null || value === undefined ? null
  : typeof value === "number" && Number.isFinite(value) ? minus(grouped(value))
  : number(value);

/** A share of 1 as per cent. */
export function share(value) {
  if (!isFinite(value)) return number(value);
  const percent = 100 * value;
  const size = Math.abs(percent);
  if (size > 0 && size < LEAST_PERCENT) return `below ${LEAST_PERCENT.toFixed(6)} %`;
  if (size > 0 && size < 0.01) {
    // Two digits, and no power of ten: those are read as larger than they are.
    const decimals = 1 - Math.floor(Math.log10(size));
    return `${minus(percent.toFixed(decimals).replace(/0+$/, ""))} %`;
  }
  return `${minus(String(Number(percent.toPrecision(3))))} %`;
}

/** Seconds as the two largest units that say something. */
export function seconds(value) {
  if (!isFinite(value)) return number(value);
  const size = Math.abs(value);
  if (size < 1e-3) return `${number(value * 1e6)} µs`;
  if (size < 1) return `${Number((value * 1e3).toPrecision(3))} ms`;
  if (size < 60) return `${Number(value.toPrecision(3))} s`;
  if (size < 3600) return `${Math.floor(value / 60)} min ${pad(Math.floor(value % 60))} s`;
  if (size < 86400) return `${Math.floor(value / 3600)} h ${pad(Math.floor((value % 3600) / 60))} min`;
  return `${Math.floor(value / 86400)} d ${Math.floor((value % 86400) / 3600)} h`;
}

/** Bytes in units of 1024. */
export function bytes(value) {
  if (!isFinite(value)) return number(value);
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let at = 0;
  for (; Math.abs(value) >= 1024 && at < units.length - 1; at++) value /= 1024;
  return `${at === 0 ? value : Number(value.toPrecision(3))} ${units[at]}`;
}

/** Unix seconds as local date and time: 2026-11-29 08:30:00, as Swedes write it. */
export const clockTime = (wall) => new Date(wall * 1000).toLocaleString("sv-SE");

/** How long ago Unix seconds were. */
export function ago(wall, now = Date.now() / 1000) {
  const passed = now - wall;
  if (passed < 0) return "just now";
  if (passed < 60) return `${Math.floor(passed)} s ago`;
  if (passed < 3600) return `${Math.floor(passed / 60)} min ago`;
  if (passed < 86400) return `${Math.floor(passed / 3600)} h ago`;
  return `${Math.floor(passed / 86400)} d ago`;
}

/** Sorted numbers as ranges: "0-3, 7". */
export function ranges(numbers, most = 8) {
  const found = [];
  for (const each of [...numbers].sort((a, b) => a - b)) {
    const last = found.at(-1);
    if (last && each === last[1] + 1) last[1] = each;
    else if (!last || each !== last[1]) found.push([each, each]);
  }
  const texts = found.slice(0, most).map(([from, to]) => (from === to ? `${from}` : `${from}-${to}`));
  const left = found.slice(most).reduce((sum, [from, to]) => sum + to - from + 1, 0);
  return texts.join(", ") + (left ? ` and ${left} more` : "");
}

/** Ranks by their roles: "actor 0-1; critic 3". */
export const byRole = (ranks) => [...Map.groupBy(ranks, ({ role }) => role)]
  .map(([role, own]) => `${role} ${ranges(own.map(({ rank }) => rank))}`).join("; ");

const PARTS = ["occurrence", "epoch", "mini-batch", "micro-batch"];

/** (row) -> its `part`, "0.1.3.0", as "epoch 1, mini-batch 3": what is alike in all rows is left out. */
export function partOf(rows) {
  const all = rows.map(({ part }) => (part ?? "").split("."));
  const told = PARTS.map((_, at) => new Set(all.map((each) => each[at])).size > 1);
  return ({ part }) => (part ?? "").split(".").map((each, at) => told[at] && `${PARTS[at]} ${each}`)
    .filter(Boolean).join(", ");
}

/** "1 rank", "2 ranks". */
export const plural = (size, noun) => `${count(size)} ${noun}${size === 1 ? "" : "s"}`;

const pad = (value) => String(value).padStart(2, "0");
const minus = (text) => text.replace(/^-/, "−");

const GROUPS = new Intl.NumberFormat("en", { useGrouping: "min2", maximumFractionDigits: 20 });
const grouped = (value) => GROUPS.format(value).replaceAll(",", "\u202f");

const fixed = (value) =>
  Math.abs(value) >= 10 ** (DIGITS - 1) ? grouped(Math.round(value)) : value.toPrecision(DIGITS);

function exponential(value) {
  const [mantissa, power] = value.toExponential(DIGITS - 1).split("e");
  return `${mantissa}e${Number(power)}`.replace("e-", "e−");
}
