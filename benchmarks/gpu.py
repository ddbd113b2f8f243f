"""Measure the speed of one GPU: the timed parts of `make gpu`. Each part is a function of a Place.

    python -m tests.gpu [--data SHARDS] [--total SECONDS] PART...

    machine     the device, its libraries, the time to the first kernel
    compile     the first step of each variant of `step`, which also fills the kernel cache
    rates       rates of copies, of matrix products at the model's shapes, and of attention by backend
    step        a whole step of the 120 M model and of ModernBERT, share of the matmul rate
    bert        a whole step of the 120 M model and of BERT, which needs more memory
    micro-512, length-512    a step with 512 sequences per micro batch, or with 512 tokens per sequence
    profile     two steps of a run: idle share, time by kernel
    pretrain    up to three minutes of pretraining: tokens/s, MFU, held-out loss
    tune, tune-512           the fastest micro batch by `tune batch`, at 128 and 512 tokens
    optimizers  a step of AdamW, LAMB and Muon, compared with the memory bandwidth
    scale       throughput of every engine by `scale`, on one GPU and on all
    trainer     Hugging Face's Trainer and bert-dp for equal time

The short form runs tiny sizes on the CPU. It tests the parts and measures no speed.
"""

import argparse
import concurrent.futures
import gzip
import importlib.util
import json
import shutil
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks import step_speed
from benchmarks.records import ROOT, set_options
from bert_dp.training import devices
from bert_dp.training.devices import synchronize
from tests.e2e.cli import TINY, command
from tests.gpu.checks import Found, Place
from tests.helpers import read_json, read_lines
from tests.resumable import newest_results
from tests.shards import write_shards

ACCELERATE_TOLERANCE = 0.05  # share of ddp's throughput on one GPU
VARIANTS = ("ours:regions", "ours:whole", "ours:narrow", "modernbert:whole")
CRAMMED = {"layers": 16, "hidden": 768, "heads": 12, "intermediate": 1536, "vocab": 32_768, "sequence": 128}
RECIPE = (
    "batch.ramp_fraction=0",
    "batch.ramp_quantum=null",
    "batch.global_size=1024",
    "eval.every_steps=0",
    "checkpoint.every_steps=0",
)
"""Overrides of the shipped recipe: no batch ramp, and a global batch that all micro batches divide."""


def machine(place: Place) -> Found:
    start = time.perf_counter()
    torch.ones(64, 64, device=place.device).sum().item()
    facts: dict[str, Any] = {"first_kernel_s": time.perf_counter() - start, "python": sys.version.split()[0]}
    facts["found"] = [name for name in ("git", "gcc", "nvcc", "nvidia-smi") if shutil.which(name)]
    if not place.short:
        gpu: Any = torch.cuda.get_device_properties(0)  # torch's stubs lack some fields
        facts |= {
            "name": gpu.name,
            "multiprocessors": gpu.multi_processor_count,
            "memory_gib": gpu.total_memory / 2**30,
            "l2_mib": gpu.L2_cache_size / 2**20,
            "cudnn": torch.backends.cudnn.version(),
            "nccl": ".".join(map(str, torch.cuda.nccl.version())),
            "energy_j": devices.joules(torch.device("cuda", 0)),
            "place": str(devices.own_host_and_device(torch.device("cuda", 0))),
        }
    return Found(facts, [])


def compile_kernels(place: Place) -> Found:
    def first_steps(number: int, variants: str) -> dict[str, float | str]:
        try:
            result = step_result(place, variants, number=number, rounds=1, warmup=0, accumulation=1)
        except SystemExit as failed:  # all variants at once may exceed the GPU's memory
            return {variants: f"failed with exit code {failed.code}, see the log"}
        return {name: variant["first_step_s"] for name, variant in result["variants"].items()}

    groups = ("ours:eager",) if place.short else ("ours:regions,modernbert:whole", "ours:whole,ours:narrow")
    with concurrent.futures.ThreadPoolExecutor(len(groups)) as pool:
        found = list(pool.map(first_steps, range(len(groups)), groups))
    return Found({"first_step_s": {name: value for group in found for name, value in group.items()}}, [])


