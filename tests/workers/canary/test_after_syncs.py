"""A canary in a training: what it sends, and that nothing waits for an engine or raises."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from tests.support.coordinators import FakeCoordinator, wait_for
from tests.support.engines.table_engine import VOCABULARY, TableEngine, scores, table
from tests.support.engines.tiny_llama import tiny_tokenizer

from stagescope_wire.canary import AGAIN, FIXED, Canary
from stagescope_wire.errors import InvalidInput
from stagescope_workers.canary import after_syncs
from stagescope_workers.canary.sequences import choose
from stagescope_workers.probe.probe import Probe

MakeProbe = Callable[..., Probe]
SEQUENCES = choose(VOCABULARY, max_length=512)


def engine(**fields: Any) -> TableEngine:
    return TableEngine({None: table()}, **fields)


def sent(coordinator: FakeCoordinator, count: int) -> list[tuple[int, int | None, Canary]]:
    """Return version, step and content of each event, in order."""
    wait_for(lambda: len(coordinator.of_kind("canary")) >= count)
    events = coordinator.of_kind("canary")
    assert len(events) == count
    return [
        (event.fields["policy_version"], event.fields["step"], Canary.parse(event.fields))
        for event in events
    ]


def trainer(rows: Sequence[tuple[int, ...]]) -> list[tuple[float, ...]]:
    return [scores(table(), row) for row in rows]


def test_without_a_step_that_of_the_stage_counts(
    make_probe: MakeProbe, coordinator: FakeCoordinator
) -> None:
    probe = make_probe()
    canary = probe.canary(engine=engine(), sequences=SEQUENCES)
    canary.score(0, trainer)
    with probe.stage("weight_sync", step=7):
        canary.after_sync(3)
    canary.score(3, trainer)
    assert canary.wait()
    found = {(version, step, said.side) for version, step, said in sent(coordinator, 3)}
    assert found == {(0, None, "trainer"), (3, 7, "engine"), (3, 7, "trainer")}


class Gate:
    """Holds an engine's calls until it is opened."""

    def __init__(self) -> None:
        self.is_open = threading.Event()
        self.reached = threading.Event()

    def __call__(self) -> None:
        self.reached.set()
        assert self.is_open.wait(30)


def test_both_sides_of_a_version_are_sent_and_agree(
    make_probe: MakeProbe, coordinator: FakeCoordinator
) -> None:
    canary = make_probe().canary(engine=engine(), sequences=SEQUENCES, temperature=1.0)
    canary.after_sync(3, step=4)
    assert canary.wait()
    canary.score(3, trainer, step=4)
    canary.score(3, trainer, step=4)  # once a version
    (version, step, asked), (_, _, own) = sent(coordinator, 2)
    assert (version, step) == (3, 4)
    assert (asked.side, asked.source, own.side, own.source) == ("engine", "table", "trainer", "")
    assert own.arms[FIXED] == asked.arms[FIXED] == asked.arms[AGAIN]
    assert asked.seconds > 0 < own.seconds
    assert own.settings["tokens"] == SEQUENCES.tokens


def test_a_model_scores_as_its_logits_and_says_what_its_adapter_is(
    make_probe: MakeProbe, coordinator: FakeCoordinator
) -> None:
    class Model(torch.nn.Module):
        dtype = torch.float64

        def __init__(self) -> None:
            super().__init__()
            self.logits = torch.nn.Parameter(torch.tensor(table()))
            self.lora_B = torch.nn.Parameter(torch.zeros(1))

        def forward(self, input_ids: torch.Tensor, use_cache: bool) -> torch.Tensor:
            return self.logits[input_ids]

    make_probe().canary(sequences=SEQUENCES).score(1, Model())
    [(_, _, found)] = sent(coordinator, 1)
    expected = [value for row in trainer(SEQUENCES.rows) for value in row[1:][-256:]]
    values = [value for row in found.arms[FIXED].log_probs for value in row]
    assert values == pytest.approx(expected, abs=1e-5)
    assert found.settings["dtype"] == "float64"
    assert found.settings["adapter_is_zero"] is True


def test_only_versions_that_the_number_divides_are_asked(
    make_probe: MakeProbe, coordinator: FakeCoordinator
) -> None:
    canary = make_probe().canary(engine=engine(), sequences=SEQUENCES, every=3)
    for version in range(7):
        canary.after_sync(version)
        canary.score(version, trainer)
        assert canary.wait()
    assert sorted((v, found.side) for v, _, found in sent(coordinator, 6)) == [
        (version, side) for version in (0, 3, 6) for side in ("engine", "trainer")
    ]


