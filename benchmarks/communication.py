"""What exchanging gradients costs: ours beside accelerate's own loop and DeepSpeed ZeRO-1's.

    python benchmarks/communication.py [--micro 16] [--accumulation 4] [--rounds 12] [--json FILE]

Two ranks with one core each train the 120 M recipe cut to four layers by weak scaling, on gloo. In each
round every way takes one optimizer step, in an order drawn anew; all ways live in the same processes, so that
a slow moment of the machine falls on all of them.

    ceiling      our step with nothing sent: independent copies at once
    ours         our step under DDP: gradients reduced on the last micro batch, beside the backward pass
    accelerate   accelerate's own loop: Accelerator.accumulate, backward, clip_grad_norm_, step
    deepspeed-1  DeepSpeed's own loop: engine.backward, engine.step, ZeRO stage 1

communication efficiency = time of the ceiling / time of a way, by round; a step's time is the slowest rank's,
that of the ceiling the harmonic mean over ranks, because copies do not wait for each other.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
import torch.distributed as dist

from benchmarks import records, turns
from bert_dp import config, optim
from bert_dp.data import stream
from bert_dp.model import bert
from bert_dp.parallel import make_engine
from bert_dp.tasks.mlm import MaskedLanguageModel
from bert_dp.training import loop, metrics
from bert_dp.training.devices import Precision, set_affinity
from bert_dp.training.process import World

CPU = torch.device("cpu")
WAYS = ("ceiling", "ours", "accelerate", "deepspeed-1")
CLIP, LR = 0.5, 1e-3
BUCKET_ELEMENTS = 25 * 2**20 // 4  # of DeepSpeed, as DDP's; its default of 500 M is one bucket for all


def parse() -> argparse.Namespace:
    parser = records.make_parser(__doc__, "--date", "--json")
    add = parser.add_argument
    add("--ranks", type=int, default=2)
    add("--layers", type=int, default=4)
    add("--hidden", type=int, default=768)
    add("--vocab", type=int, default=32_768)
    add("--micro", type=int, default=16, help="sequences of 128 per micro batch; the recipe's is 128")
    add("--accumulation", type=int, default=4)
    add("--rounds", type=int, default=12)
    add("--ways", default=",".join(WAYS))
    o = parser.parse_args()
    if "ceiling" not in records.check_names(parser, "--ways", o.ways, WAYS):
        parser.error("--ways: must hold ceiling, with which the others are compared")
    return o


def recipe(o: argparse.Namespace, engine: str, global_size: int) -> config.Config:
    """The 120 M recipe at the sizes that were asked for."""
    return config.resolve(
        [
            {
                "data": {"sources": ["builtin"]},
                "schedule": {"steps": 1},
                "compile": "off",
                "precision": "fp32",
                "model": {
                    "num_layers": o.layers,
                    "hidden_size": o.hidden,
                    "num_heads": 12,
                    "vocab_size": o.vocab,
                    "intermediate_size": 2 * o.hidden,
                },
                "batch": {"global_size": global_size, "micro_size": o.micro},
                "parallel": {"engine": engine},
            }
        ]
    )


def our_step(
    o: argparse.Namespace, engine_name: str, world: World
) -> Callable[[list[stream.MlmBatch]], None]:
    """Our train_step under an engine; the ceiling is `single` in every process."""
    if engine_name == "single":
        world = World(0, 0, 1, 1)
    settings = recipe(o, engine_name, o.micro * o.accumulation * world.size)
    engine = make_engine(engine_name, settings, world, CPU, precision="fp32", run_dir=Path("."))
    bare = build(settings)
    wrapped, _ = engine.prepare(bare, lambda named: optim.make_optimizer(settings.optim, named, bare))
    precision = Precision("fp32", torch.float32, None)

    def step(batches: list[stream.MlmBatch]) -> None:
        loop.train_step(
            engine,
            wrapped,
            MaskedLanguageModel.loss,
            batches,
            grad_accum_steps=len(batches),
            num_targets=sum(b.num_masked for b in batches) * engine.dp_size,
            device=CPU,
            precision=precision,
            max_norm=CLIP,
            timers=metrics.Timers(CPU),
            progress=lambda: None,
        )

    return step


def build(settings: config.Config) -> bert.CrammedBert:
    return bert.build_model(settings.model, 128, 0)


def accelerate_step(o: argparse.Namespace) -> Callable[[list[stream.MlmBatch]], None]:
    """The loop of accelerate's documentation on gradient accumulation."""
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=o.accumulation)
    bare = build(recipe(o, "ddp", o.micro * o.accumulation * o.ranks))
    optimizer = torch.optim.AdamW(bare.parameters(), lr=LR, fused=True)
    wrapped, prepared = accelerator.prepare(bare, optimizer)

    def step(batches: list[stream.MlmBatch]) -> None:
        for batch in batches:
            with accelerator.accumulate(wrapped):
                accelerator.backward(MaskedLanguageModel.loss(wrapped, batch) / batch.num_masked)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(wrapped.parameters(), CLIP)
                prepared.step()
                prepared.zero_grad()

    return step


