"""Build a Trainer from a configuration and, if a run is resumed, its checkpoint."""

import dataclasses
from pathlib import Path
from typing import Any

import torch

from bert_dp import cost, files, optim, parallel
from bert_dp.config import ConfigError, Issue, changed_settings, decide_precision, export_formats, peak_lr
from bert_dp.config.checks import ProfilePlan, residual_issues
from bert_dp.config.errors import sha256
from bert_dp.config.own_code import changed_code, code_hashes
from bert_dp.data.stream import TrainingStream
from bert_dp.files import CheckpointFacts
from bert_dp.model.load import first_state, prepare_model
from bert_dp.optim import Named
from bert_dp.tasks import DatasetInfo, Stream
from bert_dp.training import checkpoint, devices
from bert_dp.training.checkpoint import AsyncCheckpointer, TrainState
from bert_dp.training.devices import Placement, Precision, device_name
from bert_dp.training.distributed import HostCollectives
from bert_dp.training.loop import Rank, Trainer
from bert_dp.training.metrics import Meter, sample_communication
from bert_dp.training.process import Records
from bert_dp.training.profiler import StepTrace


@dataclasses.dataclass(frozen=True)
class Checkpoint:
    """Loaded checkpoint from which a run resumes."""

    path: Path
    tensors: parallel.State
    facts: CheckpointFacts


def check_same_data(comm: HostCollectives, data: DatasetInfo) -> None:
    """Raise ConfigError on each rank whose data differ from rank 0's. The data can differ if every node has
    its own cache. Collective."""
    first = comm.broadcast(data.data_hash)
    if data.data_hash != first:
        message = f"the data has hash {data.data_hash[:16]} on rank {comm.world.rank}, {first[:16]} on rank 0"
        hint = "set data.path to the same data on every node"
        raise ConfigError([Issue("data", "conflict", message, data.data_hash, hint=hint)])


def select_checkpoint(rank: Rank, policy: str) -> Checkpoint | None:
    """Load the checkpoint that rank 0 chooses to resume from; return None if a new run starts. `policy`:
    "auto" (newest valid checkpoint in the run directory), "never", or the path of a checkpoint or a run
    directory. Raises ConfigError if all checkpoints are damaged, or if the data, the user's code or a setting
    that must stay fixed has changed since the save. Collective."""
    if policy == "never":
        return None

    def choose() -> tuple[str, str]:
        if policy == "auto":
            found, passed_over = checkpoint.newest_valid(rank.run_dir / "checkpoints")
        else:
            found, passed_over = checkpoint.resolve(policy), []
        if found is None and passed_over:  # a new start would overwrite this run's records
            hint = "check the disk and run again, or choose another --run-dir"
            message = f"none of this run's checkpoints is valid: {passed_over[0]}"
            raise ConfigError([Issue("", "damaged", message, hint=hint)])
        for problem in passed_over:
            rank.log_rank0(f"checkpoint skipped: {problem}")
        return (str(found), sha256(found / "manifest.json")) if found else ("", "")

    chosen, manifest = rank.comm.from_rank_0("--resume", choose)
    if not chosen:
        return None
    path = Path(chosen)
    if not files.appears(path / "manifest.json", lambda file: sha256(file) == manifest):
        message = f"rank {rank.comm.world.rank} cannot see the checkpoint that rank 0 chose"
        hint = "use a run directory on a file system that all nodes share"
        raise ConfigError([Issue(str(path), "not_found", message, hint=hint)])
    tensors, facts = checkpoint.load(path)
    if changed := [*changed_settings(facts.config, rank.config), *changed_code(facts.code, rank.config)]:
        hint = "undo the change, or use --resume never and another run directory"
        raise ConfigError([dataclasses.replace(issue, hint=hint) for issue in changed])
    if facts.data_hash != rank.data.data_hash:
        own = rank.data.data_hash[:16]
        message = f"the run's data had hash {facts.data_hash[:16]}, but the current data has {own}"
        raise ConfigError([Issue("data", "conflict", message, own)])
    rank.log_rank0(f"resuming from {path.name}: {facts.samples} samples seen")
    return Checkpoint(path, tensors, facts)


