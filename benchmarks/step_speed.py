"""Compare whole training steps of bert-dp and other BERTs, also as a share of the matmul rate.

    python benchmarks/step_speed.py [--variants ours:eager,...] [--cramming CHECKOUT] [--json FILE]

A step is `accumulation` micro batches (forward, backward), clipping at 0.5, AdamW, and freeing the gradients.
All variants get the same tokens and masks: exactly a quarter of each sequence, of which 26/32 are replaced by
the mask, 3/32 by a random token, and 3/32 kept. Dropout is 0 (cramming pretrains in eval mode). All variants
use torch's fused AdamW with the recipe's settings, so only the models and the loop around them differ. `ours`
uses bert_dp.training.loop.train_step and the `single` engine.

    ours         bert_dp.model.bert, crammed variant       eager, regions (compile_parts), whole,
                                                           narrow (regions, residual stream in bf16)
    bert         transformers BertForMaskedLM         eager, whole; head over all positions, as published
    modernbert   transformers ModernBertForMaskedLM   eager, whole; sparse prediction, global attention, RoPE
    cramming     the original code in a checkout      eager, whole; sparse prediction
    matmul       no model: the matrix products of `ours`   see below

`whole` is one torch.compile(model, dynamic=False) with default settings. Each variant runs in a separate
process with the same environment, in which glibc keeps freed memory. Steps run one at a time: in each round,
one per variant, in a new random order (fixed seed). The first step, which includes compilation,
and --warmup further steps are not part of the timing; the time of the first step is shown.

On a machine with other load, use --threads 1: ratios of CPU time (cpu_s) are then printed, which load does
not affect.

Formulas
    model FLOP/token  6 N_linear + 12 L S H + 6 N_head p, forward + backward;
                      p = share of the positions that the head computes
    matmul rate       FLOPs of all linear products of one micro batch / their time (forward, gradient of the
                      input, gradient of the weight) at the model's shapes, by torch.mm with preallocated
                      outputs or by oneDNN, whichever is faster in the round; measured in each round
    share             (model FLOP/s over the whole step) / (matmul rate), paired within a round
    attention         scaled_dot_product_attention forward + backward at the model's shape, for comparison;
                      its products are part of the model's FLOPs, but not of the matmul rate

A variant is NAME:MODE, in --precision, or NAME:MODE:PRECISION, so that one run can compare precisions. The
share refers to the matmul rate in the same precision.

With --device cuda, every variant runs on the first GPU, a time includes all work of the GPU, and the peak
memory is that of torch's allocator.
"""

import argparse
import contextlib
import functools
import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks import records, turns
from benchmarks.turns import aligned, print_progress, ratios, spread, with_range

LR, BETAS, EPS, WEIGHT_DECAY, CLIP = 1e-3, (0.9, 0.98), 1e-12, 0.01, 0.5
MASK_RATE, MASK_ID, IGNORE = 0.25, 6, -100
MODES = {
    "ours": ("eager", "regions", "whole", "narrow"),
    "bert": ("eager", "whole"),
    "modernbert": ("eager", "whole"),
    "cramming": ("eager", "whole"),
    "matmul": ("eager",),
}
PRECISIONS = ("fp32", "bf16")
DEFAULT = (
    "ours:eager,ours:regions,ours:whole,bert:eager,bert:whole,modernbert:eager,modernbert:whole,matmul:eager"
)
QUICK = {
    "layers": 1,
    "hidden": 32,
    "heads": 2,
    "intermediate": 32,
    "vocab": 128,
    "sequence": 16,
    "micro": 2,
    "accumulation": 2,
    "rounds": 2,
}
QUICK_VARIANTS = "ours:eager,bert:eager,modernbert:eager,matmul:eager"
PRODUCTS = ("forward_s", "input_gradient_s", "weight_gradient_s")  # times by torch.mm
OTHER_TIMES = (  # all three products by oneDNN, only its forward products, scaled_dot_product_attention
    "onednn_s",
    "onednn_forward_s",
    "attention_s",
)


