"""Whole training steps of ours beside other BERT implementations, and their share of the matmul rate.

    python benchmarks/step_speed.py [--variants ours:eager,...] [--cramming CHECKOUT] [--json FILE]

A step is `accumulation` micro batches (forward, backward), clipping at 0.5, AdamW, gradients freed. All get
the same tokens and masks: exactly a quarter of every sequence, 80/10/10. Dropout is 0 everywhere (in the
original by eval mode, as it pretrains). All use torch's fused AdamW with the recipe's numbers, so only the
models and the loop around them differ; ours runs by bert_dp.trainer.train_step and the `single` engine.

    ours         bert_dp.model, crammed variant       eager, regions (compile_parts), whole
    bert         transformers BertForMaskedLM         eager, whole; head over all positions, as published
    modernbert   transformers ModernBertForMaskedLM   eager, whole; sparse prediction, global attention, RoPE
    cramming     the original code of a checkout      eager, whole; sparse prediction
    matmul       no model: the products of ours       see below

`whole` is one torch.compile(model, dynamic=False) with default settings. Every variant lives in a process of
its own with the same environment (but for --allocator ours); steps run one at a time, one of each variant per
round, in an order drawn anew each round from a fixed seed. The first step (with its compilation) and --warmup
more are outside the timing; the time of the first step is shown.

On a machine shared with other work use --threads 1: then the ratios of CPU time (cpu_s) do not see the load.

Formulas
    model FLOP/token  6 N_linear + 12 L S H + 6 N_head p, forward + backward;
                      p = share of the positions that the head sees
    matmul rate       FLOPs of all linear products of one micro batch / their time (forward, gradient of the
                      input, gradient of the weight) at exactly the model's shapes, by torch.mm into given
                      outputs or by oneDNN, whichever is faster in the round; it takes its turn like a model
    share             (model FLOP/s over the whole step) / (matmul rate), paired within a round
    attention         scaled_dot_product_attention forward + backward at the model's shape, beside it;
                      its products are in the model's FLOPs, not in the matmul rate

A variant is NAME:MODE, in --precision, or NAME:MODE:PRECISION, so that one run compares precisions; the share
is of the matmul rate of the same one.

With --device cuda every variant computes on the first GPU, and a timing ends when the GPU has
finished; its peak memory is the allocator's.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import multiprocessing
import os
import random
import resource
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks import records  # noqa: E402

LR, BETAS, EPS, WEIGHT_DECAY, CLIP = 1e-3, (0.9, 0.98), 1e-12, 0.01, 0.5
MASK_RATE, MASK_ID, IGNORE = 0.25, 6, -100
MODES = {
    "ours": ("eager", "regions", "whole"),
    "bert": ("eager", "whole"),
    "modernbert": ("eager", "whole"),
    "cramming": ("eager", "whole"),
    "matmul": ("eager",),
}
PRECISIONS = ("fp32", "bf16")
DEFAULT = (
    "ours:eager,ours:regions,ours:whole,bert:eager,bert:whole,modernbert:eager,modernbert:whole,matmul:eager"
)
# else glibc gives large tensors back to the kernel when they are freed, and pays the page faults again
KEEP = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(2**36), "MALLOC_TOP_PAD_": str(2**26)}
PRODUCTS = ("forward_s", "input_gradient_s", "weight_gradient_s")  # by torch.mm
BESIDE = (  # all three again by oneDNN, its forward ones, scaled_dot_product_attention
    "onednn_s",
    "onednn_forward_s",
    "attention_s",
)
OP_GROUPS = {  # first match wins; what matches none is "compiled kernels and other"
    "matmul": ("aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm", "matmul", "mkl::", "mkldnn::"),
    "attention": ("scaled_dot_product", "_flash_attention", "aten::_softmax", "aten::_safe_softmax"),
    "norm": ("layer_norm", "rms_norm"),
    "embedding": ("aten::embedding", "index", "aten::argsort", "aten::sort", "aten::nonzero"),
    "cross entropy": ("log_softmax", "nll_loss"),
    "optimizer": ("_fused_adamw", "Optimizer."),
    "clip": ("_foreach_norm", "linalg_vector_norm", "_foreach_mul", "_foreach_div"),
    "copies, cat, fills": (
        "copy_",
        "aten::cat",
        "clone",
        "contiguous",
        "aten::fill_",
        "aten::zero",
        "aten::empty",
    ),
    "gelu and elementwise": ("gelu", "aten::mul", "aten::add", "aten::sub", "aten::div", "aten::neg"),
}


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--variants", default=DEFAULT, help="comma-separated NAME:MODE[:PRECISION] (default: %(default)s)")
    add(
        "--cramming",
        metavar="CHECKOUT",
        help="folder of the original code; adds cramming:eager, cramming:whole",
    )
    add("--layers", type=int, default=4)
    add("--hidden", type=int, default=768)
    add("--heads", type=int, default=12)
    add("--intermediate", type=int, default=1536, help="width after the gate; BERT gets twice this, ungated")
    add("--vocab", type=int, default=32_768)
    add("--sequence", type=int, default=128, help="tokens per sequence")
    add("--micro", type=int, default=8, help="sequences per micro batch")
    add("--accumulation", type=int, default=8, help="micro batches per step")
    add("--threads", type=int, default=2)
    add("--device", choices=("cpu", "cuda"), default="cpu")
    add("--precision", choices=PRECISIONS, default="fp32", help="bf16: by autocast, for all")
    add("--rounds", type=int, default=5, help="timed steps per variant")
    add("--warmup", type=int, default=1, help="untimed steps per variant, after compilation")
    add("--seed", type=int, default=0, help="of weights, tokens, masks and the order of the variants")
    add(
        "--allocator",
        choices=("system", "keep", "ours"),
        default="system",
        help="keep: glibc keeps freed memory (no page faults), for all; ours: for ours only",
    )
    add("--profile", action="store_true", help="also break one micro batch of each variant down by operation")
    add("--date", help="for the record, as YYYY-MM-DD")
    add("--json", metavar="FILE", help="write environment and raw figures here")
    add("--quick", action="store_true", help="tiny shapes, two rounds, no compilation: shows that it works")
    options = parser.parse_args(arguments)
    if options.quick:
        vars(options).update(
            layers=1,
            hidden=32,
            heads=2,
            intermediate=32,
            vocab=128,
            sequence=16,
            micro=2,
            accumulation=2,
            rounds=2,
            warmup=1,
        )
        if options.variants == DEFAULT:
            options.variants = "ours:eager,bert:eager,modernbert:eager,matmul:eager"
    names = options.variants.split(",")
    if options.cramming:
        modes = ("eager",) if options.quick else MODES["cramming"]
        names += [f"cramming:{mode}" for mode in modes if f"cramming:{mode}" not in names]
    for name in names:
        kind, mode, precision = parts_of(name, options)
        if mode not in MODES.get(kind, ()) or precision not in PRECISIONS:
            known = ", ".join(f"{k}:{m}" for k in MODES for m in MODES[k])
            parser.error(f"unknown variant {name!r}; known: {known}, each alone or with :fp32 or :bf16")
        if kind == "cramming" and not options.cramming:
            parser.error(f"{name} needs --cramming CHECKOUT")
    if options.device == "cuda":
        import torch

        if not torch.cuda.is_available():
            parser.error("--device cuda: this machine has no GPU that torch can use; leave it out")
    if not any(name.startswith("ours:") for name in names):
        parser.error("--variants must hold at least one of ours: it is what the others are compared with")
    options.names = list(dict.fromkeys(names))
    return options


def parts_of(name: str, o: argparse.Namespace) -> tuple[str, str, str]:
    """Kind, mode and precision of a variant."""
    kind, mode, precision = (*name.split(":"), "", "")[:3]
    return kind, mode, precision or o.precision


# ---- the variants; all of this runs in the child processes, which alone import torch ----


def model_config(o: argparse.Namespace) -> Any:
    from bert_dp.config import ModelConfig

    return ModelConfig(
        vocab_size=o.vocab,
        hidden_size=o.hidden,
        num_layers=o.layers,
        num_heads=o.heads,
        intermediate_size=o.intermediate,
    )


def make_micro_batches(o: argparse.Namespace, step: int) -> list[tuple[Any, Any]]:
    """ids [B, S] and labels [B, S] of one step, on the device; token frequencies fall as 1 / rank."""
    import torch

    generator = torch.Generator().manual_seed(o.seed * 1_000_003 + step)
    frequency_V = 1.0 / torch.arange(1, o.vocab + 1, dtype=torch.float64)
    frequency_V[: MASK_ID + 1] = 0.0  # special tokens
    masked = round(MASK_RATE * o.sequence)
    kept = rand = masked // 10
    out = []
    for _ in range(o.accumulation):
        shape = (o.micro, o.sequence)
        truth = torch.multinomial(frequency_V, o.micro * o.sequence, True, generator=generator).view(shape)
        chosen = torch.rand(shape, generator=generator).argsort(dim=1)[:, :masked]
        ids, labels = truth.clone(), torch.full(shape, IGNORE)
        labels.scatter_(1, chosen, truth.gather(1, chosen))
        ids.scatter_(1, chosen[:, kept + rand :], MASK_ID)
        ids.scatter_(1, chosen[:, :rand], torch.randint(o.vocab, (o.micro, rand), generator=generator))
        out.append((ids.to(o.device), labels.to(o.device)))
    return out


def make_ours(o: argparse.Namespace, mode: str) -> tuple[Callable[..., tuple[float, float]], Any]:
    import numpy as np
    import torch

    from bert_dp.building import compile_parts
    from bert_dp.config import OptimConfig, resolve
    from bert_dp.data import Batch
    from bert_dp.metrics import Timers
    from bert_dp.model import build_model
    from bert_dp.optim import make_optimizer
    from bert_dp.parallel.single import Engine
    from bert_dp.precision import choose_precision
    from bert_dp.tasks.mlm import MaskedLanguageModel
    from bert_dp.trainer import train_step
    from bert_dp.world import read_world

    device = torch.device(o.device)
    precision = choose_precision(o.precision, device)
    bare = build_model(model_config(o), o.sequence, o.seed).to(device)
    model: Any = bare
    if mode == "regions":
        compile_parts(bare)
    if mode == "whole":
        model = torch.compile(bare, dynamic=False)
    settings = OptimConfig(
        name="adamw", lr=LR, beta1=BETAS[0], beta2=BETAS[1], eps=EPS, weight_decay=WEIGHT_DECAY, clip=CLIP
    )
    run = resolve([{"data": {"sources": ["builtin"]}, "schedule": {"steps": 1}}])
    engine = Engine(run, read_world({}), device, precision=o.precision, run_dir=Path())
    model, _ = engine.prepare(model, lambda named: make_optimizer(settings, named, bare))
    timers = Timers(device)

    def step(micro_batches: list[tuple[Any, Any]]) -> tuple[float, float]:
        batches = []
        for ids_BS, labels_BS in micro_batches:
            positions_P = (labels_BS.flatten() != IGNORE).nonzero().flatten()
            labels_P = labels_BS.flatten()[positions_P]
            key_B = torch.zeros(len(ids_BS), dtype=torch.int32)
            batches.append(Batch(np.arange(len(ids_BS)), ids_BS, positions_P, labels_P, key_B, len(labels_P)))
        loss, norm = train_step(
            engine,
            model,
            MaskedLanguageModel.loss,
            batches,
            grad_accum_steps=len(batches),
            num_targets=sum(b.num_masked for b in batches),
            device=device,
            precision=precision,
            max_norm=CLIP,
            timers=timers,
            progress=lambda: None,
        )
        return loss.item(), norm.item()

    return step, bare


def make_peer(o: argparse.Namespace, kind: str, mode: str) -> tuple[Callable[..., tuple[float, float]], Any]:
    import torch

    torch.manual_seed(o.seed)
    bare: torch.nn.Module = {"bert": make_bert, "modernbert": make_modernbert, "cramming": make_cramming}[
        kind
    ](o).to(o.device)
    if kind == "cramming":
        bare.eval()  # as it pretrains: dropout off
    model = torch.compile(bare, dynamic=False) if mode == "whole" else bare
    groups: dict[bool, list[torch.nn.Parameter]] = {True: [], False: []}
    for p in bare.parameters():
        groups[p.dim() >= 2].append(p)
    decayed: dict[str, Any] = {"params": groups[True]}
    optimizer = torch.optim.AdamW(
        [decayed, {"params": groups[False], "weight_decay": 0.0}],
        lr=LR,
        betas=BETAS,
        eps=EPS,
        weight_decay=WEIGHT_DECAY,
        fused=True,
    )

    def step(micro_batches: list[tuple[Any, Any]]) -> tuple[float, float]:
        total = torch.zeros((), device=o.device)
        for ids_BS, labels_BS in micro_batches:
            with torch.autocast(o.device, torch.bfloat16, enabled=o.precision == "bf16"):
                loss = model(input_ids=ids_BS, labels=labels_BS)["loss"] / len(micro_batches)
            loss.backward()
            total += loss.detach()
        norm = torch.nn.utils.clip_grad_norm_(bare.parameters(), CLIP, foreach=True)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return total.item(), norm.item()

    return step, bare


def make_bert(o: argparse.Namespace) -> Any:
    from transformers import BertConfig, BertForMaskedLM

    return BertForMaskedLM(
        BertConfig(
            vocab_size=o.vocab,
            hidden_size=o.hidden,
            num_hidden_layers=o.layers,
            num_attention_heads=o.heads,
            intermediate_size=2 * o.intermediate,
            max_position_embeddings=o.sequence,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
        )
    )


def make_modernbert(o: argparse.Namespace) -> Any:
    """What a model of ours in ModernBERT's shape is exported to, at these sizes."""
    from bert_dp.config import find_config, read_yaml, resolve
    from bert_dp.corpus.tokenizer import ROLES, SPECIALS
    from bert_dp.export.hf import new_model, settings_of

    sizes = {
        "vocab_size": o.vocab,
        "hidden_size": o.hidden,
        "num_layers": o.layers,
        "num_heads": o.heads,
        "intermediate_size": o.intermediate,
    }
    run = resolve(
        [read_yaml(find_config("crammed-rope")), {"model": sizes, "data": {"sequence_length": o.sequence}}]
    )
    special = {role: SPECIALS.index(f"<{role}>") for role in ROLES}
    return new_model(settings_of(run, special, "mlm"), sparse_prediction=True)


