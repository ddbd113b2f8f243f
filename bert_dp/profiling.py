"""When each gradient is ready: one rank's step taken apart, for the prediction of many (`plan scaling`).

`python -m bert_dp.profiling CONFIG.yaml` prints one JSON line. One process, engine `single`, the
configuration's micro batch of random tokens.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bert_dp import setup, tasks, train
from bert_dp.config import Config, batch_plan, load_config
from bert_dp.dist import Comm, choose_device
from bert_dp.heartbeat import Heartbeat
from bert_dp.lifeline import follow_launcher
from bert_dp.metrics import Timers
from bert_dp.world import World

ALONE = World(0, 0, 1, 1)
WARM_UP, REPEATS = 2, 7


def profile(config: Config, work: Path) -> dict[str, Any]:
    """The `profile` of scaling.json: medians over REPEATS micro batches. `work`: a scratch directory."""
    plan = batch_plan(config, 1)
    device = choose_device(config.run.device, ALONE)
    comm = Comm(ALONE, None)
    setup.bind(config, device, ALONE)
    fresh = setup.Resume(None, None, train.Counters(), None)
    heartbeat = Heartbeat(work / "heartbeats" / "rank-0")
    task = tasks.make_task(config, device)
    job, _ = setup.assemble(
        config, plan, work, comm, device, task, task.open_data(), fresh, heartbeat, lambda: 0
    )
    try:
        return measure(job, Timers(device))
    finally:
        job.stream.close()
        heartbeat.close()


def measure(job: train.Job, clock: Timers) -> dict[str, Any]:
    """The profile of an assembled job; its weights are of no use afterwards."""
    named = [(name, p) for name, p in job.bare_model.named_parameters() if p.requires_grad]
    arrived: dict[str, Any] = {}

    def note(name: str) -> Any:
        def hook(_: Tensor) -> None:
            arrived[name] = clock.mark()

        return hook

    hooks = [p.register_post_accumulate_grad_hook(note(name)) for name, p in named]
    rounds: list[tuple[float, float, float, dict[str, float]]] = []
    batch = job.stream.next().to(job.device)
    num_targets = job.task.num_targets(0, job.plan.micro_size)
    for number in range(WARM_UP + REPEATS):
        _sync(job.device)
        start = clock.mark()
        with job.precision.context(job.device):
            loss = job.task.loss(job.model, batch) / num_targets
        turn = clock.mark()
        loss.backward()
        end = clock.mark()
        job.engine.step(job.config.optim.clip)
        stepped = clock.mark()
        _sync(job.device)
        if number >= WARM_UP:
            ready = {name: clock.between(turn, mark) for name, mark in arrived.items()}
            rounds.append(
                (clock.between(start, turn), clock.between(turn, end), clock.between(end, stepped), ready)
            )
    for handle in hooks:
        handle.remove()
    forward_s, backward_s, optimizer_s = (
        statistics.median(times) for times in zip(*(r[:3] for r in rounds), strict=True)
    )
    ready_s = {name: statistics.median(r[3][name] for r in rounds) for name in rounds[0][3]}
    sizes = {name: p.nbytes for name, p in named}
    return {
        "device": setup.device_name(job.device),
        "precision": job.precision.name,
        "compiled": job.facts["compiled"],
        "engine": "single",
        "micro_batch": job.plan.micro_size,
        "sequence_length": job.config.data.sequence_length,
        "parameters": sum(p.numel() for _, p in named),
        "num_layers": job.config.model.num_layers,
        "hidden_size": job.config.model.hidden_size,
        "num_heads": job.config.model.num_heads,
        "forward_s": forward_s,
        "backward_s": backward_s,
        "optimizer_s": optimizer_s,
        "micro_s": forward_s + backward_s,
        "gradients": [
            {"name": name, "bytes": sizes[name], "ready_s": ready_s[name]}
            for name in sorted(ready_s, key=lambda name: ready_s[name])
        ],
    }


def _sync(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def main(path: Path) -> None:
    """Raises ConfigError."""
    follow_launcher()
    with tempfile.TemporaryDirectory(prefix="bert-dp-") as work:
        facts = profile(load_config(path), Path(work))
    sys.stdout.write(json.dumps(facts) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
