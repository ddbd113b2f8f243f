"""Measure latency and throughput of an exported encoder, and of the same weights in other programs.

    python benchmarks/export_speed.py [--models crammed-rope,small-text] [--rows 'ours:*,...'] [--json FILE]

The encoder is what `export --encoder` writes (last hidden states, no head). Its weights are random, which
does not change the cost. Every sequence has the full length, and every program gets a padding mask of ones.

    ours          the model of bert_dp: eager; compiled (torch.compile, dynamic shapes); aoti (`export aoti`)
    transformers  the files of `export hf` in AutoModel: eager; compiled (torch.compile, dynamic shapes)
    onnxruntime   the files of `export onnx`: plain; fused by onnxruntime.transformers; plain with --int8
    matmul        no model: the forward matrix products of the encoder at 8 x 128, as in step_speed.py

A row is PROGRAM:MODE:PRECISION. A row is reported as absent if its package is not installed or the CPU does
not support its precision. Each row runs in a separate process, on the same cores with the same number of
threads, and glibc keeps freed memory in each. A point is a batch size and a length. At every point the rows
alternate, in a new random order in each round (fixed seed). The first call of a row at a point is not timed,
unless the point has more than 4,096 tokens.

    load_s        time from the start of Python to a loaded model, including the import of its libraries
    first_s       time of the first call, with 3 sequences of different lengths; includes compilation
    latency       time of one call, from input arrays to output arrays: median over the calls of all rounds
    x             latency of transformers:eager:fp32 (or onnxruntime:plain:fp32) / latency of the row; medians
                  of each round's calls, paired within the round
    share         (model FLOP/s, 2 N_linear + 4 L S H per token) / (matmul rate of that precision), paired
    difference    largest difference of the first output from ours:eager:fp32 / max(1, largest output)
    memory        resident memory after loading and at its peak
"""

import argparse
import contextlib
import fnmatch
import importlib.util
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks import records, step_speed, turns
from benchmarks.turns import aligned, print_progress, ratios, spread, with_range
from bert_dp.config import Config, ModelConfig, bf16_units, find_config, read_yaml, resolve, shipped_configs

MODELS = ("crammed-rope", "small-text")
PLAIN, FUSED, INT8 = "onnxruntime:plain:fp32", "onnxruntime:fused:fp32", "onnxruntime:plain:int8"
ROWS = (
    *(f"ours:{mode}:{bits}" for mode in ("eager", "compiled", "aoti") for bits in ("fp32", "bf16")),
    *(f"transformers:{mode}:{bits}" for mode in ("eager", "compiled") for bits in ("fp32", "bf16")),
    *(PLAIN, FUSED, INT8, "matmul:eager:fp32", "matmul:eager:bf16"),
)
OURS, PEER = "ours:eager:fp32", "transformers:eager:fp32"
FILES = {  # row -> form of its export
    "ours:aoti:fp32": "aoti",
    "ours:aoti:bf16": "aoti-bf16",
    **dict.fromkeys((row for row in ROWS if row.startswith("transformers")), "hf"),
    PLAIN: "onnx",
    FUSED: "onnx-fused",
    INT8: "onnx-int8",
}
SHARE_AT = (8, 128)
WARM_TOKENS = 4096  # an untimed call precedes calls up to this size; in larger ones, start-up is negligible
MOST_CALLS = 50  # per row and point in one round
QUICK = {
    "model": {"vocab_size": 256, "hidden_size": 32, "num_heads": 2, "num_layers": 1, "intermediate_size": 32},
    "data": {"sequence_length": 16},
}
QUICK_ROWS = ",".join((OURS, PEER, PLAIN, FUSED, "matmul:eager:fp32"))

Point = tuple[int, int]
"""Number of sequences in a call, and of tokens in each sequence."""


