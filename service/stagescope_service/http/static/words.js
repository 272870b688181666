// The words of labels that the glossary explains (docs/glossary.md, docs/field-words.md), and the
// element that shows a meaning to pointer, finger and keyboard.

import { h } from "./preact.mjs";

const MEANINGS = {
  "|d|": "The mismatch of a token: how far the trainer's and the engine's log-prob are apart, in nats.",
  k1: "An estimate of the KL divergence of engine and trainer: the mean of q − p.",
  k3: "An estimate of the KL divergence of engine and trainer: the mean of e^d − 1 − d. It is never below 0.",
  verdict: "The short answer of a check. Two streams are exact, comparable, suspect, not measured or unknown.",
  attempt: "One start of a run's training: 1, 2, …",
  superseded: "Replaced by later work: a later attempt did the step again. It stays readable.",
  round: "A contiguous run of model tokens in a sample, counted from 0. Tool tokens divide rounds.",
  staleness: "The trainer's policy version minus the token's own. Look at 0 to see the mismatch alone.",
};
const FORMS = { attempts: "attempt", rounds: "round", repeated: "superseded" };
const WORD = /\|d\||\b(?:k1|k3|verdict|attempts?|superseded|repeated|rounds?|staleness)\b/;
const GAP = 6; // pixels between a word and its meaning, and to the window's edge

/** A label as what `h` takes as children: its first word of the glossary shows its meaning. */
export function explained(label) {
  const found = typeof label === "string" ? WORD.exec(label) : null;
  if (!found) return label;
  const [word] = found;
  return [label.slice(0, found.index),
    h("abbr", { "data-meaning": MEANINGS[FORMS[word] ?? word], tabindex: 0, "aria-describedby": "meaning" }, word),
    label.slice(found.index + word.length)];
}

// One element for all words, at the end of the body: a table that scrolls would cut it off.
const meaning = document.createElement("div");
meaning.id = "meaning";
meaning.hidden = true;
meaning.setAttribute("role", "tooltip");
document.body.append(meaning);

function show(word) {
  meaning.textContent = word.dataset.meaning;
  meaning.hidden = false;
  const { left, top, bottom } = word.getBoundingClientRect();
  const [width, height] = [meaning.offsetWidth, meaning.offsetHeight];
  const isBelow = bottom + GAP + height < innerHeight;
  meaning.style.left = `${Math.max(GAP, Math.min(left, innerWidth - width - GAP))}px`;
  meaning.style.top = `${isBelow ? bottom + GAP : top - GAP - height}px`;
}

const hide = () => { meaning.hidden = true; };
const wordAt = ({ target }) => target.closest?.("abbr[data-meaning]");

for (const event of ["pointerover", "focusin"]) {
  addEventListener(event, (each) => (wordAt(each) ? show(wordAt(each)) : hide()));
}
for (const event of ["scroll", "focusout", "hashchange"]) addEventListener(event, hide, true);
addEventListener("keydown", ({ key }) => { if (key === "Escape") hide(); });
