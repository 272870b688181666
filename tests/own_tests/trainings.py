"""Whole trainings of AReaL, OpenRLHF and SkyRL on CPU, `stagescope run --` in front.

    python tests/own_tests/trainings.py AReaL --checkout DIRECTORY --python ENVIRONMENT/bin/python

ENVIRONMENT has the trainer's dependencies, vLLM's CPU build and stagescope's extra `workers`: see
docs/whole-trainings.md for the versions that ran. The checkout is copied; what names CUDA in the
copies of OpenRLHF and SkyRL is the CPU. A service of its own takes the training in. Printed is each
step with the trainer's own numbers and the service's. Exits with 1 where they differ, where a step
is not complete, or where something was lost.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final

import click

import stagescope

HERE: Final = Path(__file__).resolve().parent
SECONDS: Final = 1800
"""What a training may take."""
ENVIRON: Final = {
    "HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false",
    "OMP_NUM_THREADS": "1", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "DS_ACCELERATOR": "cpu", "RAY_AUTH_MODE": "disabled",
}  # fmt: skip

Numbers = Mapping[str, float]
"""A service's name of a number -> the trainer's value."""


@dataclasses.dataclass(frozen=True)
class Change:
    """Replaces a text in each file of the checkout's copy that a pattern names."""

    files: str
    old: str
    new: str


@dataclasses.dataclass(frozen=True)
class Renamed:
    """Arguments that versions of a trainer name differently.

    Attributes:
        file: Of the checkout, with the options.
        variants: The arguments of each version; used are the first whose options `file` has.
    """

    file: str
    variants: tuple[tuple[str, ...], ...]

    def of(self, checkout: Path) -> tuple[str, ...]:
        """Return the arguments of the version that is checked out.

        Raises:
            click.ClickException: it has none of the variants: another version.
        """
        text = (checkout / self.file).read_text("utf-8")
        for variant in self.variants:
            if all(f'"{each}"' in text for each in variant if each.startswith("--")):
                return variant
        raise click.ClickException(f"{self.file} has none of {self.variants}: another version?")


@dataclasses.dataclass(frozen=True)
class Training:
    """How a trainer is started, and where its own numbers are.

    Attributes:
        arguments: Of its environment's Python, from the folder of the model and the prompts.
        theirs: Yields (step, numbers) from what it printed.
        tolerance: Relative, of the digits that it prints.
        changes: So that it runs on CPU.
        files: Written beside the model: name -> text.
        packages: Folders of the copy on PYTHONPATH.
        renamed: Arguments that depend on the version.
    """

    arguments: Callable[[Path], list[str]]
    theirs: Callable[[str], Iterator[tuple[int, Numbers]]]
    tolerance: float
    changes: tuple[Change, ...] = ()
    files: Mapping[str, str] = dataclasses.field(default_factory=dict)
    packages: tuple[str, ...] = ("",)
    renamed: tuple[Renamed, ...] = ()


# --- AReaL ----------------------------------------------------------------------------------
def _areal(folder: Path) -> list[str]:
    data, model = folder / "gsm8k", folder / "qwen"
    return [
        "examples/math/gsm8k_rl.py", "--config", "examples/math/gsm8k_grpo_cpu.yaml",
        "scheduler.type=local", f"actor.path={model}", f"train_dataset.path={data}",
        f"valid_dataset.path={data}", "train_dataset.batch_size=4", "valid_dataset.batch_size=4",
        "gconfig.max_new_tokens=24", "rollout.max_concurrent_rollouts=4",
        f"cluster.fileroot={folder}/exp", f"cluster.name_resolve.nfs_record_root={folder}/names",
        "+total_train_steps=6", "actor.optimizer.lr=1e-3", "evaluator.freq_epochs=null",
        "saver.freq_epochs=null", "actor.weight_update_mode=disk", "+vllm.enforce_eager=true",
        # A sequence in each: those of a longer one attend to each other without FlashAttention.
        "actor.mb_spec.max_tokens_per_mb=70",
    ]  # fmt: skip


_OF_AREAL: Final = {
    "ppo_actor/update/compute_logp/kl_div_direct/avg": "rollout_corr/kl",
    "ppo_actor/update/old_logp/avg": "logprob/rollout_mean",
    "ppo_actor/update/behave_imp_weight/max": "rollout_corr/rollout_is_max",
    "ppo_actor/update/behave_imp_weight/min": "rollout_corr/rollout_is_min",
}


def _of_areal(printed: str) -> Iterator[tuple[int, Numbers]]:
    parts = re.split(r"Train step (\d+)/\d+ done", printed)
    for number, text in zip(parts[1::2], parts[2::2], strict=True):
        cells: dict[str, str] = {}
        for line in (line for line in text.splitlines() if "│" in line):
            columns = [cell.strip() for cell in line.strip().strip("│").split("│")]
            cells |= dict(zip(columns[::2], columns[1::2], strict=False))
        yield (
            int(number) - 1,
            {ours: float(cells[name]) for name, ours in _OF_AREAL.items() if name in cells},
        )


