"""Which importance weights a trainer's loss applies, and what is said where that is not known."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from stagescope_service.statistics.settings import StatisticsSettings
from stagescope_workers.integrations import guard, nemo_rl, openrlhf, skyrl, slime_modules
from stagescope_workers.integrations.areal import ranks as areal
from stagescope_workers.integrations.trl import grpo

Settings = Callable[[object], dict[str, object]]


@pytest.fixture(autouse=True)
def nothing_logged(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guard, "_logged", set())


def nested(path: str, **fields: object) -> Any:
    found: object = SimpleNamespace(**fields)
    for name in reversed(path.split(".")) if path else ():
        found = SimpleNamespace(**{name: found})
    return found


def of_openrlhf(**fields: object) -> Any:
    return nested("algo.advantage", **fields)


def newer(level: str, mode: str = "mask", gating: str = "ratio", *bounds: float) -> Any:
    return of_openrlhf(
        is_correction_level=level, is_correction_mode=mode, is_correction_gating=gating,
        is_correction_threshold=list(bounds or (0.5, 5.0)),
    )  # fmt: skip


def older(kind: str, *bounds: float, enable: bool = True) -> Any:
    return of_openrlhf(
        is_correction_enable=enable, is_correction_type=kind,
        is_correction_threshold=list(bounds or (0.5, 5.0)),
    )  # fmt: skip


def rejects(**fields: object) -> Any:
    return SimpleNamespace(
        use_decoupled_loss=True,
        rejection_sampling=SimpleNamespace(**{"lower": None, "upper": 2.0, **fields}),
    )  # fmt: skip


def truncates(kind: str | None, low: float | None, high: float | None) -> Any:
    return {"loss_fn": {
        "use_importance_sampling_correction": True,
        "truncated_importance_sampling_type": kind,
        "truncated_importance_sampling_ratio_min": low,
        "truncated_importance_sampling_ratio": high,
    }}  # fmt: skip


def weighs(kind: str | None) -> Any:
    return nested(
        "trainer.algorithm.off_policy_correction", tis_ratio_type=kind,
        token_tis_ratio_clip_high=2.5, sequence_tis_ratio_clip_high=6.0,
    )  # fmt: skip


def of_slime(args: object) -> dict[str, object]:
    return slime_modules.statistics_settings("slime", args)


class TrlTrainer:
    """What of a `GRPOTrainer` tells its weights."""

    use_vllm = True

    def __init__(
        self, mode: str | None, low: float | None = None, *, corrects: bool = True
    ) -> None:
        self.vllm_importance_sampling_correction = corrects
        modes = {} if mode is None else {"vllm_importance_sampling_mode": mode}
        self.args = SimpleNamespace(
            **modes,
            vllm_importance_sampling_clip_max=3.0,
            vllm_importance_sampling_clip_min=low,
        )


def of_trl(trainer: Any) -> dict[str, object]:
    return grpo.Training(trainer).statistics_settings()


def tis(low: float, high: float, custom: str | None = None, *, use: bool = True) -> Any:
    return SimpleNamespace(
        use_tis=use, tis_clip_low=low, tis_clip=high, custom_tis_function_path=custom
    )


KNOWN: list[tuple[Settings, object, tuple[str, object] | None]] = [
    (of_trl, TrlTrainer("sequence_mask", corrects=False), None),
    (of_trl, TrlTrainer("token_truncate"), ("token", 3.0)),
    (of_trl, TrlTrainer("sequence_mask", 0.5), ("sequence", "0.5_3.0")),
    (of_slime, tis(0, 2.0, use=False), None),
    (of_slime, tis(0, 2.0), ("token", 2.0)),
    (of_slime, tis(0.5, 2.0, "slime.backends.loss.icepop_function"), ("token", "0.5_2.0")),
    (openrlhf.statistics_settings, newer("off"), None),
    (openrlhf.statistics_settings, newer("token", "clip", "ratio", 0.0, 2.0), ("token", 2.0)),
    (openrlhf.statistics_settings, newer("token"), ("token", "0.5_5.0")),
    (openrlhf.statistics_settings, older("tis", enable=False), None),
    (openrlhf.statistics_settings, older("tis", 0.0, 2.0), ("token", 2.0)),
    (openrlhf.statistics_settings, older("icepop"), ("token", "0.5_5.0")),
    (skyrl.statistics_settings, weighs(None), None),
    (skyrl.statistics_settings, weighs("token"), ("token", 2.5)),
    (skyrl.statistics_settings, weighs("sequence"), ("sequence", 6.0)),
    (
        nemo_rl.statistics_settings,
        {"loss_fn": {"use_importance_sampling_correction": False}},
        None,
    ),
    (nemo_rl.statistics_settings, truncates(None, None, None), ("token", "inf")),
    (nemo_rl.statistics_settings, truncates("tis", None, 2.0), ("token", 2.0)),
    (nemo_rl.statistics_settings, truncates("icepop", 0.5, 2.0), ("token", "0.5_2.0")),
    (areal.statistics_settings, SimpleNamespace(rejection_sampling=None), None),
    (
        areal.statistics_settings,
        rejects(level="token", metric="ratio", action="clamp"),
        ("token", 2.0),
    ),
    (
        areal.statistics_settings,
        rejects(level="token", metric="ratio", action="mask", lower=0.5),
        ("token", "0.5_2.0"),
    ),
]


@pytest.mark.parametrize(("read", "config", "expected"), KNOWN)
def test_weights_that_the_service_computes_are_settings_of_it(
    read: Settings, config: object, expected: tuple[str, object] | None,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    found = read(config)
    assert caplog.messages == []
    if expected is None:
        assert found == {}
        return
    assert found == dict(zip(("rollout_is", "rollout_is_threshold"), expected, strict=True))
    StatisticsSettings(**found)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("read", "config", "words"),
    [
        (of_trl, TrlTrainer("sequence_mask"), "drops weights outside at 0 and 3.0"),
        (of_trl, TrlTrainer("newest"), "vllm_importance_sampling_mode is newest"),
        (of_slime, tis(0.5, 2.0), "cuts weights at 0.5 and 2.0"),
        (of_slime, tis(0, 2.0, "mis.compute"), "custom_tis_function_path is mis.compute"),
        (openrlhf.statistics_settings, newer("token", "clip"), "cuts weights at 0.5 and 5.0"),
        (openrlhf.statistics_settings, newer("seq"), "drops tokens by ratio of each seq"),
        (openrlhf.statistics_settings, newer("token", "mask", "tv", 0.1), "drops tokens by tv"),
        (openrlhf.statistics_settings, older("seq-mask-tis"), "drops tokens by ratio of each seq"),
        (openrlhf.statistics_settings, older("newest"), "of each newest"),
        (skyrl.statistics_settings, weighs("geometric"), "tis_ratio_type is geometric"),
        (nemo_rl.statistics_settings, truncates("tis", 0.5, 2.0), "cuts weights at 0.5 and 2.0"),
        (nemo_rl.statistics_settings, truncates("seq-mask-tis", 0.5, 2.0), "is seq-mask-tis"),
        (
            areal.statistics_settings,
            rejects(level="sequence", metric="ratio", action="mask"),
            "mask by ratio of each sequence",
        ),
        (
            areal.statistics_settings,
            rejects(level="token", metric="ratio", action="mask"),
            "drops weights outside at 0 and 2.0",
        ),
    ],
)
def test_weights_that_the_service_does_not_compute_are_said_in_one_line(
    read: Settings, config: object, words: str, caplog: pytest.LogCaptureFixture
) -> None:
    assert read(config) == read(config) == {}
    [line] = caplog.messages
    assert words in line
    assert "rollout_corr/rollout_is_* are therefore of untruncated weights" in line


@pytest.mark.parametrize(
    ("read", "config", "option"),
    [
        (openrlhf.statistics_settings, of_openrlhf(renamed="tis"), "is_correction_level"),
        (skyrl.statistics_settings, nested("trainer.algorithm"), "tis_ratio_type"),
        (nemo_rl.statistics_settings, {"loss_fn": {}}, "use_importance_sampling_correction"),
        (areal.statistics_settings, SimpleNamespace(), "rejection_sampling"),
        (of_trl, TrlTrainer(None), "vllm_importance_sampling_mode"),
        (of_slime, SimpleNamespace(), "--use-tis"),
    ],
)
def test_options_that_were_renamed_are_said_in_one_line(
    read: Settings, config: object, option: str, caplog: pytest.LogCaptureFixture
) -> None:
    assert read(config) == read(config) == {}
    [line] = caplog.messages
    assert option in line
    assert "is not known" in line


def expected_weights(
    p: np.ndarray, q: np.ndarray, mask: np.ndarray, level: str, mode: str, gating: str,
    low: float, high: float,
) -> np.ndarray:  # fmt: skip
    """OpenRLHF 0.11.2's coefficient of each token, in numpy, token by token."""
    found = np.zeros_like(p)
    for row in range(len(p)):
        chosen = np.flatnonzero(mask[row])
        for token in chosen:
            of = chosen if level == "seq" else [token]
            a, b = np.exp(q[row, of]), np.exp(p[row, of])  # the rollout's and the trainer's
            if gating == "ratio":
                gate = float(np.exp(np.mean(p[row, of] - q[row, of])))
            elif gating == "tv":
                gate = float(np.mean(np.abs(a - b)))
            else:
                gate = float(np.mean(a * np.log(a / b) + (1 - a) * np.log((1 - a) / (1 - b))))
            ratio = float(np.exp(p[row, token] - q[row, token]))
            if mode == "clip":
                found[row, token] = min(max(gate, low), high)
            else:
                found[row, token] = ratio if low <= gate <= high else 0.0
    return found


