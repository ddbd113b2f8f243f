"""Finetuning beside Hugging Face's Trainer, and what dropout of attention probabilities costs.

    python benchmarks/finetune_speed.py OUT --corpus FILE [--corpus FILE ...] --data GLUE [--task MRPC]
        [--rounds 5] [--steps 5] [--precision fp32] [--set a.b=v ...] [--json FILE]

The model is `crammed-rope` at 4 layers with the native head: one step of pretraining on the corpus gives it a
tokenizer and weights, a finetuning run a head, and `export hf` of that run's first checkpoint is the model of
the peer. All finetune on the same examples, the first ROUNDS x STEPS x BATCH of the task's train set, once
each, as the same token ids, in the same global batch, by the same AdamW, on one rank. Dropout is 0 but where
it is named.

    ours:plain              the loop of `bert-dp finetune`: random batches, padded to their longest example
    ours:micro-4            the same with micro batches of 4, sorted by length inside the global batch
    ours:attention-dropout  dropout 0.1 of the attention probabilities, which are then written out
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
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import subprocess
import sys
import time
import warnings
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.step_speed import environment, measure_all, now, spread, variables, with_range  # noqa: E402
from bert_dp import record  # noqa: E402
from bert_dp.config import dump_config, load_config, peak_lr, read_examples  # noqa: E402
from bert_dp.config.examples import ExamplesManifest  # noqa: E402
from bert_dp.config.manifest import hash_json  # noqa: E402
from bert_dp.examples.store import Examples  # noqa: E402
from launcher.evaluate import finetune  # noqa: E402

GOAL = 1.3
BASE = "ours:plain"
PEERS = ("trainer:dynamic", "trainer:grouped")
OURS = {
    BASE: (),
    "ours:micro-4": ("batch.micro_size=4",),
    "ours:attention-dropout": ("model.attention_dropout=0.1",),
}
DEV = 16  # examples; nothing is evaluated


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
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
    add(
        "--set", dest="settings", action="append", default=[], metavar="a.b=v", help="of the pretrained model"
    )
    add("--variants", default=",".join((*OURS, *PEERS)))
    add("--batch", type=int, default=16, help="examples of an optimizer step")
    add("--steps", type=int, default=5, help="optimizer steps of a turn")
    add("--rounds", type=int, default=5, help="turns of each variant")
    add("--threads", type=int, default=2)
    add("--device", choices=("cpu", "cuda"), default="cpu")
    add("--precision", choices=("fp32", "bf16"), default="fp32")
    add("--seed", type=int, default=0)
    add("--date", help="for the record, as YYYY-MM-DD")
    add("--json", type=Path)
    add("--quick", action="store_true", help="two turns of two steps of four examples: shows that it works")
    o = parser.parse_args()
    if o.quick:
        vars(o).update(layers=1, batch=4, steps=2, rounds=2)
    o.names = o.variants.split(",")
    if unknown := set(o.names) - {*OURS, *PEERS}:
        parser.error(f"--variants: {', '.join(sorted(unknown))} is not one of {', '.join((*OURS, *PEERS))}")
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
    pretrained = o.out / "pretrained"
    of_model = [
        f"model.num_layers={o.layers}",
        f"data.sources=[{','.join(map(os.path.abspath, o.corpus))}]",
        "batch.global_size=8",
        "batch.micro_size=8",
        "batch.ramp_fraction=0",
        "batch.ramp_quantum=null",
        "schedule.steps=1",
        "eval.max_sequences=8",
    ]
    of_head = ["finetune.head=native", "model.dropout=0", "model.attention_dropout=0"]
    of_all = ["compile=off", f"run.device={o.device}"]
    pairs = [part for item in (*of_model, *of_all, *o.settings) for part in ("--set", item)]
    bert_dp("train", "crammed-rope", *pairs, "--nproc", "1", "--run-dir", str(pretrained))
    found = finetune.find_pretrained(pretrained)
    source = finetune.Source(o.task, tuple(path.resolve() for path in o.data))
    prepared = finetune.prepare(found, source, found.config.data.sequence_length)
    examples = write_part(prepared, o.out / "examples", o)
    of_task = [*of_head, *of_all, f"precision={o.precision}", f"batch.global_size={o.batch}"]
    of_task += [f"run.seed={o.seed}"]

    def write_config(path: Path, *more: str) -> Path:
        settings = [*of_task, *more]
        config = finetune.configuration(
            found, settings, manifest=read_examples(examples), path=examples, init_from=found.checkpoint
        )
        path.parent.mkdir(exist_ok=True)
        path.write_text(dump_config(finetune.whole_batches(config, 1, settings)))
        return path

    once = write_config(o.out / "start.yaml", "schedule.steps=1")
    bert_dp("train", str(once), "--nproc", "1", "--run-dir", str(o.out / "start"))
    first = o.out / "start" / "checkpoints" / "step-00000000"
    bert_dp("export", "hf", str(first), "--out", str(o.out / "exported"))
    for name in (name for name in o.names if name in OURS):
        steps = f"schedule.steps={o.steps * o.rounds}"
        write_config(folder_of(o, name) / "config.yaml", steps, "checkpoint.keep=0", *OURS[name])


def bert_dp(*arguments: str) -> None:
    """A verb of ours; ends the program where it fails."""
    command = [sys.executable, "-m", "launcher", *arguments]
    code = subprocess.run(command, cwd=ROOT, stdout=sys.stderr, check=False).returncode
    if code:
        sys.exit(code)


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
    record.write_json(out / ExamplesManifest.file_name, {**content, "hash": hash_json(content)})
    return out


# ---- a variant; this runs in a process of its own, which alone imports torch ----


class Turns:
    """Holds a loop at the beginning of each turn until the parent asks for it, and answers what the turn
    before took."""

    def __init__(self, o: argparse.Namespace, pipe: Connection):
        self._o, self._pipe = o, pipe
        self._step = 0
        self._begun_s = time.perf_counter()
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
            self._begun_s = now(self._o)
        self._step += 1

    def end(self) -> None:
        """The last step is done."""
        self._answer()
        self._pipe.recv()

    def _answer(self) -> None:
        seconds = now(self._o) - self._begun_s
        if not self.started:
            self._pipe.send({"first_step_s": seconds, "parameters": self.parameters})
            return
        turn = range(self._step - self._o.steps, self._step)
        tokens = [(real, computed) for step, real, computed in self._drawn if step in turn]
        real, computed = map(sum, zip(*tokens, strict=True))
        self._pipe.send({"seconds": seconds, "tokens": real, "computed_tokens": computed})


def child(name: str, o: argparse.Namespace, pipe: Connection) -> None:
    """Takes its turns until `quit`."""
    warnings.simplefilter("ignore")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    try:
        import torch

        torch.set_num_threads(o.threads)
        turns = Turns(o, pipe)
        if name in OURS:
            finetune_ours(name, o, turns)
        else:
            with contextlib.redirect_stdout(sys.stderr):  # Trainer prints its log
                finetune_peer(name, o, turns)
    except Exception as error:
        pipe.send({"error": f"{type(error).__name__}: {error}"[:2000]})


def finetune_ours(name: str, o: argparse.Namespace, turns: Turns) -> None:
    """A whole rank; only its stream of micro batches waits for turns."""
    from bert_dp import worker
    from bert_dp.tasks.finetune import Finetuning

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
    if code := worker.main([str(config), "--resume", "never"], TakingTurns):
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


def summarise(records: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Adds to each variant its tokens/s, padding and ratio; returns the figures that a goal is about."""
    for found in records.values():
        rounds = found["rounds"]
        seconds, tokens, computed = (
            sum(turn[key] for turn in rounds) for key in ("seconds", "tokens", "computed_tokens")
        )
        found["tokens_per_s"] = tokens / seconds
        found["turns_tokens_per_s"] = spread([turn["tokens"] / turn["seconds"] for turn in rounds])
        found["padding"] = 1 - tokens / computed
    ours = records[BASE]
    for found in records.values():
        found["ours_over_this"] = ours["tokens_per_s"] / found["tokens_per_s"]
    figures: dict[str, Any] = {
        "goal": GOAL,
        "ours_over": {name: records[name]["ours_over_this"] for name in PEERS if name in records},
    }
    if dropout := records.get("ours:attention-dropout"):
        pairs = list(zip(dropout["rounds"], ours["rounds"], strict=True))
        if any(a["tokens"] != b["tokens"] for a, b in pairs):
            raise RuntimeError("attention dropout and ours:plain had other batches")
        figures["attention_dropout"] = spread([a["seconds"] / b["seconds"] for a, b in pairs])
    return figures


