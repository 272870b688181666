from __future__ import annotations

import dataclasses
from typing import Any
from urllib.parse import quote

import pytest
from tests.support.api import Rank, Service
from tests.support.command_line import invoke
from tests.support.measure import payload
from tests.support.stores import eventually, write

from stagescope_service.core.findings import finding
from stagescope_service.core.instructions import Put
from stagescope_service.store.queries.overview import ListedRun
from stagescope_service.store.tables import StepState
from stagescope_service.views.pages import cursor
from stagescope_service.views.reading.rows import Lineage
from stagescope_wire.links import Link
from stagescope_wire.names import normal_run_name

LOG_PROB = "actor_compute_log_prob"


def train(live: Service, steps: range, **keywords: Any) -> Rank:
    """One rank goes through steps; the last stays open."""
    rank = Rank(live, world_size=1, **keywords)
    for step in steps:
        rank.stage("actor_update", step)
    return rank


def test_streams_that_are_not_joined_are_reported(live: Service) -> None:
    for role, stage, name in (
        ("rollout", "rollout_generate", "rollout_log_probs"),
        ("actor", LOG_PROB, "old_log_probs"),
    ):
        rank = Rank(live, role=role, world_size=1)
        handed = payload()
        handed["tensors"] = {n: t for n, t in handed["tensors"].items() if n in (name, "responses")}
        rank.begin(stage, 1)
        declared = {"tensors": {n: ["float32", [4, 12]] for n in handed["tensors"]}, "bytes": 1}
        rank.say("end", handed, stage=stage, step=1, payload={**declared, "meta": {}})
    problem = live.problem(404, "/steps/1/metrics")
    assert "both streams were handed over, by different payloads, and are not joined" in str(
        problem
    )
    assert "/findings" in problem["advice"]


def resumed(live: Service) -> None:
    """Attempt 1 did steps 1 to 6, attempt 2 resumed at 4 and did 5."""
    train(live, range(1, 7), key="first")
    train(live, range(5, 6), key="second", start=2_000.0, resumed_from_step=4)


@pytest.mark.parametrize(
    ("first", "second", "note"),
    [
        (range(1, 7), range(21, 23),
         "steps 7 to 20 were never reported: attempt 2 begins with 21, after 6 of attempt 1"),
        (range(1, 7), range(8, 10),
         "step 7 was never reported: attempt 2 begins with 8, after 6 of attempt 1"),
        (range(1, 7), range(7, 9), None),
        (range(1, 7), range(4, 6), None),
        (range(10, 40, 10), range(40, 60, 10), None),
    ],
)  # fmt: skip
def test_steps_between_two_attempts_that_neither_reported_are_named(
    first: range, second: range, note: str | None, live: Service
) -> None:
    train(live, first, key="first")
    train(live, second, key="second", start=2_000.0)
    assert live.get("/runs/r/attempts")["note"] == note
    assert live.get("/steps", attempt=1)["note"] == note
    with live.session() as session:
        assert note is None or note in " ".join(str(session.attempts("r")).split())


