"""`bert-dp plan scaling`: predictions over numbers of GPUs, what each lever changes, what was measured."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, get_args

from bert_dp.config import ConfigError
from launcher import results
from launcher.plan.device import state_gib
from launcher.plan.hardware import constant, find_link, hardware
from launcher.plan.inputs import Source, from_scaling
from launcher.plan.links import Fabric
from launcher.plan.predict import Engine, Prediction, Profile, Scenario, predict, with_micro
from launcher.plan.timeline import FIRST_BUCKET, MIB, Gradient
from launcher.results import Cell, ComparedCell, Lever, PredictedRow, PredictedSplit

GPU_LINKS = ("nvlink", "pcie")
BOUNDS = ("no stragglers", "perfect overlap")
WIDTHS = {"full": None, "bf16": 2.0, "fp16": 2.0}


@dataclasses.dataclass(frozen=True)
class Question:
    """The options of the verb."""

    gpus: tuple[int, ...]
    link: str | None = None
    inter: str | None = None
    gpus_per_node: int | None = None
    nics: int = 1
    engine: str = "ddp"
    tensor: tuple[int, ...] = (1,)
    accumulation: tuple[int, ...] = ()
    bucket_mib: float | None = None
    reduce_dtype: str = "full"


def answer(source: Source, question: Question) -> results.Prediction:
    """A row for each accumulation, tensor size and number of GPUs, and the measured cells beside their
    prediction. Raises ConfigError with every problem."""
    _check(source, question)
    profile = _narrowed(source.profile, question.reduce_dtype)
    rows = []
    for accumulation in question.accumulation or (source.accumulation,):
        for tensor in question.tensor:
            for ranks in question.gpus:
                if ranks % tensor == 0:
                    scenario = scenario_of(source, question, ranks, tensor, accumulation)
                    rows.append(_row(source, profile, scenario))
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
        "of the communication that runs beside the backward pass "
        f"{100 * constant('overlap_gain'):.0f} % is gained",
        *_device_notes(source, question, rows),
    ]
    return results.Prediction(
        engine=question.engine,
        warnings=_warnings(source, question),
        assumptions=assumptions,
        rows=rows,
        measured=against_measured(source, question),
    )


def answer_measured(scaling: results.Scaling) -> results.Prediction | None:
    """The answer for the cells of scaling.json from its own profile, links and ceiling; None where one of
    them was not measured."""
    try:
        source = from_scaling(scaling, "scaling.json")
        gpus = tuple(sorted({cell.world_size for cell in scaling.cells}))
        return answer(source, Question(gpus=gpus))
    except ConfigError:
        return None


def scenario_of(source: Source, question: Question, ranks: int, tensor: int, accumulation: int) -> Scenario:
    """Without --link the all-reduce measured over the next greater number of ranks, else over the most."""
    per_node = _per_node(question)
    curve = None
    if question.link is None and source.curves:
        counts = sorted(source.curves)
        curve = source.curves[next((c for c in counts if c >= ranks), counts[-1])]
    links = Fabric(
        per_node,
        find_link(question.link, "--link") if question.link else None,
        find_link(question.inter, "--inter") if question.inter else None,
        question.nics,
        curve,
    )
    engine: Engine = next(e for e in get_args(Engine) if e == question.engine)
    bucket = question.bucket_mib
    options: dict[str, Any] = {} if bucket is None else {"bucket_bytes": bucket * MIB}
    return Scenario(
        links,
        ranks,
        engine,
        tensor,
        accumulation,
        spread=source.spread,
        slowdown=source.slowdown(min(ranks, per_node)),
        first_bucket=FIRST_BUCKET if bucket is None and engine == "ddp" else None,
        gain=constant("overlap_gain"),
        **options,
    )


def levers(profile: Profile, scenario: Scenario) -> list[Lever]:
    """What one change would make of the rate: `gain` = tokens/s over tokens/s now, less one; best first. A
    `bound` is no setting: it says what is lost there. A greater batch is as fast per sequence."""
    if scenario.ranks == 1:
        return []
    now = predict(profile, scenario)
    twice = dataclasses.replace
    changes: list[tuple[str, Profile, Scenario]] = [
        ("2 x accumulation", profile, twice(scenario, accumulation=2 * scenario.accumulation)),
        ("2 x micro batch", _with_micro_batch(profile, 2 * profile.micro_batch), scenario),
        ("2 x link speed", profile, twice(scenario, fabric=_faster(scenario.fabric))),
        ("no overlap: one bucket", profile, twice(scenario, overlap=False)),
        ("2 x bucket size", profile, twice(scenario, bucket_bytes=2 * scenario.bucket_bytes)),
        (BOUNDS[0], profile, twice(scenario, spread=0.0)),
        (BOUNDS[1], profile, twice(scenario, overlap=True, gain=1.0)),
    ]
    if profile.gradient_bytes > 2 and scenario.engine == "ddp":
        changes.append(("16-bit gradients", _narrowed(profile, "bf16"), scenario))
    gains = []
    for name, changed_profile, changed in changes:
        then = predict(changed_profile, changed)
        gain = then.tokens_per_s / now.tokens_per_s - 1
        if name in BOUNDS and gain < 0:  # one bucket without overlap may beat many that overlap
            continue
        gains.append(Lever(lever=name, gain=gain, tokens_per_s=then.tokens_per_s, bound=name in BOUNDS))
    return sorted(gains, key=lambda lever: -lever.gain)


def against_measured(source: Source, question: Question) -> list[ComparedCell]:
    """Every measured cell of engines that are modelled, beside what is predicted for it from the one-rank
    profile, the all-reduce curve and the ceiling."""
    compared = []
    for cell in source.cells:
        asked = dataclasses.replace(question, engine=cell.engine, gpus=(cell.world_size,))
        if cell.tokens_per_s is None or not _modelled(source, asked, cell):
            continue
        if cell.engine == "single":
            asked = dataclasses.replace(asked, engine="ddp")
        scenario = scenario_of(source, asked, cell.world_size, cell.tensor, cell.accumulation)
        then = predict(_with_micro_batch(source.profile, cell.micro_batch), scenario)
        interval = cell.step_time_s.ci95 if cell.step_time_s else None
        compared.append(
            ComparedCell(
                cell=cell.id,
                ranks=cell.world_size,
                predicted_step_s=then.step_s,
                measured_step_s=cell.step_s,
                ci95=interval,
                within=interval[0] <= then.step_s <= interval[1] if interval else None,
                predicted_tokens_per_s=then.tokens_per_s,
                measured_tokens_per_s=cell.tokens_per_s,
                predicted_efficiency=then.efficiency,
                measured_efficiency=cell.efficiency,
            )
        )
    return compared


def _modelled(source: Source, asked: Question, cell: Cell) -> bool:
    """Whether the cell's engine, its links and its tensor parallelism can be predicted."""
    within = asked.link or source.curves or _per_node(asked) == 1
    linked = within and (asked.inter or _per_node(asked) >= cell.world_size)
    return (
        cell.kind == "run"
        and cell.engine in (*get_args(Engine), "single")
        and (cell.world_size == 1 or bool(linked))
        and (cell.tensor == 1 or source.profile.hidden_size > 0)
    )


