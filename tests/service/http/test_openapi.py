from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from fastapi.routing import APIRoute
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.support.api import Rank, Service, service
from tests.support.measure import payload

from stagescope_service.views.models.bodies import CaptureRequest, EngineRequest, RequestBody
from stagescope_wire.captures import CAPTURE_FIELDS, SHORTHANDS, validate_capture
from stagescope_wire.engines.registry import ENGINE_FIELDS, check_engine

EXAMPLES = 8
SLOW = (HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.data_too_large)
THERE = {"run": "r", "attempt": 1, "attempt_key": "a1", "step": "5", "role": "actor", "rank": 0,
         "stage": "actor_compute_log_prob", "a": "r@1", "b": "r"}  # fmt: skip
ROUTES = {
    "/steps/{step}/samples", "/steps/{step}/samples/{sample_uid}", "/steps/{step}/row",
    "/steps/{step}/loss",
    "/runs/{run}/diagnosis", "/runs/{run}/metrics", "/runs/{run}/report", "/runs/{run}/bundle",
    "/figures/runs", "/runs/overview", "/runs/settings", "/runs/{run}", "/runs/{run}/worst",
    "/runs/{run}/capture-costs",
    "/healthz", "/readyz", "/status", "/metrics", "/runs", "/runs/{run}/attempts", "/steps",
    "/steps/{step}", "/steps/{step}/metrics", "/steps/{step}/rounds", "/steps/{step}/ranks",
    "/steps/{step}/stages", "/steps/{step}/tokens", "/steps/{step}/dumps",
    "/steps/{step}/scalars", "/plan", "/captures", "/captures/{capture_id}", "/events", "/poll",
    "/drain",
    "/losses", "/losses/groups", "/findings", "/findings/groups", "/findings/{finding_id}",
    "/triggers/firings/groups", "/series",
    "/steps/{step}/stuck", "/steps/{step}/stacks", "/stacks",
    "/steps/{step}/operators", "/steps/{step}/operators/stack",
    "/steps/{step}/operators/non-finite", "/operators/divergence",
    "/triggers", "/triggers/defaults", "/triggers/firings", "/triggers/test",
    "/triggers/{rule}/test", "/steps/{step}/pin",
    "/operators/tensors", "/weights", "/weights/{version}", "/steps/{step}/weights", "/devices",
    "/canary", "/canary/{version}", "/diff",
    "/exact", "/steps/{step}/batch",
    "/engines", "/engines/{name}", "/steps/{step}/kept", "/comparisons", "/comparisons/page",
    "/figures", "/figures/overview", "/figures/rounds", "/figures/rank-rounds",
    "/figures/rank-steps", "/figures/distribution", "/figures/density", "/figures/timeline",
    "/figures/anatomy", "/figures/routing", "/figures/canary", "/figures/offenders",
    "/figures/operators", "/figures/operator-divergence", "/figures/comparison",
    "/steps/{step}/timeline", "/steps/{step}/anatomy", "/steps/{step}/routing",
    "/login", "/logout", "/whoami", "/stream", "/audit",
}  # fmt: skip

OPEN = {"/healthz", "/readyz", "/login", "/logout", "/whoami"}
"""Routes that need no token."""
UNITS = re.compile(
    r"\b(seconds|bytes|tokens|nats?|rows|elements|units?|share|ratio|factor|-?[01] to 1|"
    r"number|index|position|ids?|status|versions?|revision|from [01]|steps?|ranks?|attempts?)\b",
    re.IGNORECASE,
)
"""Of a number: its unit, that it is a count, share or ratio, or what it is the number of."""


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    with service(tmp_path_factory.mktemp("home")) as running:
        rank = Rank(running, world_size=1)
        rank.stage("actor_compute_log_prob", 5, payload(), scalars={"loss": 1.0})
        rank.say("refused", what="record", message="no such tensor", step=5)
        rank.say("finish")  # nobody is left to wait for
        yield running


def operations(document: dict[str, Any]) -> Iterator[tuple[str, str, dict[str, Any]]]:
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            yield path, method, operation


def test_every_route_is_there_and_documented(shared: Service) -> None:
    document = shared.get("/openapi.json")
    assert set(document["paths"]) == ROUTES
    registered = {route.path_format for route in shared.app.routes if isinstance(route, APIRoute)}
    assert registered <= ROUTES
    for path, method, operation in operations(document):
        where = f"{method} {path}"
        assert len(operation.get("description", "")) > 20, where
        assert operation.get("tags"), where
        assert "4XX" in operation["responses"], where
        if method == "post" and path not in ("/logout", "/triggers/{rule}/test"):
            assert operation["requestBody"]["content"], where


def test_security_is_documented_for_all_that_needs_a_token(shared: Service) -> None:
    document = shared.get("/openapi.json")
    for path, _, operation in operations(document):
        assert bool(operation.get("security")) == (path not in OPEN), path


