"""A callback for Hugging Face's `Trainer`: its steps, as `actor_update`, and the scalars it logs.

::

    trainer.add_callback(StagescopeCallback("my-run"))

It works with every trainer that accepts such callbacks. The tensors of a step stay inside the
trainer, so the training's own code records them: call `callback.stage.record(...)` in
`compute_loss`. TRL's `GRPOTrainer` and `AsyncGRPOTrainer` need no callback: `stagescope run`
reports their streams, too.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from transformers import TrainerCallback

from stagescope_workers.integrations.configuration import named_run, visible_leaves
from stagescope_workers.integrations.patches import guarded
from stagescope_workers.integrations.training import close_probe, scalars
from stagescope_workers.probe.lifecycle import init
from stagescope_workers.probe.probe import Probe
from stagescope_workers.probe.stage import Stage

if TYPE_CHECKING:
    from transformers import TrainerControl, TrainerState, TrainingArguments


class StagescopeCallback(TrainerCallback):
    """Reports the training that it is a callback of.

    Args:
        run: The run's name; else STAGESCOPE_RUN, the trainer's `run_name`, or the name of its
            `output_dir`.
        role: The role of this process.
        options: Further arguments of `stagescope_workers.init`.

    Attributes:
        probe: The probe of this process; None before the training.
        stage: The step that is being trained; None between steps.
    """

    def __init__(self, run: str | None = None, *, role: str = "actor", **options: Any) -> None:
        self.probe: Probe | None = None
        self.stage: Stage | None = None
        self._run = run
        self._options = {"role": role, "layout": {"framework": "transformers"}, **options}

    def on_train_begin(
        self,
        args: Any,
        state: TrainerState,
        control: TrainerControl,
        **kwargs: object,
    ) -> None:
        """Begin to report; after a resume `state.global_step` is the checkpoint's."""
        with guarded("the beginning of a training"):
            output = os.path.basename(os.path.abspath(str(args.output_dir or "transformers")))
            settings = {"transformers": visible_leaves(args.to_dict())}
            self.probe = init(
                self._run or named_run(str(args.run_name or output), fallback="transformers"),
                rank=args.process_index,
                world_size=args.world_size,
                resumed_from_step=state.global_step or None,
                **{"settings": settings, **self._options},
            )

    def on_step_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **kwargs: object,
    ) -> None:
        """Begin the next optimizer step; the trainer's first step is 1."""
        if self.probe is not None:
            step = int(state.global_step) + 1
            self.stage = self.probe.begin("actor_update", step=step, model=kwargs.get("model"))

    def on_step_end(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **kwargs: object,
    ) -> None:
        """End the optimizer step."""
        stage, self.stage = self.stage, None
        if stage is not None:
            stage.end()

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, float] | None = None,
        **kwargs: object,
    ) -> None:
        """Report the trainer's scalars as it logs them, over its logging window."""
        with guarded("scalars"):
            found = scalars(logs, without=("epoch",))
            if self.probe is not None and state.is_world_process_zero and state.global_step:
                self.probe.log(step=int(state.global_step), **found)

    def on_train_end(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **kwargs: object,
    ) -> None:
        """Wait until the service has received everything, as `finish`."""
        probe, self.probe = self.probe, None
        close_probe(probe, last_step=int(state.global_step))
