"""Measure when each gradient of one rank's step is ready, for the prediction of many ranks (`plan scaling`).

`python -m bert_dp.measure.profile_step CONFIG.yaml` prints one JSON line. One process, engine `single`, the
configuration's micro batch of random tokens.
"""

from __future__ import annotations

import contextlib
import json
import statistics
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torch import Tensor

from bert_dp import tasks
from bert_dp.config import Config, batch_layout, load_config
from bert_dp.training import build
from bert_dp.training.devices import choose_device, device_name, set_affinity, synchronize, use_device
from bert_dp.training.distributed import HostCollectives
from bert_dp.training.loop import Rank, Trainer
from bert_dp.training.metrics import Timers
from bert_dp.training.process import HeartbeatWriter, Signals, follow_launcher
from bert_dp.training.record_files import WriteErrors
from bert_dp.training.world import World

ALONE = World(0, 0, 1, 1)
WARM_UP, REPEATS = 2, 7


@contextlib.contextmanager
def lone_trainer(config: Config, work: Path) -> Iterator[Trainer]:
    """Build a trainer of one rank without a process group. `work`: a scratch directory."""
    device = choose_device(config.run.device, ALONE)
    use_device(device, deterministic=config.run.deterministic)
    set_affinity(device, ALONE)
    task = tasks.make_task(config, device)
    rank = Rank(
        config=config,
        layout=batch_layout(config, 1),
        run_dir=work,
        comm=HostCollectives(ALONE, None),
        device=device,
        task=task,
        data=task.open_data(),
        heartbeat=HeartbeatWriter(work / "heartbeats" / "rank-0"),
        signals=Signals(),
        write_errors=WriteErrors(),
    )
    trainer, *_ = build.build_trainer(rank)
    try:
        yield trainer
    finally:
        trainer.stream.close()
        rank.heartbeat.close()


def profile(config: Config, work: Path) -> dict[str, Any]:
    """Return the `profile` of scaling.json: medians over REPEATS micro batches. `work`: a scratch
    directory."""
    with lone_trainer(config, work) as trainer:
        return measure(trainer, Timers(trainer.device))


def measure(trainer: Trainer, clock: Timers) -> dict[str, Any]:
    """Return the profile of a trainer; its weights are of no use afterwards."""
    named = [(name, p) for name, p in trainer.bare_model.named_parameters() if p.requires_grad]
    arrived: dict[str, Any] = {}

    def note(name: str) -> Any:
        def hook(_: Tensor) -> None:
            arrived[name] = clock.mark()

        return hook

    hooks = [p.register_post_accumulate_grad_hook(note(name)) for name, p in named]
    rounds: list[tuple[float, float, float, dict[str, float]]] = []
    batch = trainer.stream.next().to(trainer.device)
    num_targets = trainer.task.num_targets(0, trainer.layout.micro_size)
    for number in range(WARM_UP + REPEATS):
        synchronize(trainer.device)
        start = clock.mark()
        with trainer.precision.context(trainer.device):
            loss = trainer.task.loss(trainer.model, batch) / num_targets
        turn = clock.mark()
        trainer.engine.backward(loss)
        end = clock.mark()
        trainer.engine.step(trainer.config.optim.clip)
        stepped = clock.mark()
        synchronize(trainer.device)
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
        "device": device_name(trainer.device),
        "precision": trainer.precision.name,
        "micro_batch": trainer.layout.micro_size,
        "sequence_length": trainer.config.data.sequence_length,
        "parameters": sum(p.numel() for _, p in named),
        "num_layers": trainer.config.model.num_layers,
        "hidden_size": trainer.config.model.hidden_size,
        "num_heads": trainer.config.model.num_heads,
        "backward_s": backward_s,
        "optimizer_s": optimizer_s,
        "micro_s": forward_s + backward_s,
        "gradients": [
            {"name": name, "bytes": sizes[name], "ready_s": ready_s[name]}
            for name in sorted(ready_s, key=lambda name: ready_s[name])
        ],
    }


def main(path: Path) -> None:
    """Print the profile. Raises ConfigError."""
    follow_launcher()
    with tempfile.TemporaryDirectory(prefix="bert-dp-") as work:
        facts = profile(load_config(path), Path(work))
    sys.stdout.write(json.dumps(facts) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
