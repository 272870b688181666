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
    h("p", {}, bundle ? `This is ${bundle}, a read-only archive, shown to those who hold its token.`
      : "The numbers of trainings are shown to those who hold a token of this service."),
    h("label", { for: "token" }, "Token"),
    form({}, enter,
      h("input#token", {
        type: "password", name: "token", autocomplete: "off", required: true, size: 48,
        "aria-describedby": "token-where",
      }), h("button.main", {}, "Log in")),
    h("div#token-where", {}, bundle
      ? h("p", {}, "Its token stands in the terminal where ", h("code", {}, "stagescope attach"),
        " opened it, in the line that begins with ", h("code", {}, "token"),
        "; it holds until that command ends.")
      : [h("p", {}, "Paste the content of ", h("code", {}, "read.token"), " to look, or of ",
        h("code", {}, "operate.token"), " to request captures too. Both files are in the service's home, "
        + "on the machine where it was started; without another STAGESCOPE_HOME that is:"),
      h("pre", {}, "cat ~/.stagescope/read.token")],
      h("p.quiet", {}, "The token becomes a cookie of this service alone, which no script can read, "
        + "for a week. It is never part of an address.")));
}