# --- OpenRLHF -------------------------------------------------------------------------------
def _openrlhf(folder: Path) -> list[str]:
    return [
        "-m", "openrlhf.cli.train_ppo_ray", "--logger.wandb.run_name", "openrlhf",
        "--ref.num_gpus_per_node", "1", "--actor.num_gpus_per_node", "1",
        "--train.colocate_actor_ref", "--vllm.num_engines", "1", "--vllm.enforce_eager",
        "--vllm.gpu_memory_utilization", "0.05", "--actor.model_name_or_path", f"{folder}/qwen",
        "--reward.remote_url", f"{folder}/reward.py", "--ckpt.output_dir", f"{folder}/out",
        "--ckpt.path", f"{folder}/ckpt", "--train.micro_batch_size", "2", "--train.batch_size",
        "8", "--rollout.micro_batch_size", "4", "--rollout.batch_size", "4",
        "--rollout.n_samples_per_prompt", "2", "--data.max_samples", "32", "--data.max_len", "128",
        "--rollout.max_new_tokens", "16", "--actor.adam.lr", "1e-3",
        "--algo.advantage.estimator", "group_norm",
        "--data.prompt_dataset", f"{folder}/prompts.jsonl", "--data.input_key", "input",
        "--data.label_key", "label", "--data.apply_chat_template",
        "--ds.attn_implementation", "eager",
    ]  # fmt: skip


def _of_openrlhf(printed: str) -> Iterator[tuple[int, Numbers]]:
    for step, value in re.findall(r"Global step (\d+): .*?'vllm_kl': ([-\d.e]+)", printed):
        yield int(step), {"rollout_corr/kl": float(value)}


_DIGITS_ARE_REWARDED: Final = """
import torch

def reward_func(queries, prompts, labels):
    scores = torch.tensor([sum(map(str.isdigit, each)) / max(len(each), 1) for each in queries])
    return {"rewards": scores, "scores": scores, "extra_logs": {}}
"""
_GROUP: Final = '''    import torch
    from vllm.distributed.utils import StatelessProcessGroup

    group = StatelessProcessGroup.create(
        host=master_address, port=master_port, rank=rank, world_size=world_size
    )

    class Group:
        """Broadcasts over vLLM's own store: there is no NCCL."""

        def broadcast(self, tensor, src, stream=None):
            if rank == src:
                group.broadcast_obj(tensor.detach().contiguous().view(torch.uint8).numpy(), src)
            else:
                received = torch.from_numpy(group.broadcast_obj(None, src).copy())
                tensor.copy_(received.view(tensor.dtype).view(tensor.shape))

    return Group()
    from vllm.distributed.device_communicators.pynccl import'''
_PADDING: Final = """import torch.nn.functional as F
from einops import rearrange


def index_first_axis(x, indices):
    return x[indices]


def unpad_input(x, mask):
    lengths, chosen = mask.sum(-1, dtype=torch.int32), mask.flatten().nonzero().flatten()
    starts = F.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))
    return x.flatten(0, 1)[chosen], chosen, starts, int(lengths.max()), lengths


def pad_input(x, indices, batch, length):
    padded = x.new_zeros(batch * length, *x.shape[1:])
    padded[indices] = x
    return padded.unflatten(0, (batch, length))"""
_EVERY: Final = "openrlhf/**/*.py"


# --- SkyRL ----------------------------------------------------------------------------------
def _skyrl(folder: Path) -> list[str]:
    return [
        "-m", "skyrl.train.entrypoints.main_base", f"data.train_data=['{folder}/skyrl.parquet']",
        "trainer.run_name=skyrl", "trainer.logger=console", "trainer.strategy=fsdp",
        f"trainer.policy.model.path={folder}/qwen", "trainer.flash_attn=false",
        "trainer.remove_microbatch_padding=false", "trainer.placement.colocate_all=false",
        "trainer.placement.policy_num_gpus_per_node=1",
        "trainer.algorithm.advantage_estimator=grpo", "trainer.algorithm.use_kl_loss=false",
        "trainer.epochs=1", "trainer.train_batch_size=8", "trainer.policy_mini_batch_size=4",
        "trainer.micro_forward_batch_size_per_gpu=4", "trainer.micro_train_batch_size_per_gpu=4",
        "trainer.policy.optimizer_config.lr=1e-3", "trainer.eval_before_train=false",
        "trainer.eval_interval=-1", "trainer.ckpt_interval=-1", "trainer.resume_mode=null",
        f"trainer.export_path={folder}/exports", f"trainer.ckpt_path={folder}/checkpoints",
        f"trainer.log_path={folder}/logs", "trainer.max_prompt_length=256",
        "environment.env_class=gsm8k_multi_turn", "generator.max_turns=2",
        "generator.max_input_length=512", "generator.n_samples_per_prompt=2",
        "generator.sampling_params.max_generate_length=16",
        "generator.inference_engine.num_engines=1",
        "generator.inference_engine.tensor_parallel_size=1",
        "generator.inference_engine.distributed_executor_backend=mp",
        "generator.inference_engine.gpu_memory_utilization=0.05",
        "generator.inference_engine.enforce_eager=true",
        "generator.inference_engine.weight_sync_backend=delta",
        f"generator.inference_engine.delta_weight_sync.sync_dir={folder}/weights",
    ]  # fmt: skip


