"""What `make gpu` looks at: that a GPU trains what it should, and how fast. Each check is one function.

In the short form the device is the CPU and everything is tiny: it shows that the checks themselves work.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
import itertools
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from bert_dp.config import load_config
from bert_dp.devices import synchronize
from bert_dp.measure.profiling import lone_trainer
from bert_dp.metrics import Timers
from bert_dp.model import TiedLookup
from bert_dp.trainer import Trainer
from launcher.job import find_config
from tests.e2e.cli import TINY, bert_dp, tiny, train
from tests.example_files import label_names, write_examples
from tests.faults.harness import broken
from tests.helpers import logged, read_json
from tests.parity import matrix
from tests.parity.runs import settings, state, train_run, train_runs, write_run
from tests.resumable import ROOT, newest_results
from tests.shards import write_shards

VERB_S = 1200.0  # that a verb of ours may take
PEER_TOLERANCE = 0.05  # of ddp's throughput on one GPU
CLOCK_TOLERANCE = 0.05
NARROW_TOLERANCE = 0.02  # nats, of 16 bits from fp32 over 30 steps
COMPILED_TOLERANCE = {"fp32": 1e-4, "bf16": 0.02}  # nats, from eager


@dataclasses.dataclass(frozen=True)
class Place:
    """Where the checks run."""

    devices: int
    """GPUs, or ranks of the short form."""
    short: bool
    folder: Path
    """Each check's own, empty."""

    @property
    def device(self) -> torch.device:
        return torch.device("cpu" if self.short else "cuda")


@dataclasses.dataclass(frozen=True)
class Found:
    """What a check has measured, and what is wrong with it."""

    facts: dict[str, Any]
    """Shown, and kept in the record."""
    problems: list[str]


Check = Callable[[Place], Found]


# ---- correctness ----


def engines(place: Place) -> Found:
    """Every engine, alone and on several devices, trains the model that one process trains (fp32)."""
    worlds = [pair for pair in matrix.WORLDS if pair[0] <= place.devices]
    if place.short:
        worlds = worlds[-1:]
    cells = [
        cell
        for engine, (ranks, tensor) in itertools.product(matrix.ENGINES, worlds)
        if matrix.excuse(cell := matrix.Cell(engine, "adamw", ranks, tensor, "fp32", 3)) is None
    ]
    cells = cells[:2] if place.short else cells
    problems, greatest = [], 0.0
    for cell, outcome in matrix.run_cells(cells, place.folder):
        if isinstance(outcome, matrix.Deviation):
            problems += outcome.problems(cell)
            greatest = max(greatest, outcome.weights)
        else:
            problems.append(f"{cell}: {outcome[-300:]}")
    return Found({"cells": len(cells), "weights_deviation": greatest}, problems)


def finetuning(place: Place) -> Found:
    """Finetuning with dropout: compiled, and under zero1 on as many devices as divide its batch, it has the
    losses of one device that is eager (fp32)."""
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
    """No step of any optimizer waits for the GPU: torch refuses what would."""
    problems = []
    for optimizer in ("adamw", "lamb", "muon"):
        with trainer_of(place, f"optim.name={optimizer}") as trainer:
            steps(trainer, 1)  # the first one compiles
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
    """bf16 and fp16 learn what fp32 learns, compiled what eager does; fp16 skips a step that overflows."""
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
    """With run.deterministic a run that is resumed twice ends with the weights of an undisturbed one."""
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
    """The tied embedding's gradient beside a dense product in fp64, with most ids the same."""
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


def timers(place: Place) -> Found:
    """The parts of steps that the timers tell add up to their time on the wall."""
    with trainer_of(place) as trainer:
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
    problems = [] if low <= share <= 1 + CLOCK_TOLERANCE else [f"timers tell {share:.2f} of the wall time"]
    return Found({"told_over_wall": share}, problems)


def cards(place: Place) -> Found:
    """A rank that hangs, and one that is out of memory (torch's exception, raised by hand), are named."""
    shards = write_shards(place.folder / "shards")
    last = place.devices - 1
    problems = []
    for what, kind in (("cuda_oom", "device_memory"), ("sleep", "hang")):
        run_dir = place.folder / what
        limits = "run.hang_after_s=20 run.end_hung_after_s=1" if what == "sleep" else ""
        done = train(
            shards,
            run_dir,
            f"schedule.steps=100000 {limits}",
            nproc=place.devices,
            code=None,
            timeout=200,
            **broken(what, rank=last),
        )
        summary = read_json(run_dir / "summary.json")
        if (done.returncode, summary["failure_kind"]) != (1, kind):
            problems.append(f"{what}: exit code {done.returncode}, {summary['failure_kind']}, not {kind}")
        if f"rank {last}" not in (summary["cause"] or ""):
            problems.append(f"{what}: rank {last} is not named: {summary['cause']}")
    return Found({"rank": last}, problems)