def parse() -> argparse.Namespace:
    parser = records.make_parser(__doc__, "--date", "--json")
    add = parser.add_argument
    add("--models", default=",".join(MODELS), help="shipped configurations (default: %(default)s)")
    add("--rows", default="*", help="names or shell patterns, comma-separated (default: all)")
    add("--lengths", default="32,128", help="tokens per sequence (default: %(default)s)")
    add("--batches", default="1,8,32,128", help="sequences per call (default: %(default)s)")
    add("--rounds", type=int, default=3)
    add("--seconds", type=float, default=0.5, help="seconds per row and point in a round (at least one call)")
    add("--threads", type=int, default=len(os.sched_getaffinity(0)), help="threads and cores (default: all)")
    add("--seed", type=int, default=0, help="seed of the tokens and of the order of the rows")
    add("--quick", action="store_true", help="a tiny model, two rounds, only rows without a compiler")
    o = parser.parse_args()
    if o.quick:
        vars(o).update(models="small-text", lengths="8,16", batches="1,2", rounds=2, seconds=0.01)
        o.rows = QUICK_ROWS if o.rows == "*" else o.rows
    cores = len(os.sched_getaffinity(0))
    if not 1 <= o.threads <= cores:
        parser.error(f"--threads {o.threads}: this process has {cores} cores; give 1 to {cores}")
    for name in ("lengths", "batches"):
        try:
            sizes = [int(part) for part in getattr(o, name).split(",")]
        except ValueError:
            sizes = [0]
        if min(sizes) < 1:
            parser.error(f"--{name} {getattr(o, name)}: use comma-separated positive integers")
        setattr(o, name, sizes)
    shipped = sorted(path.stem for path in shipped_configs().glob("*.yaml"))
    o.models = records.check_names(parser, "--models", o.models, shipped)
    for name in o.models:
        longest = config_of(name, o).data.sequence_length
        if max(o.lengths) > longest:
            parser.error(f"--lengths {max(o.lengths)}: {name} takes at most {longest}")
    o.names = [row for row in ROWS if any(fnmatch.fnmatchcase(row, pattern) for pattern in o.rows.split(","))]
    if OURS not in o.names:
        parser.error(f"--rows {o.rows}: must include {OURS}, because the other outputs are compared with it")
    o.points = [(batch, length) for batch in o.batches for length in o.lengths]
    o.share_at = SHARE_AT if SHARE_AT in o.points else o.points[-1]
    return o


def config_of(name: str, o: argparse.Namespace) -> Config:
    layers = [read_yaml(find_config(name)), {"run": {"init_from": None}}]
    return resolve([*layers, *([QUICK] if o.quick else [])])


def absent(row: str) -> str | None:
    """Return the reason why this machine cannot measure a row; None if it can."""
    program, mode, precision = row.split(":")
    package = {"ours": "torch", "matmul": "torch"}.get(program, program)
    if importlib.util.find_spec(package) is None:
        return f"{package} is not installed"
    if precision == "bf16" and not bf16_units():
        return "this CPU has no bf16 multiplication"
    if mode in ("aoti", "compiled") and shutil.which("g++") is None:
        return "g++ is not installed"
    return None


# ---- the exports of a run with random weights, made in a separate process ----


def export_all(config: Config, scratch: Path, forms: Sequence[str]) -> turns.Prepared:
    """Write SCRATCH/run, and SCRATCH/FORM for each form. This process makes no measurements."""
    from bert_dp.exporting.source import open_run
    from tests.runs_to_export import write_run

    source = open_run(write_run(scratch / "run", config), encoder=True)
    facts = {}
    for form in forms:
        start = time.perf_counter()
        folder = scratch / form
        folder.mkdir()
        export(form, source, folder, config)
        size = sum(path.stat().st_size for path in folder.iterdir())
        facts[form] = {"seconds": time.perf_counter() - start, "mib": size / 2**20}
    return facts, dict


def export(form: str, source: Any, folder: Path, config: Config) -> None:
    from bert_dp.exporting.source import write_about, write_aoti, write_hf, write_onnx

    if form == "hf":
        write_hf(source, folder)
    elif form.startswith("aoti"):
        write_about(folder, source, "aoti", "benchmarks/export_speed.py")
        write_aoti(source, folder, bf16=form == "aoti-bf16")
    else:
        write_onnx(source, folder, int8=form == "onnx-int8")
    if form == "onnx-fused":
        fuse(folder / "model.onnx", config.model)


def fuse(path: Path, model: ModelConfig) -> None:
    """Rewrite an ONNX file with the transformer optimizer of ONNX Runtime."""
    from onnxruntime.transformers.fusion_options import FusionOptions
    from onnxruntime.transformers.optimizer import optimize_model

    options = FusionOptions("bert")
    # this fusion fails for a LayerNorm without a bias; the runtime fuses more when it loads the file
    options.enable_skip_layer_norm = model.norm == "rmsnorm" or model.norm_bias
    sizes = {"num_heads": model.num_heads, "hidden_size": model.hidden_size}
    optimize_model(str(path), optimization_options=options, **sizes).save_model_to_file(str(path))


# ---- the rows; each runs in a child process, so that only this process imports its libraries ----