def test_a_sync_that_begins_before_the_answer_drops_it_and_says_so(
    make_probe: MakeProbe, coordinator: FakeCoordinator
) -> None:
    gate = Gate()
    canary = make_probe().canary(engine=engine(before_call=gate), sequences=SEQUENCES)
    canary.after_sync(1)
    assert gate.reached.wait(30)
    canary.before_sync()
    gate.is_open.set()
    canary.after_sync(2)
    (one, _, dropped), (two, _, whole) = sent(coordinator, 2)
    assert (one, dropped.arms, two, whole.problem) == (1, {}, 2, "")
    assert dropped.problem.startswith("the next sync began 0.")
    assert dropped.problem.endswith("s after this one, before the engine had answered")
    assert FIXED in whole.arms


def test_an_engine_that_hangs_holds_up_nothing_and_has_one_thread(
    make_probe: MakeProbe, coordinator: FakeCoordinator
) -> None:
    gate = Gate()
    threads = threading.active_count()
    canary = make_probe().canary(engine=engine(before_call=gate), sequences=SEQUENCES)
    began = time.monotonic()
    for version in range(20):
        canary.after_sync(version)
    assert time.monotonic() - began < 5.0  # it would be 20 times the deadline
    assert threading.active_count() <= threads + 2  # the probe's own, and one
    found = sent(coordinator, 19)
    assert all("before the engine had answered" in each.problem for _, _, each in found)
    assert not canary.wait(0.0)
    gate.is_open.set()
    assert canary.wait()
    assert sent(coordinator, 20)[-1][2].problem == ""


def test_an_engine_that_does_not_exist_is_a_problem_of_the_event(
    make_probe: MakeProbe, coordinator: FakeCoordinator
) -> None:
    canary = make_probe().canary(engine="http://127.0.0.1:9", sequences=SEQUENCES)
    canary.after_sync(1)
    [(_, _, found)] = sent(coordinator, 1)
    assert (found.source, found.arms) == ("127.0.0.1-9", {})
    assert "the engine at http://127.0.0.1:9 cannot be reached" in found.problem


def test_after_the_deadline_what_was_answered_counts(
    make_probe: MakeProbe, coordinator: FakeCoordinator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(after_syncs, "TIMEOUT", 0.0)
    canary = make_probe().canary(engine=engine(), sequences=SEQUENCES)
    canary.after_sync(1)
    [(_, _, found)] = sent(coordinator, 1)
    assert found.problem == "the engine did not answer within 0 s"


def test_several_engines_are_asked_beside_each_other(
    make_probe: MakeProbe, coordinator: FakeCoordinator
) -> None:
    gate = Gate()
    engines = [engine(name="one", before_call=gate), engine(name="two")]
    canary = make_probe().canary(engine=engines, sequences=SEQUENCES)
    canary.after_sync(1)
    assert [found.source for _, _, found in sent(coordinator, 1)] == ["two"]
    gate.is_open.set()
    assert {found.source for _, _, found in sent(coordinator, 2)} == {"one", "two"}


@pytest.mark.parametrize(
    "wrong",
    [
        {},
        {"sequences": [[1]]},
        {"sequences": SEQUENCES, "every": 0},
        {"sequences": SEQUENCES, "engine": "ftp://x"},
        {"sequences": SEQUENCES, "engine": [engine(), engine()]},
    ],
)
def test_wrong_arguments_raise_only_when_strict(
    make_probe: MakeProbe, coordinator: FakeCoordinator, wrong: dict[str, Any]
) -> None:
    probe = make_probe()
    canary = probe.canary(**wrong)
    canary.after_sync(1)
    canary.score(1, trainer)
    wait_for(lambda: coordinator.of_kind("refused"))
    assert probe.refused == {"canary": 1}
    assert not coordinator.of_kind("canary")
    with pytest.raises(InvalidInput):
        make_probe(strict=True, rank=1).canary(**wrong)


def test_a_model_that_fails_is_refused_and_not_raised(
    make_probe: MakeProbe, coordinator: FakeCoordinator
) -> None:
    def fail(rows: object) -> None:
        raise RuntimeError("out of memory")

    probe = make_probe()
    canary = probe.canary(tokenizer=tiny_tokenizer())
    canary.score(1, fail)
    canary.score(2, lambda rows: [[-1.0]])  # not one for each sequence
    canary.score(3, lambda rows: None)  # this rank has none
    canary.after_sync("four")  # type: ignore[arg-type]
    assert probe.refused == {"canary": 3}
    assert not coordinator.of_kind("canary")


def test_only_rank_0_reports_what_all_ranks_score(
    make_probe: MakeProbe, coordinator: FakeCoordinator
) -> None:
    called: list[int] = []
    for rank in (1, 0):

        def score(rows: Sequence[tuple[int, ...]], rank: int = rank) -> list[tuple[float, ...]]:
            called.append(rank)
            return trainer(rows)

        make_probe(rank=rank, world_size=2).canary(sequences=SEQUENCES).score(1, score)
    sent(coordinator, 1)
    assert called == [1, 0]
