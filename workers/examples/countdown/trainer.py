"""One training rank: each method is a stage of a step, reported to stagescope.

It is plain torch; `Collective` connects the ranks, and `actors.py` runs this class in a Ray actor.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from torch import nn

from examples.countdown import checkpoint
from examples.countdown.batch import Batch, make_batch
from examples.countdown.collective import Collective
from examples.countdown.config import NONE, Settings, Troubles
from examples.countdown.environment import make_puzzle, score, worked_example
from examples.countdown.losses import policy_loss, value_loss
from examples.countdown.model import Critic, make_policy, token_log_probs
from stagescope_workers import Probe, Stage


class Trainer:
    """The policy, the reference, the critic and their optimizers on one rank."""

    def __init__(
        self,
        settings: Settings,
        collective: Collective,
        probe: Probe,
        critic_probe: Probe | None = None,
        troubles: Troubles = NONE,
    ) -> None:
        torch.set_num_threads(1)
        self.settings = settings
        self.collective = collective
        self.probe = probe
        # A separate role, although it is in the same process.
        self.critic_probe = critic_probe or probe
        self._pause = troubles.pause
        self._skip = troubles.skip
        self.policy = make_policy(settings.seed)
        self.reference = make_policy(settings.seed).requires_grad_(False)
        self.optimizer = torch.optim.AdamW(
            self.policy.parameters(), lr=settings.learning_rate, weight_decay=0.0
        )
        self.critic = Critic(settings.seed + 1) if settings.algorithm == "ppo" else None
        self.critic_optimizer = None
        if self.critic is not None:
            self.critic_optimizer = torch.optim.AdamW(
                self.critic.parameters(), lr=settings.critic_learning_rate, weight_decay=0.0
            )
        self._nan_from: int | None = None
        self._step = 0
        if troubles.nan is not None and troubles.nan.rank == collective.rank:
            self._nan_from = troubles.nan.step
            self._inject_nan(self.policy.get_submodule(troubles.nan.module))
        # After the models, which are equal on every rank: mini-batches differ by rank.
        torch.manual_seed(settings.seed * 1000 + collective.rank)

    # --- before the first step --------------------------------------------------------------
    def warm_up(self) -> float:
        """Imitate worked examples, make the result the reference, return the last loss."""
        settings, loss = self.settings, float("nan")
        optimizer = torch.optim.AdamW(
            self.policy.parameters(), lr=settings.warmup_learning_rate, betas=(0.9, 0.95)
        )
        generator = random.Random(f"warm-up {settings.seed} {self.collective.rank}")
        for _ in range(settings.warmup_steps):
            rows = settings.warmup_rows // settings.world_size
            puzzles = [make_puzzle(generator) for _ in range(rows)]
            batch = make_batch([worked_example(puzzle, settings) for puzzle in puzzles], 0)
            log_probs, _ = self._forward(self.policy, batch)
            mask = torch.tensor(batch.response_mask).float()
            nll = -(log_probs * mask).sum()
            (tokens, loss_sum) = self.collective.total([mask.sum(), nll.detach()])
            self._descend(nll / tokens, self.policy, optimizer)
            loss = loss_sum / tokens
        self.reference.load_state_dict(self.policy.state_dict())
        return loss

    # --- the stages of a step ----------------------------------------------------------------
    def weight_sync(self, step: int) -> dict[str, np.ndarray] | None:
        """Check that the ranks agree; rank 0 returns the policy's weights for the engine."""
        with self.probe.stage("weight_sync", step=step, policy_version=step - 1):
            self._maybe_pause(step, "weight_sync")
            state = self.policy.state_dict()
            # On every rank: they are replicas, and are also compared with each other.
            self.probe.record_weights(state, version=step - 1, side="trainer", step=step)
            if not self.collective.has_equal_parameters(self.policy):
                raise RuntimeError(f"the ranks hold different weights before step {step}")
            if self.collective.rank:
                return None
            skipped = self._skip.name if self._skip and self._skip.step == step else None
            return {n: t.clone().numpy() for n, t in state.items() if n != skipped}

    def compute_rm_score(self, step: int, batch: Batch) -> np.ndarray:
        """Score each sample by the rule; float32 [rows]."""
        with self.probe.stage("compute_rm_score", step=step) as stage:
            self._maybe_pause(step, "compute_rm_score")
            scored = zip(batch.puzzles, batch.answers, batch.results, strict=True)
            rewards = np.array([score(p, a, r) for p, a, r in scored], np.float32)
            stage.record(
                rewards=rewards,
                response_mask=batch.response_mask,
                sample_ids=list(batch.sample_ids),
                group_ids=list(batch.group_ids),
            )
            stage.log(reward=float(rewards.mean()), reward_max=float(rewards.max()))
        return rewards

    @torch.no_grad()
    def compute_log_prob(self, step: int, batch: Batch) -> np.ndarray:
        """Log-probabilities under the policy before the update; float32 [rows, tokens]."""
        with self.probe.stage(
            "actor_compute_log_prob", step=step, model=self.policy, policy_version=step - 1
        ) as stage:
            self._maybe_pause(step, "actor_compute_log_prob")
            self._step = step
            log_probs, entropy = self._forward(self.policy, batch)
            mask = torch.tensor(batch.response_mask)
            stage.record(
                old_log_probs=log_probs,
                rollout_log_probs=batch.rollout_log_probs,
                response_mask=mask,
                responses=batch.responses,
                turn_ids=batch.turn_ids,
                **batch.origins(),
                producers={"old_log_probs": "trainer", "rollout_log_probs": "sampler"},
                rewards=batch.columns["rewards"],
                sample_ids=list(batch.sample_ids),
                group_ids=list(batch.group_ids),
            )
            if stage.wants("entropy"):
                stage.record(entropy=entropy)
            if stage.wants("input_ids"):
                stage.record(input_ids=batch.input_ids)
            stage.log(entropy=float((entropy * mask).sum() / mask.sum()))
        return log_probs.numpy()

    @torch.no_grad()
    def compute_ref_log_prob(self, step: int, batch: Batch) -> np.ndarray:
        """Log-probabilities under the reference; float32 [rows, tokens]."""
        with self.probe.stage("ref_compute_log_prob", step=step, model=self.reference) as stage:
            self._maybe_pause(step, "ref_compute_log_prob")
            log_probs, _ = self._forward(self.reference, batch)
            stage.record(
                ref_log_probs=log_probs,
                response_mask=batch.response_mask,
                sample_ids=list(batch.sample_ids),
            )
        return log_probs.numpy()

    @torch.no_grad()
    def compute_values(self, step: int, batch: Batch) -> np.ndarray:
        """The critic's value before each token; float32 [rows, tokens]."""
        assert self.critic is not None
        with self.critic_probe.stage("compute_values", step=step, model=self.critic) as stage:
            self._maybe_pause(step, "compute_values")
            values = self._values(batch)
            mask = torch.tensor(batch.response_mask)
            if stage.wants("values"):
                ids = list(batch.sample_ids)
                stage.record(values=values, response_mask=mask, sample_ids=ids)
            stage.log(value=float((values * mask).sum() / mask.sum()))
        return values.numpy()

    def update_critic(self, step: int, batch: Batch) -> dict[str, float]:
        """Fit the critic to the returns; one part of the stage for each mini-batch."""
        assert self.critic is not None
        assert self.critic_optimizer is not None
        total = 0.0
        for epoch, index, part in self._minibatches(batch):
            with self.critic_probe.stage(
                "critic_update", step=step, model=self.critic, epoch=epoch, minibatch=index
            ) as stage:
                self._maybe_pause(step, "critic_update")
                mask = torch.tensor(part.response_mask).float()
                returns = torch.tensor(part.columns["returns"])
                values = self._values(part)
                loss = value_loss(values, returns, mask)
                if stage.wants("returns"):
                    stage.record(
                        values=values,
                        returns=returns,
                        response_mask=part.response_mask,
                        sample_ids=list(part.sample_ids),
                    )
                (tokens, loss_sum) = self.collective.total([mask.sum(), loss.detach()])
                norm = self._descend(loss / tokens, self.critic, self.critic_optimizer)
                stage.log(loss=loss_sum / tokens, grad_norm=norm)
                total += loss_sum / tokens
        return {"critic_loss": total / (self.settings.epochs * self.settings.minibatches)}

    def update_actor(self, step: int, batch: Batch) -> dict[str, float]:
        """Improve the policy; one part of the stage for each mini-batch of each epoch."""
        sums: dict[str, float] = {}
        for epoch, index, part in self._minibatches(batch):
            with self.probe.stage(
                "actor_update", step=step, model=self.policy, epoch=epoch, minibatch=index
            ) as stage:
                self._maybe_pause(step, "actor_update")
                log_probs, clipped, scalars = self._actor_minibatch(part, stage)
                stage.record(
                    log_probs=log_probs,
                    rollout_log_probs=part.rollout_log_probs,
                    response_mask=part.response_mask,
                    advantages=part.columns["advantages"],
                    # The loss weighs all tokens alike, and clips some.
                    rollout_is_weights=np.ones_like(part.rollout_log_probs),
                    clipped=clipped,
                    sample_ids=list(part.sample_ids),
                )
                stage.log(**scalars)
                for name, value in scalars.items():
                    sums[name] = sums.get(name, 0.0) + value
        count = self.settings.epochs * self.settings.minibatches
        return {name: value / count for name, value in sums.items()}

    def _actor_minibatch(
        self, part: Batch, stage: Stage
    ) -> tuple[torch.Tensor, torch.Tensor, dict[str, float]]:
        """Return the log-probs, the sides on which tokens are clipped, and the scalars."""
        settings = self.settings
        log_probs, entropy = self._forward(self.policy, part)
        mask = torch.tensor(part.response_mask).float()
        result = policy_loss(
            log_probs,
            entropy,
            old_log_probs=torch.tensor(part.columns["old_log_probs"]),
            ref_log_probs=torch.tensor(part.columns["ref_log_probs"]),
            advantages=torch.tensor(part.columns["advantages"]),
            mask=mask,
            clip=settings.clip,
            kl_coefficient=settings.kl_coefficient,
            entropy_coefficient=settings.entropy_coefficient,
        )
        # Every token has the same weight, whatever the lengths on each rank are.
        tokens, *sums = self.collective.total(
            [mask.sum(), result.loss.detach(), result.pg, result.entropy, result.kl, result.clipped]
        )
        norm = self._descend(result.loss / tokens, self.policy, self.optimizer)
        loss, pg_loss, entropy_mean, kl, clipped = (value / tokens for value in sums)
        if stage.wants("is_loss"):
            stage.hand_over(
                old_log_probs=part.columns["old_log_probs"],
                ref_log_probs=part.columns["ref_log_probs"],
                prob_ratio=result.prob_ratio,
                elementwise_loss=result.elementwise,
                effective_valid=mask,
            )
        if stage.wants("entropy"):
            stage.record(entropy=entropy)
        scalars = {"loss": loss, "pg_loss": pg_loss, "entropy": entropy_mean, "kl": kl}
        scalars |= {"entropy_loss": entropy_mean, "clip_fraction": clipped, "grad_norm": norm}
        return log_probs.detach(), result.clipped_side, scalars

    # --- checkpoints ---------------------------------------------------------------------------
    def save(self, folder: Path) -> None:
        """Write this rank's part of a checkpoint; rank 0 writes the shared part."""
        if self.collective.rank == 0:
            checkpoint.save_weights(folder / "policy", self.policy)
            checkpoint.save_weights(folder / "reference", self.reference)
            checkpoint.save_state(folder / "optimizer", self.optimizer.state_dict())
            if self.critic is not None and self.critic_optimizer is not None:
                checkpoint.save_weights(folder / "critic", self.critic)
                checkpoint.save_state(
                    folder / "critic_optimizer", self.critic_optimizer.state_dict()
                )
        state = {"torch": torch.get_rng_state()}
        checkpoint.save_state(folder / f"random_{self.collective.rank}", state)

    def load(self, folder: Path) -> None:
        """Restore the state of a checkpoint."""
        checkpoint.load_weights(folder / "policy", self.policy)
        checkpoint.load_weights(folder / "reference", self.reference)
        self.optimizer.load_state_dict(checkpoint.load_state(folder / "optimizer"))
        if self.critic is not None and self.critic_optimizer is not None:
            checkpoint.load_weights(folder / "critic", self.critic)
            self.critic_optimizer.load_state_dict(
                checkpoint.load_state(folder / "critic_optimizer")
            )
        state = checkpoint.load_state(folder / f"random_{self.collective.rank}")
        torch.set_rng_state(state["torch"])

    # --- inside ----------------------------------------------------------------------------------
    def _forward(self, model: nn.Module, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        """Log-probabilities and entropy of the responses' tokens, float32 [rows, tokens]."""
        log_probs, entropy = token_log_probs(model, torch.tensor(batch.input_ids))
        first = batch.prompts.shape[1] - 1
        return log_probs[:, first:], entropy[:, first:]

    def _values(self, batch: Batch) -> torch.Tensor:
        assert self.critic is not None
        values: torch.Tensor = self.critic(torch.tensor(batch.input_ids)[:, :-1])
        return values[:, batch.prompts.shape[1] - 1 :]

    def _minibatches(self, batch: Batch) -> Iterator[tuple[int, int, Batch]]:
        for epoch in range(self.settings.epochs):
            permutation = torch.randperm(len(batch)).numpy()
            for index, rows in enumerate(np.split(permutation, self.settings.minibatches)):
                yield epoch, index, batch.select_rows(rows)

    def _descend(
        self, loss: torch.Tensor, model: nn.Module, optimizer: torch.optim.Optimizer
    ) -> float:
        optimizer.zero_grad()
        torch.autograd.backward(loss)
        self.collective.sum_gradients(model)
        norm = nn.utils.clip_grad_norm_(model.parameters(), self.settings.max_grad_norm)
        # As trainers do: one non-finite gradient must not reach every weight.
        if torch.isfinite(norm):
            optimizer.step()
        return float(norm)

    def _inject_nan(self, module: nn.Module) -> None:
        """Set the first row of a module's output to NaN, from the given step on.

        It replaces `forward`, since a hook would run after a capture's own hooks.
        """
        compute = module.forward

        def forward(*inputs: torch.Tensor) -> torch.Tensor:
            output: torch.Tensor = compute(*inputs)
            if self._nan_from is None or self._step < self._nan_from:
                return output
            rows = torch.arange(len(output)).reshape(-1, *[1] * (output.dim() - 1))
            return output.masked_fill(rows == 0, float("nan"))

        module.forward = forward

    def _maybe_pause(self, step: int, stage: str) -> None:
        if self._pause is not None and (step, stage) == (self._pause.step, self._pause.stage):
            time.sleep(self._pause.seconds)
