"""Pretraining for equal time: `bert-dp train` beside Hugging Face's Trainer as its run_mlm example uses it.

    python benchmarks/hf_trainer.py OUT [--config small-text] [--set a.b=v ...] [--minutes 10] [--ranks 2]
        [--variants ours,bert,modernbert] [--precision fp32] [--json FILE]

    ours        `bert-dp train` as it is
    bert        transformers BertForMaskedLM of the same width, depth and feed-forward size
    modernbert  transformers ModernBertForMaskedLM of the same sizes, global attention

One after the other, each with every rank, on the shards that `bert-dp data build` made: the same sequences,
tokenizer and held-out text. The peers mask by DataCollatorForLanguageModeling at its default rate, and train
with run_mlm's linear schedule, here with a tenth of warm-up, our peak rate and our batches: a short run
before tells how many steps fit the time. Evaluations are outside the time. Held-out loss is the same measure
for all: the same sequences with the same positions hidden at 15 % (bert_dp.tasks.mlm).
"""

from __future__ import annotations

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

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import numpy as np  # noqa: E402
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402

from benchmarks import records  # noqa: E402
from bert_dp.config import Config, dump_config, load_config, num_masked, peak_lr, read_manifest  # noqa: E402
from bert_dp.data import Shards, held_out_batches  # noqa: E402
from bert_dp.model import IGNORE  # noqa: E402
from bert_dp.tasks.mlm import EVAL_MASK_RATE  # noqa: E402
from launcher import job  # noqa: E402

VARIANTS = ("ours", "bert", "modernbert")
WARMUP = 0.1  # of the steps
CALIBRATION_STEPS = 12
EVALUATIONS = 10


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", type=Path)
    parser.add_argument("--config", default="small-text")
    parser.add_argument("--set", action="append", default=[], metavar="a.b=v")
    parser.add_argument("--minutes", type=float, default=10.0, help="of training, for each")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--variants", default=",".join(VARIANTS))
    parser.add_argument("--precision", choices=("fp32", "bf16"), default="fp32")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--worker", choices=VARIANTS[1:], help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.worker:
        train_peer(asked)
        return
    names = asked.variants.split(",")
    if unknown := set(names) - set(VARIANTS):
        parser.error(f"--variants: {', '.join(sorted(unknown))} is not one of {', '.join(VARIANTS)}")
    asked.out.mkdir(parents=True, exist_ok=True)
    config = load_config(job.find_config(asked.config), asked.set)
    data = config.data.model_copy(update={"path": str(job.prepare_data(config)), "sources": None})
    (asked.out / "config.yaml").write_text(dump_config(config.model_copy(update={"data": data})))
    found = {name: ours(asked) if name == "ours" else peer(asked, name) for name in names}
    for result in found.values():
        result["loss_at_equal_tokens"] = loss_at(result["evals"], min(r["tokens"] for r in found.values()))
    report(found)
    if asked.json:
        asked.json.write_text(
            json.dumps({"environment": records.environment(None), "variants": found}, indent=1) + "\n"
        )


def ours(asked: argparse.Namespace) -> dict[str, Any]:
    """A run of ours for the time."""
    run_dir = asked.out / "ours"
    settings = [
        f"schedule.hours={asked.minutes / 60}",
        f"precision={asked.precision}",
        "eval.every_steps=100",
        "checkpoint.every_steps=0",
    ]
    pairs = [part for setting in settings for part in ("--set", setting)]
    command = [sys.executable, "-m", "launcher", "train", str(asked.out / "config.yaml"), *pairs]
    command += ["--nproc", str(asked.ranks), "--run-dir", str(run_dir)]
    subprocess.run(command, cwd=ROOT, stdout=sys.stderr, check=True)
    summary = json.loads((run_dir / "summary.json").read_text())
    lines = [json.loads(line) for line in (run_dir / "evals.jsonl").read_text().splitlines()]
    return {
        "tokens": summary["tokens"],
        "seconds": summary["time_s"]["train"],
        "parameters": summary["parameters"],
        "heldout_loss": summary["heldout_loss"],
        "evals": [[line["tokens"], line["loss"]] for line in lines],
    }


