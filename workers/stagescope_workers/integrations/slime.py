"""slime: stages, streams and samples of a Megatron training that does not change.

One flag attaches every rank, with `stagescope run` in front of the command or without it::

    --custom-megatron-init-path stagescope_workers.integrations.slime.init

Steps are slime's `rollout_id`. Stages are its timers. Both streams are read in
`save_debug_train_data`, which slime calls when it is done with a batch, also if it saves nothing.
In its default GRPO configuration slime makes no pass before the update, and a batch has no
`log_probs`. Then a capture of slime's own reads them from the update's pass, at the first
occurrence of each sample. It is switched on here unless it is on already. Streams of
context-parallel ranks stay in their parts, with the positions of their tokens: nothing is gathered.

Read in slime of 2026-08-21, after its modules moved to `slime.observability` (#2298). Where they
are still in `slime.utils`, they are patched there. The same functions report miles, a fork of
slime: see `miles`.
"""

from __future__ import annotations

import functools
import os
import sys
from argparse import Namespace
from collections.abc import Mapping, Sequence
from types import ModuleType
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from stagescope_wire.tensors import ROUTES_REFUSED
from stagescope_workers.integrations import registry, slime_modules, training
from stagescope_workers.integrations.configuration import named_run, plain_leaves, sampling
from stagescope_workers.integrations.patches import (
    Function,
    Patch,
    Patches,
    Wrap,
    after,
    before,
    guarded,
    wrapper,
)
from stagescope_workers.integrations.slime_modules import MILES, SLIME, Modules
from stagescope_workers.integrations.training import scalars
from stagescope_workers.probe import lifecycle
from stagescope_workers.probe.probe import Probe
from stagescope_workers.probe.stage import Stage

if TYPE_CHECKING:
    import torch

_STAGES: Final = {
    "log_probs": "actor_compute_log_prob",
    "ref_log_probs": "ref_compute_log_prob",
    "teacher_log_probs": "teacher_compute_log_prob",
    "actor_train": "actor_update",
    "update_weights": "weight_sync",
    "save_model": "save_checkpoint",
    "ref_model_update": "ref_model_update",
}
"""Its timers -> stages; `train` is round others, `train_wait` is the time between two steps."""
_POSITION: Final = "partition"
"""The column with each sample's position in the rollout."""
_BY_TOKEN: Final = ("rollout_log_probs", "ref_log_probs", "advantages", "returns", "values")
"""Columns that have our names, too."""
_ROUTES: Final = "rollout_routed_experts"
"""Another one: the experts that the engine chose, [tokens - 1, layers, K] of each sample."""


_Actor: TypeAlias = Any
"""Attributes read from a `MegatronTrainRayActor`: args."""


class Rank:
    """Reports one Megatron rank; its steps run in one thread."""

    def __init__(self) -> None:
        self.args: Namespace | None = None
        self.modules = SLIME
        self.role = "actor"
        self.step: int | None = None
        self._probe: Probe | None = None
        self._open: dict[str, Stage] = {}
        self.update: Stage | None = None
        """`actor_update`, after its timer and before its batch is known."""
        self.is_capturing = False
        """Whether slime's capture of log-probs was switched on here."""

    @property
    def probe(self) -> Probe:
        """The probe of this rank, made at its first step."""
        if self._probe is None:
            layout = training.megatron_layout()
            step = self.step or 0
            assert self.args is not None
            self._probe = lifecycle.init(
                run_name(self.args, self.modules.package),
                role=self.role,
                rank=int(self.args.rank),
                world_size=int(self.args.world_size),
                data_rank=slime_modules.ranks(self.modules, layout)[1],
                layout={"framework": self.modules.package, "engine": "megatron", **layout},
                settings={
                    # The rank that hands tensors over names what the statistics depend on.
                    **slime_modules.statistics_settings(self.modules.package, self.args),
                    **(settings(self.modules, self.args) if int(self.args.rank) == 0 else {}),
                },
                resumed_from_step=step - 1 if step else None,
            )
        return self._probe

    def begin(self, name: str) -> None:
        """Begin the stage of a timer."""
        if name not in _STAGES or self.step is None:
            return
        self._settle()
        # The rollout engines get the weights that this step made.
        version = self.step + 1 if name == "update_weights" else self.step
        self._open[name] = self.probe.begin(_STAGES[name], step=self.step, policy_version=version)
        if name == "actor_train":
            self.is_capturing = start_capture(self.modules)

    def end(self, name: str) -> None:
        """End the stage of a timer; the update's stage waits for its batch."""
        stage = self._open.pop(name, None)
        if stage is None:
            return
        error = sys.exc_info()[1]
        if name == "actor_train" and error is None:
            self.update = stage
        else:
            stage.end(error)

    def record(self, step: int, batch: Mapping[str, object]) -> None:
        """Record what slime had of a step, and end its update."""
        captured = self._captured()
        if self.update is None or step != self.step:
            return
        try:
            self.update.record(payload(self.modules, self.args, batch, captured))
        finally:
            self._settle()

    def _captured(self) -> Mapping[int, torch.Tensor]:
        if not self.is_capturing:
            return {}
        self.is_capturing = False
        drained: Mapping[int, torch.Tensor] = sys.modules[
            self.modules.loss
        ].drain_captured_log_probs()
        return drained

    def _settle(self) -> None:
        stage, self.update = self.update, None
        if stage is not None:
            stage.end()


