"""Build a rank's model and its initial state, and load trained models."""

import dataclasses
import os
import types
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from torch import nn
from torch.utils.checkpoint import checkpoint as recompute

from bert_dp import files
from bert_dp.config import Config, ConfigError, Issue, hf_directory, init_issues, resolve
from bert_dp.config.errors import sha256
from bert_dp.config.hf import WEIGHTS
from bert_dp.data import tokenizer
from bert_dp.files.models import InitFrom
from bert_dp.model.bert import CrammedBert
from bert_dp.model.bilstm import BiLstm
from bert_dp.model.classifier import Classifier
from bert_dp.model.hf import load_hf
from bert_dp.model.interface import Model
from bert_dp.parallel import State
from bert_dp.tasks import LENGTH_MULTIPLE, DatasetInfo
from bert_dp.training import checkpoint
from bert_dp.training.devices import Precision
from bert_dp.training.distributed import HostCollectives
from bert_dp.training.loop import Rank

RunModel = CrammedBert | Classifier | BiLstm


@dataclasses.dataclass(frozen=True)
class LoadedCheckpoint:
    """Model for inference, on the CPU and in eval mode, with the metadata and tokenizer of its checkpoint."""

    path: Path
    facts: files.CheckpointFacts
    config: Config
    model: RunModel
    tokenizer: Tokenizer


def load(run: str | os.PathLike[str]) -> tuple[RunModel, Tokenizer]:
    """Load the model and the tokenizer of a checkpoint, or of the newest valid checkpoint of a run.

    The model is on the CPU and in eval mode. For a pretrained run, `model(ids_BS, positions_P)` returns the
    logits [P, V] at flat positions b * S + s. For a finetuned or distilled run, `model(ids_BS, real_BS)`
    returns the logits [B, L] of whole examples. `model.model(ids_BS)` returns the hidden states [B, S, H]; a
    BiLSTM has no `model.model`. Pretraining uses no <cls>, so encode texts for a pretrained run with
    `add_special_tokens=False`. Raise ConfigError if no checkpoint is valid.
    """
    loaded = load_checkpoint(checkpoint.resolve(os.path.expanduser(run)))
    return loaded.model, loaded.tokenizer


def load_checkpoint(path: Path) -> LoadedCheckpoint:
    """Load a checkpoint that has been verified. Raise ConfigError if its model or tokenizer is unusable."""
    state, facts = checkpoint.load(path)
    config = resolve([facts.config])
    if config.task is not None:
        message = f"the model of {path} is defined in {config.task}, which bert-dp executes only in training"
        hint = "load the checkpoint's model.safetensors into your own model"
        raise ConfigError([Issue("task", "unsupported", message, config.task, hint=hint)])
    model = make_model(config)
    model.to(next(iter(state["model"].values())).dtype)
    state["optimizer"] = {}  # free memory; inference needs only the weights
    if issues := checkpoint.state_issues(path, state, model):
        raise ConfigError(issues)
    model.load_state_dict(state["model"])
    return LoadedCheckpoint(path, facts, config, model.eval(), tokenizer.load(files.tokenizer_of(path)))


def make_model(config: Config) -> RunModel:
    """Build the model that a run of `config` trains, with arbitrary initial weights."""
    length = config.data.sequence_length
    if config.model.lstm_size:
        return BiLstm(config.model, config.finetune)
    if config.has_examples:
        return Classifier(config.model, length, config.finetune)
    return CrammedBert(config.model, length)


def prepare_model(rank: Rank, precision: Precision) -> tuple[Model, bool]:
    """Build the whole model on the rank's device. Return the model and whether it is compiled."""
    config = rank.config
    model = rank.task.build_model(config.run.seed).to(rank.device, precision.parameters)
    if config.parallel.activation_checkpointing:
        recompute_blocks(model)
    compiled = is_compiled(config, rank.device.type)
    if compiled:
        compile_parts(model, config.data.sequence_length)
    return model, compiled


def is_compiled(config: Config, device: str) -> bool:
    """Return whether to compile the model. `auto` compiles on a GPU, except with DeepSpeed stage 3."""
    if config.compile != "auto":
        return config.compile == "on"
    # in stage 3, DeepSpeed's hooks on every module make torch recompile until it reaches its recompile limit
    is_hooked = config.parallel.engine == "deepspeed" and config.parallel.zero_stage == 3
    return device == "cuda" and not is_hooked


def recompute_blocks(model: Model) -> None:
    """Make every block keep only its input for the backward pass, which recomputes the block."""
    for block in model.blocks():
        block.forward = types.MethodType(forward_recomputed, block)


