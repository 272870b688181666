"""Compares two engines on the same prompts and the same sampled tokens."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Final, NamedTuple, Protocol, runtime_checkable

import numpy as np

from stagescope_wire.engines import (
    Engine,
    EngineInfo,
    Generation,
    Sampling,
    is_processed,
    multimodal_warning,
)
from stagescope_wire.engines.base import Prompt
from stagescope_wire.errors import InvalidInput
from stagescope_wire.nonfinite import JsonObject
from stagescope_workers.consistency.prompts import (
    AnswerAgreement,
    Item,
    Marking,
    Tokenizer,
    compare_answers,
    data_url,
    token_ids,
)
from stagescope_workers.consistency.scored import (
    Check,
    Scored,
    WorstToken,
    check_bos,
    check_prompts,
    check_shift,
    check_vocabulary,
    numbers,
    worst_tokens,
)


@runtime_checkable
class ScoresAtTemperature(Protocol):
    """An engine that can also score at a temperature."""

    def score_at(
        self, rows: Sequence[Sequence[int]], temperature: float
    ) -> list[tuple[float, ...]]:
        """Return log-probs after the logits were divided by `temperature`."""
        ...


@runtime_checkable
class Chats(Protocol):
    """An engine that accepts messages with images."""

    def chat(
        self, conversations: Sequence[Sequence[JsonObject]], sampling: Sampling
    ) -> list[Generation]:
        """Answer each conversation."""
        ...


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """The options of a comparison.

    Attributes:
        sampling: how the engine samples.
        chat: whether texts are rendered as a user's message by the model's template.
        as_text: whether the engine receives texts and tokenises them itself, else token ids.
        answers: whether the other side answers too, and both answers are compared.
        marking: when an answer is right.
        config: the model's config.json, which may mention images.
    """

    sampling: Sampling
    chat: bool = False
    as_text: bool = False
    answers: bool = False
    marking: Marking = dataclasses.field(default_factory=Marking)
    config: JsonObject = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True, kw_only=True)
class EngineComparison:
    """The result of a comparison.

    Attributes:
        engine, other: the two sides; the engine sampled the tokens.
        sampling: how the tokens were sampled.
        rows: the tokens with both log-probs.
        numbers: the numbers by published name; see `scored.numbers`.
        worst: the tokens that differ most.
        checks: whether both sides processed the same tokens.
        left_out: prompt -> why its answer has no log-probs to compare.
        streams: provenance of "rollout" (the engine's) and "old" (the other side's).
        agreement: agreement of both sides' answers; None where only one answered.
        warnings: further remarks for the user.
        stored: the stored step of the tokens; "" where the engine sampled them here.
    """

    engine: EngineInfo
    other: EngineInfo
    sampling: Sampling
    rows: tuple[Scored, ...]
    numbers: Mapping[str, float]
    worst: tuple[WorstToken, ...]
    checks: tuple[Check, ...]
    left_out: Mapping[str, str]
    streams: Mapping[str, JsonObject]
    agreement: AnswerAgreement | None = None
    warnings: tuple[str, ...] = ()
    stored: str = ""

    @property
    def aligned(self) -> bool:
        """Whether no check failed, and there are tokens or answers to compare."""
        return all(check.ok is not False for check in self.checks) and bool(
            self.rows or self.agreement
        )


def compare(
    items: Sequence[Item],
    engine: Engine,
    other: Engine,
    tokenizer: Tokenizer,
    options: Options,
    *,
    on_progress: Callable[[str], None] = lambda text: None,
) -> EngineComparison:
    """Sample answers with `engine`, and compare both sides' log-probs of each sampled token.

    Args:
        items: the prompts.
        engine: the engine that serves rollouts.
        other: the engine to compare with; it must score given tokens.
        tokenizer: the model's tokenizer, from transformers.
        options: see there.
        on_progress: called with a description of each activity.

    Raises:
        EngineError: an engine cannot be reached, refuses, or cannot do this.
        InvalidInput: prompts that do not fit the model.
    """
    texts = [item for item in items if item.image is None]
    images = [item for item in items if item.image is not None]
    generations, prompts = _generate(texts, engine, tokenizer, options, on_progress)
    usable, left_out = _usable(texts, prompts, generations, tokenizer)
    info, unclear = _processing(engine, options.sampling)
    rows, is_scaled = _score(usable, info, other, options.sampling, on_progress)
    agreements = []
    if options.answers:
        on_progress(f"{other.info.kind} answers {len(texts)} prompts")
        answered = other.generate(prompts, options.sampling) if texts else []
        agreements = [*zip(texts, generations, answered, strict=True)]
    if images:
        on_progress(f"both sides answer {len(images)} prompts with images")
        agreements += zip(images, *_chat(images, engine, other, options), strict=True)
    agreement = None
    if agreements:
        questions, answers, other_answers = zip(*agreements, strict=True)
        agreement = compare_answers(questions, answers, other_answers, options.marking)
    checks = _checks(prompts, generations, rows, engine, tokenizer, options) if texts else ()
    warning = multimodal_warning(info, options.config)
    return EngineComparison(
        engine=info,
        other=other.info,
        sampling=options.sampling,
        rows=tuple(rows),
        numbers=numbers(rows),
        worst=tuple(worst_tokens(rows, lambda token: tokenizer.decode([token]))),
        checks=checks,
        left_out=left_out,
        streams=stream_provenance(info, other.info, options.sampling, is_scaled),
        agreement=agreement,
        warnings=tuple(each for each in (warning, unclear) if each is not None),
    )


def _processing(engine: Engine, sampling: Sampling) -> tuple[EngineInfo, str | None]:
    """Return the engine's description with `processed`, where it matters, and a warning."""
    info = engine.info
    if info.processed is not None or (sampling.temperature in (0.0, 1.0) and not sampling.cuts):
        return info, None
    processed = is_processed(engine)
    warning = None
    if processed is None:
        warning = (
            f"{info.kind} at {info.place} does not show whether its log-probs are after "
            "temperature. They are compared as raw ones. With --temperature 1 both are the same"
        )
    return dataclasses.replace(info, processed=processed), warning


