"""What every engine answers, whichever shape its server has: tokens with their log-probs."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any, Final, Protocol

from stagescope.wire.errors import InvalidInput

Prompt = str | Sequence[int]
"""A text that the engine tokenises itself, or token ids that it takes as they are."""

MOST_TOKENS: Final = 1 << 17
"""Most tokens of one prompt, and most that are generated for it."""


@dataclasses.dataclass(frozen=True, slots=True)
class Sampling:
    """How tokens are drawn; temperature 0 is greedy.

    Attributes:
        max_tokens: most tokens for a prompt.
        temperature: divides the logits; 0 takes the likeliest token.
        top_p: smallest set of tokens of this probability; 1 keeps all.
        top_k: so many of the likeliest tokens; 0 keeps all.
        seed: of the draw, where the engine takes one; None: the engine's own.
        stop: texts at which to stop.
    """

    max_tokens: int = 64
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int | None = None
    stop: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        finite = math.isfinite(self.temperature) and self.temperature >= 0
        if not (1 <= self.max_tokens <= MOST_TOKENS and finite):
            raise InvalidInput(
                f"max_tokens is {self.max_tokens} and temperature {self.temperature}",
                expected=f"1 to {MOST_TOKENS} tokens, and a temperature from 0",
            )
        if not (0 < self.top_p <= 1 and self.top_k >= 0):
            raise InvalidInput(
                f"top_p is {self.top_p} and top_k {self.top_k}",
                expected="a top_p over 0 and up to 1, a top_k from 0",
            )

    @property
    def cuts(self) -> bool:
        """Whether tokens are left out before the draw."""
        return self.top_p < 1 or self.top_k > 0


@dataclasses.dataclass(frozen=True, slots=True)
class Generation:
    """What an engine made of one prompt.

    Attributes:
        text: the tokens as text.
        tokens: each token's text, where the server says it.
        token_ids: their ids; None where the server gives none.
        log_probs: natural logarithm of each token's probability, as long as the tokens; NaN where
            the server gave none.
        prompt_tokens: how many tokens the engine read as the prompt; None: not said.
        finish_reason: "stop", "length" or the server's own word.
        weight_version: of the weights that answered, where the server says it.
        problem: why log-probs and tokens cannot be used; "" where they can.
    """

    text: str
    tokens: tuple[str, ...] = ()
    token_ids: tuple[int, ...] | None = None
    log_probs: tuple[float, ...] = ()
    prompt_tokens: int | None = None
    finish_reason: str | None = None
    weight_version: str | None = None
    problem: str = ""


@dataclasses.dataclass(frozen=True, slots=True)
class EngineInfo:
    """What is known of an engine; unknown is None or "".

    Attributes:
        kind: "vllm", "sglang", "llama.cpp", "openai" (another server of that shape),
            "transformers" or "ctranslate2".
        place: its URL, or its directory.
        model: as requests must name it.
        model_path: where its weights come from, as the server says.
        version: of the engine.
        dtype, quantisation: of its weights, where it says them.
        processed: whether log-probs are those after temperature and cuts.
        multimodal: whether it takes images.
        scores: whether it gives log-probs of given tokens.
        max_length: most tokens of prompt and answer.
        architectures: of the model, as the server says.
        weight_version: of the weights that it holds.
        settings: what else it said of itself that matters here, plain JSON values.
    """

    kind: str
    place: str
    model: str | None = None
    model_path: str | None = None
    version: str | None = None
    dtype: str | None = None
    quantisation: str | None = None
    processed: bool | None = None
    multimodal: bool | None = None
    scores: bool | None = None
    max_length: int | None = None
    architectures: tuple[str, ...] = ()
    weight_version: str | None = None
    settings: Mapping[str, Any] = dataclasses.field(default_factory=dict)


class Engine(Protocol):
    """An inference engine, remote or in this process."""

    @property
    def info(self) -> EngineInfo:
        """What is known of it."""
        ...

    def generate(
        self, prompts: Sequence[Prompt], sampling: Sampling | None = None
    ) -> list[Generation]:
        """Continue each prompt; by default greedily, for 64 tokens.

        Raises:
            EngineError: it cannot be reached, refuses, or answers what cannot be read.
        """
        ...

    def score(self, rows: Sequence[Sequence[int]]) -> list[tuple[float, ...]]:
        """Return, for each row of token ids, log p(token t | tokens before t); NaN for the first.

        At temperature 1, over the whole vocabulary.

        Raises:
            EngineError: as `generate`, or where it gives no log-probs of given tokens.
        """
        ...

    def close(self) -> None:
        """Let go of connections or memory."""
        ...


def check_prompt(prompt: Prompt) -> str | list[int]:
    """Return `prompt`, ids as a list of ints.

    Raises:
        InvalidInput: it is empty, too long, or holds what is no token id.
    """
    if not isinstance(prompt, str):
        return check_ids(prompt)
    if not prompt:
        raise InvalidInput("a prompt is empty", expected="a text, or token ids")
    return prompt


def check_ids(row: Sequence[int]) -> list[int]:
    """Return token ids as a list.

    Raises:
        InvalidInput: there are none, too many, or what is no token id.
    """
    ids = list(row)
    wrong = [token for token in ids if type(token) is not int or not 0 <= token < 1 << 31]
    if not ids or len(ids) > MOST_TOKENS or wrong:
        what = f"{wrong[0]!r:.50} is no token id" if wrong else f"{len(ids)} token ids"
        raise InvalidInput(what, expected=f"1 to {MOST_TOKENS} ids from 0")
    return ids


_VISION_PARTS: Final = (
    "vision_config", "vision_tower_config", "visual", "vision_encoder", "vision_model",
    "mm_vision_tower", "vision_tower", "vit_config",
)  # fmt: skip
_OFF_BY_DEFAULT: Final = (
    "Gemma3ForConditionalGeneration",
    "Llama4ForConditionalGeneration",
    "Step3VLForConditionalGeneration",
)
"""Whose images SGLang leaves out unless it is started with `--enable-multimodal`."""


def vision_part(config: Mapping[str, Any]) -> str | None:
    """Return the part of a model's config.json that sees images; None where there is none."""
    for name in _VISION_PARTS:
        if config.get(name):
            return name
    return None


def multimodal_warning(info: EngineInfo, config: Mapping[str, Any]) -> str | None:
    """Return what to say where an engine holds a model that sees images and takes none.

    Args:
        info: the engine.
        config: the model's config.json, as a mapping.
    """
    part = vision_part(config)
    if part is None or info.multimodal:
        return None
    architectures = config.get("architectures")
    names = info.architectures or tuple(
        map(str, architectures if isinstance(architectures, list) else ())
    )
    model = names[0] if names else str(config.get("model_type") or "the model")
    if info.multimodal is False:
        how = "; start SGLang with --enable-multimodal" if info.kind == "sglang" else ""
        return f"{model} has a {part}, and {info.kind} at {info.place} takes no images{how}"
    if info.kind == "sglang":
        default = " (its default for this model)" if model in _OFF_BY_DEFAULT else ""
        return (
            f"{model} has a {part}, and SGLang at {info.place} does not say that multimodal is "
            f"on{default}; start it with --enable-multimodal where images matter"
        )
    return None
