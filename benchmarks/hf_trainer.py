"""Compare pretraining for equal time: `bert-dp train` and Hugging Face's Trainer, used as in run_mlm.py.

    python benchmarks/hf_trainer.py OUT [--config small-text] [--set a.b=v ...] [--minutes 10] [--ranks 2]
        [--variants ours,bert,modernbert] [--precision fp32] [--json FILE]

    ours        `bert-dp train`
    bert        transformers BertForMaskedLM of the same width, depth and feed-forward size
    modernbert  transformers ModernBertForMaskedLM of the same sizes, global attention

The variants run one after the other, each on all ranks, on the same shards of `bert-dp data build`. They have
the same sequences, tokenizer and held-out text. The transformers models use DataCollatorForLanguageModeling
at its default mask rate and run_mlm's linear schedule, with 10 % warmup and the peak learning rate and
batches of bert-dp; a short run determines how many steps fit the time. Evaluations are not timed. The
held-out loss of every variant is measured on the same sequences, of which 15 % are masked at the same
positions (bert_dp.tasks.mlm).
"""

import argparse
import json
import math
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import numpy as np
import torch
import torch.distributed as dist

from benchmarks import records
from benchmarks.turns import aligned
from bert_dp.config import Config, dump_config, load_config, num_masked, peak_lr, read_manifest
from bert_dp.data.stream import Shards, held_out_batches
from bert_dp.model.bert import IGNORE
from bert_dp.tasks.mlm import EVAL_MASK_RATE
from bert_dp.training.process import exit_process
from launcher import job

VARIANTS = ("ours", "bert", "modernbert")
WARMUP = 0.1  # share of the steps
CALIBRATION_STEPS = 12
EVALUATIONS = 10


def main() -> None:
    parser = records.make_parser(__doc__, "--set", "--json")
    parser.add_argument("out", type=Path)
    parser.add_argument("--config", default="small-text")
    parser.add_argument("--minutes", type=float, default=10.0, help="training time per variant")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--variants", default=",".join(VARIANTS))
    parser.add_argument("--precision", choices=("fp32", "bf16"), default="fp32")
    parser.add_argument("--worker", choices=VARIANTS[1:], help=argparse.SUPPRESS)
    o = parser.parse_args()
    if o.worker:
        train_peer(o)
        return
    names = records.check_names(parser, "--variants", o.variants, VARIANTS)
    o.out.mkdir(parents=True, exist_ok=True)
    config = load_config(job.find_config(o.config), o.settings)
    data = config.data.model_copy(update={"path": str(job.prepare_data(config)), "sources": None})
    (o.out / "config.yaml").write_text(dump_config(config.model_copy(update={"data": data})))
    variants = {name: ours(o) if name == "ours" else peer(o, name) for name in names}
    fewest = min(variant["tokens"] for variant in variants.values())
    for variant in variants.values():
        variant["loss_at_equal_tokens"] = loss_at(variant["evals"], fewest)
    report(variants)
    records.write(o.json, {"environment": records.environment(), "variants": variants})


def ours(o: argparse.Namespace) -> dict[str, Any]:
    """Run `bert-dp train` for the given time and return its figures."""
    run_dir = o.out / "ours"
    settings = records.set_options(
        [
            f"schedule.hours={o.minutes / 60}",
            f"precision={o.precision}",
            "eval.every_steps=100",
            "checkpoint.every_steps=0",
        ]
    )
    options = [*settings, "--nproc", str(o.ranks), "--run-dir", str(run_dir)]
    records.bert_dp("train", str(o.out / "config.yaml"), *options)
    summary = json.loads((run_dir / "summary.json").read_text())
    lines = [json.loads(line) for line in (run_dir / "evals.jsonl").read_text().splitlines()]
    return {
        "tokens": summary["tokens"],
        "seconds": summary["time_s"]["train"],
        "parameters": summary["parameters"],
        "heldout_loss": summary["heldout_loss"],
        "evals": [[line["tokens"], line["loss"]] for line in lines],
    }