def agree_precision(rank: Rank, resumed: Checkpoint | None) -> Precision:
    """Choose the run's precision. With `auto`, a resumed run keeps its precision; a new run gets one that all
    ranks' devices support. Raises ConfigError if model.residual_dtype needs a different one. Collective."""
    config = rank.config
    chosen = decide_precision(
        config.precision,
        [config.parallel.engine],
        on_gpu=rank.device.type == "cuda",
        has_bf16=bool(rank.comm.all_gather([devices.has_bf16(rank.device)]).all()),
        kept=resumed.facts.precision if resumed else None,
    )
    name = rank.comm.broadcast(chosen)
    if issues := residual_issues(config, name):
        raise ConfigError(issues)
    return devices.precision_of(name)


def build_trainer(
    rank: Rank, resumed: Checkpoint | None = None, plan: ProfilePlan | None = None
) -> tuple[Trainer, TrainState, parallel.State]:
    """Build the trainer; return it, the run's initial progress and the tensors to pass to `dry_run`.
    `plan`: steps to profile. Raises ConfigError if the checkpoint does not fit the model. Collective."""
    config, comm, device, data = rank.config, rank.comm, rank.device, rank.data
    precision = agree_precision(rank, resumed)
    devices.allow_tf32(precision, device)
    state = TrainState.from_checkpoint(resumed.facts) if resumed else TrainState()
    bare, compiled = prepare_model(rank, precision)
    num_parameters = sum(p.numel() for p in bare.parameters())
    if resumed is None:
        tensors, init = first_state(config, bare, data, comm)
    else:
        tensors, init = resumed.tensors, resumed.facts.init_from
        if issues := checkpoint.state_issues(resumed.path, tensors, bare):
            raise ConfigError(issues)
    engine = parallel.make_engine(
        parallel.engine_name(config.parallel, comm.world.size),
        config,
        comm.world,
        device,
        precision=precision.name,
        run_dir=rank.run_dir,
    )

    def make_optimizer(named: Named) -> torch.optim.Optimizer:
        return optim.make_optimizer(config.optim, named, bare, compiled=compiled, precision=precision.name)

    model, optimizer = engine.prepare(bare, make_optimizer)
    if config.log.step_times:
        sample_communication(model, config.log.every_steps)
    meter = Meter(
        comm,
        device,
        rank.layout,
        tokens_per_sample=data.tokens_per_sample or config.data.sequence_length,
        flops_per_token=rank.task.flops_per_token,
        peak_flops=cost.peak_flops(device_name(device), precision.name),
        skipped=state.skipped_steps,
    )
    if comm.world.rank == 0 and data.tokenizer_file is not None:
        files.write_text(rank.run_dir / files.TOKENIZER, data.tokenizer_file.read_text(encoding="utf-8"))
    folder = rank.run_dir / "checkpoints"
    is_saved = resumed is not None and resumed.path.parent.resolve() == folder.resolve()
    trainer = Trainer(
        **vars(rank),
        precision=precision,
        stream=make_stream(rank, engine, state.samples),
        engine=engine,
        bare_model=bare,
        model=model,
        optimizer=optimizer,
        num_parameters=num_parameters,
        metadata={
            "config": config.model_dump(mode="json"),
            "code": code_hashes(config),
            "data_hash": data.data_hash,
            "tokenizer": data.tokenizer,
            "compiled": compiled,
            "device": device.type,
            "precision": precision.name,
            "world_size": comm.world.size,
            "init_from": init.model_dump() if init else None,
        },
        meter=meter,
        checkpointer=AsyncCheckpointer(
            folder,
            config.checkpoint,
            log_rank0=rank.log_rank0,
            saved_step=state.step if is_saved else None,  # None = `folder` has no checkpoint of this run yet
        ),
        records=Records(rank.run_dir, rank.log_rank0),
        trace=StepTrace(plan, comm, rank.run_dir, rank.heartbeat),
    )
    return trainer, state, tensors