# ---- speed ----


def micro_batch(place: Place, length: int) -> Found:
    """The fastest micro batch on one GPU, by `tune batch`."""
    budget = "--budget 2s --set batch.global_size=1" if place.short else "--budget 60s"
    result = verb(place, length, "tune batch", "--gpus", "1", *budget.split())
    choice = result["choice"]
    return Found({"micro_batch": choice["micro_batch"], "samples_per_s": choice["samples_per_s"]}, [])


def scaling(place: Place, length: int) -> Found:
    """Throughput, MFU and MAMFU of one GPU, and of all of them, by `scale`: every engine at 128 tokens."""
    engines = "ddp" if place.short or length > 128 else "ddp,zero1,fsdp,accelerate"
    engines = engines if importlib.util.find_spec("accelerate") else engines.removesuffix(",accelerate")
    micro = tuned_micro(place, length)
    counts = "1" if place.short else ",".join(str(n) for n in sorted({1, place.devices}))
    size = (
        "--repeats 1 --steps 3 --warm-up 1 --no-synthetic"
        if place.short
        else "--repeats 2 --steps 30 --warm-up 10"
    )
    batch = ["--set", f"batch.micro_size={micro}", "--set", f"batch.global_size={micro}"]
    tensor = []
    if place.devices % 2 == 0 and length == 128 and not place.short:
        tensor, engines = ["--tensor", "1,2"], "ddp,zero1,fsdp"  # those that divide a replica
    result = verb(
        place, length, "scale", "--gpus", counts, "--engines", engines, *size.split(), *batch, *tensor
    )
    cells = {cell["id"]: cell for cell in result["cells"]}
    problems = [f"{name}: {cell['cause']}" for name, cell in cells.items() if cell["status"] != "ok"]
    shown = ("tokens_per_s", "mfu", "mamfu", "efficiency", "communication_efficiency", "peak_memory_gib")
    facts = {name: {key: cell[key] for key in shown} for name, cell in cells.items()}
    base = cells["weak-ddp-n1"]["tokens_per_s"]
    for name, cell in cells.items():
        cell_s = cell["tokens_per_s"]
        slow = cell["world_size"] == 1 and base and cell_s and cell_s < (1 - PEER_TOLERANCE) * base
        if slow and not place.short:
            problems.append(f"{name}: {cell_s / base:.2f} of ddp's throughput, limit {1 - PEER_TOLERANCE}")
    return Found({"micro_batch": micro, **facts}, problems)


def peers(place: Place) -> Found:
    """A whole step beside transformers' BertForMaskedLM and ModernBertForMaskedLM, in turn, compiled."""
    if importlib.util.find_spec("transformers") is None:
        return Found({"skipped": "transformers is not installed"}, [])
    options = ["--quick"]
    if not place.short:
        micro = str(min(128, tuned_micro(place, 128)))
        variants = "ours:regions,bert:whole,modernbert:whole,matmul:eager"
        options = f"--device cuda --precision bf16 --layers 16 --accumulation 4 --micro {micro}".split()
        options += ["--variants", variants, "--rounds", "15", "--warmup", "3"]
    result = benchmark(place, "step_speed", *options)
    (ours,) = (name for name in result["variants"] if name.startswith("ours:"))
    facts = {
        name: {
            "tokens_per_s": variant["tokens_per_s"]["median"],
            "time_over_ours": variant["ours_over_this"][ours]["median"],
        }
        for name, variant in result["variants"].items()
        if "tokens_per_s" in variant
    }
    return Found(facts, [])


def optimizers(place: Place) -> Found:
    """A step of each optimizer beside what reading and writing its tensors once would take."""
    size = ["--layers", "1", "--rounds", "1"] if place.short else ["--rounds", "15"]
    printed = program(place, "benchmarks/optimizer_speed.py", "--device", place.device.type, *size)
    result = json.loads(printed)
    rate = copy_bytes_per_s(place)
    # weight, gradient and two moments are read, all but the gradient written
    moved = 4 * 7 * result["parameters"]
    facts: dict[str, Any] = {"copy_bytes_per_s": rate}
    for name, timed in result.items():
        if isinstance(timed, dict) and "seconds" in timed:
            seconds = timed["seconds_median"]
            facts[name] = {"seconds": seconds, "share_of_memory_rate": moved / seconds / rate}
    return Found(facts, [])


