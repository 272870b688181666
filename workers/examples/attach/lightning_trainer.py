"""Lightning's `Trainer`, whose batches are two to an optimizer step.

The lines that end with `# stagescope` attach it; `python -m examples.attach.lightning_trainer`.
"""

from __future__ import annotations

from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from torch.utils.data import DataLoader, TensorDataset

from examples.attach.task import log_probs_of, make_batch, make_model
from stagescope_workers.integrations.lightning import StagescopeCallback  # stagescope

STEPS = 4


class Module(LightningModule):  # type: ignore[misc]
    """The model as Lightning trains it."""

    def __init__(self) -> None:
        super().__init__()
        self.model = make_model()

    def training_step(self, batch: Any, index: int) -> Any:
        """Return the loss of a batch."""
        (tokens,) = batch
        loss = -log_probs_of(self.model, tokens).mean()
        self.log("perplexity", loss.detach().exp())
        print(f"step {self.trainer.global_step + 1} loss {loss.item():.9g}")
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return the optimizer."""
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def main() -> None:
    """Train."""
    rows = torch.cat([make_batch(number) for number in range(2 * STEPS)])
    trainer = Trainer(
        callbacks=[StagescopeCallback("lightning")],  # stagescope
        accelerator="cpu",
        devices=1,
        max_steps=STEPS,
        accumulate_grad_batches=2,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Module(), DataLoader(TensorDataset(rows), batch_size=8))


if __name__ == "__main__":
    main()
