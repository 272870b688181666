"""The summary of a step: the parts of one stage merged so that every token counts once.

If parts carry sample ids, a token is (sample, position) and counts once: replicas, later epochs
and the driver's copy of the ranks' rows are left out. Rows of different samples that share an id
are distinguished (`identity`). A part that repeats only some tokens is listed in
`StepSummary.to_recompute`; the caller recomputes its statistics with `skip_of(...)` and assembles
again.
Without ids the layout decides. Among the ranks that hold the same rows (data_rank, else dp and cp
rank) the one with tp 0 and the last pp counts, in the lowest epoch.

The result depends only on the parts' numbers, roles and ranks (`PartRecord.precedence`), never on
the order of arrival. If a rank handed something over twice, the newest counts. Roles of
`schema.ROLES` come before others (a driver).

For every step: counted tokens + tokens left out with a reason = tokens sent (`StepSummary.sent`).
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from typing import Final

import numpy as np
from pydantic import TypeAdapter

from stagescope_service.statistics import cell as cells
from stagescope_service.statistics import codec
from stagescope_service.statistics.cell import Cell, UInt8
from stagescope_service.statistics.identity import Contradiction, Identities, empty_samples, resolve
from stagescope_service.statistics.ledger import Claim, CopyChecker, Ledger
from stagescope_service.statistics.part import (
    GroupKey,
    PartRecord,
    RankRow,
    Recompute,
    role_order,
    same_rows,
)
from stagescope_service.statistics.summary import Summary, merge_produced
from stagescope_service.statistics.token_batch import TokenBatch
from stagescope_wire.errors import InvalidInput
from stagescope_wire.schema import ROLES, STEP_SUMMARY_STAGES
from stagescope_wire.tensors import PAIRS

MISMATCH_PAIRS: Final = tuple(pair for pair in PAIRS if "recomputed" not in pair)
NOISE_PAIR: Final = ("old", "recomputed")

REPLICA: Final = "replica"
REPEATED: Final = "repeated"
OTHER_ROLE: Final = "other role"
LATER_EPOCH: Final = "later epoch"
TO_RECOMPUTE: Final = "restate"
OTHER_STREAMS: Final = "other streams"
_KIND: Final = "step summary"
"""The name of a step summary in stored files."""

ELSEWHERE: Final = (REPLICA, REPEATED, OTHER_ROLE, LATER_EPOCH)
"""The reason for leaving out tokens that count elsewhere."""


@dataclasses.dataclass(frozen=True)
class StepSummary:
    """A step's statistics, from one stage.

    Attributes:
        stage: The stage of its parts.
        summary: The merged summary; `publish(step.summary)` names its numbers.
        ranks: Each rank's own cell, by (role, rank).
        counted: Keys of the parts that counted.
        left_out: Key -> why it did not count.
        tokens_left_out: Reason -> number of tokens under the mask that it excludes.
        sent: Tokens under the mask of all parts.
        contradictions: Ids that name several samples; all of these count.
        differing: (key, key of the copy that goes before it) of copies whose numbers or masks
            differ.
        to_recompute: Parts to recompute; until then their tokens are missing.
        ranks_to_recompute: The same for the numbers of single ranks; stored nowhere.
        fragmented: Number of sequences in pieces without an offset: their sequence and round
            values describe the pieces.
        same_rows: Groups of (role, rank) that handed over the same rows and each count, since some
            name neither samples nor what rows they share.
    """

    stage: str
    summary: Summary
    ranks: tuple[RankRow, ...]
    counted: tuple[str, ...]
    left_out: Mapping[str, str]
    tokens_left_out: Mapping[str, int]
    differing: tuple[tuple[str, str], ...]
    to_recompute: tuple[Recompute, ...]
    fragmented: int
    sent: int
    contradictions: tuple[Contradiction, ...] = ()
    ranks_to_recompute: tuple[Recompute, ...] = ()
    same_rows: tuple[tuple[tuple[str, int], ...], ...] = ()

    @property
    def total(self) -> Cell:
        """The cell of all counted tokens."""
        return self.summary.total

    @property
    def duplicates(self) -> int:
        """Number of tokens that were left out because they count elsewhere."""
        return sum(self.tokens_left_out.get(why, 0) for why in ELSEWHERE)

    @property
    def unaccounted(self) -> int:
        """Tokens sent that neither count nor are left out with a reason; non-zero is a bug."""
        return self.sent - self.total.masked - sum(self.tokens_left_out.values())

    def besides(self, tokens: Mapping[str, int]) -> StepSummary:
        """Return a copy that includes tokens that were sent but are in no part, by reason."""
        if not tokens:
            return self
        left_out = dict(Counter(self.tokens_left_out) + Counter(tokens))
        return dataclasses.replace(
            self, sent=self.sent + sum(tokens.values()), tokens_left_out=left_out
        )

    def to_bytes(self) -> bytes:
        """Return the step summary as the compressed bytes of a safetensors file."""
        arrays, summary = codec.flatten(self.summary)
        vectors = [row.cell.vector for row in self.ranks]
        arrays["rank_cells"] = np.array(vectors).reshape(-1, cells.WIDTH)
        ranks = [
            (row.role, row.rank, row.parts, row.counted_parts,
             codec.produced_to_json(row.produced), row.sources)
            for row in self.ranks
        ]  # fmt: skip
        document = {"summary": summary, "ranks": ranks, "restate": self.to_recompute}
        return codec.save(_KIND, codec.VERSION, arrays, document | _PLAIN.to_json(self))

    @classmethod
    def from_bytes(cls, data: bytes) -> StepSummary:
        """Read bytes written by `to_bytes`; they are untrusted.

        Raises:
            InvalidInput: malformed bytes, or another version.
        """
        arrays, document = codec.load(data, _KIND, codec.VERSION)
        with codec.refusing(_KIND):
            vectors, ranks = arrays.pop("rank_cells"), _RANKS.validate_python(document["ranks"])
            if vectors.dtype != np.float64 or vectors.shape != (len(ranks), cells.WIDTH):
                raise ValueError(f"rank_cells are {vectors.dtype} {vectors.shape}")
            return cls(
                **_PLAIN.from_json(document),
                summary=codec.restore(arrays, document["summary"]),
                ranks=tuple(
                    RankRow(
                        role, rank, Cell(own), parts, counted, codec.produced_from_json(of), sources
                    )
                    for (role, rank, parts, counted, of, sources), own in zip(
                        ranks, vectors, strict=True
                    )
                ),
                to_recompute=_RECOMPUTED.validate_python(document["restate"]),
            )


_PLAIN: Final = codec.JsonFields(
    StepSummary, "stage", "counted", "left_out", "tokens_left_out", "sent", "contradictions",
    "differing", "fragmented", "same_rows",
)  # fmt: skip
_RECOMPUTED: Final = TypeAdapter(tuple[Recompute, ...])
_RANKS: Final = TypeAdapter(list[tuple[str, int, int, int, codec.ProducedRows, tuple[int, ...]]])


def assemble(
    parts: Sequence[PartRecord],
    *,
    stage: str | None = None,
    pairs: Sequence[tuple[str, str]] = MISMATCH_PAIRS,
    unavailable: Collection[str] = (),
) -> StepSummary:
    """Merge the parts of one stage.

    Args:
        parts: Parts of a step, of any stages and pairs, in any order.
        stage: The stage to use; default the first of `schema.STEP_SUMMARY_STAGES` that has parts.
        pairs: The pairs to use, in order of preference; `[NOISE_PAIR]` for the noise floor.
        unavailable: Keys of parts that cannot be recomputed: if only some of their tokens are
            new, other parts count first.

    Raises:
        InvalidInput: no part has such a pair.
    """
    stage, chosen, others = _choose_stage_and_pair(parts, stage, pairs)
    if len({record.summary.settings for record in chosen}) > 1:
        # Only the applied weights depend on them: those of the step are the raw ones.
        chosen = [record.without_settings() for record in chosen]
    main_role = min((record.role for record in chosen), key=role_order)
    identities = resolve(record for record in chosen if record.has_ids)
    accounting = _TokenAccounting(main_role, identities)
    for record in sorted(chosen, key=lambda record: (record.key in unavailable, record.precedence)):
        accounting.count_once(record)
    accounting.counted.sort(key=lambda record: record.order)
    if others:
        accounting.tokens_left_out[OTHER_STREAMS] += sum(map(_tokens_sent, others))
    if accounting.counted:
        summary = Summary.merge(
            [_contribution(record, identities) for record in accounting.counted]
        )
        summary = dataclasses.replace(summary, empty_samples=empty_samples(chosen, identities))
    else:
        raise InvalidInput("no part of the step counts", expected="at least one new token")
    index = {record.key: at for at, record in enumerate(accounting.counted)}
    ranks, ranks_to_recompute = _rank_rows(chosen, index, identities)
    return StepSummary(
        stage=stage,
        summary=summary,
        ranks=ranks,
        counted=tuple(record.key for record in accounting.counted),
        left_out=accounting.left_out | dict.fromkeys((r.key for r in others), OTHER_STREAMS),
        tokens_left_out=dict(+accounting.tokens_left_out),
        differing=tuple(accounting.differing),
        to_recompute=tuple(accounting.to_recompute),
        fragmented=int(summary.sequences.fragmented().sum()),
        sent=sum(map(_tokens_sent, [*chosen, *others])),
        contradictions=identities.contradictions,
        ranks_to_recompute=ranks_to_recompute,
        same_rows=same_rows(accounting.counted),
    )


def noise_floor(parts: Sequence[PartRecord], stage: str) -> StepSummary | None:
    """Return the summary of the trainer against itself, of one stage; None: not recorded."""
    own = [part for part in parts if part.stage == stage and part.summary.pair == NOISE_PAIR]
    return assemble(own, stage=stage, pairs=[NOISE_PAIR]) if own else None


def skip_of(batch: TokenBatch, skips: Sequence[tuple[int, int, int]]) -> UInt8:
    """Return the `skip` array [tokens] of a batch for (row, first, last) positions."""
    skip = np.zeros(batch.tokens, np.uint8)
    for row, first, last in skips:
        begin, end = batch.row_offsets[row], batch.row_offsets[row + 1]
        if batch.positions is not None:
            here = batch.positions[begin:end]
            skip[begin:end] |= ((here >= first) & (here < last)).astype(np.uint8)
        else:
            shift = begin - (0 if batch.token_offset is None else batch.token_offset[row])
            skip[max(first + shift, begin) : max(min(last + shift, end), begin)] = 1
    return skip


def _contribution(record: PartRecord, identities: Identities) -> Summary:
    """Return a part's contribution to the step, under the names of its resolved samples."""
    renamed = identities.renamed(record.key, record.summary)
    nothing = np.empty((0, 3), np.int64)
    # The data that distinguishes samples is no longer needed.
    bare = dataclasses.replace(
        renamed.sequences, cover=nothing, marks=nothing, mark_values=np.empty(0, np.float32)
    )
    return dataclasses.replace(renamed, sequences=bare, token_digest="").named(record.key)


