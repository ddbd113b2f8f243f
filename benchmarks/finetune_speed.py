"""Finetuning beside Hugging Face's Trainer, and what dropout of attention probabilities costs.

    python benchmarks/finetune_speed.py OUT --corpus FILE [--corpus FILE ...] --data GLUE [--task MRPC]
        [--rounds 5] [--steps 5] [--precision fp32] [--set a.b=v ...] [--json FILE]

The model is `crammed-rope` at 4 layers with the native head: one step of pretraining on the corpus gives it a
tokenizer and weights, a finetuning run a head, and `export hf` of that run's first checkpoint is the model of
the peer. All finetune on the same examples, the first ROUNDS x STEPS x BATCH of the task's train set, once
each, as the same token ids, in the same global batch, by the same AdamW, on one rank. Dropout is 0 but where
it is named.

    ours:plain              the loop of `bert-dp finetune`: random batches, padded to their longest example
    ours:whole              the same with the global batch as one micro batch, which the verb takes on a GPU
    ours:micro-4            the same with micro batches of 4, sorted by length inside the global batch
    ours:attention-dropout  dropout 0.1 of the attention probabilities, which are then written out
    ours:dropout            dropout 0.1 as configs/glue.yaml has it, of hidden states too
    ours:dropout-compiled   the same by torch.compile; a turn in which a new length comes up compiles for it
    trainer:dynamic         Trainer with DataCollatorWithPadding, random batches
    trainer:grouped         the same with train_sampling_strategy=group_by_length

Every variant lives in a process of its own and runs its whole loop, which stops after each STEPS steps until
it is its turn again; one turn of each per round, in an order drawn anew each round from a fixed seed. What a
loop does before its first step, and evaluation, are not timed; every loop has computed steps before.

    tokens/s    real tokens, without padding, of all turns / their seconds (in brackets: of single turns; the
                batches of trainer:grouped are sorted, so its turns differ)
    padding     share of the computed tokens that is padding
    ours / this tokens/s of ours:plain over that of the row (goal: at least 1.3 beside trainer:dynamic)
    dropout     seconds of ours:attention-dropout over those of ours:plain, turn by turn on the same batches
    compiled    seconds of ours:dropout-compiled over those of ours:dropout, the same; the median counts
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import sys
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks import records, step_speed
from benchmarks.records import bert_dp
from benchmarks.turns import aligned, ratios, spread, telling_errors, variables, with_range
from bert_dp import files
from bert_dp.config import dump_config, load_config, peak_lr, read_examples
from bert_dp.config.manifest import ExamplesManifest, hash_json
from bert_dp.examples.table import Examples
from launcher.evaluate import finetune

GOAL = 1.3
BASE, DROPOUT = "ours:plain", "ours:attention-dropout"
EAGER, COMPILED = "ours:dropout", "ours:dropout-compiled"
BOTH = ("model.dropout=0.1", "model.attention_dropout=0.1")
PEERS = ("trainer:dynamic", "trainer:grouped")
OURS = {
    BASE: (),
    "ours:whole": ("batch.micro_size={batch}",),
    "ours:micro-4": ("batch.micro_size=4",),
    DROPOUT: ("model.attention_dropout=0.1",),
    EAGER: BOTH,
    COMPILED: (*BOTH, "compile=on"),
}
DEV = 16  # examples; nothing is evaluated


def parse() -> argparse.Namespace:
    parser = records.make_parser(__doc__, "--set", "--date", "--json")
    add = parser.add_argument
    add("out", type=Path, help="folder for the model and the examples; made anew")
    add("--corpus", action="append", required=True, metavar="FILE", help="text of the tokenizer; repeatable")
    add(
        "--data",
        action="append",
        required=True,
        type=Path,
        help="folder or tar with GLUE's files; repeatable",
    )
    add("--task", default="MRPC")
    add("--layers", type=int, default=4)
    add("--variants", default=",".join((*OURS, *PEERS)))
    add("--batch", type=int, default=16, help="examples of an optimizer step")
    add("--steps", type=int, default=5, help="optimizer steps of a turn")
    add("--rounds", type=int, default=5, help="turns of each variant")
    add("--threads", type=int, default=2)
    add("--device", choices=("cpu", "cuda"), default="cpu")
    add("--precision", choices=("fp32", "bf16"), default="fp32")
    add("--seed", type=int, default=0)
    add("--quick", action="store_true", help="two turns of two steps of four examples: shows that it works")
    o = parser.parse_args()
    if o.quick:
        vars(o).update(layers=1, batch=4, steps=2, rounds=2)
    o.names = records.check_names(parser, "--variants", o.variants, (*OURS, *PEERS))
    if BASE not in o.names:
        parser.error(f"--variants: must hold {BASE}, with which the others are compared")
    if o.out.exists() and any(o.out.iterdir()):
        parser.error(f"OUT: {o.out} is not empty; name a new folder")
    o.out = o.out.resolve()
    vars(o).update(warmup=0, profile=False, allocator="system")
    return o


# ---- what all variants start from ----


def prepare(o: argparse.Namespace) -> None:
    """OUT/exported, OUT/examples and a configuration of each variant of ours."""
    o.out.mkdir(parents=True, exist_ok=True)
    run_dir = o.out / "pretrained"
    model_settings = [
        f"model.num_layers={o.layers}",
        f"data.sources=[{','.join(map(os.path.abspath, o.corpus))}]",
        "batch.global_size=8",
        "batch.micro_size=8",
        "batch.ramp_fraction=0",
        "batch.ramp_quantum=null",
        "schedule.steps=1",
        "eval.max_sequences=8",
    ]
    common_settings = ["compile=off", f"run.device={o.device}"]
    options = records.set_options([*model_settings, *common_settings, *o.settings])
    bert_dp("train", "crammed-rope", *options, "--nproc", "1", "--run-dir", str(run_dir))
    pretrained = finetune.find_pretrained(run_dir)
    source = finetune.glue_source(o.task, [path.resolve() for path in o.data])
    prepared = finetune.prepare(pretrained, source, pretrained.config.data.sequence_length)
    examples = write_part(prepared, o.out / "examples", o)
    task_settings = [
        "finetune.head=native",
        "model.dropout=0",
        "model.attention_dropout=0",
        *common_settings,
        f"precision={o.precision}",
        f"batch.global_size={o.batch}",
        f"run.seed={o.seed}",
    ]

    def write_config(path: Path, *more: str) -> Path:
        settings = [*task_settings, *more]
        manifest, start = read_examples(examples), pretrained.checkpoint
        config = finetune.configuration(
            pretrained, settings, manifest=manifest, path=examples, init_from=start
        )
        path.parent.mkdir(exist_ok=True)
        sized = finetune.sized_micro_batches(config, 1, settings, on_gpu=o.device == "cuda")
        path.write_text(dump_config(sized))
        return path

    once = write_config(o.out / "start.yaml", "schedule.steps=1")
    bert_dp("train", str(once), "--nproc", "1", "--run-dir", str(o.out / "start"))
    first = o.out / "start" / "checkpoints" / "step-00000000"
    bert_dp("export", "hf", str(first), "--out", str(o.out / "exported"))
    for name in (name for name in o.names if name in OURS):
        steps = f"schedule.steps={o.steps * o.rounds}"
        settings = [setting.format(batch=o.batch) for setting in OURS[name]]
        write_config(folder_of(o, name) / "config.yaml", steps, "checkpoint.keep=0", *settings)


def folder_of(o: argparse.Namespace, name: str) -> Path:
    folder: Path = o.out / name.replace(":", "-")
    return folder


def write_part(source: Path, out: Path, o: argparse.Namespace) -> Path:
    """A prepared directory with the first examples of another: those of all turns, and a few of dev."""
    manifest = read_examples(source)
    wanted = o.batch * o.steps * o.rounds
    if wanted > manifest.num_samples:
        sys.exit(f"error: --rounds x --steps x --batch is {wanted}; {o.task} has {manifest.num_samples} rows")
    out.mkdir()
    content = manifest.model_dump(mode="json", exclude={"hash"})
    splits = {}
    for name, most in (("train", wanted), ("dev", DEV)):
        whole = Examples.open(source, manifest, name)
        count = min(most, len(whole))
        labels = None if whole.labels is None else whole.labels[:count]
        part = Examples(whole.ids[: whole.offsets[count]], whole.offsets[: count + 1], labels)
        splits[name] = {
            **content["splits"][name],
            "sha256": part.save(out / manifest.splits[name].file),
            "examples": count,
            "tokens": len(part.ids),
            "truncated": int((part.lengths == manifest.sequence_length).sum()),
        }
    content |= {"splits": splits, "official": False}
    shutil.copyfile(source / manifest.tokenizer.file, out / manifest.tokenizer.file)
    files.write_json(out / ExamplesManifest.file_name, {**content, "hash": hash_json(content)})
    return out


# ---- a variant; this runs in a process of its own, which alone imports torch ----


class Turns:
    """Holds a loop at the beginning of each turn until the parent asks for it, and answers what the turn
    before took."""

    def __init__(self, o: argparse.Namespace, pipe: Connection):
        self._o, self._pipe = o, pipe
        self._step = 0
        self._start_s = time.perf_counter()
        self._drawn: list[tuple[int, int, int]] = []
        """(step, real tokens, all tokens) of each micro batch."""
        self.parameters = 0

    @property
    def started(self) -> bool:
        return self._step > 0

    def draw(self, step: int, real: int, computed: int) -> None:
        """Tokens of a micro batch of this step, from 0; it may be drawn before its step begins."""
        self._drawn.append((step, real, computed))

    def begin_step(self) -> None:
        if self._step % self._o.steps == 0:
            self._answer()
            self._pipe.recv()
            self._start_s = step_speed.now(self._o)
        self._step += 1

    def end(self) -> None:
        """The last step is done."""
        self._answer()
        self._pipe.recv()

    def _answer(self) -> None:
        seconds = step_speed.now(self._o) - self._start_s
        if not self.started:
            self._pipe.send({"first_step_s": seconds, "parameters": self.parameters})
            return
        turn = range(self._step - self._o.steps, self._step)
        tokens = [(real, computed) for step, real, computed in self._drawn if step in turn]
        real, computed = map(sum, zip(*tokens, strict=True))
        self._pipe.send({"seconds": seconds, "tokens": real, "computed_tokens": computed})


def child(name: str, o: argparse.Namespace, pipe: Connection) -> None:
    """Takes its turns until the parent asks it to end."""
    with telling_errors(pipe):
        import torch

        torch.set_num_threads(o.threads)
        turns = Turns(o, pipe)
        if name in OURS:
            finetune_ours(name, o, turns)
        else:
            with contextlib.redirect_stdout(sys.stderr):  # Trainer prints its log
                finetune_peer(name, o, turns)


def finetune_ours(name: str, o: argparse.Namespace, turns: Turns) -> None:
    """A whole rank; only its stream of micro batches waits for turns."""
    from bert_dp.tasks.finetune import Finetuning
    from bert_dp.training import rank

    class Taken:
        """A stream whose first micro batch of a step waits for a turn."""

        def __init__(self, stream: Any, accumulation: int):
            self._stream, self._accumulation = stream, accumulation
            self._number = 0

        @property
        def wait_s(self) -> float:
            seconds: float = self._stream.wait_s
            return seconds

        def next(self) -> Any:
            step, place = divmod(self._number, self._accumulation)
            if place == 0:
                turns.begin_step()
            self._number += 1
            batch = self._stream.next()
            computed = batch.ids_BS.numel()
            turns.draw(step, computed if batch.real_BS is None else int(batch.real_BS.sum()), computed)
            return batch

        def close(self) -> None:
            self._stream.close()

    class TakingTurns(Finetuning):
        def build_model(self, seed: int) -> Any:
            model = super().build_model(seed)
            turns.parameters = sum(p.numel() for p in model.parameters())
            return model

        def stream(self, **where: Any) -> Any:
            batch = self._config.batch
            return Taken(super().stream(**where), batch.global_size // batch.micro_size)

        def evaluate(self, model: Any, context: Any) -> None:
            if turns.started:
                turns.end()

    config = folder_of(o, name) / "config.yaml"
    if code := rank.main([str(config), "--resume", "never"], TakingTurns):
        raise RuntimeError(f"the rank ended with exit code {code}; see {config.parent / 'logs'}")


def finetune_peer(name: str, o: argparse.Namespace, turns: Turns) -> None:
    """Hugging Face's Trainer on the exported model."""
    from transformers import (
        AutoModelForSequenceClassification,
        DataCollatorWithPadding,
        PreTrainedTokenizerFast,
        Trainer,
        TrainerCallback,
        TrainingArguments,
    )

    config = load_config(folder_of(o, BASE) / "config.yaml")
    folder = o.out / "examples"
    manifest = read_examples(folder)
    examples = Examples.open(folder, manifest, "train")
    assert examples.labels is not None
    rows: Any = [
        {"input_ids": examples.tokens(i).tolist(), "labels": label}
        for i, label in enumerate(examples.labels.tolist())
    ]
    words = PreTrainedTokenizerFast(tokenizer_file=str(folder / manifest.tokenizer.file), pad_token="<pad>")
    assert words.pad_token_id == manifest.special_tokens.pad
    pad = DataCollatorWithPadding(words)
    model = AutoModelForSequenceClassification.from_pretrained(o.out / "exported")
    turns.parameters = sum(p.numel() for p in model.parameters())
    drawn = 0

    def collate(features: Any) -> Any:
        nonlocal drawn
        batch = pad(features)
        turns.draw(drawn, int(batch["attention_mask"].sum()), batch["input_ids"].numel())
        drawn += 1
        return batch

    class TakingTurns(TrainerCallback):
        def on_step_begin(self, *_: Any, **__: Any) -> None:
            turns.begin_step()

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if state.global_step == state.max_steps:
                turns.end()

    def run(steps: int, collator: Any, callbacks: list[Any]) -> None:
        arguments = TrainingArguments(
            output_dir=str(folder_of(o, name)),
            per_device_train_batch_size=o.batch,
            max_steps=steps,
            learning_rate=peak_lr(config).value,
            adam_beta1=config.optim.beta1,
            adam_beta2=config.optim.beta2,
            adam_epsilon=config.optim.eps,
            weight_decay=config.optim.weight_decay,
            max_grad_norm=config.optim.clip,
            optim="adamw_torch_fused",
            lr_scheduler_type="cosine",
            warmup_steps=int(config.schedule.warmup_fraction * steps),
            train_sampling_strategy="group_by_length" if name == "trainer:grouped" else "random",
            dataloader_drop_last=True,
            save_strategy="no",
            logging_steps=config.log.every_steps,
            report_to=[],
            disable_tqdm=True,
            use_cpu=o.device == "cpu",
            bf16=o.precision == "bf16",
            seed=o.seed,
        )
        Trainer(
            model=model, args=arguments, train_dataset=rows, data_collator=collator, callbacks=callbacks
        ).train()

    start = {key: tensor.clone() for key, tensor in model.state_dict().items()}
    run(2, pad, [])  # what only the first steps cost
    model.load_state_dict(start)
    run(o.steps * o.rounds, collate, [TakingTurns()])


