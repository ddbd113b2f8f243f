"""Speed of our tokenising stage against `tokenizers` alone: bytes of text per second and core, and the ratio.

    python benchmarks/tokenize_speed.py [--text FILE|builtin] [--repeats R] [--processes N] [--cased]

alone      encode_batch_fast on the same batches, TOKENIZERS_PARALLELISM=false, result thrown away; in one
           process, and in N independent copies at once (what N cores give when nothing is exchanged)
ours       encode_all: normalise, encode, filter, hash, make arrays, send back; 1 process, then N processes,
           `warm` = from the first batch after the processes are up, `cold` = with starting them
The repeats are interleaved; ratios are of the runs of one repeat. Reading is in neither. Prints JSON.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
os.environ["TOKENIZERS_PARALLELISM"] = "false"  # read by tokenizers at its first use

from tokenizers import Tokenizer

from benchmarks import records
from benchmarks.turns import ratios, tell
from bert_dp.config import BuildConfig
from bert_dp.data import readers, tokenizer

Batches = list[list[str]]


def alone(tokenizer_json: str, batches: Batches) -> float:
    """Seconds for `tokenizers` to encode every batch."""
    bare = Tokenizer.from_str(tokenizer_json)
    start = time.perf_counter()
    for batch in batches:
        bare.encode_batch_fast(batch, add_special_tokens=False)
    return time.perf_counter() - start


def alone_at_once(tokenizer_json: str, batches: Batches, copies: int) -> float:
    """Mean seconds of `copies` independent processes, each encoding everything."""
    barrier = multiprocessing.get_context("spawn").Manager().Barrier(copies)
    with multiprocessing.get_context("spawn").Pool(copies) as pool:
        jobs = [(tokenizer_json, batches, barrier)] * copies
        return statistics.mean(pool.starmap(_alone_together, jobs, chunksize=1))


def _alone_together(tokenizer_json: str, batches: Batches, barrier: object) -> float:
    barrier.wait()  # type: ignore[attr-defined]
    return alone(tokenizer_json, batches)


def ours(settings: tokenizer.Encoding, batches: Batches, processes: int) -> tuple[float, float]:
    """(cold, warm) seconds of the tokenising stage."""
    starts = []

    def feed() -> Iterator[tuple[int, list[str]]]:
        for _ in range(3 * processes):
            yield 0, ["start every process"]
        starts.append(time.perf_counter())
        yield from enumerate(batches)

    start = time.perf_counter()
    for _ in tokenizer.encode_all(feed(), settings, processes):
        end = time.perf_counter()
    return end - start, end - starts[0]


def spread(values: list[float]) -> dict[str, float | list[float]]:
    shown = [round(v, 4) for v in values]
    return {"median": round(statistics.median(values), 4), "min": min(shown), "max": max(shown), "all": shown}


def main() -> None:
    parser = records.make_parser(__doc__)
    parser.add_argument("--text", default="builtin", help="file, glob or `builtin`")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--vocab-size", type=int, default=32_768)
    parser.add_argument("--cased", action="store_true", help="a tokenizer without our normaliser")
    o = parser.parse_args()
    count = o.processes
    docs = [text for source in readers.resolve([o.text]) for text in readers.documents(source)]
    trained = tokenizer.train(docs, model="wordpiece", vocab_size=o.vocab_size, with_normalizer=not o.cased)
    text = trained.to_str()
    settings = tokenizer.Encoding(text, sep=5, unk=3, options=BuildConfig())
    batches = list(tokenizer.in_batches(docs))
    size = sum(len(doc.encode()) for doc in docs)

    runs: dict[str, Callable[[], tuple[float, ...]]] = {
        "alone_1": lambda: (alone(text, batches),),
        "ours_1": lambda: ours(settings, batches, 1),
        f"alone_{count}_at_once": lambda: (alone_at_once(text, batches, count) / count,),
        f"ours_{count}": lambda: ours(settings, batches, count),
    }
    seconds: dict[str, list[tuple[float, ...]]] = {name: [] for name in runs}
    for repeat in range(o.repeats):
        for name in list(runs) if repeat % 2 == 0 else list(runs)[::-1]:
            seconds[name].append(runs[name]())
            tell(f"repeat {repeat + 1} of {o.repeats}: {name} {seconds[name][-1][-1]:.2f} s")

    def ratio(name: str, reference: str, cores: int, which: int) -> dict[str, float | list[float]]:
        own_s = [cores * times[which] for times in seconds[name]]
        return spread(ratios([times[-1] for times in seconds[reference]], own_s))

    per_core = {"alone_1": 1, "ours_1": 1, f"alone_{count}_at_once": count, f"ours_{count}": count}
    record = {
        "environment": records.environment(packages=("tokenizers", "numpy"), platform=platform.platform()),
        "text": {"name": o.text, "bytes": size, "documents": len(docs), "batches": len(batches)},
        "bytes_per_s_per_core": {
            name: {
                kind: spread([size / t[i] / per_core[name] for t in times])
                for i, kind in enumerate(("cold", "warm") if name.startswith("ours") else ("warm",))
            }
            for name, times in seconds.items()
        },
        "ratio_ours_over_alone_per_core": {
            "1_process": ratio("ours_1", "alone_1", 1, -1),
            f"{count}_processes_warm": ratio(f"ours_{count}", f"alone_{count}_at_once", 1, -1),
            f"{count}_processes_cold": ratio(f"ours_{count}", f"alone_{count}_at_once", 1, 0),
            f"{count}_processes_warm_over_alone_1": ratio(f"ours_{count}", "alone_1", count, -1),
        },
        "goal": 0.80,
    }
    sys.stdout.write(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
