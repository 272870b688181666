"""NeMo-RL's training data: both streams with its own metric, and zeros that stand for no pass."""

from __future__ import annotations

import json
from collections.abc import Sequence
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
from stagescope_wire.errors import InvalidTensor, NotFound

WIDTH = 16


def rows(
    count: int = 6, *, seed: int = 0, skipped: bool = False, shift: float = 0.0
) -> list[dict[str, Any]]:
    """Lines as `log_batched_dict_as_jsonl` writes them: each value a list of one item."""
    rng = np.random.default_rng(seed)
    made: list[dict[str, object]] = []
    for row in range(count):
        prompt = 2 + row // 2  # two answers a prompt
        length = int(rng.integers(prompt + 5, WIDTH + 1))
        tokens = [*range(100 * prompt, 100 * prompt + prompt), *rng.integers(5, 90, WIDTH - prompt)]
        mask = [0] * prompt + [1] * (length - prompt) + [0] * (WIDTH - length)
        mask[prompt + 2] = 0  # a token of the environment's
        q = np.where(mask, -rng.exponential(1.0, WIDTH), 0.0)
        p = np.where(mask, q + rng.normal(0, 0.05, WIDTH) + shift, 0.0)
        made.append(
            {
                "content": [f"text {row}"],
                "rewards": [float(row % 2)],
                "input_lengths": [length],
                "token_ids": [[int(t) for t in tokens[:length]] + [0] * (WIDTH - length)],
                "token_loss_mask": [mask],
                "sample_loss_mask": [0.0 if row == count - 1 else 1.0],
                "advantages": [[0.5 * (row % 2)] * WIDTH],
                "generation_logprobs": [q.tolist()],
                "prev_logprobs": [np.zeros(WIDTH).tolist() if skipped else p.tolist()],
                "idx": row,
            }
        )
    return made


