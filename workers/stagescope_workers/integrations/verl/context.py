"""What the driver plants into a batch, so that the ranks that get it know what they work on.

verl's workers learn no step from verl. The driver puts one string into `meta_info` (DataProto, the
trainers before V1) or `extra_info` (KVBatchMeta, V1); both arrive in the worker's TensorDict, and
survive chunking and mini-batches. It is the same string throughout a step: verl asserts that the
meta_info of batches that it unites is equal.
"""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Mapping
from typing import Any, Final

KEY: Final = "stagescope"
SAMPLES: Final = "stagescope_sample_ids"
"""Per-row ids that travel with the rows of a batch."""


@dataclasses.dataclass(frozen=True)
class Context:
    """What a rank is told with a batch.

    Attributes:
        run: The run's name.
        attempt_key: As the driver has it; None leaves it to Ray's session and job, which all
            processes of a job share.
        step: The global step.
        stages: Whether ranks report stages at all.
        synchronous: Whether the weights that a step begins with sampled all of its tokens.
        bypass: Whether the workers' loss is where the two log-prob streams meet.
        version: Of the weights that the step begins with, where the trainer counts them by itself.
        settings: Of the run: what shapes the statistics. The configuration is the driver's to say:
            what is planted travels with every chunk of every batch.
        streams: Metadata that stands beside log-probs: who made them, and how tokens were drawn.
        profiler: verl's own precision_debugger configuration, where it orders something.
    """

    run: str
    attempt_key: str | None
    step: int
    stages: bool = True
    synchronous: bool = False
    bypass: bool = False
    version: int | None = None
    settings: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    streams: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    profiler: Mapping[str, Any] | None = None

    @property
    def policy_version(self) -> int:
        """The weights that a step begins with: verl counts them by the step that made them.

        Its fully asynchronous trainer does not, whose weights are synchronised every few steps.
        """
        return self.step - 1 if self.version is None else self.version

    def text(self) -> str:
        """Return the string that is planted."""
        return json.dumps(dataclasses.asdict(self), sort_keys=True, default=str)


@functools.lru_cache(maxsize=64)
def parse(text: str) -> Context:
    """Return the context that `text` was made of, also by a later version with more fields."""
    known = {field.name for field in dataclasses.fields(Context)}
    return Context(**{name: value for name, value in json.loads(text).items() if name in known})


def plant(batch: Any, text: str) -> None:
    """Put `text` where the batch's workers will find it."""
    carried = getattr(batch, "meta_info", None)
    if carried is None:
        carried = getattr(batch, "extra_info", None)
    if carried is None:
        raise TypeError(f"{type(batch).__name__} has neither meta_info nor extra_info")
    carried[KEY] = text


def find(data: Any) -> Context | None:
    """Return the context that came with a worker's data, or None."""
    carried = getattr(data, "meta_info", None)
    text = carried.get(KEY) if isinstance(carried, Mapping) else non_tensor(data, KEY)
    return parse(text) if isinstance(text, str) else None


def non_tensor(data: Any, name: str) -> Any:
    """Return what a TensorDict holds under `name` beside its tensors, or None."""
    if name not in data.keys():  # noqa: SIM118 - a TensorDict is iterated over its rows
        return None
    value = data.get(name)
    return getattr(value, "data", value)


def rows_of(data: Any, name: str) -> list[str] | None:
    """Return the strings, one a row, that a TensorDict holds under `name`, or None."""
    if name not in data.keys():  # noqa: SIM118
        return None
    value = data.get(name)
    items = value.tolist() if hasattr(value, "tolist") else list(value)
    return [str(getattr(item, "data", item)) for item in items]
