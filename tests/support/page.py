"""The page in a real browser whose network is closed to all but the service."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import numpy as np
import plotly.graph_objects as go
import pytest
from starlette.requests import Request
from starlette.routing import Route
from tests.support.api import Service

from stagescope_service.api.requests import Answer

_AXE: Final = "axe_playwright_python"
_FREQUENCY: Final = ("serious", "critical")


@dataclasses.dataclass
class Visit:
    """A page that shows the service."""

    page: Any
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

    def problems(self) -> list[str]:
        """What axe-core finds wrong with the page that keeps somebody from using it."""
        found = importlib.util.find_spec(_AXE)
        if found is None or found.origin is None:
            pytest.skip("axe-core is not installed: pip install axe-playwright-python")
        # Evaluated by the browser's debugger, which no policy of the page forbids.
        self.page.evaluate(Path(found.origin).with_name("axe.min.js").read_text(encoding="utf-8"))
        result = self.page.evaluate("() => axe.run(document)")
        return [
            f"{each['id']} ({each['impact']}): {node['html'][:200]} {node['failureSummary']}"
            for each in result["violations"]
            if each["impact"] in _FREQUENCY
            for node in each["nodes"]
        ]


@contextlib.contextmanager
def visiting(
    browser: Any, live: Service, *, width: int = 1280, height: int = 900, scheme: str = "light"
) -> Iterator[Visit]:
    """Open the page of a service in a window of its own."""
    context = browser.new_context(
        viewport={"width": width, "height": height}, color_scheme=scheme, locale="en-GB"
    )
    try:
        found = Visit(context.new_page(), live.server.url)

        def only_the_service(route: Any) -> None:
            if route.request.url.startswith((live.server.url, "data:", "blob:")):
                route.continue_()
            else:
                found.foreign.append(route.request.url)
                route.abort()

        context.route("**/*", only_the_service)
        found.page.on("request", lambda request: found.requests.append(request.url))
        found.page.on("console", lambda message: found.messages.append(message.text))
        found.page.on("pageerror", lambda error: found.messages.append(str(error)))
        found.page.goto(live.server.url)
        yield found
    finally:
        context.close()


# --- what other parts of the service will answer ----------------------------------------------
def stand_in(live: Service) -> None:
    """Answer what the page asks for and this service does not have yet, by issue 13's contract.

    A route that the service has comes first, so that this does nothing once all are there.
    """
    routes = live.app.router.routes
    existing = {getattr(route, "path", "") for route in routes}
    if "/figures/{name}" not in existing:
        routes.append(Route("/figures/{name}", _figure(live)))
    if "/steps/{step}/samples" not in existing:
        routes.append(Route("/steps/{step}/samples", _samples))
        routes.append(Route("/steps/{step}/samples/{uid:path}", _sample))
        routes.append(Route("/steps/{step}/loss", _loss))
    if "/runs/{run}/diagnosis" not in existing:
        routes.append(Route("/runs/{run}/diagnosis", _diagnosis))


def _figure(live: Service) -> Any:
    def answer(request: Request) -> Answer:
        name, query = request.path_params["name"], request.query_params
        figure = go.Figure()
        if name == "overview":
            params = {"metric": "logprob_abs_diff/mean", "run": query["run"]}
            params |= {"from": query["from"]} if "from" in query else {}
            found = live.get("/series", **params)
            values = found["series"][0]["values"] if found["series"] else []
            figure.add_scatter(name="mean |d|", x=found["steps"], y=values)
        elif name == "rank-rounds":
            figure.add_heatmap(z=np.random.default_rng(0).random((16, 64)), showscale=True)
        else:
            figure.add_bar(name=name, x=[1, 2, 3, 4], y=[0.004, 0.008, 0.012, 0.016])
        figure.update_layout(
            height=300, paper_bgcolor="rgba(0,0,0,0)", plot_bgcolor="rgba(0,0,0,0)",
            margin={"t": 10, "l": 50, "r": 10, "b": 40},
        )  # fmt: skip
        drawing: dict[str, Any] = {"data": [], "layout": {}}
        drawing |= figure.to_plotly_json()
        drawing["layout"].pop("template", None)
        fields = {"run": query["run"], "attempt": 1, "step": None, "name": name, "note": None}
        return Answer({**fields, "title": f"Stand-in: {name}", "figure": drawing})

    return answer


def sample_columns(size: int) -> dict[str, Any]:
    """The columns of a sample of `size` tokens: eight rounds with environment tokens between."""
    random = np.random.default_rng(size)
    place = np.arange(size)
    each = max(size // 8, 1)
    has = place % each >= each // 8
    d = random.normal(0.0, 0.01, size) * (1 + 60 * (random.random(size) < 0.01))
    q = -random.exponential(0.8, size)
    words = [
        " the",
        " model",
        "(",
        " x",
        "_",
        "tokens",
        ")",
        " =",
        " 42",
        "\n",
        " sum",
        "。",
        " 数",
    ]
    fates = np.where(has, "trained", "environment").astype(object)
    fates[has & (place % 1000 < 330) & (place % 1000 > 300)] = "zero advantage"
    fates[has & (d > 0.25)] = "clipped high"
    fates[has & (d < -0.25)] = "clipped low"
    fates[has & (np.abs(d) > 0.6)] = "rejected"
    if size > 100:
        d[size // 3 : size // 3 + 2] = np.nan

    def column(values: Any) -> list[Any]:
        return [value if known else None for value, known in zip(values, has, strict=True)]

    sides = {"clipped high": "high", "clipped low": "low"}
    return {
        "sample_uid": "g40-0-0/1", "group_id": "g40-0-0",
        "positions": place.tolist(), "mask": has.astype(int).tolist(),
        "token_ids": random.integers(0, 150_000, size).tolist(),
        "texts": [words[at] for at in random.integers(0, len(words), size)], "texts_reason": None,
        "round": column((place // each).tolist()), "turn": None, "p_stream": "old_log_probs",
        "p": column((q + d).tolist()), "q": column(q.tolist()), "d": d.tolist(),
        "advantage": column(np.where(fates == "zero advantage", 0.0, 0.7).tolist()),
        "weight_raw": column(np.exp(d).tolist()),
        "weight": column(np.exp(np.minimum(d, 0.2)).tolist()),
        "clipped": [sides.get(fate) for fate in fates], "fate": fates.tolist(),
        "unrecorded": [], "notes": [],
    }  # fmt: skip


def _sample(request: Request) -> Answer:
    size = 32_768 if "long" in request.path_params["uid"] else 1536
    heading = {"run": request.query_params.get("run"), "attempt": 2, "step": 40}
    return Answer({**heading, **sample_columns(size)})


def _samples(request: Request) -> Answer:
    rows = [
        {
            "sample_uid": f"g36-{rank}-{row // 2}/{row % 2}", "group_id": f"g36-{rank}-{row // 2}",
            "role": "actor", "rank": rank, "row": row, "fragments": 1, "rounds": 4, "tokens": 384,
            "mean_abs": 0.01 * (rank + 1), "max_abs": 1.0 / (rank + 1), "nonfinite": 0,
            "reward": None if rank % 2 else 0.5,
        }
        for rank in range(8)
        for row in range(4)
    ]  # fmt: skip
    return Answer({"comparable": "comparable", "kept": True, "rows": rows, "next": None})


def _loss(request: Request) -> Answer:
    fates = {"trained": 9000, "clipped high": 300, "clipped low": 120, "zero advantage": 2000,
             "rejected": 40}  # fmt: skip
    total = sum(fates.values())
    rows = [
        {
            "fate": fate, "gradient": fate == "trained", "tokens": tokens,
            "share_of_tokens": tokens / total, "abs_diff_sum": 10.0 * (at + 1),
            "abs_diff_mean": 10.0 * (at + 1) / tokens, "share_of_mismatch": (at + 1) / 15,
        }
        for at, (fate, tokens) in enumerate(fates.items())
    ]  # fmt: skip
    note = "93.3% of the mismatch (sum of |p - q|) sits in tokens that no gradient sees"
    return Answer({"note": note, "unrecorded": [], "notes": [], "rows": rows, "next": None})


def _diagnosis(request: Request) -> Answer:
    common = {"since_step": 21, "where": "rank 3 of actor", "figure": None, "record": None}
    rows = [
        {
            **common, "rule": "rank_apart", "family": "mismatch", "title": "One rank is apart",
            "verdict": "found", "sure": 0.9, "meaning": "its device, weights or data are others",
            "for": ["rank 3: mean |d| 0.0434 nat, the others 0.0109"],
            "against": ["its streams are comparable"],
            "next": ["stagescope capture --ranks 3 --steps next"], "sources": ["verl#1234"],
            "figure": f"/figures/rank-rounds?run={request.path_params['run']}&step=30",
        },
        {
            **common, "rule": "entropy_collapse", "family": "reward", "title": "Entropy collapses",
            "verdict": "not measured", "sure": 0.0, "meaning": "", "for": [], "against": [],
            "next": [], "sources": [], "record": "stage.log(entropy=...)",
        },
    ]  # fmt: skip
    parts = [{"name": "noise floor", "share": None, "text": "not recorded", "counted": True},
             {"name": "unexplained", "share": 1.0, "text": "the rest", "counted": True},
    ]  # fmt: skip
    return Answer(
        {
            "run": request.path_params["run"], "attempt": None, "steps": 40, "measured": 40,
            "text": "1 of 2 symptoms found, 1 not measured", "measured_step": 40,
            "mismatch": parts, "rows": rows, "next": None,
        }
    )  # fmt: skip
