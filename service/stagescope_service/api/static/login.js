// The login: a token is traded for a cookie that scripts cannot read.

import { h, nodes, patch, problem } from "./dom.js";
import { send } from "./service.js";

/** What a visitor sees who is not logged in. */
export function login(done) {
  const input = h("input#token", {
    type: "password", name: "token", autocomplete: "off", required: true, size: 48,
    "aria-describedby": "token-where",
  });
  const failed = h("div", { role: "alert" });
  const enter = async (event) => {
    event.preventDefault();
    try {
      await send("POST", "/login", { token: input.value.trim() });
    } catch (error) {
      patch(failed, nodes(problem(error)));
      input.select();
      return;
    }
    input.value = "";
    done();
  };
  return h("form#login", { onsubmit: enter },
    h("h1", {}, "Log in"),
    h("p", {}, "The numbers of trainings are shown to those who hold a token of this service."),
    h("label", { for: "token" }, "Token"),
    h("div.row", {}, input, h("button.main", { type: "submit" }, "Log in")),
    failed,
    h("div#token-where", {},
      h("p", {}, "Paste the content of ", h("code", {}, "read.token"), " to look, or of ",
        h("code", {}, "operate.token"), " to arm captures too. Both files are in the service's home, "
        + "on the machine where it was started:"),
      h("pre", {}, "cat ${STAGESCOPE_HOME:-~/.stagescope}/read.token"),
      h("p.quiet", {}, "The token becomes a cookie of this service alone, which no script can read, "
        + "for a week. It is never part of an address.")));
}
