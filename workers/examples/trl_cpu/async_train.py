"""TRL's `AsyncGRPOTrainer` on CPU: `stagescope run -- python -m examples.trl_cpu.async_train`.

TRL needs a vLLM server and a kernel of FlashAttention 3 for it. Here a rollout worker of our own,
which follows TRL's protocols, samples with CTranslate2. Plain attention replaces the kernel. The
worker samples the completions of `--ahead` steps at once, so all but the first step train on
completions of older weights.

Nothing here imports stagescope.
"""

from __future__ import annotations

import argparse
import queue
import statistics
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from datasets import Dataset
from trl.experimental.async_grpo import async_grpo_trainer, packing
from trl.experimental.async_grpo.async_grpo_config import AsyncGRPOConfig
from trl.experimental.async_grpo.async_grpo_trainer import AsyncGRPOTrainer
from trl.experimental.async_grpo.async_rollout_worker import RolloutSample

from examples.countdown.config import Settings
from examples.countdown.engine import Engine
from examples.countdown.environment import make_samples, play, score
from examples.countdown.model import make_policy
from examples.trl_cpu.train import make_tokenizer


class Rollouts:
    """TRL's rollout worker, rollout queue and weight transfer, in the trainer's own thread."""

    def __init__(self, settings: Settings, ahead: int) -> None:
        self.rollout_buffer = self
        self.metrics_queue: queue.Queue[dict[str, float]] = queue.Queue()
        self._settings, self._ahead = settings, ahead
        self._engine = Engine(settings.engine)
        self._weights: dict[str, np.ndarray] = {}
        self._waiting: list[RolloutSample] = []
        self._version = self._sampled = 0

    # --- the queue ---------------------------------------------------------------------------
    def get(self, timeout: float | None = None) -> RolloutSample:
        """Return the next completion; the same weights sampled all that wait."""
        if not self._waiting:
            self._engine.load(self._weights, seed=self._settings.seed * 1000 + self._version)
            for _ in range(self._ahead):
                self._waiting += self._sample()
        return self._waiting.pop(0)

    def qsize(self) -> int:
        """Return how many completions wait."""
        return len(self._waiting)

    def _sample(self) -> Iterator[RolloutSample]:
        """Yield the completions of one step."""
        samples = make_samples(self._settings, self._sampled)
        budget = self._settings.round_tokens
        play(samples, lambda now: self._engine.generate([each.context for each in now], budget))
        size = self._settings.group_size
        rewards = [score(each.puzzle, each.answer, each.results) for each in samples]
        rewards = [
            value + sum(each.mask) / 1000 for value, each in zip(rewards, samples, strict=True)
        ]
        for place, sample in enumerate(samples):
            group = place // size
            of_group = rewards[group * size : (group + 1) * size]
            yield RolloutSample(
                prompt=[],
                completion=[],
                input_ids=np.array(sample.context),
                completion_mask=np.array([0] * len(sample.prompt) + sample.mask),
                old_log_probs=np.array([0.0] * len(sample.prompt) + sample.log_probs, np.float32),
                advantage=rewards[place] - statistics.fmean(of_group),
                model_version=self._version,
                group_id=self._sampled * self._settings.groups + group,
                metrics={"reward": rewards[place]},
            )
        self._sampled += 1

    # --- the worker --------------------------------------------------------------------------
    def start(self) -> None:
        """Begin; TRL calls it after the first weight sync."""

    def stop(self) -> None:
        """End."""

    def update_model_version(self, model_version: int) -> None:
        """Name the weights that were received last."""
        self._version = model_version

    def check_health(self, stale_after_s: float) -> None:
        """Raise where the worker crashed: this one has no process."""

    # --- the weight transfer -----------------------------------------------------------------
    def init_weight_transfer(self) -> None:
        """Set up."""

    def pause(self) -> None:
        """Pause the engine."""

    def send_weights(self, iterator: Iterator[tuple[str, torch.Tensor]]) -> None:
        """Receive the trainer's weights."""
        self._weights = {name: value.detach().numpy().copy() for name, value in iterator}

    def resume(self) -> None:
        """Resume the engine."""

    def destroy(self) -> None:
        """End."""