def _generate(
    items: Sequence[Item],
    engine: Engine,
    tokenizer: Tokenizer,
    options: Options,
    on_progress: Callable[[str], None],
) -> tuple[list[Generation], list[list[int]]]:
    prompts = [token_ids(item, tokenizer, chat=options.chat) for item in items]
    sent: list[Prompt] = [*prompts]
    if options.as_text:
        sent = [
            prompt if item.ids is not None else _as_text(item, tokenizer, options.chat)
            for item, prompt in zip(items, prompts, strict=True)
        ]
    if not items:
        return [], []
    on_progress(f"{engine.info.kind} answers {len(items)} prompts")
    return engine.generate(sent, options.sampling), prompts


def _as_text(item: Item, tokenizer: Tokenizer, chat: bool) -> str:
    if item.messages is None and not chat:
        return item.prompt or ""
    messages = item.messages or ({"role": "user", "content": item.prompt},)
    rendered: str = tokenizer.apply_chat_template(
        list(messages), add_generation_prompt=True, tokenize=False
    )
    return rendered


class _Usable(NamedTuple):
    item: Item
    prompt: Sequence[int]
    ids: tuple[int, ...]
    generation: Generation


def _usable(
    items: Sequence[Item],
    prompts: Sequence[Sequence[int]],
    generations: Sequence[Generation],
    tokenizer: Tokenizer,
) -> tuple[list[_Usable], dict[str, str]]:
    usable: list[_Usable] = []
    problems: dict[str, str] = {}
    for item, prompt, each in zip(items, prompts, generations, strict=True):
        ids = each.token_ids or _recovered_ids(each, tokenizer)
        problem = each.problem or ("" if ids else "the engine returned no token ids")
        if problem:
            problems[item.name] = problem
        else:
            usable.append(_Usable(item, prompt, ids, each))
    return usable, problems


