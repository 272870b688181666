"""Tokens with both sides' log-probs, their difference, and checks that the tokens are the same."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

from stagescope_wire.engines import Generation
from stagescope_workers.consistency.prompts import Tokenizer

Float64 = npt.NDArray[np.float64]

WORST: Final = 10


@dataclasses.dataclass(frozen=True)
class Scored:
    """One answer of the engine.

    Attributes:
        name: the prompt's.
        prompt: its token ids.
        ids: the tokens of the answer.
        q: the engine's log-prob of each.
        p: the other side's, of the same tokens after the same prompt.
        mask: the tokens that the model sampled (the environment wrote the others); None: all.
        group: the prompt's group, where it is known.
        reward: reward of the answer, where it is known.
    """

    name: str
    prompt: tuple[int, ...]
    ids: tuple[int, ...]
    q: Float64
    p: Float64
    mask: npt.NDArray[np.bool_] | None = None
    group: str | None = None
    reward: float | None = None

    @property
    def counted(self) -> npt.NDArray[np.bool_]:
        """The mask, also where every token counts."""
        return np.ones(len(self.ids), np.bool_) if self.mask is None else self.mask


@dataclasses.dataclass(frozen=True, slots=True)
class WorstToken:
    """One of the tokens with the largest |d|; `position` counts from the first answered token."""

    sample: str
    position: int
    token_id: int
    token: str
    q: float
    p: float
    abs_diff: float


def numbers(rows: Sequence[Scored]) -> dict[str, float]:
    """Return the service's statistics of the same tokens, under the same names, in float64.

    They are over tokens with two finite values; the others are counted.
    """
    q = np.concatenate([row.q[row.counted] for row in rows]) if rows else np.empty(0)
    p = np.concatenate([row.p[row.counted] for row in rows]) if rows else np.empty(0)
    finite = np.isfinite(q) & np.isfinite(p)
    nonfinite = {
        f"nonfinite/{stream}": float(np.count_nonzero(~np.isfinite(values)))
        for stream, values in (("rollout", q), ("old", p))
    }
    count = np.count_nonzero(finite)
    q, p = (q[finite], p[finite]) if count else (np.array([math.nan]), np.array([math.nan]))
    d = p - q
    return {
        "logprob_abs_diff/mean": float(np.abs(d).mean()),
        "logprob_abs_diff/max": float(np.abs(d).max()),
        "rollout_corr/k3_kl": float((np.expm1(d) - d).mean()),
        "rollout_corr/kl": float(-d.mean()),
        "training/rollout_probs_diff_mean": float(np.abs(np.exp(p) - np.exp(q)).mean()),
        "training/rollout_actor_probs_pearson_corr": _pearson(np.exp(p), np.exp(q)),
        "counts/tokens": float(count),
        "counts/sequences": float(len(rows)),
        **nonfinite,
    }


def worst_tokens(
    rows: Sequence[Scored], decode: Callable[[int], str], count: int = WORST
) -> list[WorstToken]:
    """Return the tokens that differ most, the worst first; non-finite ones come before others.

    Args:
        rows: the answers.
        decode: returns a token's text by its id.
        count: the maximal number of tokens.
    """
    if not rows:
        return []
    counted = np.concatenate([row.counted for row in rows])
    with np.errstate(invalid="ignore"):
        gaps = np.concatenate([np.abs(row.p - row.q) for row in rows])
    keys = np.where(counted, np.where(np.isfinite(gaps), gaps, np.inf), -1.0)
    count = min(count, int(np.count_nonzero(counted)))
    starts = np.cumsum([0, *(len(row.ids) for row in rows)])
    found = []
    for index in np.argsort(-keys, kind="stable")[:count]:
        row = int(np.searchsorted(starts, index, side="right")) - 1
        position = int(index - starts[row])
        token = rows[row].ids[position]
        found.append(
            WorstToken(
                sample=rows[row].name,
                position=position,
                token_id=token,
                token=decode(token),
                q=float(rows[row].q[position]),
                p=float(rows[row].p[position]),
                abs_diff=float(gaps[index]),
            )
        )
    return found


def _pearson(x: Float64, y: Float64) -> float:
    if len(x) < 2 or x.min() == x.max() or y.min() == y.max():
        return math.nan
    return float(np.corrcoef(x, y)[0, 1])


_MIN_NEIGHBOURS: Final = 16
"""Neighbouring tokens below which a shift cannot be distinguished from chance."""
_UNRELATED: Final = 0.8
"""Ratio of mean |d| at a token to its neighbours', above which the streams are unrelated."""


@dataclasses.dataclass(frozen=True, slots=True)
class Check:
    """The result of one check: `ok` is None where it is undecided."""

    name: str
    ok: bool | None
    text: str


def check_prompts(
    prompts: Sequence[Sequence[int]], generations: Sequence[Generation], tokenizer: Tokenizer
) -> Check:
    """Check that the engine read the prompts as the tokenizer makes them.

    Where the engine returns no ids, only their numbers of tokens are compared.
    """
    pairs = [
        (prompt, each)
        for prompt, each in zip(prompts, generations, strict=True)
        if each.prompt_tokens is not None
    ]
    total = sum(len(prompt) for prompt in prompts)
    if not pairs:
        return Check("prompts", None, f"{total} tokens; the engine does not say what it read")
    different = [(prompt, each) for prompt, each in pairs if not _is_read(prompt, each)]
    if not different:
        return Check("prompts", True, f"both sides read {len(pairs)} prompts of {total} tokens")
    first, read = different[0]
    gaps = {(each.prompt_tokens or 0) - len(prompt) for prompt, each in different}
    if read.prompt_ids is not None:
        hint = _difference(first, read.prompt_ids, tokenizer)
    elif gaps <= {1, -1}:
        hint = "a BOS of its own, or one that it leaves out?"
    else:
        hint = "another template?"
    text = (
        f"{len(different)} of {len(pairs)} prompts differ: the engine read {read.prompt_tokens} "
        f"tokens where the tokenizer makes {len(first)} ({hint})"
    )
    return Check("prompts", False, text)


def _is_read(prompt: Sequence[int], generation: Generation) -> bool:
    if generation.prompt_ids is None:
        return generation.prompt_tokens == len(prompt)
    return generation.prompt_ids == tuple(prompt)


def _difference(prompt: Sequence[int], read: tuple[int, ...], tokenizer: Tokenizer) -> str:
    made = tuple(prompt)
    if read[1:] == made:
        return f"it puts {tokenizer.convert_ids_to_tokens(read[0])} in front"
    if made[1:] == read:
        return f"it leaves out {tokenizer.convert_ids_to_tokens(made[0])} in front"
    pairs = zip(made, read, strict=False)
    alike = next((i for i, (one, other) in enumerate(pairs) if one != other), None)
    at = min(len(made), len(read)) if alike is None else alike
    return f"they differ from token {at} on: another tokenizer or template"


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
        tokenizer: the model's tokenizer.
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
        return Check("vocabulary", None, "the engine returned no ids with a text")
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
