"""`Step`: the data of one step, one method per question."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from stagescope.answers import Metrics, Record
from stagescope.connection import LIMIT, OptInt, OptStr, segment
from stagescope.operators import NonFiniteOperators, Operators, Stack
from stagescope.plotting import BarTable, PlottedTable
from stagescope.routing import Routing
from stagescope.step_answers import SampleTokens, Stacks, Stuck, Weights
from stagescope.table import Table
from stagescope.transport import QueryValue
from stagescope_wire.atomic_file import atomic_file
from stagescope_wire.errors import InvalidInput, StagescopeError
from stagescope_wire.names import storable_id
from stagescope_wire.render_html import html_block, html_text

if TYPE_CHECKING:
    import plotly.graph_objects

    from stagescope.capture_requests import CaptureRequests
    from stagescope_wire.batch import Batch


def _of_slice(filters: Mapping[str, object]) -> str:
    """Return which slice filters select, "" for none."""
    given = [f"{name} {value}" for name, value in filters.items() if value is not None]
    return f"of a slice ({', '.join(given)})" if given else ""


class Step:
    """One step of one attempt of one run; each method asks one question about it.

    Usage:
        >>> step = session.step(5)
        >>> step.metrics(), step.rounds(), step.ranks(), step.tokens()
    """

    def __init__(
        self, session: CaptureRequests, step: int, *, run: OptStr, attempt: OptInt,
        gap: OptStr = None,
    ) -> None:  # fmt: skip
        self._session = session
        self.step = step
        self.run = run
        self.attempt = attempt
        #: What the numbers of the step, if it was closed, lacked when this object was created, or
        #: why there were none; None: nothing is missing.
        self.gap = gap

    def __repr__(self) -> str:
        gap = f": {self.gap}" if self.gap else ""
        return f"<stagescope.Step {self.step} of run {self.run}, attempt {self.attempt}{gap}>"

    def _repr_html_(self) -> str:
        """Return the most important metrics, or why there are none; it asks the service."""
        try:
            return self.metrics()._repr_html_()
        except StagescopeError as error:
            return html_block(repr(self), html_text(str(error)))

    def metrics(
        self, *, stage: OptStr = None, role: OptStr = None, rank: OptInt = None,
        round: OptInt = None,
    ) -> Metrics:  # fmt: skip
        """Return the metrics of the step, or of one stage, role, rank or round of it.

        Raises:
            NotFound: there are no such measurements.
        """
        params = self._params(stage=stage, role=role, rank=rank, round=round)
        return Metrics.from_answer(self._session.get(self._path("metrics"), **params))

    def rounds(
        self, *, by: Literal["round", "turn", "staleness"] = "round", stage: OptStr = None,
        role: OptStr = None, rank: OptInt = None, limit: int = LIMIT,
    ) -> PlottedTable:  # fmt: skip
        """Return the mismatch per round, or per true turn or staleness.

        Rounds are segments of the mask: a turn that is masked as a whole is in none, and adjacent
        turns are one round. Where `turn_ids` are recorded, `by="turn"` lists the true turns.

        `about["whole"]` has the same columns for the step: the sum of the rows. `comparable` is
        about a row's own tokens, `step_comparable` about the whole step. The text marks a row with
        `*` if it can be compared and the step cannot. `plot` compares the rounds of the step with
        the steps before. It does not draw turns.

        Usage:
            >>> session.step(5).rounds().plot(compare=3)
        """
        filters = {"stage": stage, "role": role, "rank": rank}
        own_by = None if by == "round" else by
        return PlottedTable.drawn_by(
            self._table("rounds", limit, by=by, **filters),
            functools.partial(self.figure, "rounds"), label=by, column="abs_diff_mean",
            refusal=_of_slice({"by": own_by, **filters}),
        )  # fmt: skip

    def ranks(
        self, *, stage: OptStr = None, role: OptStr = None, rank: OptInt = None, limit: int = LIMIT
    ) -> PlottedTable:
        """Return the mismatch per rank, with each rank's placement.

        `comparable` and `step_comparable` are as in `rounds`; `plot` draws a number by rank and
        round, as `heatmap`.

        Usage:
            >>> session.step(5).ranks().plot(metric="rollout_corr/k3_kl")
        """
        filters = {"stage": stage, "role": role, "rank": rank}
        return PlottedTable.drawn_by(
            self._table("ranks", limit, **filters), functools.partial(self.figure, "rank-rounds"),
            label="rank", column="abs_diff_mean", refusal=_of_slice(filters),
        )  # fmt: skip

    def figure(self, name: str, **parameters: object) -> plotly.graph_objects.Figure:
        """Return a figure of this step by its name; `session.figures()` lists them.

        Usage:
            >>> session.step(5).figure("distribution", of="ratio")

        Raises:
            MissingExtra: plotly is not installed.
            NotFound: there is no such figure.
        """
        # Values of any figure's parameters: the service checks them.
        query: dict[str, Any] = {**parameters}
        return self._session.figure(name, **self._params(step=self.step, **query))

    def heatmap(self, metric: str = "logprob_abs_diff/mean") -> plotly.graph_objects.Figure:
        """Return a figure of a number by rank and round; many ranks are folded."""
        return self.figure("rank-rounds", metric=metric)

    def timeline(self) -> plotly.graph_objects.Figure:
        """Return a figure of the step's stages, one lane per rank, with the waits between them."""
        return self.figure("timeline")

    def distribution(
        self, of: Literal["abs", "ratio"] = "abs", *, round: OptInt = None
    ) -> plotly.graph_objects.Figure:
        """Return a figure of how many tokens have which |p - q|, or which ratio e^(p - q)."""
        return self.figure("distribution", of=of, round=round)

    def density(self) -> plotly.graph_objects.Figure:
        """Return a figure of the trainer's log-probs against the rollout's, with the verdict."""
        return self.figure("density")

    def anatomy(
        self,
        by: Literal[
            "place",
            "end",
            "position",
            "probability",
            "lattice",
            "routing",
            "staleness",
            "engine",
        ] = "place",
    ) -> PlottedTable:
        """Return |d| and d (d = p - q, nats) by the position, probability or staleness of tokens.

        `by="lattice"` groups by the largest power of two that divides d, `by="routing"` by the
        number of layers in which the trainer chose other experts. If the data is not
        recorded, the table is empty and `about["note"]` says why.

        Usage:
            >>> session.step(5).anatomy("probability").plot()
        """
        answer = self._session.get(self._path("anatomy"), **self._params(by=by))
        about = {name: value for name, value in answer.items() if name not in ("rows", "next")}
        return PlottedTable.drawn_by(
            Table.from_rows(answer["rows"], title=f"mismatch by {by}", about=about),
            functools.partial(self.figure, "anatomy", by=by), label="label", column="mean_abs",
        )  # fmt: skip

    def routing(
        self, *, stage: OptStr = None, role: OptStr = None, rank: OptInt = None, limit: int = LIMIT
    ) -> Routing:
        """Return whether rollout and trainer chose the same experts, one row per layer.

        `about` has the answer in numbers: `hit_share`, `mean_hit` and `mean_same` (|d| in nats),
        `carried` and `excess` (shares of the mismatch), `rounds`, and `worst` tokens with routes.

        Usage:
            >>> routing = session.step(5).routing()
            >>> routing.about["excess"]     # share of the mismatch that other experts explain
            >>> routing.plot()              # by layer and round

        Raises:
            NotFound: the step has no routes.
        """
        filters = {"stage": stage, "role": role, "rank": rank}
        return Routing.drawn_by(
            self._table("routing", limit, **filters), functools.partial(self.figure, "routing"),
            label="layer", column="agreement", refusal=_of_slice(filters),
        )  # fmt: skip

    def save_trace(self, path: str | Path) -> Path:
        """Write the step's stages as trace events, for ui.perfetto.dev; return the path.

        Usage:
            >>> session.step(5).save_trace("step5.trace.json")
        """
        trace = self._session.get(self._path("timeline"), **self._params())
        with atomic_file(Path(path)) as file:
            file.write(json.dumps(trace).encode())
        return Path(path)

    def tokens(
        self, *, kind: Literal["worst", "nonfinite"] | None = None, stage: OptStr = None,
        role: OptStr = None, rank: OptInt = None, round: OptInt = None, limit: int = LIMIT,
    ) -> BarTable:  # fmt: skip
        """Return the worst tokens, the largest |p - q| first, then the non-finite ones.

        `text` is None where no tokenizer is known: `about["texts_reason"]` says how to name one.
        """
        filters = {"kind": kind, "stage": stage, "role": role, "rank": rank, "round": round}
        return BarTable.with_bars(
            self._table("tokens", limit, **filters), label="position", column="abs_diff"
        )

    def samples(
        self, *, sort: Literal["max_abs", "mean_abs", "tokens", "sample_uid"] | None = None,
        role: OptStr = None, rank: OptInt = None, limit: int = LIMIT,
    ) -> BarTable:  # fmt: skip
        """Return the step's samples with their mismatch, the largest |p - q| first.

        Usage:
            >>> session.step(5).samples(sort="mean_abs")[0]["sample_uid"]
        """
        return BarTable.with_bars(
            self._table("samples", limit, sort=sort, role=role, rank=rank),
            label="sample_uid", column="max_abs",
        )  # fmt: skip

    def sample(self, sample_uid: str | None) -> SampleTokens:
        """Return the tokens of a sample: both log-probs, and what the loss did to each.

        Usage:
            >>> step = session.step(5)
            >>> step.sample(step.tokens()[0]["sample_uid"])     # the worst token's sample

        Raises:
            InvalidInput: the uid is None: the token's stage recorded no sample ids.
            NotFound: its tensors are not kept, or there is no such sample.
        """
        if sample_uid is None:
            raise InvalidInput(
                "this sample has no id",
                expected="the sample_uid of a row that has one",
                advice="record sample_ids, a text for each row, beside the log-probs",
            )
        stored = storable_id(sample_uid)  # a prompt may serve as an id
        path = self._path(f"samples/{segment(stored, 'sample_uid')}")
        return SampleTokens.of_answer(self._session.get(path, **self._params()))

    def gradient(self, *, limit: int = LIMIT) -> BarTable:
        """Return how much of the mismatch sits in tokens that the loss trains on, or leaves out.

        Usage:
            >>> session.step(5).gradient().about["note"]

        `about["note"]` is the sentence; `about["unrecorded"]` names what is not known.

        Raises:
            NotFound: the step's tensors are not kept.
        """
        return BarTable.with_bars(
            self._table("loss", limit), label="fate", column="share_of_mismatch"
        )

    loss = gradient
    """The earlier name of `gradient`."""

    def stages(
        self, *, stage: OptStr = None, role: OptStr = None, rank: OptInt = None, limit: int = LIMIT
    ) -> Table:
        """Return which ranks were in which stage and when, and which have not arrived."""
        return self._table("stages", limit, stage=stage, role=role, rank=rank)

    def stuck(
        self, *, stage: OptStr = None, role: OptStr = None, rank: OptInt = None, limit: int = LIMIT
    ) -> Stuck:
        """Return the ranks that hold up the others, since when, and the usual durations.

        `about["findings"]` holds all findings about hangs in this step, also ended ones.
        """
        return Stuck.from_table(self._table("stuck", limit, stage=stage, role=role, rank=rank))

    def stacks(
        self, *, stage: OptStr = None, role: OptStr = None, rank: OptInt = None,
        source: Literal["probe", "watchdog"] | None = None, limit: int = LIMIT,
    ) -> Stacks:  # fmt: skip
        """Return the stacks that were recorded in this step; `Session.stacks` takes new ones."""
        filters = {"stage": stage, "role": role, "rank": rank, "source": source}
        table = self._table("stacks", limit, **filters)
        answer = {**table.about, "rows": table.to_dicts()}
        return Stacks(answer, title=f"stacks of step {self.step} of {self.run}")

    def dumps(
        self, *, stage: OptStr = None, role: OptStr = None, rank: OptInt = None, limit: int = LIMIT
    ) -> Table:
        """Return msprobe's dumps: path, size and state."""
        return self._table("dumps", limit, stage=stage, role=role, rank=rank)

    def kept(
        self, *, stage: OptStr = None, role: OptStr = None, rank: OptInt = None,
        section: OptStr = None, limit: int = LIMIT,
    ) -> Table:  # fmt: skip
        """Return the files that are kept of this step: sections, tensors, path, size and state.

        Args:
            stage, role, rank: only these.
            section: only files with data of this section (`stagescope_wire.keep.SECTIONS`).
            limit: most rows.
        """
        filters = {"stage": stage, "role": role, "rank": rank, "section": section}
        return self._table("kept", limit, **filters)

    def pin(self) -> Record:
        """Exempt its kept files and recent payloads from deletion; needs the operate token."""
        return self._session.pin(self.step, run=self.run, attempt=self.attempt)

    def unpin(self) -> Record:
        """Allow them to be deleted again; needs the operate token."""
        return self._session.unpin(self.step, run=self.run, attempt=self.attempt)

    def weights(self, *, verdict: OptStr = None, limit: int = LIMIT) -> Weights:
        """Return the weights recorded at this step, trainer compared with rollout, worst first.

        Args:
            verdict: only `differs`, `missing`, `replicas differ`, `not comparable`,
                `not compared` or `agrees`.
            limit: most rows.

        Raises:
            NotFound: no weights were recorded at this step.
        """
        return Weights.from_table(self._table("weights", limit, verdict=verdict))

    def scalars(
        self, *, name: OptStr = None, stage: OptStr = None, role: OptStr = None,
        rank: OptInt = None, limit: int = LIMIT,
    ) -> Table:  # fmt: skip
        """Return the scalars that ranks logged."""
        filters = {"name": name, "stage": stage, "role": role, "rank": rank}
        return self._table("scalars", limit, **filters)

    def batch(
        self, *, names: Sequence[str] | None = None, stages: Sequence[str] | None = None,
        timeout: float = 120.0,
    ) -> Batch:  # fmt: skip
        """Return the recorded rows of all ranks, exactly, as far as they are kept.

        Args:
            names: only these tensors; default: all but parameters and gradients.
            stages: only these stages.
            timeout: seconds until the answer begins.

        Raises:
            NotFound: nothing of the step is kept, or there is no such tensor or stage.
        """
        from stagescope_wire.batch import Batch  # numpy: no other answer needs it
        from stagescope_wire.batch.file import DownloadBuffer, parse

        buffer = DownloadBuffer()
        self._download(buffer.write, names, stages, timeout)
        return parse(buffer.data, repr(self), Batch)

    def save_batch(
        self, path: str | Path, *, names: Sequence[str] | None = None,
        stages: Sequence[str] | None = None, timeout: float = 120.0,
        on_progress: Callable[[int, int], object] = lambda done, total: None,
    ) -> Batch:  # fmt: skip
        """Download the result of `batch` to a file, and open it.

        `on_progress` is called with the bytes that have arrived, and all.
        """
        from stagescope_wire.batch import Batch
        from stagescope_wire.batch.file import load

        with atomic_file(Path(path)) as file:

            def write(chunk: bytes, size: int) -> None:
                file.write(chunk)
                on_progress(file.tell(), size)

            self._download(write, names, stages, timeout)
        return load(Path(path), Batch)

    def _download(
        self, write: Callable[[bytes, int], object], names: Sequence[str] | None,
        stages: Sequence[str] | None, timeout: float,
    ) -> None:  # fmt: skip
        lists = {"names": names, "stages": stages}
        params = {name: None if of is None else ",".join(of) for name, of in lists.items()}
        self._session.download(self._path("batch"), self._params(**params), write, timeout=timeout)

    def operators(
        self, *, stage: OptStr = None, role: OptStr = None, rank: OptInt = None,
        part: OptStr = None, capture_id: OptStr = None, name: OptStr = None, kind: OptStr = None,
        direction: OptStr = None, section: OptStr = None, dtype: OptStr = None,
        non_finite: bool | None = None, limit: int = LIMIT,
    ) -> Operators:  # fmt: skip
        """Return operator calls in execution order, one row per argument.

        Args:
            stage, role, rank, part, capture_id: only dumps of these; default: all dumps.
            name: a pattern with `*` and `?`, or a text that the name contains.
            kind: Module, Functional, Torch, Tensor, ...
            direction: forward, backward, parameters_grad or debug.
            section: input_args, input_kwargs, output, input, parameters, grad.
            dtype: such as bfloat16.
            non_finite: only tensors with a NaN or an infinity.
            limit: most rows.

        Raises:
            NotFound: this step has no dump.
        """
        filters = {
            "stage": stage, "role": role, "rank": rank, "part": part, "capture_id": capture_id,
            "name": name, "kind": kind, "direction": direction, "section": section,
            "dtype": dtype, "non_finite": non_finite or None,
        }  # fmt: skip
        return Operators.from_table(self._table("operators", limit, **filters))

    def stack(
        self, stack_id: str, *, stage: OptStr = None, role: OptStr = None, rank: OptInt = None,
        part: OptStr = None, capture_id: OptStr = None,
    ) -> Stack:  # fmt: skip
        """Return the Python frames of an operator's call, the innermost first.

        Args:
            stack_id: the `stack_id` in a row of `operators`.
            stage, role, rank, part, capture_id: identify its dump if there are several.
        """
        params = self._params(
            stack_id=stack_id, stage=stage, role=role, rank=rank, part=part, capture_id=capture_id
        )
        return Stack(
            self._session.get(self._path("operators/stack"), **params),
            title="stack, innermost frame first",
        )

    def non_finite(
        self, *, stage: OptStr = None, role: OptStr = None, part: OptStr = None,
        capture_id: OptStr = None, limit: int = LIMIT,
    ) -> NonFiniteOperators:  # fmt: skip
        """Return the first operator with a NaN or infinite result on each rank.

        `about["earliest"]` is the earliest over the ranks, None if everything is finite.
        """
        filters = {"stage": stage, "role": role, "part": part, "capture_id": capture_id}
        table = self._table("operators/non-finite", limit, **filters)
        return NonFiniteOperators.from_table(table, title="first non-finite operators")

    def _table(self, noun: str, limit: int, **params: QueryValue) -> Table:
        # Rounds have an additional column: the one that groups them.
        by = {str(params.get("by") or "round"): "int"} if noun == "rounds" else {}
        path, params = self._path(noun), self._params(**params)
        noun = noun.replace("operators/non-finite", "non_finite")
        return self._session.table(path, params, noun=noun, columns=by, limit=limit)

    def _path(self, noun: str) -> str:
        return f"/steps/{self.step}/{noun}"

    def _params(self, **params: QueryValue) -> dict[str, QueryValue]:
        return {"run": self.run, "attempt": self.attempt, **params}
