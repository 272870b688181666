"""How answers read: types that do not change, paths in one piece, names that were meant."""

from __future__ import annotations

import pytest
from tests.support.answering import READ, Answering
from tests.support.command_line import invoke

from stagescope.answers import Metrics, Record
from stagescope.table import Table
from stagescope_wire.comparison_texts import as_lines
from stagescope_wire.errors import NotFound
from stagescope_wire.nonfinite import Json

PATH = "/data/stagescope/qwen3-8b-countdown/key-1/step_120/actor_update/0.0.1.0/rank3/dump.json"


def table(**changes: Json) -> Table:
    """A row as a route about ranks gives it."""
    row = {"role": "actor", "rank": 1, "k3_kl": 0.5, "live": True, "host": "a", "ranks": [1],
           "missing": [{"rank": 1}], "wall": 1.5}  # fmt: skip
    return Table.from_rows([{**row, **changes}])


@pytest.mark.parametrize(
    "changes",
    [
        {"rank": None, "k3_kl": None, "live": None, "host": None, "wall": None},
        {"k3_kl": 1, "wall": 2}, {"ranks": [], "missing": []}, {"ranks": None, "missing": None},
    ],
)  # fmt: skip
def test_tables_of_two_steps_concatenate(changes: dict[str, Json]) -> None:
    polars = pytest.importorskip("polars")
    pyarrow = pytest.importorskip("pyarrow")
    pandas = pytest.importorskip("pandas")
    one, other = table(), table(**changes)
    if "ranks" not in changes or changes["ranks"] is not None:
        assert polars.concat([one.to_polars(), other.to_polars()]).height == 2
        assert pyarrow.concat_tables([one.to_arrow(), other.to_arrow()]).num_rows == 2
    else:  # of lists that are not there a name alone tells nothing for certain: text
        one, other = one.select("rank"), other.select("rank")
    joined = pandas.concat([one.to_pandas(), other.to_pandas()])
    assert str(joined["rank"].dtype) in ("int64", "Int64")


@pytest.mark.parametrize("width", [60, 80, 300])
def test_a_path_is_in_one_piece_at_any_width(width: int) -> None:
    rows = [{"stage": "actor_update", "rank": 3, "state": "complete", "path": PATH}]
    dumps = Table.from_rows(rows).lines(width=width)
    assert any(PATH in line for line in dumps)
    assert any("complete" in line for line in dumps)
    record = Record({"path": PATH, "error": f"no such file: {PATH}"}).lines(width=width)
    assert sum(PATH in line for line in record) == 2


def test_what_was_meant() -> None:
    names = [f"per_round/round_{n}_abs_diff_mean" for n in range(60)]
    metrics = Metrics({**dict.fromkeys(names, 0.0), "rollout_corr/k3_kl": 1.0}, {})
    for wrong in ("k3_kl", "rollout_corr/k3kl", "K3_KL"):
        with pytest.raises(NotFound, match="did you mean rollout_corr/k3_kl") as caught:
            metrics[wrong]
        assert "round_40" not in str(caught.value)
    assert "nothing" not in metrics


def ask(service: Answering, *words: str) -> Json:
    env = {"STAGESCOPE_URL": service.url, "STAGESCOPE_TOKEN": READ, "COLUMNS": "60"}
    return invoke(*words, env=env)


def test_columns_and_wide(service: Answering) -> None:
    chosen = ask(service, "rounds", "5", "--columns", "k3_kl,round")
    assert chosen.stdout.splitlines()[1].split() == ["k3_kl", "round"]
    wrong = ask(service, "rounds", "5", "--columns", "k3")
    assert wrong.exit_code == 4
    assert "did you mean k3_kl" in wrong.stderr or "one of" in wrong.stderr
    many = Table({f"column_{at}": [PATH] for at in range(12)})
    assert "more columns" in "\n".join(Table({f"c{n}": ["x" * 30] for n in range(9)}).lines())
    assert many.lines(width=1_000_000)[-1].count(PATH) == 12
    assert ask(service, "attempts", "--wide").exit_code == 0
    metrics = ask(service, "metrics", "5", "--only", "k3_kl")
    assert metrics.exit_code == 4
    assert "did you mean rollout_corr/k3_kl" in metrics.stderr
    assert ask(service, "status", "--columns", "a").exit_code == 2


def compared(**pair: Json) -> dict[str, Json]:
    empty = {"mean": 0.0, "std": 0.0}
    statistics = {"pairs": 4, "finite": 4, "max_abs": 1.0, "mean_abs": 1.0, "relative": 1.0,
                  "cosine": 1.0, "a": empty, "b": empty}  # fmt: skip
    tensor = {"name": "loss", "verdict": "different", "station": "loss", "samples": {},
              "statistics": statistics, "reason": "", "tolerance": {"reason": "none"},
              "places": [], "differing_samples": []}  # fmt: skip
    cause = {"title": "another learning rate", "evidence": "the loss moved", "checks": ["lr"]}
    side = {"name": "a", "steps": [5], "kind": "run", "ranks": [0], "entries": 1, "bytes": 4}
    return {
        "verdict": "different", "sides": [side, side], "reason": "the loss", "bytes": 8,
        "seconds": 0.1,
        "pairs": [{
            "sides": [0, 1], "verdict": "different", "reason": "", "first": None,
            "causes": [cause], "excluded": ["the tokens agree"], "noise_floor": None, "keys": {},
            "findings": [
                {"side": 0, "message": "gradients", "items": [], "kind": "only",
                 "verdict": "not comparable"},
                {"side": 0, "message": "a note", "items": [], "kind": "note", "verdict": "same"},
            ],
            "sections": [{"section": "loss", "tensors": [tensor]}], **pair,
        }],
    }  # fmt: skip


def test_compare_stops_after_the_causes_but_never_hides_what_was_not_compared() -> None:
    short = "\n".join(line.text for line in as_lines(compared(), full=False))
    whole = "\n".join(line.text for line in as_lines(compared()))
    for said in ("another learning rate", "A: gradients", "A: a note"):
        assert said in short
        assert said in whole
    for detail in ("the tokens agree", "loss: different, 4 values"):
        assert detail not in short
        assert detail in whole
    assert "1 tensor in 1 section: 1 different (--full shows each)" in short