class TestRuns:
    def test_pages(self, live: Service) -> None:
        for number in range(5):
            train(live, range(1, 2), run=f"run-{number}", start=1_000.0 * (number + 1))
        found, following = [], None
        for _ in range(10):
            params = {"limit": 2} | ({"cursor": following} if following else {})
            page = live.get("/runs", **params)
            assert len(page["rows"]) <= 2
            found += [row["run"] for row in page["rows"]]
            following = page["next"]
            if following is None:
                break
        assert found == [f"run-{number}" for number in (4, 3, 2, 1, 0)]

    def test_are_found_by_each_of_their_names(self, live: Service) -> None:
        for given in ("qwen3/grpo", "qwen3 grpo", "训练", "?run=x#&%2F", "plain"):
            name = normal_run_name(given)
            rank = Rank(live, run=name, display_name=given, world_size=1)
            rank.stage("actor_update", 1)
            shown = {row["run"]: row["display_name"] for row in live.get("/runs")["rows"]}
            assert shown[name] == given
            with live.session() as session:
                listed = session.runs()
                assert listed.names[:2] == ("run", "display_name")
                assert listed.where(run=name)["display_name"] == (given,)
                for text in (given, name):
                    assert session.attempts(text)[0]["attempt"] == 1
                    assert session.step(1, run=text).run == name
                    assert session.findings(run=text).to_dicts() == []
                    assert session.firings(run=text).to_dicts() == []

    def test_every_answer_is_the_same_by_either_name(self, live: Service) -> None:
        given, name = "qwen3/grpo", normal_run_name("qwen3/grpo")
        train(live, range(1, 3), run="another", start=5_000.0)  # the default
        rank = Rank(live, run=name, display_name=given, world_size=1)
        for step in (1, 2, 3):
            rank.stage("actor_update", step, scalars={"loss": 0.5})
        asked = [
            (path, parameters)
            for path, methods in live.get("/openapi.json")["paths"].items()
            if path != "/stream"  # its own test
            for parameters in [{each["name"]: each for each in methods["get"].get("parameters", ())}
                               if "get" in methods else {}]
            if "run" in parameters
        ]  # fmt: skip
        assert len(asked) > 30
        differ = []
        for path, parameters in asked:
            answers = []
            for run in (given, name):
                url = path.replace("{step}", "1").replace("{run}", quote(run, safe=""))
                query = {"run": run} if parameters["run"]["in"] == "query" else {}
                query |= {"metric": "loss"} if "metric" in parameters else {}
                answer = live.read.get(url, params=query)
                kind = answer.headers["content-type"]
                body = answer.json() if "json" in kind else answer.status_code
                if isinstance(body, dict):
                    for other in ("instance", "wall", "made_wall"):
                        body.pop(other, None)
                answers.append((answer.status_code, body))
            if answers[0] != answers[1]:
                differ.append(path)
        assert differ == []

    def test_an_error_names_the_run_as_people_see_it(self, live: Service) -> None:
        given, name = "qwen3/grpo", normal_run_name("qwen3/grpo")
        Rank(live, run=name, display_name=given, world_size=1).stage("actor_update", 1)
        shown = f"run 'qwen3/grpo' ({name})"
        for path, query, wrong in (
            ("/steps/9/stages", {}, f"{shown} has no step 9"),
            ("/steps/1/stages", {"attempt": 2}, f"{shown} has no attempt 2"),
            ("/steps/1/stages", {"attempt_key": "x"}, f"{shown} has no attempt of key 'x'"),
        ):
            assert live.problem(404, path, run=given, **query)["wrong"] == wrong

    def test_are_listed_by_their_own_name_or_the_one_they_are_shown_with(
        self, live: Service
    ) -> None:
        write(
            live.store,
            *(Put("runs", {"run": run, "display_name": shown})
              for run, shown in (("a", None), ("b", "a"), ("c", "base/line"))),
        )  # fmt: skip

        def named(name: str) -> set[str]:
            return {row["run"] for row in live.get("/runs", name=name)["rows"]}

        assert named("a") == {"a", "b"}
        assert named("base/line") == {"c"}
        assert named("none") == set()

    def test_are_found_by_a_display_name_that_one_of_them_has(self, live: Service) -> None:
        for run in ("one", "two"):
            train(live, range(1, 2), run=run)
        write(live.store, Put("runs", {"run": "one", "display_name": "base/line"}))
        assert live.get("/runs/base%2Fline/attempts")["run"] == "one"
        write(live.store, Put("runs", {"run": "two", "display_name": "base/line"}))
        problem = live.problem(404, "/steps", run="base/line")
        assert problem["wrong"] == "2 runs are shown as 'base/line'"
        assert problem["expected"] == "the name of one: one, two"
        assert problem["advice"].startswith("give this name instead")

    def test_headings_have_the_name_that_people_see(self, live: Service) -> None:
        train(live, range(1, 3))
        assert "display_name" not in live.get("/runs/r/diagnosis")
        write(live.store, Put("runs", {"run": "r", "display_name": "Qwen3 no KL"}))
        for path in (
            "/runs/r/diagnosis",
            "/steps",
            "/steps/1/stages",
            "/exact",
            "/runs/r/attempts",
        ):
            answer = live.get(path)
            assert (answer["run"], answer["display_name"]) == ("r", "Qwen3 no KL"), path
        said = {
            ("doctor", "r"): " of run Qwen3 no KL",
            ("steps",): "steps, run Qwen3 no KL",
            ("exact",): "exact: run Qwen3 no KL",
        }
        for command, text in said.items():
            done = invoke(*command, env=live.environment())
            assert text in done.stdout.splitlines()[0], command

    def test_a_run_that_does_not_exist_is_told_the_nearest_of_all(self, live: Service) -> None:
        names = [f"other-{number}" for number in range(210)]
        rows = [Put("runs", {"run": name, "created_wall": 9.0}) for name in names]
        seven = Put("runs", {"run": "qwen-7b-grpo", "display_name": "seven", "created_wall": 1.0})
        write(live.store, seven, *rows)
        for text in ("qwen-7b-gpro", "sevn"):
            problem = live.problem(404, "/steps", run=text)
            expected = "one of 'seven' (qwen-7b-grpo) (the nearest of 211 runs)"
            assert problem["expected"] == expected
            assert problem["advice"] == "see /runs"
        problem = live.problem(404, "/steps", run="zzz")
        assert problem["expected"].startswith("one of other-0, other-1, other-10, ")
        assert problem["expected"].endswith(" (the newest of 211 runs)")


