"""NexRL's trajectories and batches as the rows of a payload.

NexRL's self-hosted trainers regard the first token of a trajectory as its prompt and all others as
its response, whatever `loss_mask` says (`SelfHostedTrainer._process_trajectories`). So index i of
a row is token i + 1. The rows of `Trajectory` objects are aligned in the same way here, so that
both name a token by the same position.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final, TypeAlias

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Integers = npt.NDArray[np.int64]

ROLLOUT: Final = "logprobs"
"""The column of the rollout's log-probs, one for each token of a trajectory, 0.0 in the prompt."""


Trajectory: TypeAlias = Any
"""Attributes that NexRL's `Trajectory` always has: tokens, loss_mask, reward."""


@dataclasses.dataclass
class Ids:
    """The ids of rows: one text for each.

    Attributes:
        samples: `GROUP_RUN`; a further trajectory of the same group and run (an agent's) is
            `GROUP_RUN_1`, and so on.
        groups, runs: NexRL's group_id (else uid) and run_id.
        tasks: NexRL's task_id, the index of the prompt in the data set; empty without.
    """

    samples: list[str]
    groups: list[str]
    runs: list[str]
    tasks: list[str]

    def take(self, rows: Sequence[int]) -> Ids:
        """Return the ids of some of the rows."""
        return Ids(*([each[row] for row in rows] if each else [] for each in self._lists()))

    def payload(self) -> dict[str, list[str]]:
        """Return them by the names of a payload."""
        names = ("sample_ids", "group_ids", "run_ids", "prompt_hashes")
        return {name: each for name, each in zip(names, self._lists(), strict=True) if each}

    def _lists(self) -> tuple[list[str], ...]:
        return self.samples, self.groups, self.runs, self.tasks


NO_IDS: Final = Ids([], [], [], [])


def identify(
    groups: Sequence[object] | None,
    runs: Sequence[object] | None,
    tasks: Sequence[object] | None = None,
) -> Ids:
    """Return the ids of rows by their columns; NO_IDS where a row lacks its group or run."""
    if groups is None or runs is None:
        return NO_IDS
    known = [_text(value) for value in groups], [_text(value) for value in runs]
    if any(not group or not run for group, run in zip(*known, strict=True)):
        return NO_IDS
    counts: collections.Counter[tuple[str, str]] = collections.Counter()
    samples = []
    for key in zip(*known, strict=True):
        number = counts[key]
        counts[key] += 1
        samples.append("_".join([*key, *([str(number)] if number else [])]))
    named = [] if tasks is None else [_text(task) for task in tasks]
    return Ids(samples, *known, named if all(named) else [])


def _text(value: object) -> str:
    if value is None:
        return ""
    item = getattr(value, "item", None)
    return str(item() if callable(item) else value)


@dataclasses.dataclass
class Rows:
    """The rows of a step's trajectories, ragged, in the order in which the trainer got them.

    Attributes:
        ids: Ids of the rows.
        tokens, masks: Arrays of each row's response, see the module's docstring.
        prompts: The first token of each row.
        rollout: The rollout's log-probs of each row's response, nan where there is none; None where
            no row has any.
        incomplete: How many rows lack log-probs that others have.
        rewards: Rewards of the rows.
    """

    ids: Ids
    tokens: list[Integers]
    masks: list[Integers]
    prompts: list[Integers]
    rollout: list[Floats] | None
    incomplete: int
    rewards: Floats

    def __len__(self) -> int:
        return len(self.tokens)

    def payload(self) -> dict[str, object]:
        """Return them by the names of a payload."""
        return {
            **self.ids.payload(),
            "responses": self.tokens,
            "response_mask": self.masks,
            "prompts": self.prompts,
            "rewards": self.rewards,
            **({} if self.rollout is None else {"rollout_log_probs": self.rollout}),
        }


def read_trajectories(trajectories: Sequence[Trajectory]) -> Rows:
    """Read NexRL's `Trajectory` objects, before the trainer pads them."""
    tokens = [integers(one.tokens) for one in trajectories]
    masks = [integers(one.loss_mask)[1:] for one in trajectories]
    # A trajectory that the trainer has padded already has a wider mask.
    masks = [mask[: len(row) - 1] for mask, row in zip(masks, tokens, strict=True)]
    extra = [getattr(one, "extra_fields", None) or {} for one in trajectories]
    lengths = [len(row) for row in tokens]
    rollout, incomplete = rollout_rows([fields.get(ROLLOUT) for fields in extra], lengths, masks)
    return Rows(
        ids=identify(
            [fields.get("group_id") or fields.get("uid") for fields in extra],
            [fields.get("run_id") for fields in extra],
            [fields.get("task_id") for fields in extra],
        ),
        tokens=[row[1:] for row in tokens],
        masks=masks,
        prompts=[row[:1] for row in tokens],
        rollout=rollout,
        incomplete=incomplete,
        rewards=np.array([float(one.reward) for one in trajectories]),
    )