def make_cramming(o: argparse.Namespace) -> Any:
    import transformers.utils.generic

    # removed from transformers 5
    setattr(transformers.utils.generic, "working_or_temp_dir", contextlib.nullcontext)  # noqa: B010
    sys.path.insert(0, o.cramming)
    from cramming.architectures.crammed_bert import construct_crammed_bert
    from omegaconf import OmegaConf

    arch = OmegaConf.load(Path(o.cramming) / "cramming/config/arch/crammed-bert.yaml")
    arch.sparse_prediction = MASK_RATE
    arch.num_transformer_layers, arch.hidden_size, arch.intermed_size = o.layers, o.hidden, 2 * o.intermediate
    arch.attention.num_attention_heads = o.heads
    arch.embedding.embedding_dim, arch.embedding.max_seq_length = o.hidden, o.sequence
    arch.classification_head.classifier_dropout = 0.1
    arch.norm_eps = float(arch.norm_eps)
    return construct_crammed_bert(arch, vocab_size=o.vocab)


def linear_shapes(o: argparse.Namespace) -> list[tuple[int, int, int, int]]:
    """Of ours, per micro batch: rows, inputs, outputs, how many."""
    rows, predicted = o.micro * o.sequence, o.micro * round(MASK_RATE * o.sequence)
    h, i, layers = o.hidden, o.intermediate, o.layers
    blocks = [(rows, h, 3 * h, layers), (rows, h, h, layers), (rows, h, 2 * i, layers), (rows, i, h, layers)]
    return [*blocks, (predicted, h, o.vocab, 1)]


