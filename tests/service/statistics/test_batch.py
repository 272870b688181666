from __future__ import annotations

import functools
import importlib
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numba
import numpy as np
import pytest
from tests.support.batches import batch_of, bfloat16, random_streams, wire

from stagescope_service.statistics import TokenBatch, available_pairs, publish, summarise
from stagescope_service.statistics.codec import summary_from_bytes, summary_to_bytes
from stagescope_service.statistics.payload import read_value, to_wire
from stagescope_service.statistics.summary import Summary
from stagescope_service.statistics.token_batch import FLOATS, INTEGERS
from stagescope_wire.errors import InvalidTensor

ROOT = Path(__file__).resolve().parents[3]

RNG = np.random.default_rng(0)
P, Q, MASK = random_streams(RNG, 6, 40)
FULL = publish(summarise(batch_of(P, Q, MASK)))


def tensors(**others: Any) -> dict[str, Any]:
    base = {"old_log_probs": P, "rollout_log_probs": Q, "response_mask": MASK}
    return {k: v if isinstance(v, tuple) else wire(v) for k, v in (base | others).items()}


def packed() -> tuple[list[Any], list[int]]:
    """Cut trailing zeros of the mask off each row, so that rows have different lengths."""
    ends = [int(np.flatnonzero(row).max()) + 1 if row.any() else 0 for row in MASK]
    flat = [np.concatenate([a[i, :n] for i, n in enumerate(ends)]) for a in (P, Q, MASK)]
    return flat, [0, *np.cumsum(ends).tolist()]


def without_rows(metrics: dict[str, float]) -> dict[str, float]:
    return {k: v for k, v in metrics.items() if k != "counts/empty_rows"}


@pytest.mark.parametrize("tag", ["float64", "float32", "float16", "bfloat16"])
@pytest.mark.parametrize("with_turns", [False, True])
def test_a_negative_zero_in_a_mask_is_a_zero(tag: str, with_turns: bool) -> None:
    turns: dict[str, object] = {"turn_ids": np.zeros(MASK.shape, np.int64)} if with_turns else {}

    def numbers(mask: Any) -> dict[str, float]:
        mask = bfloat16(mask) if tag == "bfloat16" else mask.astype(tag)
        given = tensors(response_mask=mask, **turns)
        return publish(summarise(TokenBatch.from_tensors(given)))

    signed = np.where(MASK == 1, 1.0, -0.0)
    assert numbers(signed) == numbers(MASK)
    for wrong in (-1.0, 0.5, np.nan):
        with pytest.raises(InvalidTensor, match="other than 0 and 1"):
            numbers(np.where(MASK == 1, wrong, -0.0))


@pytest.mark.parametrize("empty", [[], [[], []]], ids=["no rows", "empty rows"])
def test_lists_without_a_token_are_legal(empty: Sequence[object]) -> None:
    given = {name: to_wire(name, empty) for name in (*tensors(), "responses")}
    found = publish(summarise(TokenBatch.from_tensors(given)))
    assert found["counts/tokens"] == 0.0
    assert found["counts/empty_rows"] == len(empty)


def test_padding_on_either_side_packing_and_offsets_give_the_same_numbers() -> None:
    left = [np.pad(a, ((0, 0), (7, 0))) for a in (P, Q, MASK)]
    right = [np.pad(a, ((0, 0), (0, 9))) for a in (P, Q, MASK)]
    assert publish(summarise(batch_of(*left))) == FULL
    assert publish(summarise(batch_of(*right))) == FULL
    (p, q, mask), offsets = packed()
    streams = {"old_log_probs": p, "rollout_log_probs": q, "response_mask": mask}
    by_length = {k: wire(v) for k, v in streams.items()}
    by_length["cu_seqlens"] = wire(np.array(offsets, np.int32))
    ragged = {k: wire(v, offsets) for k, v in streams.items()}
    one_row = {k: wire(v[None]) for k, v in streams.items()} | {
        "cu_seqlens": wire(np.array(offsets))
    }
    for variant in (by_length, ragged, one_row):
        assert publish(summarise(TokenBatch.from_tensors(variant))) == FULL