def _score(
    usable: Sequence[_Usable],
    engine: EngineInfo,
    other: Engine,
    sampling: Sampling,
    on_progress: Callable[[str], None],
) -> tuple[list[Scored], bool]:
    """Return the answers with both log-probs, and whether `other` applied the temperature."""
    tokens = [[*each.prompt, *each.ids] for each in usable]
    temperature = sampling.temperature
    is_scaled = bool(engine.processed) and temperature not in (0.0, 1.0)
    if tokens:
        on_progress(f"{other.info.kind} scores {sum(map(len, tokens))} tokens")
    if is_scaled and isinstance(other, ScoresAtTemperature):
        scores = other.score_at(tokens, temperature)
    else:
        scores, is_scaled = other.score(tokens), False
    rows = [
        Scored(
            name=each.item.name,
            prompt=tuple(each.prompt),
            ids=each.ids,
            q=np.array(each.generation.log_probs, dtype=np.float64),
            p=np.array(values[len(each.prompt) :], dtype=np.float64),
        )
        for each, values in zip(usable, scores, strict=True)
    ]
    return rows, is_scaled


def _recovered_ids(generation: Generation, tokenizer: Tokenizer) -> tuple[int, ...]:
    """Return the ids of an answer whose server returns only texts; () where uncertain."""
    ids = tokenizer(generation.text, add_special_tokens=False)["input_ids"]
    if len(ids) != len(generation.log_probs):
        return ()
    texts = [tokenizer.decode([token]) for token in ids]
    return tuple(ids) if texts == list(generation.tokens) else ()


_ALIGNMENT: Final = "a log-prob at its own token; the prompt left out"


def stream_provenance(
    engine: EngineInfo, other: EngineInfo, sampling: Sampling, scaled: bool
) -> dict[str, dict[str, object]]:
    """Return the provenance of both sides' log-probs, as the payload's `streams`.

    Args:
        engine, other: the two sides.
        sampling: how the tokens were sampled.
        scaled: whether the other side's are after the temperature, too.
    """
    rollout = {
        **_side(engine),
        "processed": bool(engine.processed),
        "temperature": float(sampling.temperature),
        "top_p": float(sampling.top_p),
        "top_k": sampling.top_k,
        "alignment": _ALIGNMENT,
    }
    old = {
        **_side(other),
        "processed": scaled,
        "temperature": float(sampling.temperature) if scaled else 1.0,
        "alignment": _ALIGNMENT,
    }
    return {"rollout": rollout, "old": old}


def _side(info: EngineInfo) -> dict[str, object]:
    fields = {
        "producer": info.place,
        "engine": info.kind,
        "engine_version": info.version,
        "quantisation": info.quantisation,
    }
    return {name: value for name, value in fields.items() if value is not None}


def _chat(
    items: Sequence[Item], engine: Engine, other: Engine, options: Options
) -> tuple[list[Generation], list[Generation]]:
    if not isinstance(engine, Chats) or not isinstance(other, Chats):
        side = other if isinstance(engine, Chats) else engine
        raise InvalidInput(
            f"{len(items)} prompts have images, and {side.info.kind} accepts none",
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
    generations: Sequence[Generation],
    rows: Sequence[Scored],
    engine: Engine,
    tokenizer: Tokenizer,
    options: Options,
) -> tuple[Check, ...]:
    vocabulary = getattr(engine, "vocabulary", ())
    sent = "texts, which the engine tokenised" if options.as_text else "token ids"
    form = "rendered by the model's chat template" if options.chat else "as they stand"
    return (
        Check("sent", True, f"{sent}; prompts {form}"),
        check_prompts(prompts, generations, tokenizer),
        check_bos(prompts, tokenizer),
        check_vocabulary(generations, tokenizer, vocabulary),
        check_shift(rows),
    )