def make_matmul(
    o: argparse.Namespace, shapes: Sequence[tuple[int, int, int, int]]
) -> Callable[[], dict[str, float]]:
    """Times one micro batch's products, each shape (as `linear_shapes` gives them) as often as it says."""
    import torch
    import torch.nn.functional as F

    work = []
    normal = functools.partial(
        torch.randn, device=o.device, dtype=torch.bfloat16 if o.precision == "bf16" else torch.float32
    )
    for rows, inputs, outputs, count in shapes:
        x, w, g = normal(rows, inputs), 0.02 * normal(outputs, inputs), normal(rows, outputs)
        work.append((count, x, w, g, torch.empty_like(g), torch.empty_like(x), torch.empty_like(w)))
    shape = (o.micro, o.heads, o.sequence, o.hidden // o.heads)
    q, k, v = (normal(shape, requires_grad=True) for _ in range(3))
    up = normal(shape)

    def measure() -> dict[str, float]:
        seconds = dict.fromkeys((*PRODUCTS, *BESIDE), 0.0)
        for count, x, w, g, y, gx, gw in work:
            products = {
                "forward_s": lambda x=x, w=w, y=y: torch.mm(x, w.t(), out=y),
                "input_gradient_s": lambda g=g, w=w, gx=gx: torch.mm(g, w, out=gx),
                "weight_gradient_s": lambda g=g, x=x, gw=gw: torch.mm(g.t(), x, out=gw),
            }
            for name, product in products.items():
                start = now(o)
                for _ in range(count):
                    product()
                seconds[name] += now(o) - start
            for a, b in ((x, w), (g, w.t()), (g.t(), x.t())) if o.device == "cpu" else ():
                start = now(o)
                for _ in range(count):
                    torch.ops.mkldnn._linear_pointwise(a, b, None, "none", [], "")
                spent = now(o) - start
                seconds["onednn_s"] += spent
                seconds["onednn_forward_s"] += spent if a is x else 0.0
        start = now(o)
        for _ in range(o.layers):
            torch.autograd.grad(F.scaled_dot_product_attention(q, k, v), (q, k, v), up)
        seconds["attention_s"] = now(o) - start
        return seconds

    return measure


def flops_per_token(o: argparse.Namespace, kind: str) -> float:
    from bert_dp import cost

    config = model_config(o)
    if kind == "modernbert":
        config = config.model_copy(update={"head": "dense"})
    if kind == "bert":
        wider = {"head": "dense", "mlp": "gelu", "intermediate_size": 2 * o.intermediate}
        config = config.model_copy(update=wider)
        return cost.flops_per_token(config, o.sequence, 1.0)
    return cost.flops_per_token(config, o.sequence, MASK_RATE)


def breakdown(step: Callable[..., Any], micro_batches: list[Any]) -> dict[str, float]:
    """Self CPU seconds of one step by group of operations."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        step(micro_batches)
    seconds = dict.fromkeys([*OP_GROUPS, "compiled kernels and other"], 0.0)
    for event in profiler.key_averages():
        matches = (g for g, parts in OP_GROUPS.items() if any(part in event.key for part in parts))
        seconds[next(matches, "compiled kernels and other")] += event.self_cpu_time_total / 1e6
    return seconds


def now(o: argparse.Namespace) -> float:
    """Seconds, once the device has done what it was asked."""
    import torch

    if o.device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def peak_memory_gib(o: argparse.Namespace) -> float:
    import torch

    if o.device == "cuda":
        return torch.cuda.max_memory_reserved() / 2**30
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


def child(name: str, o: argparse.Namespace, pipe: Connection) -> None:
    """Answers `step I`, `profile I` until `quit`."""
    warnings.simplefilter("ignore")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    try:
        import torch

        torch.set_num_threads(o.threads)
        kind, mode, o.precision = parts_of(name, o)
        if o.precision == "bf16":
            torch.set_float32_matmul_precision("high")  # what autocast leaves in fp32
        start = time.perf_counter()
        if kind == "matmul":
            measure = make_matmul(o, linear_shapes(o))
            measure()
            facts = {"flops_per_token": 0.0, "parameters": 0, "first_step_s": time.perf_counter() - start}
        else:
            step, bare = make_ours(o, mode) if kind == "ours" else make_peer(o, kind, mode)
            facts = {
                "flops_per_token": flops_per_token(o, kind),
                "parameters": sum(p.numel() for p in bare.parameters()),
            }
            start = time.perf_counter()
            facts["first_loss"], _ = step(make_micro_batches(o, 0))
            facts["first_step_s"] = time.perf_counter() - start
        pipe.send(facts)
        while (command := pipe.recv())[0] != "quit":
            if kind == "matmul":
                pipe.send(measure())
                continue
            micro_batches = make_micro_batches(o, command[1])
            if command[0] == "profile":
                pipe.send(breakdown(step, micro_batches))
                continue
            before, start = resource.getrusage(resource.RUSAGE_SELF), now(o)
            loss, norm = step(micro_batches)
            seconds = now(o) - start
            after = resource.getrusage(resource.RUSAGE_SELF)
            pipe.send(
                {
                    "step_time_s": seconds,
                    "loss": loss,
                    "grad_norm": norm,
                    "system_s": after.ru_stime - before.ru_stime,
                    "cpu_s": after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime,
                    "page_faults": after.ru_minflt - before.ru_minflt,
                    "peak_memory_gib": peak_memory_gib(o),
                }
            )
    except Exception as error:
        pipe.send({"error": f"{type(error).__name__}: {error}"[:2000]})


# ---- the parent: starts, takes turns, computes ----


def ask(name: str, pipe: Connection, command: tuple[Any, ...] | None) -> dict[str, Any]:
    if command is not None:
        pipe.send(command)
    answer = pipe.recv()
    if "error" in answer:
        raise RuntimeError(f"{name}: {answer['error']}")
    return answer


@contextlib.contextmanager
def variables(extra: dict[str, str]) -> Iterator[None]:
    """Environment of a child; its libc reads it when it starts."""
    before = dict(os.environ)
    os.environ.update(extra)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def measure_all(
    o: argparse.Namespace, run: Callable[[str, argparse.Namespace, Connection], None] = child
) -> dict[str, dict[str, Any]]:
    """Per variant: facts and the list of its rounds. `run` is a variant's process: it tells its facts, then
    answers as `child` does."""
    context = multiprocessing.get_context("spawn")
    pipes, records, processes = {}, {}, []
    try:
        for name in o.names:  # one at a time: compile times are not to disturb each other
            pipes[name], theirs = context.Pipe()
            process = context.Process(target=run, args=(name, o, theirs), daemon=False)
            with variables(KEEP if o.allocator in ("keep", name.partition(":")[0]) else {}):
                process.start()
            processes.append(process)
            theirs.close()
            records[name] = {**ask(name, pipes[name], None), "rounds": []}
            print(
                f"{name}: ready, first step {records[name]['first_step_s']:.1f} s",
                file=sys.stderr,
                flush=True,
            )
        order, rng = list(o.names), random.Random(o.seed)
        for turn in range(o.warmup + o.rounds):
            rng.shuffle(order)
            for name in order:
                answer = ask(name, pipes[name], ("step", turn + 1))
                if turn >= o.warmup:
                    records[name]["rounds"].append(answer)
            print(f"round {turn + 1} of {o.warmup + o.rounds}", file=sys.stderr, flush=True)
        if o.profile:
            for name in (name for name in o.names if not name.startswith("matmul")):
                records[name]["self_cpu_s"] = ask(name, pipes[name], ("profile", 1))
        for name in o.names:
            pipes[name].send(("quit",))
    finally:
        for process in processes:
            process.join(timeout=10 if len(records) == len(o.names) else 0)
            if process.is_alive():
                process.terminate()
    return records


def spread(values: list[float]) -> dict[str, float]:
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


def summarise(o: argparse.Namespace, records: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Adds to each variant its tokens/s, its ratios and its share; all pairs are of one round."""
    tokens = o.micro * o.sequence * o.accumulation
    gemm_flops = sum(6 * rows * k * n * count for rows, k, n, count in linear_shapes(o))
    rates: dict[str, list[float]] = {}  # by precision
    for matmul_name in (name for name in records if name.startswith("matmul")):
        matmul = records[matmul_name]
        products = [sum(r[k] for k in PRODUCTS) for r in matmul["rounds"]]
        if o.device == "cpu":
            products = [min(a, r["onednn_s"]) for a, r in zip(products, matmul["rounds"], strict=True)]
        rates[parts_of(matmul_name, o)[2]] = found = [gemm_flops / seconds for seconds in products]
        matmul["gflop_per_s"] = spread([rate / 1e9 for rate in found])
        for part in matmul["rounds"][0]:
            matmul[part] = spread([r[part] for r in matmul["rounds"]])
    models = {name: r for name, r in records.items() if not name.startswith("matmul")}
    ours = [name for name in models if name.startswith("ours:")]
    for name, record in models.items():
        seconds = [r["step_time_s"] for r in record["rounds"]]
        record["tokens_per_s"] = spread([tokens / s for s in seconds])
        record["gflop_per_s"] = spread([tokens * record["flops_per_token"] / s / 1e9 for s in seconds])
        if own_rates := rates.get(parts_of(name, o)[2]):
            pairs = zip(seconds, own_rates, strict=True)
            record["share"] = spread([tokens * record["flops_per_token"] / s / rate for s, rate in pairs])
        record["ours_over_this"] = {
            own: spread([s / r["step_time_s"] for s, r in zip(seconds, models[own]["rounds"], strict=True)])
            for own in ours
        }
        cpu = [r["cpu_s"] for r in record["rounds"]]
        record["ours_over_this_cpu"] = {
            own: spread([s / r["cpu_s"] for s, r in zip(cpu, models[own]["rounds"], strict=True)])
            for own in ours
        }
    return records


def gpu_name(o: argparse.Namespace) -> str | None:
    import torch

    return torch.cuda.get_device_name() if o.device == "cuda" else None


def environment(
    o: argparse.Namespace, packages: Sequence[str] = ("torch", "transformers", "numpy")
) -> dict[str, Any]:
    """Of the record."""
    tuned = ("MALLOC_", "GLIBC_", "THP_", "OMP_", "MKL_", "KMP_", "LD_PRELOAD", "TORCHINDUCTOR_")
    return records.environment(
        o.date,
        packages,
        gpu=gpu_name(o),
        variables={k: v for k, v in os.environ.items() if k.startswith(tuned)},
        settings={k: v for k, v in vars(o).items() if k not in ("json", "cramming", "date", "names")},
    )


def with_range(values: dict[str, float], digits: int) -> str:
    return "{median:.{d}f} ({min:.{d}f}-{max:.{d}f})".format(**values, d=digits)


def show(o: argparse.Namespace, records: dict[str, dict[str, Any]]) -> None:
    models = [name for name in records if not name.startswith("matmul")]
    ours = [name for name in models if name.startswith("ours:")]
    ratios = "ours_over_this_cpu" if o.threads == 1 else "ours_over_this"
    head = ["variant", "tokens/s", "GFLOP/s", "share", "loss", "faults/step", "peak GiB", "first step"]
    rows = [head + [f"x {name}" for name in ours]]
    for name in models:
        r = records[name]
        last = r["rounds"][-1]
        rows.append(
            [
                name,
                with_range(r["tokens_per_s"], 0),
                f"{r['gflop_per_s']['median']:.1f}",
                with_range(r["share"], 2) if "share" in r else "-",
                f"{r['first_loss']:.3f} -> {last['loss']:.3f}",
                str(last["page_faults"]),
                f"{last['peak_memory_gib']:.2f}",
                f"{r['first_step_s']:.0f} s",
                *(with_range(ratio, 3) for ratio in r[ratios].values()),
            ]
        )
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    for row in rows:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
    of = "CPU time" if o.threads == 1 else "wall time"
    print(f"x ours:MODE = {of} of the row / {of} of ours in that mode; median of the rounds (min-max)")
    for name in (name for name in records if name.startswith("matmul")):
        m = records[name]
        parts = ", ".join(f"{k[:-2]} {1e3 * m[k]['median']:.0f} ms" for k in (*PRODUCTS, *BESIDE))
        print(f"{name}: {with_range(m['gflop_per_s'], 1)} GFLOP/s; one micro batch: {parts}")
    for name in models:
        seconds = records[name].get("self_cpu_s")
        if seconds:
            total = sum(seconds.values())
            shares = sorted(seconds.items(), key=lambda item: -item[1])
            print(
                f"{name}: self CPU {total:.2f} s per step: "
                + ", ".join(f"{k} {100 * v / total:.1f} %" for k, v in shares)
            )


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    o = parse(arguments)
    where = environment(o)
    variants = summarise(o, measure_all(o))
    show(o, variants)
    result = {"environment": where, "variants": variants}
    if o.json:
        Path(o.json).write_text(json.dumps(result, indent=1) + "\n")
    return result


if __name__ == "__main__":
    main()
