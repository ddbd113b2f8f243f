"""Define the verbs `eval glue`, `eval mlm`, `predict` and `export`."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from bert_dp.config import ConfigError, Issue
from bert_dp.files.run_facts import ExportFormat, ExportPrecision
from launcher.cli import options as opt


def eval_glue(
    run: opt.Run,
    words: opt.Settings = None,
    data: opt.GlueData = None,
    tasks: Annotated[
        Sequence[str], opt.parsed(opt.words, "NAME,...", "GLUE tasks; default: all tasks in --data.")
    ] = (),
    seeds: Annotated[int, Option(min=1, max=100, help="Runs per task; their median score is reported.")] = 5,
    init: opt.Init = "checkpoint",
    nproc: Annotated[int, Option(min=1, help="Ranks per run.")] = 1,
    launcher: opt.Launcher = "torchrun",
    out: opt.Out = None,
    dry_run: opt.DryRun = False,
    json: opt.Json = False,
    set_: opt.Set = None,
) -> int:
    """Finetune a run on GLUE tasks with several seeds.

    Each score is the median dev-set score over the seeds. The score of a constant prediction is shown next
    to it. The results are written to glue.json and an HTML page.
    """
    from launcher.evaluate import glue
    from launcher.evaluate.glue_scores import GlueOptions

    settings = opt.settings_after_run(words, set_)
    if not data:
        raise ConfigError([Issue("--data", "missing", "pass the folder or archive with the GLUE files")])
    options = GlueOptions(tasks=list(tasks), seeds=seeds, init=init, ranks=nproc, launcher=launcher)
    return glue.evaluate(run, settings, options, data, opt.measuring(out, dry_run, json))


def eval_mlm(
    run: opt.Run,
    texts: Annotated[
        list[str],
        Argument(metavar="TEXT...", help=f"{opt.TEXTS} Runs to compare with RUN go before the texts."),
    ],
    documents: Annotated[str, Option(help="Document separator in plain text: line or blank_line.")] = "line",
    format: opt.Format = "auto",
    text_key: opt.TextKey = "text",
    precision: opt.Precision = "auto",
    json: opt.Json = False,
) -> int:
    """Measure the held-out loss of one or more runs on any text.

    The report gives the loss per token, and the loss on masked whole words in bits per byte. Only the latter
    is comparable across vocabularies. The confidence intervals reflect the variation between documents.
    """
    from launcher.evaluate import text_loss

    options = {"documents": documents, "source_format": format, "text_field": text_key}
    return text_loss.evaluate(run, texts, options, precision=precision, as_json=json, console=opt.console())


def predict(
    run: opt.Run,
    file: Annotated[
        str, Argument(metavar="FILE", help="Lines of text, a table (CSV, TSV, JSONL, Parquet) or hub:NAME.")
    ],
    text: Annotated[
        str | None, Option(metavar="COLUMN", help="Text column of a table; default: text.")
    ] = None,
    text_pair: Annotated[str | None, Option(metavar="COLUMN", help="Column of a pair's second text.")] = None,
    out: Annotated[Path | None, Option(help="File to write; default: stdout.")] = None,
    precision: opt.Precision = "auto",
) -> None:
    """Write predictions for a file, one JSON line per example.

    A finetuned run predicts labels with their probabilities, or a score. For a pretrained run, the output
    is the encoding of each example: the mean of its hidden states.
    """
    from bert_dp.evaluation.prediction import predict_file

    predict_file(run, file, text=text, text_pair=text_pair, out=out, precision=precision)


def _export(form: ExportFormat, run: Path, out: Path, encoder: bool, precision: ExportPrecision) -> int:
    from launcher.evaluate import export

    return export.export(form, run, out, encoder=encoder, precision=precision, console=opt.console())


def export_hf(run: opt.Run, out: opt.ExportOut, encoder: opt.WithoutHead = False) -> int:
    """Export a run to a directory that transformers can load.

    The model loads without bert-dp's code, as ModernBERT, BERT, RoBERTa, RobertaPreLayerNorm or EuroBERT,
    depending on the run's position and norm settings. The tokenizer and a model card are written too.
    """
    return _export("hf", run, out, encoder, "fp32")


def export_onnx(
    run: opt.Run,
    out: opt.ExportOut,
    encoder: opt.WithoutHead = False,
    int8: Annotated[bool, Option("--int8", help="Apply dynamic int8 quantization.")] = False,
) -> int:
    """Export a run to model.onnx.

    The model accepts any batch size, and any sequence length up to the run's.
    """
    return _export("onnx", run, out, encoder, "int8" if int8 else "fp32")


def export_aoti(
    run: opt.Run,
    out: opt.ExportOut,
    encoder: opt.WithoutHead = False,
    bf16: Annotated[bool, Option("--bf16", help="Use bf16 weights and matrix products.")] = False,
) -> int:
    """Export a run to model.pt2, compiled by AOTInductor.

    The file runs only on the kind of processor for which it was compiled. Python and C++ can load it.
    """
    return _export("aoti", run, out, encoder, "bf16" if bf16 else "fp32")


def export_check(
    directory: Annotated[
        Path, Argument(metavar="DIR", show_default=False, help="Directory written by `bert-dp export`.")
    ],
    run: Annotated[
        Path | None, Option(metavar="RUN", help="Source run; default: search ./, runs/ and DIR's parent.")
    ] = None,
    json: opt.Json = False,
) -> int:
    """Compare an exported model with the run from which it was exported.

    Both models compute the outputs for batches of several sizes and lengths. The exported model is loaded in
    a process without bert-dp's code. The exit code is 1 if the outputs differ.
    """
    from launcher.evaluate import export

    return export.check(directory, run, as_json=json, console=opt.console())