def rates(place: Place) -> Found:
    sizes = step_speed.QUICK if place.short else CRAMMED
    precision = "fp32" if place.short else "bf16"
    o = argparse.Namespace(**{**sizes, "device": place.device.type, "precision": precision})
    facts: dict[str, Any] = {"copy_tb_per_s": copy_bytes_per_s(place) / 1e12}

    def seconds(*shapes: tuple[int, int, int, int]) -> dict[str, float]:
        """Return medians over rounds of `step_speed.make_matmul`."""
        measure = step_speed.make_matmul(o, shapes)
        rounds = [measure() for _ in range(3 if place.short else 8)][2:]
        return {key: statistics.median(one[key] for one in rounds) for key in rounds[0]}

    def tflop_per_s(rows: int, inputs: int, outputs: int, count: int) -> dict[str, float]:
        found, flops = seconds((rows, inputs, outputs, count)), 2 * rows * inputs * outputs * count
        return {part.removesuffix("_s"): flops / found[part] / 1e12 for part in step_speed.PRODUCTS}

    for micro in (2,) if place.short else (128, 512):
        o.micro = micro
        shapes = dict(
            zip(
                ("qkv", "attention out", "mlp in", "mlp out", "decoder"),
                step_speed.linear_shapes(o),
                strict=True,
            )
        )
        facts[f"tflop_per_s_micro_{micro}"] = {name: tflop_per_s(*shape) for name, shape in shapes.items()}
    side = 128 if place.short else 8192
    o.micro = 2 if place.short else 256
    facts[f"tflop_per_s_{side}"] = tflop_per_s(side, side, side, 1)["forward"]
    attention: dict[str, float | str] = {}
    backends = (SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION, SDPBackend.EFFICIENT_ATTENTION)
    for backend in (*backends, SDPBackend.MATH):
        try:
            with sdpa_kernel(backend):
                found = seconds()["attention_s"]
            attention[backend.name.lower()] = 1e6 * found / (o.micro * o.sequence * o.layers)
        except RuntimeError as error:  # this device lacks the backend
            attention[backend.name.lower()] = str(error).splitlines()[0][:60]
    facts["attention_us_per_token_and_layer"] = attention
    return Found(facts, [])


def step(place: Place, variants: str, micro: int = 256, sequence: int = 128, accumulation: int = 4) -> Found:
    """Run `step_speed.py` with these variants in bf16."""
    names = variants.split(",")
    if importlib.util.find_spec("transformers") is None:
        names = [name for name in names if name.startswith(("ours", "matmul"))]
    if place.short:
        kinds = dict.fromkeys(name.partition(":")[0] for name in names)
        names = [f"{kind}:eager" for kind in kinds if kind != "bert"]
    result = step_result(
        place, ",".join(names), rounds=10, warmup=3, micro=micro, sequence=sequence, accumulation=accumulation
    )
    facts = {}
    for name, variant in result["variants"].items():
        shown = {
            key: variant[key]["median"] for key in ("tokens_per_s", "gflop_per_s", "share") if key in variant
        }
        over = {f"time_over_{own}": one["median"] for own, one in variant.get("ours_over_this", {}).items()}
        peak = variant["rounds"][-1].get("peak_memory_gib")
        facts[name] = {**shown, "peak_gib": peak, "first_step_s": variant["first_step_s"], **over}
    return Found(facts, [])


def profile(place: Place) -> Found:
    settings = ["batch.global_size=256", "batch.micro_size=128", "schedule.steps=16"]
    settings = ["schedule.steps=6"] if place.short else settings
    steps = ["--profile", "4:6" if place.short else "12:14"]
    run_dir = train(place, [*settings, "eval.max_sequences=256", "checkpoint.keep=0"], *steps)
    trace = run_dir / "profile" / "rank-0.json.gz"
    trace.rename(place.folder / "trace.json.gz")
    return Found(
        {
            "tokens_per_s": read_json(run_dir / "summary.json")["tokens_per_s"],
            **kernel_times(place.folder / "trace.json.gz"),
        },
        [],
    )