def _per_node(question: Question) -> int:
    """8 GPUs, but a measured or a loopback link joins all that are asked for."""
    if question.gpus_per_node is not None:
        return question.gpus_per_node
    local = question.link is None or find_link(question.link, "--link").kind == "loopback"
    return max(question.gpus) if local and question.inter is None else 8


def _check(source: Source, question: Question) -> None:
    issues = []
    engines = get_args(Engine)
    if question.engine not in engines:
        issues.append(f"--engine: {question.engine!r} is not modelled; use one of {', '.join(engines)}")
    if question.reduce_dtype not in WIDTHS:
        issues.append(f"--reduce-dtype: {question.reduce_dtype!r}; use one of {', '.join(WIDTHS)}")
    for setting, value in (
        ("--gpus-per-node", question.gpus_per_node),
        ("--nics", question.nics),
        ("--bucket-mib", question.bucket_mib),
    ):
        if value is not None and not value > 0:
            issues.append(f"{setting}: {value:g} is not above 0")
    for name, setting in ((question.link, "--link"), (question.inter, "--inter")):
        if name is not None:
            find_link(name, setting)
    issues += _link_issues(source, question)
    issues += _tensor_issues(source.profile, question.tensor)
    if issues:
        raise ConfigError(issues)


def _tensor_issues(profile: Profile, sizes: Sequence[int]) -> list[str]:
    if max(sizes) == 1:
        return []
    if not profile.hidden_size:
        return [f"--tensor: {max(sizes)} needs the model's shape; add --model CONFIG"]
    heads = profile.heads
    return [
        f"--tensor: {size} does not divide the model's {heads} attention heads (num_heads); use one of "
        f"{', '.join(str(n) for n in range(1, heads + 1) if heads % n == 0)}"
        for size in sizes
        if heads and heads % size
    ]


def _link_issues(source: Source, question: Question) -> list[str]:
    most, per_node = max(question.gpus), _per_node(question)
    if 0 < per_node < most and question.inter is None:
        between = [name for name, link in hardware().links.items() if link.kind in ("net", "tcp")]
        return [
            f"--inter: {most} GPUs fill more than one node of {per_node}; name the link between nodes, "
            f"one of {', '.join(between)}"
        ]
    if min(most, per_node) > 1 and question.link is None and not source.curves:
        return [
            f"--link: not given, and no measured all-reduce for {most} GPUs; use one of "
            f"{', '.join(hardware().links)}"
        ]
    if question.link is None and 1 < per_node < most:
        return [f"--link: give the link within a node as well as --inter {question.inter}"]
    return []