def test_the_encoding_of_numbers_is_documented(shared: Service) -> None:
    description = shared.get("/openapi.json")["info"]["description"]
    assert '"nan"' in description
    assert '"-inf"' in description


def test_every_answer_is_named_field_by_field(shared: Service) -> None:
    """Each JSON answer has a schema that names its fields, each with its type, and no others."""
    document = shared.get("/openapi.json")
    schemas = document["components"]["schemas"]

    def resolved(schema: dict[str, Any]) -> dict[str, Any]:
        return schemas[schema["$ref"].rpartition("/")[2]] if "$ref" in schema else schema

    for path, method, operation in operations(document):
        where = f"{method} {path}"
        answers = [response for code, response in operation["responses"].items() if code[0] == "2"]
        assert len(answers) == 1, where
        for media_type, content in answers[0].get("content", {}).items():
            if media_type != "application/json":
                assert content["schema"]["type"] == "string", where
                continue
            schema = resolved(content["schema"])
            assert schema.get("properties"), f"{where} has no response_model"
            rows = schema["properties"].get("rows")
            if rows is not None:
                kinds = rows["items"].get("anyOf", [rows["items"]])
                assert all(resolved(kind).get("properties") for kind in kinds), where
    for name, schema in schemas.items():
        if "properties" in schema:
            assert schema["additionalProperties"] is False, name


