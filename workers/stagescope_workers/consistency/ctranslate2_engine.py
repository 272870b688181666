"""A CTranslate2 directory as an engine in this process."""

from __future__ import annotations

import functools
import importlib.metadata
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from stagescope_wire.engines import EngineInfo, Generation, Prompt, Sampling
from stagescope_wire.engines.base import GREEDY, check_ids
from stagescope_wire.errors import EngineError, InvalidInput, MissingExtra, NotFound
from stagescope_wire.versions import install_command

try:
    import ctranslate2
except ImportError as error:
    raise MissingExtra(
        "an engine of CTranslate2 needs ctranslate2, which is not installed",
        advice=f"pip install ctranslate2, or {install_command('example')}",
    ) from error

_MAX_VOCABULARY_BYTES: Final = 64 << 20


class CTranslate2Engine:
    """A converted model; it accepts only token ids, since the directory has no tokenizer.

    Raises:
        NotFound: no such directory, or not one of CTranslate2.
    """

    def __init__(self, path: Path, *, device: str = "cpu", compute_type: str = "default") -> None:
        if not (path / "model.bin").is_file():
            raise NotFound(
                f"{str(path)!r} is not a directory of CTranslate2",
                expected="model.bin and config.json",
            )
        try:
            self.vocabulary = _vocabulary(path)
            """The tokens, by id."""
            config = json.loads((path / "config.json").read_text())
            self._open = functools.partial(
                ctranslate2.Generator, str(path), device=device, compute_type=compute_type
            )
            self._generator: Any = self._open()
        except (OSError, ValueError, RuntimeError) as error:
            text = " ".join(str(error).split())[:300]
            raise NotFound(f"{str(path)!r} cannot be loaded: {text}") from error
        self._ids = {word: index for index, word in enumerate(self.vocabulary)}
        self._end = self._ids.get(config.get("eos_token"))
        kind = self._generator.compute_type
        self.info = EngineInfo(
            kind="ctranslate2",
            place=str(path),
            model=path.name,
            model_path=str(path),
            version=importlib.metadata.version("ctranslate2"),
            dtype=None if "int" in kind else kind,
            quantisation=kind if "int" in kind else None,
            processed=False,
            multimodal=False,
            scores=True,
        )

    def close(self) -> None:
        """Release the model."""
        self._generator = None

    def generate(self, prompts: Sequence[Prompt], sampling: Sampling = GREEDY) -> list[Generation]:
        """Continue each prompt; see `Engine.generate`."""
        if sampling.stop:
            raise InvalidInput("CTranslate2 only stops at tokens", expected="no texts in stop")
        if sampling.seed is not None and sampling.temperature > 0:
            # A generator's threads read the seed when they start: a new generator is needed.
            ctranslate2.set_random_seed(sampling.seed)
            self._generator = self._open()
        return [self._generate(self._row(prompt), sampling) for prompt in prompts]

    def _generate(self, row: list[str], options: Sampling) -> Generation:
        ids: list[int] = []
        values: list[float] = []

        def keep(step: Any) -> bool:
            ids.append(step.token_id)
            values.append(step.log_prob)
            return False

        greedy = options.temperature == 0
        self._generator.generate_batch(
            [row],
            max_length=options.max_tokens,
            sampling_topk=1 if greedy else options.top_k,
            sampling_topp=1.0 if greedy else options.top_p,
            sampling_temperature=1.0 if greedy else options.temperature,
            include_prompt_in_result=False,
            return_end_token=True,
            return_scores=True,  # without it the callback sees no log-prob
            callback=keep,
        )
        tokens = tuple(self.vocabulary[token] for token in ids)
        ended = bool(ids) and ids[-1] == self._end
        return Generation(
            text="".join(tokens),
            tokens=tokens,
            token_ids=tuple(ids),
            log_probs=tuple(values),
            prompt_tokens=len(row),
            finish_reason="stop" if ended else "length",
            problem="" if ids else "no token was generated",
        )

    def score(self, rows: Sequence[Sequence[int]]) -> list[tuple[float, ...]]:
        """Return the log-prob of each given token; see `Engine.score`."""
        found: list[tuple[float, ...]] = []
        for row in rows:
            tokens = self._row(row)
            if len(tokens) == 1:
                found.append((math.nan,))
                continue
            [scored] = self._generator.score_batch([tokens], max_input_length=0)
            # It returns which tokens it scored: those after the first, in order.
            if list(scored.tokens) != tokens[1:] or len(scored.log_probs) != len(tokens) - 1:
                raise EngineError(
                    f"CTranslate2 scored {len(scored.tokens)} other tokens for {len(tokens)} given"
                )
            found.append((math.nan, *scored.log_probs))
        return found

    def _row(self, prompt: Prompt) -> list[str]:
        if isinstance(prompt, str):
            raise InvalidInput("CTranslate2 was given a text", expected="token ids")
        ids, size = check_ids(prompt), len(self.vocabulary)
        if max(ids) >= size:
            raise InvalidInput(
                f"token id {max(ids)} is outside of the engine's vocabulary of {size}",
                expected="ids of the model that was converted",
            )
        return [self.vocabulary[token] for token in ids]


def _vocabulary(path: Path) -> list[str]:
    file = path / "vocabulary.json"
    if not file.is_file() or file.stat().st_size > _MAX_VOCABULARY_BYTES:
        raise NotFound(f"{str(file)!r} is not there", expected="CTranslate2's vocabulary.json")
    tokens = json.loads(file.read_text(encoding="utf-8"))
    if not isinstance(tokens, list) or not all(isinstance(word, str) for word in tokens):
        raise NotFound(f"{str(file)!r} is not a list of tokens")
    return tokens
