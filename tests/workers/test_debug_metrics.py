from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np
import pytest
import torch
from tensordict import TensorDict
from tests.support.batches import batch_of, random_streams

from stagescope_service.statistics import publish, summarise
from stagescope_wire.errors import InvalidTensor
from stagescope_workers import calculate_debug_metrics
from stagescope_workers.debug_metrics import _calculate_per_round_metrics, _find_contiguous_segments

VERL = "training/rollout_probs_diff_"
PEARSON = "training/rollout_actor_probs_pearson_corr"


class Proto:
    """What the drop-in knows of a DataProto."""

    def __init__(self, batch: object) -> None:
        self.batch = batch


def tensors(rows: int = 6, width: int = 80, seed: int = 0) -> dict[str, torch.Tensor]:
    p, q, mask = random_streams(np.random.default_rng(seed), rows, width, 0.3)
    return {
        "old_log_probs": torch.from_numpy(p),
        "rollout_log_probs": torch.from_numpy(q),
        "response_mask": torch.from_numpy(mask),
        "responses": torch.zeros(rows, width),
    }


def by_verl(batch: dict[str, torch.Tensor]) -> dict[str, float]:
    """verl's definition in torch: probabilities over the whole mask."""
    mask = batch["response_mask"].bool()
    actor, rollout = (batch[k].double().exp()[mask] for k in ("old_log_probs", "rollout_log_probs"))
    gap = (actor - rollout).abs()
    return {
        f"{VERL}valid": 1,
        f"{VERL}max": gap.max().item(),
        f"{VERL}mean": gap.mean().item(),
        f"{VERL}std": gap.std().item(),
        PEARSON: torch.corrcoef(torch.stack([actor, rollout]))[0, 1].item(),
    }


def by_loop(batch: dict[str, torch.Tensor]) -> dict[str, float]:
    """The pull request's definition, token by token."""
    found: dict[int, list[float]] = {}
    for p, q, mask in zip(
        batch["old_log_probs"].double(), batch["rollout_log_probs"].double(),
        batch["response_mask"], strict=True,
    ):  # fmt: skip
        number, inside = -1, False
        for x, y, m in zip(p.tolist(), q.tolist(), mask.tolist(), strict=True):
            if m == 1 and not inside:
                inside, number = True, number + 1
            elif m == 0:
                inside = False
            if inside:
                found.setdefault(number, []).append(abs(x - y))
    means = {i: sum(v) / len(v) for i, v in found.items()}
    top = max(means, key=lambda i: means[i])
    out: dict[str, float] = {"per_round/total_rounds": len(found)}
    out |= {f"per_round/round_{i}_abs_diff_mean": means[i] for i in found}
    out |= {f"per_round/round_{i}_token_count": len(v) for i, v in found.items()}
    return out | {"per_round/max_round_diff": top, "per_round/max_diff_value": means[top]}


def close(found: Mapping[str, float], expected: dict[str, float]) -> None:
    assert expected.keys() <= found.keys()
    for name, value in expected.items():
        assert found[name] == pytest.approx(value, rel=1e-9, nan_ok=True), name
        assert type(found[name]) is type(value), name


@pytest.mark.parametrize("kind", ["dict", "numpy", "proto", "tensordict", "proto of tensordict"])
def test_every_container(kind: str) -> None:
    batch = tensors()
    given: object = {
        "dict": batch,
        "numpy": {name: tensor.numpy() for name, tensor in batch.items()},
        "proto": Proto(batch),
        "tensordict": TensorDict(batch, batch_size=[6]),
        "proto of tensordict": Proto(TensorDict(batch, batch_size=[6])),
    }[kind]
    close(calculate_debug_metrics(given), by_verl(batch) | by_loop(batch))


def test_many_blocks_of_rows_add_up() -> None:
    batch = tensors(900, 700, seed=1)
    close(calculate_debug_metrics(batch), by_verl(batch))
    found = publish(summarise(batch_of(*(batch[k].numpy() for k in (
        "old_log_probs", "rollout_log_probs", "response_mask")))))  # fmt: skip
    drop_in = calculate_debug_metrics(batch)
    rounds = {k: v for k, v in found.items() if k.startswith(("per_round/", "training/"))}
    assert {k: drop_in[k] for k in rounds} == pytest.approx(rounds, rel=1e-9)