def fields_of(schema: object, where: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield every field that a schema, or a part of the document, names, at any depth."""
    if isinstance(schema, list):
        for item in schema:
            yield from fields_of(item, where)
    elif isinstance(schema, dict):
        named = schema.get("properties", {})
        for name, field in named.items():
            yield f"{where}.{name}", field
            yield from fields_of(field, f"{where}.{name}")
        for key, value in schema.items():
            if key not in ("properties", "examples"):
                yield from fields_of(value, where)


def is_numeric(schema: dict[str, Any]) -> bool:
    """Return whether a schema has numbers: alone, beside others, in a list or by name."""
    kinds = schema.get("type", ())
    if {"integer", "number"} & {*([kinds] if isinstance(kinds, str) else kinds)}:
        return True
    if schema.get("$ref", "").endswith("Number"):
        return True
    nested = [schema.get("items"), schema.get("additionalProperties")]
    nested += [*schema.get("anyOf", ()), *schema.get("oneOf", ())]
    return any(is_numeric(each) for each in nested if isinstance(each, dict))


def test_every_field_and_parameter_is_described_and_every_number_names_its_unit(
    shared: Service,
) -> None:
    document = shared.get("/openapi.json")
    found = [
        (f"{where}{name}", field, field)
        for where, part in (*document["components"]["schemas"].items(), *document["paths"].items())
        for name, field in fields_of(part, "")
    ]
    found += [
        (f"{method} {path} {parameter['name']}", parameter, parameter["schema"])
        for path, method, operation in operations(document)
        for parameter in operation.get("parameters", [])
    ]
    assert len(found) > 1500
    assert not [where for where, described, _ in found if not described.get("description")]
    numbers = [(where, each["description"]) for where, each, schema in found if is_numeric(schema)]
    assert len(numbers) > 500
    assert not [number for number in numbers if not UNITS.search(number[1])]


@pytest.mark.parametrize("path", sorted(ROUTES - {"/stream"}))  # which ends with the client alone
def test_generated_requests_are_answered_as_documented(shared: Service, path: str) -> None:
    """Whatever is sent: no error of the service, and the status, type and body of the document.

    Half of the requests have parameters and bodies as the document allows them (such a GET is
    answered), half others; half of both name the run, step and rank that are there.
    """
    schemathesis = pytest.importorskip("schemathesis")
    checks = pytest.importorskip("schemathesis.specs.openapi.checks")
    document = shared.get("/openapi.json")
    methods = document["paths"][path]
    for method in methods.values():
        method.pop("security", None)  # what a token may do has its own tests
    schema = schemathesis.openapi.from_dict({**document, "paths": {path: methods}})
    always = [
        schemathesis.checks.not_a_server_error,
        checks.status_code_conformance,
        checks.content_type_conformance,
        checks.response_schema_conformance,
    ]
    modes = schemathesis.GenerationMode
    for method in methods:
        operation = schema[path][method.upper()]
        strategies = {
            mode: operation.as_strategy(generation_mode=mode)
            for mode in (modes.POSITIVE, modes.NEGATIVE)
        }

        # The same requests in each run of the suite.
        @settings(
            max_examples=EXAMPLES,
            derandomize=True,
            database=None,
            deadline=None,
            suppress_health_check=SLOW,
        )
        @given(data=st.data(), mode=st.sampled_from(list(strategies)), there=st.booleans())
        def ask(data: st.DataObject, mode: object, there: bool) -> None:
            case = data.draw(strategies[mode])  # noqa: B023
            _name_what_is_there(case, there)
            answer = case.call(base_url=shared.server.url, headers=shared.operate.headers)
            # Bodies say less in the document than they may hold, and a cursor is an answer's.
            accepted = mode is modes.POSITIVE and method == "get"  # noqa: B023
            also = [checks.positive_data_acceptance] if accepted else []
            case.validate_response(answer, checks=[*always, *also])

        ask()


def _name_what_is_there(case: Any, there: bool) -> None:
    case.query.pop("cursor", None)
    bounds = [case.query.get(name) for name in ("from", "to")]
    if all(isinstance(each, int) for each in bounds):  # a schema cannot say that one is at most
        case.query["from"], case.query["to"] = sorted(bounds)
    first, last = case.query.get("from"), case.query.get("to")
    if isinstance(first, int) and isinstance(last, int):  # the document cannot order them
        case.query |= {"from": min(first, last), "to": max(first, last)}
    for values_there in (case.path_parameters, case.query) if there else ():
        values_there.update({name: THERE[name] for name in THERE.keys() & values_there.keys()})


def test_odd_values_are_answered_or_refused(shared: Service) -> None:
    """Each parameter, once, with values that are no text, too large or too long; never a 500."""
    odd = ["", "99999999999999999999", "nan", "\x00", "a" * 300, "' OR 1=1 --"]
    checked = set()
    for path, method, operation in operations(shared.get("/openapi.json")):
        for parameter in operation.get("parameters", []) if method == "get" else ():
            checked_key = (parameter["name"], str(parameter["schema"]))
            if checked_key in checked or parameter["in"] != "query":
                continue
            checked.add(checked_key)
            for value in odd:
                url = path.replace("{step}", "5").replace("{run}", "r")
                answer = shared.read.get(url, params={parameter["name"]: value})
                assert answer.status_code in (200, 404, 422), (url, checked_key, value, answer.text)
    assert len(checked) > 40


def test_an_unknown_parameter_is_refused(shared: Service) -> None:
    for path, method, _ in operations(shared.get("/openapi.json")):
        if method == "get" and path not in ("/healthz", "/readyz"):
            url = path.replace("{step}", "5").replace("{run}", "r")
            problem = shared.problem(422, url, unknown="1")
            assert "unknown" in problem["wrong"], url


def test_odd_paths(shared: Service, tmp_path: Path) -> None:
    for path in ("/steps/5/metrics/", "//steps", "/steps/../runs", "/runs/a%2Fb/attempts", "/%00"):
        answer = shared.read.get(path)
        assert answer.status_code in (200, 307, 404, 422), path
        assert str(tmp_path.parent) not in answer.text


@pytest.mark.parametrize(
    "fields",
    [
        {}, {"stages": "all"}, {"steps": "5,8-10"}, {"steps": "next"}, {"steps": {"next": 3}},
        {"steps": {"every": 2, "start": None, "count": 1}}, {"ranks": [0, 2]}, {"ranks": None},
        {"ranks": "worst(2)"}, {"ranks": {"worst": 2}}, {"roles": ["actor"]},
        {"keep": None, "level": "L1"},
        {"config": {"task": "tensor"}, "bench": {"capture_id": "c", "step": 1}},
        {"limits": {"bytes": 1, "seconds": 0.5, "tokens": None}}, {"limits": None}, {"timeout": 5},
        {"task": "tensor", "level": "L0", "list": "linear", "scope": ["a", "b"]},
        {"data_mode": "all", "force": True, "strict": None, "late": "go_on", "again": 3},
    ],
    ids=str,
)  # fmt: skip
def test_the_documented_capture_is_what_may_be_requested(fields: Mapping[str, object]) -> None:
    fields = {"stages": ["actor_update"], "steps": [5], **fields}
    filled = validate_capture(fields, allowed_roots=())
    assert CaptureRequest.parse(fields).model_dump(exclude_unset=True) == fields
    CaptureRequest.parse(filled)


@pytest.mark.parametrize(
    ("model", "validate", "names", "required"),
    [
        (CaptureRequest, functools.partial(validate_capture, allowed_roots=()),
         {**CAPTURE_FIELDS, **SHORTHANDS}, {"stages": ["s"], "steps": [5]}),
        (EngineRequest, check_engine, ENGINE_FIELDS, {"url": "http://h:1"}),
    ],
)  # fmt: skip
def test_the_documented_fields_are_those_that_are_validated(
    model: type[RequestBody],
    validate: Callable[[Mapping[str, object]], object],
    names: Mapping[str, str],
    required: Mapping[str, object],
) -> None:
    schema = model.schema_of_fields()
    assert schema["properties"].keys() == names.keys()
    assert set(schema["required"]) == required.keys()
    for name, field in schema["properties"].items():
        assert {"type", "anyOf"} & field.keys(), name
        for example in field.get("examples", ()):
            model.parse({**required, name: example})
            validate({**required, name: example})
