"""`python -m tests.slips [NAME...]`: slips made by hand in the distributed modules, and who notices them.

mutmut covers the pure modules (`python -m tests.mutants`). Here each slip is one replacement of text in one
file, put into a temporary copy of the tree; its tests then run there until the first fails. All of them must
pass without a slip first. Prints a line per slip; exit code 1 when one survives. `--list` runs nothing.
"""

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from tests.mutants import copy_tree


class Slip(NamedTuple):
    name: str
    file: str
    old: str
    new: str
    tests: str
    """Paths or pytest ids that are to notice, by blanks."""


SLIPS = (
    # held-out loss
    Slip(
        "heldout-rows-of-a-replica",
        "bert_dp/tasks/__init__.py",
        "self.comm.all_gather(values)[:: self.tensor]",
        "self.comm.all_gather(values)[: self.dp_size]",
        "tests/unit/test_loop.py::test_the_held_out_loss_counts_each_replicas_sequences_once",
    ),
    Slip(
        "heldout-counted-by-every-rank-of-a-replica",
        "bert_dp/tasks/__init__.py",
        "self.comm.all_gather(values)[:: self.tensor]",
        "self.comm.all_gather(values)",
        "tests/unit/test_loop.py::test_the_held_out_loss_counts_each_replicas_sequences_once",
    ),
    Slip(
        "heldout-with-dropout",
        "bert_dp/training/loop.py",
        "model = trainer.bare_model.eval()",
        "model = trainer.bare_model",
        "tests/unit/test_loop.py",
    ),
    Slip(
        "heldout-leaves-dropout-off",
        "bert_dp/training/loop.py",
        "    model.train()\n    return measured",
        "    return measured",
        "tests/unit/test_loop.py",
    ),
    Slip(
        "heldout-padding-counted",
        "bert_dp/data/stream.py",
        "count = int(real_B.sum()) * num_masked",
        "count = len(real_B) * num_masked",
        "tests/unit/test_data.py",
    ),
    # metrics
    Slip(
        "loss-of-every-rank-of-a-replica",
        "bert_dp/training/metrics.py",
        "ranks[:: self._layout.tensor, 0].sum().item()",
        "ranks[:, 0].sum().item()",
        "tests/unit/test_meter.py",
    ),
    Slip(
        "mfu-times-n",
        "bert_dp/training/metrics.py",
        '"mfu": per_gpu * flops / peak',
        '"mfu": tokens_per_s * flops / peak',
        "tests/unit/test_meter.py",
    ),
    Slip(
        "peak-memory-of-rank-0",
        "bert_dp/training/metrics.py",
        "ranks[:, 1].max().item()",
        "ranks[0, 1].item()",
        "tests/unit/test_meter.py",
    ),
    Slip(
        "pilot-memory-of-rank-0",
        "launcher/tune/batch.py",
        'facts["peaks_gib"] = repeat.memory_gib',
        'facts["peaks_gib"] = repeat.memory_gib[:1]',
        "tests/unit/test_tune_batch.py",
    ),
    Slip(
        "pauses-counted-into-a-steps-time",
        "bert_dp/training/metrics.py",
        "self._paused_s += time.perf_counter() - start",
        "self._paused_s += 0.0",
        "tests/unit/test_meter.py",
    ),
    Slip(
        "pauses-counted-into-the-next-step",
        "bert_dp/training/metrics.py",
        "self._paused_s += time.perf_counter() - start\n        self.timers.restart()",
        "self._paused_s += time.perf_counter() - start",
        "tests/unit/test_meter.py",
    ),
    Slip(
        "metrics-left-out-of-the-summary",
        "bert_dp/training/summary.py",
        "metrics=trainer.meter.measured",
        "metrics={}",
        "tests/unit/test_loop.py",
    ),
    Slip(
        "evaluation-without-a-pause",
        "bert_dp/training/loop.py",
        "            with meter.paused():\n                evaluate_and_write",
        "            if True:\n                evaluate_and_write",
        "tests/unit/test_loop.py",
    ),
    # one step
    Slip(
        "overflow-of-one-part-not-told",
        "bert_dp/parallel/base.py",
        "local.copy_(found_inf)",
        "pass",
        "tests/unit/test_step.py",
    ),
    Slip(
        "norm-not-finite-steps-all-the-same",
        "bert_dp/parallel/base.py",
        "optimizer.found_inf = found_inf",
        "optimizer.found_inf = torch.zeros_like(found_inf)",
        "tests/unit/test_step.py",
    ),
    Slip(
        "clipped-below-the-limit-too",
        "bert_dp/parallel/base.py",
        "(norm / max_norm).clamp(min=1.0)",
        "(norm / max_norm)",
        "tests/unit/test_step.py",
    ),
    Slip(
        "mean-over-a-replicas-own-tokens",
        "bert_dp/training/loop.py",
        "trainer.task.num_targets(state.samples, state.global_batch)",
        "trainer.task.num_targets(state.samples, state.global_batch // trainer.layout.dp)",
        "tests/parity/test_matrix.py::test_cell[ddp-adamw-n2-fp64-acc1]",
    ),
    Slip(
        "dropout-by-place-in-the-batch",
        "bert_dp/tasks/finetune.py",
        "hash64(seed, 4, epoch_B, index_B)",
        "hash64(seed, 4, np.arange(len(index_B)))",
        "tests/unit/test_classifier.py",
    ),
    # engines
    Slip(
        "fp16-cast-before-the-division",
        "bert_dp/parallel/ddp.py",
        "(buffer / group.size()).to(dtype)",
        "buffer.to(dtype) / group.size()",
        "tests/unit/test_step.py",
    ),
    Slip(
        "ddp-sum-divided-by-the-replicas",
        "bert_dp/parallel/ddp.py",
        "whole = loss * self.dp_size",
        "whole = loss",
        "tests/parity/test_matrix.py::test_cell[ddp-adamw-n2-fp64-acc1]",
    ),
    Slip(
        "owners-by-count",
        "bert_dp/parallel/zero1.py",
        "load[owner] += sizes[name]",
        "load[owner] += 1",
        "tests/unit/test_step.py",
    ),
    Slip(
        "zero1-gradients-never-zeroed",
        "bert_dp/parallel/zero1.py",
        "            bucket.gradients.zero_()\n",
        "",
        "tests/parity/test_matrix.py::test_cell[zero1-adamw-n2-fp64-acc1]",
    ),
    Slip(
        "zero1-reduces-the-first-micro-batch-alone",
        "bert_dp/parallel/zero1.py",
        "                if self._last:\n",
        "                if True:\n",
        "tests/parity/test_matrix.py::test_cell[zero1-muon-n2-fp32-acc3]",
    ),
    Slip(
        "fsdp-averages-what-is-divided-already",
        "bert_dp/parallel/fsdp.py",
        "module.set_gradient_divide_factor(1.0)",
        "module.set_gradient_divide_factor(float(self.dp_size))",
        "tests/parity/test_matrix.py::test_cell[fsdp-adamw-n2-fp64-acc1]",
    ),
    Slip(
        "every-rank-keeps-a-gathered-state",
        "bert_dp/parallel/state.py",
        ".contiguous() for name, value in items if keep}",
        ".contiguous() for name, value in items}",
        "tests/unit/test_step.py",
    ),
    Slip(
        "norm-counts-shared-tensors-on-every-rank",
        "bert_dp/parallel/base.py",
        "            sums_N = sums_N * self._counts_N\n",
        "            pass\n",
        "tests/unit/test_tensor.py",
    ),
    # data
    Slip(
        "sketches-out-of-step",
        "bert_dp/data/build.py",
        "batch.sketches[i]) for i in np.flatnonzero(exact)",
        "batch.sketches[i]) for i in range(int(exact.sum()))",
        "tests/unit/test_corpus.py",
    ),
    Slip(
        "source-may-change-while-read",
        "bert_dp/data/build.py",
        "if before != [*map(inputs.identity, found)]:",
        "if False:",
        "tests/unit/test_corpus.py",
    ),
    # labelled examples
    Slip(
        "glue-quotes-enclose",
        "bert_dp/examples/table.py",
        '"quoting": csv.QUOTE_NONE',
        '"quoting": csv.QUOTE_MINIMAL',
        "tests/unit/test_examples.py",
    ),
    Slip(
        "glue-byte-order-mark",
        "bert_dp/examples/glue.py",
        'encoding="utf-8-sig"',
        'encoding="utf-8"',
        "tests/unit/test_examples.py",
    ),
    Slip(
        "glue-last-place-wins",
        "bert_dp/examples/glue.py",
        "[name for name in names if name not in files]",
        "names",
        "tests/unit/test_examples.py",
    ),
    Slip(
        "links-in-a-tar", "bert_dp/examples/glue.py", " and member.isreg()", "", "tests/unit/test_examples.py"
    ),
    Slip(
        "shorter-text-cut-first",
        "bert_dp/examples/prepare.py",
        "max(room // 2, room - len(first))",
        "room // 2",
        "tests/unit/test_examples.py",
    ),
    Slip(
        "labels-by-letter",
        "bert_dp/examples/table.py",
        "sorted(found, key=lambda name: (int(name), name))",
        "sorted(found)",
        "tests/unit/test_examples.py",
    ),
    Slip(
        "dev-share-counts-as-glue",
        "bert_dp/examples/prepare.py",
        "official = None if labelled.official is None else False",
        "official = labelled.official",
        "tests/unit/test_examples.py",
    ),
    Slip(
        "auc-of-one-logit",
        "bert_dp/evaluation/scores.py",
        "logits[:, 1] - logits[:, 0]",
        "logits[:, 1]",
        "tests/parity/test_scores.py",
    ),
    # checkpoints
    Slip(
        "files-not-synced",
        "bert_dp/training/checkpoint.py",
        "            _fsync(path)\n",
        "            pass\n",
        "tests/unit/test_checkpoint.py",
    ),
    Slip(
        "directory-not-synced",
        "bert_dp/training/checkpoint.py",
        "    _fsync(folder)\n",
        "",
        "tests/unit/test_checkpoint.py",
    ),
    Slip(
        "renamed-before-it-is-synced",
        "bert_dp/training/checkpoint.py",
        "        _fsync(temporary)\n",
        "",
        "tests/unit/test_checkpoint.py",
    ),
    Slip(
        "prune-forgets-a-good-one",
        "bert_dp/training/checkpoint.py",
        "if place >= keep and good >= min(keep, 2):",
        "if place >= keep:",
        "tests/unit/test_checkpoint.py",
    ),
    Slip(
        "two-writers-at-once",
        "bert_dp/training/checkpoint.py",
        "        self.wait()\n        start = time.perf_counter()",
        "        start = time.perf_counter()",
        "tests/unit/test_saving.py",
    ),
    Slip(
        "a-state-that-is-not-finite-is-saved",
        "bert_dp/training/checkpoint.py",
        "            if name is not None:\n",
        "            if False:\n",
        "tests/unit/test_saving.py",
    ),
    # the controlling process
    Slip(
        "grace-begins-again-at-each-poll",
        "launcher/run/processes.py",
        "deadline = deadline or time.monotonic() + start.grace_s",
        "deadline = time.monotonic() + start.grace_s",
        "tests/unit/test_ending.py",
    ),
    Slip(
        "a-failed-run-waits-the-grace",
        "launcher/run/processes.py",
        "deadline = min(deadline or math.inf, failed_s + KILL_AFTER_FAILURE_S)",
        "deadline = min(deadline or math.inf, failed_s + start.grace_s)",
        "tests/unit/test_ending.py",
    ),
    Slip(
        "a-silent-death-before-an-earlier-error",
        "launcher/watch/failure.py",
        "all(silent[0].time_ns < e",
        "any(silent[0].time_ns < e",
        "tests/unit/test_failure.py",
    ),
    Slip(
        "the-latest-error-is-the-cause",
        "launcher/watch/failure.py",
        "key=lambda e: (not e.issues, e.time_ns)",
        "key=lambda e: (not e.issues, -e.time_ns)",
        "tests/unit/test_failure.py",
    ),
    Slip(
        "reaper-kills-once",
        "bert_dp/files/reaper.py",
        "while (pids := marked(marks)) and time.monotonic() < end:",
        "for pids in (marked(marks),):",
        "tests/unit/test_ending.py",
    ),
    Slip(
        "restarts-without-end",
        "launcher/run/restarts.py",
        "idle = 0 if after[0] > before[0] else idle + 1",
        "idle = 0 if after[0] >= before[0] else idle + 1",
        "tests/unit/test_restarts.py",
    ),
    Slip(
        "who-is-ahead-holds-the-others-up",
        "launcher/watch/hangs.py",
        "for rank in last if last[rank] < newest",
        "for rank in last if last[rank] == newest",
        "tests/unit/test_hangs.py",
    ),
    Slip(
        "a-gpu-that-is-behind-is-overlooked",
        "launcher/watch/hangs.py",
        "for on_gpu in (False, True):",
        "for on_gpu in (False,):",
        "tests/unit/test_hangs.py",
    ),
    Slip(
        "waiting-for-data-told-as-a-step",
        "bert_dp/training/loop.py",
        '        trainer.heartbeat.enter("data")\n        batch',
        "        batch",
        "tests/unit/test_loop.py",
    ),
    Slip(
        "garbage-left-at-a-line",
        "bert_dp/training/loop.py",
        "    gc.collect()  #",
        "    pass  #",
        "tests/unit/test_loop.py",
    ),
    # figures of parallel runs
    Slip(
        "noise-interval-without-correction",
        "bert_dp/training/noise.py",
        "(BLOCKS / (BLOCKS - 1) / steps**2)",
        "(1 / steps**2)",
        "tests/unit/test_noise_estimate.py",
    ),
    Slip(
        "zero1-memory-by-world",
        "bert_dp/cost.py",
        "        optimizer /= shards\n",
        "        optimizer /= world_size\n",
        "tests/unit/test_cost.py",
    ),
    Slip(
        "one-gather-too-many",
        "launcher/plan/step_model.py",
        "(gather, backward, a - 1),",
        "(gather, backward, a),",
        "tests/unit/test_step_model.py",
    ),
    Slip(
        "blocks-ready-too-early",
        "launcher/plan/step_model.py",
        "ready_s=(i + 1) / (blocks + 1)",
        "ready_s=i / (blocks + 1)",
        "tests/unit/test_step_model.py",
    ),
    Slip(
        "tie-with-one-degree-too-many",
        "launcher/stats.py",
        "student(len(values) - 1)",
        "student(len(values))",
        "tests/unit/test_lr_search.py",
    ),
    Slip(
        "first-clock-of-any-rank",
        "bert_dp/training/distributed.py",
        "elapsed_s) if self._comm.world.rank == 0 else (0.0, 0.0)",
        "elapsed_s)",
        "tests/unit/test_dist.py",
    ),
    # distillation
    Slip(
        "soft-labels-without-temperature",
        "bert_dp/tasks/distill.py",
        "distill.temperature**2 * divergence",
        "divergence",
        "tests/unit/test_distill.py",
    ),
    Slip(
        "labels-of-other-copies",
        "bert_dp/tasks/distill.py",
        "answers(self._logits_NL[-copies:], self._kind)",
        "answers(self._logits_NL[:copies], self._kind)",
        "tests/unit/test_distill.py",
    ),
    Slip(
        "teachers-logits-in-order-of-length",
        "bert_dp/evaluation/prediction.py",
        "np.concatenate(outputs)[np.argsort(np.concatenate(together))]",
        "np.concatenate(outputs)",
        "tests/unit/test_distill.py",
    ),
    Slip(
        "reversed-with-padding",
        "bert_dp/model/bilstm.py",
        "reverse_BS = (length_B[:, None] - 1 - place_S)",
        "reverse_BS = (ids_BS.shape[1] - 1 - place_S)[None]",
        "tests/unit/test_distill.py",
    ),
    Slip(
        "copies-without-the-seed",
        "bert_dp/examples/augment.py",
        'Random(f"{seed}/{example}/{copy}")',
        'Random(f"{example}/{copy}")',
        "tests/unit/test_distill.py",
    ),
    Slip(
        "copies-that-repeat-an-example",
        "bert_dp/examples/augment.py",
        "for row in copies if row.texts not in seen}",
        "for row in copies}",
        "tests/unit/test_distill.py",
    ),
    # encoders of transformers as the beginning of a run
    Slip(
        "hf-roberta-positions-from-the-padding",
        "bert_dp/config/hf.py",
        '"position_offset": pad + 1 if',
        '"position_offset": pad if',
        "tests/unit/test_hf_encoders.py",
    ),
    Slip(
        "hf-any-tokenizer-fits",
        "bert_dp/config/hf.py",
        "if sha is not None and (not own.is_file() or",
        "if sha is not None or (not own.is_file() or",
        "tests/unit/test_hf_encoders.py",
    ),
    Slip(
        "hf-key-and-value-swapped",
        "bert_dp/model/hf.py",
        '{"q": "query", "k": "key", "v": "value"}',
        '{"q": "query", "k": "value", "v": "key"}',
        "tests/unit/test_hf_encoders.py",
    ),
    Slip(
        "hf-missing-tensors-are-empty",
        "bert_dp/model/hf.py",
        "            missing.append(name)",
        "            pass",
        "tests/unit/test_hf_encoders.py",
    ),
    Slip(
        "hf-window-without-its-edges",
        "bert_dp/model/bert.py",
        "distance_SS <= self.reach",
        "distance_SS < self.reach",
        "tests/unit/test_hf_encoders.py",
    ),
    Slip(
        "hf-local-layers-turn-as-global-ones",
        "bert_dp/model/bert.py",
        '"local_rotary_2SD": config.local_rope_theta',
        '"local_rotary_2SD": config.rope_theta',
        "tests/unit/test_hf_encoders.py",
    ),
    Slip(
        "hf-decoder-bias-on-every-rank",
        "bert_dp/model/bert.py",
        '            "head.decoder_bias": (0, 1),\n',
        "",
        "tests/parity/test_hf_encoders.py",
    ),
)


