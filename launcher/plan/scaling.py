"""`bert-dp plan scaling`: predictions over numbers of GPUs, what each lever changes, what was measured."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence

from bert_dp.config import ConfigError
from launcher.plan.hardware import constant, find_link
from launcher.plan.inputs import Source, from_scaling
from launcher.plan.levers import levers
from launcher.plan.links import Fabric
from launcher.plan.question import WIDTHS, Question, check
from launcher.plan.step_model import (
    ENGINES,
    Profile,
    Scenario,
    predict,
    state_gib,
    with_gradient_bytes,
    with_micro_batch,
)
from launcher.plan.timeline import BUCKET, FIRST_BUCKET, MIB
from launcher.scale.models import (
    CellMeasurement,
    ComparedCell,
    PredictedRow,
    PredictedSplit,
    Prediction,
    Scaling,
)

GPU_LINKS = ("nvlink", "pcie")


def answer(source: Source, question: Question) -> Prediction:
    """A row for each accumulation, tensor size and number of GPUs, and the measured cells beside their
    prediction. Raises ConfigError with every problem."""
    check(source, question)
    profile = with_gradient_bytes(source.profile, WIDTHS[question.reduce_dtype])
    rows = [
        _row(source, profile, scenario_of(source, question, ranks, tensor, accumulation))
        for accumulation, tensor, ranks in itertools.product(
            question.accumulation or (source.accumulation,), question.tensor, question.gpus
        )
        if ranks % tensor == 0
    ]
    if not rows:
        raise ConfigError(
            [f"--tensor: no size of {list(question.tensor)} divides any of {list(question.gpus)}"]
        )
    assumptions = [
        *source.notes,
        _links_note(source, question),
        f"weak scaling: every replica keeps its micro batch of {profile.micro_batch} and its accumulation",
        f"speed of the ranks spread by {100 * source.spread:.2g} % (standard deviation); all wait for the "
        "slowest",
        "running communication beside the backward pass hides "
        f"{100 * constant('overlap_gain'):.0f} % of what it ideally could (overlap_gain of hardware.yaml)",
        *_device_notes(source, question, rows),
    ]
    return Prediction(
        engine=question.engine,
        warnings=_warnings(source, question),
        assumptions=assumptions,
        rows=rows,
        measured=_compared(source, question),
    )


def answer_measured(scaling: Scaling) -> Prediction | None:
    """The answer for the cells of scaling.json from its own profile, links and ceiling; None where one of
    them was not measured."""
    try:
        source = from_scaling(scaling, "scaling.json")
        return answer(source, Question(gpus=tuple(sorted({cell.world_size for cell in scaling.cells}))))
    except ConfigError:
        return None


def scenario_of(source: Source, question: Question, ranks: int, tensor: int, accumulation: int) -> Scenario:
    """Without --link the all-reduce measured over the next greater number of ranks, else over the most."""
    curve = None
    if question.link is None and source.curves:
        counts = sorted(source.curves)
        curve = source.curves[next((c for c in counts if c >= ranks), counts[-1])]
    fabric = Fabric(
        question.per_node,
        find_link(question.link, "--link") if question.link else None,
        find_link(question.inter, "--inter") if question.inter else None,
        question.nics,
        curve,
    )
    bucket = question.bucket_mib
    return Scenario(
        fabric,
        ranks,
        question.engine,
        tensor,
        accumulation,
        spread=source.spread,
        slowdown=source.slowdown(min(ranks, question.per_node)),
        bucket_bytes=BUCKET if bucket is None else bucket * MIB,
        first_bucket=FIRST_BUCKET if bucket is None and question.engine == "ddp" else None,
        gain=constant("overlap_gain"),
    )


def _row(source: Source, profile: Profile, scenario: Scenario) -> PredictedRow:
    step, state, device = predict(profile, scenario), state_gib(profile, scenario), source.device
    return PredictedRow(
        world_size=step.ranks,
        tensor=scenario.tensor,
        accumulation=scenario.accumulation,
        global_batch=scenario.replicas * scenario.accumulation * profile.micro_batch,
        step_time_s=step.step_s,
        split_s=PredictedSplit(
            forward_backward=step.compute_s,
            optimizer=step.optimizer_s,
            straggler=step.straggler_s,
            exposed_comm=step.exposed_s,
        ),
        exposed_comm_fraction=step.exposed_s / step.step_s,
        tokens_per_s=step.tokens_per_s,
        samples_per_s=step.tokens_per_s / profile.sequence_length,
        speedup=step.efficiency * step.ranks,
        efficiency=step.efficiency,
        mfu=device.mfu(step) if device else None,
        state_gib=state,
        fits=device.holds(state) if device else None,
        levers=levers(profile, scenario),
    )


def _compared(source: Source, question: Question) -> list[ComparedCell]:
    """Every measured cell of engines that are modelled, beside what is predicted for it from the one-rank
    profile, the all-reduce curve and the ceiling: its own links, whatever others are asked about."""
    compared = []
    for cell in source.cells:
        engine = "ddp" if cell.engine == "single" else cell.engine
        same = dataclasses.replace(question, engine=engine, gpus=(cell.world_size,))
        if source.curves:
            same = dataclasses.replace(same, link=None, inter=None, gpus_per_node=None)
        if cell.tokens_per_s is None or not _is_modelled(source, same, cell):
            continue
        scenario = scenario_of(source, same, cell.world_size, cell.tensor, cell.accumulation)
        step = predict(with_micro_batch(source.profile, cell.micro_batch), scenario)
        interval = cell.step_time_s.ci95 if cell.step_time_s else None
        compared.append(
            ComparedCell(
                cell=cell.id,
                ranks=cell.world_size,
                predicted_step_s=step.step_s,
                measured_step_s=cell.step_s,
                ci95=interval,
                within=interval[0] <= step.step_s <= interval[1] if interval else None,
                predicted_tokens_per_s=step.tokens_per_s,
                measured_tokens_per_s=cell.tokens_per_s,
                predicted_efficiency=step.efficiency,
                measured_efficiency=cell.efficiency,
                measured_efficiency_ci95=cell.efficiency_ci95,
                repeats=len(cell.repeats),
            )
        )
    return compared


def _is_modelled(source: Source, question: Question, cell: CellMeasurement) -> bool:
    """Whether the cell's engine, its links and its tensor parallelism can be predicted."""
    within = question.link or source.curves or question.per_node == 1
    between = question.inter or question.per_node >= cell.world_size
    return (
        cell.kind == "run"
        and question.engine in ENGINES
        and (cell.world_size == 1 or bool(within and between))
        and (cell.tensor == 1 or source.profile.hidden_size > 0)
    )


