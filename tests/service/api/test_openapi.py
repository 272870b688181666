from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fastapi.routing import APIRoute
from tests.support.api import Rank, Service, service
from tests.support.measure import payload

ROUTES = {
    "/healthz", "/readyz", "/status", "/metrics", "/runs", "/runs/{run}/attempts", "/steps",
    "/steps/{step}/metrics", "/steps/{step}/rounds", "/steps/{step}/ranks",
    "/steps/{step}/stages", "/steps/{step}/tokens", "/steps/{step}/dumps",
    "/steps/{step}/scalars", "/plan", "/captures", "/captures/{capture_id}", "/events", "/poll",
    "/drain",
    "/losses", "/losses/groups", "/findings", "/findings/groups", "/findings/{finding_id}",
    "/triggers/firings/groups", "/series",
    "/steps/{step}/stuck", "/steps/{step}/stacks", "/stacks",
    "/steps/{step}/operators", "/steps/{step}/operators/stack",
    "/steps/{step}/operators/non-finite", "/operators/divergence",
    "/triggers", "/triggers/defaults", "/triggers/firings", "/triggers/test", "/steps/{step}/pin",
    "/operators/tensors", "/weights", "/weights/{version}", "/steps/{step}/weights", "/devices",
    "/diff",
    "/exact", "/steps/{step}/batch",
    "/engines", "/engines/{name}", "/steps/{step}/kept", "/comparisons", "/comparisons/page",
}  # fmt: skip


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    with service(tmp_path_factory.mktemp("home")) as running:
        rank = Rank(running, world_size=1)
        rank.stage("actor_compute_log_prob", 5, payload(), scalars={"loss": 1.0})
        yield running


def operations(document: dict[str, Any]) -> Iterator[tuple[str, str, dict[str, Any]]]:
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            yield path, method, operation


def test_every_route_is_there_and_documented(shared: Service) -> None:
    document = shared.get("/openapi.json")
    assert set(document["paths"]) == ROUTES
    registered = {route.path for route in shared.app.routes if isinstance(route, APIRoute)}
    assert registered <= ROUTES
    for path, method, operation in operations(document):
        where = f"{method} {path}"
        assert len(operation.get("description", "")) > 20, where
        assert operation.get("tags"), where
        for parameter in operation.get("parameters", []):
            assert parameter.get("description"), f"{where}: {parameter['name']}"
        assert "4XX" in operation["responses"], where
        if method == "post":
            assert operation["requestBody"]["content"], where


def test_security_is_said_of_all_but_health(shared: Service) -> None:
    document = shared.get("/openapi.json")
    for path, _, operation in operations(document):
        assert bool(operation.get("security")) == (path not in ("/healthz", "/readyz")), path


def test_the_encoding_of_numbers_is_documented(shared: Service) -> None:
    description = shared.get("/openapi.json")["info"]["description"]
    assert '"nan"' in description
    assert '"-inf"' in description


def test_no_question_makes_it_fail(shared: Service) -> None:
    """Every GET with every pair of odd values answers, or says what was wrong; never a 500."""
    odd = ["", "0", "-1", "5", "99999999999999999999", "nan", "ä", "%00", "a" * 300, "' OR 1=1 --"]
    document = shared.get("/openapi.json")
    asked = 0
    for path, method, operation in operations(document):
        if method != "get":
            continue
        names = [item["name"] for item in operation.get("parameters", []) if item["in"] == "query"]
        steps = ["5", "latest", "-1", "x"] if "{step}" in path else [""]
        for step, name in itertools.product(steps, [*names, "unknown"]):
            for value in odd:
                url = path.replace("{step}", step).replace("{run}", "r")
                answer = shared.read.get(url, params={name: value})
                asked += 1
                assert answer.status_code in (200, 404, 422), (url, name, value, answer.text)
                if answer.status_code != 200:
                    assert answer.headers["content-type"] == "application/problem+json"
                    assert answer.json()["wrong"]
    assert asked > 500


def test_odd_paths(shared: Service, tmp_path: Path) -> None:
    for path in ("/steps/5/metrics/", "//steps", "/steps/../runs", "/runs/a%2Fb/attempts", "/%00"):
        answer = shared.read.get(path)
        assert answer.status_code in (200, 307, 404, 422), path
        assert str(tmp_path.parent) not in answer.text
