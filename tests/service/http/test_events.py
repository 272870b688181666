from __future__ import annotations

import asyncio
import json
import struct
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import httpx
import numpy as np
import pytest
from safetensors.numpy import save
from tests.support.api import Rank, Service, service
from tests.support.measure import payload
from tests.support.stores import eventually

from stagescope_service.http.framing import MEDIA_TYPE
from stagescope_service.http.routes import health
from stagescope_service.store.catalogue import Catalogue
from stagescope_service.views.reading.prometheus import Counts
from stagescope_wire import schema
from stagescope_workers.probe.options import checked_options
from stagescope_workers.probe.probe import Probe

SENDER = schema.Sender("http-0", "r", "a1", "actor", 0, started=1_000.0).wire()
CAPTURE = {"stages": ["actor_update"], "steps": [7], "keep": ["old_log_probs"]}


def event(kind: str, seq: int, **fields: object) -> tuple[object, ...]:
    return schema.Event(kind, seq, 1_000.0 + seq, float(seq), fields).wire()


def framed(events: Sequence[object], payloads: Mapping[int, Mapping[str, Any]]) -> bytes:
    """A body as a process without Ray sends it."""
    described, stored = {}, {}
    for seq, payload_fields in payloads.items():
        tensors = {}
        for name, (dtype, shape, buffer, offsets) in payload_fields["tensors"].items():
            tensors[name] = {"dtype": dtype, "shape": shape, "offsets": offsets is not None}
            stored[f"{seq}/{name}"] = np.ascontiguousarray(buffer)
            if offsets is not None:
                stored[f"{seq}/{name}/offsets"] = offsets
        described[str(seq)] = {**payload_fields, "tensors": tensors}
    text = json.dumps({"sender": SENDER, "events": events, "payloads": described}).encode()
    return struct.pack("<Q", len(text)) + text + (save(stored) if stored else b"")


def post(live: Service, body: bytes, kind: str = MEDIA_TYPE) -> httpx.Response:
    return live.operate.post("/events", content=body, headers={"content-type": kind})


class TestEvents:
    def test_the_client_reports_refused_events(self, live: Service) -> None:
        events = [
            event("log", 1, step=3, scalars={"loss": "x", "reward": 0.5}),
            event("log", 2, step=3, scalars={"kl": 0.5}),
            event("begin", 3, step=3),
        ]
        with live.session("operate") as session:
            reply = session.send(SENDER, events)
        assert [*reply.refused] == [3]
        assert "has no stage" in reply.refused[3]
        assert [*reply.refused_in_part] == [1]
        assert "loss (str)" in reply.refused_in_part[1]
        rows = live.get("/steps/3/scalars")["rows"]
        assert {row["name"] for row in rows} == {"reward", "kl"}

    def test_an_unknown_schema_is_refused_alone(self, live: Service) -> None:
        good, bad = event("begin", 1, step=3, stage="s"), [99, "begin", 2, 1.0, 1.0, {}]
        answer = post(live, framed([good, bad], {})).json()
        assert (answer["received"], list(answer["refused"])) == (1, ["2"])

    def test_of_another_content_type(self, live: Service) -> None:
        for kind in ("", "text/plain", "application/octet-stream"):
            answer = post(live, framed([], {}), kind)
            assert answer.status_code == 422
            assert MEDIA_TYPE in answer.json()["expected"]

    def test_while_the_coordinator_is_not_ready(self, live: Service) -> None:
        live.engine.not_ready = "the catalogue cannot be opened: disk full"
        answer = post(live, framed([event("finish", 1)], {}))
        assert answer.status_code == 503
        assert answer.json()["code"] == "not_ready"
        assert "disk full" in answer.json()["wrong"]
        assert answer.headers["retry-after"] == "1"

    def test_hostile_bodies_change_nothing(self, live: Service) -> None:
        for body in (b"", b"\xff" * 100, framed([event("finish", 1)], {})[:-1], b"\x00" * 9):
            assert post(live, body).status_code in (413, 422)
        assert live.get("/runs")["rows"] == []

    def test_too_large_declared_or_not(self, tmp_path: Path) -> None:
        with service(tmp_path, max_body_bytes=2048) as live:
            declared = post(live, b"x" * 4096)
            assert declared.status_code == 413
            assert declared.json()["code"] == "too_large"

            def drip() -> Iterator[bytes]:
                for _ in range(8):
                    yield b"x" * 512

            streamed = live.operate.post(
                "/events", content=drip(), headers={"content-type": MEDIA_TYPE}
            )
            assert streamed.status_code == 413
            assert live.operate.get("/healthz").status_code == 200