def deepspeed_step(o: argparse.Namespace) -> Callable[[list[stream.MlmBatch]], None]:
    """The loop of DeepSpeed's documentation, with torch's fused AdamW."""
    os.environ.update({"DS_ACCELERATOR": "cpu", "LOCAL_SIZE": str(o.ranks)})
    with contextlib.redirect_stdout(sys.stderr):
        import deepspeed

        deepspeed.ops.__compatible_ops__ = {}  # or it compiles an operation for inference
        bare = build(recipe(o, "ddp", o.micro * o.accumulation * o.ranks))
        optimizer = torch.optim.AdamW(bare.parameters(), lr=LR, fused=True)
        wrapped, *_ = deepspeed.initialize(
            model=bare,
            optimizer=optimizer,
            dist_init_required=False,
            config={
                "train_micro_batch_size_per_gpu": o.micro,
                "gradient_accumulation_steps": o.accumulation,
                "gradient_clipping": CLIP,
                "steps_per_print": 10**9,
                "zero_optimization": {
                    "stage": 1,
                    "reduce_bucket_size": BUCKET_ELEMENTS,
                    "allgather_bucket_size": BUCKET_ELEMENTS,
                },
            },
        )

    def step(batches: list[stream.MlmBatch]) -> None:
        for batch in batches:
            wrapped.backward(MaskedLanguageModel.loss(wrapped, batch) / batch.num_masked)
            wrapped.step()

    return step


def rank_main(rank: int, o: argparse.Namespace, store: str) -> None:
    """One rank; rank 0 writes {way: [[seconds of each rank] per round]} to STORE.json."""
    world = World(rank, rank, o.ranks, o.ranks)
    os.environ.update(
        {
            "GLOO_SOCKET_IFNAME": "lo",
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(o.ranks),
            "LOCAL_WORLD_SIZE": str(o.ranks),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": "1",
        }
    )
    set_affinity(CPU, world)
    os.environ["OMP_NUM_THREADS"] = str(torch.get_num_threads())
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=o.ranks)
    make = {
        "ceiling": lambda: our_step(o, "single", world),
        "ours": lambda: our_step(o, "ddp", world),
        "accelerate": lambda: accelerate_step(o),
        "deepspeed-1": lambda: deepspeed_step(o),
    }
    steps = {way: make[way]() for way in o.ways.split(",")}
    masked = config.num_masked(0.25, 128)
    batches = [
        stream.random_batch(100 * rank + i, o.micro, 128, masked, o.vocab) for i in range(o.accumulation)
    ]
    seconds: dict[str, list[list[float]]] = {way: [] for way in steps}
    for number, order in enumerate(turns.orders(steps, o.rounds + 1)):
        for way in order:
            dist.barrier()
            start = time.perf_counter()
            steps[way](batches)
            mine = torch.tensor([time.perf_counter() - start], dtype=torch.float64)
            everyone = [torch.empty_like(mine) for _ in range(o.ranks)]
            dist.all_gather(everyone, mine)
            if number > 0:  # the first round fills caches, moments and buckets
                seconds[way].append([float(t) for t in everyone])
        if rank == 0:
            turns.tell(f"round {number} of {o.rounds}")
    if rank == 0:
        Path(f"{store}.json").write_text(json.dumps(seconds))
    dist.barrier()
    dist.destroy_process_group()
    sys.stderr.flush()
    os._exit(0)  # what deepspeed leaves behind may abort an orderly exit


def job_seconds(way: str, ranks: list[float]) -> float:
    """Of one step of all ranks; see above."""
    return len(ranks) / sum(1 / t for t in ranks) if way == "ceiling" else max(ranks)


def summarise(seconds: dict[str, list[list[float]]]) -> dict[str, Any]:
    """Per way: median step, and the communication efficiency, median over rounds with quartiles."""
    jobs = {way: [job_seconds(way, ranks) for ranks in rounds] for way, rounds in seconds.items()}
    out: dict[str, Any] = {}
    for way, times in jobs.items():
        shares = turns.ratios(jobs["ceiling"], times)
        quarters = statistics.quantiles(shares, n=4) if len(shares) > 1 else shares * 3
        out[way] = {
            "step_s": statistics.median(times),
            "communication_efficiency": statistics.median(shares),
            "quartiles": [quarters[0], quarters[2]],
            "range": [min(shares), max(shares)],
            "of_medians": statistics.median(jobs["ceiling"]) / statistics.median(times),
        }
    return out


def main() -> None:
    o = parse()
    with tempfile.TemporaryDirectory(prefix="bert-dp-") as folder:
        torch.multiprocessing.start_processes(
            rank_main, (o, f"{folder}/store"), nprocs=o.ranks, start_method="spawn"
        )
        seconds = json.loads(Path(f"{folder}/store.json").read_text())
    summary = summarise(seconds)
    print(f"{'way':12} {'step s':>8} {'efficiency':>11} {'quartiles':>15} {'of medians':>11}")
    for way, facts in summary.items():
        low, high = facts["quartiles"]
        print(
            f"{way:12} {facts['step_s']:8.3f} {facts['communication_efficiency']:11.3f} "
            f"{f'{low:.3f}-{high:.3f}':>15} {facts['of_medians']:11.3f}"
        )
    environment = records.environment_of(o)
    records.write(o.json, {"environment": environment, "summary": summary, "seconds": seconds})


if __name__ == "__main__":
    main()
