"""From a configuration to a Job: what a rank builds before its first step."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from bert_dp import checkpoint, cost, ddp_counters, dist, optim, parallel, record
from bert_dp.binding import Placement, format_cores
from bert_dp.building import first_state, prepare_model
from bert_dp.config import (
    BatchPlan,
    Config,
    ConfigError,
    changed_settings,
    peak_lr,
)
from bert_dp.heartbeat import Heartbeat
from bert_dp.lines import LOSSES, Records
from bert_dp.metrics import Meter
from bert_dp.precision import choose_precision
from bert_dp.saving import Saver
from bert_dp.tasks import Metadata, SameBatch, Stream, Task
from bert_dp.train import Counters, Job
from bert_dp.world import World


@dataclasses.dataclass(frozen=True)
class Resume:
    """What an earlier part of this run left, or a fresh start."""

    path: Path | None
    state: parallel.State | None
    counters: Counters
    compiled: bool | None


def say(comm: dist.Comm, text: str) -> None:
    """A line of rank 0's log; the launcher shows it."""
    if comm.world.rank == 0:
        with contextlib.suppress(OSError):  # the log's disk is full: no reason to end the run
            sys.stdout.write(record.printable(text) + "\n")
            sys.stdout.flush()


def bind(config: Config, device: torch.device, world: World) -> Placement:
    """Device, cores and threads of this rank."""
    if device.type == "cuda":
        torch.cuda.set_device(device)
        # fp32 means fp32: the peak that MFU divides by is not TF32's
        torch.set_float32_matmul_precision("highest" if config.precision == "fp32" else "high")
    return dist.bind(device, world)


def check_same_data(comm: dist.Comm, data: Metadata) -> None:
    """Raises ConfigError on a rank whose data are not rank 0's: nodes may have caches of their own.
    Collective."""
    first = comm.share(data.data_hash)
    if data.data_hash != first:
        raise ConfigError(
            [
                f"data: rank {comm.world.rank} has shards {data.data_hash[:16]}, rank 0 has {first[:16]}; "
                "name the same shards by data.path on every node"
            ]
        )


def find_resume(
    config: Config, run_dir: Path, comm: dist.Comm, device: torch.device, data: Metadata, policy: str
) -> Resume:
    """The checkpoint to go on from: rank 0 chooses and verifies, all ranks follow its choice and its error.

    policy: auto = the newest valid one of the run directory, if any; never; or a path. Raises ConfigError
    when a path holds none, or when settings or data differ that may not. Collective.
    """
    answer: dict[str, Any] = {"path": None, "passed_over": []}
    if comm.world.rank == 0 and policy != "never":
        try:
            if policy == "auto":
                found, answer["passed_over"] = checkpoint.newest_valid(run_dir / "checkpoints")
            else:
                found = checkpoint.resolve(policy)
            answer["path"] = str(found) if found else None
        except ConfigError as error:
            answer["issues"] = list(error.issues)
    answer = comm.share(answer)
    if "issues" in answer:
        raise ConfigError([f"--resume: {issue}" for issue in answer["issues"]])
    for problem in answer["passed_over"]:
        say(comm, f"checkpoint passed over: {problem}")
    if answer["path"] is None:
        return Resume(None, None, Counters(), None)
    path = Path(answer["path"])
    state, facts = checkpoint.load(path)
    if changed := changed_settings(facts.config, config):
        raise ConfigError(
            [
                f"--resume {path}: {line}; undo it or use --resume never in another run directory"
                for line in changed
            ]
        )
    if facts.data_hash != data.data_hash:
        raise ConfigError(
            [f"data: the run was trained on shards {facts.data_hash[:16]}, these are {data.data_hash[:16]}"]
        )
    counters = Counters(**{f.name: getattr(facts, f.name) for f in dataclasses.fields(Counters)})
    say(comm, f"resuming from {path.name}: {counters.samples} samples seen")
    same_device = facts.device == device.type
    precision = choose_precision(config.precision, device).name
    if precision != facts.precision:
        say(comm, f"warning: the run was trained in {facts.precision} so far, from here in {precision}")
    return Resume(path, state, counters, facts.compiled if same_device else None)


def assemble(
    config: Config,
    plan: BatchPlan,
    run_dir: Path,
    comm: dist.Comm,
    device: torch.device,
    task: Task,
    data: Metadata,
    resume: Resume,
    heartbeat: Heartbeat,
    received_signal: Callable[[], int],
) -> tuple[Job, parallel.State]:
    """Everything `train` needs, positioned at `resume.counters`, and the state that it starts from, not yet
    loaded. Collective.

    Raises ConfigError for a checkpoint with the tensors of another model.
    """
    precision = choose_precision(config.precision, device)
    bare, compiled = prepare_model(config, task, plan, precision, comm, device, resume.compiled)
    num_parameters = sum(p.numel() for p in bare.parameters())
    start = resume.state or first_state(config, bare, data, comm)
    if resume.path is not None and (issues := checkpoint.state_issues(resume.path, start, bare)):
        raise ConfigError(issues)
    name = parallel.engine_name(config.parallel, comm.world.size)
    engine = parallel.make_engine(name, config, comm.world, device, precision=precision.name, run_dir=run_dir)

    def make_optimizer(named: optim.NamedParameters) -> torch.optim.Optimizer:
        return optim.make_optimizer(config.optim, named, bare, compiled=compiled)

    wrapped, optimizer = engine.prepare(bare, make_optimizer)
    if config.log.step_times:
        ddp_counters.sample_every(wrapped, config.log.every_steps)
    stream = make_stream(config, task, engine, device, resume.counters.samples)
    meter = Meter(
        comm,
        device,
        plan,
        sequence_length=config.data.sequence_length,
        flops_per_token=task.flops_per_token,
        peak_flops=cost.peak_flops(device_name(device), precision.name),
    )
    facts = {
        "config": config.model_dump(mode="json"),
        "data_hash": data.data_hash,
        "tokenizer": data.tokenizer,
        "compiled": compiled,
        "device": device.type,
        "precision": precision.name,
        "world_size": comm.world.size,
    }
    folder = run_dir / "checkpoints"
    here = resume.path is not None and resume.path.parent.resolve() == folder
    line = functools.partial(say, comm)
    lost = record.HeldDirectory(run_dir).lost if comm.world.rank == 0 else lambda: None
    saver = Saver(folder, config.checkpoint, line, resume.counters.step if here else None, lost)
    job = Job(
        config=config,
        plan=plan,
        run_dir=run_dir,
        comm=comm,
        device=device,
        precision=precision,
        engine=engine,
        model=wrapped,
        bare_model=bare,
        optimizer=optimizer,
        task=task,
        data=data,
        stream=stream,
        num_parameters=num_parameters,
        meter=meter,
        facts=facts,
        saver=saver,
        lost=lost,
        records=Records(run_dir, line),
        say=line,
        heartbeat=heartbeat,
        received_signal=received_signal,
        mirror=make_mirror(config, run_dir, comm),
        norm_pairs=getattr(engine, "norm_pairs", None),
    )
    return job, start


