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
    tests: str
    """Paths or pytest ids that are to notice, by blanks."""
    old: str
    new: str


TABLE: dict[tuple[str, str], dict[str, tuple[str, str]]] = {
    # held-out loss
    (
        "bert_dp/tasks/__init__.py",
        "tests/unit/test_loop.py::test_the_held_out_loss_counts_each_replicas_sequences_once",
    ): {
        "heldout-rows-of-a-replica": ("(values)[:: self.tensor]", "(values)[: self.dp_size]"),
        "heldout-counted-by-every-rank-of-a-replica": ("(values)[:: self.tensor]", "(values)"),
    },
    ("bert_dp/training/loop.py", "tests/unit/test_loop.py"): {
        "heldout-with-dropout": ("model = trainer.bare_model.eval()", "model = trainer.bare_model"),
        "heldout-leaves-dropout-off": ("    model.train()\n    return measured", "    return measured"),
        "evaluation-without-a-pause": (
            "            with meter.paused():\n                evaluate_and_write",
            "            if True:\n                evaluate_and_write",
        ),
        "waiting-for-data-told-as-a-step": ('        trainer.heartbeat.enter("data")\n        ', "        "),
        "garbage-left-at-a-line": ("    gc.collect()  #", "    pass  #"),
    },
    ("bert_dp/data/stream.py", "tests/unit/test_data.py"): {
        "heldout-padding-counted": ("int(real_B.sum()) * num_masked", "len(real_B) * num_masked")
    },
    # metrics
    ("bert_dp/training/metrics.py", "tests/unit/test_meter.py"): {
        "loss-of-every-rank-of-a-replica": ("ranks[:: self._layout.tensor, 0]", "ranks[:, 0]"),
        "mfu-times-n": ('"mfu": per_gpu * flops / peak', '"mfu": tokens_per_s * flops / peak'),
        "peak-memory-of-rank-0": ("ranks[:, 1].max().item()", "ranks[0, 1].item()"),
        "pauses-counted-into-a-steps-time": ("+= time.perf_counter() - start", "+= 0.0"),
        "pauses-counted-into-the-next-step": ("- start\n        self.timers.restart()", "- start"),
    },
    ("launcher/tune/batch.py", "tests/unit/test_tune_batch.py"): {
        "pilot-memory-of-rank-0": ("= repeat.memory_gib", "= repeat.memory_gib[:1]")
    },
    ("bert_dp/training/summary.py", "tests/unit/test_loop.py"): {
        "metrics-left-out-of-the-summary": ("metrics=trainer.meter.measured", "metrics={}")
    },
    # one step
    ("bert_dp/parallel/base.py", "tests/unit/test_step.py"): {
        "overflow-of-one-part-not-told": ("local.copy_(found_inf)", "pass"),
        "norm-not-finite-steps-all-the-same": (
            "optimizer.found_inf = found_inf",
            "optimizer.found_inf = torch.zeros_like(found_inf)",
        ),
        "clipped-below-the-limit-too": ("(norm / max_norm).clamp(min=1.0)", "(norm / max_norm)"),
    },
    ("bert_dp/training/loop.py", "tests/parity/test_matrix.py::test_cell[ddp-adamw-n2-fp64-acc1]"): {
        "mean-over-a-replicas-own-tokens": (
            "(state.samples, state.global_batch)",
            "(state.samples, state.global_batch // trainer.layout.dp)",
        )
    },
    ("bert_dp/tasks/finetune.py", "tests/unit/test_classifier.py"): {
        "dropout-by-place-in-the-batch": ("4, epoch_B, index_B)", "4, np.arange(len(index_B)))")
    },
    # engines
    ("bert_dp/parallel/ddp.py", "tests/unit/test_step.py"): {
        "fp16-cast-before-the-division": (
            "(buffer / group.size()).to(dtype)",
            "buffer.to(dtype) / group.size()",
        )
    },
    ("bert_dp/parallel/ddp.py", "tests/parity/test_matrix.py::test_cell[ddp-adamw-n2-fp64-acc1]"): {
        "ddp-sum-divided-by-the-replicas": ("whole = loss * self.dp_size", "whole = loss")
    },
    ("bert_dp/parallel/zero1.py", "tests/unit/test_step.py"): {
        "owners-by-count": ("load[owner] += sizes[name]", "load[owner] += 1")
    },
    ("bert_dp/parallel/zero1.py", "tests/parity/test_matrix.py::test_cell[zero1-adamw-n2-fp64-acc1]"): {
        "zero1-gradients-never-zeroed": ("            bucket.gradients.zero_()\n", "")
    },
    ("bert_dp/parallel/zero1.py", "tests/parity/test_matrix.py::test_cell[zero1-muon-n2-fp32-acc3]"): {
        "zero1-reduces-the-first-micro-batch-alone": ("if self._last:\n", "if True:\n")
    },
    ("bert_dp/parallel/fsdp.py", "tests/parity/test_matrix.py::test_cell[fsdp-adamw-n2-fp64-acc1]"): {
        "fsdp-averages-what-is-divided-already": (
            "set_gradient_divide_factor(1.0)",
            "set_gradient_divide_factor(float(self.dp_size))",
        )
    },
    ("bert_dp/parallel/state.py", "tests/unit/test_step.py"): {
        "every-rank-keeps-a-gathered-state": ("in items if keep}", "in items}")
    },
    ("bert_dp/parallel/base.py", "tests/unit/test_tensor.py"): {
        "norm-counts-shared-tensors-on-every-rank": ("sums_N = sums_N * self._counts_N\n", "pass\n")
    },
    # data
    ("bert_dp/data/build.py", "tests/unit/test_corpus.py"): {
        "sketches-out-of-step": ("in np.flatnonzero(exact)", "in range(int(exact.sum()))"),
        "source-may-change-while-read": ("if before != [*map(inputs.identity, found)]:", "if False:"),
    },
    # labelled examples
    ("bert_dp/examples/table.py", "tests/unit/test_examples.py"): {
        "glue-quotes-enclose": ('"quoting": csv.QUOTE_NONE', '"quoting": csv.QUOTE_MINIMAL'),
        "labels-by-letter": ("sorted(found, key=lambda name: (int(name), name))", "sorted(found)"),
    },
    ("bert_dp/examples/glue.py", "tests/unit/test_examples.py"): {
        "glue-byte-order-mark": ('encoding="utf-8-sig"', 'encoding="utf-8"'),
        "glue-last-place-wins": ("[name for name in names if name not in files]", "names"),
        "links-in-a-tar": (" and member.isreg()", ""),
    },
    ("bert_dp/examples/prepare.py", "tests/unit/test_examples.py"): {
        "shorter-text-cut-first": ("max(limit // 2, limit - len(first))", "limit // 2"),
        "dev-share-counts-as-glue": ("None if labelled.official is None else False", "labelled.official"),
    },
    ("bert_dp/evaluation/scores.py", "tests/parity/test_scores.py"): {
        "auc-of-one-logit": ("logits[:, 1] - logits[:, 0]", "logits[:, 1]")
    },
    # checkpoints
    ("bert_dp/training/checkpoint.py", "tests/unit/test_checkpoint.py"): {
        "files-not-synced": ("            _fsync(path)\n", "            pass\n"),
        "directory-not-synced": ("    _fsync(folder)\n", ""),
        "renamed-before-it-is-synced": ("        _fsync(temporary)\n", ""),
        "prune-forgets-a-good-one": ("if place >= keep and good >= min(keep, 2):", "if place >= keep:"),
    },
    ("bert_dp/training/checkpoint.py", "tests/unit/test_saving.py"): {
        "two-writers-at-once": ("        self.wait()\n        start = time.", "        start = time."),
        "a-state-that-is-not-finite-is-saved": ("            if name is not None:", "            if False:"),
    },
    # the controlling process
    ("launcher/run/processes.py", "tests/unit/test_ending.py"): {
        "grace-begins-again-at-each-poll": ("deadline or time.monotonic() +", "time.monotonic() +"),
        "a-failed-run-waits-the-grace": ("failed_s + KILL_AFTER_FAILURE_S", "failed_s + start.grace_s"),
    },
    ("launcher/watch/failure.py", "tests/unit/test_failure.py"): {
        "a-silent-death-before-an-earlier-error": ("all(silent[0].time_ns < e", "any(silent[0].time_ns < e"),
        "the-latest-error-is-the-cause": ("(not e.issues, e.time_ns)", "(not e.issues, -e.time_ns)"),
    },
    ("bert_dp/files/reaper.py", "tests/unit/test_ending.py"): {
        "reaper-kills-once": (
            "while (pids := marked(marks)) and time.monotonic() < end:",
            "for pids in (marked(marks),):",
        )
    },
    ("launcher/run/restarts.py", "tests/unit/test_restarts.py"): {
        "restarts-without-end": ("if after[0] > before[0] else", "if after[0] >= before[0] else")
    },
    ("launcher/watch/hangs.py", "tests/unit/test_hangs.py"): {
        "who-is-ahead-holds-the-others-up": ("if last[rank] < newest", "if last[rank] == newest"),
        "a-gpu-that-is-behind-is-overlooked": ("for on_gpu in (False, True):", "for on_gpu in (False,):"),
    },
    # figures of parallel runs
    ("bert_dp/training/noise.py", "tests/unit/test_noise_estimate.py"): {
        "noise-interval-without-correction": ("(BLOCKS / (BLOCKS - 1) / steps**2)", "(1 / steps**2)")
    },
    ("bert_dp/cost.py", "tests/unit/test_cost.py"): {
        "zero1-memory-by-world": ("        optimizer /= shards\n", "        optimizer /= world_size\n")
    },
    ("launcher/plan/step_model.py", "tests/unit/test_step_model.py"): {
        "one-gather-too-many": ("(gather, backward, a - 1),", "(gather, backward, a),"),
        "blocks-ready-too-early": ("ready_s=(i + 1) / (blocks + 1)", "ready_s=i / (blocks + 1)"),
    },
    ("launcher/stats.py", "tests/unit/test_lr_search.py"): {
        "tie-with-one-degree-too-many": ("student(len(values) - 1)", "student(len(values))")
    },
    ("bert_dp/training/distributed.py", "tests/unit/test_dist.py"): {
        "first-clock-of-any-rank": ("elapsed_s) if self._comm.world.rank == 0 else (0.0, 0.0)", "elapsed_s)")
    },
    # distillation
    ("bert_dp/tasks/distill.py", "tests/unit/test_distill.py"): {
        "soft-labels-without-temperature": ("distill.temperature**2 * divergence", "divergence"),
        "labels-of-other-copies": ("answers(self._logits_NL[-copies:]", "answers(self._logits_NL[:copies]"),
    },
    ("bert_dp/evaluation/prediction.py", "tests/unit/test_distill.py"): {
        "teachers-logits-in-order-of-length": ("[np.argsort(np.concatenate(together))]", "")
    },
    ("bert_dp/model/bilstm.py", "tests/unit/test_distill.py"): {
        "reversed-with-padding": ("length_B[:, None] - 1 - index_S)", "ids_BS.shape[1] - 1 - index_S)[None]")
    },
    ("bert_dp/examples/augment.py", "tests/unit/test_distill.py"): {
        "copies-without-the-seed": ('Random(f"{seed}/{example}/{copy}")', 'Random(f"{example}/{copy}")'),
        "copies-that-repeat-an-example": ("for row in copies if row.texts not in seen", "for row in copies"),
    },
    # encoders of transformers as the beginning of a run
    ("bert_dp/config/hf.py", "tests/unit/test_hf_encoders.py"): {
        "hf-roberta-positions-from-the-padding": ("pad + 1 if", "pad if"),
        "hf-any-tokenizer-fits": ("is not None and (not own", "is not None or (not own"),
    },
    ("bert_dp/model/hf.py", "tests/unit/test_hf_encoders.py"): {
        "hf-key-and-value-swapped": ('"k": "key", "v": "value"', '"k": "value", "v": "key"'),
        "hf-missing-tensors-are-empty": ("            missing.append(name)", "            pass"),
    },
    ("bert_dp/model/bert.py", "tests/unit/test_hf_encoders.py"): {
        "hf-window-without-its-edges": ("distance_SS <= self.reach", "distance_SS < self.reach"),
        "hf-local-layers-turn-as-global-ones": ("config.local_rope_theta", "config.rope_theta"),
    },
    ("bert_dp/model/bert.py", "tests/parity/test_hf_encoders.py"): {
        "hf-decoder-bias-on-every-rank": ('            "head.decoder_bias": (0, 1),\n', "")
    },
}
"""(File, tests that are to notice) -> name of a slip -> text in the file, what stands in its place."""
SLIPS = [Slip(name, *key, *texts) for key, slips in TABLE.items() for name, texts in slips.items()]


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
