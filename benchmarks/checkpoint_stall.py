"""How long a save holds training up: written beside the steps (ours) and before the next step.

    python benchmarks/checkpoint_stall.py [--layers 4] [--steps 24] [--every 8] [--rounds 3] [--json FILE]

One rank on the CPU trains the crammed BERT cut to --layers layers, on random tokens, by bert_dp's own loop
parts (train_step, AsyncCheckpointer). A save comes after every --every steps; --writing beside: as the loop
does it, the writer works while the next steps run; before: the loop waits for the writer. `none` saves
nothing. The three run in turn within each round, in an order drawn anew from a fixed seed, all in one
process.

    interval   seconds from the end of a step to the end of the next, with what lies between
    held       seconds that the loop stood still in a save: gathering, and waiting for an earlier write
    cost       seconds that a save adds to the run: (interval total with saves - without) / saves
    write      seconds of the writer thread, for one save
The cost of writing beside the steps is not zero where the writer takes cores from them: here it does.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch

from benchmarks import records, turns
from benchmarks.communication import CPU, recipe
from bert_dp import config, optim
from bert_dp.data import stream
from bert_dp.model import bert
from bert_dp.parallel import make_engine
from bert_dp.tasks.mlm import MaskedLanguageModel
from bert_dp.training import checkpoint, loop, metrics, process
from bert_dp.training.devices import Precision
from bert_dp.training.process import WriteErrors

WAYS = ("none", "before", "beside")


def parse() -> argparse.Namespace:
    parser = records.make_parser(__doc__, "--date", "--json")
    add = parser.add_argument
    add("--layers", type=int, default=4)
    add("--hidden", type=int, default=768)
    add("--vocab", type=int, default=32_768)
    add("--micro", type=int, default=8, help="sequences of 128 per step")
    add("--steps", type=int, default=24, help="timed steps of each way in a round")
    add("--every", type=int, default=8, help="steps between saves")
    add("--rounds", type=int, default=3)
    add("--threads", type=int, default=2)
    add("--folder", help="where to save; default: the temporary directory")
    return parser.parse_args()


def build(o: argparse.Namespace) -> tuple[Any, Any, Precision]:
    """(engine, wrapped model, precision) of one rank in fp32."""
    settings = recipe(o, "single", o.micro)
    engine = make_engine(
        "single", settings, process.World(0, 0, 1, 1), CPU, precision="fp32", run_dir=Path(".")
    )
    bare = bert.build_model(settings.model, 128, 0)
    wrapped, _ = engine.prepare(bare, lambda named: optim.make_optimizer(settings.optim, named, bare))
    return engine, wrapped, Precision("fp32", torch.float32, None)


def measure(o: argparse.Namespace, way: str, parts: tuple[Any, Any, Precision]) -> dict[str, Any]:
    """The intervals of o.steps steps, and what the saves between them cost."""
    engine, wrapped, precision = parts
    batch = stream.random_batch(0, o.micro, 128, config.num_masked(0.25, 128), o.vocab)
    timers = metrics.Timers(CPU)
    written: list[float] = []
    plain = checkpoint.save_checkpoint

    def timed(*arguments: Any, **options: Any) -> Path:
        start = time.perf_counter()
        path = plain(*arguments, **options)
        written.append(time.perf_counter() - start)
        return path

    folder = Path(tempfile.mkdtemp(prefix="bert-dp-", dir=o.folder))
    saver = checkpoint.AsyncCheckpointer(
        folder / "checkpoints",
        config.CheckpointConfig(keep=1),
        log_rank0=print,
        saved_step=None,
        write_errors=WriteErrors(),
    )
    checkpoint.save_checkpoint = timed
    intervals = []
    try:
        last = time.perf_counter()
        for step in range(1, o.steps + 1):
            loop.train_step(
                engine,
                wrapped,
                MaskedLanguageModel.loss,
                [batch],
                grad_accum_steps=1,
                num_targets=batch.num_masked,
                device=CPU,
                precision=precision,
                max_norm=0.5,
                timers=timers,
                progress=lambda: None,
            )
            if way != "none" and step % o.every == 0:
                saver.save(step, engine.gather_state, {})
                if way == "before":
                    saver.close()
            intervals.append(time.perf_counter() - last)
            last = time.perf_counter()
        held = saver.stall_s
        saver.close()
        settled = time.perf_counter() - last
    finally:
        checkpoint.save_checkpoint = plain
        size = sum(p.stat().st_size for p in folder.rglob("*") if p.is_file())
        shutil.rmtree(folder)
    return {
        "way": way,
        "interval_s": intervals,
        "held_s": held,
        "write_s": written,
        "after_s": settled,
        "bytes": size,
        "failed": saver.failed_saves,
    }


def summarise(o: argparse.Namespace, measured: list[dict[str, Any]]) -> dict[str, Any]:
    """Per way: median over the rounds, with their range."""
    saves = o.steps // o.every
    by_way = {way: [r for r in measured if r["way"] == way] for way in WAYS}
    totals = {way: [sum(r["interval_s"]) for r in rounds] for way, rounds in by_way.items()}
    summary: dict[str, Any] = {"step_s": statistics.median(t / o.steps for t in totals["none"])}
    for way in WAYS[1:]:
        cost = [(t - n) / saves for t, n in zip(totals[way], totals["none"], strict=True)]
        summary[way] = {
            "cost_s": statistics.median(cost),
            "cost_s_range": [min(cost), max(cost)],
            "held_s": statistics.median(r["held_s"] / saves for r in by_way[way]),
            "write_s": statistics.median(s for r in by_way[way] for s in r["write_s"]),
            "longest_interval_s": statistics.median(max(r["interval_s"]) for r in by_way[way]),
        }
    return summary


def main() -> None:
    o = parse()
    torch.set_num_threads(o.threads)
    parts = build(o)
    measure(argparse.Namespace(**{**vars(o), "steps": 2}), "none", parts)  # makes the optimizer's state
    measured = [
        {"round": number, **measure(o, way, parts)}
        for number, order in enumerate(turns.orders(WAYS, o.rounds))
        for way in order
    ]
    summary = summarise(o, measured)
    size = max(r["bytes"] for r in measured)
    print(
        f"step {summary['step_s']:.2f} s, checkpoint {size / 2**20:.0f} MiB, {o.rounds} rounds, "
        f"{o.steps // o.every} saves each"
    )
    for way in WAYS[1:]:
        w = summary[way]
        print(
            f"{way:7} a save costs {w['cost_s']:.2f} s ({w['cost_s_range'][0]:.2f} to "
            f"{w['cost_s_range'][1]:.2f}), holds the loop {w['held_s']:.2f} s, is written in "
            f"{w['write_s']:.2f} s; longest interval {w['longest_interval_s']:.2f} s"
        )
    environment = records.environment_of(o, hidden=("folder",))
    records.write(o.json, {"environment": environment, "summary": summary, "records": measured})


if __name__ == "__main__":
    main()
