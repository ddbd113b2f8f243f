"""What 8 bits and bf16 cost a finetuned run: its dev scores as it is, and as each export computes them.

    python benchmarks/export_scores.py RUN... [--forms onnx,onnx-int8,aoti-bf16] [--json FILE]

RUN is a finetuned run that has kept its checkpoint (`bert-dp finetune`; a trial of `eval glue` keeps it only
where another task starts from it), with the examples that it was finetuned on still prepared. It is exported
by `bert-dp export` in each form, and every labelled split but train is predicted as
`bert-dp predict` does: first by the run in fp32, then by each exported directory. The drop is the run's score
less the export's, in points (hundredths of the metric).
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import numpy as np

from benchmarks import records
from benchmarks.export_speed import PACKAGES
from benchmarks.turns import aligned, tell
from bert_dp.config import Config, ConfigError, ExamplesManifest, Issue, read_examples
from bert_dp.config.manifest import TRAIN
from bert_dp.evaluation import prediction
from bert_dp.evaluation.scores import score
from bert_dp.examples.table import Examples
from bert_dp.exporting.source import open_run
from bert_dp.measure.matmul_peak import use_all_cores

FORMS = {
    "onnx": ("onnx",),
    "onnx-int8": ("onnx", "--int8"),
    "aoti": ("aoti",),
    "aoti-bf16": ("aoti", "--bf16"),
}
DEFAULT = "onnx,onnx-int8,aoti-bf16"
GOAL_POINTS = 0.5  # the largest drop


def parse() -> argparse.Namespace:
    parser = records.make_parser(__doc__, "--date", "--json")
    add = parser.add_argument
    add("runs", type=Path, nargs="+", metavar="RUN")
    add("--forms", default=DEFAULT, help=f"of {', '.join(FORMS)} (default: %(default)s)")
    o = parser.parse_args()
    o.forms = records.check_names(parser, "--forms", o.forms, FORMS)
    if len({run.name for run in o.runs}) < len(o.runs):
        parser.error("RUN: two have the same name, by which the record tells them apart; rename one")
    return o


def measure(run: Path, forms: Sequence[str]) -> dict[str, Any]:
    """The scores of a run by each form. Raises ConfigError for one that is not finetuned."""
    source = open_run(run, encoder=False)
    if source.kind != "classifier":
        hint = "name one that `bert-dp finetune` has made"
        raise ConfigError([Issue(str(run), "unsupported", "is not a finetuned run", hint=hint)])
    config: Config = source.config
    manifest = read_examples(Path(config.data.path or ""))
    scores = {"run": scores_of(run, config, manifest)}
    with tempfile.TemporaryDirectory(prefix="export-scores-") as scratch:
        for form in forms:
            out = Path(scratch) / form
            kind, *options = FORMS[form]
            words = ["export", kind, str(run), "--out", str(out), *options]
            subprocess.run([sys.executable, "-m", "launcher", *words], check=True)
            scores[form] = scores_of(out, config, manifest)
            tell(f"{run.name}: {form} is measured")
    return {
        "task": manifest.task,
        "official": manifest.official,
        "examples": {split: manifest.splits[split].examples for split in splits_of(manifest)},
        "scores": scores,
        "drop_points": {
            form: {name: 100 * (scores["run"][name] - value) for name, value in scores[form].items()}
            for form in forms
        },
    }


def splits_of(manifest: ExamplesManifest) -> Iterator[str]:
    """Those that are scored."""
    return (name for name, split in manifest.splits.items() if split.has_labels and name != TRAIN)


def scores_of(place: Path, config: Config, manifest: ExamplesManifest) -> dict[str, float]:
    """split/metric -> score, of a run or of an exported directory."""
    source = prediction.open_predictor(place)
    compute, encoder = source.compute, source.encoder
    scores: dict[str, float] = {}
    for split in splits_of(manifest):
        examples = Examples.open(Path(config.data.path or ""), manifest, split)
        rows = [examples.tokens(i) for i in range(len(examples))]
        most = prediction.BATCH_TOKENS[source.device.type]
        batches = list(prediction.batches(np.array([len(row) for row in rows]), most))
        pad = encoder.special["pad"]
        outputs = [prediction.outputs_of(compute, [rows[i] for i in index], pad) for index in batches]
        logits_NL = np.concatenate(outputs)[np.argsort(np.concatenate(batches))]
        measured = score(manifest.metrics, config.finetune.kind, logits_NL, np.asarray(examples.labels))
        scores |= {f"{split}/{metric}": value for metric, value in measured.items()}
    return scores


def lines_of(result: dict[str, Any]) -> Iterator[str]:
    forms = result["forms"]
    rows = [["run", "task", "score", "run, fp32", *forms, *(f"drop {form}" for form in forms)]]
    for name, run in result["runs"].items():
        for metric, own in run["scores"]["run"].items():
            scores = [f"{100 * run['scores'][form][metric]:.2f}" for form in forms]
            drops = [f"{run['drop_points'][form][metric]:+.2f}" for form in forms]
            rows.append([name, run["task"], metric, f"{100 * own:.2f}", *scores, *drops])
    yield from aligned(rows)
    for form, most in result["largest_drop_points"].items():
        verdict = "within" if most <= GOAL_POINTS else "beyond"
        yield f"{form}: largest drop {most:+.2f} points, {verdict} the goal of {GOAL_POINTS}"


def main() -> None:
    o = parse()
    runs, o.runs = o.runs, [run.name for run in o.runs]  # no path of this machine in a record
    use_all_cores()
    result: dict[str, Any] = {
        "environment": records.environment_of(o, PACKAGES),
        "forms": o.forms,
        "goal_points": GOAL_POINTS,
        "runs": {},
    }
    try:
        for run in runs:
            result["runs"][run.name] = measure(run, o.forms)
    except ConfigError as error:
        sys.stderr.write("".join(f"error: {issue}\n" for issue in error.issues))
        sys.exit(2)
    result["largest_drop_points"] = {
        form: max(drop for run in result["runs"].values() for drop in run["drop_points"][form].values())
        for form in o.forms
    }
    print("\n".join(lines_of(result)))
    records.write(o.json, result)


if __name__ == "__main__":
    main()