def _row(source: Source, profile: Profile, scenario: Scenario) -> PredictedRow:
    p: Prediction = predict(profile, scenario)
    device, state = source.device, state_gib(profile, scenario)
    alone = p.tokens_per_s / p.efficiency / p.ranks
    return PredictedRow(
        world_size=p.ranks,
        tensor=scenario.tensor,
        accumulation=scenario.accumulation,
        global_batch=scenario.replicas * scenario.accumulation * profile.micro_batch,
        step_time_s=p.step_s,
        split_s=PredictedSplit(
            forward_backward=p.compute_s,
            optimizer=p.optimizer_s,
            straggler=p.straggler_s,
            exposed_comm=p.exposed_s,
        ),
        exposed_comm_fraction=p.exposed_s / p.step_s,
        tokens_per_s=p.tokens_per_s,
        samples_per_s=p.tokens_per_s / profile.sequence_length,
        speedup=p.tokens_per_s / alone,
        efficiency=p.efficiency,
        mfu=device.mfu(p) if device else None,
        state_gib=state,
        fits=device.holds(state) if device else None,
        levers=levers(profile, scenario),
    )


def _device_notes(source: Source, question: Question, rows: Sequence[PredictedRow]) -> list[str]:
    device, notes = source.device, []
    if device is None:
        return []
    if device.peak_flops and device.flops_per_token:
        notes.append(
            f"MFU over {device.peak_flops / 1e12:g} TFLOP/s a GPU: {device.name}, {device.precision}"
        )
    if tight := [row for row in rows if row.fits is False]:
        most_gib = max(row.state_gib or 0.0 for row in tight)
        places = ", ".join(dict.fromkeys(str(row.world_size) for row in tight))
        notes.append(
            f"DOES NOT FIT on {places} GPUs: weights, gradients and optimizer alone take up to "
            f"{most_gib:.1f} GiB a rank with {question.engine}, {device.name} has "
            f"{device.memory_gib:g}; more --tensor or another --engine divides them"
        )
    return notes


def _warnings(source: Source, question: Question) -> list[str]:
    if source.device is None or not source.device.name.upper().startswith("CPU"):
        return []
    links = [name for name in (question.link, question.inter) if name is not None]
    return [
        f"The profile is of a CPU, whose steps are far longer than a GPU's, while {name} joins GPUs: the "
        "efficiency is far too good for GPUs. Measure the profile on one GPU, or give --seq-per-s, --micro "
        "and --gpu in place of --from."
        for name in links
        if find_link(name, "--link").kind in GPU_LINKS
    ][:1]


def _links_note(source: Source, question: Question) -> str:
    if question.link is None:
        if question.inter and _per_node(question) == 1:
            return f"one GPU a node, {question.nics} x {question.inter} between nodes"
        if not source.curves:
            return "one rank: no link"
        counts = ", ".join(str(n) for n in sorted(source.curves))
        return f"all-reduce as measured over {counts} ranks; its bus bandwidth for other numbers"
    text = f"{question.link} within a node"
    if question.inter:
        text += f" of {_per_node(question)} GPUs, {question.nics} x {question.inter} between nodes"
    return text


def _narrowed(profile: Profile, dtype: str) -> Profile:
    width = WIDTHS[dtype]
    if width is None or width >= profile.gradient_bytes:
        return profile
    share = width / profile.gradient_bytes
    gradients = tuple(Gradient(g.size * share, g.ready) for g in profile.gradients)
    return dataclasses.replace(profile, gradients=gradients, gradient_bytes=width)


def _with_micro_batch(profile: Profile, micro_batch: int) -> Profile:
    """As fast per sequence."""
    scaled = with_micro(profile, profile.micro_s * micro_batch / profile.micro_batch)
    return dataclasses.replace(scaled, micro_batch=micro_batch)


def _faster(links: Fabric) -> Fabric:
    def twice(link: Any) -> Any:
        if link is None:
            return None
        wider = {gpus: 2 * rate for gpus, rate in link.gpus_gb_s.items()}
        return link.model_copy(update={"gb_s": 2 * link.gb_s, "gpus_gb_s": wider})

    half = links.curve and dataclasses.replace(
        links.curve, points=tuple((size, seconds / 2) for size, seconds in links.curve.points)
    )
    return dataclasses.replace(links, intra=twice(links.intra), inter=twice(links.inter), curve=half)
