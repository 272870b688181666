// The API's documentation: Swagger UI on the service's own document, with the login of the page.

const answer = await fetch("openapi.json", { credentials: "same-origin" });
const place = document.getElementById("api");
if (answer.status === 401) {
  const link = Object.assign(document.createElement("a"), { href: "./", textContent: "Log in" });
  place.replaceChildren(link, " on the page first, then come back: the document needs a token.");
} else {
  // Not the validator's badge: it would be asked of another host.
  window.SwaggerUIBundle({
    spec: await answer.json(), domNode: place, validatorUrl: null, docExpansion: "list",
    defaultModelsExpandDepth: 0, persistAuthorization: false,
  });
}
