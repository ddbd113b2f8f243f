"""Check that a GPU trains correctly: the parts of `make gpu` that pass or fail. Each check is a function. In
the short form the device is the CPU and all sizes are tiny, which tests the checks themselves.
"""

import dataclasses
import functools
import itertools
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from bert_dp.config import load_config
from bert_dp.measure.profile_step import lone_trainer
from bert_dp.model.bert import TiedLookup
from bert_dp.model.kernels import HAS_TRITON
from bert_dp.training.devices import synchronize
from bert_dp.training.loop import Trainer, train_step
from bert_dp.training.metrics import Timers
from launcher.job import find_config
from tests.e2e.cli import TINY, train
from tests.example_files import label_names, write_examples
from tests.faults.harness import broken
from tests.helpers import logged, read_json
from tests.parity import matrix
from tests.parity.runs import settings, state, train_run, train_runs, write_run
from tests.shards import write_shards

CLOCK_TOLERANCE = 0.05
NARROW_TOLERANCE = 0.02  # nats, between 16-bit and fp32 losses over 30 steps
COMPILED_TOLERANCE = {"fp32": 1e-4, "bf16": 0.02}  # nats, between compiled and eager losses


@dataclasses.dataclass(frozen=True)
class Place:
    """Devices, time limit and folders of a part."""

    devices: int
    """Number of GPUs, or of ranks in the short form."""
    short: bool
    seconds: float
    """Time after which the part is ended."""
    folder: Path
    """Folder that is empty at the start; JSON files in it are kept."""
    data: Path | None = None
    """Shards of real text. None = the built-in text."""

    @property
    def device(self) -> torch.device:
        return torch.device("cpu" if self.short else "cuda")


@dataclasses.dataclass(frozen=True)
class Found:
    """Result of a part."""

    facts: dict[str, Any]
    """Values of the table and the record. `skipped` is the reason why nothing was done."""
    problems: list[str]


# ---- correctness ----


def engines(place: Place) -> Found:
    """Check that every engine, on one and several devices, trains the same model as one process (fp32)."""
    names = [name for name in matrix.ENGINES if not name.startswith("deepspeed")]
    cells = engine_cells(place, names)
    return compare(place, [cells[:2] if place.short else cells])


def deepspeed(place: Place) -> Found:
    """Check that DeepSpeed's stages train the same model as one process (fp32)."""
    cells = engine_cells(place, [name for name in matrix.ENGINES if name.startswith("deepspeed")])
    return compare(place, [cells[:1] if place.short else cells])


def one_gpu(place: Place, ranks: int) -> Found:
    """Check that several ranks on one device, over gloo, train the same model as one process: every engine,
    tensor parallelism, LAMB, Muon and compiled bf16."""
    cells = [cell for cell in ONE_GPU_CELLS if cell.ranks == ranks and matrix.excuse(cell) is None]
    os.environ["CUDA_VISIBLE_DEVICES"] = os.environ.get("CUDA_VISIBLE_DEVICES", "0").partition(",")[0]
    # one cell at a time, so that the log shows which cells ended before a time limit
    groups = [[cell] for cell in (cells[-1:] if place.short else cells)]
    return compare(place, groups, share_device=True)


ONE_GPU_CELLS = [
    *(matrix.Cell(engine, "adamw", 2, 1, "fp32", 3) for engine in ("ddp", "zero1", "fsdp", "accelerate")),
    *(matrix.Cell(engine, "adamw", 2, 2, "fp32", 3) for engine in ("ddp", "zero1", "fsdp")),
    *(matrix.Cell("ddp", "adamw", 2, tensor, "bf16", 3, form="compiled") for tensor in (1, 2)),
    matrix.Cell("ddp", "lamb", 2, 1, "fp32", 3),
    matrix.Cell("zero1", "muon", 2, 1, "fp32", 3),
    matrix.Cell("zero1", "lamb", 4, 2, "fp32", 3),
    matrix.Cell("ddp", "adamw", 4, 2, "fp32", 3),
]


