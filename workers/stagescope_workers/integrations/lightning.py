"""A callback for Lightning's `Trainer`: its steps, as `actor_update`, their losses and metrics.

::

    Trainer(callbacks=[StagescopeCallback("my-run")])

Each batch is a micro-batch of the optimizer step that it belongs to. Tensors come from the
module's own code: `self.trainer.callbacks` has this callback, and
`stagescope_workers.current()` its probe; `callback.stage.record(...)` in `training_step`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from lightning.pytorch.callbacks import Callback

from stagescope_workers.integrations.patches import guarded
from stagescope_workers.integrations.training import close_probe, scalars
from stagescope_workers.probe.lifecycle import init
from stagescope_workers.probe.probe import Probe
from stagescope_workers.probe.stage import Stage

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule, Trainer


class StagescopeCallback(Callback):  # type: ignore[misc]
    """Reports the training that it is a callback of.

    Args:
        run: The run's name.
        role: The role of this process.
        options: Further arguments of `stagescope_workers.init`.

    Attributes:
        probe: The probe of this process; None before the training.
        stage: The batch that is being trained; None between batches.
    """

    def __init__(self, run: str, *, role: str = "actor", **options: Any) -> None:
        self.probe: Probe | None = None
        self.stage: Stage | None = None
        self._run = run
        self._options = {"role": role, "layout": {"framework": "lightning"}, **options}
        self._batches: tuple[int, int] = (-1, 0)
        """The step that is being trained, and how many of its batches were."""
        self._metrics: dict[str, Any] = {}

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Begin to report; after a resume `trainer.global_step` is the checkpoint's."""
        self.probe = init(
            self._run,
            rank=trainer.global_rank,
            world_size=trainer.world_size,
            resumed_from_step=trainer.global_step or None,
            **self._options,
        )

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: object, batch_idx: int
    ) -> None:
        """Begin a batch of the next optimizer step; the first step is 1."""
        if self.probe is None:
            return
        step, count = int(trainer.global_step) + 1, 0
        if step == self._batches[0]:
            count = self._batches[1]
        self._batches = (step, count + 1)
        self.stage = self.probe.begin("actor_update", step=step, model=pl_module, microbatch=count)

    def on_train_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Any,
        batch: object,
        batch_idx: int,
    ) -> None:
        """End the batch, with what `training_step` returned and what it logged by `self.log`."""
        stage, self.stage = self.stage, None
        if stage is None:
            return
        with guarded("scalars"):
            returned = dict(outputs) if isinstance(outputs, Mapping) else {"loss": outputs}
            if pl_module.automatic_optimization and returned.get("loss") is not None:
                # Lightning has divided it by the number of batches of a step.
                returned["loss"] = returned["loss"] * trainer.accumulate_grad_batches
            stage.log(**scalars({**self._logged(trainer), **returned}))
        stage.end()

    def _logged(self, trainer: Trainer) -> dict[str, object]:
        """Return what was logged since the last batch: Lightning keeps what was logged before."""
        before, self._metrics = self._metrics, dict(trainer.callback_metrics)
        return {
            name: value for name, value in self._metrics.items() if before.get(name) is not value
        }

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Leave out the metrics of a validation, which belong to no batch."""
        self._metrics = dict(trainer.callback_metrics)

    def on_exception(
        self, trainer: Trainer, pl_module: LightningModule, exception: BaseException
    ) -> None:
        """End with what ended the training."""
        stage, self.stage = self.stage, None
        if stage is not None:
            stage.end(exception)
        probe, self.probe = self.probe, None
        close_probe(probe, exception)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Wait until the service has received everything, as `finish`."""
        probe, self.probe = self.probe, None
        close_probe(probe, last_step=int(trainer.global_step))
