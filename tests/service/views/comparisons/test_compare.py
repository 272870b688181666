"""Runs, steps and directories held against each other: over HTTP and by the session."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from tests.support.api import Rank, Service, service
from tests.support.command_line import invoke
from tests.support.dump_files import nexrl_directory
from tests.support.step_dumps import WholeStep

import stagescope
from stagescope.comparison_report import ComparisonReport
from stagescope_service.compare.comparison import compare
from stagescope_service.views.comparisons import comparing
from stagescope_service.views.reading import dependencies
from stagescope_wire.errors import Forbidden, InvalidInput, NotFound
from stagescope_wire.keep import SECTIONS

WHOLE = WholeStep([9, 2, 4, 3])
STAGE = "actor_compute_log_prob"


def payload(rows: list[int], **changed: Any) -> dict[str, Any]:
    ids = WHOLE.ids(rows)
    tensors = WHOLE.piece(rows)
    for name, change in changed.items():
        tag, shape, values, offsets = tensors[name]
        tensors[name] = (tag, shape, change(values.copy()), offsets)
    strings = {"sample_ids": ids["samples"], "group_ids": ids["groups"]}
    return {"schema": 1, "tensors": tensors, "strings": strings, "meta": {}}


def nudged(values: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    values[0, 0] += 64 if values.dtype == np.uint16 else 0.5  # of bfloat16 the bits
    return values


def train(running: Service, run: str, split: list[list[int]], **changed: object) -> None:
    """Steps 5 and 6 of as many ranks as `split` has; what is changed is so in step 6 alone."""
    packages = {"packages": {"torch": "2.13.0" if changed else "2.12.0"}}
    for at, rows in enumerate(split):
        rank = Rank(running, run=run, rank=at, world_size=len(split), fingerprint=packages)
        for step in (5, 6):
            rank.stage(STAGE, step, payload(rows, **(changed if step == 6 and not at else {})))


def logging(running: Service, run: str, last: float) -> None:
    """Two ranks log losses in an update that records no tensor; `last` is rank 1's second."""
    for at, rows in enumerate(([0, 1], [2, 3])):
        rank = Rank(running, run=run, rank=at, world_size=2)
        rank.stage(STAGE, 5, payload(rows), scalars={"entropy": 0.25 + at})
        for minibatch in range(2):
            loss = last if (at, minibatch) == (1, 1) else 0.1 * at + minibatch
            rank.begin("actor_update", 5, minibatch=minibatch)
            rank.end("actor_update", 5, minibatch=minibatch, scalars={"pg_loss": loss})


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    with service(tmp_path_factory.mktemp("home")) as made:
        data = made.settings.data_path
        made.use_ring()
        train(made, "one", [[0, 1, 2, 3]])
        train(made, "split", [[3, 1], [0, 2]])
        train(made, "other", [[0, 1, 2, 3]], rollout_log_probs=nudged)
        Rank(made, run="empty").stage(STAGE, 5)
        for run, last in (("logs", 0.5), ("logs-too", 0.5), ("logs-else", 0.75)):
            logging(made, run, last)
        nexrl_directory(data / "nexrl")
        yield made


@pytest.fixture
def session(running: Service) -> Iterator[stagescope.Session]:
    with running.session() as found:
        yield found


def test_another_split_over_ranks_is_the_same(session: stagescope.Session) -> None:
    found = session.compare("one:5", "split:5")
    assert (found.verdict, found.exit_status, found.first) == ("same", 0, None)
    assert [side["name"] for side in found["sides"]] == ["one@1:5", "split@1:5"]


def pairs_of(found: ComparisonReport) -> dict[str, int]:
    """How many values of each tensor or number were compared."""
    return {
        tensor["name"]: tensor["statistics"]["pairs"]
        for section in found["pairs"][0]["sections"]
        for tensor in section["tensors"]
    }


def test_numbers_of_stages_that_recorded_no_tensor_are_compared(
    session: stagescope.Session,
) -> None:
    found = session.compare("logs:5", "logs-too:5")
    assert found.verdict == "same"
    assert (pairs_of(found)["pg_loss"], pairs_of(found)["entropy"]) == (4, 2)
    found = session.compare("logs:5", "logs-else:5")
    assert found.verdict == "different"
    assert found.first is not None
    assert found.first["name"] == "pg_loss"


def test_an_export_that_is_imported_again_pairs_every_number(
    running: Service, session: stagescope.Session, tmp_path: Path
) -> None:
    """The export puts what ranks recorded into one file of the step, and each number by itself."""
    running.engine.keep(*SECTIONS)
    logging(running, "exported", 0.5)
    running.engine.keep()
    env = running.environment("operate")
    kept = running.settings.data_path / "exported" / "a1"
    for words in (("export", str(kept), str(tmp_path / "out")),
                  ("import", str(tmp_path / "out"), "--run", "again")):  # fmt: skip
        result = invoke(*words, env=env)
        assert result.exit_code == 0, result.output
    found = session.compare("exported:5", "again:5")
    assert found.verdict == "same"
    assert pairs_of(found)["entropy"] == 2