def make_stream(
    config: Config, task: Task, engine: parallel.Engine, device: torch.device, start_sample: int
) -> Stream:
    """Where this replica's micro batches come from."""
    if config.data.synthetic:
        batch = task.example_batch(config.batch.micro_size)
        return SameBatch(batch.pin() if device.type == "cuda" else batch)
    return task.stream(dp_rank=engine.dp_rank, dp_size=engine.dp_size, start_sample=start_sample)


def restore(job: Job, resume: Resume, state: parallel.State) -> None:
    """Load `state` over what the dry run left, and cut the records back to the step that it belongs to."""
    job.meter.skipped.fill_(resume.counters.skipped_steps)
    job.engine.scatter_state(state)
    if job.norm_pairs is not None:
        job.norm_pairs.clear()  # of the dry run's step
    steps = job.run_dir / "steps"
    if job.comm.world.rank == 0:
        lines = [job.run_dir / name for name in ("metrics.jsonl", "evals.jsonl", "noise.jsonl")]
        for path in (*lines, *steps.glob("rank-*.jsonl")):
            record.cut_back(path, resume.counters.step if resume.path else -1)
        if job.config.log.step_times:
            steps.mkdir(exist_ok=True)
        checkpoint.set_aside_after(job.run_dir / "checkpoints", resume.counters.step)
    job.comm.barrier()


def device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"


def make_mirror(config: Config, run_dir: Path, comm: dist.Comm) -> Callable[[dict[str, Any]], None]:
    """Where rank 0 also sends its lines: TensorBoard when asked, else nowhere.

    Raises ConfigError when the extra is not installed.
    """
    if not config.log.tensorboard or comm.world.rank != 0:
        return lambda line: None
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        raise ConfigError(["log.tensorboard: needs `pip install 'bert-dp[tensorboard]'`"]) from None
    writer = SummaryWriter(str(run_dir / "tensorboard"))

    def write(line: dict[str, Any]) -> None:
        try:
            for key, value in line.items():
                if key != "step" and isinstance(value, (int, float)):
                    writer.add_scalar(key, value, line["step"])
            writer.flush()
        except OSError as error:  # a full disk
            LOSSES.note(error)

    return write


def describe(job: Job, placed: Placement, resume: Resume) -> None:
    """What is about to run, in a few lines of rank 0's log."""
    world = job.comm.world
    threads = f"{placed.threads} thread{'s' * (placed.threads > 1)} per rank"
    how = threads if job.device.type == "cpu" else f"one GPU and {threads}"
    say(job.comm, f"ranks: {world.size} x {device_name(job.device)}, {how}, {placed}")
    say(job.comm, f"batch: {job.plan}")
    compiled = "compiled" if job.facts["compiled"] else "eager"
    engine = parallel.engine_name(job.config.parallel, world.size)
    if job.plan.tensor > 1:
        engine += f", tensor {job.plan.tensor}"
    say(
        job.comm,
        f"model: {job.num_parameters:,} parameters, {job.precision.name}, {compiled}, engine {engine}",
    )
    say(job.comm, f"learning rate: {peak_lr(job.config).equation}, {job.config.optim.name}")
    say(job.comm, f"data: {job.data.num_samples:,} training sequences of {job.config.data.sequence_length}")
    if resume.path is None and job.config.run.init_from:
        kept = "weights and moments" if job.config.run.init_keeps == "moments" else "weights"
        say(job.comm, f"{kept}: from {job.config.run.init_from}")


def write_environment(job: Job, placed: Placement) -> None:
    """Add what only a rank can know to environment.json (the launcher wrote the machine's part)."""
    if job.comm.world.rank != 0:
        return
    path = job.run_dir / "environment.json"
    facts = record.read_json(path) or {}
    facts["worker"] = {
        "torch": torch.__version__,
        "device": device_name(job.device),
        "cuda": torch.version.cuda,
        "nccl": ".".join(map(str, torch.cuda.nccl.version())) if job.device.type == "cuda" else None,
        "world_size": job.comm.world.size,
        "threads_per_rank": placed.threads,
        "cores": [format_cores(share) for share in placed.shares],  # of each rank of rank 0's node
        "cores_inherited": placed.inherited,
        "config_hash": job.config.hash(),
        "compiled": job.facts["compiled"],
    }
    record.write_json(path, facts)
