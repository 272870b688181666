"""Every number of the training in one place."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Final

from examples.countdown.tokenizer import ANSWER_ID, PAD_ID, VOCABULARY_SIZE

ALGORITHMS: Final = ("grpo", "ppo")
ENGINES: Final = ("int8", "float32")

MODEL: Final[dict[str, Any]] = {
    "vocab_size": VOCABULARY_SIZE,
    "hidden_size": 64,
    "intermediate_size": 192,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-6,
    "initializer_range": 0.1,
    "tie_word_embeddings": False,
    "attention_dropout": 0.0,
    "use_cache": False,
    "pad_token_id": PAD_ID,
    "bos_token_id": None,
    "eos_token_id": ANSWER_ID,
}
"""The arguments of Qwen2Config. The engine uses these shapes too, without transformers."""

ROPE_THETA: Final = 100.0


@dataclasses.dataclass(frozen=True, slots=True)
class Settings:
    """The settings of a run; a checkpoint stores them, and refuses to resume with others."""

    algorithm: str = "grpo"
    """'grpo': group-relative advantages; 'ppo': a critic and generalised advantage estimation."""
    engine: str = "int8"
    """Compute type of the rollout engine."""
    world_size: int = 2
    seed: int = 0
    groups: int = 16
    """Puzzles per step; each group is assigned to one rank."""
    group_size: int = 4
    """Samples of one puzzle."""
    rounds: tuple[int, int] = (2, 4)
    """The minimal and maximal number of rounds of a sample."""
    round_tokens: int = 30
    """Token budget of the model in one round."""
    epochs: int = 2
    minibatches: int = 2
    learning_rate: float = 1e-3
    critic_learning_rate: float = 1e-3
    clip: float = 0.2
    kl_coefficient: float = 0.01
    entropy_coefficient: float = 0.0
    discount: float = 1.0
    gae_lambda: float = 0.95
    max_grad_norm: float = 1.0
    warmup_steps: int = 320
    """Supervised steps on worked examples before the first RL step: without them the random model
    never calls the calculator."""
    warmup_rows: int = 16
    warmup_learning_rate: float = 5e-3

    def __post_init__(self) -> None:
        if self.algorithm not in ALGORITHMS:
            raise ValueError(f"algorithm {self.algorithm!r}: expected one of {ALGORITHMS}")
        if self.engine not in ENGINES:
            raise ValueError(f"engine {self.engine!r}: expected one of {ENGINES}")
        if self.groups % (self.world_size * self.minibatches):
            raise ValueError(
                f"{self.groups} groups do not divide into {self.minibatches} mini-batches on "
                f"{self.world_size} ranks"
            )

    @classmethod
    def from_dict(cls, fields: Mapping[str, object]) -> Settings:
        """Return the settings from the result of `dataclasses.asdict`, also after JSON."""
        names = [field.name for field in dataclasses.fields(cls)]
        known: dict[str, Any] = {name: fields[name] for name in names if name in fields}
        if "rounds" in known:
            known["rounds"] = tuple(known["rounds"])
        return cls(**known)

    @property
    def samples(self) -> int:
        """Samples per step, over all ranks."""
        return self.groups * self.group_size


@dataclasses.dataclass(frozen=True, slots=True)
class Pause:
    """Makes one stage of one step last longer, so that the job can be killed in the middle."""

    step: int
    stage: str
    seconds: float


@dataclasses.dataclass(frozen=True, slots=True)
class PlantedNan:
    """Makes one module of one rank's policy return NaN for its first row, from a step on."""

    step: int
    rank: int
    module: str
    """Its name in the policy, such as 'model.layers.1.mlp.down_proj'."""

    @classmethod
    def parse(cls, text: str) -> PlantedNan:
        """Read `STEP:RANK:MODULE`."""
        step, _, rest = text.partition(":")
        rank, _, module = rest.partition(":")
        if not (step.isdecimal() and rank.isdecimal() and module):
            raise ValueError(f"{text!r}: expected STEP:RANK:MODULE")
        return cls(int(step), int(rank), module)


@dataclasses.dataclass(frozen=True, slots=True)
class EngineSwitch:
    """Makes the rollout engine compute in another type from a step on."""

    step: int
    engine: str

    @classmethod
    def parse(cls, text: str) -> EngineSwitch:
        """Read `STEP:ENGINE`."""
        step, _, engine = text.partition(":")
        if not step.isdecimal() or engine not in ENGINES:
            raise ValueError(f"{text!r}: expected STEP:{'|'.join(ENGINES)}")
        return cls(int(step), engine)


@dataclasses.dataclass(frozen=True, slots=True)
class SkippedSync:
    """Omits one weight from a step's sync: the engine keeps its old one."""

    step: int
    name: str
    """In the policy's state dict, such as 'model.layers.1.mlp.down_proj.weight'."""

    @classmethod
    def parse(cls, text: str) -> SkippedSync:
        """Read `STEP:NAME`."""
        step, _, name = text.partition(":")
        if not (step.isdecimal() and int(step) > 1 and name):
            raise ValueError(f"{text!r}: expected STEP:NAME, of a step from 2: there is one before")
        return cls(int(step), name)


@dataclasses.dataclass(frozen=True, slots=True)
class Troubles:
    """Faults that are injected into a training, so that the service can find them."""

    pause: Pause | None = None
    nan: PlantedNan | None = None
    switch: EngineSwitch | None = None
    skip: SkippedSync | None = None


NONE: Final = Troubles()
