"""The trainer's process of NexRL: its steps, what its trajectories hold, the batch, the update.

A step is `_train_step`, the first is 0. Three stages belong to this process. `rollout_generate` is
how long the trainer waits for trajectories. `actor_compute_log_prob` and `actor_update` are its
calls of the train service, whose ranks report the same stages as role `actor` (see `ranks`).
This process has both streams, so they are recorded here. The rollout's come from live trajectories,
since NexRL's files leave out the log-probs; the trainer's from the train service's answer.
"""

from __future__ import annotations

import contextlib
import contextvars
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, TypeAlias

from stagescope_workers.integrations.configuration import (
    attempt_key,
    lookup,
    named_run,
    to_container,
    visible_leaves,
)
from stagescope_workers.integrations.nexrl import debug_block
from stagescope_workers.integrations.nexrl.rows import (
    Columns,
    Rows,
    Trajectory,
    by_token,
    read_batch,
    read_trajectories,
)
from stagescope_workers.integrations.patches import guarded, log_once
from stagescope_workers.integrations.training import ReportedTraining, one_a_trainer, scalars
from stagescope_workers.probe.lifecycle import init
from stagescope_workers.probe.probe import Probe
from stagescope_workers.probe.stage import Stage

CONTEXT: Final = "stagescope"
"""The key in a batch's `meta_info` that tells the ranks the run and the step."""
_ROLE: Final = "driver"
_MOCK: Final = "mock"


Batch: TypeAlias = Any
"""Attributes read from NexRL's `Batch`: values."""
Trainer: TypeAlias = Any
"""Attributes read from NexRL's `BaseTrainer` and `SelfHostedTrainer`: _train_step, _config,
_train_service_client (compute_log_prob, save_checkpoint), train."""