class TestPoll:
    def test_ends_when_the_plan_changes(self, live: Service) -> None:
        got: list[Any] = []

        def ask() -> None:
            body = {"sender": SENDER, "revision": 0, "unreceipted": [], "wait": 20}
            got.append(live.operate.post("/poll", json=body).json())

        thread = threading.Thread(target=ask)
        began = time.monotonic()
        thread.start()
        made = live.client(live.tokens.operate).post("/captures", json=CAPTURE)
        thread.join(20)
        assert time.monotonic() - began < 15
        # Requested, and agreed on at once: no rank is there to acknowledge it.
        (planned,) = got[0]["plan"]["captures"]
        assert planned["capture_id"] == made.json()["capture_id"]
        assert (got[0]["revision"], planned["phase"]) in ((1, "asked"), (2, "agreed"))

    @pytest.mark.parametrize("public", [None, "https://head.example/scope"])
    def test_the_first_answer_names_the_page_where_people_open_it(
        self, tmp_path: Path, public: str | None, caplog: pytest.LogCaptureFixture
    ) -> None:
        with service(tmp_path / "home", public_url=public) as live:
            for wait in (0, 0.01):
                body = {"sender": SENDER, "revision": 0, "wait": wait}
                answer = live.operate.post("/poll", json=body).json()
                assert answer.get("page") == (None if wait else public)
            url = live.server.url
            options = {
                "run": "one/two",
                "role": f"of {public}",
                "url": url,
                "token": live.tokens.operate,
            }
            probe = Probe(checked_options(options))
            probe.start()
            with probe.stage("s", step=1):
                pass
            assert probe.close(20.0)
        said = [text for text in caplog.messages if "connected to" in text]
        assert len(said) == 1
        assert said[0].endswith(f"; its page: {public or url}/#/runs/{probe.run}")

    def test_ends_after_its_wait(self, live: Service) -> None:
        body = {"sender": SENDER, "revision": 0, "wait": 0.05}
        answer = live.operate.post("/poll", json=body).json()
        assert answer["plan"] is None
        assert answer["receipts"] == {}

    def test_refuses_what_cannot_be(self, live: Service) -> None:
        for changes in (
            {"sender": None},
            {"sender": [1, "i", "../x", "a", "actor", 0, None]},
            {"revision": "0"},
            {"revision": True},
            {"wait": -1},
            {"wait": "long"},
            {"wait": True},
            {"unreceipted": 3},
            {"unreceipted": [1.5]},
            {"unreceipted": [1] * 100_001},
            {"wiat": 3},
        ):
            body = {"sender": SENDER, "revision": 0, "wait": 0.01, **changes}
            answer = live.operate.post("/poll", json=body)
            assert answer.status_code == 422, (changes, answer.text)

    def test_json_of_another_shape(self, live: Service) -> None:
        for body in (b"[]", b"3", b"{", b'{"wait": NaN}'):
            assert live.operate.post("/poll", content=body).status_code == 422


class TestCaptures:
    def test_come_into_force_and_go(self, live: Service) -> None:
        made = live.operate.post("/captures", json=CAPTURE)
        assert made.status_code == 201
        capture = made.json()
        for name in ("notes", "warnings"):  # of this answer alone
            capture.pop(name)
        (planned,) = live.get("/plan")["captures"]
        assert {name: planned[name] for name in capture} == capture
        assert live.get(f"/captures/{capture['capture_id']}")["state"] == "agreed"
        assert [row["capture_id"] for row in live.get("/captures")["rows"]] == [
            capture["capture_id"]
        ]
        again = live.operate.post("/captures", json=CAPTURE)
        assert again.status_code == 409
        gone = live.operate.delete(f"/captures/{capture['capture_id']}")
        assert gone.status_code == 200
        assert live.get("/plan") == {"revision": 3, "captures": []}
        assert live.get("/captures")["rows"][0]["state"] == "withdrawn"
        assert live.get(f"/captures/{capture['capture_id']}")["state"] == "withdrawn"
        unknown = live.operate.delete(f"/captures/{capture['capture_id']}")
        assert unknown.status_code == 404

    def test_the_audit_names_the_requester(self, live: Service) -> None:
        made = live.operate.post("/captures", json=CAPTURE, headers={"x-stagescope-user": "ada"})
        live.operate.delete(f"/captures/{made.json()['capture_id']}")
        assert live.engine.audit == [
            ("ada (operate token, 127.0.0.1)", "add_capture"),
            ("unknown (operate token, 127.0.0.1)", "remove_capture"),
        ]

    def test_that_cannot_be_carried_out(self, live: Service) -> None:
        wrong: list[dict[str, object]] = [
            {"steps": "some"},
            {"steps": None},
            {"stages": []},
            {"ranks": [-1]},
            {"steps": {"every": 0}},
            {"surprise": 1},
            {"config": {"task": "exec"}},
            {"keep": []},
        ]
        for changes in wrong:
            answer = live.operate.post("/captures", json={**CAPTURE, **changes})
            assert answer.status_code == 422, changes
            assert answer.json()["expected"], changes
        assert live.get("/plan")["captures"] == []

    def test_paths_stay_inside_the_allowed_roots(self, tmp_path: Path) -> None:
        shared, outside = tmp_path / "shared", tmp_path / "outside"
        for directory in (shared, outside):
            directory.mkdir()
        (shared / "link").symlink_to(outside)
        with service(tmp_path / "home", allowed_roots=(shared,)) as live:
            inside = {
                str(shared / "dumps"): 201,
                str(live.settings.data_path / "x"): 201,
                str(shared / ".." / "outside"): 403,
                str(shared / "link" / "x"): 403,
                str(outside): 403,
                "/etc/passwd": 403,
                f"{shared}-beside": 403,
                "relative/path": 422,
                "nul\0byte": 422,
            }
            for path, status in inside.items():
                answer = live.operate.post("/captures", json={**CAPTURE, "data_dir": path})
                assert answer.status_code == status, (path, answer.text)
            config = {"task": "statistics", "dump_path": str(outside)}
            answer = live.operate.post("/captures", json={**CAPTURE, "config": config})
            assert answer.status_code == 403
            assert answer.json()["advice"]