def kernel_times(trace: Path) -> dict[str, Any]:
    """Summarize a trace: GPU milliseconds, launches, the share of the time in which the GPU was idle, and the
    milliseconds of the longest kernels."""
    total: dict[str, float] = {}
    launches, busy_us, until = 0, 0.0, float("-inf")
    timed = [e for e in json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"] if e.get("dur")]
    length_us = max(e["ts"] + e["dur"] for e in timed) - min(e["ts"] for e in timed)
    for event in sorted(timed, key=lambda e: e["ts"]):
        if event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset"):
            name = event["name"][:70]
            total[name] = total.get(name, 0.0) + event["dur"] / 1e3
            launches += 1
            busy_us += max(0.0, event["ts"] + event["dur"] - max(event["ts"], until))
            until = max(until, event["ts"] + event["dur"])
    longest = dict(sorted(total.items(), key=lambda item: -item[1])[:20])
    idle = {"wall_s": length_us / 1e6, "idle_share": 1 - busy_us / length_us}
    return {**idle, "gpu_ms": sum(total.values()), "launches": launches, "kernels_ms": longest}


def pretrain(place: Place) -> Found:
    spare_s = 55.0  # for set-up, compilation, two saves and the last evaluation
    seconds = 5.0 if place.short else min(180.0, place.seconds - spare_s)
    settings = [f"schedule.hours={seconds / 3600}", "eval.every_steps=150", "log.every_steps=20"]
    if not place.short:
        settings.append(f"batch.micro_size={tuned_micro(place, 512)}")
    run_dir = train(place, settings)
    summary = read_json(run_dir / "summary.json")
    names = ("tokens", "step", "tokens_per_s", "mfu", "heldout_loss", "unigram_entropy_nats")
    facts = {name: summary[name] for name in (*names, "peak_memory_gib", "energy_j", "time_s")}
    facts["heldout_loss_by_tokens"] = {
        f"{line['tokens']:,}": line["loss"] for line in read_lines(run_dir / "evals.jsonl")
    }
    return Found(facts, [])


def tune(place: Place, length: int = 128) -> Found:
    budget = "2s" if place.short else f"{min(90, round(place.seconds) - 60)}s"
    sizes = ["batch.global_size=1", "batch.micro_size=auto"] if place.short else []
    result = verb(place, "tune batch", length, sizes, "--nproc", "1", "--budget", budget)
    rows = {
        f"micro batch {size['micro_batch']}": {
            key: size.get(key) for key in ("status", "samples_per_s", "peak_gib")
        }
        for size in result["sizes"]
    }
    choice = result["choice"]
    found = {"micro_batch": choice["micro_batch"], "samples_per_s": choice["samples_per_s"]}
    return Found({**found, "seconds": result["seconds"], **rows}, [])


def optimizers(place: Place) -> Found:
    """Compare a step of each optimizer with the time to read and write its tensors once."""
    size = ["--layers", "1", "--rounds", "1"] if place.short else ["--rounds", "15"]
    result = json.loads(
        run(script("optimizer_speed", "--device", place.device.type, *size), stdout=subprocess.PIPE)
    )
    rate = copy_bytes_per_s(place)
    # weight, gradient and two moments are read; all but the gradient are written
    moved = 4 * 7 * result["parameters"]
    facts: dict[str, Any] = {"copy_tb_per_s": rate / 1e12}
    for name, timed in result.items():
        if isinstance(timed, dict) and "seconds" in timed:
            seconds = timed["seconds_median"]
            share, ratio = moved / seconds / rate, timed["ratio_to_adamw_median"]
            facts[name] = {"seconds": seconds, "share_of_memory_rate": share, "time_over_adamw": ratio}
    return Found(facts, [])


def scale(place: Place) -> Found:
    """Measure throughput, MFU and MAMFU of the engines. On one GPU, accelerate must be as fast as ddp. zero1
    and fsdp have no limit; fsdp copies all weights even on one GPU."""
    micro = 2 if place.short else tuned_micro(place, 64)
    engines, tensor = ("ddp" if place.short else "ddp,zero1,fsdp"), []
    if place.devices % 2 == 0 and not place.short:
        tensor = ["--tensor", "1,2"]  # accelerate does not support tensor parallelism
    elif importlib.util.find_spec("accelerate") and not place.short:
        engines += ",accelerate"
    counts = "1" if place.short else ",".join(str(n) for n in sorted({1, place.devices}))
    long = ("--repeats", "2", "--steps", "30", "--warm-up", "10")
    size = ("--repeats", "1", "--steps", "3", "--warm-up", "1") if place.short else long
    batch = [f"batch.micro_size={micro}", f"batch.global_size={micro}"]
    options = ["--nproc", counts, "--engines", engines, *size, *tensor]
    cells = {cell["id"]: cell for cell in verb(place, "scale", 128, batch, *options)["cells"]}
    problems = [f"{name}: {cell['cause']}" for name, cell in cells.items() if cell["status"] != "ok"]
    names = ("tokens_per_s", "mfu", "mamfu", "efficiency", "communication_efficiency", "peak_memory_gib")
    facts = {name: {key: cell[key] for key in names} for name, cell in cells.items()}
    ddp, accelerate = (cells.get(f"weak-{name}-n1", {}).get("tokens_per_s") for name in ("ddp", "accelerate"))
    if ddp and accelerate and accelerate < (1 - ACCELERATE_TOLERANCE) * ddp:
        limit = 1 - ACCELERATE_TOLERANCE
        problems.append(f"accelerate: {accelerate / ddp:.2f} of ddp's throughput on one GPU, limit {limit}")
    return Found({"micro_batch": micro, **facts}, problems)


def trainer(place: Place) -> Found:
    if importlib.util.find_spec("transformers") is None or importlib.util.find_spec("accelerate") is None:
        return Found({"skipped": "transformers and accelerate are not installed"}, [])
    settings = recipe(place)
    if not place.short:
        settings.append("batch.micro_size=128")
    record = place.folder / "hf_trainer.json"
    options = ["--ranks", "1", "--minutes", "0.02" if place.short else "1"]
    options += ["--variants", "bert"] if place.short else []  # `pretrain` already runs `ours`
    options += ["--precision", "fp32" if place.short else "bf16", "--json", str(record)]
    folder = place.folder / "trainer"
    run(script("hf_trainer", str(folder), "--config", "crammed-bert", *set_options(settings), *options))
    facts = {
        name: {key: variant[key] for key in ("tokens", "seconds", "heldout_loss", "loss_at_equal_tokens")}
        for name, variant in read_json(record)["variants"].items()
    }
    return Found(facts, [])


# ---- shared by the parts ----


def recipe(place: Place) -> list[str]:
    """Return overrides of crammed-bert for a run on the shards of `--data`, or else on the built-in text."""
    vocabulary = 512 if place.short else 4096
    data = ["data.sources=[builtin]", "data.build.max_tokens_per_char=1", f"model.vocab_size={vocabulary}"]
    if place.data is not None:
        data = [f"data.path={place.data}"]
    if not place.short:
        return [*RECIPE, *data]
    # `data` or --data determines the first two, the part of `make gpu` the third
    other = ("model.vocab_size", "data.sequence_length", "schedule.steps")
    return [*(item for item in TINY if not item.startswith(other)), "compile=off", *data]


def train(place: Place, settings: list[str], *options: str) -> Path:
    """Run `bert-dp train` on one GPU and return the run directory."""
    run_dir = place.folder / "run"
    chosen = set_options([*recipe(place), *settings])
    run(command("train", "crammed-bert", *chosen, "--nproc", "1", "--run-dir", str(run_dir), *options))
    return run_dir


def verb(place: Place, words: str, length: int, settings: list[str], *options: str) -> dict[str, Any]:
    """Run `scale` or `tune batch` for the crammed recipe at this sequence length, and return its result."""
    shards = write_shards(
        place.folder / "shards",
        vocab_size=64 if place.short else 32_768,
        length=16 if place.short else length,
        train=96 if place.short else 2**19 // length,
    )
    sizes = TINY if place.short else (*RECIPE, f"data.sequence_length={length}")
    out = place.folder / "out"
    chosen = set_options([*sizes, f"data.path={shards}", *settings])
    run(command(*words.split(), "crammed-bert", *chosen, *options, "--out", str(out)))
    result: dict[str, Any] = read_json(out / ("scaling.json" if words == "scale" else "tune.json"))
    return result


def step_result(place: Place, variants: str, *, number: int = 0, **sizes: int) -> dict[str, Any]:
    """Run step_speed.py at the size of the recipe and return its record."""
    record = place.folder / f"step_speed_{number}.json"
    options = ["--variants", variants, "--json", str(record)]
    if place.short:
        options.append("--quick")
    else:
        options += ["--device", "cuda", "--precision", "bf16"]
        options += [
            word
            for name, size in {**CRAMMED, "micro": 256, **sizes}.items()
            for word in (f"--{name}", str(size))
        ]
    run(script("step_speed", *options))
    result: dict[str, Any] = read_json(record)
    return result


def script(name: str, *options: str) -> list[str]:
    return [sys.executable, f"benchmarks/{name}.py", *options]


def run(words: list[str], *, stdout: int | None = None) -> str:
    """Run a command with its output in the log of the part, and return the output that `stdout` captures. If
    the command fails, exit with its code; the last line of the log has the reason."""
    done = subprocess.run(words, cwd=ROOT, stdout=stdout, text=True, check=False)
    if done.returncode:
        sys.exit(done.returncode)
    return done.stdout or ""


def tuned_micro(place: Place, otherwise: int) -> int:
    """Return the micro batch that `tune` chose, or `otherwise` if `tune` has not run."""
    earlier = newest_results(place.folder.parents[1] / "results.jsonl", "part").get("tune", {})
    return int(earlier.get("facts", {}).get("micro_batch", otherwise))


def copy_bytes_per_s(place: Place) -> float:
    """Measure the bytes per second that a large copy reads and writes."""
    source = torch.empty(2**20 if place.short else 2**28, device=place.device)
    target, seconds = torch.empty_like(source), []
    for _ in range(7):
        synchronize(place.device)
        start = time.perf_counter()
        target.copy_(source)
        synchronize(place.device)
        seconds.append(time.perf_counter() - start)
    return 2 * source.nbytes / statistics.median(seconds)