def test_the_first_difference_and_what_changed_in_the_attempts(session: stagescope.Session) -> None:
    found = session.compare("one:6", "other:6")
    assert (found.verdict, found.exit_status) == ("different", 1)
    assert found.first is not None
    assert found.first["name"] == "rollout_log_probs"
    changed = {(row["area"], row["name"]): (row["a"], row["b"]) for row in found["changes"]["rows"]}
    assert changed == {("packages", "torch"): ("2.12.0", "2.13.0")}
    text = "\n".join(found.lines())
    assert "different" in text
    assert "rollout_log_probs" in text
    assert max(map(len, text.splitlines())) <= 80


def test_a_comparison_of_steps_says_what_they_say_of_their_streams_otherwise(
    running: Service, session: stagescope.Session
) -> None:
    rank = Rank(running, run="cooled", world_size=1)
    for step, temperature in ((5, 1.0), (6, 0.7)):
        handed = payload([0, 1, 2, 3])
        handed["meta"] = {"streams": {"rollout": {"temperature": temperature, "top_p": 0.9}}}
        rank.hand(STAGE, step, handed)
    found = session.compare("cooled:5", "cooled:6")
    (row,) = found["changes"]["rows"]
    assert (row["name"], row["a"], row["b"], row["weight"]) == (
        f"{STAGE}.rollout.temperature", 1.0, 0.7, "numbers",
    )  # fmt: skip
    assert found["changes"]["counts"] == {"numbers": 1}
    assert f"{STAGE}.rollout.temperature: 1.0 -> 0.7" in "\n".join(found.lines())


def test_tolerances_travel(session: stagescope.Session) -> None:
    wide = session.compare("one:6", "other:6", tolerances=["*rollout_log_probs=1"])
    assert wide.verdict == "within noise"
    with pytest.raises(InvalidInput, match="tolerance"):
        session.compare("one:6", "other:6", tolerances=["x"])


def test_without_a_step_all_that_both_hold_is_compared(session: stagescope.Session) -> None:
    found = session.compare("one", "other")
    assert [side["steps"] for side in found["sides"]] == [[5, 6], [5, 6]]
    assert found.first is not None
    assert (found.verdict, found.first["location"]["a"]["place"]["step"]) == (
        "different", 6,
    )  # fmt: skip
    assert session.compare("one:5", "other").verdict == "same"


