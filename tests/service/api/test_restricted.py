"""Tokens that see some runs only: nothing of another run reaches them, by any route."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.routing import Route
from tests.support.api import Rank, Service, service
from tests.support.measure import payload
from tests.support.stores import eventually

from stagescope.wire import schema
from stagescope_service.api import restricted
from stagescope_service.api.auth import OPEN_FOLDER, OPEN_PATHS
from stagescope_service.api.token_file import Token, add_token

LOG_PROB = "actor_compute_log_prob"
MARK = "xyzzy"
"""Is in everything that the hidden run is called by or holds."""
HIDDEN = f"hidden-{MARK}"
SEEN = "seen-1"
ASKED: dict[str, object] = {
    "step": "5", "attempt": 1, "role": f"actor-{MARK}", "rank": 0, "stage": LOG_PROB,
    "sample_uid": f"{MARK}-0", "name": f"engine-{MARK}", "version": "1", "rule": "any",
    "metric": "counts/tokens", "a": f"{HIDDEN}@1:5", "b": f"{HIDDEN}@1", "names": "counts/tokens",
    "operator": "any", "stack_id": 1, "index": 0, "row": 0, "round": 0, "capture_id": "any",
}  # fmt: skip
"""What requests name of the hidden run."""
BODIES: Mapping[str, Mapping[str, object]] = {
    "/captures": {"stages": "all", "steps": [7], "keep": ["old_log_probs"]},
    "/engines": {"url": "http://127.0.0.1:9", "name": "new"},
    "/stacks": {"wait": 0},
    "/comparisons": {"a": f"{HIDDEN}@1:5", "b": f"{HIDDEN}@1:6"},
    "/operators/divergence": {"step": 5, "b": {"step": 6}},
    "/operators/tensors": {"step": 5, "b": {"step": 6}},
    "/triggers/test": {},
    "/drain": {"timeout": 0},
}
NOT_BY_RUN = {
    ("get", "/audit"), ("get", "/triggers"), ("put", "/triggers"),
    ("post", "/triggers/{rule}/test"),
}  # fmt: skip
"""Routes about every run, which are refused."""


def of_hidden(size: int = 4) -> Any:
    handed = payload(size)
    handed["strings"] = {"sample_ids": [f"{MARK}-{row}" for row in range(size)]}
    return handed


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    with service(tmp_path_factory.mktemp("home")) as running:
        running.engine.keep("trajectories", "old_log_probs")
        for run, mark in ((SEEN, "plain"), (HIDDEN, MARK)):  # the hidden one trained last
            rank = Rank(
                running, run=run, role=f"actor-{mark}", world_size=1, key=f"key-{mark}",
                start=1_000.0 if run == SEEN else 2_000.0,
                settings={"engine": f"engine-{mark}"}, host=f"host-{mark}",
            )  # fmt: skip
            for step in (5, 6):
                handed = of_hidden() if run == HIDDEN else payload()
                rank.stage(LOG_PROB, step, handed, scalars={f"loss_{mark}": 1.0})
            rank.say("refused", what="record", message=f"no such tensor {mark}", step=5)
            running.operate.put("/steps/5/pin", params={"run": run})
            spec = {"stages": "all", "steps": [900], "keep": ["old_log_probs"], "run": run}
            made = running.operate.post("/captures", json=spec)
            assert made.status_code == 201, made.text
            if run == HIDDEN:
                ASKED["capture_id"] = made.json()["capture_id"]
            engine = {"url": f"http://host-{mark}:9", "name": f"engine-{mark}", "run": run}
            assert running.operate.post("/engines", json=engine).status_code == 200
        found = running.get("/findings", run=HIDDEN)["rows"]
        ASKED["finding_id"] = found[0]["finding_id"]
        yield running


def await_token(client: httpx.Client) -> None:
    """Wait until the service knows a new token."""
    eventually(lambda: client.get("/whoami").json()["grade"] is not None, 10.0)


@pytest.fixture(scope="module")
def clients(shared: Service) -> dict[str, httpx.Client]:
    home = shared.settings.home
    found = {}
    for role in ("read", "operate"):
        text = add_token(home, Token(role, role, runs=("seen-*",)))
        found[role] = shared.client(text)
    for client in found.values():  # the service looks at the file once a second
        await_token(client)
    assert found["read"].get("/whoami").json()["runs"] == ["seen-*"]
    return found


def operations(shared: Service) -> Iterator[tuple[str, str, dict[str, Any]]]:
    for path, methods in shared.get("/openapi.json")["paths"].items():
        for method, operation in methods.items():
            yield method, path, operation


def ask(
    client: httpx.Client, method: str, path: str, operation: dict[str, Any], run: str | None
) -> httpx.Response:
    """Ask an operation about the hidden run's things, of a run or of the default one."""
    query: dict[str, Any] = {}
    for parameter in operation.get("parameters", []):
        name = parameter["name"]
        value: object = None
        if name == "run":
            value = run
        elif parameter.get("required") or (run and name in ("attempt", "capture_id")):
            value = ASKED.get(name, "1")
        if parameter["in"] == "path":
            path = path.replace(f"{{{name}}}", str(value if value is not None else HIDDEN))
        elif parameter["in"] == "query" and value is not None:
            query[name] = value
    body = None
    if "requestBody" in operation:
        body = {**BODIES.get(path, {}), **({"run": run} if run else {})}
    if path in ("/events", "/poll"):
        sender = schema.Sender(f"{run}-key-{MARK}-actor-{MARK}-0", run or HIDDEN, None, "r", 0)
        rest: dict[str, Any] = {"events": []} if path == "/events" else {"revision": 0, "wait": 0}
        body = {"sender": sender.wire(), **rest}
    return client.request(method, path, params=query, json=body, timeout=60)