def peer(asked: argparse.Namespace, name: str) -> dict[str, Any]:
    """A run of Hugging Face's Trainer for the time, its ranks started by torchrun."""
    options = ["--minutes", str(asked.minutes), "--precision", asked.precision, "--worker", name]
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--local-addr", "127.0.0.1", "--nproc-per-node", str(asked.ranks), __file__, str(asked.out)]
    threads = max(1, len(os.sched_getaffinity(0)) // asked.ranks)
    environ = {**os.environ, "OMP_NUM_THREADS": str(threads), "GLOO_SOCKET_IFNAME": "lo"}
    subprocess.run([*command, *options], env=environ, stdout=sys.stderr, check=True)
    found: dict[str, Any] = json.loads((asked.out / f"{name}.json").read_text())
    return found


# ---- one rank of a peer ----


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


def train_peer(asked: argparse.Namespace) -> None:
    """Calibrate, train for the time, write OUT/NAME.json."""
    from transformers import (
        DataCollatorForLanguageModeling,
        PreTrainedTokenizerFast,
        Trainer,
        TrainerCallback,
        TrainingArguments,
    )

    config = load_config(asked.out / "config.yaml")
    path = Path(config.data.path or "")
    manifest = read_manifest(path)
    shards = Shards(path, manifest, "train")

    class Rows(torch.utils.data.Dataset[dict[str, list[int]]]):
        """What `datasets` would give."""

        def __len__(self) -> int:
            return len(shards)

        def __getitem__(self, index: int) -> dict[str, list[int]]:
            return {"input_ids": shards.rows(np.array([index]))[0].tolist()}

    tokenizer = PreTrainedTokenizerFast(
        tokenizer_file=str(path / manifest.tokenizer.file), mask_token="<mask>", pad_token="<pad>"
    )
    torch.manual_seed(config.run.seed)
    model = make_model(asked.worker, config)
    replicas = int(os.environ["WORLD_SIZE"])
    accumulation = config.batch.global_size // (config.batch.micro_size * replicas)
    tokens_per_step = config.batch.global_size * config.data.sequence_length
    measure = held_out_measure(config, Shards(path, manifest, "held_out"))

    class Clock(TrainerCallback):
        """Seconds of training without evaluations, and the held-out loss as training goes."""

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
            output_dir=str(asked.out / asked.worker),
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
            bf16=asked.precision == "bf16",
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
    run(2, 0)  # what only the first steps cost
    rate = CALIBRATION_STEPS / run(CALIBRATION_STEPS, 0).seconds
    model.load_state_dict(start)
    said = [max(EVALUATIONS, round(60 * asked.minutes * rate))]
    dist.broadcast_object_list(said, 0)
    clock = run(said[0], max(1, said[0] // EVALUATIONS))
    if int(os.environ["RANK"]) == 0:
        found = {
            "tokens": said[0] * tokens_per_step,
            "seconds": clock.seconds,
            "parameters": sum(p.numel() for p in model.parameters()),
            "heldout_loss": clock.evals[-1][1],
            "evals": clock.evals,
        }
        (asked.out / f"{asked.worker}.json").write_text(json.dumps(found))


def held_out_measure(config: Config, shards: Shards) -> Callable[[Any], float]:
    """Mean loss over the hidden positions, of a model that takes input_ids and labels; collective."""
    hidden = num_masked(EVAL_MASK_RATE, config.data.sequence_length)
    batches = held_out_batches(
        shards,
        micro_size=config.batch.micro_size,
        num_masked=hidden,
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
    """Held-out loss after so many tokens, between two evaluations on a line over log tokens."""
    after = next((i for i, (seen, _) in enumerate(evals) if seen >= tokens), len(evals) - 1)
    if after == 0:
        return evals[0][1]
    (low, first), (high, last) = evals[after - 1], evals[after]
    share = min(1.0, math.log(tokens / low) / math.log(high / low))
    return first + share * (last - first)


def report(found: dict[str, dict[str, Any]]) -> None:
    print(
        f"{'variant':12} {'parameters':>11} {'seconds':>8} {'tokens':>12} {'tokens/s':>9} "
        f"{'held-out loss':>14} {'at equal tokens':>16}"
    )
    for name, r in found.items():
        print(
            f"{name:12} {r['parameters']:11,} {r['seconds']:8.0f} {r['tokens']:12,} "
            f"{r['tokens'] / r['seconds']:9.0f} {r['heldout_loss']:14.4f} {r['loss_at_equal_tokens']:16.4f}"
        )


if __name__ == "__main__":
    main()