_OF_SKYRL: Final = {
    "policy/rollout_train_logprobs_abs_diff_mean": "logprob_abs_diff/mean",
    "policy/rollout_train_logprobs_abs_diff_max": "logprob_abs_diff/max",
}


def _of_skyrl(printed: str) -> Iterator[tuple[int, Numbers]]:
    parts = re.split(r"Step (\d+): \n", printed)
    for number, text in zip(parts[1::2], parts[2::2], strict=True):
        found = dict(re.findall(r"'([\w/]+)': '([-\d.e]+)'", text))
        if theirs := {
            ours: float(found[name]) for name, ours in _OF_SKYRL.items() if name in found
        }:
            yield int(number), theirs


_SKYRL: Final = "skyrl/**/*.py"

TRAININGS: Final = {
    "AReaL": Training(_areal, _of_areal, 1e-4),
    "OpenRLHF": Training(
        _openrlhf,
        _of_openrlhf,
        1e-9,
        changes=(
            Change(_EVERY, 'torch.device(f"cuda:{torch.cuda.current_device()}")', '"cpu"'),
            Change(_EVERY, "torch.cuda.current_device()", '"cpu"'),
            Change(_EVERY, "torch.cuda.current_stream()", "None"),
            Change(_EVERY, "torch.cuda.synchronize()", "None"),
            Change(_EVERY, "torch.cuda.set_device(local_rank)", "None"),
            Change("openrlhf/utils/deepspeed/deepspeed.py", '"cuda", (dp_size', '"cpu", (dp_size'),
            Change("openrlhf/trainer/ray/vllm_worker_wrap.py", 'device="cuda"', 'device="cpu"'),
            Change("openrlhf/cli/train_ppo_ray.py", "ray.init(\n",
                   "ray.init(num_gpus=2, num_cpus=8, object_store_memory=500_000_000,\n"),
            Change("openrlhf/utils/distributed_util.py",
                   "    from vllm.distributed.device_communicators.pynccl import", _GROUP),
            Change("openrlhf/models/ring_attn_utils.py", "from flash_attn.bert_padding import "
                   "index_first_axis, pad_input, rearrange, unpad_input", _PADDING),
            Change("openrlhf/models/ring_attn_utils.py",
                   "from flash_attn.utils.distributed import all_gather", ""),
        ),
        files={"reward.py": _DIGITS_ARE_REWARDED},
        renamed=(
            Renamed(
                "openrlhf/cli/train_ppo_ray.py",
                (
                    # Since 0.11.2.
                    ("--algo.advantage.is_correction_level", "token",
                     "--algo.advantage.is_correction_mode", "clip"),
                    ("--algo.advantage.is_correction_enable",),
                ),
            ),
        ),
    ),
    "SkyRL": Training(
        _skyrl,
        _of_skyrl,
        1e-6,
        changes=(
            Change(_SKYRL, "torch.cuda.current_device()", "'cpu'"),
            Change(_SKYRL, "torch.cuda.synchronize()", "None"),
            Change(_SKYRL, "torch.accelerator.synchronize()", "None"),
            Change(_SKYRL, "torch.cuda.set_device(local_rank)", "None"),
            Change(_SKYRL, 'backend="cpu:gloo,cuda:nccl"', 'backend="gloo"'),
            Change(_SKYRL, '"cuda", mesh_shape', '"cpu", mesh_shape'),
            Change(_SKYRL, 'device_type="cuda"', 'device_type="cpu"'),
            Change(_SKYRL, 'device="cuda"', 'device="cpu"'),
            Change(_SKYRL, "buf.detach().cuda()", "buf.detach()"),
            Change("skyrl/backends/skyrl_train/workers/model_wrapper.py",
                   "from flash_attn.bert_padding import pad_input, unpad_input", ""),
            Change("skyrl/train/utils/utils.py", "log_to_driver=True)",
                   "log_to_driver=True, num_gpus=2, num_cpus=8, object_store_memory=500_000_000)"),
            Change("skyrl/train/utils/tracking.py", "{obj:.4f}", "{obj:.9g}"),
            Change("skyrl-gym/skyrl_gym/envs/gsm8k/utils.py", "        return 0\n",
                   "        return sum(map(str.isdigit, solution_str)) / 100\n"),
        ),
        packages=("", "skyrl-gym"),
    ),
}  # fmt: skip