class TestHealth:
    def test_not_ready_says_why_in_the_status_alone(self, live: Service) -> None:
        live.engine.not_ready = "cannot open /secret/path"
        answer = live.client(None).get("/readyz")
        assert answer.status_code == 503
        assert answer.json()["wrong"] == "the coordinator is not ready"
        assert "secret" not in answer.text
        status = live.get("/status")
        assert status["ready"] is False
        assert "/secret/path" in status["reason"]
        assert live.client(None).get("/healthz").status_code == 200

    @pytest.mark.parametrize("part", ["catalogue", "coordinator"])
    def test_an_error_that_nobody_expected_is_named(
        self, live: Service, monkeypatch: pytest.MonkeyPatch, part: str
    ) -> None:
        def fail(*arguments: object) -> None:
            raise KeyError("/secret/path")

        async def fail_later() -> None:
            fail()

        if part == "catalogue":
            monkeypatch.setattr(Catalogue, "check", fail)
        else:
            monkeypatch.setattr(live.engine, "status", fail_later, raising=False)
        answer = live.client(None).get("/readyz")
        assert answer.status_code == 503
        assert part in answer.json()["wrong"]
        assert "secret" not in answer.text
        status = live.get("/status")
        assert status["ready"] is False
        assert "KeyError: '/secret/path'" in status["reason"]

    @pytest.mark.parametrize(
        ("state", "public"),
        [
            (
                {"not_ready": "cannot open /secret/path", "problem": "cannot open (KeyError)"},
                "the coordinator is not ready: cannot open (KeyError)",
            ),
            (
                {"pid": 1, "cluster_problem": "the head at /secret/path does not answer"},
                "the Ray cluster of the service does not answer",
            ),
        ],
    )
    def test_readyz_says_why_not_without_paths(
        self, live: Service, monkeypatch: pytest.MonkeyPatch, state: dict[str, object], public: str
    ) -> None:
        async def status() -> dict[str, object]:
            return state

        monkeypatch.setattr(live.engine, "status", status, raising=False)
        answer = live.client(None).get("/readyz")
        assert (answer.status_code, answer.json()["wrong"]) == (503, public)
        found = live.get("/status")
        assert found["ready"] is False
        assert "/secret/path" in found["reason"]

    def test_without_a_catalogue(self, live: Service) -> None:
        live.store.close()
        for file in live.settings.data_path.glob("catalogue.db*"):
            file.unlink()
        assert live.client(None).get("/readyz").status_code == 503
        problem = live.problem(503, "/runs")
        assert problem["code"] == "catalogue_unavailable"
        live.store.open()
        eventually(lambda: live.client(None).get("/readyz").status_code == 200)
        assert live.get("/runs")["rows"] == []

    def test_a_hung_coordinator_is_not_ready(
        self, live: Service, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(health, "READY_SECONDS", 0.2)

        async def hang() -> dict[str, object]:
            await asyncio.Event().wait()
            return {}

        monkeypatch.setattr(live.engine, "status", hang, raising=False)
        assert live.client(None).get("/readyz").status_code == 503
        assert live.get("/status")["ready"] is False

    def test_status(self, live: Service) -> None:
        status = live.get("/status")
        assert status["ready"] is True
        assert status["reason"] is None
        assert status["coordinator"]["coordinator"] == "c1"
        assert status["catalogue_bytes"] > 0


class TestPrometheus:
    def test_text(self, live: Service) -> None:
        from prometheus_client.parser import text_string_to_metric_families

        rank = Rank(live, world_size=1)
        rank.stage("actor_compute_log_prob", 5, payload())
        rank.begin("actor_compute_log_prob", 6)
        rank.say("dropped", what="event", count=3, reason="full")
        text = live.read.get("/metrics").text
        samples = {
            (sample.name, tuple(sorted(sample.labels.items()))): sample.value
            for family in text_string_to_metric_families(text)
            for sample in family.samples
        }
        run = ("run", "r")
        assert samples["stagescope_run_live", (run,)] == 1
        assert samples["stagescope_run_newest_step", (run,)] == 6
        assert samples["stagescope_step", (run,)] == 5
        assert samples["stagescope_run_step_lag", (run,)] == 1
        assert samples["stagescope_lost", (("kind", "event"), run)] == 3
        assert samples["stagescope_processes_live", (("role", "actor"), run)] == 1
        name = "rollout_corr/k3_kl"
        published = live.get("/steps/5/metrics")["metrics"][name]
        assert samples["stagescope_step_metric", (("metric", name), run)] == published

    @pytest.mark.parametrize("measured", [5, None])
    def test_how_far_numbers_are_behind_is_known_of_any_distance(
        self, live: Service, measured: int | None
    ) -> None:
        rank = Rank(live, world_size=1)
        rank.stage("actor_compute_log_prob", 5, None if measured is None else payload())
        for step in range(6, 46):
            rank.begin("actor_update", step)
        lines = live.read.get("/metrics").text.splitlines()
        found = {line.split()[0]: float(line.split()[1]) for line in lines if line[:1] != "#"}
        assert found['stagescope_run_newest_step{run="r"}'] == 45
        assert found.get('stagescope_step{run="r"}') == measured
        # No number where there was never one: such a run records no streams.
        assert found.get('stagescope_run_step_lag{run="r"}') == (measured and 40)

    def test_cardinality_is_bounded(self, tmp_path: Path) -> None:
        with service(tmp_path, prometheus_runs=2) as live:
            for number in range(5):
                rank = Rank(live, run=f"run-{number}", start=1_000.0 * number + 1_000)
                for stage in range(5):
                    rank.begin(f"stage-{number}-{stage}", 1)
            text = live.read.get("/metrics").text
            assert 'run="run-4"' in text
            assert 'run="run-2"' not in text
            assert "stage-4-1" not in text
            assert 'stagescope_stages_open{run="run-4",stage="other"} 5.0' in text


class TestCounts:
    def test_that_take_long_are_counted_beside_the_scrape(self) -> None:
        begin, go_on = threading.Event(), threading.Event()
        calls: list[int] = []

        class Slow:
            def counts(self) -> dict[str, list[dict[str, object]]]:
                calls.append(1)
                if len(calls) > 1:
                    begin.set()
                    assert go_on.wait(20)
                return {"attempts": [{"run": "r", "count": len(calls)}]}

        counts = Counts(cast(Catalogue, Slow()), patience=-1.0)
        first, _ = counts.read()
        assert first["attempts"][0]["count"] == 1
        again, age = counts.read()
        assert again == first
        assert age >= 0
        assert begin.wait(20)
        assert counts.read()[0] == first
        assert len(calls) == 2
        go_on.set()
        deadline = time.monotonic() + 20
        while counts.read()[0] == first and time.monotonic() < deadline:
            pass
        assert counts.read()[0]["attempts"][0]["count"] >= 2


def test_a_drain_says_whether_all_came_and_whether_anything_did(live: Service) -> None:
    unknown = live.operate.post("/drain", json={"run": "never-heard-of", "timeout": 0}).json()
    counts = {"drained": True, "pending": 0, "known": False, "missing": []}
    assert unknown == {"run": "never-heard-of", **counts}
    bad: tuple[dict[str, object], ...] = (
        {"run": 5}, {"run": None, "timeout": -1}, {"run": None, "wait": 1},
        {"run": None, "attempt_key": ""}, {"run": None, "attempt_key": 5},
    )  # fmt: skip
    for body in bad:
        assert live.operate.post("/drain", json=body).status_code == 422


def test_ranks_without_a_key_learn_that_of_their_attempt(live: Service, tmp_path: Path) -> None:
    options = {"run": "unkeyed", "url": live.server.url, "token": live.tokens.operate}
    probes = [Probe(checked_options({**options, "rank": rank})) for rank in (0, 1)]
    assert len({probe.dump_key for probe in probes}) == 2  # nothing is known yet
    try:
        for probe in probes:
            probe.start()
            with probe.stage("actor_update", step=1):
                pass
        eventually(lambda: len({probe.dump_key for probe in probes}) == 1)
        key = probes[0].dump_key
    finally:
        for probe in probes:
            probe.close(10.0)
    [attempt] = live.get("/runs/unkeyed/attempts")["rows"]
    assert key == attempt["attempt_key"]