def open_row(row: str, scratch: Path, threads: int) -> Callable[..., Any]:
    """Return a row's function: (input_ids, attention_mask), each [B, S] int64 -> hidden states [B, S, H]."""
    program, mode, precision = row.split(":")
    folder = scratch / FILES.get(row, "run")
    if program == "onnxruntime":
        return open_onnxruntime(folder / "model.onnx", threads)
    import torch

    from bert_dp.exporting import load_exported

    torch.set_num_threads(threads)
    if mode == "aoti":
        return load_exported.open_aoti(folder, "encoder")
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    if program == "transformers":
        import transformers

        peer = transformers.AutoModel.from_pretrained(folder, local_files_only=True, dtype=dtype).eval()
        return load_exported.compute_hf(
            torch.compile(peer, dynamic=True) if mode == "compiled" else peer, "encoder"
        )
    from bert_dp.exporting.source import open_run

    model: Any = open_run(folder, encoder=True).module().to(dtype)
    if mode == "compiled":
        model = torch.compile(model, dynamic=True)

    def compute(ids_BS: Any, mask_BS: Any) -> Any:
        with torch.inference_mode():
            return model(torch.from_numpy(ids_BS), torch.from_numpy(mask_BS))[0].numpy()

    return compute


def open_onnxruntime(path: Path, threads: int) -> Callable[..., Any]:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    options.inter_op_num_threads = 1
    session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    return lambda ids, mask: session.run(None, {"input_ids": ids, "attention_mask": mask})[0]


def whole_batch(o: argparse.Namespace, config: Config, point: Point) -> tuple[Any, Any]:
    """Return random tokens and a mask of ones, each [B, S] int64."""
    import numpy as np

    ids_BS = np.random.default_rng(o.seed).integers(7, config.model.vocab_size, point)
    return ids_BS, np.ones_like(ids_BS)


def ragged_batch(o: argparse.Namespace, config: Config) -> tuple[Any, Any]:
    """Return three sequences, two of them padded, on which the outputs of the rows are compared."""
    import numpy as np

    ids_BS, mask_BS = whole_batch(o, config, (3, max(o.lengths)))
    for row, lost in ((1, 3), (2, ids_BS.shape[1] // 2)):
        mask_BS[row, -lost:] = 0
        ids_BS[row, -lost:] = 0
    return ids_BS, np.ascontiguousarray(mask_BS)


def probe_sizes(
    o: argparse.Namespace, config: Config, precision: str
) -> tuple[argparse.Namespace, list[tuple[int, int, int, int]]]:
    """Return options and shapes for step_speed.make_matmul: the encoder's products, without the decoder."""
    model, (batch, length) = config.model, o.share_at
    sizes = argparse.Namespace(
        micro=batch,
        sequence=length,
        hidden=model.hidden_size,
        heads=model.num_heads,
        intermediate=model.intermediate_size,
        layers=model.num_layers,
        vocab=model.vocab_size,
        device="cpu",
        precision=precision,
    )
    return sizes, step_speed.linear_shapes(sizes)[:-1]


def prepare(row: str, o: argparse.Namespace, config: Config, scratch: Path) -> turns.Prepared:
    """Load a row and compute its first output. A measurement gets a point and the seconds to spend on it."""
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: o.threads])
    if is_probe(row):
        import torch

        torch.set_num_threads(o.threads)
        probe = step_speed.make_matmul(*probe_sizes(o, config, row.split(":")[2]))
        probe()
        return {}, lambda *_: probe()
    start = time.perf_counter()
    compute = open_row(row, scratch, o.threads)
    facts: dict[str, Any] = {"load_s": time.perf_counter() - start, "loaded_mib": memory_mib("VmRSS")}
    batch = ragged_batch(o, config)
    start = time.perf_counter()
    facts["output"] = compute(*batch)
    facts["first_s"] = time.perf_counter() - start

    def measure_point(point: Point, seconds: float) -> dict[str, Any]:
        latencies = time_calls(compute, whole_batch(o, config, point), seconds)
        return {"latencies_s": latencies, "peak_mib": memory_mib("VmHWM")}

    return facts, measure_point


def memory_mib(field: str) -> float:
    """Return this process's resident memory (VmRSS) or its peak (VmHWM), without the parent's peak."""
    status = Path("/proc/self/status").read_text()
    return int(status.split(f"{field}:")[1].split()[0]) / 2**10


def time_calls(compute: Callable[..., Any], batch: tuple[Any, Any], seconds: float) -> list[float]:
    """Time calls for `seconds`, at least 1 and at most MOST_CALLS. Return the seconds of each call."""
    latencies: list[float] = []
    end = time.perf_counter() + seconds
    while not latencies or (time.perf_counter() < end and len(latencies) < MOST_CALLS):
        start = time.perf_counter()
        compute(*batch)
        latencies.append(time.perf_counter() - start)
    return latencies


# ---- the parent process ----