def make_stream(rank: Rank, engine: parallel.Engine, start_sample: int) -> Stream:
    """Create the stream of this replica's micro batches."""
    if rank.config.data.synthetic:
        batch: Any = rank.task.example_batch(rank.config.batch.micro_size)
        batch = batch.pin() if rank.device.type == "cuda" else batch
        return TrainingStream(
            lambda _: batch, micro_size=1, dp_rank=0, dp_size=1, start_sample=0, workers=0, pin=False
        )
    return rank.task.stream(dp_rank=engine.dp_rank, dp_size=engine.dp_size, start_sample=start_sample)


def cut_records_back(trainer: Trainer, state: TrainState, resumed: Checkpoint | None) -> None:
    """Remove records and set aside checkpoints of steps after the one at which the run starts. Collective."""
    run_dir, steps = trainer.run_dir, trainer.run_dir / "steps"
    if trainer.comm.world.rank == 0:
        lines = [run_dir / name for name in ("metrics.jsonl", "evals.jsonl", "noise.jsonl")]
        for path in (*lines, *steps.glob("rank-*.jsonl")):
            files.cut_back(path, state.step if resumed else -1)
        (run_dir / "summary.json").unlink(missing_ok=True)  # left by an earlier start
        if trainer.config.log.step_times:
            steps.mkdir(exist_ok=True)
        checkpoint.set_aside_after(run_dir / "checkpoints", state.step)
    trainer.comm.barrier()


def describe(trainer: Trainer, placed: Placement, resumed: Checkpoint | None) -> None:
    """Write a description of the run to rank 0's log."""
    config, world = trainer.config, trainer.comm.world
    threads = f"{placed.threads} thread{'s' * (placed.threads > 1)} per rank"
    compiled = "compiled" if trainer.metadata["compiled"] else "eager"
    engine = parallel.engine_name(config.parallel, world.size)
    if trainer.layout.tensor > 1:
        engine += f", tensor-parallel size {trainer.layout.tensor}"
    residual = ", residual stream in bf16" if config.model.residual_dtype == "bf16" else ""
    lines = [
        f"ranks: {world.size} x {device_name(trainer.device)}, {threads}, {placed}",
        f"batch: {trainer.layout}",
        f"model: {trainer.num_parameters:,} parameters, {trainer.precision.name}{residual}, {compiled}, "
        f"engine {engine}",
        f"learning rate: {peak_lr(config).equation}, {config.optim.name}",
        f"export: {export_formats(config)}",
    ]
    if resumed is None and (init := trainer.metadata["init_from"]):
        lines.append(
            f"run.init_from ({config.run.init_keeps}): loaded {init['tensors']} of {init['of']} tensors from "
            f"{init['checkpoint']}, SHA-256 {init['sha256'][:16]}"
        )
        if dropped := init["dropped"]:
            lines.append(f"not loaded, because the model has no such tensors: {', '.join(dropped)}")
    for line in lines:
        trainer.log_rank0(line)


def write_environment(trainer: Trainer, placed: Placement) -> None:
    """Add rank 0's device, library versions and settings to environment.json. Does nothing on other ranks."""
    if trainer.comm.world.rank != 0:
        return
    path = trainer.run_dir / "environment.json"
    on_gpu = trainer.device.type == "cuda"
    facts = files.read_json(path) or {}
    facts["worker"] = {
        "torch": torch.__version__,
        "device": device_name(trainer.device),
        "cuda": torch.version.cuda,
        "nccl": ".".join(map(str, torch.cuda.nccl.version())) if on_gpu else None,
        "world_size": trainer.comm.world.size,
        "threads_per_rank": placed.threads,
        "cores": [devices.format_cores(share) for share in placed.shares],  # one entry per rank on this node
        "config_hash": trainer.config.hash(),
        "code": trainer.metadata["code"],
        "precision": trainer.precision.name,
        "compiled": trainer.metadata["compiled"],
    }
    files.write_json(path, facts)