def show(records: dict[str, dict[str, Any]], figures: dict[str, Any]) -> None:
    print(f"{'variant':24} {'parameters':>11} {'tokens/s':>22} {'padding':>8} {'ours / this':>12}")
    for name, found in records.items():
        turns = found["turns_tokens_per_s"]
        rate = f"{found['tokens_per_s']:.0f} ({turns['min']:.0f}-{turns['max']:.0f})"
        print(
            f"{name:24} {found['parameters']:11,} {rate:>22} {100 * found['padding']:6.1f} % "
            f"{found['ours_over_this']:12.2f}"
        )
    for name, ratio in figures["ours_over"].items():
        print(f"ours over {name}: {ratio:.2f} (goal {GOAL}: {'met' if ratio >= GOAL else 'missed'})")
    if "attention_dropout" in figures:
        print(f"attention dropout: {with_range(figures['attention_dropout'], 2)} x the seconds without it")


def main() -> None:
    o = parse()
    where = environment(argparse.Namespace(**{**vars(o), "out": None, "corpus": None, "data": None}))
    threads = {"OMP_NUM_THREADS": str(o.threads)}
    with variables(threads):
        prepare(o)
        records = measure_all(o, child)
    figures = summarise(records)
    show(records, figures)
    if o.json:
        facts = {"environment": where, "figures": figures, "variants": records}
        o.json.write_text(json.dumps(facts, indent=1) + "\n")


if __name__ == "__main__":
    main()
