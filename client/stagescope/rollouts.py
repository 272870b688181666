"""`ReplayRollouts`: stored trajectories in the place of a rollout worker, by (group_id, run_id)."""

from __future__ import annotations

import difflib
import logging
import threading
from collections.abc import Iterable
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np

from stagescope.batch import Batch
from stagescope.batch.trajectories import Trajectory, trajectories
from stagescope.wire.errors import Conflict, InvalidInput, NotFound

if TYPE_CHECKING:
    from stagescope.step import Step

_NEAR: Final = 4
_LOG: Final = logging.getLogger(__name__)


class Key(NamedTuple):
    """Which trajectory."""

    group_id: str
    run_id: str
    step: int | None = None

    def __str__(self) -> str:
        step = "" if self.step is None else f" of step {self.step}"
        return f"group_id {self.group_id!r}, run_id {self.run_id!r}{step}"


class ReplayRollouts:
    """Serves the trajectories of stored steps, each once; usable from several threads.

    Usage::

        with ReplayRollouts(session.step(5)) as rollouts:       # or a batch, a file, several
            trajectory = rollouts.get(group_id, run_id)
            trajectory.all_tokens(), trajectory.tensor("rollout_log_probs")

    Args:
        sources: batches, steps of a session, or files of `stagescope batch --output`.
        strict: what is not there raises; else `get` returns None and `missed` counts it.
        once: a trajectory is served once; else as often as it is asked for.

    Raises:
        InvalidInput: two rows of a step have one key.
        NotFound: a source has no `response_mask`, so that its rows are no trajectories.
    """

    def __init__(
        self, *sources: Batch | Step | str | Path, strict: bool = True, once: bool = True
    ) -> None:
        self.strict = strict
        self.once = once
        self.missed: dict[Key, int] = {}
        """What was asked for and is not there, and how often."""
        self.batches = tuple(map(batch_of, sources))
        self._stored: dict[Key, Trajectory] = {}
        self._asked: set[Key] = set()
        self._lock = threading.Lock()
        for batch in self.batches:
            for trajectory in trajectories(batch):
                key = Key(trajectory.group_id, trajectory.run_id, trajectory.step)
                if key in self._stored:
                    raise InvalidInput(
                        f"two trajectories have {key}",
                        expected="run_ids or sample_ids that are unique in a group",
                    )
                self._stored[key] = trajectory

    def __len__(self) -> int:
        return len(self._stored)

    def __enter__(self) -> ReplayRollouts:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if kind is None and (self.unasked or self.missed):
            _LOG.warning("%s", self.summary())

    @property
    def keys(self) -> tuple[Key, ...]:
        """Everything that is stored, in the order of the sources and their rows."""
        return tuple(self._stored)

    @property
    def unasked(self) -> tuple[Key, ...]:
        """What is stored and was never asked for."""
        return tuple(key for key in self._stored if key not in self._asked)

    def get(
        self,
        group_id: Any,
        run_id: Any,
        *,
        step: int | None = None,
        prompt: Iterable[int] | None = None,
    ) -> Trajectory | None:
        """Return a trajectory; None only where it is not there and `strict` is off.

        Args:
            group_id: of its group; as a text.
            run_id: which of the group's samples, a number or a text.
            step: of this step; default: of the first source that has not served it yet.
            prompt: the ids of the prompt that was asked; another one is refused.

        Raises:
            NotFound: no such trajectory; names those that are near.
            Conflict: it was served before, and `once` is on.
            InvalidInput: it was made from another prompt.
        """
        wanted = Key(str(group_id), str(run_id), step)
        with self._lock:
            found = [
                key for key in self._stored if key[:2] == wanted[:2] and step in (None, key.step)
            ]
            if not found:
                self._miss(wanted)
                return None
            left = [key for key in found if key not in self._asked]
            if not left and self.once:
                raise Conflict(
                    f"the trajectory of {found[0]} was served before",
                    expected="each one once",
                    advice="ReplayRollouts(..., once=False) serves them again",
                )
            key = left[0] if left else found[0]
            trajectory = self._stored[key]
            if prompt is not None:
                _check_prompt(key, trajectory, [*prompt])
            self._asked.add(key)
            return trajectory

    def summary(self) -> str:
        """Return what was served, what was missed, and what was never asked for, in words."""
        said = [f"{len(self._asked)} of {len(self)} stored trajectories were served"]
        if self.missed:
            said.append(f"{len(self.missed)} were asked for and are not there: {_few(self.missed)}")
        if self.unasked:
            said.append(f"{len(self.unasked)} were never asked for: {_few(self.unasked)}")
        return "; ".join(said)

    def _miss(self, wanted: Key) -> None:
        self.missed[wanted] = self.missed.get(wanted, 0) + 1
        if not self.strict:
            return
        names = {str(key): key for key in self._stored}
        near = difflib.get_close_matches(str(wanted), names, n=_NEAR, cutoff=0.3)
        raise NotFound(
            f"no trajectory of {wanted} is stored ({len(self)} are)",
            expected=f"such as {'; '.join(near or [*names][:_NEAR])}" if names else "",
            advice="replay the step with the settings it was made with (seed, groups, group_size), "
            "or with strict=False",
        )


def batch_of(source: Batch | Step | str | Path) -> Batch:
    """Return a batch, that of a step, or that in a file.

    Raises:
        NotFound: no such file, or nothing is kept of the step.
        InvalidInput: a directory.
    """
    if isinstance(source, Batch):
        return source
    if not isinstance(source, str | Path):
        return source.batch()
    if Path(source).is_dir():
        raise InvalidInput(
            f"{source} is a directory",
            expected="a file of `stagescope batch --output`",
            advice="stagescope_service.dumps.batches.read_batch reads directories",
        )
    return Batch.load(source)


def _check_prompt(key: Key, trajectory: Trajectory, prompt: list[int]) -> None:
    stored = trajectory.prompt
    if stored is not None and not np.array_equal(stored, np.asarray(prompt, np.int64)):
        raise InvalidInput(
            f"the trajectory of {key} has another prompt: {stored.tolist()[:8]}...",
            expected=f"{prompt[:8]}...",
            advice="the data or the tokenizer changed since it was stored",
        )


def _few(keys: Iterable[Key]) -> str:
    named = [*map(str, keys)]
    return "; ".join(named[:_NEAR]) + ("; ..." if len(named) > _NEAR else "")
