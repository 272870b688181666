"""The part of a probe that reports weights: their checksums, and canaries of them.

Clients of engines need httpx, so they are imported where a canary is made.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from stagescope_wire.canary import Canary
from stagescope_wire.schema import CANARY, Work
from stagescope_workers.probe.options import index, step_index
from stagescope_workers.probe.reporter import Reporter
from stagescope_workers.probe.weights import NamedTensors, Names, WeightsInfo, record_weights

if TYPE_CHECKING:
    from stagescope_workers.canary.after_syncs import WeightCanary
    from stagescope_workers.canary.engine_scorer import AnyEngine
    from stagescope_workers.canary.sequences import Sequences


class WeightReporter(Reporter):
    """Reports the weights of a process."""

    def record_weights(
        self,
        named_tensors: NamedTensors,
        *,
        version: int,
        side: str,
        step: int | None = None,
        kind: str = "exchanged",
        names: Names = None,
        replicated: Sequence[str] | bool = (),
    ) -> None:
        """Report a bit-exact checksum of each weight, to compare it with other ranks.

        The checksums are computed in the calling thread (on a device: queued on its current
        stream), so they belong to the current weights. No tensor is kept.

        Args:
            named_tensors: name -> tensor, or pairs, which a generator may yield one by one. Torch
                tensors (of a DTensor the local shard) or numpy arrays, of any dtype and strides.
            version: the policy version of these weights; it joins both sides.
            side: "trainer" or "rollout".
            step: the trainer's step, where it is known.
            kind: "exchanged", as they were sent or received, before an engine fuses or quantises
                them; "held", as they are stored in the process. Only equal kinds are compared.
            names: how to rename the weights: {pattern: replacement} (regular expressions, applied
                in order), or a function.
            replicated: patterns of (the new) names that every rank of this side holds a copy of,
                or True for all. For DTensors and Megatron-LM's parameters this is detected. Other
                tensors are compared only with ranks that differ in `dp_rank` alone.
        """
        if self.is_inert:
            return
        with self.guard("record_weights", None):
            record_weights(
                self,
                named_tensors,
                WeightsInfo(version, side, step, kind),
                names=names,
                replicated=replicated,
            )

    def canary(
        self,
        *,
        engine: AnyEngine | Sequence[AnyEngine] | None = None,
        sequences: Sequence[Sequence[int]] | Sequences | None = None,
        tokenizer: Any = None,
        temperature: float = 1.0,
        adapter: str | None = None,
        base: str | None = None,
        every: int = 1,
    ) -> WeightCanary:
        """Return a canary: fixed sequences that engine and trainer score after each weight sync.

        Call `after_sync` where the engine has new weights, and `score` where the trainer has the
        same ones.

        Args:
            engine: a URL, an engine of `stagescope_wire.engines`, an object with the methods of
                `canary.engine_arms.Scorer`, or several. None: this process asks no engine.
            sequences: token ids of one to eight sequences; None: the tokenizer's vocabulary
                determines them. They must be the same in every process of the run.
            tokenizer: the trainer's, from transformers.
            temperature: of the rollout's sampling.
            adapter: the name of the adapter that the rollout's requests use.
            base: the name of the base model, if there is an adapter and the engine's own model is
                another.
            every: ask only for versions that this number divides.

        Raises:
            InvalidInput: only when strict. Otherwise a canary that does nothing is returned.
        """
        from stagescope_workers.canary.after_syncs import WeightCanary
        from stagescope_workers.canary.engine_arms import Question
        from stagescope_workers.canary.engine_scorer import named
        from stagescope_workers.canary.sequences import Sequences, fixed

        with self.guard("canary", None):
            rows = fixed(sequences, tokenizer)
            question = Question(rows, temperature, adapter, base, tokenizer)
            engines = [named(each) for each in _engines(engine)]
            return WeightCanary(self, question, engines, every)
        return WeightCanary(self, Question(Sequences(())), (), 1)

    @property
    def step(self) -> int | None:
        """The step of the stage that is open, or was last; None: no stage has a step."""
        step = self.stage_tracker.current_work()[1].get("step")
        return step if isinstance(step, int) else None

    def report_canary(self, found: Canary, version: int, step: int | None) -> None:
        """Queue the CANARY event of a version."""
        if not self.is_inert:
            work = Work(step_index(step), index("version", version), None)
            self.outbox.put(CANARY, {**work.fields(), **found.wire()})


def _engines(given: AnyEngine | Sequence[AnyEngine] | None) -> Sequence[AnyEngine]:
    if given is None:
        return ()
    return given if isinstance(given, Sequence) and not isinstance(given, str) else [given]