def finetuning(place: Place) -> Found:
    """Check that finetuning with dropout (fp32), compiled and under zero1 on as many devices as divide its
    batch, has the losses of eager finetuning on one device."""
    examples = write_examples(place.folder / "examples", num_labels=2)
    ranks = 2 ** min(3, place.devices.bit_length() - 1)
    fixed: dict[str, Any] = {
        "data": {"sequence_length": 32},
        "objective": {"name": "finetune"},
        "finetune": {"labels": label_names("single_label", 2), "head_size": 24},
        "model": {"dropout": 0.1, "attention_dropout": 0.1},
        "batch": {"global_size": 8, "micro_size": 1},
        "schedule": {"name": "constant", "steps": 6 if place.short else 30},
    }
    mode = "off" if place.short else "on"
    cases = {
        "eager": (1, "single", "off"),
        "compiled": (1, "single", mode),
        "zero1": (ranks, "zero1" if ranks > 1 else "single", mode),
    }
    runs = {}
    for name, (count, engine, compiled) in cases.items():
        chosen = settings(examples, precision="fp32", compile=compiled, parallel={"engine": engine}, **fixed)
        runs[name] = train_run(place.folder / name, chosen, count)
    losses = {name: logged(path, "loss") for name, path in runs.items()}
    far = {name: furthest(losses[name], losses["eager"]) for name in ("compiled", "zero1")}
    limit = COMPILED_TOLERANCE["fp32"]
    problems = [
        f"{name}: {found:.2e} nats from eager, limit {limit}"
        for name, found in far.items()
        if not found <= limit
    ]
    return Found({"ranks": ranks, **far}, problems)


def no_host_sync(place: Place) -> Found:
    """Check that no step of any optimizer waits for the GPU; torch raises an error if one does."""
    problems = []
    for optimizer in ("adamw", "lamb", "muon"):
        with trainer_of(place, f"optim.name={optimizer}") as trainer:
            steps(trainer, 1)  # the first step compiles
            if not place.short:
                torch.cuda.set_sync_debug_mode("error")
            try:
                steps(trainer, 3)
            except RuntimeError as error:
                problems.append(f"{optimizer}: {error}")
            finally:
                if not place.short:
                    torch.cuda.set_sync_debug_mode("default")
    return Found({"optimizers": 3, "refused_by_torch": not place.short}, problems)


def precisions(place: Place) -> Found:
    """Compare losses of bf16 and fp16 with fp32, compiled with eager; check that fp16 skips a NaN step."""
    shards = write_shards(place.folder / "shards")
    modes = ("off",) if place.short else ("off", "on")

    def run(precision: str, mode: str) -> Path:
        schedule = {"name": "constant", "steps": 6 if place.short else 30}
        chosen = settings(shards, precision=precision, compile=mode, schedule=schedule)
        return write_run(place.folder / f"{precision}-{mode}", chosen)

    runs = {(p, m): run(p, m) for p in ("fp32", "bf16", "fp16") for m in modes}
    train_runs(1, list(runs.values()))
    losses = {key: logged(path, "loss") for key, path in runs.items()}
    facts, problems = {}, []
    for precision, mode in itertools.product(("bf16", "fp16"), modes):
        far = furthest(losses[precision, mode], losses["fp32", mode])
        facts[f"{precision}_from_fp32_{mode}"] = far
        if not far <= NARROW_TOLERANCE:
            problems.append(
                f"{precision}, compile {mode}: {far:.2e} nats from fp32, limit {NARROW_TOLERANCE}"
            )
    for precision, limit in COMPILED_TOLERANCE.items() if "on" in modes else ():
        far = furthest(losses[precision, "on"], losses[precision, "off"])
        facts[f"compiled_from_eager_{precision}"] = far
        if not far <= limit:
            problems.append(f"compiled {precision}: {far:.2e} nats from eager, limit {limit}")
    skipping = train_run(
        place.folder / "skips",
        settings(shards, precision="fp16", schedule={"steps": 6}, checkpoint={"every_steps": 1, "keep": 9}),
        poison=(0, range(3, 4)),
    )
    before, after = state(skipping, 3), state(skipping, 4)
    if not all(before[name].equal(after[name]) for name in before):
        problems.append("fp16: the step with a NaN moved the weights")
    if (skipped := logged(skipping, "skipped_steps")[-1]) != 1:
        problems.append(f"fp16: {skipped} steps skipped, expected 1")
    return Found(facts, problems)


