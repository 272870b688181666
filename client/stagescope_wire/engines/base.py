"""The interface of all inference engines: tokens with their log-probs."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Final, Protocol

from stagescope_wire.errors import InvalidInput
from stagescope_wire.nonfinite import Json, JsonObject

Prompt = str | Sequence[int]
"""A text, which the engine tokenises, or token ids, which it uses unchanged."""

MAX_TOKENS: Final = 1 << 17
"""Most tokens of one prompt, and most generated tokens."""


@dataclasses.dataclass(frozen=True, slots=True)
class Sampling:
    """How tokens are sampled; temperature 0 is greedy.

    Attributes:
        max_tokens: most generated tokens per prompt.
        temperature: divides the logits; 0 selects the most likely token.
        top_p: sample from the smallest set of tokens with this probability; 1 keeps all.
        top_k: sample from this number of most likely tokens; 0 keeps all.
        seed: seed of the sampling, if the engine supports one; None: the engine's own.
        stop: texts at which to stop.
        salt: prompts share a prefix cache only with prompts of the same salt. With a new salt the
            engine computes the whole prompt. None: the cache that all requests share.
        likeliest: number of likeliest tokens whose log-probs are also returned, at most 20.
    """

    max_tokens: int = 64
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    salt: str | None = None
    likeliest: int = 0

    def __post_init__(self) -> None:
        finite = math.isfinite(self.temperature) and self.temperature >= 0
        if not (1 <= self.max_tokens <= MAX_TOKENS and finite):
            raise InvalidInput(
                f"max_tokens is {self.max_tokens} and temperature {self.temperature}",
                expected=f"1 to {MAX_TOKENS} tokens, and a temperature from 0",
            )
        if not (0 < self.top_p <= 1 and self.top_k >= 0):
            raise InvalidInput(
                f"top_p is {self.top_p} and top_k {self.top_k}",
                expected="a top_p over 0 and up to 1, a top_k from 0",
            )

    @property
    def cuts(self) -> bool:
        """Whether top_p or top_k exclude tokens."""
        return self.top_p < 1 or self.top_k > 0

    def optional(self, seed: str = "seed") -> dict[str, Json]:
        """Return the seed, under this name, and the stop texts of a request, where they are set."""
        fields: dict[str, Json] = {} if self.seed is None else {seed: self.seed}
        return fields | ({"stop": list(self.stop)} if self.stop else {})


GREEDY: Final = Sampling()


@dataclasses.dataclass(frozen=True, slots=True)
class Generation:
    """The tokens that an engine generated for one prompt.

    Attributes:
        text: the tokens as text.
        tokens: each token's text, if the server returns it.
        token_ids: their ids; None if the server returns none.
        log_probs: natural logarithm of each token's probability; NaN if the server returned none.
        prompt_tokens: number of tokens of the prompt; None if unknown.
        prompt_ids: ids of the prompt as the engine processed it; None if the server returns none.
        finish_reason: "stop", "length" or the server's own value.
        weight_version: version of the weights that answered, if the server returns it.
        likeliest: the log-probs of the likeliest tokens in the place of each token, the largest
            first; () if they were not requested or the server returned none.
        problem: why log-probs and tokens cannot be used; "" if they can.
    """

    text: str
    tokens: tuple[str, ...] = ()
    token_ids: tuple[int, ...] | None = None
    log_probs: tuple[float, ...] = ()
    prompt_tokens: int | None = None
    prompt_ids: tuple[int, ...] | None = None
    finish_reason: str | None = None
    weight_version: str | None = None
    likeliest: tuple[tuple[float, ...], ...] = ()
    problem: str = ""


@dataclasses.dataclass(frozen=True, slots=True)
class EngineInfo:
    """The description of an engine; unknown values are None or empty.

    Attributes:
        kind: "vllm", "sglang", "llama.cpp", "openai" (another compatible server), "transformers"
            or "ctranslate2".
        place: its URL, or its directory.
        model: the model's name in requests.
        model_path: origin of its weights, as the server reports it.
        version: version of the engine.
        dtype, quantisation: of its weights.
        processed: whether log-probs are after temperature, top_p and top_k; see `is_processed`.
        multimodal: whether it accepts images.
        scores: whether it returns log-probs of given tokens.
        max_length: most tokens of prompt and answer.
        adapters: names of the LoRA adapters that it serves beside the model.
        architectures: of the model, as the server reports them.
        weight_version: version of its weights.
        settings: other relevant settings that it reports, plain JSON values.
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
    adapters: tuple[str, ...] = ()
    architectures: tuple[str, ...] = ()
    weight_version: str | None = None
    settings: JsonObject = dataclasses.field(default_factory=dict)


