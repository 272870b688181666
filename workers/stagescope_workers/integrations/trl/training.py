"""The shared code of TRL's integrations: names, steps, the update's stage, a trainer's log."""

from __future__ import annotations

import abc
import copy
import functools
import math
import os
import weakref
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from stagescope_workers.integrations import canary
from stagescope_workers.integrations.configuration import named_run, visible_leaves
from stagescope_workers.integrations.patches import Function, Patch, ending, guarded, wrapper
from stagescope_workers.integrations.training import (
    ClipBounds,
    ReportedTraining,
    alive,
    clipped,
    closed_at_end,
    scalars,
)
from stagescope_workers.metrics_feed import KEPT_STEPS
from stagescope_workers.probe.lifecycle import init
from stagescope_workers.probe.probe import Probe
from stagescope_workers.probe.stage import Stage

if TYPE_CHECKING:
    from torch import Tensor

    from stagescope_workers.canary.after_syncs import WeightCanary

_LAST_LINE: Final = "train_runtime"
"""A key that Hugging Face's trainer logs once, when the training is over."""
_TRACKERS: Final = frozenset(
    f"{name}Callback" for name in ("TensorBoard", "Wandb", "MLflow", "SwanLab", "Trackio")
)
"""Callbacks of `report_to` that write to a step which is given, also after later ones."""
_MAY_BE_NAN: Final = "rewards/"
"""A reward function that returns None for every completion of a batch has the mean nan."""


Trainer: TypeAlias = Any
"""Attributes read from both of TRL's GRPO trainers: state, control, callback_handler, accelerator,
model, train, epsilon_low, epsilon_high, _metrics, args (output_dir, to_dict), processing_class,
temperature."""


class TrlTraining(ReportedTraining):
    """Reports one of TRL's trainers. Steps are numbered as TRL logs them: the first is 1."""

    def __init__(self, trainer: Trainer) -> None:
        super().__init__(trainer)
        self._microbatches: tuple[int, int] = (-1, 0)
        self._unlogged: dict[int, None] = {}  # an ordered set: steps whose numbers may still come
        self.update: Stage | None = None
        """`actor_update`, from the loss of a micro-batch until its backward pass is done."""
        self._canary: tuple[Probe, WeightCanary] | None = None

    @abc.abstractmethod
    def statistics_settings(self) -> dict[str, object]:
        """Return the settings that the statistics depend on."""

    @property
    def measures_update(self) -> bool:
        """Whether the trainer's stream comes from the update's own passes."""
        return True

    @property
    def policy_version(self) -> int:
        """The version of the weights that are trained."""
        return int(self.trainer.state.global_step)

    @property
    def step(self) -> int:
        """The step that is being trained."""
        return int(self.trainer.state.global_step) + 1

    @property
    def is_training(self) -> bool:
        """Whether it trains; evaluation belongs to no step."""
        return bool(self.trainer.model.training)

    @property
    def last_step(self) -> int | None:
        """The last step that is done."""
        return int(self.trainer.state.global_step) or None

    @property
    def writes_log(self) -> bool:
        """Whether this process writes TRL's log."""
        return bool(self.trainer.accelerator.is_main_process)

    def _make_probe(self) -> Probe:
        trainer = self.trainer
        arguments = trainer.args
        name = getattr(arguments, "run_name", None) or os.path.basename(
            os.path.abspath(str(arguments.output_dir or "trl"))
        )
        return init(
            named_run(str(name), fallback="trl"),
            role="actor",
            rank=trainer.accelerator.process_index,
            world_size=trainer.accelerator.num_processes,
            layout={"framework": "trl"},
            settings={
                **self.statistics_settings(),
                "trl": visible_leaves(dict(arguments.to_dict().items())),
            },
            resumed_from_step=self.last_step,
        )

    def attach_canary(self) -> None:
        """Have a canary asked after each weight sync, where no patch does it."""

    @property
    def server_url(self) -> str | None:
        """The URL of the engine's server; None in processes that do not ask it."""
        return None

    def find_canary(self) -> WeightCanary | None:
        """Return the training's canary; None where none is wanted."""
        every = canary.every()
        if every is None:
            return None
        probe, found = self.probe, self._canary
        if found is None or found[0] is not probe:
            tokenizer = self.trainer.processing_class
            made = probe.canary(
                engine=self.server_url,
                tokenizer=getattr(tokenizer, "tokenizer", tokenizer),
                temperature=float(self.trainer.temperature),
                every=every,
            )
            found = self._canary = (probe, made)
        return found[1]

    def stage(self, name: str, **part: int) -> Stage:
        """Return a stage of the step that is being trained."""
        return self.probe.stage(
            name,
            step=self.step,
            policy_version=self.policy_version,
            model=self.trainer.model,
            **part,
        )

    def begin_update(self) -> Stage:
        """Begin `actor_update` of the step's next micro-batch."""
        step, count = self._microbatches
        number = count if step == self.step else 0
        self._microbatches = (self.step, number + 1)
        self.update = self.stage("actor_update", microbatch=number)
        self.update.begin()
        return self.update

    def end_update(self, error: BaseException | None) -> None:
        """End `actor_update` if it has begun, with the micro-batch's error, if any."""
        stage, self.update = self.update, None
        if stage is not None:
            stage.end(error)
            if error is None and self.measures_update:
                self.want(self.step)

    # --- numbers in TRL's log -------------------------------------------------------------

    def want(self, step: int, rows: int | None = None) -> None:
        """Request a step's numbers for TRL's log."""
        super().want(step, rows)
        self._unlogged[step] = None
        while len(self._unlogged) > KEPT_STEPS:
            del self._unlogged[next(iter(self._unlogged))]

    def numbers(self, step: int) -> dict[str, float]:
        """Return the service's numbers of a step, once: as far as they came."""
        if step not in self._unlogged:
            return {}
        found = super().numbers(step)
        if found:
            del self._unlogged[step]
        return found

    def log_late(self, before: int) -> None:
        """Write what came after its step was logged into the trackers of `report_to`, at that step.

        No other callback is called: a user's own expects each line to be one of TRL's. TRL's next
        line follows at once, which tells W&B the current step again.

        Args:
            before: The first step that is left out.
        """
        trainer = self.trainer
        trackers = [
            callback
            for callback in trainer.callback_handler.callbacks
            if type(callback).__name__ in _TRACKERS
        ]
        for step in list(self._unlogged) if trackers else ():
            found = self.numbers(step) if step < before else {}
            if found:
                state = copy.copy(trainer.state)
                state.global_step = step
                for tracker in trackers:
                    tracker.on_log(
                        trainer.args, state, trainer.control, logs=found, model=trainer.model
                    )


