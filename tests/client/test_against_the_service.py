"""The client and the command line on the real API, its store, state machine and statistics."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import polars
import pytest
from tests.support.api import Rank, Service, service
from tests.support.command_line import ask, invoke
from tests.support.measure import payload
from tests.support.stores import eventually

import stagescope
from stagescope import Session, Table
from stagescope_wire.errors import Forbidden, InvalidPlan, NotFound
from stagescope_wire.nonfinite import Json

STAGE = "actor_compute_log_prob"
NOUNS = ("rounds", "ranks", "tokens", "stages", "scalars", "dumps")


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """Run `r`: attempt 1 with step 5; attempt 2 did it again, one NaN, rank 1 inside the stage."""
    with service(tmp_path_factory.mktemp("home")) as running:
        first = [Rank(running, rank=rank, fingerprint={"git": "0f3a"}) for rank in (0, 1)]
        for index, rank in enumerate(first):
            rank.stage(STAGE, 5, payload(seed=index, first_sample=4 * index))
        for rank in first:
            rank.begin("rollout_generate", 6)
        second = [Rank(running, rank=rank, key="a2", start=2_000.0) for rank in (0, 1)]
        broken = payload(seed=7)
        broken["tensors"]["rollout_log_probs"][2][0, 0] = math.nan
        second[0].stage(STAGE, 5, broken, scalars={"loss": math.nan, "reward": 1.0})
        second[1].begin(STAGE, 5)
        yield running


@pytest.fixture
def found(real: Service, monkeypatch: pytest.MonkeyPatch) -> Service:
    """The service, found by the file that its start writes."""
    home = real.settings.home
    written = {
        "url": real.server.url,
        "read_token_file": str(home / "read.token"),
        "operate_token_file": str(home / "operate.token"),
    }
    (home / "service.json").write_text(json.dumps(written))
    monkeypatch.setenv("STAGESCOPE_HOME", str(home))
    return real


def test_both_attempts_and_their_fingerprints(session: Session) -> None:
    assert session.runs()["run"] == ("r",)
    attempts = session.attempts()
    assert attempts["attempt"] == (2, 1)
    assert attempts.where(attempt=1)[0]["fingerprint"]["git"] == "0f3a"
    assert session.attempts("r").to_dicts() == attempts.to_dicts()


def test_the_latest_attempt_answers_by_default(session: Session) -> None:
    again, first = session.step(5), session.step(5, attempt=1)
    assert (again.run, again.attempt, first.attempt) == ("r", 2, 1)
    assert first.metrics().complete == "complete"
    open_one = again.metrics()
    assert open_one.complete == "open"
    assert (open_one.missing[0]["role"], open_one.missing[0]["rank"]) == ("actor", 1)
    assert first.metrics()["per_round/total_rounds"] == 2


def test_the_newest_step_that_has_numbers(session: Session) -> None:
    assert session.step("latest", attempt=1).step == 6
    assert session.step("measured", attempt=1).step == 5
    # Attempt 2 has no closed step: its open one answers with what has come.
    assert session.step("measured", attempt=2).attempt == 2


def test_rounds_add_up_to_the_totals(session: Session) -> None:
    rounds = session.step(5, attempt=1).rounds()
    whole = rounds.about["whole"]
    assert sum(rounds["tokens"]) == whole["tokens"]
    assert math.fsum(rounds["abs_diff_sum"]) == pytest.approx(whole["abs_diff_sum"], rel=1e-12)


def test_a_filtered_step_has_fewer_tokens(session: Session) -> None:
    step = session.step(5, attempt=1)
    whole, one = step.metrics(), step.metrics(rank=1, role="actor", stage=STAGE)
    assert one.about["coverage"]["tokens"] < whole.about["coverage"]["tokens"]
    assert step.metrics(round=1).about["round"] == 1
    with pytest.raises(NotFound, match="round 9"):
        step.metrics(round=9)


def test_what_is_not_finite_is_shown(session: Session) -> None:
    step = session.step(5)
    nonfinite = step.tokens(kind="nonfinite")
    assert len(nonfinite) == 1
    assert math.isnan(nonfinite[0]["q"])
    assert any("nan" in kinds and kinds["nan"] == 1 for kinds in step.metrics().nonfinite.values())
    assert "not finite under the mask: 1 NaN in rollout" in str(step.metrics())
    scalars = {row["name"]: row["value"] for row in step.scalars()}
    assert math.isnan(scalars["loss"])
    assert scalars["reward"] == 1.0


def test_what_has_no_rows_has_the_columns_of_what_has_some(session: Session) -> None:
    first, second = (session.step(5, attempt=number) for number in (1, 2))
    tables: list[tuple[Table, Table]] = []
    tables.append((first.tokens(kind="nonfinite"), second.tokens(kind="nonfinite")))
    tables.append((first.scalars(), second.scalars()))
    for empty, full in tables:
        assert (len(empty), empty.names) == (0, full.names)
        assert polars.concat([full.to_polars(), empty.to_polars()]).height == len(full)
        assert dict(empty.to_pandas().dtypes) == dict(full.to_pandas().dtypes)
    assert session.step(5, attempt=1).rounds().names[0] == "round"


def test_every_noun_converts(session: Session) -> None:
    step = session.step(5, attempt=1)
    for noun in NOUNS:
        table = getattr(step, noun)()
        assert len(table) == len(table.to_pandas()) == len(table.to_polars()), noun
        assert table._repr_html_()
    for table in (session.runs(), session.steps(), session.attempts(), session.lost()):
        assert len(table) == table.to_arrow().num_rows


def test_request_and_withdraw_a_capture(session: Session, found: Service) -> None:
    capture = session.capture(
        run="r", steps=[9], stages=[STAGE], config={"task": "statistics", "level": "L1"}
    )
    assert session.plan()["capture_id"] == (capture["capture_id"],)
    session.remove_capture(capture["capture_id"])
    assert len(session.plan()) == 0
    with pytest.raises(NotFound, match="is no longer active: it is withdrawn") as caught:
        session.remove_capture(capture["capture_id"])
    assert caught.value.expected == ""
    with pytest.raises(NotFound, match="no capture 'other' is active"):
        session.remove_capture("other")
    [listed] = session.captures()
    assert (listed["steps"], listed["stages"], listed["ranks"]) == ([9], [STAGE], "all")
    agreed = session.capture(run="r", steps=[9], stages="all", keep=["old_log_probs"])
    newest = session.captures()[0]
    assert (newest["capture_id"], newest["attempt"]) == (agreed["capture_id"], 2)
    assert newest["start"] == agreed["agreement"]["start"]
    session.remove_capture(agreed["capture_id"])
    with pytest.raises(InvalidPlan, match="requests nothing"):
        session.capture(steps=[9], stages="all", keep=[])
    with pytest.raises(Forbidden, match="allowed roots"):
        session.capture(steps=[9], stages="all", keep=["x"], data_dir="/etc")
    assert found.tokens is not None
    with (
        stagescope.attach(found.server.url, token=found.tokens.read) as reader,
        pytest.raises(Forbidden, match="read token"),
    ):
        reader.capture(steps=[9], stages="all", keep=["x"])


@pytest.mark.usefixtures("found")
@pytest.mark.parametrize(
    "args",
    [
        *(["status"], ["runs"], ["attempts"], ["steps"], ["losses"], ["findings"], ["plan"]),
        *(["captures"], ["metrics"], ["metrics", "5"], ["metrics", "--attempt", "1"]),
        *([noun, "5", "--attempt", "1"] for noun in NOUNS),
        ["rounds", "--by", "staleness"],
    ],
    ids=" ".join,
)
def test_the_command_line(args: list[str]) -> None:
    text = ask(*args)
    assert text.exit_code == 0, text.output
    assert max(map(len, text.stdout.splitlines())) <= 80
    assert "\x1b" not in text.stdout
    # Spelled numbers stay spelled: the output is strict JSON.
    answer: Json = json.loads(ask(*args, "--json").stdout, parse_constant=pytest.fail)
    assert answer.get("attempt") == (1 if "1" in args else answer.get("attempt"))


@pytest.mark.usefixtures("found")
def test_the_command_lines_refusals() -> None:
    assert ask("metrics", "77").exit_code == 4
    assert ask("metrics", "5", "--run", "other").exit_code == 4
    early = ask("metrics", "latest", "--attempt", "1")
    assert early.exit_code == 4
    assert "no numbers (yet)" in early.stderr


def test_a_service_that_is_not_ready(found: Service) -> None:
    found.engine.not_ready = "the disk is full"
    try:
        result = ask("status")
        assert result.exit_code == 3
        assert "not ready: the disk is full" in result.stdout
    finally:
        found.engine.not_ready = None
    assert ask("status").exit_code == 0


# --- hangs ------------------------------------------------------------------------------------

THREADS = [
    {"name": "trainer", "ident": 7, "is_training": True, "stack": '  File "t.py", line 1, in f'},
    {"name": "other", "ident": 8, "is_training": False, "stack": '  File "o.py", line 2, in g'},
]


@pytest.fixture
def hung(found: Service) -> tuple[Rank, Rank]:
    """Run `hung`: in step 2 rank 1 does not begin what rank 0 began long ago."""
    ranks = [Rank(found, run="hung", rank=rank, start=1_000.0) for rank in (0, 1)]
    for rank in ranks:
        rank.stage("actor_update", 1)
        rank.stage("rollout_generate", 2)
    ranks[0].begin("actor_update", 2)
    return ranks[0], ranks[1]


def test_who_is_stuck(session: Session, hung: tuple[Rank, Rank]) -> None:
    [row] = session.step(2, run="hung").stuck()
    assert (row["rank"], row["status"], row["stage"]) == (1, "not begun", "actor_update")
    shown = invoke("stuck", "2", "--run", "hung")
    assert shown.exit_code == 0
    assert "not begun" in shown.output
    said = json.loads(invoke("stuck", "--run", "hung", "--rank", "1", "--json").output)
    assert [row["rank"] for row in said["rows"]] == [1]
    assert (
        json.loads(invoke("stuck", "--run", "hung", "--rank", "0", "--json").output)["rows"] == []
    )


def test_stacks_to_read(session: Session, hung: tuple[Rank, Rank], found: Service) -> None:
    with ThreadPoolExecutor(1) as pool:
        asking = pool.submit(session.stacks, "hung", ranks=[0, 1, 4], wait=3.0)
        row, *_ = eventually(found.catalogue.stacks)
        request = {"request_id": row["request_id"], "threads": THREADS}
        hung[0].say("stacks", **request, step=2, stage="actor_update")
        accepted = asking.result(30)
    assert [row["rank"] for row in accepted.rows] == [0]
    assert [row["rank"] for row in accepted.not_answered] == [1, 4]
    text = "\n".join(accepted.lines())
    assert "actor rank 0 in step 2, actor_update" in text
    assert "trainer (training)" in text
    assert "in f" in text
    assert "in g" not in text
    assert "\nrank 4: it has never reported" in text
    assert "in g" in "\n".join(accepted.all_threads().lines())
    kept = session.step(2, run="hung").stacks(rank=0)
    assert kept.rows[0]["threads"] == THREADS
    shown = invoke("stacks", "2", "--run", "hung", "--ranks", "0", "--all-threads")
    assert shown.exit_code == 0
    assert "in g" in shown.output
    assert "rank 1" not in shown.output
    assert "no stacks were taken" in invoke("stacks", "1", "--run", "hung").output
    late = invoke("stacks", "--run", "hung", "--ranks", "1", "--wait", "0.2")
    assert "actor rank 1: no answer in time" in late.output
    assert invoke("stacks", "--ranks", "worst(2)").exit_code == 2


def test_the_command_line_advises_its_own_commands(session: Session) -> None:
    with pytest.raises(NotFound, match=r"see session\.runs\(\)"):
        session.step(1, run="nowhere").metrics()
    told = invoke("metrics", "1", "--run", "nowhere")
    assert told.exit_code == 4
    assert "see `stagescope runs`" in told.stderr


def test_a_run_of_which_no_step_has_numbers_says_so(found: Service, session: Session) -> None:
    rank = Rank(found, run="bare", key="bare", world_size=1)
    handed = payload()
    del handed["tensors"]["rollout_log_probs"]
    rank.stage(STAGE, 1, handed)
    rank.begin(STAGE, 2)
    assert session.step("latest", run="bare").step == 2
    with pytest.raises(NotFound, match=r"no step of run bare has numbers; the latest: step 2 has"):
        session.step("measured", run="bare")
    said = ask("rounds", "--run", "bare", "--attempt", "1")
    assert said.exit_code == 4
    assert "no step of run bare, attempt 1, has numbers" in " ".join(said.stderr.split())
    with pytest.raises(NotFound, match="run 'none'"):
        session.step("measured", run="none")


def test_stuck_answers_for_an_attempt_before_its_first_step(found: Service) -> None:
    before = Rank(found, run="restarted", world_size=1)
    before.stage(STAGE, 5)
    before.say("finish")
    Rank(found, run="restarted", key="a2", world_size=1, start=2_000.0)
    answer = ask("stuck", "--run", "restarted")
    assert answer.stdout.startswith("stuck, run restarted, attempt 2\n")
    assert "attempt 2 is live, and no rank has begun a step yet" in answer.stdout
    assert "step 5" in ask("stuck", "5", "--run", "restarted").stdout
