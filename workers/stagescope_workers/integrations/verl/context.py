"""The context that the driver injects into a batch, so that the ranks know their step.

verl does not tell its workers the step. The driver puts one string into `meta_info` (DataProto, the
trainers before V1) or `extra_info` (KVBatchMeta, V1); both arrive in the worker's TensorDict, and
survive chunking and mini-batches. It is the same string throughout a step: verl asserts that
batches that it merges have equal meta_info.
"""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Mapping
from typing import Any, Final

from stagescope_wire.nonfinite import JsonObject

KEY: Final = "stagescope"
SAMPLES: Final = "stagescope_sample_ids"
"""The key of per-row ids in a batch."""


@dataclasses.dataclass(frozen=True)
class Context:
    """The description of a step that a rank receives with a batch.

    Attributes:
        run: The run's name.
        attempt_key: The driver's; None means Ray's session and job, which all processes of a job
            share.
        step: The global step.
        stages: Whether ranks report stages at all.
        synchronous: Whether all tokens of a step were sampled with the weights it begins with.
        bypass: Whether only the workers' loss has both log-prob streams.
        version: Version of the step's first weights, where the trainer counts versions itself.
        settings: Settings of the run that influence the statistics. Only the driver reports the
            whole configuration, since the context is copied with every chunk of every batch.
        streams: Metadata of the log-probs: their producers, and how tokens were sampled.
        profiler: verl's own precision_debugger configuration, where it requests something.
    """

    run: str
    attempt_key: str | None
    step: int
    stages: bool = True
    synchronous: bool = False
    bypass: bool = False
    version: int | None = None
    settings: JsonObject = dataclasses.field(default_factory=dict)
    streams: JsonObject = dataclasses.field(default_factory=dict)
    profiler: JsonObject | None = None

    @property
    def policy_version(self) -> int:
        """The version of the weights that a step begins with: the number of the step before.

        verl's fully asynchronous trainer, which synchronises weights every few steps, counts them
        itself.
        """
        return self.step - 1 if self.version is None else self.version

    def text(self) -> str:
        """Return the string to inject."""
        return json.dumps(dataclasses.asdict(self), sort_keys=True, default=str)


@functools.lru_cache(maxsize=64)
def parse(text: str) -> Context:
    """Parse an injected string; fields that a later version added are ignored."""
    names = {field.name for field in dataclasses.fields(Context)}
    return Context(**{name: value for name, value in json.loads(text).items() if name in names})


def inject(batch: object, text: str) -> None:
    """Add `text` to the data that verl sends to the batch's workers."""
    metadata = getattr(batch, "meta_info", None)
    if metadata is None:
        metadata = getattr(batch, "extra_info", None)
    if metadata is None:
        raise TypeError(f"{type(batch).__name__} has neither meta_info nor extra_info")
    metadata[KEY] = text


def extract(data: object) -> Context | None:
    """Return the context in a worker's data, or None."""
    metadata = getattr(data, "meta_info", None)
    text = metadata.get(KEY) if isinstance(metadata, Mapping) else non_tensor(data, KEY)
    return parse(text) if isinstance(text, str) else None


def non_tensor(data: Any, name: str) -> Any:
    """Return the non-tensor value of a TensorDict under `name`, or None."""
    if name not in data.keys():  # noqa: SIM118 - iterating a TensorDict yields its rows
        return None
    value = data.get(name)
    return getattr(value, "data", value)


def row_strings(data: Any, name: str) -> list[str] | None:
    """Return the strings, one per row, of a TensorDict under `name`, or None."""
    if name not in data.keys():  # noqa: SIM118
        return None
    value = data.get(name)
    items = value.tolist() if hasattr(value, "tolist") else list(value)
    return [str(getattr(item, "data", item)) for item in items]
