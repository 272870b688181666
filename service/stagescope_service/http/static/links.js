// Links to what rows of an answer are about.

import { address, ofRank, ofStep } from "./address.js";
import { gap, h } from "./dom.js";

/** To a step; "" where a row is of none. */
export const toStep = (run, { step, attempt }, text = step) =>
  (step === null ? "" : h("a", { href: ofStep(run, step, attempt) }, text));

/** To a rank in a step; a gap where it is not known. */
export const toRank = (run, { step, attempt, role, rank }) => (rank === null ? gap("its process is not known")
  : h("a", { href: ofRank(run, step, attempt, role, rank) }, `${role} ${rank}`));

/** To the form of a capture, whose fields may be given. */
export const toCapture = (run, fields = {}, text = "Request a capture") =>
  h("a.operates", { href: address(["runs", run, "captures", "new"], fields) }, text);