def resume(place: Place) -> Found:
    """Check that with run.deterministic a run resumed twice ends with the weights of an uninterrupted run."""
    shards = write_shards(place.folder / "shards")

    def train_part(name: str, steps: int) -> None:
        config = settings(
            shards,
            precision="fp32" if place.short else "bf16",
            compile="off" if place.short else "on",
            run={"deterministic": True},
            model={"dropout": 0.1},
            schedule={"steps": steps, "name": "constant"},
        )
        train_run(place.folder / name, config)

    train_part("whole", 12)
    for steps in (4, 8, 12):
        train_part("resumed", steps)
    whole, resumed = (state(place.folder / name, 12) for name in ("whole", "resumed"))
    unequal = [name for name in whole if not whole[name].equal(resumed[name])]
    return Found({"tensors": len(whole)}, [f"not bit-equal after two resumes: {n}" for n in unequal[:3]])


def lookup(place: Place) -> Found:
    """Compare the tied embedding's gradient with a dense product in fp64. One id fills half the positions."""
    generator = torch.Generator().manual_seed(0)
    ids_BS = torch.randint(0, 50, (16, 32), generator=generator).masked_fill(
        torch.rand((16, 32), generator=generator) < 0.5, 6
    )
    grad_BSH = torch.randn(16, 32, 24, generator=generator)
    grad_VH = torch.randn(50, 24, generator=generator)
    one_hot = torch.nn.functional.one_hot(ids_BS.flatten(), 50).double()
    wanted = grad_VH.double() + one_hot.T @ grad_BSH.double().flatten(0, 1)
    weight = torch.randn(50, 24, generator=generator).to(place.device).requires_grad_()
    x_BSH, tied_VH = TiedLookup.apply(ids_BS.to(place.device), weight)
    torch.autograd.backward([x_BSH, tied_VH], [grad_BSH.to(place.device), grad_VH.to(place.device)])
    assert weight.grad is not None
    far = ((weight.grad.cpu().double() - wanted).norm() / wanted.norm()).item()
    return Found({"relative_error": far}, [] if far < 1e-6 else [f"lookup gradient off by {far:.1e}"])


def kernels(place: Place) -> Found:
    """Compare bert-dp's own GPU kernels and their gradients in bf16 with fp64."""
    if place.short or not HAS_TRITON:
        return Found({"skipped": "the kernels run on NVIDIA GPUs only"}, [])
    from bert_dp.model import gpu_kernels

    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(place.device, torch.bfloat16)

    def attention(heads: int, qkv_BS3H: torch.Tensor) -> torch.Tensor:
        batch, length, _ = qkv_BS3H.shape
        q, k, v = (x.view(batch, length, heads, -1).transpose(1, 2) for x in qkv_BS3H.chunk(3, -1))
        score_BASS = q @ k.transpose(2, 3) * q.shape[-1] ** -0.5
        return (score_BASS.softmax(-1) @ v).transpose(1, 2).flatten(2)

    def gated(x_gate: torch.Tensor) -> torch.Tensor:
        x, gate = x_gate.chunk(2, -1)
        return torch.nn.functional.gelu(x) * gate

    cases: dict[str, tuple[Any, Any, torch.Tensor]] = {}
    for heads, size, length in itertools.product((1, 3), (16, 32, 64), (1, 16, 100, 128)):
        cases[f"attention of {heads} heads of {size}, {length} tokens"] = (
            functools.partial(gpu_kernels.packed_attention, heads=heads),
            functools.partial(attention, heads),
            random(5, length, 3 * heads * size),
        )
    for rows, columns in itertools.product((1, 7, 640), (24, 512, 1536)):
        cases[f"gated GELU of {rows} x {columns}"] = gpu_kernels.gated_gelu, gated, random(rows, 2 * columns)
    far: dict[str, float] = {}
    for name, (kernel, reference, x) in cases.items():
        x, wide = x.requires_grad_(), x.detach().double().requires_grad_()
        out, wanted = kernel(x), reference(wide)
        grad = random(*out.shape)
        out.backward(grad)
        wanted.backward(grad.double())
        assert x.grad is not None
        assert wide.grad is not None
        pairs = ((out, wanted), (x.grad, wide.grad))
        far[name] = max(((a.double() - b).norm() / b.norm()).item() for a, b in pairs)
    problems = [f"{name}: relative error {found:.1e}" for name, found in far.items() if not found < 5e-3]
    return Found({"cases": len(far), "greatest_relative_error": max(far.values())}, problems)


