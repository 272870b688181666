"""Operators in a notebook and in a terminal, asked of a running service about real dumps."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from tests.support.api import Rank, Service, service
from tests.support.command_line import ask
from tests.support.dumps import capture, dumped
from tests.support.small_decoder import small_decoder

from stagescope import Session
from stagescope.operators import Divergence, NonFiniteOperators, Operators, read_side
from stagescope.table import Table
from stagescope_wire.errors import InvalidInput, NotFound

BROKEN = "Module.blocks.1.down.Linear.forward.0"
CHANGED = "Module.blocks.0.up.Linear.forward.0"


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """Step 5: rank 1 has a NaN in a layer. Step 6: rank 1 was changed in a layer."""
    root = tmp_path_factory.mktemp("dumps")
    broken, changed = small_decoder(), small_decoder()
    with torch.no_grad():
        broken.get_parameter("blocks.1.down.weight")[3, 5] = float("nan")
        changed.get_parameter("blocks.0.up.weight").mul_(1.5)
    plain = capture(root / "plain", level="mix")
    with service(tmp_path_factory.mktemp("home")) as running:
        ranks = [Rank(running, rank=0), Rank(running, rank=1)]
        for step, model in ((5, broken), (6, changed)):
            dumped(running, ranks[0], plain, step)
            dumped(running, ranks[1], capture(root / str(step), model, level="mix"), step)
        yield running


def test_operators_as_a_table(session: Session) -> None:
    operators = session.step(5).operators(rank=1, name="*blocks.1.down*", direction="forward")
    assert isinstance(operators, Operators)
    assert set(operators["name"]) == {BROKEN}
    output = operators.where(section="output")[0]
    assert math.isnan(output["max"])
    assert output["non_finite"] == "nan"
    assert operators.about["tables"][0]["done"] is True
    frame = operators.to_pandas()
    assert frame["shape"].tolist()[0] == [2, 6, 32]
    everything = session.step(5).operators(limit=5)
    assert everything.truncated
    assert "the service has more" in repr(everything)
    assert len(session.step(5).operators(non_finite=True, rank=0)) == 0


def test_the_newest_step_with_operators_answers_where_none_is_named(
    found: Service, session: Session
) -> None:
    Rank(found, world_size=1).begin("actor_update", 99)
    assert session.step("latest").step == 99
    captured = session.step("captured")
    assert captured.step < 99
    assert len(captured.operators()) > 0
    assert ask("non-finite").exit_code == 0
    with pytest.raises(NotFound, match="has no operators; expected one of 5, 6"):
        session.step(99).operators()


def test_the_stack_of_an_operator(session: Session) -> None:
    row = session.step(5).operators(rank=0, name="Functional.linear.0.forward")[0]
    stack = session.step(5).stack(row["stack_id"], rank=0)
    assert any("small_decoder.py" in line for line in stack.lines())


def test_the_first_non_finite_operator_is_named(session: Session) -> None:
    found = session.step(5).non_finite()
    earliest = found.about["earliest"]
    assert (earliest["rank"], earliest["parent"]) == (1, BROKEN)
    text = "\n".join(found.lines())
    assert text.startswith("the earliest: actor_update actor/1")
    assert f"in {BROKEN}" in text
    assert "actor_update actor/0: all finite" in text
    assert "no operator gave a NaN" in session.step(6).non_finite().lines()[0]


def test_the_first_of_each_stage_is_shown(session: Session) -> None:
    """The earliest of another stage or part is one more, not the same again."""
    found = session.step(5).non_finite()
    (broken,) = [row for row in found if row["earliest"]]
    rows = [*found, {**broken, "part": "0.0.1.0"}]
    text = "\n".join(
        NonFiniteOperators.from_table(Table.from_rows(rows, about=found.about)).lines()
    )
    assert "actor_update actor/1 part 0.0.1.0:" in text
    assert text.count("actor_update actor/1\n") == 1


def test_calls_that_the_search_skipped_are_reported(session: Session) -> None:
    found = session.step(5).non_finite()
    rows = [{**row, "not_read": 3 if row["name"] is None else 1} for row in found]
    about = {**found.about, "earliest": {**found.about["earliest"], "not_read": 1}}
    text = " ".join(NonFiniteOperators.from_table(Table.from_rows(rows, about=about)).lines())
    assert "all finite (not searched: 3 calls that only pass memory on and never read it)" in text
    assert " (not searched: 1 call that only passes memory on and never reads it)" in text


def test_the_first_divergent_operator_is_named(session: Session) -> None:
    found = session.divergence({"step": 6, "rank": 0}, {"rank": 1})
    assert not found.same
    assert found["first"]["a"]["parent"] == CHANGED
    assert found["first_parameter"]["a"]["name"] == CHANGED
    assert isinstance(found["first"]["relative"], float)
    text = "\n".join(found.lines())
    assert f"in {CHANGED}" in text
    noted = Divergence({**found, "first_note": "input_args.0 differs already"})
    assert "  input_args.0 differs already" in noted.lines()
    assert session.divergence({"step": 6, "rank": 0}, {"step": 5}, exact=True).same
    stepless = session.divergence({"step": 6, "rank": 0}, {"rank": 1}, by_dtype={"float32": 9.0})
    assert stepless["first"] is None
    with pytest.raises(NotFound):
        session.divergence({"step": 6, "rank": 0}, {"rank": 7})


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["operators", "5", "--rank", "1"], BROKEN),
        (["operators", "5", "--non-finite"], "nan"),
        (["non-finite", "5"], BROKEN),
        (["divergence", "step=6,rank=0", "rank=1"], CHANGED),
        (["divergence", "step=6,rank=0", "step=5", "--exact"], "no operator differs"),
        (["divergence", "step=6,rank=0", "step=5,rank=1", "--factor", "100"], "relative"),
    ],
)
@pytest.mark.parametrize("width", [80, 50, 200])
def test_names_are_never_shortened(found: Service, words: list[str], said: str, width: int) -> None:
    limit = () if words[0] == "divergence" else ("--limit", "500")
    result = ask(*words, *limit, width=width)
    assert result.exit_code == 0, result.output
    for line in result.stdout.splitlines():  # a name or a path that is longer stays in one piece
        text_of = line.split()
        assert len(line) <= width or max(map(len, text_of)) > width - 8, line
    assert said in result.stdout
    assert ".." not in result.stdout
    as_json = ask(*words, "--json")
    json.loads(as_json.stdout, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))


def test_a_truncated_dump_is_noted_beside_the_rows(found: Service, tmp_path: Path) -> None:
    files = capture(tmp_path, level="L0")
    text = (files / "dump.json").read_bytes()
    (files / "dump.json").write_bytes(text[:9000])
    (files / "DONE.json").unlink()
    dumped(found, Rank(found, rank=3), files, 8, state="truncated")
    result = ask("operators", "8")
    assert "truncated at byte 9000: the capture did not come to its end" in " ".join(
        result.stdout.split()
    )
    compared = ask("divergence", "step=8,rank=3", "step=5,rank=0")
    assert "truncated at byte 9000" in " ".join(compared.stdout.split())


@pytest.mark.parametrize(
    ("text", "side"),
    [
        ("step=5, rank=0", {"step": 5, "rank": 0}),
        ("run=a-b,attempt=2,capture=c", {"run": "a-b", "attempt": 2, "capture_id": "c"}),
        ("part=0.0.1.0,stage=actor_update", {"part": "0.0.1.0", "stage": "actor_update"}),
    ],
)
def test_a_side_is_parsed_from_text(text: str, side: dict[str, object]) -> None:
    assert read_side(text) == side


@pytest.mark.parametrize("text", ["", "5", "step", "step=", "step=x", "steps=5", "step=5,,"])
def test_a_side_that_cannot_be_read(found: Service, text: str) -> None:
    with pytest.raises(InvalidInput):
        read_side(text)
    assert ask("divergence", text, "rank=0").exit_code == 2