def parse() -> argparse.Namespace:
    parser = records.make_parser(__doc__, "--date", "--json")
    add = parser.add_argument
    add("--variants", default=DEFAULT, help="comma-separated NAME:MODE[:PRECISION] (default: %(default)s)")
    add("--cramming", metavar="CHECKOUT", help="directory of the original code; adds its variants")
    add("--layers", type=int, default=4)
    add("--hidden", type=int, default=768)
    add("--heads", type=int, default=12)
    add("--intermediate", type=int, default=1536, help="width after the gate; BERT has twice this width")
    add("--vocab", type=int, default=32_768)
    add("--sequence", type=int, default=128, help="tokens per sequence")
    add("--micro", type=int, default=8, help="sequences per micro batch")
    add("--accumulation", type=int, default=8, help="micro batches per step")
    add("--threads", type=int, default=2)
    add("--device", choices=("cpu", "cuda"), default="cpu")
    add("--precision", choices=PRECISIONS, default="fp32", help="bf16 uses autocast")
    add("--rounds", type=int, default=5, help="timed steps per variant")
    add("--warmup", type=int, default=1, help="untimed steps per variant after the first")
    add("--seed", type=int, default=0, help="seed of weights, tokens, masks and the order of the variants")
    add("--quick", action="store_true", help="a test of the script: tiny shapes, two rounds, no compilation")
    o = parser.parse_args()
    if o.quick:
        vars(o).update(QUICK)
        if o.variants == DEFAULT:
            o.variants = QUICK_VARIANTS
    names = o.variants.split(",")
    if o.cramming:
        names += [f"cramming:{mode}" for mode in (("eager",) if o.quick else MODES["cramming"])]
    for name in names:
        kind, mode, precision = parts_of(name, o)
        if mode not in MODES.get(kind, ()) or precision not in PRECISIONS:
            variants = ", ".join(f"{k}:{m}" for k in MODES for m in MODES[k])
            parser.error(f"unknown variant {name!r}; known: {variants}, optionally with :fp32 or :bf16")
        if kind == "cramming" and not o.cramming:
            parser.error(f"{name} needs --cramming CHECKOUT")
    if o.device == "cuda":
        import torch

        if not torch.cuda.is_available():
            parser.error("--device cuda: torch finds no usable GPU; omit --device")
    if not any(name.startswith("ours:") for name in names):
        parser.error("--variants must include a variant of ours, because the others are compared with it")
    o.names = list(dict.fromkeys(names))
    return o


def parts_of(name: str, o: argparse.Namespace) -> tuple[str, str, str]:
    kind, mode, precision = (*name.split(":"), "", "")[:3]
    return kind, mode, precision or o.precision


# ---- the variants; this code runs in the child processes, because only they import torch ----


def sizes_of(o: argparse.Namespace) -> dict[str, int]:
    """Return the sizes of the model in bert-dp's settings."""
    return {
        "vocab_size": o.vocab,
        "hidden_size": o.hidden,
        "num_layers": o.layers,
        "num_heads": o.heads,
        "intermediate_size": o.intermediate,
    }


def model_config(o: argparse.Namespace) -> Any:
    from bert_dp.config import ModelConfig

    return ModelConfig.model_validate(sizes_of(o))


