// The search adds `*` to every word, so "what is a round" would find whatever begins with "a".
// It gets the telling words of a question alone, without marks and without a plural's s.
const SMALL = new Set(
  ("a about all am an and are as at be been but by can did do does for from get had has have how i " +
   "if in into is it its me my of on or our see should so than that the their them then there they " +
   "this to use using want was we were what when where which while who whom why will with work works would you your").split(" "),
);

function telling(question) {
  if (question.includes('"')) return question;
  const asked = question.replace(/^\s*what (does|do) (.*\S) mean\W*$/i, "$2");
  const words = asked.replace(/[?!.,;*]+(?=\s|$)/g, "").split(/\s+/).filter(Boolean);
  const kept = words.filter((word) => !SMALL.has(word.toLowerCase()));
  return (kept.length ? kept : words).map((word) => word.replace(/([a-z]{3}[^su\W])s$/, "$1")).join(" ");
}

const send = Worker.prototype.postMessage;
Worker.prototype.postMessage = function (message, ...rest) {
  const isQuery = message?.type === 2 && typeof message.data === "string";
  return send.call(this, isQuery ? { ...message, data: telling(message.data) } : message, ...rest);
};