def said(answer: httpx.Response) -> str:
    """The body without what the request itself named, which a problem repeats."""
    text = answer.text
    if answer.is_success:
        return text
    for named in sorted((HIDDEN, *map(str, ASKED.values())), key=len, reverse=True):
        text = text.replace(named, "")
    return text


@pytest.mark.parametrize("role", ["read", "operate"])
@pytest.mark.parametrize("run", [None, HIDDEN, SEEN])
def test_nothing_of_another_run_is_answered_by_any_route(
    shared: Service, clients: dict[str, httpx.Client], role: str, run: str | None
) -> None:
    asked, answered = 0, 0
    before = shared.engine.audit
    for method, path, operation in operations(shared):
        if path in ("/stream", "/login", "/logout"):
            continue
        if run == SEEN and method != "get":
            continue  # it may
        answer = ask(clients[role], method, path, operation, run)
        where = (method, path, run, answer.status_code, answer.text[:500])
        asked += 1
        answered += answer.is_success
        assert answer.status_code < 500 or answer.status_code == 503, where
        assert MARK not in said(answer), where
        if (method, path) in NOT_BY_RUN:
            assert answer.status_code == 403, where
        parameters = {each["name"] for each in operation.get("parameters", [])}
        if run == HIDDEN and ("run" in parameters or method != "get"):
            assert answer.status_code in (401, 403, 404, 409, 422), where
    assert asked > 70 or run == SEEN
    assert answered > 20 or run == HIDDEN
    by_others = [each for each in shared.engine.audit[len(before) :] if "token " in each[0]]
    assert not [each for each in by_others if run == HIDDEN]


def test_the_same_requests_find_the_hidden_run_with_another_token(shared: Service) -> None:
    """The test above would pass as well where nothing of it could be asked for."""
    found = set()
    for method, path, operation in operations(shared):
        if method == "get" and path not in ("/stream", "/whoami"):
            answer = ask(shared.operate, method, path, operation, HIDDEN)
            if answer.is_success and MARK in answer.text:
                found.add(path)
    assert {
        "/runs", "/metrics", "/captures", "/captures/{capture_id}", "/plan", "/engines",
        "/engines/{name}", "/findings", "/findings/{finding_id}", "/steps", "/triggers",
        "/steps/{step}/metrics", "/steps/{step}/kept", "/steps/{step}/scalars",
        "/runs/{run}/metrics", "/runs/{run}/report", "/runs/{run}/attempts",
        "/runs/{run}/diagnosis", "/steps/{step}/samples",
    } <= found  # fmt: skip


def test_the_run_that_it_may_see_is_all_there(
    shared: Service, clients: dict[str, httpx.Client]
) -> None:
    """What it gets of that run is what others get."""
    same, own = 0, {**ASKED, "role": "actor-plain", "name": "engine-plain"}
    own |= {"a": f"{SEEN}@1:5", "b": f"{SEEN}@1", "sample_uid": "sample-0"}
    own["capture_id"] = shared.get("/captures", run=SEEN)["rows"][0]["capture_id"]
    own["finding_id"] = shared.get("/findings", run=SEEN)["rows"][0]["finding_id"]
    leaves_out = {"/runs", "/plan", "/captures", "/engines", "/metrics", "/status", "/whoami"}
    for method, path, operation in operations(shared):
        if method != "get" or path in {*leaves_out, "/stream"} or ("get", path) in NOT_BY_RUN:
            continue
        with pytest.MonkeyPatch.context() as patched:
            for name, value in own.items():
                patched.setitem(ASKED, name, value)
            answers = [
                ask(client, method, path, operation, SEEN)
                for client in (shared.read, clients["read"])
            ]
        assert answers[0].status_code == answers[1].status_code, path
        if answers[0].headers["content-type"] == "application/json":
            whole, seen = ({**each.json(), "also_live": [], "wall": 0} for each in answers)
            if answers[0].is_success and path not in ("/runs/{run}/report",):
                assert whole == seen, path
                same += 1
    assert same > 35


def test_without_a_run_it_gets_its_own(shared: Service, clients: dict[str, httpx.Client]) -> None:
    assert shared.read.get("/steps/5/metrics").json()["run"] == HIDDEN
    assert clients["read"].get("/steps/5/metrics").json()["run"] == SEEN
    assert [row["run"] for row in clients["read"].get("/runs").json()["rows"]] == [SEEN]