def test_an_empty_name_of_a_run_is_refused(live: Service) -> None:
    train(live, range(1, 2))
    for path in ("/steps", "/findings", "/captures", "/steps/latest/stages", "/triggers/firings"):
        problem = live.problem(404, path, run="")
        assert problem["wrong"] == "the name of the run is empty", path
    live.problem(422, "/runs", name="")


def test_a_wrong_address_below_a_run_is_no_route_and_invites_no_change(live: Service) -> None:
    train(live, range(1, 2))
    for path in ("/runs/r/wurst", "/runs/r"):
        problem = live.problem(404, path)
        assert problem["wrong"] == f"there is no route {path}"
        assert "PATCH" not in problem["detail"]
    assert "/runs/{run}/diagnosis" in live.problem(404, "/runs/r/zzz")["expected"]
    assert live.problem(404, "/runs/r/wurst")["expected"].startswith("/runs/{run}/worst;")


@pytest.mark.parametrize(
    ("path", "first"),
    [
        ("/doctor", "/runs/{run}/diagnosis"),
        ("/runs/r/doctor", "/runs/{run}/diagnosis"),
        ("/lost", "/losses"),
        ("/steps/5/gradient", "/steps/{step}/loss"),
        ("/stuck", "/steps/{step}/stuck"),
        ("/rounds", "/steps/{step}/rounds"),
        ("/steps/5/sample", "/steps/{step}/samples"),
        ("/finding", "/findings"),
        ("/v1/attempts", "/runs/{run}/attempts"),
        ("/zzz", "a route of /openapi.json"),
    ],
)
def test_a_route_that_does_not_exist_names_the_nearest(
    live: Service, path: str, first: str
) -> None:
    expected = live.problem(404, path)["expected"]
    assert expected.removeprefix("one of ").replace(";", ",").split(", ")[0] == first