def write(path: Path, lines: Sequence[dict[str, object]]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def masked(lines: list[dict[str, Any]]) -> tuple[np.ndarray, np.ndarray]:
    """p and q of the tokens that NeMo-RL's loss counts: both masks, without the first token."""
    p, q, mask, counted = (
        np.array([line[name][0] for line in lines])
        for name in ("prev_logprobs", "generation_logprobs", "token_loss_mask", "sample_loss_mask")
    )
    chosen = (mask[:, 1:] * counted[:, None]) > 0
    return p[:, 1:][chosen], q[:, 1:][chosen]


def test_a_row_is_its_response(tmp_path: Path) -> None:
    lines = rows()
    lines[0]["token_loss_mask"][0][0] = 1  # no logits score the first token: it never counts
    write(tmp_path / "exp_001" / "train_data_step7.jsonl", lines)
    write(tmp_path / "exp_001" / "val_data_step7.jsonl", [{"content": ["x"], "idx": 0}])
    dump = open_dump(tmp_path / "exp_001")
    [entry] = dump.entries
    assert (dump.kind, entry.location.step) == ("nemo_rl", 7)
    assert [problem.kind for problem in dump.problems] == ["unknown"]
    record = dump.read(entry)
    for row, line in enumerate(lines):
        span = slice(2 + row // 2, line["input_lengths"][0])
        counted = [int(one * line["sample_loss_mask"][0]) for one in line["token_loss_mask"][0]]
        for name, values in {
            "responses": line["token_ids"][0],
            "rollout_log_probs": line["generation_logprobs"][0],
            "response_mask": counted,
        }.items():
            assert rows_in(record, name)[row] == values[span]
    assert len(set(record.samples or ())) == 6
    assert len(set(record.groups or ())) == 3
    assert record.about["uncounted_sequences"] == 1
    assert record.tensors["rewards"][2].tolist() == [0, 1, 0, 1, 0, 1]


def test_columns_that_stand_for_something_else(tmp_path: Path) -> None:
    """Zeros are a pass that was not made; rewards may be of a batch before it was filtered."""
    lines = rows(skipped=True)
    for row, line in enumerate(lines):
        line["filtered_rewards"] = [10.0 + row]
        line["advantages"] = [[float(row)]]  # of the sequence
    record = read_first(write(tmp_path / "train_data_step1.jsonl", lines))
    assert "old_log_probs" not in record.tensors
    assert "not measured" in str(mapping(record.about, "left_out")["old_log_probs"])
    assert set(mapping(record.about, "streams")) == {"rollout"}
    assert record.tensors["rewards"][2].tolist() == [10, 11, 12, 13, 14, 15]
    assert {*rows_in(record, "advantages")[4]} == {4.0}


def test_damaged_and_foreign_files(tmp_path: Path) -> None:
    lines = rows()
    path = write(tmp_path / "train_data_step2.jsonl", lines)
    half = path.read_text()[: path.stat().st_size // 2]
    path.write_text(half)
    record = read_first(path)
    assert len(record.samples or ()) == len(record.tensors["rewards"][2]) == half.count("\n")
    assert "is no JSON" in all_problems(record)
    lines[1]["generation_logprobs"] = [[0.0, 0.0]]
    record = read_first(write(path, lines))
    assert len(record.tensors["rewards"][2]) == len(lines) - 1
    assert record.samples is None  # a name has the position among the answers of its prompt
    assert "line 2 is left out: rollout_log_probs of a sequence has" in all_problems(record)
    with pytest.raises(InvalidTensor, match="holds no row: line 1 is left out"):
        read_first(write(path, lines[1:2]))
    # The file of distillation has no streams.
    write(tmp_path / "other" / "train_data_step1.jsonl", [{"content": ["x"], "input_lengths": [3]}])
    with pytest.raises(NotFound):
        open_dump(tmp_path / "other")


def test_what_is_no_number_is_named_and_the_rest_is_read(tmp_path: Path) -> None:
    lines = rows()
    lines[1]["rewards"] = ["x"]
    lines[2]["rewards"] = [10**400]
    lines[3]["prev_logprobs"][0][5] = "y"
    lines[4]["token_ids"][0][1] = 0.5
    record = read_first(write(tmp_path / "train_data_step3.jsonl", lines))
    np.testing.assert_array_equal(record.tensors["rewards"][2], [0, np.nan, np.nan, 1])
    for words in (
        "line 2: rewards is no number: a text",
        "line 3: rewards is no number: an integer",
        "line 4 is left out: prev_logprobs holds no number at index 5",
        "line 5 is left out: token_ids holds no token id at index 1",
    ):
        assert words in all_problems(record)


def test_two_files_of_one_step_are_never_mixed(tmp_path: Path) -> None:
    for name in ("train_data_step1", "train_data_step01"):
        write(tmp_path / f"{name}.jsonl", rows())
    dump = open_dump(tmp_path)
    assert [each.path.stem for each in dump.entries] == ["train_data_step1"]
    assert [each.path.stem for each in dump.problems] == ["train_data_step01"]


def test_an_import_has_nemo_rls_own_number(tmp_path: Path) -> None:
    lines, other = rows(12), rows(12, shift=0.2)
    write(tmp_path / "one" / "train_data_step3.jsonl", lines)
    write(tmp_path / "one" / "train_data_step4.jsonl", rows(12, seed=1, skipped=True))
    write(tmp_path / "two" / "train_data_step3.jsonl", other)
    with (
        service(tmp_path / "home") as live,
        attach(live.server.url, token=live.tokens.operate) as session,
    ):
        report = import_dump(session, open_dump(tmp_path / "one"), "nemo")
        assert (report["problems"], report["refused"]) == ([], [])
        assert list(report["left_out"]) == ["old_log_probs"]
        answer = live.get("/steps/3/metrics", run="nemo")
        p, q = masked(lines)
        metrics = answer["metrics"]
        assert answer["coverage"]["tokens"] == len(p)
        # token_mult_prob_error of NeMo-RL: sum(exp(|d|) * mask) / sum(mask)
        error = np.exp(np.abs(q - p)).mean()
        assert metrics["token_mult_prob_error"] == pytest.approx(error, rel=1e-9)
        assert metrics["rollout_corr/kl"] == pytest.approx((q - p).mean(), rel=1e-9)
        assert metrics["per_round/total_rounds"] == 2
        live.problem(404, "/steps/4/metrics", run="nemo")
    one, two = (open_dump(tmp_path / side, step=3) for side in ("one", "two"))
    assert compare([one, two]).verdict is Verdict.DIFFERENT
    assert compare([one, one]).verdict is Verdict.SAME