@pytest.mark.parametrize("dtype", [*FLOATS, *INTEGERS])
def test_masks_of_every_dtype(dtype: str) -> None:
    mask = bfloat16(MASK) if dtype == "bfloat16" else MASK.astype(dtype)
    positions = np.tile(np.arange(40), (6, 1))
    for batch in (batch_of(P, Q, mask), batch_of(P, Q, mask, positions=positions)):
        assert publish(summarise(batch)) == FULL


@pytest.mark.parametrize("bad", [2.0, 0.5, -1.0, np.nan, np.inf])
@pytest.mark.parametrize("general", [False, True])
def test_a_mask_value_other_than_0_and_1_is_an_error(bad: float, general: bool) -> None:
    mask = MASK.astype(np.float32)
    mask[3, 11] = bad
    others: dict[str, Any] = {"positions": np.tile(np.arange(40), (6, 1))} if general else {}
    with pytest.raises(InvalidTensor, match=r"response_mask \(row 3\).*0 and 1"):
        summarise(batch_of(P, Q, mask, **others))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"response_mask": MASK[:, 1:]}, r"response_mask has shape \(6, 39\) where old_log_probs"),
        ({"rollout_log_probs": Q[:4]}, r"rollout_log_probs has shape \(4, 40\).*4 rows of 40"),
        ({"rollout_log_probs": Q.astype(np.int64)}, "rollout_log_probs.*int64.*bfloat16"),
        ({"old_log_probs": P[None]}, r"old_log_probs has shape \(1, 6, 40\).*cu_seqlens"),
        ({"old_log_probs": P.reshape(-1)}, r"old_log_probs has shape \(240,\)"),
        ({"positions": np.zeros((6, 40))}, "positions.*float64"),
        ({"token_offset": np.zeros(5, np.int64)}, r"token_offset has shape \(5,\).*\[6\]"),
        ({"old_log_probs": ("float32", (6, 41), P, None)}, "240 values for shape"),
        ({"old_log_probs": ("float32", (6, 40), P.astype(np.float64), None)}, "buffer is float64"),
        ({"old_log_probs": ("float32", (240,), P, np.array([0, 9, 5, 240]))}, "never fall"),
        ({"old_log_probs": ("float32", (240,), P, np.array([0, 100]))}, "rows end at 100"),
    ],
)
def test_errors_name_the_tensor_the_shapes_and_what_was_expected(
    change: Mapping[str, object], message: str
) -> None:
    with pytest.raises(InvalidTensor, match=message):
        TokenBatch.from_tensors(tensors(**change))


def test_a_missing_mask_or_sample_id_is_an_error() -> None:
    given = tensors()
    with pytest.raises(InvalidTensor, match=r"sample_ids has 2 entries.*6"):
        TokenBatch.from_tensors(given, {"sample_ids": ["a", "b"]})
    del given["response_mask"]
    with pytest.raises(InvalidTensor, match=r"response_mask is missing.*\(6, 40\)"):
        TokenBatch.from_tensors(given)


def test_padded_tensors_are_viewed_not_copied() -> None:
    batch = batch_of(P, Q, MASK)
    assert np.shares_memory(batch.p, P)
    assert np.shares_memory(batch.mask, MASK)


def test_which_pairs_a_payload_gives() -> None:
    names = {"old_log_probs": 0, "rollout_log_probs": 0, "recomputed_log_probs": 0}
    assert available_pairs(names) == (("old", "rollout"), ("old", "recomputed"))
    assert available_pairs({"log_probs": 0, "rollout_log_probs": 0}) == (("current", "rollout"),)


def test_rounds_break_where_positions_jump_and_follow_ids_where_given() -> None:
    p, q, mask = (np.full((1, 8), v) for v in (-1.0, -1.25, 1))
    positions = np.array([[0, 1, 2, 3, 12, 13, 14, 15]])
    broken = summarise(batch_of(p, q, mask, positions=positions))
    assert [(k, c.tokens) for k, c in broken.rounds.items()] == [(0, 4), (1, 4)]
    ids = np.array([[0, 0, 0, 0, 5, 5, 5, 5]])
    given = summarise(batch_of(p, q, mask, positions=positions, round_ids=ids))
    assert [(k, c.tokens) for k, c in given.rounds.items()] == [(0, 4), (5, 4)]
    shifted = summarise(batch_of(p, q, mask, round_offset=np.array([3])))
    assert [(k, c.tokens) for k, c in shifted.rounds.items()] == [(3, 8)]
    with pytest.raises(InvalidTensor, match="round_ids holds -1"):
        summarise(batch_of(p, q, mask, round_ids=np.full((1, 8), -1)))