class TestAttempts:
    def test_with_fingerprints_and_what_was_done_again(self, live: Service) -> None:
        train(live, range(1, 7), key="first", fingerprint={"git": "abc"})
        train(live, range(5, 6), key="second", start=2_000.0, resumed_from_step=4)
        answer = live.get("/runs/r/attempts")
        assert answer["run"] == "r"
        second, first = answer["rows"]
        assert (first["attempt"], first["attempt_key"]) == (1, "first")
        assert first["fingerprint"] == {"git": "abc"}
        assert first["superseded"] == [{"from_step": 5, "by": 2}]
        assert second["resumed_from_step"] == 4
        assert second["superseded"] == []
        assert second["state"] == "live"

    def test_only_steps_that_an_attempt_did_are_repeated_by_what_did_steps(
        self, live: Service
    ) -> None:
        train(live, range(1, 9), key="first")
        Rank(live, key="second", start=2_000.0, resumed_from_step=7)  # it died in its setup
        starts = ((7, (8, 11)), (7, (8, 11)), (10, (11, 14)), (20, (21, 23)))
        for at, (resumed_from, steps) in enumerate(starts):
            key, start = f"later {at}", 3_000.0 + 1_000.0 * at
            train(live, range(*steps), key=key, start=start, resumed_from_step=resumed_from)
        rows = live.get("/runs/r/attempts")["rows"]
        assert {row["attempt"]: row["superseded"] for row in rows} == {
            1: [{"from_step": 8, "by": 4}], 2: [], 3: [{"from_step": 8, "by": 4}],
            4: [], 5: [], 6: [],
        }  # fmt: skip

    def test_of_an_unknown_run(self, live: Service) -> None:
        train(live, range(1, 2), run="qwen3-8b")
        problem = live.problem(404, "/runs/qwen3-8/attempts")
        assert problem["expected"] == "one of qwen3-8b"

    def test_a_name_that_leaves_its_directory(self, live: Service) -> None:
        train(live, range(1, 2))
        for name in ("..%2F..%2Fetc", "%2e%2e", "a%00b", "a%20b", "é", "x" * 101):
            answer = live.read.get(f"/runs/{name}/attempts")
            assert answer.status_code in (404, 422), name
            assert answer.headers["content-type"] == "application/problem+json", name


class TestSteps:
    def test_of_all_attempts_or_of_one(self, live: Service) -> None:
        resumed(live)
        answer = live.get("/steps")
        assert [(row["step"], row["attempt"], row["superseded_by"]) for row in answer["rows"]] == [
            (5, 2, None),
            (4, 1, None),
            (3, 1, None),
            (2, 1, None),
            (1, 1, None),
            (6, 1, 2),  # the current ones come first
            (5, 1, 2),
        ]
        assert answer["note"] == (
            "superseded, listed after the current steps: 2 steps of attempt 1 (5 to 6); "
            "a later attempt resumed before them"
        )
        assert live.get("/steps", attempt=2)["note"] is None
        assert [row["step"] for row in live.get("/steps", attempt=2)["rows"]] == [5]

    @pytest.mark.parametrize("limit", [1, 2, 3, 6])
    def test_pages_hold_while_steps_begin(self, live: Service, limit: int) -> None:
        resumed(live)
        newest = Rank(live, key="second", rank=1, start=3_000.0)
        found, following = [], None
        for step in range(20, 40):
            params = {"limit": limit} | ({"cursor": following} if following else {})
            page = live.get("/steps", **params)
            found += [(row["step"], row["attempt"]) for row in page["rows"]]
            following = page["next"]
            newest.begin("actor_update", step)
            if following is None:
                break
        assert found == [(5, 2), (4, 1), (3, 1), (2, 1), (1, 1), (6, 1), (5, 1)]

    def test_a_wrong_step_leads_to_current_ones(self, live: Service) -> None:
        resumed(live)
        problem = live.problem(404, "/steps/9/stages")
        assert problem["expected"] == "one of 1, 2, 3, 4, 5"
        assert live.problem(404, "/steps/9/stages", attempt=1)["expected"].endswith("5, 6")


