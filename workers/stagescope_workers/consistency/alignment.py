"""Checks that both sides processed the same tokens, without which no number is valid."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Final

import numpy as np

from stagescope.engines import Generation
from stagescope_workers.consistency.prompts import Tokenizer
from stagescope_workers.consistency.scored import Float64, Scored

_MIN_NEIGHBOURS: Final = 16
"""Neighbouring tokens below which a shift cannot be distinguished from chance."""
_UNRELATED: Final = 0.8
"""The ratio of mean |d| at a token to that beside it, above which the streams are unrelated."""


@dataclasses.dataclass(frozen=True, slots=True)
class Check:
    """The result of one check: `ok` is None where it is undecided."""

    name: str
    ok: bool | None
    text: str


def check_prompts(prompts: Sequence[Sequence[int]], generations: Sequence[Generation]) -> Check:
    """Check that the engine read the same number of prompt tokens as the tokenizer makes."""
    pairs = [
        (len(prompt), each.prompt_tokens)
        for prompt, each in zip(prompts, generations, strict=True)
        if each.prompt_tokens is not None
    ]
    total = sum(len(prompt) for prompt in prompts)
    if not pairs:
        return Check("prompts", None, f"{total} tokens; the engine does not say what it read")
    different = [(expected, read) for expected, read in pairs if expected != read]
    if not different:
        return Check("prompts", True, f"both sides read {len(pairs)} prompts of {total} tokens")
    expected, read = different[0]
    gap = {read - expected for expected, read in different}
    hint = "a BOS of its own, or one that it leaves out" if gap <= {1, -1} else "another template"
    text = (
        f"{len(different)} of {len(pairs)} prompts differ: the engine read {read} tokens where the "
        f"tokenizer makes {expected} ({hint}?)"
    )
    return Check("prompts", False, text)


def check_bos(prompts: Sequence[Sequence[int]], tokenizer: Tokenizer) -> Check:
    """Check that no prompt begins with two BOS tokens."""
    bos = getattr(tokenizer, "bos_token_id", None)
    if bos is None:
        return Check("bos", True, "the tokenizer has no BOS")
    one = sum(bool(prompt) and prompt[0] == bos for prompt in prompts)
    two = sum(list(prompt[:2]) == [bos, bos] for prompt in prompts)
    name = tokenizer.convert_ids_to_tokens(bos)
    if two:
        return Check(
            "bos", False, f"{two} prompts begin with {name} twice: template and tokenizer add it"
        )
    return Check("bos", True, f"{one} of {len(prompts)} prompts begin with {name}, none twice")


def check_vocabulary(
    generations: Sequence[Generation], tokenizer: Tokenizer, vocabulary: Sequence[str]
) -> Check:
    """Check that the engine's ids are the tokenizer's.

    Args:
        generations: the engine's answers.
        tokenizer: of the model.
        vocabulary: the engine's, where it is known; otherwise the texts of its answers are compared
            with their ids.
    """
    if vocabulary:
        count = min(len(vocabulary), len(tokenizer))
        tokens = tokenizer.convert_ids_to_tokens(list(range(count)))
        unequal = [index for index in range(count) if tokens[index] != vocabulary[index]]
        if unequal:
            index = unequal[0]
            text = f"token {index} is {vocabulary[index]!r} there and {tokens[index]!r} here"
            return Check("vocabulary", False, f"{len(unequal)} tokens differ: {text}")
        return Check("vocabulary", True, f"the engine's {count} tokens are the tokenizer's")
    texts = [each for each in generations if each.token_ids and each.text]
    if not texts:
        return Check("vocabulary", None, "the engine gave no ids with a text")
    unlike = [each for each in texts if not _same_text(each, tokenizer)]
    if unlike:
        first = unlike[0]
        decoded = tokenizer.decode(list(first.token_ids or ()), skip_special_tokens=True)
        text = f"{len(unlike)} of {len(texts)} answers are other texts by the tokenizer"
        return Check("vocabulary", False, f"{text}: {first.text[:40]!r}, {decoded[:40]!r}")
    return Check("vocabulary", True, f"{len(texts)} answers are the same texts by the tokenizer")


def _same_text(generation: Generation, tokenizer: Tokenizer) -> bool:
    # Servers strip special tokens and spaces at the ends in different ways.
    ids = list(generation.token_ids or ())
    shown = {
        "".join(tokenizer.decode(ids, skip_special_tokens=skip).split()) for skip in (True, False)
    }
    found = "".join(generation.text.split())
    # Servers cut off a stop text.
    return any(found == each or (found and each.startswith(found)) for each in shown)


def check_shift(rows: Sequence[Scored]) -> Check:
    """Check that no stream is shifted, by mean |d| at the same token and at its neighbours."""
    if not rows:
        return Check("shift", None, "no token has two log-probs")
    # Pairs of neighbours that both count, so that all three means are over the same tokens.
    p, q, next_p, next_q = (
        np.concatenate(each) for each in zip(*map(_neighbours, rows), strict=True)
    )
    if len(p) < _MIN_NEIGHBOURS:
        return Check("shift", None, f"only {len(p)} neighbouring tokens: too few to say")
    same = float(np.abs(p - q).mean())
    later = float(np.abs(next_p - q).mean())
    earlier = float(np.abs(p - next_q).mean())
    numbers = f"mean |d| {same:.3g} at its own token, {earlier:.3g} one before, {later:.3g} after"
    if min(later, earlier) < same:
        side = "after" if later < earlier else "before"
        return Check("shift", False, f"{numbers}: one stream lies one token {side} the other")
    if same > _UNRELATED * min(later, earlier):
        text = "no better at its own place than beside it: other weights, or another model?"
        return Check("shift", False, f"{numbers}: {text}")
    return Check("shift", True, f"{numbers}: aligned")


def _neighbours(row: Scored) -> tuple[Float64, Float64, Float64, Float64]:
    """Return p and q of the tokens whose next one counts too, and p and q of that next one."""
    valid = row.counted & np.isfinite(row.q) & np.isfinite(row.p)
    both = valid[:-1] & valid[1:]
    return row.p[:-1][both], row.q[:-1][both], row.p[1:][both], row.q[1:][both]
