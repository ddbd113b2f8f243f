"""Time from the command to the first finished step: `bert-dp train` beside bare torchrun, same worker.

    python benchmarks/startup.py [--ranks 2] [--rounds 9] [--set a.b=v] [--json FILE]

In turn within each round, the order swapped every round; both train the same resolved configuration on shards
that lie ready. The clock stops when the first line of metrics.jsonl appears, which both write after one step.
A first round warms the file cache and is left out. Prints medians and their difference; --json keeps all.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks import records
from benchmarks.turns import spread, tell
from bert_dp.config import dump_config, load_config, shipped_configs
from tests.e2e.cli import TINY
from tests.shards import write_shards


def ours(run_dir: Path, settings: list[str], ranks: int) -> list[str]:
    options = ["--nproc", str(ranks), "--run-dir", str(run_dir), *records.set_options(settings)]
    return records.bert_dp_command("train", "quickstart", *options)


def torchrun(run_dir: Path, settings: list[str], ranks: int) -> list[str]:
    run_dir.mkdir()
    config = run_dir / "config.yaml"
    config.write_text(dump_config(load_config(shipped_configs() / "quickstart.yaml", settings)))
    options = ["--standalone", f"--nproc-per-node={ranks}", "-m", "bert_dp.worker", str(config)]
    return [sys.executable, "-m", "torch.distributed.run", *options]


VARIANTS = {"bert-dp": ours, "torchrun": torchrun}


def first_step_s(command: list[str], metrics: Path) -> float:
    """Seconds from the start of `command` to the first line in `metrics`; waits for the command's end."""
    start = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        while not (metrics.exists() and metrics.stat().st_size):
            if process.poll() is not None:
                said = process.communicate()[0][-3000:]
                raise RuntimeError(f"{command} ended before its first step:\n{said}")
            time.sleep(0.002)
        seconds = time.perf_counter() - start
        process.communicate(timeout=300)
        return seconds
    finally:
        process.kill()


def measure(rounds: int, ranks: int, extra: list[str]) -> list[dict[str, float]]:
    """Seconds of each variant in each round."""
    measured = []
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        shards = write_shards(root / "shards")
        settings = [*TINY, f"data.path={shards}", "schedule.steps=1", "compile=off", *extra]
        for number in range(rounds + 1):
            seconds = {}
            for name in list(VARIANTS) if number % 2 else list(VARIANTS)[::-1]:
                run_dir = root / f"{name}-{number}"
                command = VARIANTS[name](run_dir, settings, ranks)
                seconds[name] = first_step_s(command, run_dir / "metrics.jsonl")
            tell(f"round {number}: " + ", ".join(f"{n} {s:.2f} s" for n, s in seconds.items()))
            measured.append(seconds)
    return measured[1:]


def main() -> None:
    parser = records.make_parser(__doc__, "--set", "--json")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=9)
    o = parser.parse_args()
    rounds = measure(o.rounds, o.ranks, o.settings)
    medians = {name: statistics.median(r[name] for r in rounds) for name in VARIANTS}
    over = spread([r["bert-dp"] - r["torchrun"] for r in rounds])
    for name, seconds in medians.items():
        print(f"{name:10} {seconds:6.2f} s to the first step, median of {len(rounds)}")
    print("bert-dp over torchrun: {median:+.2f} s ({min:+.2f} to {max:+.2f})".format(**over))
    environment = records.environment(ranks=o.ranks)
    result = {"environment": environment, "rounds": rounds, "median_s": medians, "over_s": over}
    records.write(o.json, result)


if __name__ == "__main__":
    main()