@pytest.mark.parametrize(
    ("arguments", "form"),
    [
        (newer("token", "clip", "ratio", 0.8, 1.2), ("token", "clip", "ratio", 0.8, 1.2)),
        (newer("token", "mask", "ratio", 0.8, 1.2), ("token", "mask", "ratio", 0.8, 1.2)),
        (newer("token", "mask", "tv", 0.02), ("token", "mask", "tv", 0.0, 0.02)),
        (newer("token", "mask", "binary_kl", 0.01), ("token", "mask", "binary_kl", 0.0, 0.01)),
        (newer("seq", "mask", "ratio", 0.95, 1.02), ("seq", "mask", "ratio", 0.95, 1.02)),
        (newer("seq", "mask", "binary_kl", 0.01), ("seq", "mask", "binary_kl", 0.0, 0.01)),
        (newer("seq", "mask", "tv", 0.03), ("seq", "mask", "tv", 0.0, 0.03)),
        (older("tis", 0.8, 1.2), ("token", "clip", "ratio", 0.8, 1.2)),
        (older("icepop", 0.8, 1.2), ("token", "mask", "ratio", 0.8, 1.2)),
        (older("seq-mask-tis", 0.95, 1.02), ("seq", "mask", "ratio", 0.95, 1.02)),
    ],
)
def test_the_weights_that_openrlhf_applies_are_recorded_by_token(
    arguments: Any, form: tuple[str, str, str, float, float]
) -> None:
    rng = np.random.default_rng(3)
    q = -0.5 - rng.exponential(1.0, (6, 12))
    p = np.minimum(q + rng.normal(0, 0.3, q.shape), -0.01)
    mask = rng.random(q.shape) < 0.7
    expected = expected_weights(p, q, mask, *form)
    assert len({0.0, form[3], form[4]} & set(expected[mask])) > 0  # some are cut or dropped
    how = openrlhf.correction(arguments)
    assert isinstance(how, openrlhf.Correction)
    tensors = (torch.tensor(p), torch.tensor(q), torch.tensor(mask))
    found = openrlhf.applied_weights(how, *tensors)
    assert found is not None
    np.testing.assert_allclose(found.numpy()[mask], expected[mask], rtol=1e-12)


def test_another_loss_of_openrlhf_applies_no_weights() -> None:
    arguments = newer("token")
    arguments.actor = SimpleNamespace(policy_loss_type="gspo")
    assert openrlhf.correction(arguments) == "off"
