"""Likely causes of the differences between two dumps, checks for each, and excluded causes.

Causes are rules over the results, and each names its evidence. Users of dumps collected the checks.
If shapes differ, check padding and max_length. If losses differ, check entropy_coeff, FP16 against
FP32 and seeds. If data is missing, check the dump options.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

from stagescope_service.compare.fingerprints import leaves
from stagescope_service.compare.flow import TOKEN_IDS
from stagescope_service.compare.pairing.shard_comparison import Doubt
from stagescope_service.compare.results import Cause, PairResult, TensorResult, Verdict
from stagescope_service.dumps.formats.msprobe_directory import KIND as MSPROBE
from stagescope_service.dumps.formats.own import KIND as OWN
from stagescope_service.dumps.records import Dump
from stagescope_wire.comparison_texts import ONE_SIDED_KINDS
from stagescope_wire.render import counted

BROKE_OFF: Final = "broke_off"
"""Key in the metadata of a dump (`about`): a sentence if its attempt ended within the step."""

_SERVICE_SETTINGS: Final = frozenset({"keep", "capture", "capture_budget", "imported"})
"""Settings for keeping and capturing data: they change no number of the training."""
_AGREE: Final = (Verdict.SAME, Verdict.WITHIN_NOISE)


class _StationCause(NamedTuple):
    title: str
    checks: tuple[str, ...]
    given: str = ""
    """The station that the title calls equal; '' for none."""
    otherwise: str = ""
    """The title where that station was not compared."""


_BY_STATION: Final[Mapping[str, _StationCause]] = {
    "tokens": _StationCause("the two sides sampled differently", (
        "the seed of the rollout, temperature, top_p and top_k: the same on both sides?",
        "a greedy run (temperature 0) of both: equal tokens leave only the sampling",
        "the engine's weights and policy version when it sampled",
        "batch order and engine batching: few kernels give the same bits for another batch size",
    )),
    "masks": _StationCause("masks are made in another way", (
        "which tokens of tools and of the environment are 0",
        "whether EOS counts, and what truncation at max_length does",
        "whether one side replaced response_mask by a rejection mask",
    ), "tokens", "masks differ, or are of other tokens"),
    "rollout log-probs": _StationCause("the inference engines score the same tokens differently", (
        "dtype and quantisation of the engine (float32, bfloat16, int8)",
        "raw or processed log-probs: temperature, top_p, top_k before or after the softmax",
        "the weights that the engine held: policy version, missed weight syncs",
    ), "tokens", "rollout log-probs differ, of the same tokens or of others"),
    "rewards": _StationCause("rewards are computed differently", (
        "the reward function's version, answer extraction, time-outs",
        "a judge model that samples: its seed and temperature",
        "penalties (length, format, KL) added on one side only",
    ), "tokens", "rewards differ, of the same tokens or of others"),
    "log-probs before the update": _StationCause(
        "the trainers' forward pass differs on the same tokens", (
        "numerical precision: FP16 or bfloat16 against FP32, also of the softmax and the logits",
        "attention kernel, padding side and position_ids; packing against padding",
        "the weights before the step: checkpoint, step resumed from",
        "temperature applied to the logits; a shift of labels by one",
        "dropout and the random seed",
    ), "tokens", "the trainers' log-probs differ, of the same tokens or of others"),
    "values": _StationCause("the critics differ", (
        "the critic's weights and dtype", "value clipping and normalisation",
    ), "tokens", "values differ, of the same tokens or of others"),
    "advantages": _StationCause("advantages are computed differently from the same rewards", (
        "normalisation by the group's or the batch's standard deviation",
        "which trajectories form a group (group_id)", "gamma and lambda; KL in the reward",
    ), "rewards", "advantages differ, from the same rewards or from others"),
    "log-probs in the update": _StationCause("the policies differ while they are updated", (
        "the order of microbatches and minibatches, the number of epochs",
        "numerical precision: FP16 or bfloat16 against FP32", "dropout and the random seed",
    ), "log-probs before the update", "log-probs in the update differ, perhaps before it too"),
    "ratio": _StationCause("the importance ratio is computed differently", (
        "which old_log_probs are the denominator: the engine's or the trainer's",
        "clamping and truncation of the ratio; the mask effective_valid",
    ), "log-probs in the update", "importance ratios differ, of the same log-probs or of others"),
    "loss": _StationCause("the loss is put together differently from the same terms", (
        "entropy_coeff and the coefficient of the KL term: the same on both sides?",
        "averaging: over tokens, over sequences, over the global batch or the microbatch",
        "numerical precision: FP16 or bfloat16 against FP32",
        "whether the random seed is fixed",
        "is_loss, in its order: log_probs, old_log_probs, advantages, prob_ratio, "
        "elementwise_loss, effective_valid",
    ), "log-probs in the update", "the loss differs, of the same terms or of others"),
    "gradients": _StationCause("gradients differ though the loss does not", (
        "clipping and its norm; gradient accumulation and its divisor",
        "dtype and order of the all-reduce", "parameters that one side freezes",
    ), "loss", "gradients differ, of the same loss or of another"),
    "parameters": _StationCause("the update differs though gradients do not", (
        "learning rate, weight decay, the optimizer's state and its dtype",
        "the checkpoint that the two started from",
    ), "gradients", "parameters differ, after the same gradients or after others"),
}  # fmt: skip

_EXCLUDES: Final[Mapping[str, tuple[str, str]]] = {
    "tokens": ("tokens are equal", "not the sampling, its seed or temperature, nor the tokenizer"),
    "masks": ("masks are equal", "not padding, truncation or which tokens count"),
    "rollout log-probs": (
        "rollout log-probs agree", "not the inference engine nor its weights",
    ),
    "rewards": ("rewards agree", "not the reward function"),
    "log-probs before the update": (
        "log-probs before the update agree",
        "not the weights before the step nor the precision of the forward pass",
    ),
    "values": ("values agree", "not the critic"),
    "advantages": ("advantages agree", "not the reward's normalisation or grouping"),
    "log-probs in the update": (
        "log-probs in the update agree", "not the policy's forward pass",
    ),
    "ratio": ("the ratio and the loss of each token agree", "not the importance sampling"),
    "loss": ("losses agree", "not the loss function or its coefficients"),
    "gradients": ("gradients agree", "not the backward pass"),
}  # fmt: skip
"""Station that agrees -> what agrees, and what that excludes."""

_SELF_HOSTED: Final = {
    "trajectories": "trajectory", "old_log_probs": "old_log_probs", "forward_data": "forward_data",
    "loss": "loss", "parameters": "param", "gradients": "gradient",
}  # fmt: skip
_WEAVER: Final = "forward_data,loss,is_loss_debug"


def likely_causes(
    result: PairResult, dumps: tuple[Dump, Dump]
) -> tuple[tuple[Cause, ...], tuple[str, ...]]:
    """Return likely causes, the likeliest first, and what the evidence excludes."""
    found = (
        _layout_cause(result, dumps), _settings_cause(result, dumps),
        _coefficient_cause(result), _dtype_cause(result),
        _prompt_cause(result), _length_cause(result), _station_cause(result),
        _non_finite_cause(result), *_missing_data_causes(result, dumps),
    )  # fmt: skip
    return tuple(cause for cause in found if cause is not None), _excluded(result)


def _layout_cause(result: PairResult, dumps: tuple[Dump, Dump]) -> Cause | None:
    """Return that operators of two layouts were compared rank by rank."""
    ranks = [{entry.location.rank for entry in dump.entries} for dump in dumps]
    if any(dump.kind != MSPROBE for dump in dumps) or len(ranks[0]) == len(ranks[1]):
        return None
    if result.verdict in _AGREE:
        return None
    counts = " and by ".join(counted(len(each), "rank") for each in ranks)
    return Cause(
        "the sides have other parallel layouts, and shards were compared with other shards",
        f"the operators were dumped by {counts}; this comparison pairs ranks of the same number",
        (
            "put the ranks of each side together: import both with `stagescope import`, then "
            "`stagescope divergence run=A,step=N,ranks=all,layout=dp2tp2 run=B`",
        ),
    )


def _station_cause(result: PairResult) -> Cause | None:
    first = result.first
    if first is None or first.station not in _BY_STATION:
        return None
    known = _BY_STATION[first.station]
    evidence = f"the first difference is {first.section}/{first.name}: {first.reason}"
    if not known.given or _is_equal(result, known.given):
        return Cause(known.title, evidence, known.checks)
    what = "token ids" if known.given == "tokens" else known.given
    evidence += f"; whether the two sides agree in {what} is unknown, because nothing was compared"
    check = f"{what}: record them on both sides, and compare again"
    return Cause(known.otherwise, evidence, (check, *known.checks))


def _is_equal(result: PairResult, station: str) -> bool:
    """Return whether a station agrees and was compared in all data of the first difference."""
    differing = [tensor for tensor in result.tensors if tensor.verdict is Verdict.DIFFERENT][:1]
    compared = [
        tensor
        for tensor in result.tensors
        if tensor.station == station and tensor.found.pairs
        and (station != "tokens" or tensor.name in TOKEN_IDS)
        and all(each.step == tensor.step for each in differing)
    ]  # fmt: skip
    rows = max((each.samples.get("compared", 0) for each in differing), default=0)
    enough = max((each.samples.get("compared", rows) for each in compared), default=0)
    agree = bool(compared) and all(tensor.verdict in _AGREE for tensor in compared)
    return agree and enough >= rows


def _prompt_cause(result: PairResult) -> Cause | None:
    first = result.first
    if first is None or first.name != "prompts":
        return None
    return Cause(
        "the two sides were given other prompts", f"{first.section}/prompts: {first.reason}",
        ("the tokenizer and the chat template, with their versions",
         "the data's order and its shuffle seed", "max_prompt_length and the side of truncation"),
    )  # fmt: skip


def _length_cause(result: PairResult) -> Cause | None:
    short = [t for t in result.tensors if t.samples.get("lengths differ")]
    if not short:
        return None
    evidence = f"{', '.join(f'{t.section}/{t.name}' for t in short[:3])}: {short[0].reason}"
    doubts = [{shard.comparison.doubt for shard in t.shards} for t in short]
    if all(Doubt.SAME_LENGTHS in each for each in doubts):
        return Cause(
            "the rows are in another order", evidence,
            ("dump the batch with its ids or tokens: rows are then paired by them",
             "the seed of the data's order, and whether batches are sorted or balanced by length"),
        )  # fmt: skip
    return Cause(
        "sequence lengths differ", evidence,
        ("padding: is its strategy, side and width the same?",
         "max_length, max_response_length and stop tokens"),
    )  # fmt: skip


def _dtype_cause(result: PairResult) -> Cause | None:
    for tensor in result.tensors:
        for one, other in tensor.dtypes:
            if one != other and tensor.verdict is not Verdict.SAME:
                return Cause(
                    "the two sides compute in other precisions",
                    f"{tensor.section}/{tensor.name} is {one} on one side and {other} on the other",
                    ("FP16 or bfloat16 against FP32: the model's dtype, autocast, dtype of logits",
                     "bfloat16 alone moves a log-prob by 0.0037 in the mean, 0.016 at most"),
                )  # fmt: skip
    return None


def _coefficient_cause(result: PairResult) -> Cause | None:
    """If the terms of a loss agree and their sum does not, a coefficient differs."""
    terms = {tensor.name: tensor for tensor in result.tensors if tensor.section == "loss"}
    loss, entropy, policy = (terms.get(name) for name in ("loss", "entropy_loss", "pg_loss"))
    if loss is None or entropy is None or policy is None or loss.verdict in _AGREE:
        return None
    if entropy.verdict not in _AGREE or policy.verdict not in _AGREE:
        return None
    evidence = "pg_loss and entropy_loss agree, loss does not"
    totals, sums, rests = (
        [each.found.side(side)["mean"] for side in "xy"] for each in (loss, entropy, policy)
    )
    if all(sums):
        one, other = (
            (total - rest) / term for total, term, rest in zip(totals, sums, rests, strict=True)
        )
        evidence += f"; (loss - pg_loss) / entropy_loss is {one:.6g} and {other:.6g}"
    return Cause(
        "entropy_coeff, or another coefficient of the loss, differs", evidence,
        ("entropy_coeff in both configurations", "the coefficient and kind of the KL term"),
    )  # fmt: skip


def _non_finite_cause(result: PairResult) -> Cause | None:
    for tensor in result.tensors:
        if tensor.found.disagreeing_non_finite:
            return Cause(
                "a side overflows or divides by zero",
                f"{tensor.section}/{tensor.name}: {tensor.reason}",
                ("FP16 overflows at 65504: check the logits and the loss scale",
                 "log of a probability that is 0; an empty mask"),
            )  # fmt: skip
    return None


def _settings_cause(result: PairResult, dumps: tuple[Dump, Dump]) -> Cause | None:
    if result.verdict in _AGREE:
        return None
    one, other = (dict(leaves(dump.about.get("settings"))) for dump in dumps)
    differing = [
        f"{name}: {one[name]} and {other[name]}"
        for name in sorted(one.keys() & other.keys())
        if one[name] != other[name] and name.partition(".")[0] not in _SERVICE_SETTINGS
    ]
    if not differing:
        return None
    text = "; ".join(differing[:8]) + (f"; {len(differing) - 8} more" if len(differing) > 8 else "")
    checks = ("give both sides the same settings, one after the other, and compare again",)
    return Cause("the settings of the two sides differ", text, checks)


def _missing_data_causes(result: PairResult, dumps: tuple[Dump, Dump]) -> list[Cause]:
    if result.verdict in _AGREE and OWN in (dumps[0].kind, dumps[1].kind):
        return []  # sections that a run did not keep, or its export leaves out, change no number
    found: list[Cause] = []
    for side, dump in enumerate(dumps):
        lost = [f for f in result.findings if f.kind == "missing" and f.side == side]
        broke_off = dump.about.get(BROKE_OFF)
        kinds = ("section",) if broke_off is None else ONE_SIDED_KINDS
        absent = [f for f in result.findings if f.kind in kinds and f.side == 1 - side]
        sections = list(dict.fromkeys(f.section for f in absent if f.section))
        if not lost and not sections:
            continue
        options = [_SELF_HOSTED[name] for name in sections if name in _SELF_HOSTED]
        checks = ["were the steps, ranks and sections kept: the options of the capture or the ring"]
        if broke_off is not None:
            checks = ["an attempt that finished the step: compare with that one"]
        elif dump.kind == "nexrl":
            checks = [
                "dump_options (self-hosted): "
                + (", ".join(f"{name}: true" for name in options) or "is each type enabled?"),
                "remote_api_dump_options: prepared_trajectories, datums, training_metrics",
                "weaver-trainer: WEAVER_DEBUG_DUMP_ENABLED=1, WEAVER_DEBUG_DUMP_DIR and "
                f'WEAVER_DEBUG_DUMP_OPTIONS="{_WEAVER}" set in its environment',
                "dump_every_n_steps, and WEAVER_DEBUG_DUMP_EVERY_N: was this step due?",
            ]
        what = ", ".join(sections) if sections else counted(len(lost), "file")
        why = what if broke_off is None else f"{what}: {broke_off}"
        found.append(Cause(f"data is missing in {dump.name}", why, tuple(checks)))
    return found


def _excluded(result: PairResult) -> tuple[str, ...]:
    by_station: dict[str, list[TensorResult]] = {}
    for tensor in result.tensors:
        by_station.setdefault(tensor.station, []).append(tensor)
    names_alone = any(
        f.verdict is Verdict.DIFFERENT and f.section == "trajectories" for f in result.findings
    )
    excluded = []
    for station, (what, conclusion) in _EXCLUDES.items():
        tensors = by_station.get(station, [])
        if station == "tokens" and not any(tensor.name in TOKEN_IDS for tensor in tensors):
            continue  # prompts or texts alone
        agree = bool(tensors) and all(tensor.verdict in _AGREE for tensor in tensors)
        measured = any(tensor.found.pairs for tensor in tensors)
        if agree and measured and not (station == "tokens" and names_alone):
            excluded.append(f"{what} ({_share(tensors, result.samples)}): {conclusion}")
    return tuple(excluded) if result.verdict is not Verdict.SAME else ()


def _share(tensors: Sequence[TensorResult], total: int) -> str:
    """Return the number of samples, or of numbers, on which tensors agree, as text."""
    by_step: dict[int | None, int] = {}
    for tensor in tensors:
        if tensor.samples:
            compared = tensor.samples["compared"]
            by_step[tensor.step] = min(compared, by_step.get(tensor.step, compared))
    if by_step:
        return f"{sum(by_step.values())} of {counted(total, 'sample')}"
    return counted(sum(tensor.found.pairs for tensor in tensors), "number")