def copy_bytes_per_s(place: Place) -> float:
    """Bytes read and written by a large copy, per second."""
    source = torch.empty(2**20 if place.short else 2**28, device=place.device)
    target, seconds = torch.empty_like(source), []
    for _ in range(7):
        synchronize(place.device)
        start = time.perf_counter()
        target.copy_(source)
        synchronize(place.device)
        seconds.append(time.perf_counter() - start)
    return 2 * source.nbytes / statistics.median(seconds)


# ---- what the checks share ----


def trainer_of(place: Place, *more: str) -> Any:
    """A trainer of one rank that has taken no step; tiny in the short form, else eight layers."""
    shards = write_shards(place.folder / "shards", vocab_size=64 if place.short else 8192)
    large = ("model.vocab_size=8192", "model.num_layers=8", "data.sequence_length=16", "batch.micro_size=64")
    items = TINY if place.short else (*large, "batch.global_size=256", "schedule.steps=9")
    fixed = ("parallel.engine=single", f"run.device={place.device.type}", f"data.path={shards}")
    return lone_trainer(load_config(find_config("quickstart"), [*items, *fixed, *more]), place.folder)


def steps(trainer: Trainer, count: int, clock: Timers | None = None) -> None:
    """Whole optimizer steps on the trainer's own stream."""
    layout, clock = trainer.layout, clock or Timers(trainer.device)
    for number in range(count):
        trainer.step(
            (trainer.stream.next() for _ in range(layout.grad_accum_steps)),
            grad_accum_steps=layout.grad_accum_steps,
            num_targets=trainer.task.num_targets(number * layout.global_size, layout.global_size),
            timers=clock,
        )
        clock.end_step()


def furthest(a: list[float], b: list[float]) -> float:
    return max(abs(x - y) for x, y in zip(a, b, strict=True))


def program(place: Place, script: str, *options: str) -> str:
    """What a script of ours printed."""
    done = subprocess.run(
        [sys.executable, script, *options], cwd=ROOT, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise RuntimeError(f"{script} ended with exit code {done.returncode}: {done.stderr[-1500:]}")
    return done.stdout


def benchmark(place: Place, name: str, *options: str) -> dict[str, Any]:
    """The record of one of our benchmarks."""
    record = place.folder / f"{name}.json"
    program(place, f"benchmarks/{name}.py", *options, "--json", str(record))
    result: dict[str, Any] = read_json(record)
    return result


def verb(place: Place, length: int, words: str, *options: str) -> dict[str, Any]:
    """What a verb of ours found for the crammed recipe at this sequence length."""
    shards = write_shards(
        place.folder / "shards",
        vocab_size=64 if place.short else 32_768,
        length=16 if place.short else length,
        train=96 if place.short else 2**19 // length,
    )
    sizes = tiny(shards) if place.short else [*recipe(length), "--set", f"data.path={shards}"]
    out = place.folder / words.replace(" ", "-")
    done = bert_dp(*words.split(), "crammed-bert", *sizes, *options, "--out", str(out), timeout=VERB_S)
    if done.returncode:
        raise RuntimeError(f"{words} ended with exit code {done.returncode}: {done.stderr[-1500:]}")
    result: dict[str, Any] = read_json(out / ("scaling.json" if words == "scale" else "tune.json"))
    return result


def recipe(length: int) -> list[str]:
    """The shipped recipe without its ramp, at a global batch that every micro batch up to 1,024 divides."""
    items = (f"data.sequence_length={length}", "batch.ramp_fraction=0", "batch.ramp_quantum=null")
    more = ("batch.global_size=1024", "eval.every_steps=0", "checkpoint.every_steps=0")
    return [part for item in (*items, *more) for part in ("--set", item)]


def tuned_micro(place: Place, length: int) -> int:
    """What `micro_batch` has found; a size that fits any recent GPU where it has not run."""
    results = newest_results(place.folder.parents[1] / "results.jsonl", "check")
    earlier = results.get(f"micro batch at {length}", {})
    return int(earlier.get("facts", {}).get("micro_batch", 2 if place.short else 8192 // length))


CORRECT: dict[str, Check] = {
    "lookup gradient": lookup,
    "engines": engines,
    "finetuning": finetuning,
    "no host sync": no_host_sync,
    "precisions and compile": precisions,
    "bit-equal resume": resume,
    "timers": timers,
    "hang and memory cards": cards,
}
FAST: dict[str, Check] = {
    "micro batch at 128": functools.partial(micro_batch, length=128),
    "throughput at 128": functools.partial(scaling, length=128),
    "peers at 128": peers,
    "optimizers": optimizers,
    "micro batch at 512": functools.partial(micro_batch, length=512),
    "throughput at 512": functools.partial(scaling, length=512),
}
CHECKS = {**CORRECT, **FAST}