def _tokens_sent(record: PartRecord) -> int:
    full = record.full_summary
    return full.total.masked + sum(full.left_out.values())


class _TokenAccounting:
    """Decides which records count, one by one in the order of their precedence."""

    def __init__(self, main_role: str, identities: Identities) -> None:
        self._main_role = main_role
        self._identities = identities
        self._ledger = Ledger()
        self._holders: dict[tuple[object, ...], PartRecord] = {}
        self._epochs: dict[GroupKey, int] = {}
        self._digests: dict[tuple[object, ...], PartRecord] = {}
        """Group and content -> the part that counts."""
        self._copies = CopyChecker(identities)
        self.counted: list[PartRecord] = []
        self.left_out: dict[str, str] = {}
        self.tokens_left_out = Counter[str]()
        self.differing: list[tuple[str, str]] = []
        self.to_recompute: list[Recompute] = []

    def count_once(self, record: PartRecord) -> None:
        """Count a record, leave it out, or request that it is recomputed."""
        full = record.full_summary
        self.tokens_left_out.update(full.left_out)
        if not len(full.sequences):
            # Rows without a model token have no sample: replicas are identified by layout.
            holder = self._holders.setdefault((*record.group, record.part), record)
            if holder is record and record.part.epoch == 0:
                self.counted.append(record)
            else:
                self.left_out[record.key] = REPLICA if holder is not record else LATER_EPOCH
            other = self._copies.differing(record, holder)
            if other is not None:
                self.differing.append((record.key, other))
            return
        earlier = None
        if record.has_ids:
            why, claim = self._by_sample(record)
        else:
            (why, earlier), claim = self._by_layout(record), None
        holder = self._holders.setdefault((*record.group, record.part), record)
        other = self._copies.differing(record, holder) if record.has_ids else None
        other = other or (None if claim is None else claim.other_mask)
        if why == REPEATED and earlier is not None and record.sender == earlier.sender:
            other = earlier.key
        if why is None:
            self.counted.append(record)
            if claim is not None:
                self.tokens_left_out[REPEATED] += _repeated(claim, full, record.summary)
        else:
            self.left_out[record.key] = why
            missing = min(claim.fresh, full.total.masked) if why == TO_RECOMPUTE and claim else 0
            self.tokens_left_out[why] += missing
            self.tokens_left_out[REPEATED if why == TO_RECOMPUTE else why] += (
                full.total.masked - missing
            )
            if not record.has_ids and why == REPLICA and holder.digest != record.digest:
                other = holder.key
        if other is not None:
            self.differing.append((record.key, other))

    def _by_sample(self, record: PartRecord) -> tuple[str | None, Claim | None]:
        if self._identities.contradictions and record.role not in (self._main_role, *ROLES):
            # A driver's ids cannot match those of ranks that contradict each other.
            return OTHER_ROLE, None
        full = record.full_summary
        rows = self._identities.of_rows(record.key, full)
        claim = self._ledger.claim(
            full, record.cp_rank, rows, sender=record.passes, name=record.key
        )
        if claim.is_all_repeated:
            held = (*record.group, record.part) in self._holders
            return (REPLICA if held else REPEATED), claim
        if claim.skips and claim.skips != record.skipped:
            self.to_recompute.append(Recompute(record.key, claim.skips))
            return TO_RECOMPUTE, claim
        return None, claim

    def _by_layout(self, record: PartRecord) -> tuple[str | None, PartRecord | None]:
        """Return why rows without ids do not count, and the part that holds the same tokens."""
        if record.role != self._main_role:
            return OTHER_ROLE, None
        if (*record.group, record.part) in self._holders:
            return REPLICA, None
        if record.part.epoch > self._epochs.setdefault(record.group, record.part.epoch):
            return LATER_EPOCH, None
        if record.token_digest:
            earlier = self._digests.setdefault((*record.group, record.token_digest), record)
            return (None, None) if earlier is record else (REPEATED, earlier)
        # Without token ids, only its numbers identify another pass.
        earlier = self._digests.setdefault((*record.group, record.summary.digest), record)
        is_repeated = earlier.part.occurrence != record.part.occurrence
        return (REPEATED if is_repeated else None), None


