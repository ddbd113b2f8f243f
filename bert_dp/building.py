"""A rank's model before it trains: its data's shape, precision, first weights, and whether it is compiled."""

from __future__ import annotations

import dataclasses
import time
from pathlib import Path
from typing import Any

import torch

from bert_dp import checkpoint, data, dist, model
from bert_dp.config import BatchPlan, Config, ConfigError, Manifest, init_issues
from bert_dp.parallel import State
from bert_dp.train import Precision, mlm_loss

# torch.compile on a CPU: seconds to compile, and the share of the step it saves (benchmarks/step_speed.py)
CPU_COMPILE_S = 60.0
CPU_COMPILE_GAIN = 0.015


@dataclasses.dataclass(frozen=True)
class Corpus:
    manifest: Manifest
    train: data.Shards
    held_out: data.Shards


def choose_precision(setting: str, device: torch.device) -> Precision:
    """auto = bf16 on a GPU with native bf16, fp16 with a gradient scaler on an older one, fp32 on a CPU."""
    if setting == "auto":
        if device.type == "cpu":
            setting = "fp32"
        else:
            setting = "bf16" if torch.cuda.get_device_capability(device) >= (8, 0) else "fp16"
    wide = torch.float64 if setting == "fp64" else torch.float32
    return Precision(setting, wide, {"bf16": torch.bfloat16, "fp16": torch.float16}.get(setting))


def build_model(
    config: Config,
    corpus_: Corpus,
    plan: BatchPlan,
    precision: Precision,
    comm: dist.Comm,
    device: torch.device,
    compiled: bool | None,
    resumed: bool,
) -> tuple[model.CrammedBert, bool]:
    """The whole model on its device, and whether it is compiled (as before on resume). Collective."""
    bare = model.build_model(config.model, config.data.sequence_length, config.run.seed)
    if config.run.init_from is not None and not resumed:
        load_weights(config, config.run.init_from, bare, corpus_, comm)
    bare = bare.to(device, precision.parameters)
    if compiled is None:
        compiled = comm.share(compile_pays(config, corpus_, bare, plan, precision, device))
    if config.parallel.activation_checkpointing:
        model.checkpoint_activations(bare)
    if compiled:
        model.compile_regions(bare)
    return bare, compiled


def load_weights(
    config: Config, where: str, bare: model.CrammedBert, corpus_: Corpus, comm: dist.Comm
) -> None:
    """run.init_from. Rank 0 chooses the checkpoint: the other run may go on, and prune. Collective.

    Raises ConfigError when the weights are another model's or were trained with another tokenizer.
    """
    answer: dict[str, Any] = {}
    if comm.world.rank == 0:
        try:
            answer["path"] = str(checkpoint.resolve(where))
        except ConfigError as error:
            answer["issues"] = [f"run.init_from: {issue}" for issue in error.issues]
    answer = comm.share(answer)
    if "issues" in answer:
        raise ConfigError(answer["issues"])
    path = Path(answer["path"])
    state, facts = checkpoint.load(path)
    issues = init_issues(where, facts.config, config)
    tokenizer = corpus_.manifest.tokenizer.sha256
    if facts.tokenizer not in (None, tokenizer):
        issues.append(
            f"data.tokenizer: run.init_from {where} was trained with tokenizer "
            f"{str(facts.tokenizer)[:16]}, the shards have {tokenizer[:16]}; build them with "
            "data.tokenizer set to that run's tokenizer.json"
        )
    weights = {name: t.float() if t.dtype == torch.float64 else t for name, t in state["model"].items()}
    start: State = {"model": weights, "optimizer": {}, "scaler": {}}
    issues += [f"run.init_from: {line}" for line in checkpoint.state_issues(path, start, bare)]
    if issues:
        raise ConfigError(issues)
    bare.load_state_dict(weights)


def compile_pays(
    config: Config,
    corpus_: Corpus,
    bare: model.CrammedBert,
    plan: BatchPlan,
    precision: Precision,
    device: torch.device,
) -> bool:
    """compile: auto = always on a GPU; on a CPU when it saves more time over the run than it takes."""
    if config.compile != "auto":
        return config.compile == "on"
    if config.parallel.engine == "deepspeed" and config.parallel.zero_stage == 3:
        return False  # its hooks on every module make torch compile anew until it gives up
    if device.type == "cuda":
        return True
    schedule = config.schedule
    if schedule.hours is not None:
        run_s = schedule.hours * 3600
    else:
        sequences = (
            schedule.tokens / config.data.sequence_length
            if schedule.tokens
            else ((schedule.steps or 0) * config.batch.global_size)
        )
        run_s = (
            sequences
            / (plan.micro_size * plan.dp)
            * time_micro_step(config, corpus_, bare, precision, device)
        )
    return run_s * CPU_COMPILE_GAIN > CPU_COMPILE_S


def time_micro_step(
    config: Config, corpus_: Corpus, bare: model.CrammedBert, precision: Precision, device: torch.device
) -> float:
    """Seconds of the second of two eager forward/backward passes; leaves no gradients."""
    ids = torch.arange(config.batch.micro_size).numpy()
    batch = data.training_batch(corpus_.train, ids, seed=0, num_masked=config.num_masked, shuffle=False)
    seconds = 0.0
    for _ in range(2):
        start = time.perf_counter()
        with precision.context(device):
            loss = mlm_loss(bare, batch.to(device))
        loss.backward()
        seconds = time.perf_counter() - start
    bare.zero_grad(set_to_none=True)
    return seconds