class Engine(Protocol):
    """An inference engine, remote or in this process."""

    @property
    def info(self) -> EngineInfo:
        """The description of the engine."""
        ...

    def generate(self, prompts: Sequence[Prompt], sampling: Sampling = GREEDY) -> list[Generation]:
        """Continue each prompt; by default greedily, for 64 tokens.

        Raises:
            EngineError: it cannot be reached, refuses, or its answer cannot be read.
        """
        ...

    def score(self, rows: Sequence[Sequence[int]]) -> list[tuple[float, ...]]:
        """Return, for each row of token ids, log p(token t | tokens before t); NaN for the first.

        At temperature 1, over the whole vocabulary, in one forward pass (prefill). vLLM and SGLang
        read nothing from their prefix cache for it.

        Raises:
            EngineError: as `generate`, or it returns no log-probs of given tokens.
        """
        ...

    def close(self) -> None:
        """Release connections or memory."""
        ...


_COLD: Final = 0.05
"""A temperature at which a processed log-prob of the likeliest token is nearly 0."""


def is_processed(engine: Engine) -> bool | None:
    """Measure whether the engine's log-probs are after temperature; None if that is unclear.

    Two short answers: at temperature 0 and, with nearly the same tokens, at a temperature of 0.05.
    A raw log-prob is the same in both. A processed one is nearly 0 in the second.

    Raises:
        EngineError: as `Engine.generate`.
    """
    asked = [Sampling(max_tokens=8, temperature=each, seed=0) for each in (0.0, _COLD)]
    greedy, cold = (engine.generate([_PROBED], each)[0] for each in asked)
    pairs = []
    for token, other, raw, seen in zip(
        greedy.token_ids or greedy.tokens,
        cold.token_ids or cold.tokens,
        greedy.log_probs,
        cold.log_probs,
        strict=False,
    ):
        if token != other:
            break
        pairs.append((raw, seen))
    size = sum(abs(raw) for raw, _ in pairs)
    difference = sum(abs(raw - seen) for raw, seen in pairs)
    if not math.isfinite(size + difference) or size < _CLEAR * len(pairs) or not pairs:
        return None
    if difference > _MOST * size:
        return True
    return False if difference < (1 - _MOST) * size else None


_PROBED: Final = tuple(range(2, 10))
_CLEAR: Final = 0.01
"""Nats a token: a model that is surer of its tokens shows no temperature."""
_MOST: Final = 0.5


def check_prompt(prompt: Prompt) -> str | list[int]:
    """Return `prompt`, ids as a list of ints.

    Raises:
        InvalidInput: it is empty, too long, or contains an invalid token id.
    """
    if not isinstance(prompt, str):
        return check_ids(prompt)
    if not prompt:
        raise InvalidInput("a prompt is empty", expected="a text, or token ids")
    return prompt


def check_ids(row: Sequence[int]) -> list[int]:
    """Return token ids as a list.

    Raises:
        InvalidInput: there are none, too many, or one is invalid.
    """
    ids = list(row)
    wrong = [token for token in ids if type(token) is not int or not 0 <= token < 1 << 31]
    if not ids or len(ids) > MAX_TOKENS or wrong:
        what = f"{wrong[0]!r:.50} is not a token id" if wrong else f"{len(ids)} token ids"
        raise InvalidInput(what, expected=f"1 to {MAX_TOKENS} ids from 0")
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
"""Models whose images SGLang ignores unless it is started with `--enable-multimodal`."""


def vision_part(config: JsonObject) -> str | None:
    """Return the name of the vision part in a model's config.json; None if it has none."""
    for name in _VISION_PARTS:
        if config.get(name):
            return name
    return None


def multimodal_warning(info: EngineInfo, config: JsonObject) -> str | None:
    """Return a warning if the engine of a model with a vision part accepts no images, else None.

    Args:
        info: the engine's description.
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
        return f"{model} has a {part}, and {info.kind} at {info.place} accepts no images{how}"
    if info.kind == "sglang":
        default = " (its default for this model)" if model in _OFF_BY_DEFAULT else ""
        return (
            f"{model} has a {part}, and SGLang at {info.place} does not say that multimodal is "
            f"on{default}; start it with --enable-multimodal where images matter"
        )
    return None