def _choose_stage_and_pair(
    parts: Sequence[PartRecord], stage: str | None, pairs: Sequence[tuple[str, str]]
) -> tuple[str, list[PartRecord], list[PartRecord]]:
    """Return the stage, its parts that have the chosen pair, and those with another pair only."""
    usable = [record for record in parts if record.summary.pair in pairs]
    stages = {record.stage for record in usable}
    order = [name for name in STEP_SUMMARY_STAGES if name in stages] + sorted(
        stages - set(STEP_SUMMARY_STAGES)
    )
    if stage is None and order:
        stage = order[0]
    if stage is None or stage not in stages:
        raise InvalidInput(
            f"no part of {'any stage' if stage is None else f'stage {stage}'} has both streams",
            expected=f"one of the pairs {list(pairs)}",
        )
    of_stage = [record for record in usable if record.stage == stage]
    found = {record.summary.pair for record in of_stage}
    pair = next(pair for pair in pairs if pair in found)
    chosen = [record for record in of_stage if record.summary.pair == pair]
    keys = {record.key for record in chosen}
    return stage, chosen, [record for record in of_stage if record.key not in keys]


def _repeated(claim: Claim, full: Summary, counted: Summary) -> int:
    """Return the number of a counted part's tokens that count elsewhere."""
    cover = full.sequences.cover
    if int((cover[:, 2] - cover[:, 1]).sum()) != full.total.masked:
        # A mask with very many short stretches does not keep all of them.
        return full.total.masked - counted.total.masked
    return claim.repeated


