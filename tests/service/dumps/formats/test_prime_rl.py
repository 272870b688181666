"""prime-rl's token exports: of now and of May 2026, nulls for what is not finite, the marker."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.support.api import service
from tests.support.dump_files import all_problems, read_first, rows_in

from stagescope.session import attach
from stagescope_service.commands.importing import import_dump
from stagescope_service.compare.comparison import compare
from stagescope_service.compare.results import Verdict
from stagescope_service.dumps.discover import open_dump
from stagescope_service.dumps.records import mapping
from stagescope_wire.errors import InvalidTensor

NEW = ("rl_weights", "ce_weights", "ref_kl_weights")


def sequence(
    row: int, *, step: int, rank: int, older: bool = False, seed: int = 0, shift: float = 0.0
) -> dict[str, Any]:
    """One line: the columns that both forms have, and those of one of them."""
    rng = np.random.default_rng([seed, step, rank, row])
    length, prompt = int(rng.integers(8, 14)), 3 + row % 2
    mask = [at >= prompt and at != prompt + 2 for at in range(length)]
    q = np.where(mask, -rng.exponential(1.0, length), 0.0).astype(np.float32).astype(float)
    p = (q + rng.normal(0, 0.05, length) + shift).astype(np.float32).astype(float)
    made: dict[str, object] = {
        "schema_version": 1,
        "step": step,
        "rank": rank,
        "micro_step": row // 2,
        "micro_sequence_idx": row % 2,
        "export_sequence_idx": row,
        "env_name": "gsm8k",
        "token_ids": [*range(prompt), *map(int, rng.integers(10, 90, length - prompt))],
        "position_ids": [*range(length)],
        "loss_mask": mask,
        "advantages": [0.25] * length,
        "inference_logprobs": q.tolist(),
        "trainer_logprobs": p.tolist(),
        "entropy": rng.exponential(1.0, length).tolist(),
        "mismatch_kl": (np.expm1(p - q) - (p - q)).tolist(),
        "importance_ratio": np.exp(p - q).tolist(),
        "is_masked": [False] * length,
    }
    if older:
        made |= {"training_mode": "rl", "rewards": [float(row)] * length}
    else:
        made |= {name: [None] * length for name in NEW}
    return made


def write(
    root: Path, *, steps: tuple[int, ...] = (1,), ranks: int = 2, stable: bool = True, **how: Any
) -> Path:
    for step in steps:
        directory = root / "token_exports" / f"step_{step}"
        directory.mkdir(parents=True, exist_ok=True)
        for rank in range(ranks):
            lines = [sequence(row, step=step, rank=rank, **how) for row in range(5)]
            text = "".join(json.dumps(line, separators=(",", ":")) + "\n" for line in lines)
            (directory / f"rank_{rank}.jsonl").write_text(text)
        if stable:
            (directory / "STABLE").touch()
    return root


def edit(path: Path, row: int, **columns: object) -> None:
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    lines[row] |= columns
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


FIRST = "token_exports/step_1/rank_0.jsonl"


@pytest.mark.parametrize("older", [False, True])
def test_both_forms(tmp_path: Path, older: bool) -> None:
    dump = open_dump(write(tmp_path, older=older, stable=not older))
    assert (dump.kind, dump.problems) == ("prime_rl", [])
    assert [(each.location.step, each.location.rank) for each in dump.entries] == [(1, 0), (1, 1)]
    record = dump.read(dump.entries[1])
    for row in range(5):
        line, begin = sequence(row, step=1, rank=1), 3 + row % 2
        for name, theirs in {"log_probs": "trainer_logprobs", "responses": "token_ids",
                             "response_mask": "loss_mask"}.items():  # fmt: skip
            assert rows_in(record, name)[row] == line[theirs][begin:]
    assert record.tensors["micro_step"][2].tolist() == [0, 0, 1, 1, 2]
    assert record.row_texts["env_name"] == ("gsm8k",) * 5
    if older:
        assert record.tensors["rewards"][2].tolist() == [0, 1, 2, 3, 4]
        assert record.row_texts["training_mode"] == ("rl",) * 5
    else:
        assert set(mapping(record.about, "left_out")) == set(NEW)


def test_what_is_no_number_is_named_and_the_rest_is_read(tmp_path: Path) -> None:
    path = write(tmp_path, ranks=1, older=True) / FIRST
    lines = [sequence(row, step=1, rank=0, older=True) for row in range(5)]
    edit(path, 0, rewards=["x"] * len(lines[0]["token_ids"]))
    edit(path, 1, loss_mask=[2] * len(lines[1]["token_ids"]))
    edit(path, 2, trainer_logprobs=["y", *lines[2]["trainer_logprobs"][1:]])
    edit(path, 3, micro_step="z")
    edit(path, 4, token_ids=[10**400] * len(lines[4]["token_ids"]))
    record = read_first(tmp_path)
    np.testing.assert_array_equal(record.tensors["rewards"][2], [np.nan, 3])
    np.testing.assert_array_equal(record.tensors["micro_step"][2], [0, np.nan])
    for words in (
        "line 1: rewards is no number: a text",
        "line 2 is left out: loss_mask holds no 0 or 1 at index 0: a number, 2",
        "line 3 is left out: trainer_logprobs holds no number at index 0",
        "line 4: micro_step is no number: a text",
        "line 5 is left out: token_ids holds no number at index 0",
    ):
        assert words in all_problems(record)


def test_null_is_nan_and_counted_and_no_column_where_all_are_null(tmp_path: Path) -> None:
    path = write(tmp_path, ranks=1) / FIRST
    lines = [sequence(row, step=1, rank=0) for row in range(5)]
    lines[0]["trainer_logprobs"][3] = None
    for row, line in enumerate(lines):
        nothing = [None] * len(line["token_ids"])
        edit(path, row, trainer_logprobs=line["trainer_logprobs"], mismatch_kl=nothing)
    record = read_first(tmp_path)
    values = record.tensors["log_probs"][2]
    assert np.isnan(values[0])
    assert np.isnan(values).sum() == 1
    assert record.about["null_values"] == {"log_probs": 1}
    assert "mismatch_kl" in mapping(record.about, "left_out")


def test_a_step_without_its_marker_is_a_problem_where_others_have_it(tmp_path: Path) -> None:
    write(tmp_path, steps=(1, 2))
    (tmp_path / "token_exports" / "step_2" / "STABLE").unlink()
    dump = open_dump(tmp_path)
    [problem] = dump.problems
    assert (problem.kind, problem.path.parent.name) == ("missing", "step_2")
    assert len(dump.entries) == 4
    assert open_dump(tmp_path, step=1).problems == []


def test_another_schema_and_a_line_that_was_cut_off(tmp_path: Path) -> None:
    path = write(tmp_path, ranks=1) / FIRST
    edit(path, 2, schema_version=2)
    with pytest.raises(InvalidTensor, match="schema version 1, 2"):
        read_first(tmp_path)
    edit(path, 2, schema_version=1, loss_mask=[True])
    path.write_text(path.read_text()[:-40])
    record = read_first(tmp_path)
    assert len(record.tensors["micro_step"][2]) == 3
    assert "line 3 is left out: the mask of a sequence has 1 values" in all_problems(record)
    assert "line 5 is no JSON" in all_problems(record)


def test_an_import_has_prime_rls_own_number_and_sides_compare(tmp_path: Path) -> None:
    one = write(tmp_path / "one", steps=(1, 2))
    two = write(tmp_path / "two", steps=(1, 2), shift=0.1)
    with (
        service(tmp_path / "home") as live,
        attach(live.server.url, token=live.tokens.operate) as session,
    ):
        report = import_dump(session, open_dump(one), "prime")
        assert (report["problems"], report["refused"], report["payloads"]) == ([], [], 4)
        answer = live.get("/steps/2/metrics", run="prime")
        lines = [sequence(row, step=2, rank=rank) for rank in (0, 1) for row in range(5)]
        p, q, kl = (
            np.concatenate([np.array(line[name])[line["loss_mask"]] for line in lines])
            for name in ("trainer_logprobs", "inference_logprobs", "mismatch_kl")
        )
        assert answer["coverage"]["tokens"] == len(p)
        assert answer["metrics"]["rollout_corr/k3_kl"] == pytest.approx(kl.mean(), rel=1e-9)
        assert answer["metrics"]["rollout_corr/kl"] == pytest.approx((q - p).mean(), rel=1e-9)
        assert answer["metrics"]["per_round/total_rounds"] == 2
    assert compare([open_dump(one), open_dump(one)]).verdict is Verdict.SAME
    result = compare([open_dump(one), open_dump(two)])
    assert result.verdict is Verdict.DIFFERENT