def measure(o: argparse.Namespace, model: str, names: Sequence[str]) -> dict[str, Any]:
    """Export a model and measure its rows. Return the exports, and metadata and rounds of each row."""
    with tempfile.TemporaryDirectory(prefix="export-speed-") as folder:
        scratch = Path(folder)
        forms = list(dict.fromkeys(FILES[row] for row in names if row in FILES))
        with turns.Child("export", export_all, config_of(model, o), scratch, forms) as child:
            exports = child.facts
        seconds = ", ".join(f"{form} ({made['seconds']:.0f} s)" for form, made in exports.items())
        print_progress(f"{model}: exported {seconds}")
        return {"exports": exports, "rows": take_turns(o, model, names, scratch)}


def take_turns(
    o: argparse.Namespace, model: str, names: Sequence[str], scratch: Path
) -> dict[str, dict[str, Any]]:
    """Measure the rows alternately. Return, per row, metadata and rounds: point -> seconds of each call."""
    rows: dict[str, dict[str, Any]] = {}
    processes = {}
    with contextlib.ExitStack() as stack:
        for row in names:  # one at a time, because loading and compiling would disturb each other
            child = turns.Child(row, prepare, row, o, config_of(model, o), scratch)
            processes[row] = stack.enter_context(child)
            rows[row] = {**child.facts, "rounds": [{} for _ in range(o.rounds)]}
            for point in o.points:
                if not is_probe(row) and point[0] * point[1] <= WARM_TOKENS:
                    processes[row].measure(point, 0.0)
            print_progress(f"{model}: {row} is ready")
        for number, order in enumerate(turns.orders(names, o.rounds, o.seed)):
            for point in o.points:
                for row in order:
                    if is_probe(row) and point != o.share_at:
                        continue
                    measured = processes[row].measure(point, o.seconds)
                    rows[row]["rounds"][number][name_of(point)] = measured.get("latencies_s", measured)
                    if not is_probe(row):
                        rows[row]["peak_mib"] = measured["peak_mib"]
            print_progress(f"{model}: round {number + 1} of {o.rounds}")
    return rows


def is_probe(row: str) -> bool:
    return row.startswith("matmul")


def name_of(point: Point) -> str:
    return f"{point[0]}x{point[1]}"


def summarise(o: argparse.Namespace, config: Config, rows: dict[str, dict[str, Any]]) -> None:
    """Add points, difference and share to each row, and remove its first output."""
    import numpy as np

    reference, (_, mask_BS) = rows[OURS]["output"], ragged_batch(o, config)
    scale = max(1.0, float(np.abs(reference[mask_BS != 0]).max()))
    rates = {row.split(":")[2]: matmul_rates(o, config, rows[row]) for row in rows if is_probe(row)}
    for row, record in rows.items():
        if is_probe(row):
            rate = rates[row.split(":")[2]]
            record["gflop_per_s"] = spread([each / 1e9 for each in rate])
            continue
        apart = np.abs(record["output"] - reference)[mask_BS != 0]
        record["difference"] = float(apart.max()) / scale
        record["points"] = {name_of(point): point_facts(row, point, rows) for point in o.points}
        if own := rates.get(row.split(":")[2]):
            record["share"] = share(o, config, record, own)
    for record in rows.values():
        record.pop("output", None)


def point_facts(row: str, point: Point, rows: dict[str, dict[str, Any]]) -> dict[str, Any]:
    name = name_of(point)
    calls = [seconds for each in rows[row]["rounds"] for seconds in each[name]]
    return {
        "calls": len(calls),
        "p50_s": statistics.median(calls),
        "sequences_per_s": point[0] * len(calls) / sum(calls),
        "times": {other: ratio(rows, other, row, point) for other in (PEER, PLAIN) if other in rows},
    }


def latencies(row: dict[str, Any], point: Point) -> list[float]:
    """Return the median latency of each round."""
    return [statistics.median(each[name_of(point)]) for each in row["rounds"]]


def ratio(rows: dict[str, dict[str, Any]], slow: str, fast: str, point: Point) -> dict[str, float]:
    """Return latency of `slow` / latency of `fast`, paired within the rounds."""
    return spread(ratios(latencies(rows[slow], point), latencies(rows[fast], point)))


def matmul_rates(o: argparse.Namespace, config: Config, row: dict[str, Any]) -> list[float]:
    """Return the FLOP/s of the forward products in each round, by torch.mm or oneDNN, whichever is faster."""
    _, shapes = probe_sizes(o, config, "fp32")
    flops = sum(2 * rows * k * n * count for rows, k, n, count in shapes)
    rounds = [each[name_of(o.share_at)] for each in row["rounds"]]
    return [flops / min(each["forward_s"], each["onednn_forward_s"]) for each in rounds]