def first_failure(tests: Sequence[str], timeout_s: float, slip: Slip | None = None) -> str | None:
    """What pytest says of the first test that fails in a copy of the tree, with `slip` in it if given; None
    when all pass. A run that does not end counts as a failure.
    """
    with tempfile.TemporaryDirectory(prefix="slip-") as directory:
        copy = Path(directory)
        copy_tree(copy)
        if slip is not None:
            file = copy / slip.file
            file.write_text(file.read_text().replace(slip.old, slip.new))
        try:
            done = subprocess.run(
                [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *tests],
                cwd=copy,
                capture_output=True,
                text=True,
                check=False,
                timeout=timeout_s,
                env={**os.environ, "PYTHONPATH": str(copy)},
            )
        except subprocess.TimeoutExpired:
            return f"no end in {timeout_s:.0f} s"
    if done.returncode not in (0, 1):
        raise RuntimeError(f"{slip.name if slip else tests}: {done.stdout[-2000:]}{done.stderr[-2000:]}")
    failed = [line for line in done.stdout.splitlines() if line.startswith(("FAILED ", "ERROR "))]
    return (failed or ["a test failed"])[0] if done.returncode else None


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("names", nargs="*", help="default: all")
    parser.add_argument("--list", action="store_true", help="names and files, nothing is run")
    parser.add_argument("--timeout", type=float, default=3600.0, help="seconds for the tests of one slip")
    arguments = parser.parse_args()
    if unknown := set(arguments.names) - {slip.name for slip in SLIPS}:
        parser.error(f"no such slip: {', '.join(sorted(unknown))}; --list shows them")
    chosen = [slip for slip in SLIPS if not arguments.names or slip.name in arguments.names]
    if arguments.list:
        for slip in chosen:
            print(f"{slip.name}: {slip.file}")
        return 0
    tests = list(dict.fromkeys(test for slip in chosen for test in slip.tests.split()))
    if (failed := first_failure(tests, arguments.timeout * len(chosen))) is not None:
        print(f"without any slip: {failed}")
        return 1
    survived = 0
    for slip in chosen:
        start = time.monotonic()
        seen = first_failure(slip.tests.split(), arguments.timeout, slip)
        survived += seen is None
        how = "SURVIVED" if seen is None else f"noticed  {seen}"
        print(f"{slip.name:45} {time.monotonic() - start:6.0f} s  {how}", flush=True)
    return 1 if survived else 0


if __name__ == "__main__":
    sys.exit(main())