def rollout_rows(
    columns: Sequence[object], lengths: Sequence[int], masks: Sequence[Integers]
) -> tuple[list[Floats] | None, int]:
    """Return the rollout's log-probs of each row's response, and how many rows lack some.

    Args:
        columns: Log-probs of each row's tokens, 0.0 in the prompt, or None. If there is one
            value less than tokens, they are those of the response alone. If there are more,
            NexRL's agent worker truncated the tokens but not the log-probs.
        lengths: Number of tokens of each row.
        masks: Mask of each row's response.

    Returns:
        None where no row has any: also where all are 0.0, which NexRL's mock worker writes.
    """
    found: list[Floats] = []
    incomplete = 0
    for values, length, mask in zip(columns, lengths, masks, strict=True):
        given = floats(() if values is None else values)
        if len(given) != length - 1:
            given = given[1:length]
        row = np.full(max(length - 1, 0), np.nan)
        row[: len(given)] = given
        found.append(row)
        incomplete += int(len(given) < len(row) and bool(mask[len(given) :].any()))
    # A padded row has a wider mask. A batch that is cut at its right side has narrower ones.
    counted = [
        row[: len(mask)][mask[: len(row)] == 1] for row, mask in zip(found, masks, strict=True)
    ]
    every = np.concatenate(counted) if counted else np.empty(0)
    if not (np.isfinite(every) & (every != 0.0) | np.isinf(every)).any():
        return None, 0
    return found, incomplete


def without_padding(ids: Ids, known: frozenset[str] | None) -> list[int]:
    """Return the rows of a batch that are no copies of others, in their order.

    `Batch.pad_to_world_size` appends copies of the first rows, which are then sorted to the rows
    that they are copies of.

    Args:
        ids: Ids of the rows of the batch, copies included.
        known: The samples that the trainer got; None where they are unknown.
    """
    if known is None:
        return list(range(len(ids.samples)))
    return [row for row, sample in enumerate(ids.samples) if sample in known]


def read_batch(values: Mapping[str, Any], known: frozenset[str] | None) -> Columns | None:
    """Read the columns of NexRL's `Batch`: [rows, tokens], the response of each row.

    Args:
        values: Values of the batch.
        known: See `without_padding`.

    Returns:
        None where it has no responses, or rows that cannot be distinguished.
    """
    responses = values.get("responses")
    mask = values.get("scoring_attention_mask", values.get("loss_mask"))
    if responses is None or mask is None or getattr(responses, "ndim", 0) != 2:
        return None
    groups = values.get("group_id")
    ids = identify(
        values.get("uid") if groups is None else groups, values.get("run_id"), values.get("task_id")
    )
    if not ids.samples:
        return None
    chosen = without_padding(ids, known)
    width = responses.shape[1]
    rewards = values.get("reward")
    return Columns(
        rows=chosen,
        total=len(ids.samples),
        width=width,
        ids=ids.take(chosen),
        responses=responses[chosen],
        mask=mask[:, -width:][chosen],
        rewards=None if rewards is None else floats([rewards[row] for row in chosen]),
    )


@dataclasses.dataclass
class Columns:
    """The rows of a batch that count, each once.

    Attributes:
        rows: Their indices in the batch.
        total: Number of rows of the batch, with copies.
        width: Tokens of a row.
        ids: Ids of the rows.
        responses, mask: [rows, tokens].
        rewards: [rows], None where the batch has none.
    """

    rows: list[int]
    total: int
    width: int
    ids: Ids
    responses: object
    mask: Any
    rewards: Floats | None

    def payload(self) -> dict[str, object]:
        """Return them by the names of a payload."""
        return {
            **self.ids.payload(),
            "responses": self.responses,
            "response_mask": self.mask,
            **({} if self.rewards is None else {"rewards": self.rewards}),
        }

    def column(self, values: Any) -> object:
        """Return a column of the batch for these rows; None unless it is [rows, tokens]."""
        shape = tuple(getattr(values, "shape", ()))
        return values[self.rows] if shape == (self.total, self.width) else None

    def rollout(self, values: Mapping[str, Any]) -> tuple[Floats | None, int]:
        """Return the rollout's log-probs, [rows, tokens], and how many rows lack some."""
        columns, tokens = values.get(ROLLOUT), values.get("tokens")
        if columns is None or tokens is None:
            return None, 0
        masks = [integers(row) for row in self.mask]
        found, incomplete = rollout_rows(
            [columns[row] for row in self.rows], [len(tokens[row]) for row in self.rows], masks
        )
        if found is None:
            return None, 0
        wide = np.zeros((len(found), self.width))
        for row, line in zip(found, wide, strict=True):
            count = min(len(row), self.width)
            line[:count] = row[:count]
        return wide, incomplete


def by_token(advantages: Iterable[object], masks: Sequence[Integers]) -> list[Floats] | None:
    """Return advantages of trajectories as one number for each token of their responses.

    Args:
        advantages: One number for each trajectory, or one for each of its model tokens.
        masks: Masks of the responses.
    """
    found = []
    for value, mask in zip(advantages, masks, strict=True):
        if value is None:
            return None
        numbers = floats(value if hasattr(value, "__len__") else [value])
        row = np.zeros(len(mask))
        chosen = np.flatnonzero(mask == 1)
        if len(numbers) not in (1, len(chosen)):
            return None
        row[chosen] = numbers
        found.append(row)
    return found


def integers(values: object) -> Integers:
    """Return a list, an array or a tensor as int64."""
    return np.asarray(_on_host(values), dtype=np.int64)


def floats(values: object) -> Floats:
    """Return a list, an array or a tensor as float64; None becomes nan."""
    return np.asarray(_on_host(values), dtype=np.float64)


def _on_host(values: Any) -> object:
    if hasattr(values, "detach"):
        return values.detach().double().cpu() if values.is_floating_point() else values.cpu()
    return values if isinstance(values, np.ndarray) else list(values)