class Training(ReportedTraining):
    """Reports one trainer."""

    def __init__(self, trainer: Trainer) -> None:
        super().__init__(trainer)
        self._open: dict[str, Stage] = {}
        self._observed: tuple[int, frozenset[str] | None] | None = None
        self._columns: tuple[int, Columns] | None = None
        self._prepared: dict[str, object] = {}
        self._is_inside = False

    @property
    def step(self) -> int:
        """The step that is being trained."""
        return int(self.trainer._train_step)

    @property
    def config(self) -> object:
        """The trainer's part of the configuration."""
        return self.trainer._config

    # --- the probe ----------------------------------------------------------------------------

    @property
    def last_step(self) -> int | None:
        """The last step that is done."""
        return self.step - 1 if self.step > 0 else None

    def _make_probe(self) -> Probe:
        run = _run_name(self.config)
        block = debug_block.read_dumper(getattr(self.trainer, "_data_dumper", None))
        weaver = debug_block.read_weaver(os.environ)
        log_once(*(block.lines() if block else ()), *(weaver.lines(run) if weaver else ()))
        settings: dict[str, object] = {"nexrl": _settings(self.config)}
        if block is not None:
            settings["nexrl_debug"] = block.settings()
        if weaver is not None:
            settings["weaver_debug_dump"] = weaver.settings()
        return init(
            run,
            role=_ROLE,
            rank=0,
            world_size=1,
            attempt_key=attempt_key(),
            layout={"framework": "nexrl"},
            settings=settings,
            keep=self._keep(),
            captures=self._captures(),
            resumed_from_step=self.step or None,
        )

    def _keep(self) -> dict[str, object] | None:
        block = debug_block.read_dumper(getattr(self.trainer, "_data_dumper", None))
        return None if block is None else block.keep()

    def _captures(self) -> bool | str:
        if hasattr(self.trainer, "_train_service_client"):
            return False
        return "the model runs behind a training API, not in the trainer's process"

    def context(self) -> dict[str, object]:
        """Return the data that the ranks get with a batch: built-in types, sent as JSON."""
        return {
            "run": self.probe.run,
            "attempt_key": attempt_key(),
            "step": self.step,
            "keep": self._keep(),
        }

    # --- stages -------------------------------------------------------------------------------

    def begin(self, name: str) -> Stage:
        """Return the open stage of that name; begin it if none is open."""
        stage = self._open.get(name)
        if stage is None:
            stage = self._open[name] = self.probe.begin(
                name, step=self.step, policy_version=self.step
            )
        return stage

    def is_open(self, name: str) -> bool:
        """Return whether a stage of that name is open."""
        return name in self._open

    def end(self, name: str, error: BaseException | None = None) -> None:
        """End the open stage of that name, if there is one."""
        stage = self._open.pop(name, None)
        if stage is not None:
            stage.end(error)

    # --- trajectories -------------------------------------------------------------------------

    def observe(self, trajectories: Sequence[Trajectory]) -> None:
        """Record the trajectories of the step as they came; once a step."""
        if self._observed is not None and self._observed[0] == self.step:
            return
        stage = self.begin("rollout_generate")
        try:
            rows = read_trajectories(trajectories)
            known = frozenset(rows.ids.samples) if rows.ids.samples else None
            self._observed = (self.step, known)
            self._say_missing(rows)
            stage.record({**rows.payload(), **self._streams(rows.rollout is not None)})
        finally:
            self.end("rollout_generate")

    def _say_missing(self, rows: Rows) -> None:
        lines = []
        if rows.rollout is None:
            lines.append(
                "the trajectories have no log-probs of the rollout (extra_fields['logprobs'] is "
                "absent, empty, or 0.0 throughout): the mismatch is not measured"
            )
        elif rows.incomplete:
            lines.append(
                f"{rows.incomplete} of {len(rows)} trajectories lack log-probs of the rollout for "
                "tokens that loss_mask counts: they are reported as nan"
            )
        if not rows.ids.samples:
            lines.append(
                "the trajectories have no group_id and run_id: their rows have no names, and are "
                "not joined with the trainer's"
            )
        log_once(*lines)

    def _streams(self, has_rollout: bool, temperature: float | None = None) -> dict[str, object]:
        return _streams(self.config, has_rollout=has_rollout, temperature=temperature)

    # --- the self-hosted trainers -------------------------------------------------------------

    def record_old(self, batch: Batch, old: object) -> None:
        """Record both streams of the step's batch, in the open `actor_compute_log_prob`."""
        columns = self._read(batch)
        if columns is None:
            return
        values = batch.values
        own = columns.column(old)
        rollout, _ = columns.rollout(values)
        if own is None:
            log_once(
                f"old_log_probs of shape {list(getattr(old, 'shape', ()))} is not as wide as "
                f"the responses {[columns.total, columns.width]}: the trainer's log-probs are "
                "not reported (NexRL's mock train service returns such a placeholder)"
            )
        temperature = getattr(batch, "metadata", {}).get("temperature")
        self.begin("actor_compute_log_prob").record(
            {
                **columns.payload(),
                **({} if own is None else {"old_log_probs": own}),
                **({} if rollout is None else {"rollout_log_probs": rollout}),
                **self._streams(rollout is not None, temperature),
            }
        )
        if own is not None:
            self.want(self.step)

    def note_batch(self, batch: Batch) -> None:
        """Remember the rows of the batch that is about to be trained on."""
        self._read(batch)

    def _read(self, batch: Batch) -> Columns | None:
        observed = self._observed
        known = observed[1] if observed is not None and observed[0] == self.step else None
        columns = read_batch(batch.values, known)
        self._columns = None if columns is None else (self.step, columns)
        return columns

    def record_update(self, data: Mapping[str, Any]) -> None:
        """Record the advantages that the update gets, in the open `actor_update`."""
        if self._columns is None or self._columns[0] != self.step:
            return
        columns, tensors = self._columns[1], data.get("batch") or {}
        advantages = columns.column(tensors.get("advantages"))
        if advantages is not None:
            payload = {**columns.payload(), "advantages": advantages}
            self.begin("actor_update").record(payload)

    # --- the remote API's trainers ------------------------------------------------------------

    def note_prepared(self, trajectories: Sequence[Trajectory]) -> None:
        """Remember the trajectories with their advantages, until the update begins."""
        rows = read_trajectories(trajectories)
        extra = [getattr(one, "extra_fields", None) or {} for one in trajectories]
        values = [fields.get("token_advantages") or fields.get("advantage") for fields in extra]
        advantages = by_token(values, rows.masks)
        self._prepared = {
            **rows.payload(),
            **({} if advantages is None else {"advantages": advantages}),
            **self._streams(rows.rollout is not None),
        }

    def begin_remote_update(self, datums: Sequence[Mapping[str, object]]) -> None:
        """Begin `actor_update`: the datums are sent to the training API now."""
        stage = self.begin("actor_update")
        prepared, self._prepared = self._prepared, {}
        if prepared:
            stage.record(prepared)
        stage.record_datums(datums)

    def end_remote_update(self, metrics: Mapping[str, object]) -> None:
        """End `actor_update` with the numbers that the training API returned."""
        stage = self.begin("actor_update")
        stage.log(**scalars(metrics))
        self.end("actor_update")

    # --- steps --------------------------------------------------------------------------------

    @contextlib.contextmanager
    def entered(self, trajectories: Sequence[Trajectory]) -> Iterator[None]:
        """Run the body as the training of the step."""
        if self._is_inside:  # a trainer's own `train` calls that of its base class
            yield
            return
        token = _current.set(self)
        self._is_inside = True
        try:
            with guarded("the trajectories of a step"):
                self.observe(trajectories)
            yield
        except BaseException as error:
            with guarded("the end of a step"):
                for name in list(self._open):
                    self.end(name, error)
            raise
        finally:
            self._is_inside = False
            _current.reset(token)
            with guarded("the end of a step"):
                for name in list(self._open):
                    self.end(name)

    def report(self, step: int, metrics: object) -> object:
        """Report the trainer's metrics of a step; return them and the service's together."""
        if not isinstance(metrics, Mapping):
            return metrics
        self.probe.log(step=step, **scalars(metrics))
        return {**self.numbers(step), **metrics}

    def close(self, error: BaseException | None) -> None:
        """Send what waits: the training is over, or ends with `error`."""
        for name in list(self._open):
            self.end(name, error)
        super().close(error)