class TestWhoAnswers:
    def test_the_run_whose_training_stage_began_last(self, live: Service) -> None:
        train(live, range(1, 3), run="trained", start=5_000.0)
        rank = Rank(live, run="rolling", start=9_000.0)
        rank.stage("rollout_generate", 1)
        answer = live.get("/steps")
        assert answer["run"] == "trained"
        assert answer["also_live"] == [{"run": "rolling", "attempt": 1}]
        assert live.get("/steps", run="rolling")["run"] == "rolling"

    def test_the_latest_attempt_that_has_the_step(self, live: Service) -> None:
        resumed(live)
        assert live.get("/steps/5/stages")["attempt"] == 2
        old = live.get("/steps/5/stages", attempt=1)
        assert (old["attempt"], old["superseded_by"]) == (1, 2)
        gone = live.get("/steps/6/stages")
        assert (gone["attempt"], gone["superseded_by"]) == (1, 2)
        assert live.get("/steps/3/stages")["superseded_by"] is None

    def test_of_an_attempt_key_only_its_own(self, live: Service) -> None:
        resumed(live)
        path = "/steps/5/stages"
        assert live.get(path, attempt_key="first")["attempt"] == 1
        assert live.get(path, attempt_key="second")["attempt"] == 2
        assert live.get("/steps/latest/stages", attempt_key="first")["step"] == 6
        assert live.get(path, attempt_key="first", attempt=1)["attempt"] == 1
        problem = live.problem(404, path, attempt_key="third")
        assert problem["wrong"] == "run r has no attempt of key 'third'"
        problem = live.problem(404, path, attempt_key="first", attempt=2)
        assert problem["expected"] == "one of 1"
        problem = live.problem(404, "/steps/6/stages", attempt_key="second")
        assert "has no step 6" in problem["wrong"]

    def test_of_a_key_that_covers_two_starts_the_newest(self, live: Service) -> None:
        train(live, range(1, 4), key="job~1")
        late = Rank(live, key="job~1", start=2_000.0)
        late.sender = dataclasses.replace(late.sender, incarnation="again")
        late.say("hello", world_size=1)
        late.stage("actor_update", 2)
        keys = [row["attempt_key"] for row in live.get("/runs/r/attempts")["rows"]]
        assert keys == ["job-1~2", "job-1"]
        assert live.get("/steps/2/stages", attempt_key="job~1")["attempt"] == 2
        assert live.get("/steps/3/stages", attempt_key="job~1")["attempt"] == 1
        live.problem(404, "/steps/2/stages", attempt_key="job-1~2")

    def test_latest_is_of_the_newest_attempt(self, live: Service) -> None:
        resumed(live)
        answer = live.get("/steps/latest/stages")
        assert (answer["attempt"], answer["step"]) == (2, 5)
        assert live.get("/steps/latest/stages", attempt=1)["step"] == 6

    def test_measured_is_the_newest_closed_step_with_numbers(self, live: Service) -> None:
        rank = train(live, range(1, 2))
        # Without numbers in any step it is the latest.
        assert live.get("/steps/measured/stages")["step"] == 1
        for step in (2, 3):
            rank.stage(LOG_PROB, step, payload())
        rank.stage("actor_update", 4)
        rank.stage(LOG_PROB, 5, payload())
        assert eventually(lambda: live.get("/steps/measured/stages")["step"] == 3)
        assert live.get("/steps/measured/metrics")["step"] == 3
        assert live.get("/steps/captured/stages")["step"] == 5  # no step has operators
        assert live.get("/figures/rounds", step="measured")["title"]
        Rank(live, key="second", start=2_000.0, world_size=1, resumed_from_step=1).begin(
            LOG_PROB, 2
        )
        # Attempt 2 resumed before step 3, and has no numbers yet.
        answer = live.get("/steps/measured/stages")
        assert (answer["attempt"], answer["step"]) == (2, 2)
        assert live.get("/steps/measured/stages", attempt=1)["step"] == 3

    def test_latest_passes_over_an_attempt_without_a_step(self, live: Service) -> None:
        train(live, range(1, 4), key="first")
        Rank(live, key="second", start=2_000.0)
        assert live.get("/steps/latest/stages")["attempt"] == 1

    def test_a_stored_mark_wins(self) -> None:
        step: StepState = {
            "attempt_id": 1, "step": 5, "closed_wall": None, "completeness": None,
            "superseded_by": 7, "summary_wall": None, "parts_mark": None, "summary_mark": None,
            "rows_removed": None,
        }  # fmt: skip
        assert Lineage([]).superseded_by(step) == 7