def test_it_changes_its_own_run(shared: Service, clients: dict[str, httpx.Client]) -> None:
    client = clients["operate"]
    spec = {"stages": "all", "steps": [800], "keep": ["old_log_probs"]}
    made = client.post("/captures", json=spec)
    assert made.status_code == 201, made.text
    assert made.json()["run"] == SEEN
    assert client.delete(f"/captures/{made.json()['capture_id']}").status_code == 200
    assert client.put("/steps/6/pin", params={"run": SEEN}).status_code == 200
    engine = {"url": "http://127.0.0.1:9", "name": "own", "run": SEEN}
    assert client.post("/engines", json=engine).status_code == 200
    assert client.delete("/engines/own").status_code == 200
    new = schema.Sender("new-process", "seen-2", None, "actor", 0, started=1.0)
    body = {"sender": new.wire(), "events": []}
    assert client.post("/events", json=body).status_code == 200


@pytest.mark.parametrize(
    ("method", "path", "body"),
    [
        ("POST", "/captures", {**BODIES["/captures"], "run": SEEN, "data_dir": "DATA"}),
        ("POST", "/captures", {**BODIES["/captures"], "run": SEEN, "config_path": "DATA/x"}),
        ("POST", "/captures", {**BODIES["/captures"], "run": HIDDEN}),
        ("POST", "/comparisons", {"a": {"directory": "DATA"}, "b": f"{SEEN}@1:5"}),
        ("POST", "/engines", {"url": "http://127.0.0.1:9", "name": f"engine-{MARK}", "run": SEEN}),
        ("POST", "/engines", {"url": "http://127.0.0.1:9", "name": "of-none"}),
        ("POST", "/drain", {"run": None, "timeout": 0}),
    ],
)
def test_what_may_reach_another_run_is_refused(
    shared: Service,
    clients: dict[str, httpx.Client],
    method: str,
    path: str,
    body: dict[str, object],
) -> None:
    data = str(shared.settings.data_path)

    def placed(value: Any) -> Any:
        if isinstance(value, dict):
            return {name: placed(each) for name, each in value.items()}
        return value.replace("DATA", data) if isinstance(value, str) else value

    answer = clients["operate"].request(method, path, json=placed(body))
    assert answer.status_code == 403, answer.text


@pytest.mark.parametrize("path", ["/events", "/poll"])
def test_a_process_of_another_run_is_not_spoken_for(
    shared: Service, clients: dict[str, httpx.Client], path: str
) -> None:
    incarnation = f"{HIDDEN}-key-{MARK}-actor-{MARK}-0"
    sender = schema.Sender(incarnation, SEEN, None, "actor", 0, started=1.0)
    rest: dict[str, Any] = {"events": []} if path == "/events" else {"revision": 0, "wait": 0}
    answer = clients["operate"].post(path, json={"sender": sender.wire(), **rest})
    assert answer.status_code == 403, answer.text


def test_the_stream_has_its_runs_alone(shared: Service, clients: dict[str, httpx.Client]) -> None:
    with clients["read"].stream("GET", "/stream", timeout=30) as answer:
        lines = answer.iter_lines()
        while not next(lines).startswith("data"):
            pass
        ranks = {
            run: Rank(shared, run=run, key=f"k-{run}", world_size=1, start=3_000.0)
            for run in (HIDDEN, SEEN)
        }
        for rank in ranks.values():
            rank.stage(LOG_PROB, 7)
        heard: list[str] = []
        while not any(SEEN in line and '"step":7' in line for line in heard):
            heard.append(next(lines))
    assert MARK not in "".join(heard)
    refused = clients["read"].get("/stream", params={"run": HIDDEN})
    assert refused.status_code == 404


def test_a_route_that_nobody_thought_of_is_refused(tmp_path: Path) -> None:
    with service(tmp_path, recorded=False) as running:
        running.app.add_api_route("/secrets", lambda: {"secret": MARK})
        add = {"runs": ("seen-*",)}
        client = running.client(add_token(tmp_path, Token("ada", "operate", **add)))  # type: ignore[arg-type]
        await_token(client)
        assert running.read.get("/secrets").status_code == 200
        refused = client.get("/secrets")
        assert refused.status_code == 403
        assert "sees some runs only" in refused.json()["wrong"]


def test_every_route_is_either_of_runs_or_refused(shared: Service) -> None:
    there = {f"{method.upper()} {path}" for method, path, _ in operations(shared)}
    refused = {f"{method.upper()} {path}" for method, path in NOT_BY_RUN}
    assert there == restricted.ROUTES | refused
    # Routes that are checked by nothing but the guard hold no data.
    plain = {route.path for route in shared.app.routes if type(route) is Route}
    assert plain <= {*OPEN_PATHS, "/openapi.json"} | {p for p in plain if p.startswith(OPEN_FOLDER)}
