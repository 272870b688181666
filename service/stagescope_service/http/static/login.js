// The login: a token is traded for a cookie that scripts cannot read.

import { form, h } from "./dom.js";
import { send } from "./service.js";

/**
 * What a visitor sees who is not logged in.
 * @param bundle what is shown in place of a service: `the bundle x.tar.gz`; null: it is a service.
 */
export function login(done, bundle) {
  const enter = async ({ token }) => {
    token.select();
    await send("POST", "/login", { token: token.value.trim() });
    token.value = "";
    done();
  };
  return h("div#login", {}, h("h1", {}, "Log in"),
    h("p", {}, bundle ? `This is ${bundle}, a read-only archive. To see it you need its access token.`
      : "To see the trainings of this service you need an access token."),
    h("label", { for: "token" }, "Access token"),
    form({}, enter,
      h("input#token", {
        type: "password", name: "token", autocomplete: "off", required: true, size: 48,
        "aria-describedby": "token-where",
      }), h("button.main", {}, "Log in")),
    h("div#token-where", {}, bundle
      ? h("p", {}, "The terminal where ", h("code", {}, "stagescope attach"),
        " opened it shows the token, in the line that begins with ", h("code", {}, "token"),
        ". It is valid until that command ends.")
      : [h("p", {}, "Paste the content of ", h("code", {}, "read.token"), " to look, or of ",
        h("code", {}, "operate.token"), " to request captures, too. Both files are on the machine where the service was started, "
        + "in its home. If ", h("code", {}, "STAGESCOPE_HOME"), " is not set, this shows the first one:"),
      h("pre", {}, "cat ~/.stagescope/read.token")],
      h("p.quiet", {}, "The page keeps you logged in for a week, with a cookie for this service alone that "
        + "no script can read. The token is never part of an address.")));
}
