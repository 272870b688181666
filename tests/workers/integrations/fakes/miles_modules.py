"""miles' modules with the functions that the integration touches, without miles and Megatron.

Only their interface is miles' (contracts/miles.json): names, arguments and the columns of a batch.
It drops the positions of samples, makes its pass before the update, and captures nothing.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

from tests.workers.integrations.fakes import slime_modules

TRACKING: Final = slime_modules.LOGGING

CP: Final = """
import torch

rank, size = 0, 1


def slice_log_prob_with_cp(
    log_prob, total_length, response_length, qkv_format="thd", max_token_len=None
):
    assert len(log_prob) == response_length
    if size == 1:
        return log_prob
    # zigzag: of 2 * size chunks of the sequence, or of all sequences' padded length
    length = max_token_len if qkv_format == "bshd" else total_length
    chunk = -(-length // (2 * size))
    places = torch.arange(total_length - response_length, total_length) // chunk
    return log_prob[(places == rank) | (places == 2 * size - 1 - rank)]
"""

PARALLEL: Final = """
from types import SimpleNamespace

from miles.backends.training_utils import cp_utils


def get_parallel_state():
    return SimpleNamespace(
        effective_dp=SimpleNamespace(rank=0, size=1),
        cp=SimpleNamespace(rank=cp_utils.rank, size=cp_utils.size),
    )
"""

ACTOR: Final = """
from miles.backends.training_utils import parallel
from miles.backends.training_utils.cp_utils import slice_log_prob_with_cp
from miles.utils import train_dump_utils
from miles.utils.timer import timer
from miles.utils.tracking_utils import tracking


class MegatronTrainRayActor:
    def __init__(self, args):
        self.args, self.role = args, "actor"

    def train_actor(
        self, rollout_id, rollout_data, external_data=None, *, witness_info, attempt
    ):
        with timer("train"):
            if not self.args.use_rollout_logprobs:
                with timer("log_probs"):
                    rollout_data["log_probs"] = [
                        slice_log_prob_with_cp(
                            (-0.1 - 0.01 * row[-n:]).float(), total, n, self.args.qkv_format, width
                        )
                        for row, total, n, width in zip(
                            rollout_data["tokens"], rollout_data["total_lengths"],
                            rollout_data["response_lengths"], rollout_data["max_seq_lens"],
                        )
                    ]
            with timer("actor_train"):
                tracking.log(
                    self.args, {"train/loss": 0.5, "train/step": rollout_id}, step_key="train/step"
                )
        train_dump_utils.save_debug_train_data(
            self.args, rollout_id=rollout_id, rollout_data=rollout_data
        )
        return "normal"

    def train_critic(self, rollout_id, rollout_data):
        return {}

    def update_weights(self, info=None):
        with timer("update_weights"):
            pass
"""


def write(folder: Path) -> None:
    """Write the package into `folder`."""
    backends = "miles/backends"
    files = {
        "miles/__init__.py": "",
        "miles/utils/__init__.py": "",
        "miles/utils/timer.py": slime_modules.TIMER,
        "miles/utils/train_dump_utils.py": slime_modules.TRAIN_DATA,
        "miles/utils/tracking_utils/__init__.py": "",
        "miles/utils/tracking_utils/tracking.py": TRACKING,
        f"{backends}/__init__.py": "",
        f"{backends}/training_utils/__init__.py": "",
        f"{backends}/training_utils/cp_utils.py": CP,
        f"{backends}/training_utils/parallel.py": PARALLEL,
        f"{backends}/megatron_utils/__init__.py": "",
        f"{backends}/megatron_utils/actor.py": ACTOR,
    }
    for name, source in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(source)
