"""A small real HTTP service with the shapes of the API, for tests of whoever asks it.

It holds one run `countdown` with two attempts, step 5 in both. `refusals` are answered first,
one a request, so that a test can let the service be away for a while.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Iterator, Mapping
from typing import Any

import uvicorn
from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse

READ = "read-token-of-the-tests"
OPERATE = "operate-token-of-the-tests"
RUN = "countdown"

SLICE = {"stage", "role", "rank"}
LIST = {"limit", "cursor", "run", "attempt"}
KNOWN = {
    "runs": {"limit", "cursor"},
    "attempts": {"limit", "cursor"},
    "status": set[str](),
    "plan": set[str](),
    "captures": {"limit", "cursor", "run"},
    "metrics": {"run", "attempt", *SLICE, "round"},
    "rounds": {*LIST, *SLICE, "by"},
    "ranks": {*LIST, *SLICE},
    "tokens": {*LIST, *SLICE, "round", "kind"},
    "stages": {*LIST, *SLICE, "superseded"},
    "scalars": {*LIST, *SLICE, "name"},
    "dumps": {*LIST, *SLICE},
    "findings": {*LIST, "only", "step", "kind", "severity"},
    "losses": {*LIST, "only", "step", "kind"},
    "groups": {*LIST, "only"},
}
"""The query parameters of each route: like the service, this one refuses any other."""

METRICS: dict[str, object] = {
    "training/rollout_probs_diff_valid": 1,
    "training/rollout_probs_diff_mean": 0.00371,
    "training/rollout_probs_diff_std": "nan",
    "rollout_corr/k3_kl": 1.25e-05,
    "rollout_corr/training_ppl": "inf",
    "rollout_corr/log_ppl_diff_min": "-inf",
    "per_round/total_rounds": 2,
    "per_round/round_0_abs_diff_mean": 0.003,
    "per_round/round_1_abs_diff_mean": 0.25,
}
ROUNDS: list[dict[str, object]] = [
    {"round": 0, "abs_diff_mean": 0.003, "tokens": 41, "k3_kl": 1e-5},
    {"round": 1, "abs_diff_mean": "nan", "tokens": 0, "k3_kl": None},
]
MISSING: dict[str, object] = {
    "role": "actor",
    "rank": 1,
    "stage": "actor_update",
    "status": "begun",
    "since": 1.7e9,
}
FINGERPRINT = {
    "git": {"commit": "0f3a"},
    "python": "3.11.9",
    "packages": {"torch": "2.13.0"},
    "n": 4,
}


class Answering:
    """The app and what it has seen."""

    def __init__(self) -> None:
        self.refusals: list[tuple[int, Mapping[str, object]]] = []
        self.hang_ups = 0
        self.seen: list[tuple[str, str, dict[str, str]]] = []
        self.headers: list[dict[str, str]] = []
        self.captures: dict[str, dict[str, object]] = {}
        self.token_count = 7
        self.ready = True
        self.app = FastAPI()
        self.app.add_api_route("/{path:path}", self.answer, methods=["GET", "POST", "DELETE"])
        self.url = ""

    async def answer(self, request: Request) -> Response:
        """Answer any request."""
        path, query = request.url.path, dict(request.query_params)
        self.seen.append((request.method, path, query))
        self.headers.append(dict(request.headers))
        if path == "/healthz":
            return JSONResponse({"status": "ok", "version": "0.1.0"})
        if self.refusals:
            status, problem = self.refusals.pop(0)
            return JSONResponse(problem, status, media_type="application/problem+json")
        token = request.headers.get("authorization", "").removeprefix("Bearer ")
        if token not in (READ, OPERATE):
            return _problem(401, "unauthorized", "the request has no bearer token")
        if request.method != "GET" and token != OPERATE:
            return _problem(403, "forbidden", "the read token may not change anything")
        if request.method == "POST":
            return self._add(await request.json())
        if request.method == "DELETE":
            return self._remove(path.rsplit("/", 1)[1])
        return self._get(path, query)

    def _get(self, path: str, query: dict[str, str]) -> Response:
        attempt = int(query.get("attempt", 2))
        context: dict[str, object] = {"run": query.get("run", RUN), "attempt": attempt}
        lists: dict[str, list[dict[str, object]]] = {
            "/runs": [{"run": RUN, "attempts": 2, "created_wall": 1.7e9}, {"run": "nan"}],
            f"/runs/{RUN}/attempts": [
                {"attempt": n, "attempt_key": f"key-{n}", "fingerprint": FINGERPRINT}
                for n in (2, 1)
            ],
            "/steps": [
                {
                    **context,
                    "step": 5,
                    "complete": "partial",
                    "measured": True,
                    "missing": [MISSING],
                }
            ],
            "/steps/5/rounds": ROUNDS,
            "/steps/5/ranks": [{"role": "actor", "rank": 0, "abs_diff_mean": 0.1}],
            "/steps/5/tokens": [
                {"abs_diff": 1 / (n + 1), "p": "-inf" if n == 3 else -0.5, "sample_uid": f"s{n}"}
                for n in range(self.token_count)
            ],
            "/steps/5/stages": [{"stage": "actor_update", "role": "actor", "rank": 0}],
            "/steps/5/dumps": [],
            "/steps/5/scalars": [{"name": "nan", "value": "nan"}, {"name": "loss", "value": 2}],
            "/captures": list(self.captures.values()),
            "/losses": [{"step": 5, "kind": "payload", "bytes": 3_000_000, "reason": "killed"}],
            "/findings": [{"kind": "nonfinite", "message": "\x1b[31m<script>alert(1)</script>"}],
        }
        lists |= {f"{path}/groups": lists[path] for path in ("/losses", "/findings")}
        path = path.replace("/latest/", "/5/").replace("/measured/", "/5/")
        if path.startswith("/steps/5/"):
            context["step"] = 5
        if unknown := set(query) - KNOWN.get(path.rsplit("/", 1)[1], LIST):
            return _problem(422, "invalid_input", f"unknown query parameter {sorted(unknown)}")
        if path == "/status":
            reason = None if self.ready else "the disk is full"
            return JSONResponse(
                {
                    "ready": self.ready,
                    "reason": reason,
                    "version": "0.1.0",
                    "coordinator": {"revision": 3, "runs": {"live": 1}},
                }
            )
        if path == "/steps/5/rounds":
            context["whole"] = {"abs_diff_mean": "nan", "tokens": 41}
        if path == "/plan":
            captures = [{"state": "asked", **each} for each in self.captures.values()]
            return JSONResponse({"revision": len(captures), "captures": captures})
        if path == "/steps/5/metrics":
            return JSONResponse(self._metrics(context))
        if path not in lists:
            return _problem(404, "not_found", f"there is no {path}", "a step from 0 to 5")
        first, limit = int(query.get("cursor", 0)), int(query.get("limit", 50))
        rows = lists[path]
        following = str(first + limit) if first + limit < len(rows) else None
        return JSONResponse({**context, "rows": rows[first : first + limit], "next": following})

    def _metrics(self, context: dict[str, object]) -> dict[str, object]:
        return {
            **context,
            "complete": "partial",
            "missing": [MISSING],
            "stage": "actor_compute_log_prob",
            "role": "actor",
            "metrics": METRICS,
            "noise_floor": {"k3_kl": "nan"},
            "nonfinite": {"rollout": {"nan": 2, "inf": 0}, "old": {"nan": 0}},
            "comparable": "doubtful",
            "comparability": [{"code": "shift", "verdict": "doubtful", "text": "shifted by one"}],
            "streams": {},
            "coverage": {"tokens": 41},
            "rollout_is": None,
            "superseded_by": None,
            "also_live": [{"run": "nan", "attempt": 1}],
        }

    def _add(self, spec: dict[str, Any]) -> Response:
        if not spec.get("steps"):
            return _problem(422, "invalid_plan", "steps is None", "a list", "say which")
        capture = {"capture_id": f"c{len(self.captures)}", **spec}
        self.captures[capture["capture_id"]] = capture
        return JSONResponse(capture, 201)

    def _remove(self, capture_id: str) -> Response:
        if capture_id not in self.captures:
            return _problem(404, "not_found", f"no capture {capture_id!r} is active")
        return JSONResponse(self.captures.pop(capture_id))


def _problem(status: int, code: str, wrong: str, expected: str = "", advice: str = "") -> Response:
    body = {
        "type": f"urn:stagescope:{code}",
        "status": status,
        "code": code,
        "detail": wrong,
        "wrong": wrong,
        "expected": expected,
        "advice": advice,
    }
    return JSONResponse(body, status, media_type="application/problem+json")


@contextlib.contextmanager
def serving(app: FastAPI, *, port: int = 0, host: str = "127.0.0.1") -> Iterator[str]:
    """Serve `app`, on loopback; yields its URL."""
    listening = socket.create_server((host, port))
    server = uvicorn.Server(uvicorn.Config(app, log_config=None, lifespan="off", ws="none"))
    thread = threading.Thread(target=server.run, args=([listening],), daemon=True)
    thread.start()
    deadline = time.monotonic() + 20
    while not server.started:
        assert thread.is_alive(), "the server did not start"
        assert time.monotonic() < deadline, "the server did not start in time"
        thread.join(0.005)
    try:
        yield f"http://{host}:{listening.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(20)
        listening.close()
        assert not thread.is_alive()


def unused_port() -> int:
    """Return a port on which nothing listens."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        return int(listening.getsockname()[1])
