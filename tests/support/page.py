"""The page in a real browser whose network is closed to all but the service."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from tests.support.api import Service
from tests.support.browser import Scheme, axe_problems
from tests.support.stores import eventually

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page, Route


@dataclasses.dataclass
class Visit:
    """A page that shows the service."""

    page: Page
    url: str
    requests: list[str] = dataclasses.field(default_factory=list)
    """Every URL that was asked for."""
    foreign: list[str] = dataclasses.field(default_factory=list)
    """Those of other hosts: they were refused."""
    messages: list[str] = dataclasses.field(default_factory=list)
    """What the console says, and errors that no script caught."""

    def go(self, address: str) -> None:
        """Show the view of an address, which begins with #/."""
        if self.page.url.startswith(self.url):
            self.page.evaluate("address => { location.hash = address }", address)
        else:
            self.page.goto(self.url + "/" + address)
        self.wait_until("document.querySelector('#main').dataset.address === location.hash")
        self.settle()

    def log_in(self, token: str) -> None:
        """Log in with a token, as a person does."""
        self.page.fill("#token", token)
        self.page.click("#login button")
        self.page.wait_for_selector("#login", state="detached")

    def settle(self) -> None:
        """Wait until everything in sight has loaded and is drawn."""
        self.wait_until(
            "document.querySelector('main h1') && "
            "[...document.querySelectorAll('main [aria-busy=true]')].every(e => {"
            "const { top, bottom } = e.getBoundingClientRect();"
            "return bottom < -300 || top > innerHeight + 300 })"
        )

    def wait_until(self, condition: str, seconds: float = 30.0) -> None:
        """Wait, frame by frame, until an expression is true.

        Playwright's wait_for_function evaluates inside the page, whose policy allows no eval.
        """
        is_true = self.page.evaluate(
            "seconds => new Promise(done => { const until = performance.now() + 1000 * seconds;"
            f"const look = () => ({condition}) ? done(true) : performance.now() > until"
            " ? done(false) : requestAnimationFrame(look); look(); })",
            seconds,
        )
        assert is_true, f"{condition} is not true after {seconds} s"

    def run_until(self, condition: Callable[[], object]) -> None:
        """Let the page run until the test sees that `condition` holds."""

        def holds() -> object:
            self.page.wait_for_timeout(20)
            return condition()

        eventually(holds)

    def problems(self) -> list[str]:
        """What axe-core finds wrong with the page that keeps somebody from using it."""
        return axe_problems(self.page)


@contextlib.contextmanager
def visiting(
    browser: Browser,
    live: Service,
    *,
    width: int = 1280,
    height: int = 900,
    scheme: Scheme = "light",
    url: str | None = None,
) -> Iterator[Visit]:
    """Open the page of a service in a window of its own; `url`: where a proxy serves it."""
    context = browser.new_context(
        viewport={"width": width, "height": height}, color_scheme=scheme, locale="en-GB",
        ignore_https_errors=url is not None,  # the proxy of a test signs its certificate itself
    )  # fmt: skip
    try:
        found = Visit(context.new_page(), url or live.server.url)

        def only_the_service(route: Route) -> None:
            if route.request.url.startswith((found.url, "data:", "blob:")):
                route.continue_()
            else:
                found.foreign.append(route.request.url)
                route.abort()

        context.route("**/*", only_the_service)
        found.page.on("request", lambda request: found.requests.append(request.url))
        found.page.on("console", lambda message: found.messages.append(message.text))
        found.page.on("pageerror", lambda error: found.messages.append(str(error)))
        found.page.goto(f"{found.url}/")
        yield found
    finally:
        context.close()