# ---- the figures ----


def summarise(variants: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Adds to each variant its tokens/s, padding and ratio; returns the figures that a goal is about."""

    def by_turn(name: str, key: str) -> list[float]:
        return [turn[key] for turn in variants[name]["rounds"]]

    for name, variant in variants.items():
        seconds, tokens = by_turn(name, "seconds"), by_turn(name, "tokens")
        variant["tokens_per_s"] = sum(tokens) / sum(seconds)
        variant["turns_tokens_per_s"] = spread(ratios(tokens, seconds))
        variant["padding"] = 1 - sum(tokens) / sum(by_turn(name, "computed_tokens"))
    for variant in variants.values():
        variant["ours_over_this"] = variants[BASE]["tokens_per_s"] / variant["tokens_per_s"]
    figures: dict[str, Any] = {
        "goal": GOAL,
        "ours_over": {name: variants[name]["ours_over_this"] for name in PEERS if name in variants},
    }
    pairs = {"attention_dropout": (DROPOUT, BASE), "compiled": (COMPILED, EAGER)}
    for figure, (name, other) in pairs.items():
        if name not in variants or other not in variants:
            continue
        if by_turn(name, "tokens") != by_turn(other, "tokens"):
            raise RuntimeError(f"{name} and {other} had other batches")
        figures[figure] = spread(ratios(by_turn(name, "seconds"), by_turn(other, "seconds")))
    return figures


def show(variants: dict[str, dict[str, Any]], figures: dict[str, Any]) -> None:
    rows = [["variant", "parameters", "tokens/s", "padding", "ours / this"]]
    for name, variant in variants.items():
        turns = variant["turns_tokens_per_s"]
        rate = f"{variant['tokens_per_s']:.0f} ({turns['min']:.0f}-{turns['max']:.0f})"
        padding, ratio = f"{100 * variant['padding']:.1f} %", f"{variant['ours_over_this']:.2f}"
        rows.append([name, f"{variant['parameters']:,}", rate, padding, ratio])
    print("\n".join(aligned(rows)))
    for name, ratio in figures["ours_over"].items():
        print(f"ours over {name}: {ratio:.2f} (goal {GOAL}: {'met' if ratio >= GOAL else 'missed'})")
    if "attention_dropout" in figures:
        print(f"attention dropout: {with_range(figures['attention_dropout'], 2)} x the seconds without it")
    if "compiled" in figures:
        print(f"compiled, with dropout: {with_range(figures['compiled'], 2)} x the seconds of eager")


def main() -> None:
    o = parse()
    environment = records.environment_of(o, step_speed.PACKAGES, hidden=("out", "corpus", "data", "names"))
    with variables({"OMP_NUM_THREADS": str(o.threads)}):
        prepare(o)
        variants = step_speed.measure_all(o, child)
    figures = summarise(variants)
    show(variants, figures)
    records.write(o.json, {"environment": environment, "figures": figures, "variants": variants})


if __name__ == "__main__":
    main()