def _links_note(source: Source, question: Question) -> str:
    between = f"{question.nics} x {question.inter} between nodes"
    if question.link is not None:
        nodes = f" of {question.per_node} GPUs, {between}" if question.inter else ""
        return f"{question.link} within a node{nodes}"
    if question.inter and question.per_node == 1:
        return f"one GPU a node, {between}"
    if not source.curves:
        return "one rank: no link"
    counts = ", ".join(str(n) for n in sorted(source.curves))
    return f"all-reduce as measured over {counts} ranks; its bus bandwidth for other numbers"


def _device_notes(source: Source, question: Question, rows: Sequence[PredictedRow]) -> list[str]:
    device, notes = source.device, []
    if device is None:
        return []
    if device.peak_flops and device.flops_per_token:
        notes.append(
            f"MFU over {device.peak_flops / 1e12:g} TFLOP/s a GPU: {device.name}, {device.precision}"
        )
    if too_large := [row for row in rows if row.fits is False]:
        most_gib = max(row.state_gib or 0.0 for row in too_large)
        counts = ", ".join(dict.fromkeys(str(row.world_size) for row in too_large))
        notes.append(
            f"DOES NOT FIT on {counts} GPUs: weights, gradients and optimizer alone take up to "
            f"{most_gib:.1f} GiB a rank with {question.engine}, {device.name} has "
            f"{device.memory_gib:g}; more --tensor or another --engine divides them"
        )
    return notes


def _warnings(source: Source, question: Question) -> list[str]:
    """A link between nodes that nothing crosses, and GPU links with the profile of a CPU."""
    warnings = []
    if question.inter is not None and max(question.gpus) <= question.per_node:
        warnings.append(
            f"--inter: {max(question.gpus)} GPUs stand in one node of {question.per_node}, so "
            f"{question.inter} carries nothing; ask for more GPUs, or give --gpus-per-node."
        )
    names = [name for name in (question.link, question.inter) if name is not None]
    of_gpus = [name for name in names if find_link(name, "--link").kind in GPU_LINKS]
    if not of_gpus or source.device is None or not source.device.name.upper().startswith("CPU"):
        return warnings
    return [
        *warnings,
        f"The profile is of a CPU, whose steps are far longer than a GPU's, while {of_gpus[0]} joins GPUs: "
        "the efficiency is far too good for GPUs. Measure the profile on one GPU, or give --seq-per-s, "
        "--micro and --gpu in place of --from.",
    ]