IMPOSSIBLE: list[tuple[str, dict[str, object]]] = [
    ("/steps", {"attempt": 0}),
    ("/steps", {"attempt": "x"}),
    ("/steps", {"attempt": 2**40}),
    ("/steps", {"limit": 0}),
    ("/steps", {"limit": 100_000}),
    ("/steps", {"cursor": "nonsense"}),
    ("/steps", {"cursor": "!!!"}),
    ("/steps", {"cursor": cursor(1)[:-1]}),
    ("/losses", {"step": 10**20}),
    ("/findings", {"step": -1}),
    ("/series", {"metric": "loss", "from": -1}),
    ("/series", {"metric": "loss", "to": 10**18}),
    ("/steps/1/metrics", {"rank": -1}),
    ("/steps/1/metrics", {"round": "a"}),
    ("/steps/1/metrics", {"stage": "x" * 201}),
]


class TestErrors:
    def test_without_any_run(self, live: Service) -> None:
        assert "no run yet" in live.problem(404, "/steps")["wrong"]
        assert live.get("/runs") == {"rows": [], "next": None}

    def test_an_unknown_step_names_the_nearest(self, live: Service) -> None:
        train(live, range(1, 30))
        problem = live.problem(404, "/steps/17000/stages")
        assert problem["wrong"] == "run r has no step 17000"
        assert problem["expected"] == (
            "one of 22, 23, 24, 25, 26, 27, 28, 29 (the nearest of 29, from 1 to 29)"
        )
        assert problem["type"] == "urn:stagescope:not_found"
        assert problem["instance"] == "/steps/17000/stages"

    def test_an_unknown_attempt_names_those_there_are(self, live: Service) -> None:
        resumed(live)
        assert live.problem(404, "/steps/5/stages", attempt=9)["expected"] == "one of 1, 2"
        problem = live.problem(404, "/steps/6/stages", attempt=2)
        assert problem["wrong"] == "attempt 2 of run r has no step 6"
        assert problem["expected"] == "one of 5"

    def test_a_step_that_is_none(self, live: Service) -> None:
        train(live, range(1, 2))
        expected = "an integer from 0 of at most 18 digits, 'latest', 'measured' or 'captured'"
        for step in ("five", "1.0", "1e3", "9" * 30, "9" * 19, "-", "-1", "+5", "\u0665"):
            for route in ("stages", "metrics", "kept", "stuck", "operators", "weights"):
                problem = live.problem(422, f"/steps/{step}/{route}")
                assert problem["expected"] == expected, (step, route)

    def test_values_that_cannot_be(self, live: Service) -> None:
        train(live, range(1, 2))
        for path, params in IMPOSSIBLE:
            problem = live.problem(422, path, **params)
            assert problem["code"] == "invalid_input", (path, params)
            assert problem["expected"], (path, params)
            assert "Input should" not in problem["detail"], (path, params)
        problem = live.problem(422, "/steps", attempt="x", limit=0)
        assert problem["wrong"] == "limit is '0'; attempt is 'x'"
        assert problem["expected"] == "limit: at least 1; attempt: an integer"

    def test_any_text_may_be_the_name_of_a_run_that_does_not_exist(self, live: Service) -> None:
        train(live, range(1, 2))
        for run in ("a/../b", "..", "a\0b", "x" * 300, "' OR 1=1 --"):
            problem = live.problem(404, "/steps", run=run)
            assert problem["wrong"] == f"there is no run {run!r:.200}"
            assert problem["expected"] == "one of r"

    def test_unknown_parameters_name_the_known(self, live: Service) -> None:
        train(live, range(1, 2))
        problem = live.problem(422, "/steps/1/metrics", rnak=1)
        assert problem["wrong"] == "unknown query parameter rnak"
        assert problem["expected"] == "one of attempt, attempt_key, rank, role, round, run, stage"
        assert live.problem(422, "/plan", run="r")["expected"] == "none"

    def test_a_parameter_given_twice(self, live: Service) -> None:
        train(live, range(1, 2))
        answer = live.read.get("/steps?attempt=1&attempt=2")
        assert answer.status_code == 422
        assert "twice" in answer.json()["wrong"]

    def test_no_route_and_no_method(self, live: Service) -> None:
        assert live.problem(404, "/step/5")["code"] == "not_found"
        answer = live.operate.put("/runs")
        assert answer.status_code == 405
        assert answer.json()["code"] == "method_not_allowed"
        assert answer.json()["expected"] == "GET"


