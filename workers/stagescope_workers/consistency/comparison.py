"""The same prompts and the same sampled tokens through two engines."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import numpy as np

from stagescope.engines import Engine, EngineInfo, Generation, Sampling, multimodal_warning
from stagescope.engines.base import Prompt
from stagescope.wire.errors import InvalidInput
from stagescope_workers.consistency.alignment import (
    Check,
    check_bos,
    check_prompts,
    check_shift,
    check_vocabulary,
)
from stagescope_workers.consistency.answers import Agreement, Marking, compare_answers
from stagescope_workers.consistency.prompts import Item, data_url, token_ids
from stagescope_workers.consistency.scored import (
    Scored,
    WorstToken,
    numbers,
    worst_tokens,
)


@runtime_checkable
class ScoresAtTemperature(Protocol):
    """An engine that scores at a temperature, too."""

    def score_at(
        self, rows: Sequence[Sequence[int]], temperature: float
    ) -> list[tuple[float, ...]]:
        """Return log-probs after the logits were divided by `temperature`."""
        ...


@runtime_checkable
class Chats(Protocol):
    """An engine that takes messages with images."""

    def chat(
        self, conversations: Sequence[Sequence[Mapping[str, Any]]], sampling: Sampling | None = None
    ) -> list[Generation]:
        """Answer each conversation."""
        ...


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """What is compared, and how.

    Attributes:
        sampling: how the engine draws.
        chat: texts are rendered as a user's message by the model's template.
        as_text: the engine is sent texts and tokenises them itself, else token ids.
        answers: the other side answers too, and both answers are compared.
        marking: when an answer is right.
    """

    sampling: Sampling
    chat: bool = False
    as_text: bool = False
    answers: bool = False
    marking: Marking = dataclasses.field(default_factory=Marking)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Comparison:
    """What came of it.

    Attributes:
        engine, other: the two sides; the engine sampled the tokens.
        sampling: how.
        rows: the tokens with both log-probs.
        numbers: by published name; see `scored.numbers`.
        worst: the tokens that differ most.
        checks: whether both sides speak of the same tokens.
        left_out: prompt -> why its answer has no log-probs that could be compared.
        streams: provenance of "rollout" (the engine's) and "old" (the other side's).
        agreement: of both sides' answers; None where only one answered.
        warnings: what else people should know.
        stored: which stored step the tokens are of; "" where the engine sampled them here.
    """

    engine: EngineInfo
    other: EngineInfo
    sampling: Sampling
    rows: tuple[Scored, ...]
    numbers: Mapping[str, float]
    worst: tuple[WorstToken, ...]
    checks: tuple[Check, ...]
    left_out: Mapping[str, str]
    streams: Mapping[str, Mapping[str, Any]]
    agreement: Agreement | None = None
    warnings: tuple[str, ...] = ()
    stored: str = ""

    @property
    def aligned(self) -> bool:
        """Whether no check failed, and something was measured or answered."""
        return all(check.ok is not False for check in self.checks) and bool(
            self.rows or self.agreement
        )


def compare(
    items: Sequence[Item],
    engine: Engine,
    other: Engine,
    tokenizer: Any,
    options: Options,
    *,
    config: Mapping[str, Any] | None = None,
    tell: Callable[[str], None] = lambda text: None,
) -> Comparison:
    """Let `engine` answer, and both sides say the log-prob of each token that it sampled.

    Args:
        items: the prompts.
        engine: what serves rollouts.
        other: what it is held against; it must score given tokens.
        tokenizer: of the model, from transformers.
        options: how.
        config: the model's config.json, for what it says of images.
        tell: called with what is being done.

    Raises:
        EngineError: an engine cannot be reached, refuses, or cannot do this.
        InvalidInput: prompts that do not fit the model.
    """
    texts = [item for item in items if item.image is None]
    images = [item for item in items if item.image is not None]
    made, prompts = _generated(texts, engine, tokenizer, options, tell)
    rows, left_out, streams = _scored(
        texts, prompts, made, engine.info, other, tokenizer, options, tell
    )
    agreements = []
    if options.answers:
        tell(f"{other.info.kind} answers {len(texts)} prompts")
        answered = other.generate(prompts, options.sampling) if texts else []
        agreements = [*zip(texts, made, answered, strict=True)]
    if images:
        tell(f"both sides answer {len(images)} prompts with images")
        agreements += zip(images, *_seen(images, engine, other, options), strict=True)
    agreement = None
    if agreements:
        asked, ours, theirs = zip(*agreements, strict=True)
        agreement = compare_answers(asked, ours, theirs, options.marking)
    checks = _checks(prompts, made, rows, engine, tokenizer, options) if texts else ()
    warning = multimodal_warning(engine.info, config or {})
    return Comparison(
        engine=engine.info,
        other=other.info,
        sampling=options.sampling,
        rows=tuple(rows),
        numbers=numbers(rows),
        worst=tuple(worst_tokens(rows, lambda token: tokenizer.decode([token]))),
        checks=checks,
        left_out=left_out,
        streams=streams,
        agreement=agreement,
        warnings=() if warning is None else (warning,),
    )


def _generated(
    items: Sequence[Item],
    engine: Engine,
    tokenizer: Any,
    options: Options,
    tell: Callable[[str], None],
) -> tuple[list[Generation], list[list[int]]]:
    """Return the engine's answers, and the tokens of the prompts as the tokenizer makes them."""
    prompts = [token_ids(item, tokenizer, chat=options.chat) for item in items]
    sent: list[Prompt] = [*prompts]
    if options.as_text:
        sent = [
            prompt if item.ids is not None else _as_text(item, tokenizer, options.chat)
            for item, prompt in zip(items, prompts, strict=True)
        ]
    if not items:
        return [], []
    tell(f"{engine.info.kind} answers {len(items)} prompts")
    return engine.generate(sent, options.sampling), prompts


