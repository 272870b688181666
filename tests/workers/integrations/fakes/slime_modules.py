"""slime's modules with the functions that the integration touches, without slime and Megatron.

Only their interface is slime's (contracts/slime.json): names, arguments, the columns of a batch,
and that log-probs are captured by position, and only where a micro-batch has positions.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

TIMER: Final = """
import contextlib


class Timer:
    def __init__(self):
        self.ended = []

    def start(self, name):
        pass

    def end(self, name):
        self.ended.append(name)


timers = Timer()


@contextlib.contextmanager
def timer(name):
    timers.start(name)
    try:
        yield
    finally:
        timers.end(name)
"""

TRAIN_DATA: Final = """
saved = []


def save_debug_train_data(args, *, rollout_id, rollout_data):
    if args.save_debug_train_data is not None:
        saved.append((rollout_id, sorted(rollout_data)))
"""

LOGGING: Final = """
logged = []


def log(args, metrics, step_key):
    logged.append(dict(metrics))
"""

LOSS: Final = """
_LOG_PROB_CAPTURE = None


def enable_log_prob_capture():
    global _LOG_PROB_CAPTURE
    _LOG_PROB_CAPTURE = {}


def drain_captured_log_probs():
    global _LOG_PROB_CAPTURE
    captured, _LOG_PROB_CAPTURE = _LOG_PROB_CAPTURE or {}, None
    return captured


def policy_loss(batch, log_probs):
    for position, each in zip(batch.get("partition") or [], log_probs):
        if _LOG_PROB_CAPTURE is not None:
            _LOG_PROB_CAPTURE.setdefault(position, each.detach().clone())
"""

CP: Final = """
import torch

rank, size = 0, 1


def slice_log_prob_with_cp(log_prob, total_length, response_length):
    assert len(log_prob) == response_length
    if size == 1:
        return log_prob
    # zigzag: of 2 * size chunks of the sequence, the rank-th from either end
    chunk = -(-total_length // (2 * size))
    places = torch.arange(total_length - response_length, total_length) // chunk
    return log_prob[(places == rank) | (places == 2 * size - 1 - rank)]
"""

MODEL: Final = """
from HOME import logging_utils
from slime.backends.megatron_utils import cp_utils, loss


def get_batch(data_iterator, keys, pad_multiplier=128, allgather_cp=False):
    data, rows = data_iterator
    return {key: None if data.get(key) is None else [data[key][i] for i in rows] for key in keys}


def passes(args, data, drift):
    keys = ["tokens", "total_lengths", "response_lengths"]
    if args.save_debug_train_data is not None:
        keys.append("partition")
    rows = range(len(data["tokens"]))
    for micro in (rows[1::2], rows[0::2]):
        batch = get_batch((data, micro), keys)
        yield batch, [
            cp_utils.slice_log_prob_with_cp((-0.1 - 0.01 * t[-n:] + drift).float(), total, n)
            for t, total, n in zip(
                batch["tokens"], batch["total_lengths"], batch["response_lengths"]
            )
        ]


def train(rollout_id, args, data):
    for step in range(args.steps):
        for batch, log_probs in passes(args, data, 0.25 * step):
            loss.policy_loss(batch, log_probs)
        logging_utils.log(
            args, {"train/loss": 0.5, "train/step": rollout_id}, step_key="train/step"
        )
"""

ACTOR: Final = """
from HOME import train_data_utils
from HOME.timer import timer
from .loss import drain_captured_log_probs, enable_log_prob_capture
from .model import passes, train


class MegatronTrainRayActor:
    def __init__(self, args):
        self.args, self.role = args, "actor"

    def train_actor(self, rollout_id, rollout_data, external_data=None):
        with timer("train"):
            if self.args.makes_old:
                with timer("log_probs"):
                    found = {}
                    for batch, log_probs in passes(
                        type(self.args)(save_debug_train_data="yes"), rollout_data, 0.0
                    ):
                        found |= dict(zip(batch["partition"], log_probs))
                    rollout_data["log_probs"] = [found[p] for p in rollout_data["partition"]]
            captures = self.args.save_debug_train_data and "log_probs" not in rollout_data
            if captures:
                enable_log_prob_capture()
            with timer("actor_train"):
                train(rollout_id, self.args, rollout_data)
            if captures:
                captured = drain_captured_log_probs()
                rollout_data["log_probs"] = [captured[p] for p in rollout_data["partition"]]
        train_data_utils.save_debug_train_data(
            self.args, rollout_id=rollout_id, rollout_data=rollout_data
        )

    def train_critic(self, rollout_id, rollout_data):
        return {}

    def update_weights(self):
        with timer("update_weights"):
            pass
"""


def write(folder: Path, home: str) -> None:
    """Write the package into `folder`, with timers and training data in `home`."""
    base = home.replace(".", "/")
    megatron = "slime/backends/megatron_utils"
    files = {
        "slime/__init__.py": "",
        "slime/utils/__init__.py": "",
        f"{base}/__init__.py": "",
        f"{base}/timer.py": TIMER,
        f"{base}/train_data_utils.py": TRAIN_DATA,
        f"{base}/logging_utils.py": LOGGING,
        "slime/backends/__init__.py": "",
        f"{megatron}/__init__.py": "",
        f"{megatron}/loss.py": LOSS,
        f"{megatron}/cp_utils.py": CP,
        f"{megatron}/model.py": MODEL.replace("HOME", home),
        f"{megatron}/actor.py": ACTOR.replace("HOME", home),
    }
    for name, source in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(source)