def on_cpu(training: Training, checkout: Path, copy: Path) -> None:
    """Copy a checkout, with its changes.

    Raises:
        click.ClickException: a text that is to be replaced is not there: another version.
    """
    shutil.copytree(checkout, copy, ignore=shutil.ignore_patterns(".git"))
    for change in training.changes:
        found = [path for path in copy.glob(change.files) if change.old in path.read_text("utf-8")]
        if not found:
            raise click.ClickException(f"{change.files} has no {change.old!r}: another version?")
        for path in found:
            path.write_text(path.read_text("utf-8").replace(change.old, change.new), "utf-8")


def train(
    training: Training, python: str, copy: Path, folder: Path, home: Path, output: Path,
    more: Sequence[str],
) -> str:  # fmt: skip
    """Run a training with a service at `home`; return what it printed, which is in `output`, too.

    Raises:
        CalledProcessError: it failed.
    """
    bin_folder = Path(python).absolute().parent
    kept = {name: value for name, value in os.environ.items() if not name.startswith("STAGESCOPE_")}
    env = {
        **kept, **ENVIRON, "STAGESCOPE_HOME": str(home),
        "PYTHONPATH": os.pathsep.join(str(copy / package) for package in training.packages),
        "PATH": f"{bin_folder}{os.pathsep}{kept['PATH']}",
    }  # fmt: skip
    assets = str(HERE / "plugins" / "tiny_qwen.py")
    subprocess.run([python, assets, str(folder)], env=env, check=True)
    for name, text in training.files.items():
        (folder / name).write_text(text, "utf-8")
    by_version = [each for renamed in training.renamed for each in renamed.of(copy)]
    arguments = [*training.arguments(folder), *by_version, *more]
    command = [python, "-m", "stagescope", "run", "--", "python", *arguments]
    with output.open("w") as file:
        subprocess.run(
            command, cwd=copy, env=env, stdout=file, stderr=subprocess.STDOUT, check=True,
            timeout=SECONDS,
        )  # fmt: skip
    return output.read_text("utf-8", errors="replace")


def is_same(training: Training, printed: str, session: stagescope.Session) -> bool:
    """Print each step; return whether all are complete and have the trainer's numbers."""
    same, steps, stages = True, 0, set[str]()
    for step, theirs in training.theirs(printed):
        ours = session.step(step).metrics()
        equal = all(
            math.isclose(ours[name], value, rel_tol=training.tolerance, abs_tol=1e-9)
            for name, value in theirs.items()
        )
        numbers = ", ".join(f"{name} {value:g} ({ours[name]:g})" for name, value in theirs.items())
        click.echo(f"step {step}: {ours.complete}, {numbers}{'' if equal else ': they differ'}")
        same = same and equal and bool(theirs) and ours.complete == "complete"
        stages |= {str(row["stage"]) for row in session.step(step).stages()}
        steps += 1
    lost = len(session.lost())
    click.echo(f"{steps} steps, {lost} losses, stages {', '.join(sorted(stages))}")
    return same and steps > 0 and not lost


@click.command()
@click.argument("name", type=click.Choice(list(TRAININGS)))
@click.option("--checkout", type=click.Path(exists=True, path_type=Path), required=True)
@click.option("--python", required=True, help="Of the environment that has the trainer.")
@click.argument("more", nargs=-1)
def main(name: str, checkout: Path, python: str, more: tuple[str, ...]) -> None:
    """Train, and compare the trainer's own numbers with the service's.

    What the training prints is in NAME.log. MORE are further arguments of the trainer, behind `--`
    where they begin with a dash.
    """
    training = TRAININGS[name]
    with tempfile.TemporaryDirectory(prefix="stagescope-trainings-") as temporary:
        copy, folder, home = (Path(temporary, part) for part in ("checkout", "assets", "home"))
        on_cpu(training, checkout, copy)
        service = {**os.environ, "STAGESCOPE_HOME": str(home)}
        cli = [sys.executable, "-m", "stagescope"]
        serve = [*cli, "serve", "--address", "local", "--port", "0", "--json"]
        try:
            started = subprocess.run(serve, env=service, check=True, stdout=subprocess.PIPE)
            url = json.loads(started.stdout)["url"]
            printed = train(training, python, copy, folder, home, Path(f"{name}.log"), more)
            token = (home / "read.token").read_text().strip()
            with stagescope.attach(url, token=token) as session:
                same = is_same(training, printed, session)
        finally:
            subprocess.run([*cli, "stop"], env=service, check=False)
    sys.exit(0 if same else 1)


if __name__ == "__main__":
    main()
