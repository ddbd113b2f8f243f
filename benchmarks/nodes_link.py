"""Measure the steps of two nodes on a slow link, and compare them with `bert-dp plan scaling`.

    python benchmarks/nodes_link.py [--mbit 100] [--steps 10] [--date D] [--json FILE]

Needs root, iproute2 and two idle cores. Two network namespaces of this machine act as nodes, each with one
rank on one core; tc (tbf) limits their link. A run on one rank gives the profile (`bert-dp scale --nproc 1`),
and `bert-dp doctor` over both nodes gives the rate of the link. Then two nodes train at each accumulation,
with gradients reduced in full precision and in bf16. Prints a row for each case. Exits with 1 if a prediction
is more than 15 % off, or if the rate that doctor measures is not 80 to 100 % of the limit.
"""

import json
import math
import re
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks import records
from benchmarks.turns import aligned, print_progress
from launcher import results
from launcher.plan.scaling import source_of
from launcher.plan.step_model import FIRST_BUCKET, Fabric, LinkSpec, Scenario, predict
from launcher.scale.models import Scaling
from tests.e2e.cli import command, tiny
from tests.helpers import read_lines
from tests.nodes.harness import PORT, REASON, Cluster, ended, run
from tests.shards import write_shards

ACCUMULATIONS, REDUCTIONS = (1, 8, 32), {"full": math.inf, "bf16": 2.0}  # dtype -> most bytes sent per number
MICRO, RANKS, WARM_UP = 16, 2, 3
MODEL = "hidden_size=256 num_layers=4 num_heads=4 intermediate_size=1024"  # 3.2 M parameters
SETTINGS = [f"model.{item}" for item in MODEL.split()] + [f"batch.micro_size={MICRO}", "compile=off"]
MAX_ERROR = 0.15  # of the predicted step time


def settings_of(accumulation: int, ranks: int, *more: str) -> list[str]:
    return [*SETTINGS, f"batch.global_size={ranks * MICRO * accumulation}", *more]


def main() -> None:
    parser = records.make_parser(__doc__, "--date", "--json")
    parser.add_argument("--mbit", type=int, default=100, help="rate of the link (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=10, help="timed steps per run (default: %(default)s)")
    o = parser.parse_args()
    if REASON:
        parser.error(REASON)
    with tempfile.TemporaryDirectory() as folder, Cluster() as cluster:
        record = measure(o.mbit, o.steps, Path(folder), cluster)
    print(f"link {o.mbit} Mbit/s, measured by doctor: {record['link_mb_s']:.1f} MB/s")
    table = [["accumulation", "reduced in", "measured s", "predicted s", "ratio"]]
    for row in record["rows"]:
        seconds = [f"{row[key]:.3f}" for key in ("measured_s", "predicted_s")]
        table.append([str(row["accumulation"]), row["reduce_dtype"], *seconds, f"{row['ratio']:.2f}"])
    print("\n".join(aligned(table)))
    records.write(o.json, {"environment": records.environment_of(o), **record})
    in_range = 0.8 <= record["link_mb_s"] / (o.mbit / 8) <= 1.0
    sys.exit(not in_range or any(abs(row["ratio"] - 1) > MAX_ERROR for row in record["rows"]))


def measure(mbit: int, steps: int, folder: Path, cluster: Cluster) -> dict[str, Any]:
    """Return the rate of the link, the profile of one rank, and predicted and timed steps of each case."""
    shards = write_shards(folder / "shards", train=4096)

    def on_core(node: int, *words: str) -> list[str]:
        return ["taskset", "-c", str(node), *command(*words)]

    scale = on_core(0, "scale", "quickstart", *tiny(shards, *settings_of(1, 1)), "--nproc", "1")
    scale += ["--repeats", "1", "--steps", "20", "--warm-up", "5", "--out", str(folder / "scaling")]
    ended([cluster.start(0, *scale)], 0, 600)
    scaling = results.read(folder / "scaling" / "scaling.json", Scaling)
    source = source_of(scaling, "scaling.json")
    shape = f"qdisc add dev data root tbf rate {mbit}mbit burst 256kb latency 100ms".split()
    for name in cluster.names:
        run("tc", "-n", name, *shape)
    place = ["--nnodes", "2", "--rendezvous", f"{cluster.address(0)}:{PORT}", "--run-dir", str(folder)]
    doctors = [cluster.start(k, *on_core(k, "doctor", *place, "--node-rank", str(k))) for k in (0, 1)]
    output = ended(doctors, 0)[0]
    found = re.search(r"at ([\d.]+) MB/s", output)
    assert found, output
    rate, rows = float(found[1]), []
    fabric = Fabric(1, None, LinkSpec("tcp", rate / 1e3, 1.0))
    for accumulation in ACCUMULATIONS:
        for dtype, sent_bytes in REDUCTIONS.items():
            run_dir, length = folder / f"{accumulation}-{dtype}", WARM_UP + steps
            more = (f"schedule.steps={length}", f"parallel.reduce_dtype={dtype}")
            words = ["train", "quickstart", *tiny(shards, *settings_of(accumulation, RANKS, *more))]
            words += ["--nproc", "1", *place[:4], "--run-dir", str(run_dir)]
            ranks = [cluster.start(k, *on_core(k, *words, "--node-rank", str(k))) for k in (0, 1)]
            ended(ranks, 0, 1200)
            steps_s = [line["step_time_s"] for line in read_lines(run_dir / "metrics.jsonl")][WARM_UP:]
            scenario = Scenario(
                fabric, RANKS, accumulation=accumulation, first_bucket=FIRST_BUCKET, sent_bytes=sent_bytes
            )
            measured, predicted = statistics.median(steps_s), predict(source.profile, scenario).step_time_s
            rows.append(
                {
                    "accumulation": accumulation,
                    "reduce_dtype": dtype,
                    "measured_s": measured,
                    "predicted_s": predicted,
                    "ratio": predicted / measured,
                    "steps_s": steps_s,
                }
            )
            print_progress(json.dumps(rows[-1]))
    return {"link_mb_s": rate, "profile": results.plain(source.profile), "rows": rows}


if __name__ == "__main__":
    main()
