"""Measure when each gradient becomes ready in a rank's training step, for the predictions of `plan scaling`.

`python -m bert_dp.measure.profile_step CONFIG.yaml` prints one JSON line. One process trains with the engine,
the micro-batch size and the data of the configuration.
"""

import contextlib
import json
import statistics
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from bert_dp import tasks
from bert_dp.config import Config, batch_layout, load_config
from bert_dp.training import build
from bert_dp.training.devices import choose_device, device_name, set_affinity, synchronize, use_device
from bert_dp.training.distributed import HostCollectives
from bert_dp.training.loop import Rank, Trainer
from bert_dp.training.metrics import Timers
from bert_dp.training.process import HeartbeatWriter, Signals, World, follow_launcher

ALONE = World(0, 0, 1, 1)
WARM_UP, REPEATS = 2, 7


@contextlib.contextmanager
def lone_trainer(config: Config, work: Path) -> Iterator[Trainer]:
    """Yield a trainer for a single rank, without a process group. `work`: a scratch directory."""
    device = choose_device(config.run.device, ALONE)
    use_device(device, deterministic=config.run.deterministic)
    set_affinity(device, ALONE)
    layout, comm = batch_layout(config, 1), HostCollectives(ALONE, None)
    task = tasks.make_task(config, device)
    heartbeat = HeartbeatWriter(work / "heartbeats" / "rank-0")
    rank = Rank(config, layout, work, comm, device, task, task.open_data(), heartbeat, Signals())
    trainer, *_ = build.build_trainer(rank)
    try:
        yield trainer
    finally:
        trainer.stream.close()
        rank.heartbeat.close()


def measure(trainer: Trainer, clock: Timers) -> dict[str, Any]:
    """Return the field `profile` of scaling.json: medians over REPEATS steps. The steps update the model."""
    named = [(name, p) for name, p in trainer.bare_model.named_parameters() if p.requires_grad]
    arrived: dict[str, Any] = {}
    hooks = [
        p.register_post_accumulate_grad_hook(lambda _, name=name: arrived.update({name: clock.mark()}))
        for name, p in named
    ]
    rounds: list[dict[str, float]] = []
    batch = trainer.stream.next().to(trainer.device)
    num_targets = trainer.task.num_targets(0, trainer.layout.micro_size)
    for _ in range(WARM_UP + REPEATS):
        synchronize(trainer.device)
        start = clock.mark()
        with trainer.precision.context(trainer.device):
            loss = trainer.task.loss(trainer.model, batch) / num_targets
        middle = clock.mark()
        trainer.engine.backward(loss)
        end = clock.mark()
        trainer.engine.step(trainer.config.optim.clip)
        stepped = clock.mark()
        synchronize(trainer.device)
        parts = {"forward_s": (start, middle), "backward_s": (middle, end), "optimizer_s": (end, stepped)}
        seconds = {name: clock.between(*marks) for name, marks in parts.items()}
        rounds.append(seconds | {name: clock.between(middle, mark) for name, mark in arrived.items()})
    for handle in hooks:
        handle.remove()
    medians = {name: statistics.median(r[name] for r in rounds[WARM_UP:]) for name in rounds[0]}
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
        **{name: medians[name] for name in parts},
        "micro_s": medians["forward_s"] + medians["backward_s"],
        "gradients": [
            {"name": name, "bytes": sizes[name], "ready_s": medians[name]}
            for name in sorted(arrived, key=lambda name: medians[name])
        ],
    }


def main(path: Path) -> None:
    """Print the profile. Raise ConfigError if the configuration is invalid."""
    follow_launcher()
    with (
        tempfile.TemporaryDirectory(prefix="bert-dp-") as work,
        lone_trainer(load_config(path), Path(work)) as trainer,
    ):
        sys.stdout.write(json.dumps(measure(trainer, Timers(trainer.device))) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