def _rank_rows(
    records: Sequence[PartRecord], counted: Mapping[str, int], identities: Identities
) -> tuple[tuple[RankRow, ...], tuple[Recompute, ...]]:
    """Return each rank's own numbers, and the parts to recompute for them.

    `counted`: key of a part that counts -> its index among the sources of the step's summary.
    """
    by_rank: dict[tuple[tuple[int, str], int], list[PartRecord]] = {}
    for record in sorted(records, key=lambda record: record.precedence):
        by_rank.setdefault((role_order(record.role), record.rank), []).append(record)
    rows: list[RankRow] = []
    to_recompute: list[Recompute] = []
    for (role, rank), own in sorted(by_rank.items()):
        ledger, epoch = Ledger(), min(record.part.epoch for record in own)
        digests: set[str] = set()
        taken: list[tuple[PartRecord, Summary]] = []
        for record in own:
            summary = record.ranked or record.full_summary
            if not record.has_ids:
                if record.part.epoch == epoch and record.token_digest not in digests:
                    taken.append((record, summary))
                    digests |= {record.token_digest} - {""}
                continue
            of_rows = identities.of_rows(record.key, summary)
            kept = [dataclasses.replace(identity, dropped=False) for identity in of_rows]
            claim = ledger.claim(summary, record.cp_rank, kept, sender=record.sender)
            if claim.skips and not claim.is_all_repeated:
                to_recompute.append(Recompute(record.key, claim.skips))
            elif not claim.is_all_repeated:
                taken.append((record, summary))
        taken.sort(key=lambda each: each[0].order)
        own.sort(key=lambda record: record.order)
        vectors = [summary.total.vector for _, summary in taken]
        cell = Cell(cells.merge(np.stack(vectors) if vectors else cells.empty(0)))
        sources = tuple(counted[record.key] for record in own if record.key in counted)
        produced = merge_produced(summary.produced for _, summary in taken)
        rows.append(RankRow(role[1], rank, cell, len(own), len(sources), produced, sources))
    return tuple(rows), tuple(to_recompute)
