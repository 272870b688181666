"""`Step`: what the service knows about one step, a method a question."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal

from stagescope.answers import Metrics, Record
from stagescope.batch import Batch
from stagescope.batch.file import DownloadBuffer, atomic_file, load, parse
from stagescope.columns import COLUMNS
from stagescope.connection import LIMIT
from stagescope.frames import Table
from stagescope.hangs import STUCK_ORDER, Stacks, Stuck
from stagescope.operators import NonFiniteOperators, Operators, Stack
from stagescope.weights import WEIGHT_ORDER, Weights

if TYPE_CHECKING:
    from stagescope.capture_requests import CaptureRequests

# Columns that are shown first: a table in 80 columns leaves out the last.
_ROUND_ORDER: Final = (
    "round", "turn", "staleness", "tokens", "abs_diff_mean", "abs_diff_max", "k3_kl", "comparable",
    "cause", "nonfinite",
)  # fmt: skip
_RANK_ORDER: Final = (
    "role", "rank", "tokens", "abs_diff_mean", "abs_diff_max", "k3_kl", "comparable", "cause",
    "parts", "nonfinite",
)  # fmt: skip
_TOKEN_ORDER: Final = ("abs_diff", "p", "q", "round", "token_id", "sample_uid", "position", "rank")
_STAGE_ORDER: Final = (
    "stage",
    "role",
    "rank",
    "part",
    "status",
    "seconds",
    "open_seconds",
    "waited_seconds",
)
_DUMP_ORDER: Final = ("stage", "role", "rank", "state", "bytes", "path")
_KEPT_ORDER: Final = ("stage", "role", "rank", "part", "sections", "bytes", "state", "path")
_OPERATOR_ORDER: Final = (
    "order", "name", "section", "index", "dtype", "shape", "min", "max", "mean", "norm",
    "non_finite", "source",
)  # fmt: skip
_NON_FINITE_ORDER: Final = ("rank", "name", "section", "index", "non_finite", "source", "earliest")
_SCALAR_ORDER: Final = ("name", "value", "stage", "role", "rank")


class Step:
    """One step of one attempt of one run: a method a question."""

    def __init__(
        self,
        session: CaptureRequests,
        step: int,
        *,
        run: str | None,
        attempt: int | None,
        gap: str | None = None,
    ) -> None:
        self._session = session
        self.step = step
        self.run = run
        self.attempt = attempt
        #: What the numbers of the step, closed by then, lacked when it was asked for, or why it
        #: had none; None: nothing.
        self.gap = gap

    def __repr__(self) -> str:
        gap = f": {self.gap}" if self.gap else ""
        return f"<stagescope.Step {self.step} of run {self.run}, attempt {self.attempt}{gap}>"

    def metrics(
        self,
        *,
        stage: str | None = None,
        role: str | None = None,
        rank: int | None = None,
        round: int | None = None,
    ) -> Metrics:
        """Return the step's metrics: of the whole, or of one stage, role, rank or round.

        Raises:
            NotFound: nothing was measured there.
        """
        params = self._params(stage=stage, role=role, rank=rank, round=round)
        return Metrics.from_answer(self._session.get(self._path("metrics"), **params))

    def rounds(
        self,
        *,
        by: Literal["round", "turn", "staleness"] | None = None,
        stage: str | None = None,
        role: str | None = None,
        rank: int | None = None,
        limit: int = LIMIT,
    ) -> Table:
        """Return the mismatch round by round, or by true turn or staleness.

        `about["whole"]` holds the same columns of the whole, to which the rows add up.
        """
        filters = {"by": by, "stage": stage, "role": role, "rank": rank}
        return self._table("rounds", _ROUND_ORDER, limit, **filters)

    def ranks(
        self,
        *,
        stage: str | None = None,
        role: str | None = None,
        rank: int | None = None,
        limit: int = LIMIT,
    ) -> Table:
        """Return the mismatch rank by rank, with where each rank ran."""
        return self._table("ranks", _RANK_ORDER, limit, stage=stage, role=role, rank=rank)

    def tokens(
        self,
        *,
        kind: Literal["worst", "nonfinite"] | None = None,
        stage: str | None = None,
        role: str | None = None,
        rank: int | None = None,
        round: int | None = None,
        limit: int = LIMIT,
    ) -> Table:
        """Return the worst tokens, the largest |p - q| first, then those that are not finite."""
        filters = {"kind": kind, "stage": stage, "role": role, "rank": rank, "round": round}
        return self._table("tokens", _TOKEN_ORDER, limit, **filters)

    def stages(
        self,
        *,
        stage: str | None = None,
        role: str | None = None,
        rank: int | None = None,
        limit: int = LIMIT,
    ) -> Table:
        """Return who was in which stage, when, and who has not arrived, since when."""
        return self._table("stages", _STAGE_ORDER, limit, stage=stage, role=role, rank=rank)

    def stuck(
        self,
        *,
        stage: str | None = None,
        role: str | None = None,
        rank: int | None = None,
        limit: int = LIMIT,
    ) -> Stuck:
        """Return which ranks hold up the others, since when, and what they were judged by.

        `about["findings"]` holds what was found of this step before, also what is over.
        """
        found = self._table("stuck", STUCK_ORDER, limit, stage=stage, role=role, rank=rank)
        return Stuck.of(found)

    def stacks(
        self,
        *,
        stage: str | None = None,
        role: str | None = None,
        rank: int | None = None,
        source: Literal["probe", "watchdog"] | None = None,
        limit: int = LIMIT,
    ) -> Stacks:
        """Return the stacks that were taken in this step; `Session.stacks` takes new ones."""
        filters = {"stage": stage, "role": role, "rank": rank, "source": source}
        table = self._table("stacks", (), limit, **filters)
        answer = {**table.about, "rows": table.to_dicts()}
        return Stacks(answer, title=f"stacks of step {self.step} of {self.run}")

    def dumps(
        self,
        *,
        stage: str | None = None,
        role: str | None = None,
        rank: int | None = None,
        limit: int = LIMIT,
    ) -> Table:
        """Return msprobe's dumps: place, size and state."""
        return self._table("dumps", _DUMP_ORDER, limit, stage=stage, role=role, rank=rank)

    def kept(
        self,
        *,
        stage: str | None = None,
        role: str | None = None,
        rank: int | None = None,
        section: str | None = None,
        limit: int = LIMIT,
    ) -> Table:
        """Return the files that are kept of this step: sections, tensors, place, size and state.

        Args:
            stage, role, rank: only these.
            section: only files that hold something of it (`stagescope.wire.keep.SECTIONS`).
            limit: most rows.
        """
        filters = {"stage": stage, "role": role, "rank": rank, "section": section}
        return self._table("kept", _KEPT_ORDER, limit, **filters)

    def pin(self) -> Record:
        """Let its kept files and recent payloads stay; needs the operate token."""
        return self._session.pin(self.step, run=self.run, attempt=self.attempt)

    def unpin(self) -> Record:
        """Let them go when room is needed; needs the operate token."""
        return self._session.unpin(self.step, run=self.run, attempt=self.attempt)

    def weights(self, *, verdict: str | None = None, limit: int = LIMIT) -> Weights:
        """Return the weights recorded at this step, trainer against rollout, the worst first.

        Args:
            verdict: only `differs`, `missing`, `replicas differ`, `not comparable`,
                `not compared` or `agrees`.
            limit: most rows.

        Raises:
            NotFound: no weights were recorded at this step.
        """
        return Weights.of(self._table("weights", WEIGHT_ORDER, limit, verdict=verdict))

    def scalars(
        self,
        *,
        name: str | None = None,
        stage: str | None = None,
        role: str | None = None,
        rank: int | None = None,
        limit: int = LIMIT,
    ) -> Table:
        """Return the scalars that ranks handed over."""
        filters = {"name": name, "stage": stage, "role": role, "rank": rank}
        return self._table("scalars", _SCALAR_ORDER, limit, **filters)

    def batch(
        self,
        *,
        names: Sequence[str] | None = None,
        stages: Sequence[str] | None = None,
        timeout: float = 120.0,
    ) -> Batch:
        """Return what was recorded of the step, as far as it is kept: rows of all ranks, exactly.

        Args:
            names: only these tensors; default: all but parameters and gradients.
            stages: only what these stages recorded.
            timeout: seconds until the answer begins.

        Raises:
            NotFound: nothing of it is kept (any more), or no such tensor or stage.
        """
        buffer = DownloadBuffer()
        self._download(buffer.write, names, stages, timeout)
        return parse(buffer.data, repr(self), Batch)

    def save_batch(
        self,
        path: str | Path,
        *,
        names: Sequence[str] | None = None,
        stages: Sequence[str] | None = None,
        timeout: float = 120.0,
    ) -> Batch:
        """Write what `batch` returns to a file, as it comes, and open it."""
        with atomic_file(Path(path)) as file:
            self._download(lambda piece, size: file.write(piece), names, stages, timeout)
        return load(Path(path), Batch)

    def _download(
        self,
        write: Callable[[bytes, int], Any],
        names: Sequence[str] | None,
        stages: Sequence[str] | None,
        timeout: float,
    ) -> None:
        params = self._params(
            names=None if names is None else ",".join(names),
            stages=None if stages is None else ",".join(stages),
        )
        self._session.download(self._path("batch"), params, write, timeout=timeout)

    def operators(
        self,
        *,
        stage: str | None = None,
        role: str | None = None,
        rank: int | None = None,
        part: str | None = None,
        capture_id: str | None = None,
        name: str | None = None,
        kind: str | None = None,
        direction: str | None = None,
        section: str | None = None,
        dtype: str | None = None,
        non_finite: bool | None = None,
        limit: int = LIMIT,
    ) -> Operators:
        """Return operator calls in execution order, a row an argument.

        Args:
            stage, role, rank, part, capture_id: of which dumps; default: of all.
            name: a pattern with `*` and `?`, or a text that the name contains.
            kind: Module, Functional, Torch, Tensor, ...
            direction: forward, backward, parameters_grad or debug.
            section: input_args, input_kwargs, output, input, parameters, grad.
            dtype: such as bfloat16.
            non_finite: only tensors with a NaN or an infinity.
            limit: most rows.

        Raises:
            NotFound: no dump of this step was captured.
        """
        filters = {
            "stage": stage, "role": role, "rank": rank, "part": part, "capture_id": capture_id,
            "name": name, "kind": kind, "direction": direction, "section": section,
            "dtype": dtype, "non_finite": non_finite or None,
        }  # fmt: skip
        return Operators.of(self._table("operators", _OPERATOR_ORDER, limit, **filters))

    def stack(
        self,
        stack_id: str,
        *,
        stage: str | None = None,
        role: str | None = None,
        rank: int | None = None,
        part: str | None = None,
        capture_id: str | None = None,
    ) -> Stack:
        """Return the Python frames of an operator's call, the innermost first.

        Args:
            stack_id: of a row of `operators`.
            stage, role, rank, part, capture_id: of its dump, as far as one is not the only one.
        """
        params = self._params(
            stack_id=stack_id, stage=stage, role=role, rank=rank, part=part, capture_id=capture_id
        )
        return Stack(
            self._session.get(self._path("operators/stack"), **params),
            title="stack, innermost frame first",
        )

    def non_finite(
        self,
        *,
        stage: str | None = None,
        role: str | None = None,
        part: str | None = None,
        capture_id: str | None = None,
        limit: int = LIMIT,
    ) -> NonFiniteOperators:
        """Return the first operator with a NaN or infinite result on each rank.

        `about["earliest"]` is the earliest over the ranks, None where all is finite.
        """
        filters = {"stage": stage, "role": role, "part": part, "capture_id": capture_id}
        found = self._table("operators/non-finite", _NON_FINITE_ORDER, limit, **filters)
        return NonFiniteOperators.of(found, title="first non-finite operators")

    def _table(self, noun: str, order: Sequence[str], limit: int, **params: Any) -> Table:
        # Of rounds, the one column that was asked for stands beside the others.
        by = {params.get("by") or "round": "int"} if noun == "rounds" else {}
        return self._session.table(
            self._path(noun),
            self._params(**params),
            title=noun,
            order=order,
            columns={**by, **COLUMNS.get(noun.replace("operators/non-finite", "non_finite"), {})},
            limit=limit,
        )

    def _path(self, noun: str) -> str:
        return f"/steps/{self.step}/{noun}"

    def _params(self, **params: Any) -> dict[str, Any]:
        return {"run": self.run, "attempt": self.attempt, **params}