def make_micro_batches(o: argparse.Namespace, step: int) -> list[tuple[Any, Any]]:
    """Return (ids, labels), each [B, S] on the device, per micro batch. The probability of token n is
    proportional to 1 / n."""
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

    from bert_dp.config import OptimConfig, resolve
    from bert_dp.data.stream import MlmBatch
    from bert_dp.model.bert import build_model
    from bert_dp.model.load import compile_parts
    from bert_dp.optim import make_optimizer
    from bert_dp.parallel.single import SingleEngine
    from bert_dp.tasks.mlm import MaskedLanguageModel
    from bert_dp.training.devices import choose_precision
    from bert_dp.training.loop import train_step
    from bert_dp.training.metrics import Timers
    from bert_dp.training.process import read_world

    device = torch.device(o.device)
    precision = choose_precision(o.precision, device)
    config = model_config(o).model_copy(update={"residual_dtype": "bf16" if mode == "narrow" else "full"})
    bare = build_model(config, o.sequence, o.seed).to(device)
    model: Any = bare
    if mode in ("regions", "narrow"):
        compile_parts(bare, o.sequence)
    if mode == "whole":
        model = torch.compile(bare, dynamic=False)
    settings = OptimConfig(
        name="adamw", lr=LR, beta1=BETAS[0], beta2=BETAS[1], eps=EPS, weight_decay=WEIGHT_DECAY, clip=CLIP
    )
    run = resolve([{"data": {"sources": ["builtin"]}, "schedule": {"steps": 1}}])
    engine = SingleEngine(run, read_world({}), device, precision=o.precision, run_dir=Path())
    model, _ = engine.prepare(model, lambda named: make_optimizer(settings, named, bare))
    trainer: Any = SimpleNamespace(
        engine=engine,
        model=model,
        task=MaskedLanguageModel,
        device=device,
        precision=precision,
        config=SimpleNamespace(optim=settings),
        heartbeat=SimpleNamespace(progress=lambda: None),
    )
    timers = Timers(device)

    def step(micro_batches: list[tuple[Any, Any]]) -> tuple[float, float]:
        batches = []
        for ids_BS, labels_BS in micro_batches:
            positions_P = (labels_BS.flatten() != IGNORE).nonzero().flatten()
            labels_P = labels_BS.flatten()[positions_P]
            seed_B = torch.zeros(len(ids_BS), dtype=torch.int32)
            batches.append(
                MlmBatch(np.arange(len(ids_BS)), ids_BS, positions_P, labels_P, seed_B, len(labels_P))
            )
        num_targets = sum(b.num_masked for b in batches)
        loss, norm = train_step(
            trainer, batches, grad_accum_steps=len(batches), num_targets=num_targets, timers=timers
        )
        return loss.item(), norm.item()

    return step, bare