def forward_recomputed(block: nn.Module, *inputs: Any) -> Any:
    """Run a block, and recompute it in the backward pass. This function is bound as a method, so all blocks
    share a compiled graph. Dynamo skips torch's code, so with torch's wrapper it would compile no block."""
    return recompute(type(block).forward, block, *inputs, use_reentrant=False)


def compile_parts(model: Model, sequence_length: int) -> None:
    """Compile `model.compiled_parts()` in place, which keeps the parameter names."""
    # Dynamo would split every graph at DDP's buckets, although DDP's hooks do not require that
    torch._dynamo.config.optimize_ddp = False
    # finetuning needs 16 graphs per length: with and without padding, in training and in evaluation, for the
    # first block (which can differ) and the others, and for global and local attention
    limit = 16 * -(-sequence_length // LENGTH_MULTIPLE)
    torch._dynamo.config.recompile_limit = limit
    torch._dynamo.config.accumulated_recompile_limit = max(256, limit)
    for part in model.compiled_parts():
        part.compile(dynamic=False)


def first_state(
    config: Config, model: Model, data: DatasetInfo, comm: HostCollectives
) -> tuple[State, InitFrom | None]:
    """Return a run's initial canonical state, in host memory, and a record of what was loaded, if anything.
    The weights are those of `model`. With run.init_from, the tensors that `Model.is_pretrained` selects are
    loaded instead and, if run.init_keeps is `moments`, the optimizer state as well. Collective. Raise
    ConfigError if a loaded tensor does not fit the model."""
    source = config.run.init_from
    own = {name: t.detach().to("cpu", copy=True) for name, t in model.state_dict().items()}
    if source is None:
        return {"model": own, "optimizer": {}, "scaler": {}}, None
    dropped: tuple[str, ...] = ()
    if directory := hf_directory(source):
        path = directory
        weights, dropped = load_hf(directory, config, data.tokenizer)
        state: State = {"model": weights, "optimizer": {}, "scaler": {}}
        digest = sha256(directory / WEIGHTS)
    else:
        # rank 0 chooses for all ranks, because the source run may still be writing and removing checkpoints
        path = Path(comm.from_rank_0("run.init_from", lambda: str(checkpoint.resolve(source))))
        state = _saved_state(path, source, config, data.tokenizer)
        digest = files.weights_hash(path)
    dtype = next(model.parameters()).dtype
    loaded = {name: t for name, t in state["model"].items() if model.is_pretrained(name)}
    fresh = {name: t for name, t in own.items() if not model.is_pretrained(name)}
    start: State = {
        "model": {**fresh, **_with_dtype(dtype, loaded)},
        "optimizer": _with_dtype(dtype, state["optimizer"]),
        "scaler": {},
    }
    if issues := checkpoint.state_issues(path, start, model):
        raise ConfigError([issue.within("run.init_from") for issue in issues])
    counts = {"tensors": len(loaded), "of": len(own)}
    return start, InitFrom(checkpoint=str(path), sha256=digest, dropped=list(dropped), **counts)


def _saved_state(path: Path, source: str, config: Config, tokenizer: str | None) -> State:
    """Load the tensors of the checkpoint that run.init_from selects. `tokenizer`: hash of the data's
    tokenizer. Raise ConfigError if the checkpoint does not fit the run."""
    state, facts = checkpoint.load(path)
    issues = init_issues(source, facts.config, config)
    if tokenizer is not None and facts.tokenizer not in (None, tokenizer):
        own = str(facts.tokenizer)[:16]
        message = f"{source} was trained with tokenizer {own}, but the shards use {tokenizer[:16]}"
        hint = "build the shards with data.tokenizer set to that run's tokenizer.json"
        issues.append(Issue("data.tokenizer", "conflict", message, tokenizer, "run.init_from", hint))
    keeps_moments = config.run.init_keeps == "moments"
    if keeps_moments and not state["optimizer"]:
        message = f"{path} was saved before the first step and contains no moments"
        issues.append(Issue("run.init_keeps", "conflict", message, "moments", "run.init_from", "use weights"))
    if issues:
        raise ConfigError(issues)
    return {**state, "optimizer": state["optimizer"] if keeps_moments else {}}


def _with_dtype(dtype: torch.dtype, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Convert floating-point tensors to `dtype`, but keep scalars, such as a step count, unchanged."""
    return {name: t.to(dtype) if t.is_floating_point() and t.dim() else t for name, t in tensors.items()}