def peer(o: argparse.Namespace, name: str) -> dict[str, Any]:
    """Run Hugging Face's Trainer for the given time, on ranks started by torchrun, and return its figures."""
    options = ["--minutes", str(o.minutes), "--precision", o.precision, "--worker", name]
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--local-addr", "127.0.0.1", "--nproc-per-node", str(o.ranks), __file__, str(o.out)]
    threads = max(1, len(os.sched_getaffinity(0)) // o.ranks)
    environ = {**os.environ, "OMP_NUM_THREADS": str(threads), "GLOO_SOCKET_IFNAME": "lo"}
    subprocess.run([*command, *options], env=environ, stdout=sys.stderr, check=True)
    variant: dict[str, Any] = json.loads((o.out / f"{name}.json").read_text())
    return variant


# ---- one rank of a transformers variant ----


def make_model(name: str, config: Config) -> Any:
    from transformers import BertConfig, BertForMaskedLM, ModernBertConfig, ModernBertForMaskedLM

    sizes: dict[str, Any] = {
        "vocab_size": config.model.vocab_size,
        "hidden_size": config.model.hidden_size,
        "num_hidden_layers": config.model.num_layers,
        "num_attention_heads": config.model.num_heads,
        "max_position_embeddings": config.data.sequence_length,
        "pad_token_id": 0,
    }
    if name == "bert":
        return BertForMaskedLM(BertConfig(**sizes, intermediate_size=2 * config.model.intermediate_size))
    sizes |= {"bos_token_id": 1, "eos_token_id": 2, "cls_token_id": 4, "sep_token_id": 5}
    sizes["layer_types"] = ["full_attention"] * config.model.num_layers
    return ModernBertForMaskedLM(ModernBertConfig(**sizes, intermediate_size=config.model.intermediate_size))


def train_peer(o: argparse.Namespace) -> None:
    """Calibrate the number of steps, train for the given time, write OUT/NAME.json, and exit."""
    from transformers import (
        DataCollatorForLanguageModeling,
        PreTrainedTokenizerFast,
        Trainer,
        TrainerCallback,
        TrainingArguments,
    )

    config = load_config(o.out / "config.yaml")
    path = Path(config.data.path or "")
    manifest = read_manifest(path)
    shards = Shards(path, manifest, "train")

    class Rows(torch.utils.data.Dataset[dict[str, list[int]]]):
        """Training set as a map-style dataset, whose records have the field `input_ids`."""

        def __len__(self) -> int:
            return len(shards)

        def __getitem__(self, index: int) -> dict[str, list[int]]:
            return {"input_ids": shards.rows(np.array([index]))[0].tolist()}

    tokenizer = PreTrainedTokenizerFast(
        tokenizer_file=str(path / manifest.tokenizer.file), mask_token="<mask>", pad_token="<pad>"
    )
    torch.manual_seed(config.run.seed)
    model = make_model(o.worker, config)
    replicas = int(os.environ["WORLD_SIZE"])
    accumulation = config.batch.global_size // (config.batch.micro_size * replicas)
    tokens_per_step = config.batch.global_size * config.data.sequence_length
    measure = held_out_measure(config, Shards(path, manifest, "held_out"))

    class Clock(TrainerCallback):
        """Seconds of training without evaluations, and the held-out losses during training."""

        def __init__(self, every: int):
            self.every, self.seconds, self._since = every, 0.0, 0.0
            self.evals: list[list[float]] = []

        def on_train_begin(self, *_: Any, **__: Any) -> None:
            self._since = time.monotonic()

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            last = state.global_step == state.max_steps
            if not last and (not self.every or state.global_step % self.every):
                return
            self.seconds += time.monotonic() - self._since
            if self.every:
                self.evals.append([state.global_step * tokens_per_step, measure(kwargs["model"])])
            self._since = time.monotonic()

    def run(steps: int, every: int) -> Clock:
        clock = Clock(every)
        arguments = TrainingArguments(
            output_dir=str(o.out / o.worker),
            per_device_train_batch_size=config.batch.micro_size,
            gradient_accumulation_steps=accumulation,
            max_steps=steps,
            learning_rate=peak_lr(config).value,
            adam_beta1=config.optim.beta1,
            adam_beta2=config.optim.beta2,
            weight_decay=config.optim.weight_decay,
            lr_scheduler_type="linear",
            warmup_steps=int(WARMUP * steps),
            save_strategy="no",
            logging_steps=50,
            report_to=[],
            disable_tqdm=True,
            use_cpu=not torch.cuda.is_available(),
            bf16=o.precision == "bf16",
            ddp_find_unused_parameters=False,
            seed=config.run.seed,
        )
        Trainer(
            model=model,
            args=arguments,
            train_dataset=Rows(),
            data_collator=DataCollatorForLanguageModeling(tokenizer),
            callbacks=[clock],
        ).train()
        return clock

    start = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    run(2, 0)  # keeps the extra cost of the first steps out of the calibration
    rate = CALIBRATION_STEPS / run(CALIBRATION_STEPS, 0).seconds
    model.load_state_dict(start)
    rank_0_steps = [max(EVALUATIONS, round(60 * o.minutes * rate))]
    dist.broadcast_object_list(rank_0_steps, 0)
    (steps,) = rank_0_steps
    clock = run(steps, max(1, steps // EVALUATIONS))
    if int(os.environ["RANK"]) == 0:
        variant = {
            "tokens": steps * tokens_per_step,
            "seconds": clock.seconds,
            "parameters": sum(p.numel() for p in model.parameters()),
            "heldout_loss": clock.evals[-1][1],
            "evals": clock.evals,
        }
        (o.out / f"{o.worker}.json").write_text(json.dumps(variant))
    exit_process(0)


def held_out_measure(config: Config, shards: Shards) -> Callable[[Any], float]:
    """Return a function for the mean loss of a model over masked positions, which all ranks must call."""
    masked = num_masked(EVAL_MASK_RATE, config.data.sequence_length)
    batches = held_out_batches(
        shards,
        micro_size=config.batch.micro_size,
        num_masked=masked,
        max_sequences=config.eval.max_sequences,
        dp_rank=int(os.environ["RANK"]),
        dp_size=int(os.environ["WORLD_SIZE"]),
    )

    def measure(model: Any) -> float:
        bare = getattr(model, "module", model).eval()
        sums = torch.zeros(2, dtype=torch.float64)
        with torch.no_grad():
            for batch in (b for b in batches if b.num_masked):
                labels = torch.full_like(batch.ids_BS, IGNORE)
                labels.view(-1)[batch.positions_P] = batch.labels_P
                device = next(bare.parameters()).device
                loss = bare(input_ids=batch.ids_BS.to(device), labels=labels.to(device))["loss"]
                sums += torch.tensor([loss.item() * batch.num_masked, batch.num_masked], dtype=torch.float64)
        dist.all_reduce(sums)
        bare.train()
        return (sums[0] / sums[1]).item()

    return measure


# ---- the table ----


def loss_at(evals: list[list[float]], tokens: int) -> float:
    """Return the held-out loss after `tokens`, interpolated linearly in log(tokens) between evaluations."""
    logs, losses = [math.log(seen) for seen, _ in evals], [loss for _, loss in evals]
    return float(np.interp(math.log(tokens), logs, losses))


def report(variants: dict[str, dict[str, Any]]) -> None:
    rows = [["variant", "parameters", "seconds", "tokens", "tokens/s", "held-out loss", "at equal tokens"]]
    for name, r in variants.items():
        rate, losses = r["tokens"] / r["seconds"], (r["heldout_loss"], r["loss_at_equal_tokens"])
        sizes = [f"{r['parameters']:,}", f"{r['seconds']:.0f}", f"{r['tokens']:,}", f"{rate:.0f}"]
        rows.append([name, *sizes, *(f"{loss:.4f}" for loss in losses)])
    print("\n".join(aligned(rows)))


if __name__ == "__main__":
    main()