def make_peer(o: argparse.Namespace, kind: str, mode: str) -> tuple[Callable[..., tuple[float, float]], Any]:
    import torch

    torch.manual_seed(o.seed)
    makers = {"bert": make_bert, "modernbert": make_modernbert, "cramming": make_cramming}
    bare: torch.nn.Module = makers[kind](o).to(o.device)
    if kind == "cramming":
        bare.eval()  # without dropout, as in cramming's pretraining
    model = torch.compile(bare, dynamic=False) if mode == "whole" else bare
    decayed: dict[str, Any] = {"params": [p for p in bare.parameters() if p.dim() >= 2]}
    others = {"params": [p for p in bare.parameters() if p.dim() < 2], "weight_decay": 0.0}
    optimizer = torch.optim.AdamW(
        [decayed, others], lr=LR, betas=BETAS, eps=EPS, weight_decay=WEIGHT_DECAY, fused=True
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
    """Create the model to which bert-dp exports its ModernBERT variant, at these sizes."""
    import transformers

    from bert_dp.config import find_config, read_yaml, resolve
    from bert_dp.data.tokenizer import ROLES, SPECIALS
    from bert_dp.exporting.hf import settings_of

    changes = {"model": sizes_of(o), "data": {"sequence_length": o.sequence}}
    run = resolve([read_yaml(find_config("crammed-rope")), changes])
    special = {role: SPECIALS.index(f"<{role}>") for role in ROLES}
    settings = {**settings_of(run, special, "mlm"), "sparse_prediction": True}
    del settings["architectures"], settings["dtype"]
    return transformers.AutoModelForMaskedLM.from_config(transformers.AutoConfig.for_model(**settings))


def make_cramming(o: argparse.Namespace) -> Any:
    import transformers.utils.generic

    # cramming imports a function that transformers 5 no longer has
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
    """Return the linear products of `ours` in one micro batch: (rows, inputs, outputs, count)."""
    rows, predicted = o.micro * o.sequence, o.micro * round(MASK_RATE * o.sequence)
    h, i, layers = o.hidden, o.intermediate, o.layers
    blocks = [(rows, h, 3 * h, layers), (rows, h, h, layers), (rows, h, 2 * i, layers), (rows, i, h, layers)]
    return [*blocks, (predicted, h, o.vocab, 1)]


def make_matmul(
    o: argparse.Namespace, shapes: Sequence[tuple[int, int, int, int]]
) -> Callable[[], dict[str, float]]:
    """Return a function that times the products of one micro batch. `shapes`: see `linear_shapes`."""
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
        seconds = dict.fromkeys((*PRODUCTS, *OTHER_TIMES), 0.0)
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


def now(o: argparse.Namespace) -> float:
    """Wait until the device has finished its work, and return the time in seconds."""
    import torch

    from bert_dp.training.devices import synchronize

    synchronize(torch.device(o.device))
    return time.perf_counter()


def prepare(name: str, o: argparse.Namespace) -> turns.Prepared:
    """Create a variant and run its first step. A measurement runs the step of a given number."""
    import torch

    torch.set_num_threads(o.threads)
    kind, mode, o.precision = parts_of(name, o)
    if o.precision == "bf16":
        torch.set_float32_matmul_precision("high")  # for the products that autocast leaves in fp32
    if kind == "matmul":
        measure = make_matmul(o, linear_shapes(o))
        start = time.perf_counter()
        measure()
        return {"first_step_s": time.perf_counter() - start}, lambda _: measure()
    step, bare = make_ours(o, mode) if kind == "ours" else make_peer(o, kind, mode)
    start = time.perf_counter()
    first_loss, _ = step(make_micro_batches(o, 0))
    facts = {
        "flops_per_token": flops_per_token(o, kind),
        "parameters": sum(p.numel() for p in bare.parameters()),
        "first_loss": first_loss,
        "first_step_s": time.perf_counter() - start,
    }
    return facts, lambda number: timed(o, step, make_micro_batches(o, number))


def timed(o: argparse.Namespace, step: Callable[..., Any], micro_batches: list[Any]) -> dict[str, float]:
    """Run one step and return its times, loss, gradient norm and peak memory."""
    import torch

    from bert_dp.training.devices import peak_memory_gib

    before, start = time.process_time(), now(o)
    loss, norm = step(micro_batches)
    seconds = now(o) - start
    return {
        "step_time_s": seconds,
        "loss": loss,
        "grad_norm": norm,
        "cpu_s": time.process_time() - before,
        "peak_memory_gib": peak_memory_gib(torch.device(o.device)),
    }


# ---- the parent process ----


def measure_all(o: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """Measure the variants alternately. Return metadata and rounds of each."""
    variants: dict[str, dict[str, Any]] = {}
    processes = {}
    with contextlib.ExitStack() as stack:
        for name in o.names:  # one at a time, because compilations would disturb each other
            processes[name] = stack.enter_context(turns.Child(name, prepare, name, o))
            variants[name] = {**processes[name].facts, "rounds": []}
            print_progress(f"{name}: ready, first step {variants[name]['first_step_s']:.1f} s")
        rounds = o.warmup + o.rounds
        for number, order in enumerate(turns.orders(o.names, rounds, o.seed), 1):
            for name in order:
                measured = processes[name].measure(number)
                if number > o.warmup:
                    variants[name]["rounds"].append(measured)
            print_progress(f"round {number} of {rounds}")
    return variants


def models_of(variants: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return the variants that are models, without the matrix products."""
    return {name: variant for name, variant in variants.items() if not name.startswith("matmul")}


def summarise(o: argparse.Namespace, variants: dict[str, dict[str, Any]]) -> None:
    """Add tokens/s, ratios and share to each variant. Ratios are paired within a round."""
    tokens = o.micro * o.sequence * o.accumulation
    gemm_flops = sum(6 * rows * k * n * count for rows, k, n, count in linear_shapes(o))
    rates: dict[str, list[float]] = {}  # precision -> matmul rate in each round
    models = models_of(variants)
    for name in (name for name in variants if name not in models):
        matmul = variants[name]
        products = [sum(r[k] for k in PRODUCTS) for r in matmul["rounds"]]
        if o.device == "cpu":
            products = [min(a, r["onednn_s"]) for a, r in zip(products, matmul["rounds"], strict=True)]
        rates[parts_of(name, o)[2]] = [gemm_flops / seconds for seconds in products]
        matmul["gflop_per_s"] = spread([gemm_flops / seconds / 1e9 for seconds in products])
        for part in matmul["rounds"][0]:
            matmul[part] = spread([r[part] for r in matmul["rounds"]])
    ours = [name for name in models if name.startswith("ours:")]

    def seconds_of(name: str, key: str) -> list[float]:
        return [r[key] for r in models[name]["rounds"]]

    for name, model in models.items():
        seconds = seconds_of(name, "step_time_s")
        flop_rates = [tokens * model["flops_per_token"] / s for s in seconds]
        model["tokens_per_s"] = spread([tokens / s for s in seconds])
        model["gflop_per_s"] = spread([rate / 1e9 for rate in flop_rates])
        if matmul_rates := rates.get(parts_of(name, o)[2]):
            model["share"] = spread(ratios(flop_rates, matmul_rates))
        for figure, key in (("ours_over_this", "step_time_s"), ("ours_over_this_cpu", "cpu_s")):
            model[figure] = {own: spread(ratios(seconds_of(name, key), seconds_of(own, key))) for own in ours}


def show(o: argparse.Namespace, variants: dict[str, dict[str, Any]]) -> None:
    models = models_of(variants)
    ours = [name for name in models if name.startswith("ours:")]
    figure = "ours_over_this_cpu" if o.threads == 1 else "ours_over_this"
    head = ["variant", "tokens/s", "GFLOP/s", "share", "loss", "peak GiB", "first step"]
    rows = [head + [f"x {name}" for name in ours]]
    for name, r in models.items():
        last = r["rounds"][-1]
        rows.append(
            [
                name,
                with_range(r["tokens_per_s"], 0),
                f"{r['gflop_per_s']['median']:.1f}",
                with_range(r["share"], 2) if "share" in r else "-",
                f"{r['first_loss']:.3f} -> {last['loss']:.3f}",
                f"{last['peak_memory_gib']:.2f}",
                f"{r['first_step_s']:.0f} s",
                *(with_range(ratio, 3) for ratio in r[figure].values()),
            ]
        )
    print("\n".join(aligned(rows)))
    of = "CPU time" if o.threads == 1 else "wall time"
    print(f"x ours:MODE = {of} of the row / {of} of ours:MODE; median of the rounds (min-max)")
    for name in (name for name in variants if name not in models):
        m = variants[name]
        parts = ", ".join(f"{k[:-2]} {1e3 * m[k]['median']:.0f} ms" for k in (*PRODUCTS, *OTHER_TIMES))
        print(f"{name}: {with_range(m['gflop_per_s'], 1)} GFLOP/s; one micro batch: {parts}")


def main() -> None:
    o = parse()
    os.environ.update(turns.KEEP)
    environment = records.environment_of(o, hidden=("cramming", "names"))
    variants = measure_all(o)
    summarise(o, variants)
    show(o, variants)
    records.write(o.json, {"environment": environment, "variants": variants})


if __name__ == "__main__":
    main()