_rank: Final = Rank()


def start_capture(modules: Modules) -> bool:
    """Switch slime's capture of log-probs on, unless it is on; return whether it was done here."""
    loss: ModuleType | None = sys.modules.get(modules.loss) if modules.captures else None
    if loss is None or not hasattr(loss, "enable_log_prob_capture"):
        return False
    if loss._LOG_PROB_CAPTURE is not None:
        return False
    loss.enable_log_prob_capture()
    return True


def run_name(args: object, package: str) -> str:
    """Return the run: W&B's names where it has them, else the folder that is saved to."""
    names = [getattr(args, name, None) for name in ("wandb_project", "wandb_group")]
    folder = getattr(args, "save", None) or getattr(args, "load", None) or ""
    given = "-".join(str(name) for name in names if name)
    return named_run(given or os.path.basename(os.path.abspath(str(folder))), fallback=package)


def settings(modules: Modules, args: object) -> dict[str, object]:
    """Return slime's arguments, without what may be secret."""
    return {modules.package: plain_leaves(dict(vars(args).items()))}


def payload(
    modules: Modules, args: object, batch: Mapping[str, Any], captured: Mapping[int, torch.Tensor]
) -> dict[str, object]:
    """Return a batch by the names of `Stage.record`: lists of rows, of this rank's tokens.

    Args:
        modules: slime's, or those of its fork.
        args: slime's arguments.
        batch: Its `rollout_data`: response-only lists; streams are sliced by context parallelism.
        captured: Log-probs of the update's own pass, by position in the rollout.
    """
    responses = batch["response_lengths"]
    sliced = functools.partial(slime_modules.sliced, modules, args, batch)
    tokens = [
        row[row.shape[0] - int(count) :]
        for row, count in zip(batch["tokens"], responses, strict=True)
    ]
    found: dict[str, object] = {
        "response_mask": sliced(batch["loss_masks"]),
        "responses": sliced(tokens),
    }
    layout = training.megatron_layout()
    if layout.get("cp_size", 1) > 1:
        found["positions"] = sliced([_positions(row, row.shape[0]) for row in batch["loss_masks"]])
    for name in _BY_TOKEN:
        if batch.get(name):
            found[name] = [row.detach() for row in batch[name]]
    if batch.get(_ROUTES) and layout.get("cp_size", 1) > 1:
        found[ROUTES_REFUSED] = f"{_ROUTES} are of whole samples, and this rank has parts of them"
    elif batch.get(_ROUTES):
        found[_ROUTES] = [*batch[_ROUTES]]
    positions = batch.get(_POSITION)
    if batch.get("log_probs"):
        found["old_log_probs"] = [row.detach() for row in batch["log_probs"]]
    elif positions and all(position in captured for position in positions):
        found["log_probs"] = [captured[position] for position in positions]
    if batch.get("rewards") is not None:
        found["rewards"] = [float(value) for value in batch["rewards"]]
    if positions is not None:
        found["sample_ids"] = [str(int(position)) for position in positions]
    elif modules is MILES:
        # Its ranks do not learn the positions: they name the rows that they share.
        rows = slime_modules.ranks(modules, layout)[0]
        if rows is not None:
            found["sample_ids"] = [f"{rows}-{number}" for number in range(len(responses))]
    own = {"producer": "trainer", "engine": "megatron"}
    rollout = {"producer": "rollout", "engine": "sglang", **sampling(args, "rollout_")}
    return {**found, "streams": {"rollout": rollout, "old": own, "current": own}}