Find = Callable[[Trainer], TrlTraining]
"""Returns what a trainer reports."""


def attaching_patches(module: str, name: str, find: Find, since: str) -> list[Patch]:
    """Return the patches of a trainer's beginning and end, its update's end and its log.

    Args:
        module, name: Where the trainer's class is.
        find: Returns the report of a trainer.
        since: See `Patch`.
    """
    calls: dict[str, tuple[Function, str]] = {
        "__init__": (_init, "the end of a training"),
        "training_step": (_training_step, "the end of actor_update"),
        "log": (_log, "scalars, and numbers in the trainer's log"),
    }
    return [
        Patch(
            module, f"{name}.{method}", wrapper(functools.partial(call, find)), purpose, since=since
        )
        for method, (call, purpose) in calls.items()
    ]


def cut(trainer: Trainer, log_ratio: Tensor, advantages: Tensor) -> Tensor:
    """Return -1 or 1 where a token's ratio is cut at its lower or upper bound, else 0."""
    bounds = ClipBounds(1 - trainer.epsilon_low, 1 + trainer.epsilon_high)
    found: Tensor = clipped(log_ratio, advantages, bounds)
    return found


def _init(
    find: Find, function: Function, trainer: Trainer, *args: object, **kwargs: object
) -> None:
    """Run `__init__`: when `train` ends, everything that waits is sent."""
    function(trainer, *args, **kwargs)
    with guarded("waiting for receipts at the end of a training"):
        trainer.train = _wrap_train(find, trainer)
    with guarded("the canary"):
        if canary.every() is not None:
            find(trainer).attach_canary()


def _wrap_train(find: Find, trainer: Trainer) -> Function:
    held, train = weakref.ref(trainer), trainer.train

    @functools.wraps(train)
    def run(*args: object, **kwargs: object) -> object:
        with closed_at_end(lambda error: find(alive(held)).close(error)):
            return train(*args, **kwargs)

    return run


def _training_step(
    find: Find, function: Function, trainer: Trainer, *args: object, **kwargs: object
) -> object:
    """Run `training_step`: `actor_update` ends after the backward pass."""
    with ending("the end of actor_update", lambda error: find(trainer).end_update(error)):
        return function(trainer, *args, **kwargs)


def _log(
    find: Find,
    function: Function,
    trainer: Trainer,
    logs: Any,
    *args: Any,
    **kwargs: Any,
) -> object:
    """Run `log`: it reports TRL's scalars, and adds the service's numbers under `stagescope/`."""
    held: dict[str, list[object]] = {}
    is_training = False
    with guarded("scalars"):
        is_training = find(trainer).is_training and isinstance(logs, dict)
        if is_training:
            held = {name: [*values] for name, values in trainer._metrics["train"].items()}
            step = int(trainer.state.global_step)
            is_last = _LAST_LINE in logs  # a line of the whole training, of no step
            if is_last:
                find(trainer).wait_for_numbers()
            find(trainer).log_late(step + 1 if is_last else step)
            for name, value in find(trainer).numbers(step).items():
                logs.setdefault(name, value)
    result = function(trainer, logs, *args, **kwargs)
    with guarded("scalars"):
        if is_training and trainer.accelerator.is_main_process:
            _report(find(trainer), int(trainer.state.global_step), logs, held)
    return result


def _report(
    found: TrlTraining,
    step: int,
    logs: Mapping[str, float],
    held: Mapping[str, list[object]],
) -> None:
    reported = scalars(logs, without=("epoch",))
    # TRL leaves every nan out of its means.
    for name, values in held.items():
        numbers = (value for value in values if isinstance(value, float))
        if not name.startswith(_MAY_BE_NAN) and any(map(math.isnan, numbers)):
            reported[name] = math.nan
    if step > 0 and reported:
        found.probe.log(step=step, **reported)