def test_long_rounds_and_short_ones_in_one_block() -> None:
    batch = tensors(6, 3000, seed=2)
    batch["response_mask"][:4] = 0
    batch["response_mask"][:4, 10:1400] = 1
    batch["response_mask"][:3, 1500:] = 1
    close(calculate_debug_metrics(batch), by_verl(batch) | by_loop(batch))
    long = {name: tensor[:4] for name, tensor in batch.items()}
    close(calculate_debug_metrics(long), by_verl(long) | by_loop(long))


def test_streams_that_hardly_vary_keep_their_digits() -> None:
    """As of a policy that is sure: one product less another would be all rounding."""
    made = torch.Generator().manual_seed(0)
    old, noise = torch.randn(2, 4, 500, generator=made, dtype=torch.float64)
    batch = {
        "old_log_probs": 1e-6 * old - 0.7,
        "rollout_log_probs": 1e-6 * (old + 0.3 * noise) - 0.699,
    }
    close(calculate_debug_metrics(batch), by_verl({**batch, "response_mask": torch.ones(4, 500)}))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_dtypes(dtype: torch.dtype) -> None:
    batch = tensors()
    batch["old_log_probs"] = batch["old_log_probs"].to(dtype)
    close(calculate_debug_metrics(batch), by_verl(batch) | by_loop(batch))


def test_attention_mask_is_sliced_and_no_mask_is_all_ones() -> None:
    batch = tensors()
    mask = batch.pop("response_mask")
    prompt = torch.ones(6, 33, dtype=torch.int64)
    found = calculate_debug_metrics(batch | {"attention_mask": torch.cat([prompt, mask], 1)})
    close(found, by_verl(batch | {"response_mask": mask}))
    close(calculate_debug_metrics(batch), by_verl(batch | {"response_mask": torch.ones(6, 80)}))


def test_rows_of_different_lengths() -> None:
    batch = tensors()
    batch["response_mask"][0, :3], batch["response_mask"][1, :3] = 1, 1
    lengths = [80, 3, 17, 80, 1, 64]
    inside = torch.arange(80) < torch.tensor(lengths)[:, None]
    padded = batch | {"response_mask": batch["response_mask"] * inside}
    expected = by_verl(padded) | by_loop(padded)
    names = ("old_log_probs", "rollout_log_probs", "response_mask")
    lists = {k: [row[:n] for row, n in zip(batch[k], lengths, strict=True)] for k in names}
    close(calculate_debug_metrics(lists), expected)
    jagged = {k: torch.nested.nested_tensor(v, layout=torch.jagged) for k, v in lists.items()}
    close(calculate_debug_metrics(jagged), expected)
    with pytest.raises(InvalidTensor, match="rollout has other rows"):
        calculate_debug_metrics(lists | {"rollout_log_probs": batch["rollout_log_probs"]})


def test_no_token_at_all() -> None:
    batch = tensors()
    found = calculate_debug_metrics(batch | {"response_mask": torch.zeros(6, 80)})
    assert found[f"{VERL}valid"] == 0
    assert all(math.isnan(found[f"{VERL}{name}"]) for name in ("max", "mean", "std"))
    assert math.isnan(found[PEARSON])
    assert {k: v for k, v in found.items() if "per_round" in k} == {"per_round/total_rounds": 0}


def test_one_token() -> None:
    batch = tensors()
    mask = torch.zeros(6, 80)
    mask[2, 5] = 1
    found = calculate_debug_metrics(batch | {"response_mask": mask})
    assert found[f"{VERL}valid"] == 1
    assert math.isnan(found[f"{VERL}std"])
    assert math.isnan(found[PEARSON])
    assert found["per_round/round_0_token_count"] == 1


def test_nan_under_the_mask_makes_everything_nan_and_is_counted() -> None:
    batch = tensors()
    on = batch["response_mask"].nonzero()
    batch["old_log_probs"][tuple(on[0])] = math.nan
    found = calculate_debug_metrics(batch)
    for name in ("max", "mean", "std"):
        assert math.isnan(found[f"{VERL}{name}"])
    assert math.isnan(found[PEARSON])
    assert found["nonfinite/old_nan"] == 1
    assert found["nonfinite/rollout_nan"] == 0
    assert math.isnan(found["per_round/round_0_abs_diff_mean"])
    assert found["per_round/max_round_diff"] > 0


def test_nan_beside_the_mask_is_ignored() -> None:
    batch = tensors()
    expected = calculate_debug_metrics(batch)
    batch["old_log_probs"][batch["response_mask"] == 0] = math.nan
    assert calculate_debug_metrics(batch) == expected