def test_steps_with_scalars_alone_are_reported_as_left_out(
    session: stagescope.Session, running: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    for run in ("much", "more"):
        rank = Rank(running, run=run)
        for step in range(1, 8):
            logged = {"loss": float(step)}
            rank.stage(STAGE, step, payload([0, 1]) if step % 2 else None, scalars=logged)

    def verdict_and_findings() -> tuple[str, list[tuple[str, str, int | None]]]:
        found = session.compare("much", "more")
        text = " ".join("\n".join(found.lines()).split())
        findings = found["pairs"][0]["findings"]
        assert all(each["message"] in text for each in findings)
        return found.verdict, [(each["kind"], each["message"], each["side"]) for each in findings]

    left_out = "4 of 7 steps are compared: those that every side still keeps"
    rest = "; what was logged in the others is not (stagescope series shows it)"
    assert verdict_and_findings() == ("same", [("gap", left_out + rest, side) for side in (0, 1)])
    monkeypatch.setattr("stagescope_service.views.comparisons.sides.MAX_STEPS", 3)
    left_out = (
        "3 of 7 steps are compared: those that every side still keeps, the newest 3 of these 4"
    )
    assert verdict_and_findings() == ("same", [("gap", left_out + rest, side) for side in (0, 1)])
    assert not session.compare("one", "other")["pairs"][0]["findings"]


def test_three_sides(session: stagescope.Session) -> None:
    found = session.compare("one:6", "split:6", "other:6")
    assert [pair["verdict"] for pair in found["pairs"]] == ["same", "different", "different"]


def test_directories_in_the_roots_alone(session: stagescope.Session, running: Service) -> None:
    nexrl = {"directory": str(running.settings.data_path / "nexrl")}
    assert session.compare(nexrl, nexrl).verdict == "same"
    with pytest.raises(Forbidden, match="outside") as refused:
        session.compare(nexrl, {"directory": "/etc"})
    assert "stagescope import" in refused.value.advice
    for name in ("x" * 5000, "x/" * 3000):
        with pytest.raises(InvalidInput, match="cannot be used: File name too long"):
            session.compare(nexrl, {"directory": str(running.settings.data_path / name)})
    with pytest.raises(InvalidInput, match="runs only"):
        session.compare(nexrl, nexrl).save("never.html")


def test_a_saved_batch_in_the_roots(session: stagescope.Session, running: Service) -> None:
    path = running.settings.data_path / "b.safetensors"
    session.step(5, run="split").save_batch(path)
    for side, verdict in (("split:5", "same"), ("one:5", "same"), ("other:6", "different")):
        found = session.compare({"directory": str(path)}, side)
        assert (found.verdict, found["sides"][0]["kind"]) == (verdict, "batch"), found["reason"]
        assert "missing" not in {each["kind"] for each in found["pairs"][0]["findings"]}


def test_a_missing_side_advises_what_to_do(session: stagescope.Session) -> None:
    with pytest.raises(NotFound, match="keep"):
        session.compare("one", "empty")
    with pytest.raises(NotFound, match="step"):
        session.compare("one:7", "other:7")
    with pytest.raises(NotFound, match="no run 'one@x'"):  # any text may be a run's name
        session.compare("one@x", "other")


def test_a_page_that_needs_no_network(session: stagescope.Session, tmp_path: Path) -> None:
    page = session.compare("one:6", "other:6").save(tmp_path / "report.html").read_text()
    assert page.lstrip().lower().startswith("<!doctype html>")
    assert "rollout_log_probs" in page
    assert "packages torch: 2.12.0 -&gt; 2.13.0" in page
    outside = re.sub(r"<script>.*?</script>", "", page, flags=re.DOTALL)
    loaded = re.findall(r"""(?:src|href)\s*=\s*["']?(?:https?:)?//""", outside)
    assert not loaded


def test_a_step_that_grew_is_compared_anew(running: Service, session: stagescope.Session) -> None:
    train(running, "grows", [[0, 1, 2, 3]])
    assert session.compare("one:6", "grows:6").verdict == "same"
    later = Rank(running, run="grows", rank=0, key="a2", world_size=1)
    later.stage(STAGE, 6, payload([0, 1, 2, 3], old_log_probs=nudged))
    assert session.compare("one:6", "grows:6").verdict == "different"
    assert session.compare("one:6", "grows@1:6").verdict == "same"


def test_the_command_says_by_its_exit_status_what_it_found(
    running: Service, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("STAGESCOPE_URL", running.server.url)
    monkeypatch.setenv("STAGESCOPE_TOKEN", running.tokens.read)
    page = tmp_path / "report.html"
    different = invoke("compare", "one:6", "other:6", "--html", str(page))
    assert different.exit_code == 1, different.output
    lines = different.stdout.splitlines()
    assert lines[0].endswith("DIFFERENT")
    assert any("packages torch: 2.12.0 -> 2.13.0" in line for line in lines)
    assert max(len(line) for line in lines if str(page) not in line) <= 80
    assert "packages torch" in page.read_text()
    assert invoke("compare", "one", "split", "--step", "5").exit_code == 0
    nowhere = invoke("compare", "one:6", str(tmp_path / "nothing"))
    assert nowhere.exit_code == 2
    assert "nor the name of a run" in nowhere.stderr
    alone = " ".join(invoke("compare", "one:6").stderr.split())
    assert "each of them RUN[@ATTEMPT][:STEP], or a directory or file of dumps" in alone
    assert "stagescope compare one@1:5 one@2:5" in alone


def test_an_attempt_that_ended_inside_the_step_is_not_the_same(
    running: Service, session: stagescope.Session
) -> None:
    update = {"schema": 1, "tensors": WHOLE.piece([0, 1]), "strings": {}, "meta": {}}
    whole = Rank(running, run="whole", world_size=1)
    killed = Rank(running, run="killed", world_size=1)
    for rank in (whole, killed):
        rank.stage(STAGE, 5, payload([0, 1, 2, 3]))
    whole.stage("actor_update", 5, update)
    killed.begin("actor_update", 5)
    running.engine.fall_silent(killed)
    found = session.compare("killed:5", "whole:5")
    assert (found.verdict, found.exit_status) == ("not comparable", 2)
    [cause] = found["pairs"][0]["causes"]
    assert "killed@1:5" in cause["title"]
    assert "attempt 1 ended inside step 5 (its processes fell silent)" in cause["evidence"]
    assert "not finished: actor_update" in cause["evidence"]


def test_a_comparison_says_how_far_it_is(running: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    """While it lasts each answer counts its pieces, for the terminal; then it is the result."""
    goes_on, said = threading.Event(), list[str]()

    def slow(sides: Any, *, progress: Any, **options: Any) -> Any:
        progress(3, 8)
        goes_on.wait(60)
        return compare(sides, progress=progress, **options)

    def note(text: str) -> None:
        said.append(text)
        goes_on.set()

    monkeypatch.setattr(dependencies, "WAIT_SECONDS", 0.2)
    monkeypatch.setattr(comparing, "compare", slow)
    with running.session() as session:
        report = session.compare("one:5", "split:6", on_wait=note)
    assert re.fullmatch(r"they have been compared for \d+ s, and 3 of 8 pieces are done", said[0])
    assert report["verdict"] == "same"
    assert not running.app.state.deps.comparing