def test_turns_and_staleness_are_sliced_and_add_up() -> None:
    rng = np.random.default_rng(3)
    turns = np.sort(rng.integers(0, 3, P.shape), axis=1)
    versions = rng.integers(5, 8, P.shape)
    summary = summarise(batch_of(P, Q, MASK, turn_ids=turns, versions=versions, policy_version=8))
    on = MASK == 1
    assert {k: c.tokens for k, c in summary.turns.items()} == {
        k: int((turns[on] == k).sum()) for k in range(3)
    }
    assert {k: c.tokens for k, c in summary.staleness.items()} == {
        8 - v: int((versions[on] == v).sum()) for v in (5, 6, 7)
    }
    assert summary.versions == (5, 6, 7)
    assert publish(summary)["rollout_corr/kl"] == pytest.approx(FULL["rollout_corr/kl"], rel=1e-9)
    by_row = summarise(batch_of(P, Q, MASK, versions=np.arange(6), policy_version=6))
    assert [k for k, _ in by_row.staleness.items()] == [1, 2, 3, 4, 5, 6]
    assert not summarise(batch_of(P, Q, MASK, versions=versions)).staleness.keys.size


def of_versions(*texts: str, **meta: object) -> Summary:
    """Summarise a raw payload whose rows name these versions in turn."""
    raw = {"old_log_probs": P, "rollout_log_probs": Q, "response_mask": MASK, **meta}
    payload = read_value({**raw, "versions": [texts[row % len(texts)] for row in range(len(P))]})
    return summarise(TokenBatch.from_tensors(payload.tensors, {}, payload.meta))


def test_versions_that_are_texts() -> None:
    of = of_versions
    numbered = of("step-41", "step-42", policy_version=43)
    assert numbered.version_labels == ("step-41", "step-42")
    assert numbered.staleness.keys.tolist() == [1, 2]
    assert publish(numbered) == pytest.approx(
        publish(of("41", "42", policy_version=43)), nan_ok=True
    )
    over_http = {"schema": 1, "tensors": {}, "strings": {"versions": ["step-1", "step-2"]}}
    taken = read_value({**over_http, "meta": {"a": 1}})
    assert taken.tensors["versions"][2].tolist() == [1, 2]
    assert (taken.strings, taken.meta) == (
        {}, {"a": 1, "version_names": {"1": "step-1", "2": "step-2"}},
    )  # fmt: skip
    other = of("default", "b7c2", policy_version=43)
    assert other.version_labels == ("default", "b7c2")
    assert not other.staleness.keys.size
    assert "texts that do not differ in one number" in other.why_no_staleness
    assert summary_from_bytes(summary_to_bytes(other)).version_labels == ("default", "b7c2")
    assert Summary.merge([other, of("c", "default")]).version_labels == ("default", "b7c2", "c")
    both = Summary.merge([numbered, of("7", "8")])
    assert both.version_labels == ("7", "8", "step-41", "step-42")
    assert "policy_version=" in of("step-41", "step-42").why_no_staleness
    model, another = of("Qwen3", policy_version=3), of("a-3", policy_version=3)
    assert not model.staleness.keys.size
    both = Summary.merge([another, of("b-3", policy_version=3)])
    assert both.version_labels == ("a-3", "b-3")


def test_ranks_that_write_other_texts_around_one_number_have_no_order() -> None:
    of = functools.partial(of_versions, policy_version=4)
    for first, second, labels in (
        (("a-3", "a-4"), ("b-3", "b-4"), {"a-3", "a-4", "b-3", "b-4"}),
        (("step-3",), ("iter-3",), {"step-3", "iter-3"}),
        (("step-3",), ("iter-4",), {"step-3", "iter-4"}),
    ):
        assert of(*first).is_staleness_known
        both = Summary.merge([of(*first), of(*second)])
        assert {*both.version_labels} == labels
        assert not both.is_staleness_known
        assert {*Summary.merge([both, of(*second)]).version_labels} == labels