def _as_text(item: Item, tokenizer: Any, chat: bool) -> str:
    """Return the prompt as a program sends it that leaves tokens to the engine."""
    if item.messages is None and not chat:
        return item.prompt or ""
    messages = item.messages or ({"role": "user", "content": item.prompt},)
    rendered: str = tokenizer.apply_chat_template(
        list(messages), add_generation_prompt=True, tokenize=False
    )
    return rendered


def _scored(
    items: Sequence[Item],
    prompts: Sequence[Sequence[int]],
    made: Sequence[Generation],
    engine: EngineInfo,
    other: Engine,
    tokenizer: Any,
    options: Options,
    tell: Callable[[str], None],
) -> tuple[list[Scored], dict[str, str], dict[str, dict[str, Any]]]:
    usable: list[tuple[Item, Sequence[int], tuple[int, ...], Generation]] = []
    left_out: dict[str, str] = {}
    for item, prompt, each in zip(items, prompts, made, strict=True):
        ids = each.token_ids or _ids_of(each, tokenizer)
        problem = each.problem or ("" if ids else "the engine gave no token ids")
        if problem:
            left_out[item.name] = problem
        else:
            usable.append((item, prompt, ids, each))
    given = [[*prompt, *ids] for _, prompt, ids, _ in usable]
    temperature = options.sampling.temperature
    scaled = bool(engine.processed) and temperature not in (0.0, 1.0)
    if given:
        tell(f"{other.info.kind} scores {sum(map(len, given))} tokens")
    if scaled and isinstance(other, ScoresAtTemperature):
        scores = other.score_at(given, temperature)
    else:
        scores, scaled = other.score(given), False
    rows = [
        Scored(
            name=item.name,
            prompt=tuple(prompt),
            ids=ids,
            q=np.array(each.log_probs, dtype=np.float64),
            p=np.array(values[len(prompt) :], dtype=np.float64),
        )
        for (item, prompt, ids, each), values in zip(usable, scores, strict=True)
    ]
    return rows, left_out, streams_of(engine, other.info, options.sampling, scaled)


def _ids_of(made: Generation, tokenizer: Any) -> tuple[int, ...]:
    """Return the ids of an answer whose server gives texts alone; () where it is not certain."""
    ids = tokenizer(made.text, add_special_tokens=False)["input_ids"]
    if len(ids) != len(made.log_probs):
        return ()
    own = [tokenizer.decode([token]) for token in ids]
    return tuple(ids) if own == list(made.tokens) else ()


def streams_of(
    engine: EngineInfo, other: EngineInfo, drawn: Sampling, scaled: bool
) -> dict[str, dict[str, Any]]:
    """Return the provenance of both sides' log-probs, as payloads say it.

    Args:
        engine, other: the two sides.
        drawn: how the tokens were drawn.
        scaled: whether the other side's are after the temperature, too.
    """
    rollout = {
        **_side(engine),
        "processed": bool(engine.processed),
        "temperature": float(drawn.temperature),
        "top_p": float(drawn.top_p),
        "top_k": drawn.top_k,
        "alignment": "a log-prob at its own token; the prompt left out",
    }
    old = {
        **_side(other),
        "processed": scaled,
        "temperature": float(drawn.temperature) if scaled else 1.0,
        "alignment": "a log-prob at its own token; the prompt left out",
    }
    return {"rollout": rollout, "old": old}


def _side(info: EngineInfo) -> dict[str, Any]:
    said = {
        "producer": info.place,
        "engine": info.kind,
        "engine_version": info.version,
        "quantisation": info.quantisation,
    }
    return {name: value for name, value in said.items() if value is not None}


def _seen(
    items: Sequence[Item], engine: Engine, other: Engine, options: Options
) -> tuple[list[Generation], list[Generation]]:
    """Return both sides' answers to prompts with images."""
    if not isinstance(engine, Chats) or not isinstance(other, Chats):
        side = other if isinstance(engine, Chats) else engine
        raise InvalidInput(
            f"{len(items)} prompts have images, and {side.info.kind} takes none",
            expected="an engine over HTTP and transformers",
        )
    sent, local = [], []
    for item in items:
        assert item.image is not None
        if item.messages is not None or item.prompt is None:
            raise InvalidInput(
                f"prompt {item.name} has an image and no text", expected="prompt and image"
            )
        text = {"type": "text", "text": item.prompt}
        url = {"type": "image_url", "image_url": {"url": data_url(item.image)}}
        sent.append([{"role": "user", "content": [url, text]}])
        local.append(
            [{"role": "user", "content": [{"type": "image", "path": str(item.image)}, text]}]
        )
    return engine.chat(sent, options.sampling), other.chat(local, options.sampling)


def _checks(
    prompts: Sequence[Sequence[int]],
    made: Sequence[Generation],
    rows: Sequence[Scored],
    engine: Engine,
    tokenizer: Any,
    options: Options,
) -> tuple[Check, ...]:
    words = getattr(engine, "vocabulary", ())
    sent = "texts, which the engine tokenised" if options.as_text else "token ids"
    how = "rendered by the model's chat template" if options.chat else "as they stand"
    return (
        Check("sent", True, f"{sent}; prompts {how}"),
        check_prompts(prompts, made),
        check_bos(prompts, tokenizer),
        check_vocabulary(made, tokenizer, words),
        check_shift(rows),
    )