class TestLossesAndFindings:
    def test_advice_leads_to_the_attempt_that_a_finding_is_of(self, live: Service) -> None:
        resumed(live)
        see = [Link("stages", 5), Link("devices")]
        found = [
            finding("k", "wrong", run="r", attempt_id=number, wall=1.0, step=5, see=see)
            for number in (1, 2)
        ]
        live.store.submit(found).result(30)
        told = {1: "see /steps/5/stages?run=r&attempt=1, /devices?run=r"}
        told[2] = "see /steps/5/stages?run=r, /devices?run=r"  # the newest answers by default
        for path in ("/findings", "/findings/groups"):
            rows = live.get(path, run="r", only="k")["rows"]
            assert {row["attempt"]: row["advice"] for row in rows} == told, path
            for row in rows:
                assert f"see {', '.join(each['path'] for each in row['see'])}" == row["advice"]
        for put, text in zip(found, told.values(), strict=True):
            assert live.get(f"/findings/{put.row['finding_id']}")["advice"] == text
        assert live.get("/steps/5/stages", run="r")["attempt"] == 2
        assert live.get("/steps/5/stages", run="r", attempt=1)["attempt"] == 1

    def test_losses_newest_first(self, live: Service) -> None:
        rank = train(live, range(1, 3))
        for count in (1, 2, 3):
            rank.say(
                "dropped", what="payload", count=count, bytes=10, reason="full", step=2, stage="s"
            )
        losses = {row["step"]: row["lost"] for row in live.get("/steps")["rows"]}
        assert losses == {step: len(live.get("/losses", step=step)["rows"]) for step in losses}
        assert sum(losses.values()) == 3
        answer = live.get("/losses")
        assert answer["run"] == "r"
        assert [row["count"] for row in answer["rows"]] == [3, 2, 1]
        assert answer["rows"][0]["reason"] == "full"
        assert answer["rows"][0]["attempt"] == 1
        assert "attempt_id" not in answer["rows"][0]
        assert live.get("/losses", step=1)["rows"] == []
        assert len(live.get("/losses", kind="payload", attempt=1)["rows"]) == 3
        first = live.get("/losses", limit=2)
        assert len(first["rows"]) == 2
        assert len(live.get("/losses", limit=2, cursor=first["next"])["rows"]) == 1

    def test_filters_by_unknown_values_name_the_known(self, live: Service) -> None:
        rank = train(live, range(1, 3))
        assert live.get("/findings", kind="refused_recrd")["rows"] == []  # there is none yet
        rank.say("refused", what="record", message="response_mask is missing", step=2, stage="s")
        rank.say("dropped", what="payload", count=1, bytes=1, reason="full", step=2, stage="s")
        assert len(live.get("/findings", kind="refused_record")["rows"]) == 1
        assert live.get("/findings", severity="error")["rows"] == []
        problem = live.problem(422, "/findings", severity="eror")
        assert problem["wrong"] == "severity is 'eror'"
        assert "'error', 'warning' or 'info'" in problem["expected"]
        problem = live.problem(404, "/findings", kind="refused_recrd")
        assert problem["expected"] == "one of refused_record"
        assert live.get("/findings", kind="streams_shifted")["rows"] == []  # none of it, so far
        assert live.problem(404, "/losses", kind="paylod")["expected"] == "one of payload"