def share(
    o: argparse.Namespace, config: Config, row: dict[str, Any], rates: Sequence[float]
) -> dict[str, float]:
    """Return the share of the matmul rate at o.share_at."""
    from bert_dp import cost

    batch, length = o.share_at
    flops = batch * length * cost.flops_per_token(config.model, length, 0.0) / 3  # forward alone
    return spread(ratios([flops / seconds for seconds in latencies(row, o.share_at)], rates))


def findings(o: argparse.Namespace, rows: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Return the main comparisons at o.share_at, each with the names of its rows."""
    name = name_of(o.share_at)

    def best(pattern: str) -> str | None:
        matching = [row for row in rows if fnmatch.fnmatchcase(row, pattern)]
        return min(matching, key=lambda row: rows[row]["points"][name]["p50_s"], default=None)

    wide, narrow = best("ours:*:fp32"), best("ours:*:bf16")
    pairs = {
        "our best fp32 over onnxruntime's": (best("onnxruntime:*:fp32"), wide),
        "our best fp32 over transformers eager": (PEER, wide),
        "our best bf16 over our best fp32": (wide, narrow),
        "int8 over fp32 of onnxruntime": (PLAIN, INT8),
        "fused over plain of onnxruntime": (PLAIN, FUSED),
    }
    figures: dict[str, Any] = {
        figure: {"of": fast, "over": slow, "times": ratio(rows, slow, fast, o.share_at)}
        for figure, (slow, fast) in pairs.items()
        if slow in rows and fast in rows
    }
    for row in (wide, narrow):
        if row is not None and "share" in rows[row]:
            figures[f"share of the matmul rate, {row.split(':')[2]}"] = {
                "of": row,
                "share": rows[row]["share"],
            }
    return {"at": name, **figures}


# ---- the printed tables ----


def lines_of(o: argparse.Namespace, name: str, model: dict[str, Any]) -> Iterator[str]:
    rows = {row: r for row, r in model["rows"].items() if not is_probe(row)}
    columns = {"load_s": ".1f", "first_s": ".1f", "loaded_mib": ".0f", "peak_mib": ".0f", "difference": ".1e"}
    facts = [[row, *(f"{r[key]:{form}}" for key, form in columns.items())] for row, r in rows.items()]
    yield f"\n{name}"
    yield from aligned([["row", "load s", "first s", "loaded MiB", "peak MiB", "difference"], *facts])
    for point in o.points:
        table = [["row", "p50 ms", "sequences/s", "x transformers", "x onnxruntime", "share"]]
        for row, r in rows.items():
            figures = r["points"][name_of(point)]
            times = [
                with_range(figures["times"][other], 2) if other in figures["times"] else "-"
                for other in (PEER, PLAIN)
            ]
            own = with_range(r["share"], 2) if point == o.share_at and "share" in r else "-"
            sizes = [f"{1e3 * figures['p50_s']:.2f}", f"{figures['sequences_per_s']:.1f}"]
            table.append([row, *sizes, *times, own])
        yield f"\n{name}, batch x length {name_of(point)}"
        yield from aligned(table)
    for row, r in model["rows"].items():
        if is_probe(row):
            yield f"{row} at {name_of(o.share_at)}: {with_range(r['gflop_per_s'], 1)} GFLOP/s"
    for figure, finding in model["findings"].items():
        if figure != "at":
            value = with_range(finding.get("times") or finding["share"], 2)
            over = f" over {finding['over']}" if "over" in finding else ""
            yield f"{figure}: {value} ({finding['of']}{over})"


def main() -> None:
    o = parse()
    start = time.monotonic()
    missing = {row: reason for row in o.names if (reason := absent(row))}
    os.environ.update({**turns.KEEP, "OMP_NUM_THREADS": str(o.threads), "HF_HUB_OFFLINE": "1"})
    environment = records.environment_of(o, hidden=("names",))
    result: dict[str, Any] = {"environment": environment, "absent": missing, "models": {}}
    for name in o.models:
        model = measure(o, name, [row for row in o.names if row not in missing])
        summarise(o, config_of(name, o), model["rows"])
        model["findings"] = findings(o, model["rows"])
        result["models"][name] = model
        records.write(o.json, result)
    for name, model in result["models"].items():
        print("\n".join(lines_of(o, name, model)))
    for row, reason in missing.items():
        print(f"absent: {row}: {reason}")
    print_progress(f"{time.monotonic() - start:.0f} s in total")


if __name__ == "__main__":
    main()