def test_infinities_as_verl_has_them() -> None:
    batch = tensors()
    first, second = (tuple(at) for at in batch["response_mask"].nonzero()[:2])
    batch["old_log_probs"][first] = -math.inf
    close(calculate_debug_metrics(batch), by_verl(batch))
    assert calculate_debug_metrics(batch)["nonfinite/old_neginf"] == 1
    assert calculate_debug_metrics(batch)["per_round/max_diff_value"] == math.inf
    batch["rollout_log_probs"][second] = math.inf
    close(calculate_debug_metrics(batch), by_verl(batch))
    assert calculate_debug_metrics(batch)[f"{VERL}mean"] == math.inf


def test_shapes_that_differ_have_correlation_0() -> None:
    batch = tensors()
    batch["rollout_log_probs"] = batch["rollout_log_probs"][:, :1]
    found = calculate_debug_metrics(batch)
    assert found[PEARSON] == 0
    assert type(found[PEARSON]) is int
    with pytest.raises(InvalidTensor, match=r"\(6, 80\).*\(6, 79\)"):
        calculate_debug_metrics(tensors() | {"rollout_log_probs": torch.zeros(6, 79)})


def test_a_missing_stream_is_a_key_error_as_in_verl() -> None:
    batch = tensors()
    del batch["rollout_log_probs"]
    with pytest.raises(KeyError, match="rollout_log_probs"):
        calculate_debug_metrics(batch)


def test_an_integer_stream_is_refused() -> None:
    with pytest.raises(InvalidTensor, match=r"old_log_probs.*int64"):
        calculate_debug_metrics(tensors() | {"old_log_probs": torch.zeros(6, 80).long()})


@pytest.mark.parametrize(
    ("mask", "segments"),
    [
        ([0, 1, 1, 0, 1], [(1, 3), (4, 5)]),
        ([1, 1, 1], [(0, 3)]),
        ([0, 0], []),
        ([], []),
        ([1, 0, 1, 0, 1], [(0, 1), (2, 3), (4, 5)]),
        # Only 1 opens and only 0 closes.
        ([2, 1, 2, 2, 0, 2, 1], [(1, 4), (6, 7)]),
        ([0.0, 1.0, 0.5, 0.0], [(1, 3)]),
        ([True, False, True], [(0, 1), (2, 3)]),
    ],
)
def test_segments(mask: Sequence[float], segments: list[tuple[int, int]]) -> None:
    assert _find_contiguous_segments(torch.tensor(mask)) == segments
    assert _find_contiguous_segments(np.array(mask)) == segments


def per_round(difference: list[list[float]], mask: list[list[float]]) -> dict[str, float]:
    train = torch.tensor(difference, dtype=torch.float64)
    return _calculate_per_round_metrics(train, torch.zeros_like(train), torch.tensor(mask))


def test_a_mask_of_other_integers_counts_them_as_verl_does() -> None:
    batch = tensors()
    batch["response_mask"] = -batch["response_mask"].long()
    found = calculate_debug_metrics(batch)
    for name, value in by_verl(batch).items():
        assert found[name] == pytest.approx(value, rel=1e-9)
    assert found["per_round/total_rounds"] == 0


def test_per_round_is_weighted_by_token() -> None:
    found = per_round([[1, 1, 1, 9, 2], [5, 9, 9, 9, 9]], [[1, 1, 1, 0, 1], [1, 0, 0, 0, 0]])
    assert found == {
        "per_round/total_rounds": 2,
        "per_round/round_0_abs_diff_mean": 2.0,
        "per_round/round_0_token_count": 4,
        "per_round/round_1_abs_diff_mean": 2.0,
        "per_round/round_1_token_count": 1,
        "per_round/max_round_diff": 0,
        "per_round/max_diff_value": 2.0,
    }


def test_nan_never_wins_and_infinity_may() -> None:
    found = per_round([[math.nan, 0, 1]], [[1, 0, 1]])
    assert (found["per_round/max_round_diff"], found["per_round/max_diff_value"]) == (1, 1.0)
    found = per_round([[math.nan, 0, math.nan]], [[1, 0, 1]])
    assert found["per_round/max_round_diff"] == -1
    assert "per_round/max_diff_value" not in found
    found = per_round([[math.inf, 0, 1]], [[1, 0, 1]])
    assert found["per_round/max_diff_value"] == math.inf


def test_per_round_wants_one_shape() -> None:
    with pytest.raises(InvalidTensor, match="differ"):
        _calculate_per_round_metrics(torch.zeros(2, 3), torch.zeros(2, 3), torch.zeros(2, 2))
