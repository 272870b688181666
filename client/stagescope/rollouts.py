"""`ReplayRollouts`: serves stored trajectories in place of a rollout worker."""

from __future__ import annotations

import difflib
import logging
import threading
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np

from stagescope_wire.batch import Batch
from stagescope_wire.batch.converters import Trajectory, trajectories
from stagescope_wire.errors import Conflict, InvalidInput, NotFound

if TYPE_CHECKING:
    from stagescope.step import Step

_MAX_LISTED: Final = 4
_LOG: Final = logging.getLogger(__name__)


class Key(NamedTuple):
    """The identity of a trajectory; `step` is None if any step may serve it."""

    group_id: str
    run_id: str
    step: int | None = None

    def __str__(self) -> str:
        step = "" if self.step is None else f" of step {self.step}"
        return f"group_id {self.group_id!r}, run_id {self.run_id!r}{step}"


class ReplayRollouts:
    """Serves the trajectories of stored steps, each once; safe to use from several threads.

    Usage::

        with ReplayRollouts(session.step(5)) as rollouts:       # or a batch, a file, several
            trajectory = rollouts.get(group_id, run_id)
            trajectory.all_tokens(), trajectory.tensor("rollout_log_probs")

    Args:
        sources: batches, steps of a session, or files of `stagescope batch --output`.
        strict: a missing trajectory raises; else `get` returns None and `missed` counts it.
        once: serve each trajectory only once; else as often as it is requested.

    Raises:
        InvalidInput: two rows of a step have the same key.
        NotFound: a source has no `response_mask`, so its rows are not trajectories.
    """

    def __init__(
        self, *sources: Batch | Step | str | Path, strict: bool = True, once: bool = True
    ) -> None:
        self.strict = strict
        self.once = once
        self.missed: dict[Key, int] = {}
        """Requested keys that are not stored -> number of requests."""
        self.batches = tuple(map(batch_of, sources))
        self._stored: dict[Key, Trajectory] = {}
        self._served: set[Key] = set()
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

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        if kind is None and (self.unasked or self.missed):
            _LOG.warning("%s", self.summary())

    @property
    def keys(self) -> tuple[Key, ...]:
        """The stored keys, in the order of the sources and their rows."""
        return tuple(self._stored)

    @property
    def unasked(self) -> tuple[Key, ...]:
        """The stored keys that were never requested."""
        return tuple(key for key in self._stored if key not in self._served)

    def get(
        self, group_id: object, run_id: object, *, step: int | None = None,
        prompt: Iterable[int] | None = None,
    ) -> Trajectory | None:  # fmt: skip
        """Return a trajectory; None only if it is not stored and `strict` is off.

        Args:
            group_id: its group; compared as text.
            run_id: which of the group's samples, a number or a text.
            step: its step; default: the step of the first source that has not served it yet.
            prompt: token ids of the requested prompt; a trajectory of another prompt is refused.

        Raises:
            NotFound: there is no such trajectory; the message suggests similar keys.
            Conflict: it was served before, and `once` is on.
            InvalidInput: it was generated from another prompt.
        """
        wanted = Key(str(group_id), str(run_id), step)
        with self._lock:
            matching = [
                key for key in self._stored if key[:2] == wanted[:2] and step in (None, key.step)
            ]
            if not matching:
                self._miss(wanted)
                return None
            unserved = [key for key in matching if key not in self._served]
            if not unserved and self.once:
                raise Conflict(
                    f"the trajectory of {matching[0]} was served before",
                    expected="each one once",
                    advice="ReplayRollouts(..., once=False) serves them again",
                )
            key = unserved[0] if unserved else matching[0]
            trajectory = self._stored[key]
            if prompt is not None:
                _check_prompt(key, trajectory, [*prompt])
            self._served.add(key)
            return trajectory

    def summary(self) -> str:
        """Return how many trajectories were served, missed and never requested, as text."""
        parts = [f"{len(self._served)} of {len(self)} stored trajectories were served"]
        if self.missed:
            missed = _listed(self.missed)
            parts.append(f"{len(self.missed)} were requested and are not stored: {missed}")
        if self.unasked:
            parts.append(f"{len(self.unasked)} were never requested: {_listed(self.unasked)}")
        return "; ".join(parts)

    def _miss(self, wanted: Key) -> None:
        self.missed[wanted] = self.missed.get(wanted, 0) + 1
        if not self.strict:
            return
        names = {str(key): key for key in self._stored}
        similar = difflib.get_close_matches(str(wanted), names, n=_MAX_LISTED, cutoff=0.3)
        raise NotFound(
            f"no trajectory of {wanted} is stored ({len(self)} are)",
            expected=f"such as {'; '.join(similar or [*names][:_MAX_LISTED])}" if names else "",
            advice="replay the step with the settings it was made with (seed, groups, group_size), "
            "or with strict=False",
        )


def batch_of(source: Batch | Step | str | Path) -> Batch:
    """Return `source` if it is a batch, else the batch of a step or in a file.

    Raises:
        NotFound: there is no such file, or nothing is kept of the step.
        InvalidInput: it is a directory.
    """
    if isinstance(source, Batch):
        return source
    if not isinstance(source, str | Path):
        return source.batch()
    if Path(source).is_dir():
        raise InvalidInput(
            f"{source} is a directory",
            expected="a file of `stagescope batch --output`",
            advice="`stagescope batch STEP --run RUN --output FILE` writes one",
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


def _listed(keys: Iterable[Key]) -> str:
    names = [*map(str, keys)]
    return "; ".join(names[:_MAX_LISTED]) + ("; ..." if len(names) > _MAX_LISTED else "")
