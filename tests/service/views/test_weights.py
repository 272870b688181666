"""Weights and devices, asked over HTTP, by the session and on the command line."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping

import pytest
from tests.support.api import Rank, Service, service
from tests.support.command_line import invoke

import stagescope
from stagescope_wire.errors import NotFound

NAMES = ("model.embed_tokens.weight", "model.layers.0.self_attn.q_proj.weight", "lm_head.weight")


def record(
    rank: Rank, values: Mapping[str, int], version: int, step: int | None, **fields: object
) -> None:
    side = "rollout" if rank.sender.role == "rollout" else "trainer"
    tensors = [(name, value, "bfloat16", (4, 8), None) for name, value in values.items()]
    event = {"side": side, "kind": "exchanged", "tensors": tensors, **fields}
    rank.say("weights", policy_version=version, step=step, **event)


def train(
    running: Service, run: str, *, odd: int | None = None, ranks: int = 3, versions: int = 2
) -> None:
    """In the second version the rollout lacks one sync, and a rank `odd` is a bit off."""
    actors = [
        Rank(
            running, run=run, rank=rank, world_size=ranks,
            layout={"dp_rank": rank, "host": "node-a", "device_kind": "npu",
                    "device_serial": f"SN-{rank}"},
        )
        for rank in range(ranks)
    ]  # fmt: skip
    engine = Rank(running, run=run, role="rollout", world_size=1)
    for version, step in ((4, 5), (5, 6), (6, 7))[:versions]:
        values = {name: 10 * version + at for at, name in enumerate(NAMES)}
        for rank, actor in enumerate(actors):
            wrong = {NAMES[0]: 7} if (rank, version) == (odd, 5) else {}
            record(actor, {**values, **wrong}, version, step)
        stale = {NAMES[1]: 41, "extra": 1} if version == 5 else {}
        record(engine, {**values, **stale}, version, None)


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    with service(tmp_path_factory.mktemp("home")) as made:
        train(made, "good-cards")
        train(made, "bad-card", odd=2)
        train(made, "two-cards", odd=1, ranks=2)
        train(made, "bad-again", odd=2)
        train(made, "mended", versions=3)
        yield made


def test_the_versions_of_a_run(running: Service) -> None:
    found = running.get("/weights", run="bad-card")
    assert (found["run"], found["attempt"], found["next"]) == ("bad-card", 1, None)
    five, four = found["rows"]
    assert (four["version"], four["step"], four["agree"], four["differ"]) == (4, 5, 3, 0)
    assert (five["differ"], five["missing"], five["replicas_differ"]) == (1, 1, 1)
    assert five["complete"] is True
    assert five["names"]["differs"] == [NAMES[1]]
    assert five["names"]["replicas differ"] == [NAMES[0]]


def test_the_first_version_that_agrees_ends_the_symptom(running: Service) -> None:
    def found(run: str) -> tuple[int | None, int | None]:
        rows = running.get(f"/runs/{run}/diagnosis")["rows"]
        [row] = [row for row in rows if row["rule"] == "weights_differ"]
        return row["since_step"], row["last_step"]

    assert found("bad-card") == (6, None)
    assert found("mended") == (6, 6)


def test_the_weights_of_a_step_the_worst_first(running: Service) -> None:
    found = running.get("/steps/6/weights", run="bad-card")
    assert (found["version"], found["versions"], found["step"]) == (5, [5], 6)
    assert found["counts"] == {
        "differs": 1, "missing": 1, "agrees": 2, "replicas differ": 1,
    }  # fmt: skip
    assert found["recorded"] == {"trainer": {"actor": [0, 1, 2]}, "rollout": {"rollout": [0]}}
    rows = found["rows"]
    assert [(row["name"], row["verdict"]) for row in rows] == [
        (NAMES[1], "differs"), ("extra", "missing"), (NAMES[0], "agrees"), (NAMES[2], "agrees"),
    ]  # fmt: skip
    assert (rows[0]["trainer"], rows[0]["rollout"]) == (f"{51:016x}", f"{41:016x}")
    assert (rows[0]["ranks"], rows[1]["reason"]) == ([0], "not in the trainer")
    assert rows[2]["odd_ranks"] == [{"role": "actor", "rank": 2}]


def test_by_version_and_by_verdict(running: Service) -> None:
    asked = {"run": "bad-card", "verdict": "differs"}
    assert [row["name"] for row in running.get("/weights/5", **asked)["rows"]] == [NAMES[1]]
    odd = running.get("/weights/5", run="bad-card", verdict="replicas differ")["rows"]
    assert [row["name"] for row in odd] == [NAMES[0]]
    assert running.get("/weights/4", **asked)["rows"] == []
    assert "see /weights" in running.problem(404, "/weights/9", run="bad-card")["advice"]
    running.problem(422, "/weights/5", verdict="wrong")


def test_a_page_after_the_other(running: Service) -> None:
    first = running.get("/weights/5", run="bad-card", limit=3)
    rest = running.get("/weights/5", run="bad-card", limit=3, cursor=first["next"])
    assert [row["name"] for row in first["rows"] + rest["rows"]][3:] == [NAMES[2]]
    newest = running.get("/weights", run="bad-card", limit=1)
    assert newest["rows"][0]["version"] == 5
    older = running.get("/weights", run="bad-card", limit=1, cursor=newest["next"])
    assert (older["rows"][0]["version"], older["next"]) == (4, None)


def test_a_device_that_is_outvoted_repeatedly(running: Service) -> None:
    card, *suspects = running.get("/devices")["rows"]
    assert (card["device"], card["odd"], card["suspected"]) == ("SN-2", 2, 0)
    assert card["runs"] == ["bad-again", "bad-card"]
    assert (card["last_role"], card["last_rank"], card["last_step"]) == ("actor", 2, 6)
    assert (card["host"], card["names"]) == ("node-a", [NAMES[0]])
    # Of two replicas either may be right.
    assert [(row["device"], row["odd"], row["suspected"]) for row in suspects] == [
        ("SN-0", 0, 1), ("SN-1", 0, 1),
    ]  # fmt: skip
    of_run = running.get("/devices", run="two-cards")["rows"]
    assert [row["device"] for row in of_run] == ["SN-0", "SN-1"]
    assert running.get("/devices", run="good-cards")["rows"] == []


@pytest.fixture
def session(running: Service, monkeypatch: pytest.MonkeyPatch) -> Iterator[stagescope.Session]:
    monkeypatch.setenv("STAGESCOPE_URL", running.server.url)
    monkeypatch.setenv("STAGESCOPE_TOKEN", running.tokens.read)
    with stagescope.attach() as found:
        yield found


def test_a_session_asks_the_same(session: stagescope.Session) -> None:
    weights = session.step(6, run="bad-card").weights()
    assert weights.where(verdict="differs")["name"] == (NAMES[1],)
    assert weights.about["counts"]["agrees"] == 2
    assert weights.heading == (
        "weights of version 5: 1 differs, 1 missing, 2 agrees, 1 replicas differ, "
        "run bad-card, attempt 1, step 6"
    )
    assert session.weights(5, run="bad-card", verdict="missing")["name"] == ("extra",)
    assert session.weights(run="bad-card")["version"] == (5, 4)
    assert session.devices()["device"][0] == "SN-2"
    assert len(session.devices("good-cards")) == 0
    with pytest.raises(NotFound):
        session.weights(17, run="bad-card")


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("weights", "--run", "bad-card"), "replicas_differ"),
        (("weights", "6", "--run", "bad-card"), NAMES[1]),
        (("weights", "latest", "--run", "bad-card", "--verdict", "differs"), "differs"),
        (("weights", "--version", "4", "--run", "bad-card"), "agrees"),
        (("devices",), "SN-2"),
    ],
)
def test_the_command_line_fits_in_80_columns(
    session: stagescope.Session, words: tuple[str, ...], expected: str
) -> None:
    done = invoke(*words)
    assert done.exit_code == 0, done.output
    assert expected in done.stdout
    assert max(map(len, done.stdout.splitlines())) <= 80
    rows = json.loads(invoke(*words, "--json").stdout)["rows"]
    assert rows


def test_a_step_and_a_version_at_once_are_refused(session: stagescope.Session) -> None:
    assert invoke("weights", "6", "--version", "5").exit_code == 2
    assert invoke("weights", "six").exit_code == 2
    assert "--verdict needs a STEP" in invoke("weights", "--verdict", "differs").stderr
    assert invoke("weights", "--version", "9", "--run", "bad-card").exit_code == 4


def test_names_are_mapped_by_the_settings(tmp_path_factory: pytest.TempPathFactory) -> None:
    home = tmp_path_factory.mktemp("mapped")
    with service(home, weight_names=r"^model\. -> ; _head -> _HEAD") as made:
        trained, engine = Rank(made, world_size=1), Rank(made, role="rollout", world_size=1)
        record(trained, {"model.a": 1, "lm_head": 2}, 4, 5)
        record(engine, {"a": 1, "lm_head": 2}, 4, 5)
        rows = made.get("/weights/4")["rows"]
        assert [(row["name"], row["verdict"], row["trainer_name"]) for row in rows] == [
            ("a", "agrees", "model.a"), ("lm_HEAD", "agrees", "lm_head"),
        ]  # fmt: skip
        assert made.get("/findings")["rows"] == []
