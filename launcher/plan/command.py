"""`bert-dp plan`: one verb, one call."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from launcher.options import Json, console

plan_app = typer.Typer(
    no_args_is_help=True, rich_markup_mode=None, help="What a run would take, before it is bought."
)


@plan_app.callback()
def _verbs() -> None:
    pass


@plan_app.command("scaling")
def plan_scaling(
    gpus: Annotated[str, typer.Option(help="1,2,4,8 or 1..1024 (doubling).")] = "1..8",
    from_: Annotated[
        Path | None, typer.Option("--from", help="scaling.json or profile.json of a measured run.")
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(help="bert-base, bert-large or a configuration: without --from, or its shape."),
    ] = None,
    seq_per_s: Annotated[float | None, typer.Option(help="Without --from: sequences/s on one GPU.")] = None,
    micro: Annotated[int | None, typer.Option(help="Without --from: its micro batch.")] = None,
    gpu: Annotated[
        str | None, typer.Option(help="Without --from: A100-80G, ...; for the optimizer's time.")
    ] = None,
    link: Annotated[
        str | None, typer.Option(help="Within a node: nvlink4, pcie4, ...; default: as measured.")
    ] = None,
    inter: Annotated[str | None, typer.Option(help="Between nodes: ib-ndr, ethernet100, ...")] = None,
    gpus_per_node: Annotated[int | None, typer.Option(help="Default: 8.")] = None,
    nics: Annotated[int, typer.Option(help="NICs per node.")] = 1,
    engine: Annotated[str, typer.Option(help="ddp, zero1 or fsdp.")] = "ddp",
    tensor: Annotated[str, typer.Option(help="Tensor-parallel sizes: 1,2.")] = "1",
    accumulation: Annotated[
        str | None, typer.Option(help="Micro batches per step: 1,4; default: as measured.")
    ] = None,
    reduce_dtype: Annotated[
        str, typer.Option(help="What is sent of a gradient: full, bf16 or fp16.")
    ] = "full",
    bucket_mib: Annotated[float | None, typer.Option(help="Default: 25, the first 1.")] = None,
    straggler: Annotated[
        float | None,
        typer.Option(help="Standard deviation / mean of the GPUs' speed; default: 0.015, CPU 0."),
    ] = None,
    overlap: Annotated[
        float | None, typer.Option(help="Share of hidden communication that is gained; default: 0.21.")
    ] = None,
    json: Json = False,
) -> None:
    """Step time and efficiency of N GPUs from one GPU's profile, and which change would help most."""
    from launcher import results
    from launcher.plan import inputs, scaling
    from launcher.plan.plan_report import plan_report
    from launcher.report.console import ConsoleReport

    accumulations = scaling.parse_counts(accumulation, "--accumulation") if accumulation else ()
    source = inputs.choose(from_, model, seq_per_s, micro, gpu, (accumulations or (1,))[0])
    question = scaling.Question(
        scaling.parse_counts(gpus, "--gpus"),
        link,
        inter,
        gpus_per_node,
        nics,
        engine,
        scaling.parse_counts(tensor, "--tensor"),
        accumulations,
        straggler,
        overlap,
        bucket_mib,
        reduce_dtype,
    )
    answer = scaling.answer(source, question)
    if json:
        typer.echo(results.to_json(answer), nl=False)
    else:
        console().print(ConsoleReport(plan_report(answer)))
