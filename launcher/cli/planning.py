"""Define the verbs `plan`, `plan fit` and `plan scaling`."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal

import typer
from typer import Option

from bert_dp.config import ConfigError, Issue
from launcher.cli import options as opt

OUT = Path("planned.yaml")


def plan(
    context: typer.Context,
    hours: Annotated[float | None, opt.parsed(opt.hours, "TIME", "Time budget: 24 (hours), 90m, 2d.")] = None,
    dollars: Annotated[float | None, Option(min=1e-3, max=1e9, help="Budget in dollars.")] = None,
    kwh: Annotated[float | None, Option(min=1e-3, max=1e9, help="Budget in kWh.")] = None,
    gpu: Annotated[
        str | None, Option(help="GPU, such as H100-SXM-80G; default: the device of --frontier or --from.")
    ] = None,
    gpus: Annotated[int, Option("--nproc", min=1, max=1024, help="Number of devices on one node.")] = 1,
    config: Annotated[
        str, Option(help="Configuration that sets the tokenizer, data, batch, optimizer and kind of model.")
    ] = "crammed-bert",
    frontier: Annotated[Path | None, Option(help="frontier.json from `bert-dp plan fit`.")] = None,
    from_: Annotated[
        Path | None,
        Option("--from", help="Run directory or scaling.json that holds the measured speed of --config."),
    ] = None,
    tokens_per_parameter: Annotated[
        float | None, Option(min=0.1, max=1e6, help="Training tokens per parameter; replaces --frontier.")
    ] = None,
    keep_model: Annotated[bool, Option("--keep-model", help="Keep the model of --config as it is.")] = False,
    tokens_available: Annotated[
        float | None, Option(min=1, max=1e15, help="Tokens in your data, to compute the number of epochs.")
    ] = None,
    precision: Annotated[Literal["bf16", "fp16", "fp32"], Option(help="Precision on GPUs.")] = "bf16",
    price: Annotated[float | None, Option(min=0, max=1e6, help="Dollars per device hour.")] = None,
    watts: Annotated[float | None, Option(min=0.1, max=1e6, help="Mean power per device, in watts.")] = None,
    pue: Annotated[float, Option(min=1, max=10, help="Data-center power divided by machine power.")] = 1.0,
    grid: Annotated[str | None, Option(help="Region whose CO2 per kWh applies: world, France, ...")] = None,
    g_per_kwh: Annotated[float | None, Option(min=0, max=1e4, help="Grams of CO2 per kWh.")] = None,
    out: Annotated[Path, Option(help="Configuration file to write.")] = OUT,
    page: Annotated[Path | None, Option(help="HTML file to write: a calculator with sliders.")] = None,
    json: opt.Json = False,
) -> int:
    """Plan model size and tokens for a budget; predict the loss."""
    if context.invoked_subcommand is not None:
        return 0
    from launcher import results
    from launcher.plan import budget
    from launcher.report.page import show_report

    names = [field.name for field in dataclasses.fields(budget.BudgetOptions)]
    options = budget.BudgetOptions(**{name: context.params[name] for name in names})
    found, written = budget.plan_budget(options, out, page)
    if json:
        typer.echo(results.to_json(found), nl=False)
    else:
        show_report(opt.console(), budget.budget_page(found, written), page)
    return 0


def plan_fit(
    runs: Annotated[
        list[Path] | None, typer.Argument(help="Directories of completed pretraining runs.")
    ] = None,
    table: Annotated[
        Path | None, Option(help="CSV file with budget_flops, parameters, loss and, optionally, tokens.")
    ] = None,
    out: Annotated[Path, Option(help="File to write.")] = Path("frontier.json"),
    json: opt.Json = False,
) -> int:
    """Fit a scaling law for the loss to completed runs."""
    from launcher import results
    from launcher.plan import budget, fit
    from launcher.report.page import show_result

    if (table is None) == (not runs):
        raise ConfigError([Issue("RUNS", "missing", "pass either runs or --table", None, "--table")])
    if issues := budget.folder_issues("--out", out):
        raise ConfigError(issues)
    found = fit.fit_runs(fit.read_table(table)) if table else fit.fit_runs(*fit.read_runs(runs or []))
    results.write(out, found)
    show_result(opt.console(), found, lambda: fit.fit_page(found), as_json=json)
    return 0


def plan_scaling(
    nproc: Annotated[
        Sequence[int], opt.parsed(opt.counts, "N,...", "GPU counts: 1,2,4,8 (default) or 1..64 (doubling).")
    ] = (1, 2, 4, 8),
    from_: Annotated[Path | None, Option("--from", help="scaling.json from `bert-dp scale`.")] = None,
    model: Annotated[str | None, Option(help="Model: bert-base, bert-large or a configuration.")] = None,
    seq_per_s: Annotated[
        float | None, Option(min=1e-3, help="Sequences/s measured on one GPU; replaces --from.")
    ] = None,
    micro: Annotated[int | None, Option(min=1, max=10**6, help="Micro batch used for --seq-per-s.")] = None,
    gpu: Annotated[
        str | None, Option(help="GPU used for --seq-per-s (A100-80G, ...), to compute the optimizer's time.")
    ] = None,
    link: Annotated[
        str | None, Option(help="Link within a node: nvlink4, pcie4, ...; default: as measured.")
    ] = None,
    inter: Annotated[str | None, Option(help="Link between nodes: ib-ndr, ethernet100, ...")] = None,
    gpus_per_node: Annotated[
        int | None, Option(min=1, help="GPUs per node; default: 8; without --link and --inter: all GPUs.")
    ] = None,
    nics: Annotated[int, Option(min=1, help="NICs per node.")] = 1,
    engine: Annotated[Literal["ddp", "zero1", "fsdp"], Option(help="Engine to predict for.")] = "ddp",
    tensor: opt.Tensor = (1,),
    accumulation: Annotated[
        Sequence[int], opt.parsed(opt.counts, "N,...", "Micro batches per step; default: as measured.")
    ] = (),
    json: opt.Json = False,
) -> int:
    """Predict the step time and efficiency of N GPUs from the profile of one GPU."""
    from launcher.plan import scaling
    from launcher.report.page import show_result

    source = scaling.find_source(from_, model, seq_per_s, micro, gpu, (*accumulation, 1)[0])
    spec = scaling.PlanSpec(
        tuple(nproc), link, inter, gpus_per_node, nics, engine, tuple(tensor), tuple(accumulation)
    )
    prediction = scaling.predict_scaling(source, spec)
    config = model if from_ is None and model not in scaling.MODELS else None
    show_result(opt.console(), prediction, lambda: scaling.plan_page(prediction, config), as_json=json)
    return 0