def test_a_complete_step_says_what_its_numbers_lack(live: Service) -> None:
    ranks = [Rank(live, rank=rank) for rank in (0, 1)]
    announced = {"tensors": {"old_log_probs": {}}, "bytes": 1}
    for step in (1, 2, 3):
        for index, rank in enumerate(ranks):
            rank.begin(LOG_PROB, step)
            held = payload(seed=step, first_sample=4 * index)
            # Of step 2 nothing is read, of step 3 what rank 0 has.
            handed = held if (step, index) in ((1, 0), (1, 1), (3, 0)) else None
            rank.say("end", handed, stage=LOG_PROB, step=step, payload=announced)
    for rank in ranks:
        live.engine.fall_silent(rank)
    rows = {row["step"]: row for row in live.get("/steps")["rows"]}
    why = "(its process stopped reporting before the payload was read)"
    declared = {step: (row["complete"], row["measured"], row["gap"]) for step, row in rows.items()}
    assert declared == {
        1: ("complete", True, None),
        2: ("complete", False, f"no numbers: 2 payloads lost {why}"),
        3: ("complete", True, f"numbers without 1 payload lost {why}"),
    }
    assert live.get("/steps/2/stages")["gap"] == declared[2][2]
    assert live.get("/steps/3/rounds")["gap"] == declared[3][2]
    problem = live.problem(404, "/steps/2/metrics")
    assert f"no numbers: 2 payloads lost {why}" in str(problem)
    assert problem["advice"].startswith("`measured` names the newest step with numbers: 3; see ")
    assert "/steps/2/stages?run=r&attempt=1 for who has arrived" in problem["advice"]
    reasons = live.get("/series", metric="rollout_corr/k3_kl")["reasons"]
    assert reasons == [None, f"2 payloads were lost: {why.strip('()')}", None]
    with live.session() as session:
        assert f"no numbers: 2 payloads lost {why}" in repr(session.step(2))
        assert "no numbers: 2 payloads lost" in repr(session.steps())
        assert "no numbers: 2 payloads lost" in repr(session.step(2).stages())


def test_an_error_inside_says_nothing_of_its_cause(
    live: Service, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(**page: int) -> list[ListedRun]:
        raise RuntimeError("SELECT secret FROM /path")

    live.catalogue.runs = broken  # type: ignore[method-assign, assignment]
    problem = live.problem(500, "/runs")
    assert "secret" not in str(problem)
    assert problem["advice"] == "the service's log has the traceback"
    # The server writes it after it has answered.
    eventually(lambda: "SELECT secret" in caplog.text)


def test_the_worst_step_and_token_are_of_the_current_steps(live: Service) -> None:
    """A step that a later attempt repeats, and one without numbers, count for nothing."""
    first = Rank(live, world_size=1, key="first")
    for step, noise in ((1, 0.01), (2, 0.05), (3, 2.0)):
        first.stage(LOG_PROB, step, payload(seed=step, noise=noise))
    again = Rank(live, world_size=1, key="second", start=2_000.0, resumed_from_step=2)
    spike = payload(seed=7, noise=0.02)
    p = spike["tensors"]["old_log_probs"][2]
    p[3, 8] -= 0.75
    again.stage(LOG_PROB, 3, spike)
    again.stage(LOG_PROB, 4, payload(seed=4, noise=0.04))
    again.stage("actor_update", 5)
    again.begin("actor_update", 6)
    found = live.get("/runs/r/worst")
    mean, largest = (
        live.get(f"/steps/{step}/metrics")["metrics"][f"logprob_abs_diff/{name}"]
        for step, name in ((2, "mean"), (3, "max"))
    )
    assert found["step"] == {"step": 2, "attempt": 1, "abs_diff": pytest.approx(mean)}
    assert found["token"] == {
        "step": 3, "attempt": 2, "abs_diff": pytest.approx(largest), "sample_uid": "sample-3",
        "role": "actor", "rank": 0, "row": 3, "position": 8,
    }  # fmt: skip
    Rank(live, run="empty", world_size=1).begin("actor_update", 1)
    found = live.get("/runs/empty/worst")
    assert (found["step"], found["token"]) == (None, None)
