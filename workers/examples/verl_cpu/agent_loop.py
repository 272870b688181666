"""Two turns with a calculator between them, as a verl agent loop.

The model writes up to `TURN_TOKENS` tokens. If it ended its turn itself, that is its answer and
the sample has one round. Otherwise the calculator's result is appended, masked, and the model has
another turn. verl finds this class by `agent_loop.yaml`.
"""

# pyright: reportMissingImports=false
from __future__ import annotations

from typing import Any, Final

from verl.experimental.agent_loop.agent_loop import AgentLoopBase, AgentLoopOutput
from verl.utils.profiler import simple_timer

TURN_TOKENS: Final = 8


class CalculatorAgentLoop(AgentLoopBase):  # type: ignore[misc]
    """Asks the calculator once where the first turn was no answer."""

    async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> AgentLoopOutput:
        """Play one sample; `kwargs` are the fields of its row of the data set."""
        prompt_ids = await self.ct_build_initial_tokens(list(kwargs["raw_prompt"]))
        sample = kwargs.get("session_id", kwargs.get("priority", 0))
        params = {**sampling_params, "max_tokens": TURN_TOKENS, "seed": int(sample)}
        response_ids: list[int] = []
        mask: list[int] = []
        log_probs: list[float] = []
        metrics: dict[str, float] = {}
        versions: list[int] = []
        for turn in range(2):
            if turn == 1:
                with simple_timer("tool_calls", metrics):
                    result = self.tokenizer.encode(f"[{kwargs['reward_model']['ground_truth']}]")
                response_ids += result
                mask += [0] * len(result)
                log_probs += [0.0] * len(result)
            with simple_timer("generate_sequences", metrics):
                output = await self.server_manager.generate(
                    request_id=f"{kwargs.get('uid', '')}-{sample}",
                    prompt_ids=prompt_ids + response_ids,
                    sampling_params=params,
                )
            response_ids += output.token_ids
            mask += [1] * len(output.token_ids)
            log_probs += output.log_probs
            versions.append(output.extra_fields["global_steps"])
            if output.stop_reason == "completed":
                break
        return AgentLoopOutput(
            prompt_ids=prompt_ids,
            response_ids=response_ids,
            response_mask=mask,
            response_logprobs=log_probs,
            num_turns=2 * len(versions),
            metrics=metrics,
            extra_fields={
                "global_steps": versions[-1],
                "min_global_steps": min(versions),
                "max_global_steps": max(versions),
                "turn_scores": [],
                "tool_rewards": [],
            },
        )
