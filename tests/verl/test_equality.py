"""The published numbers against verl's own functions, on the same tensors.

verl computes in the dtype of its inputs; ours are summed in float64. With float64 on both sides
what is left is verl's 1e-8, which it adds to each count before it divides: a mean of size m over n
tokens is off by m * 1e-8 / n, and e^-mean by as much again. Where verl is given float32, as in a
training, its own rounding is added.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from stagescope_service.statistics import TokenBatch, publish, summarise
from stagescope_service.statistics.settings import StatisticsSettings
from stagescope_workers import calculate_debug_metrics
from stagescope_workers.integrations.training import clipped
from stagescope_workers.integrations.verl import minibatches
from stagescope_workers.payload import owned_tensor

pytest.importorskip("verl")
protocol = pytest.importorskip("verl.protocol")
debug = pytest.importorskip("verl.utils.debug.metrics")
correction = pytest.importorskip("verl.trainer.ppo.rollout_corr_helper")

pytestmark = [
    pytest.mark.verl,
    # torch's, where verl takes the spread of one token.
    pytest.mark.filterwarnings("ignore:(cov|std)[(][)]. degrees of freedom:UserWarning"),
]

Tensors = dict[str, torch.Tensor]

IN_FLOAT64 = 1e-6
IN_FLOAT32 = 2e-4
IN_BFLOAT16 = 2**-7
PEARSON = "training/rollout_actor_probs_pearson_corr"
STD = "rollout_corr/rollout_is_std"
TRAINING_PPL = "rollout_corr/training_ppl"
FRACTION_LOW = "rollout_corr/rollout_is_seq_fraction_low"
EMPTY_ROW = {
    TRAINING_PPL: 1.0,
    "rollout_corr/rollout_ppl": 1.0,
    "rollout_corr/ppl_ratio": 1.0,
    "rollout_corr/training_log_ppl": 0.0,
    "rollout_corr/rollout_log_ppl": 0.0,
    "rollout_corr/log_ppl_diff": 0.0,
    "rollout_corr/log_ppl_abs_diff": 0.0,
    "rollout_corr/chi2_seq": 0.0,
    "rollout_corr/rollout_is_seq_mean": 0.0,
    FRACTION_LOW: 1.0,
}
"""What verl takes for a row without model tokens in its means over rows."""

CONFIGS: list[dict[str, Any]] = [
    {"rollout_is": None},
    {"rollout_is": "token"},  # the threshold is verl's default
    *(
        {
            "rollout_is": level,
            "rollout_is_threshold": threshold,
            "rollout_is_batch_normalize": normalize,
        }
        for level in ("token", "sequence")
        for threshold in (2.0, 0.5, "1.3", "0.5_2.0", "0.9_1.1", math.inf)
        for normalize in (False, True)
    ),
]


@pytest.fixture(autouse=True, scope="module")
def own_functions() -> Iterator[None]:
    """Let verl's functions be verl's own where a plugin has wrapped them."""
    with pytest.MonkeyPatch.context() as patch:
        for module in (debug, correction):
            for name, function in inspect.getmembers(module, inspect.isfunction):
                if function.__module__ == module.__name__:
                    patch.setattr(module, name, inspect.unwrap(function))
                    assert getattr(module, name).__code__.co_filename == module.__file__
        yield


def name_of(config: Mapping[str, object]) -> str:
    return "-".join(str(value) for value in config.values())


def random_batch(
    rows: int = 8,
    width: int = 24,
    *,
    seed: int = 0,
    noise: float = 0.3,
    dtype: torch.dtype = torch.float64,
) -> Tensors:
    """Rows of several lengths with a tool's answer in the middle, padded with 0."""
    generator = torch.Generator().manual_seed(seed)
    q = -torch.empty(rows, width, dtype=torch.float64).exponential_(1.0, generator=generator)
    p = q + noise * torch.randn(rows, width, dtype=torch.float64, generator=generator)
    mask = torch.ones(rows, width, dtype=torch.int64)
    for row in range(rows):
        end = width - row
        mask[row, end:] = 0
        mask[row, end // 3 : end // 2] = 0
    return {
        "old_log_probs": (p * mask).to(dtype),
        "rollout_log_probs": (q * mask).to(dtype),
        "response_mask": mask,
        "responses": torch.zeros(rows, width, dtype=torch.int64),
    }


def rounded(batch: Tensors, *dtypes: torch.dtype) -> Tensors:
    """The streams, old then rollout, rounded to dtypes."""
    streams = ("old_log_probs", "rollout_log_probs")
    return {**batch, **{k: batch[k].to(d) for k, d in zip(streams, dtypes, strict=True)}}


def proto(batch: Tensors) -> Any:
    return protocol.DataProto.from_dict(tensors={k: v.clone() for k, v in batch.items()})


def ours(batch: Tensors, config: dict[str, Any] | None = None) -> dict[str, float]:
    """What the service publishes for a payload of these tensors."""
    wire = {name: owned_tensor(name, tensor) for name, tensor in batch.items()}
    return publish(summarise(TokenBatch.from_tensors(wire), StatisticsSettings(**(config or {}))))


def verl_correction(batch: Tensors, config: Mapping[str, object]) -> dict[str, float]:
    found: dict[str, float] = correction.compute_rollout_correction_and_add_to_batch(
        proto(batch), config
    )[1]
    return found


def verl_debug(batch: Tensors) -> dict[str, float]:
    found: dict[str, float] = debug.calculate_debug_metrics(proto(batch))
    return found


def hold(found: dict[str, float], expected: dict[str, float], tolerance: float) -> None:
    """Every key of verl is there, with verl's value."""
    assert expected.keys() <= found.keys()
    for name, value in expected.items():
        own = found[name]
        if name == STD:
            # A root of a difference of two means: compared before the root is taken.
            mean = expected["rollout_corr/rollout_is_mean"]
            bound = tolerance * max(1.0, mean**2, value**2)
            assert own**2 == pytest.approx(value**2, rel=tolerance, abs=bound), name
        else:
            assert own == pytest.approx(value, rel=tolerance, abs=tolerance, nan_ok=True), name


def hold_correction(batch: Tensors, config: dict[str, Any], tolerance: float = IN_FLOAT64) -> None:
    """Hold `rollout_corr/*` to verl's, which fails where its weights are 0 throughout."""
    found = ours(batch, config)
    if found["rollout_corr/rollout_is_mean"] == 0.0:
        with pytest.raises(ZeroDivisionError):
            verl_correction(batch, config)
        assert math.isnan(found["rollout_corr/rollout_is_eff_sample_size"])
    else:
        hold(found, verl_correction(batch, config), tolerance)


@pytest.mark.parametrize("config", CONFIGS, ids=name_of)
@pytest.mark.parametrize("noise", [0.0, 0.02, 0.3, 4.0])
def test_every_number_of_the_correction_is_verl_s(config: dict[str, Any], noise: float) -> None:
    hold_correction(random_batch(noise=noise), config)


@pytest.mark.parametrize("config", CONFIGS, ids=name_of)
@pytest.mark.parametrize("old", [torch.float32, torch.bfloat16], ids=str)
def test_in_the_dtypes_of_a_training(config: dict[str, Any], old: torch.dtype) -> None:
    batch = rounded(random_batch(noise=0.05), old, torch.float32)
    upcast = rounded(batch, torch.float32, torch.float32)
    hold(ours(batch, config), verl_correction(upcast, config), IN_FLOAT32)
    hold(ours(batch), verl_debug(upcast), IN_FLOAT32)


def test_bfloat16_that_verl_is_not_spared() -> None:
    # V1 hands it over so; verl then rounds e^p and the rows' means to 8 bits, and we do not.
    batch = rounded(random_batch(noise=0.05), torch.bfloat16, torch.float32)
    found = ours(batch)
    for expected in (verl_debug(batch), verl_correction(batch, {})):
        hold(found, expected, IN_BFLOAT16)
    gap = abs(found["rollout_corr/training_ppl"] - verl_correction(batch, {})[TRAINING_PPL])
    assert gap > IN_FLOAT32


@pytest.mark.parametrize("config", CONFIGS, ids=name_of)
@pytest.mark.parametrize("gap", [19.5, -19.5, 25.0, -25.0, 60.0])
def test_differences_beyond_the_clamp(config: dict[str, Any], gap: float) -> None:
    batch = random_batch(noise=0.05)
    batch["old_log_probs"][0, :3] += gap
    batch["old_log_probs"][3, 0] -= gap
    hold_correction(batch, config)


@pytest.mark.parametrize("config", CONFIGS, ids=name_of)
def test_one_token_alone(config: dict[str, Any]) -> None:
    batch = random_batch(rows=1, width=5)
    batch["response_mask"] = torch.tensor([[0, 0, 1, 0, 0]])
    hold_correction(batch, config)
    hold(ours(batch), verl_debug(batch), IN_FLOAT64)


@pytest.mark.parametrize("config", CONFIGS, ids=name_of)
def test_rows_without_model_tokens_are_the_only_difference(config: dict[str, Any]) -> None:
    batch = random_batch(noise=0.02)
    without = {name: tensor.clone() for name, tensor in batch.items()}
    without["response_mask"][[2, 5, 6]] = 0
    found, expected = ours(without, config), verl_correction(without, config)
    rest = {name: tensor[[0, 1, 3, 4, 7]] for name, tensor in batch.items()}
    hold(found, verl_correction(rest, config), IN_FLOAT64)
    assert found["counts/empty_rows"] == 3
    hold(found, {k: v for k, v in expected.items() if not counts_rows(k, config)}, IN_FLOAT64)
    # verl counts each such row as one of log-prob 0, perplexity 1 and weight 0.
    for name, empty in EMPTY_ROW.items():
        if name == FRACTION_LOW and config.get("rollout_is_threshold") == math.inf:
            empty = 0.0  # no weight is below 1/U = 0
        if name in expected:
            mean = (5 * found[name] + 3 * empty) / 8
            assert expected[name] == pytest.approx(mean, rel=IN_FLOAT64), name


def counts_rows(name: str, config: Mapping[str, object]) -> bool:
    """Say whether a number of verl's is one over rows."""
    short = name.removeprefix("rollout_corr/")
    if short.startswith("rollout_is_seq_"):
        return True
    if config["rollout_is"] == "sequence" and "ratio_fraction" in short:
        return True
    if config["rollout_is"] == "sequence" and short in ("rollout_is_max", "rollout_is_min"):
        return True
    return "ppl" in short or short == "chi2_seq"


@pytest.mark.parametrize("option", sorted(correction.SUPPORTED_ROLLOUT_RS_OPTIONS))
def test_of_rejection_nothing_is_published(option: str) -> None:
    batch = random_batch()
    config = {"rollout_is": "token", "rollout_rs": option, "rollout_rs_threshold": 1.5}
    found, expected = ours(batch, {"rollout_is": "token"}), verl_correction(batch, config)
    absent = expected.keys() - found.keys()
    assert absent
    assert all(name.startswith("rollout_corr/rollout_rs_") for name in absent)
    # What is published is over the mask before the rejection, as verl's is.
    hold(found, {name: expected[name] for name in expected.keys() - absent}, IN_FLOAT64)


VALUES = st.floats(-30.0, 0.0, allow_subnormal=False)


@st.composite
def batches(draw: st.DrawFn) -> Tensors:
    """Streams and masks of any kind, in which each row has a model token."""
    rows, width = draw(st.integers(1, 4)), draw(st.integers(1, 6))
    size = rows * width

    def matrix(elements: st.SearchStrategy[object], dtype: torch.dtype) -> torch.Tensor:
        values = draw(st.lists(elements, min_size=size, max_size=size))
        return torch.tensor(values, dtype=dtype).reshape(rows, width)

    mask = matrix(st.integers(0, 1), torch.int64)
    mask[:, draw(st.integers(0, width - 1))] = 1
    return {
        "old_log_probs": matrix(VALUES, torch.float64),
        "rollout_log_probs": matrix(VALUES, torch.float64),
        "response_mask": mask,
        "responses": torch.zeros(rows, width, dtype=torch.int64),
    }


@given(batch=batches(), config=st.sampled_from(CONFIGS))
def test_any_batch(batch: Tensors, config: dict[str, Any]) -> None:
    hold_correction(batch, config)


FAINT_PROBABILITIES: Tensors = {
    "old_log_probs": torch.tensor([[0.0], [0.0], [-1.0]], dtype=torch.float64),
    "rollout_log_probs": torch.tensor([[-24.0], [-25.0], [-26.0]], dtype=torch.float64),
    "response_mask": torch.ones(3, 1, dtype=torch.int64),
    "responses": torch.zeros(3, 1, dtype=torch.int64),
}


@given(batch=batches())
@example(batch=FAINT_PROBABILITIES)  # e^-24 - 1 has four digits of e^-24
def test_probabilities_of_any_batch(batch: Tensors) -> None:
    expected, found = verl_debug(batch), ours(batch)
    drop_in = calculate_debug_metrics(batch)
    if not is_spread(batch):
        # Of constant probabilities verl correlates what is left of its own rounding.
        expected.pop(PEARSON)
    hold(drop_in, expected, IN_FLOAT64)
    hold(found, expected, IN_FLOAT64)


def prompted(batch: Tensors) -> Tensors:
    """The mask as the last columns of an attention mask over prompt and response."""
    mask = torch.cat([torch.ones(len(batch["responses"]), 7), batch["response_mask"]], dim=1)
    return {k: v for k, v in batch.items() if k != "response_mask"} | {"attention_mask": mask}


def unmasked(batch: Tensors) -> Tensors:
    return {k: v for k, v in batch.items() if k != "response_mask"}


def empty(batch: Tensors) -> Tensors:
    return batch | {"response_mask": torch.zeros_like(batch["response_mask"])}


def with_nan(batch: Tensors) -> Tensors:
    batch["old_log_probs"][0, 0] = math.nan
    return batch


def with_nan_outside(batch: Tensors) -> Tensors:
    batch["old_log_probs"][7, 23] = math.nan
    return batch


@pytest.mark.parametrize("change", [prompted, unmasked, empty, with_nan, with_nan_outside])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_drop_in_is_verl_s(change: Callable[[Tensors], Tensors], dtype: torch.dtype) -> None:
    batch = change(random_batch(dtype=dtype))
    tolerance = IN_FLOAT64 if dtype == torch.float64 else IN_FLOAT32
    hold(calculate_debug_metrics(proto(batch)), verl_debug(batch), tolerance)


def test_without_a_model_token_nothing_is_valid() -> None:
    batch = empty(random_batch())
    hold(ours(batch), verl_debug(batch), IN_FLOAT64)


def is_spread(batch: Tensors) -> bool:
    """Say whether both streams' probabilities vary by more than their rounding."""
    on = batch["response_mask"].bool()
    probs = [batch[name][on].exp() for name in ("old_log_probs", "rollout_log_probs")]
    return all(len(x) > 1 and bool(x.std() > 1e-4 * x.mean()) for x in probs)


# --- tokens that the policy loss clips --------------------------------------------------------
class _ActorConfig(dict[str, Any]):
    """The fields that verl's vanilla policy loss reads."""

    def __getattr__(self, name: str) -> Any:
        return self[name]


@pytest.mark.parametrize("seed", range(4))
def test_the_tokens_that_are_clipped_have_no_gradient_in_verl_s_loss(seed: int) -> None:
    core_algos = pytest.importorskip("verl.trainer.ppo.core_algos")
    generator = torch.Generator().manual_seed(seed)
    shape = (64, 128)
    old = -torch.rand(shape, generator=generator) * 5
    current = (old + 1.5 * torch.randn(shape, generator=generator)).requires_grad_()
    advantages = torch.randn(shape, generator=generator).round(decimals=0)
    config = _ActorConfig(
        clip_ratio=0.2, clip_ratio_low=0.1 * (seed + 1), clip_ratio_high=0.28, clip_ratio_c=3.0,
        policy_loss={"loss_mode": "vanilla"}, global_batch_info={},
    )  # fmt: skip
    loss, _ = core_algos.compute_policy_loss_vanilla(
        old_log_prob=old, log_prob=current, advantages=advantages,
        response_mask=torch.ones(shape), config=config,
    )  # fmt: skip
    loss.backward()
    bounds = minibatches._clip_bounds(config)
    assert bounds is not None
    found = clipped(current.detach() - old, advantages, bounds)
    assert current.grad is not None
    has_none = current.grad == 0
    # An advantage of 0 has no gradient for that reason, and beyond ±20 verl clamps the ratio.
    assert torch.equal(has_none & (advantages != 0), found != 0)
    assert {*found.reshape(-1).tolist()} == {-1, 0, 1}