def timers(place: Place) -> Found:
    """Check that the phases of a step that the timers measure add up to its wall time."""
    # synthetic data: waiting for data belongs to no phase, and small steps end before the next batch is ready
    with trainer_of(place, "data.synthetic=true") as trainer:
        steps(trainer, 3)
        clock = Timers(trainer.device)
        synchronize(trainer.device)
        start = time.perf_counter()
        steps(trainer, 20, clock)
        synchronize(trainer.device)
        wall_s = time.perf_counter() - start
        seconds = clock.drain()
    timed_s = sum(seconds["forward_backward"]) + sum(seconds["optimizer"])
    share = timed_s / wall_s
    low = 1 - (0.5 if place.short else CLOCK_TOLERANCE)  # a tiny step is mostly Python around the timers
    problems = (
        [] if low <= share <= 1 + CLOCK_TOLERANCE else [f"the timers measure {share:.2f} of the wall time"]
    )
    return Found({"timed_over_wall": share}, problems)


def cards(place: Place) -> Found:
    """Check that a hung rank and a rank that is out of memory (an injected exception of torch) are named."""
    shards = write_shards(place.folder / "shards")
    last = place.devices - 1
    problems = []
    for what, kind in (("cuda_oom", "device_memory"), ("sleep", "hang")):
        run_dir = place.folder / what
        limits = "run.hang_after_s=20 run.end_hung_after_s=1" if what == "sleep" else ""
        endless, fault = f"schedule.steps=100000 {limits}", broken(what, rank=last)
        done = train(shards, run_dir, endless, nproc=place.devices, code=None, timeout=200, **fault)
        summary = read_json(run_dir / "summary.json")
        if (done.returncode, summary["failure"]["kind"]) != (1, kind):
            problems.append(f"{what}: exit code {done.returncode}, {summary['failure']['kind']}, not {kind}")
        if summary["failure"]["rank"] != last:
            problems.append(f"{what}: rank {summary['failure']['rank']} is named, not {last}")
    return Found({"rank": last}, problems)


# ---- shared by the checks ----


def engine_cells(place: Place, names: Sequence[str]) -> list[matrix.Cell]:
    """Return the cells of these engines that this machine can run, with at most one rank per device."""
    worlds = [pair for pair in matrix.WORLDS if pair[0] <= place.devices]
    cells = [
        matrix.Cell(name, "adamw", ranks, tensor, "fp32", 3)
        for name, (ranks, tensor) in itertools.product(names, worlds[-1:] if place.short else worlds)
    ]
    return [cell for cell in cells if matrix.excuse(cell) is None]


def compare(place: Place, groups: Sequence[Sequence[matrix.Cell]], **options: Any) -> Found:
    """Train the cells, group by group, and the runs of one process that they must equal. `options` are passed
    to `train_runs`."""
    problems, count, greatest = [], 0, 0.0
    for group in groups:
        for cell, outcome in matrix.run_cells(group, place.folder, **options):
            if isinstance(outcome, matrix.Deviation):
                wrong = outcome.problems(cell)
                greatest = max(greatest, outcome.weights)
            else:
                wrong = [f"{cell}: {outcome[-300:]}"]
            print(f"{cell}: {'; '.join(wrong) or 'equal'}", flush=True)
            problems += wrong
            count += 1
    if not count:
        return Found({"skipped": "the package is not installed"}, [])
    return Found({"cells": count, "weights_deviation": greatest}, problems)


def trainer_of(place: Place, *more: str) -> Any:
    """Return a trainer of one rank before its first step: tiny in the short form, else with eight layers."""
    shards = write_shards(place.folder / "shards", vocab_size=64 if place.short else 8192)
    large = ("model.vocab_size=8192", "model.num_layers=8", "data.sequence_length=16", "batch.micro_size=64")
    items = TINY if place.short else (*large, "batch.global_size=256", "schedule.steps=9")
    fixed = ("parallel.engine=single", f"run.device={place.device.type}", f"data.path={shards}")
    return lone_trainer(load_config(find_config("quickstart"), [*items, *fixed, *more]), place.folder)


def steps(trainer: Trainer, count: int, clock: Timers | None = None) -> None:
    """Take `count` optimizer steps on the trainer's own stream."""
    layout, clock = trainer.layout, clock or Timers(trainer.device)
    for number in range(count):
        train_step(
            trainer,
            (trainer.stream.next() for _ in range(layout.grad_accum_steps)),
            grad_accum_steps=layout.grad_accum_steps,
            num_targets=trainer.task.num_targets(number * layout.global_size, layout.global_size),
            timers=clock,
        )
        clock.end_step()


def furthest(a: list[float], b: list[float]) -> float:
    return max(abs(x - y) for x, y in zip(a, b, strict=True))