training: Final = one_a_trainer(Training)
_current: Final[contextvars.ContextVar[Training | None]] = contextvars.ContextVar(
    "stagescope_nexrl_training", default=None
)


def current() -> Training | None:
    """Return the training whose step the caller runs in, or None."""
    return _current.get()


# --- what the configuration says ------------------------------------------------------------
def _root(config: object) -> object:
    """Return the whole configuration: a NexRL module gets a part of it, which knows its parent."""
    while True:
        parent = getattr(config, "_parent", None)
        if parent is None:
            return config
        config = parent


def _run_name(config: object) -> str:
    """Return the run's name: NexRL's `experiment_name`, unless STAGESCOPE_RUN names it."""
    whole = _root(config)
    name = lookup(whole, "experiment_name") or lookup(whole, "project_name") or ""
    return named_run(str(name), fallback="nexrl")


def _settings(config: object) -> dict[str, object]:
    """Return the whole configuration without what may be secret."""
    tree = to_container(_root(config))
    return visible_leaves(tree) if isinstance(tree, Mapping) else {}


def _is_mock(config: object) -> bool:
    """Return whether the rollouts are synthetic, or replayed from a dump."""
    return bool(lookup(_root(config), "rollout_worker", "type") == _MOCK)


def _streams(
    config: object, *, has_rollout: bool, temperature: float | None = None
) -> dict[str, object]:
    """Return who produced the streams of a batch.

    Args:
        config: The trainer's configuration.
        has_rollout: Whether the batch has the rollout's stream.
        temperature: The temperature at which the batch was sampled.
    """
    whole = _root(config)
    engine = (
        lookup(whole, "service", "inference_service", "backend")
        or lookup(config, "algorithm", "inference_service", "backend")
        or lookup(whole, "rollout_worker", "inference_service", "backend")
        or "engine"
    )
    if _is_mock(config):
        path = lookup(whole, "rollout_worker", "trajectory_load_path")
        engine = "replay" if path else _MOCK
    own = {"producer": "trainer", "engine": "fsdp"}
    sampling = {} if temperature is None else {"temperature": float(temperature)}
    found: dict[str, object] = {"old": own, "current": own}
    if has_rollout:
        found["rollout"] = {"producer": str(engine), "engine": str(engine), **sampling}
    return {"streams": found}