def plain_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    softmax_scale: float | None = None,
    causal: bool = True,
    window_size: tuple[int, int] = (-1, -1),
) -> torch.Tensor:
    """Return what `flash_attn_varlen_func` returns: each segment's queries see its path's keys.

    Args:
        query: [tokens, heads, size]; a segment's queries are the last positions of its keys.
        key, value: [tokens of all paths, heads of keys, size].
        cu_seqlens_q, cu_seqlens_k: Where the segments, and their paths, begin.
        max_seqlen_q, max_seqlen_k, causal, window_size: FlashAttention's arguments; not used.
        softmax_scale: Scale of the scores.
    """
    repeat = query.size(1) // key.size(1)
    pieces = []
    for number in range(len(cu_seqlens_q) - 1):
        rows = slice(int(cu_seqlens_q[number]), int(cu_seqlens_q[number + 1]))
        path = slice(int(cu_seqlens_k[number]), int(cu_seqlens_k[number + 1]))
        q = query[rows].transpose(0, 1)
        k, v = (
            part[path].transpose(0, 1).repeat_interleave(repeat, dim=0) for part in (key, value)
        )
        seen = torch.ones(q.size(1), k.size(1), dtype=torch.bool).tril(k.size(1) - q.size(1))
        pieces.append(
            torch.nn.functional.scaled_dot_product_attention(
                q, k, v, attn_mask=seen, scale=softmax_scale
            ).transpose(0, 1)
        )
    return torch.cat(pieces)


def make_trainer(options: argparse.Namespace) -> AsyncGRPOTrainer:
    """Return TRL's trainer, ready for `train()`."""
    packing._flash_attn = lambda: types.SimpleNamespace(flash_attn_varlen_func=plain_attention)
    # TRL asks CUDA for the device's name, and a CPU has none.
    module: Any = async_grpo_trainer
    module.get_peak_flops_per_device = lambda accelerator, dtype: None
    directory = Path(options.directory)
    directory.mkdir(parents=True, exist_ok=True)
    settings = Settings(seed=options.seed, groups=options.groups, group_size=4, world_size=1)
    policy: Any = make_policy(options.seed)
    policy.save_pretrained(directory / "policy")
    rollouts: Any = Rollouts(settings, options.ahead)
    return AsyncGRPOTrainer(
        model=str(directory / "policy"),
        args=AsyncGRPOConfig(
            output_dir=str(directory),
            run_name=options.name,
            max_steps=options.steps,
            per_device_train_batch_size=options.groups * 2,
            gradient_accumulation_steps=2,
            num_generations=settings.group_size,
            token_budget=0,
            learning_rate=1e-3,
            logging_steps=1,
            report_to=options.report_to.split(",") if options.report_to else [],
            save_strategy="no",
            use_cpu=True,
            bf16=False,
            seed=options.seed,
            disable_tqdm=True,
        ),
        train_dataset=Dataset.from_dict({"prompt": ["puzzle"]}),
        processing_class=make_tokenizer(directory),
        rollout_worker=rollouts,
        weight_transfer=rollouts,
    )


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """Return the command's options."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--directory", default="trl-async", help="For logs and checkpoints.")
    parser.add_argument("--name", default="trl-async-countdown", help="Of the run.")
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--groups", type=int, default=4, help="Puzzles of a step.")
    parser.add_argument("--ahead", type=int, default=2, help="Steps that are sampled at once.")
    parser.add_argument("--report-to", default="tensorboard", help="TRL's report_to.")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args(arguments)


def main() -> None:
    """Train."""
    options = parse()
    torch.set_num_threads(1)
    make_trainer(options).train()


if __name__ == "__main__":
    main()