def _positions(like: torch.Tensor, count: int) -> torch.Tensor:
    import torch

    return torch.arange(count, device=like.device)


# --- wrappers ---------------------------------------------------------------------------------


def once(wrap: Wrap) -> Wrap:
    """Return `wrap` that leaves a function as it is that it wrapped before.

    The flag and `stagescope run` may both be given.
    """

    @functools.wraps(wrap)
    def run(function: Function) -> Function:
        if getattr(function, "_stagescope_wraps", None) is wrap:
            return function
        wrapped: Function = wrap(function)
        wrapped._stagescope_wraps = wrap  # type: ignore[attr-defined]
        return wrapped

    return run


@once
@after("the beginning of a stage")
def wrap_start(result: object, timer: object, name: object, *args: object, **kwargs: Any) -> None:
    """Wrap `Timer.start`, which begins a stage."""
    _rank.begin(str(name))


@once
@before("the end of a stage")
def wrap_end(timer: object, name: object, *args: object, **kwargs: object) -> None:
    """Wrap `Timer.end`, which ends a stage."""
    _rank.end(str(name))


@once
@wrapper
def wrap_train(
    function: Function, actor: _Actor, rollout_id: int, *args: object, **kwargs: object
) -> object:
    """Wrap `train_actor` and `train_critic`, which a rank calls itself with the step."""
    with guarded("a step"):
        _rank.modules = slime_modules.of_module(function.__module__)
        _rank.args = actor.args
        _rank.role = str(getattr(actor, "role", "actor"))
        _rank.step = int(rollout_id)
    return function(actor, rollout_id, *args, **kwargs)


@once
@before("streams and samples")
def wrap_save(*args: object, **kwargs: Any) -> None:
    """Wrap `save_debug_train_data`: records the batch; what slime saves does not change."""
    _rank.record(int(kwargs["rollout_id"]), kwargs["rollout_data"])


@once
@wrapper
def wrap_get_batch(
    function: Function, data_iterator: object, keys: Sequence[str], *args: Any, **kwargs: Any
) -> object:
    """Wrap `get_batch`: while log-probs are captured here, it also returns the samples' positions.

    slime requests them only if it saves training data itself, and captures nothing without them.
    """
    wanted = keys
    with guarded("the positions of captured log-probs"):
        if _rank.is_capturing and _POSITION not in keys:
            wanted = [*keys, _POSITION]
    return function(data_iterator, wanted, *args, **kwargs)


@once
@before("scalars")
def wrap_log(
    args: object, metrics: Mapping[str, object], *others: object, **kwargs: object
) -> None:
    """Wrap `log`, which sends metrics to W&B and TensorBoard: they are scalars of the step too."""
    if _rank.step is not None:
        found = scalars(metrics).items()
        numbers = {name: value for name, value in found if not name.endswith("/step")}
        _rank.probe.log(step=_rank.step, **numbers)


def patches(modules: Modules = SLIME) -> list[Patch]:
    """Return the patches of a rank, at the import paths that this slime, or its fork, has."""
    actor, home = f"{modules.actor}:MegatronTrainRayActor", modules.home
    hooks: list[tuple[str, Wrap, str]] = [
        (f"{home}.timer:Timer.start", wrap_start, "stages"),
        (f"{home}.timer:Timer.end", wrap_end, "stages"),
        (f"{home}.{modules.data}:save_debug_train_data", wrap_save, "streams and samples"),
        (f"{modules.log}:log", wrap_log, "scalars"),
        (f"{actor}.train_actor", wrap_train, "the number of the step"),
        (f"{actor}.train_critic", wrap_train, "the number of the step"),
    ]
    if modules.captures:
        batches = "log-probs of the update's own pass"
        hooks.append((f"{modules.model}:get_batch", wrap_get_batch, batches))
    found = []
    for path, wrap, purpose in hooks:
        module, _, name = path.partition(":")
        found.append(Patch(module, name, wrap, purpose))
    return found


_installed: Patches | None = None


def init(args: Namespace, modules: Modules = SLIME, integration: str = __name__) -> None:
    """Attach this rank; slime calls it by `--custom-megatron-init-path`, once and early."""
    global _installed
    with guarded(f"attaching {modules.package}"):
        _rank.args = args
        if _installed is None:
            _installed = registry.install(modules.package, integration)