@pytest.mark.parametrize(
    "versions",
    [
        np.arange(3),
        np.arange(240.0).reshape(6, 40),
        np.zeros((6, 40, 2), np.int64),
        np.int64(3),
        [["step-41", "step-42"], ["step-42"], ["step-42"], ["step-42"], ["step-42"], ["step-42"]],
    ],
    ids=["rows", "floats", "three dimensions", "one number", "several texts a sample"],
)
def test_versions_that_do_not_fit_cost_no_other_number(versions: object) -> None:
    given = {"old_log_probs": P, "rollout_log_probs": Q, "response_mask": MASK}
    batch = TokenBatch.from_tensors(read_value({**given, "versions": versions}).tensors)
    assert publish(summarise(batch)) == FULL
    assert batch.versions is None
    (problem,) = batch.problems
    assert problem.wrong.startswith("versions ")


def test_skipped_tokens_do_not_count_and_move_no_round() -> None:
    skip = (np.random.default_rng(4).random(P.shape) < 0.3).astype(np.uint8)
    summary = summarise(batch_of(P, Q, MASK), skip=skip.reshape(-1))
    numbers = np.cumsum(np.diff(MASK, axis=1, prepend=0) == 1, axis=1) - 1
    kept = (MASK == 1) & (skip == 0)
    assert {k: c.tokens for k, c in summary.rounds.items()} == {
        int(k): int((numbers[kept] == k).sum()) for k in np.unique(numbers[kept])
    }


FIRST_PAYLOADS = """
import numba
import numpy as np
from tests.support.batches import batch_of, bfloat16, random_streams
from stagescope_service.ingest.actor import _start_worker
from stagescope_service.statistics import summarise

_start_worker("node-7")
numba.njit = None  # what compiles a loop, or loads it from disk, at its first call
p, q, mask = random_streams(np.random.default_rng(0), 4, 64)
turns = np.cumsum(mask, axis=1)
for cast in (np.float16, np.float32, np.float64, bfloat16):
    for kind in (np.bool_, np.uint8, np.int32, np.int64, np.float16, np.float32, np.float64):
        payload = [cast(p) if cast is bfloat16 else p.astype(cast), q, mask.astype(kind)]
        for array in payload:
            array.setflags(write=False)
        summarise(batch_of(*payload, samples=list("abcd")))
        summarise(batch_of(*payload, turn_ids=turns, responses=turns, policy_versions=turns))
print("done")
"""


def test_an_ingestor_that_has_begun_compiles_nothing_for_a_payload() -> None:
    """Else the first steps of a training would have no numbers for as long as that takes."""
    done = subprocess.run(
        [sys.executable, "-c", FIRST_PAYLOADS],
        capture_output=True, text=True, timeout=240, check=False, cwd=ROOT,
    )  # fmt: skip
    assert (done.returncode, done.stdout.strip()) == (0, "done"), done.stderr


@pytest.mark.parametrize("is_first", [True, False])
def test_an_ingestor_says_on_which_node_it_compiles(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, is_first: bool
) -> None:
    def summarised(*args: object, **more: object) -> None:
        del args, more
        if is_first:
            numba.njit(lambda value: value + 1)(1)

    pytest.importorskip("ray")
    ingestor = importlib.import_module("stagescope_service.ingest.actor")
    # By its name as a module: the package has a function of that name.
    module = importlib.import_module("stagescope_service.statistics.summarise")
    monkeypatch.setattr(module, "summarise", summarised)
    monkeypatch.setattr("os.setpriority", lambda *args: None)
    ingestor._start_worker("node-7")
    said = ["node-7 compiles the statistics", "node-7 has compiled"] if is_first else []
    assert len(caplog.messages) == len(said)
    assert all(text in message for text, message in zip(said, caplog.messages, strict=True))
