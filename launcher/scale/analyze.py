"""Compute scaling.json from the run records of a grid, and diagnose each cell's loss of efficiency."""

import contextlib
import math
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from bert_dp import cost
from bert_dp.config import computes_alone
from bert_dp.files.models import STRAGGLER_RATIO, Summary
from launcher import results, stats
from launcher.report.formats import count_of, format_interval, format_percent
from launcher.report.page import Ratio
from launcher.run.trials import UNREADABLE, Repeat, cause, ended, read_repeat, read_summary
from launcher.scale import models
from launcher.scale.grid import Grid, run_dir
from launcher.scale.models import BottleneckDiagnosis, CellMeasurement, DiagnosisKind, GridCell, Scaling
from launcher.stats import is_measurable

LOSS_TOLERANCE = {"fp64": 1e-9, "fp32": 1e-4, "bf16": 2e-2, "fp16": 2e-2}  # allowed relative deviation
MAX_DISAGREEMENT = 0.05  # tolerated difference between two measures of exposed communication (share of step)
Facts = dict[str, Any]


def analyze(grid: Grid, out: Path, *, facts: Mapping[str, Any]) -> Scaling:
    """Return the contents of scaling.json without verdicts. `facts`: environment, command and hashes."""
    runs: dict[str, CellRuns] = {}
    states: dict[str, Facts] = {}
    for seed, cell in enumerate(grid.cells):
        repeats, states[cell.id] = _read_repeats(cell, grid, out)
        if repeats:
            runs[cell.id] = CellRuns(cell, repeats, grid.config.data.sequence_length, seed)
    settings = _settings(grid, next(iter(runs.values()), None))
    datasheet = cost.peak_flops(str(settings.device), str(settings.precision))
    peak = results.find(out / "peak.json", models.Peak) or models.Peak()
    peak = peak.model_copy(update={"datasheet_flops": datasheet})
    cells = [_cell(cell, states[cell.id], runs, settings, peak) for cell in grid.cells]
    found = [results.find(path, models.MeasuredLink) for path in sorted(out.glob("links-*.json"))]
    links = [link for link in found if link is not None]
    modes, profile = grid.settings.modes, results.find(out / "profile.json", models.StepProfile)
    counts = {cell.world_size for cell in grid.cells if cell.world_size > 1}
    is_whole = profile is not None and peak.matmul_flops is not None and len(links) == len(counts)
    return Scaling(
        status="complete" if is_whole and all(c.status != "pending" for c in cells) else "partial",
        **facts,
        mode=modes[0] if len(modes) == 1 else "both",
        settings=settings,
        peak=peak,
        cells=cells,
        links=links,
        profile=profile,
    )


class CellRuns:
    """Repeats of one cell, and the figures that are computed from them alone."""

    def __init__(self, cell: GridCell, repeats: Sequence[Repeat], sequence_length: int, seed: int):
        self.cell, self.repeats = cell, repeats
        self.tokens = cell.global_batch * sequence_length  # number of tokens in a step, over all ranks
        self.steps = [self._step_seconds(r) for r in repeats]
        """Step times of the whole job in seconds, [repeat][step]."""
        self.mean_s = statistics.median([statistics.fmean(steps) for steps in self.steps])
        self.draws = stats.resampled_means(self.steps, seed)
        self.tokens_per_s = self.tokens / self.mean_s

    def _step_seconds(self, repeat: Repeat) -> list[float]:
        """Return the job's step times in seconds: those of the slowest rank, because the others wait.

        The independent copies of a ceiling do not wait for each other. Their throughputs add up, so the
        job's mean step time is the harmonic mean over the copies. Each copy's times are weighted by the
        derivative of the job's mean with respect to the copy's own mean.
        """
        by_rank = repeat.parts["step_s"]
        means = [statistics.fmean(steps) for steps in by_rank]
        if self.cell.kind != "ceiling":
            return by_rank[means.index(max(means))]
        job = statistics.harmonic_mean(means)
        weights = [job**2 / mean**2 / len(means) for mean in means]
        by_step = zip(*by_rank, strict=True)
        return [sum(w * s for w, s in zip(weights, ranks, strict=True)) for ranks in by_step]

    def part(self, name: str) -> float:
        """Return the mean time in seconds of a part of a step, over all ranks and steps of the median repeat.

        All parts come from the same repeat, so that they add up to its step time. With an even number
        of repeats, the two middle repeats are averaged.
        """
        order = sorted(range(len(self.steps)), key=lambda index: sum(self.steps[index]))
        middle = order[(len(order) - 1) // 2 : len(order) // 2 + 1]
        repeats = [self.repeats[index].parts[name] for index in middle]
        return statistics.fmean(statistics.fmean(s for rank in ranks for s in rank) for ranks in repeats)

    def share_interval(self, name: str) -> list[float] | None:
        """Return the 95 % interval, over repeats, of a part's share of a step; None for one repeat."""
        totals = [[sum(map(sum, r.parts[part])) for part in (name, "step_s")] for r in self.repeats]
        return stats.mean_interval([part / whole for part, whole in totals])

    def straggler(self) -> Facts:
        """Return the straggler ratio, its interval, and the rank of the straggler, if any.

        The ratio is the geometric mean over repeats of (slowest rank's compute time / median of the others).
        Return {} for one rank, or if ranks wait in the forward pass (fsdp, DeepSpeed, tensor parallelism).
        """
        ranks = range(self.cell.world_size)
        # seconds, [repeat][rank]
        work = [[sum(steps) for steps in r.parts["compute_before_reduction_s"]] for r in self.repeats]
        alone = computes_alone(self.cell.engine, self.cell.tensor)
        if len(ranks) == 1 or not alone or not all(map(all, work)):
            return {}
        ratios = [[s[k] / statistics.median([*s[:k], *s[k + 1 :]]) for s in work] for k in ranks]
        means = [stats.geometric_mean(each) for each in ratios]
        rank = max(ranks, key=lambda k: means[k][0])
        ratio, interval = means[rank]
        is_significant = interval is not None and interval[0] > STRAGGLER_RATIO
        is_slowest = all(s.index(max(s)) == rank for s in work)
        return {
            "straggler_ratio": ratio,
            "straggler_ratio_ci95": interval,
            "straggler_rank": rank if is_significant and is_slowest else None,
        }


def _read_repeats(cell: GridCell, grid: Grid, out: Path) -> tuple[list[Repeat], Facts]:
    """Return a cell's complete repeats ([] if one has failed), and its status and cause of failure."""
    repeats, settings = [], grid.settings
    for repeat in range(settings.repeats):
        directory = run_dir(out, cell, repeat)
        status, summary = ended(directory), read_summary(directory)
        if summary is not None and status in ("oom", "failed"):
            return [], {"status": status, "cause": cause(directory)}
        with contextlib.suppress(*UNREADABLE):  # omit a repeat with incomplete records
            repeats.append(read_repeat(directory, cell.world_size, settings.warm_up, settings.steps))
    return repeats, {"status": "ok" if len(repeats) == settings.repeats else "pending"}


def _settings(grid: Grid, first: CellRuns | None) -> models.ScalingSettings:
    config, settings = grid.config, grid.settings
    summary = first.repeats[0].summary if first else Summary(status="done")
    model, sequence = config.model, config.data.sequence_length
    return models.ScalingSettings(
        steps=settings.steps,
        warm_up=settings.warm_up,
        repeats=settings.repeats,
        micro_batch=config.batch.micro_size,
        accumulation=settings.accumulation or 1 if "weak" in settings.modes else None,
        global_batch=config.batch.global_size if "strong" in settings.modes else None,
        sequence_length=sequence,
        parameters=cost.num_parameters(model, sequence),
        flops_per_token=cost.flops_per_token(model, sequence, config.objective.mask_rate),
        precision=summary.precision or config.precision,
        device=summary.device,
        model=f"{model.num_layers} layers x {model.hidden_size}, vocabulary {model.vocab_size:,}",
    )


def _cell(
    cell: GridCell,
    state: Facts,
    runs: Mapping[str, CellRuns],
    settings: models.ScalingSettings,
    peak: models.Peak,
) -> CellMeasurement:
    named = {**cell.model_dump(), **state}
    measured = runs.get(cell.id)
    if measured is None:
        return CellMeasurement(**named)
    has_ceiling = cell.kind == "run" and cell.world_size > 1
    ceiling = runs.get(f"{cell.mode}-ceiling-n{cell.world_size}") if has_ceiling else None
    single, ddp = (runs.get(f"{cell.mode}-{name}-n1") for name in ("single", "ddp"))
    per_gpu = measured.tokens_per_s / cell.world_size
    flops = per_gpu * (settings.flops_per_token or 0.0)
    steps, on_gpu = [s for each in measured.steps for s in each], settings.device not in (None, "CPU")
    whole = CellMeasurement(
        **named,
        repeats=[
            models.RepeatMeasurement(
                run=f"runs/{repeat.name}",
                steps=len(seconds),
                steps_per_s=1 / statistics.fmean(seconds),
                tokens_per_s=measured.tokens / statistics.fmean(seconds),
                step_time_s=_step_time(seconds),
            )
            for repeat, seconds in zip(measured.repeats, measured.steps, strict=True)
        ],
        steps_per_s=1 / measured.mean_s,
        global_steps_per_s=cell.accumulation * (cell.world_size // cell.tensor) / measured.mean_s,
        samples_per_s=cell.global_batch / measured.mean_s,
        tokens_per_s=measured.tokens_per_s,
        tokens_per_s_per_gpu=per_gpu,
        step_time_s=_step_time(steps, mean=measured.mean_s, ci95=stats.interval(measured.draws)),
        split_s=_split(measured, ceiling),
        data_wait_fraction=measured.part("data_wait_s") / measured.part("step_s"),
        data_wait_fraction_ci95=measured.share_interval("data_wait_s"),
        **_efficiencies(measured, single, ddp, ceiling),
        exposed_comm_ddp_fraction=_ddp_exposed(measured),
        **measured.straggler(),
        peak_memory_gib=max(max(r.memory_gib) for r in measured.repeats),
        mfu=flops / peak.datasheet_flops if peak.datasheet_flops else None,
        mamfu=flops / peak.matmul_flops if peak.matmul_flops else None,
        # a value near 1 means that the device waits for the host; host_s is 0 if the device lags behind it
        launch_fraction=measured.part("host_s") / measured.part("step_s") if on_gpu else None,
        launch_fraction_ci95=measured.share_interval("host_s") if on_gpu else None,
        **_loss(measured, single, settings.precision),
        skipped_steps=max(r.summary.skipped_steps or 0 for r in measured.repeats),
    )
    return whole.model_copy(update={"flags": _flags(whole)})


def _step_time(steps: Sequence[float], **facts: Any) -> models.StepTime:
    p95 = statistics.quantiles(steps, n=20, method="inclusive")[-1]
    return models.StepTime(median=statistics.median(steps), p95=p95, **facts)


def _efficiencies(
    measured: CellRuns, single: CellRuns | None, ddp: CellRuns | None, ceiling: CellRuns | None
) -> Facts:
    """Return the speed-up over one rank, and the efficiencies relative to one rank and to the ceiling."""
    n = measured.cell.world_size
    out: Facts = {}

    def add(name: str, over: CellRuns, base: CellRuns | None, count: int = 1) -> None:
        """Add a ratio and its interval to `out`: throughput of `over` / (`count` x throughput of `base`)."""
        if base is not None:
            interval = stats.ratio_interval(base.draws, over.draws, over.tokens / base.tokens / count)
            out[name], out[f"{name}_ci95"] = over.tokens_per_s / base.tokens_per_s / count, interval

    add("efficiency", measured, single, n)
    add("efficiency_ddp1", measured, ddp, n)
    add("communication_efficiency", measured, ceiling)
    if single is not None:
        out["speedup"] = measured.tokens_per_s / single.tokens_per_s
    if ceiling is not None:
        add("ceiling_efficiency", ceiling, single, n)
        out["exposed_comm_fraction"] = 1 - out["communication_efficiency"]
    return out


def _split(measured: CellRuns, ceiling: CellRuns | None) -> models.SplitTime:
    """Return the parts of the mean step in seconds, averaged over ranks.

    Exposed communication is how much longer the passes and the optimizer phase take than in the ceiling.
    The ceiling's passes are scaled to the same number of tokens. ZeRO-1 communicates in the optimizer phase.
    """
    whole, data, passes, optimizer = (
        measured.part(name) for name in ("step_s", "data_wait_s", "forward_backward_s", "optimizer_s")
    )
    parts: Facts = {"data": data, "other": max(0.0, whole - data - passes - optimizer)}
    if ceiling is None:
        return models.SplitTime(forward_backward=passes, optimizer=optimizer, **parts)
    own_passes = min(passes, ceiling.part("forward_backward_s") * measured.tokens / ceiling.tokens)
    own_optimizer = min(optimizer, ceiling.part("optimizer_s"))
    exposed = passes - own_passes + optimizer - own_optimizer
    return models.SplitTime(
        forward_backward=own_passes, exposed_comm=exposed, optimizer=own_optimizer, **parts
    )


def _ddp_exposed(measured: CellRuns) -> float | None:
    """Return DDP's exposed communication as a share of a step; None if not measured or if tensor > 1."""
    if measured.cell.world_size == 1 or measured.cell.tensor > 1:
        return None
    counted = [statistics.median(r.exposed_s) / measured.mean_s for r in measured.repeats if r.exposed_s]
    return statistics.median(counted) if counted else None


def _loss(measured: CellRuns, single: CellRuns | None, precision: str | None) -> Facts:
    """Compare the losses of the first repeat with those of the single-rank run. Return {} for a ceiling, in
    weak mode, or if the two runs did not log the same steps."""
    if single is None or (measured.cell.mode, measured.cell.kind) != ("strong", "run"):
        return {}
    own, base = (dict(runs.repeats[0].curve) for runs in (measured, single))
    if not own or own.keys() != base.keys():
        return {}
    deviation = max(abs(own[tokens] - loss) / max(abs(loss), 1e-12) for tokens, loss in base.items())
    agrees = deviation <= LOSS_TOLERANCE.get(str(precision), 1e-4)
    return {"loss_deviation": deviation, "loss_agrees": agrees}


def _flags(cell: CellMeasurement) -> list[str]:
    """Return the caveats that apply to the figures of a cell."""
    flags, skipped = [], cell.skipped_steps
    if skipped:
        flags.append(f"{skipped} optimizer steps were skipped (non-finite gradients), but their times count")
    if cell.mode == "strong" and cell.kind == "run" and cell.loss_agrees is None:
        flags.append("losses are not compared: the single-rank run did not record them at the same steps")
    if cell.loss_agrees is False:
        flags.append(
            f"not the same model: relative loss deviation {cell.loss_deviation} from the single-rank run"
        )
    sent, counters = cell.communication_efficiency_ci95, cell.exposed_comm_ddp_fraction
    if sent is not None and sent[0] > 1:
        flags.append("faster than its ceiling: the engine does less work per rank than an independent copy")
    if sent is not None and counters is not None and is_measurable(sent):
        low, high = 1 - sent[1], 1 - sent[0]
        if not low - MAX_DISAGREEMENT <= counters <= high + MAX_DISAGREEMENT:
            flags.append(
                f"exposed communication: {100 * low:.1f} % to {100 * high:.1f} % of a step according to the "
                f"ceiling, {100 * counters:.1f} % according to DDP's counters"
            )
    return flags


# --- verdicts

LOSS_BOUND = 0.05  # a loss of efficiency or a wait for data (as a share of a step) above this is reported
LAUNCH_BOUND = 0.95  # ratio of host time to step time above which a cell is launch-bound
MIN_EFFICIENCY = 0.95  # a cell scales if the low end of its efficiency interval reaches this
MEASURE_MORE = "raise --repeats or --steps"

EFFICIENCY = Ratio("efficiency", "efficiency", "percent", "efficiency_ci95")
CEILING = Ratio("ceiling_efficiency", "ceiling", "percent", "ceiling_efficiency_ci95")
COMMUNICATION = Ratio("communication_efficiency", "comm.", "percent", "communication_efficiency_ci95")
STRAGGLER = Ratio("straggler_ratio", "slowest", "ratio", "straggler_ratio_ci95")


def diagnose(cells: Sequence[CellMeasurement]) -> list[BottleneckDiagnosis]:
    """Diagnose each finished cell with two or more ranks, and compare the engines."""
    runs = [c for c in cells if c.kind == "run" and c.world_size > 1]
    return [*(diagnose_cell(cell) for cell in runs if cell.status != "pending"), *_compare_engines(runs)]


def diagnose_cell(cell: CellMeasurement) -> BottleneckDiagnosis:
    """Diagnose a cell: name its failure or its largest loss of efficiency, or say why no loss is named."""
    if cell.status == "oom":
        hint = "lower batch.micro_size, or use zero1 or fsdp"
        return _diagnosis(cell, "out_of_memory", str(cell.cause), hint)
    if cell.status != "ok":
        return _diagnosis(cell, "failed", str(cell.cause), "see the logs of the failed runs")
    if cell.efficiency is None:
        return _diagnosis(cell, "no_baseline", "the baseline has no result", "see the baseline's logs")
    if cell.efficiency_ci95 is None:
        evidence = f"efficiency {format_percent(cell.efficiency)} from one repeat, which gives no interval"
        return _diagnosis(cell, "one_repeat", evidence, "use --repeats 3 or more")
    low, high = cell.efficiency_ci95
    reached = f"efficiency {EFFICIENCY.text(cell)}"
    if low > 1:
        evidence = f"{reached}: each rank is faster than the single rank of the baseline"
        hint = "measure the baseline again under the same conditions"
        return _diagnosis(cell, "above_baseline", evidence, hint)
    if losses := sorted(_losses(cell), reverse=True):
        first, *others = losses
        also = "".join(f"; also {_words(loss.kind, loss.detail)}: {loss.evidence}" for loss in others)
        return _diagnosis(cell, first.kind, f"{reached}: {first.evidence}{also}", first.hint, first.detail)
    if not is_measurable(cell.efficiency_ci95):
        return _diagnosis(cell, "not_measurable", reached)
    if low >= MIN_EFFICIENCY:
        return _diagnosis(cell, "scales", f"{reached}; no bottleneck was found", "nothing")
    if cell.efficiency >= MIN_EFFICIENCY or high >= 1:
        evidence = f"{reached} may be below {format_percent(MIN_EFFICIENCY)}; no bottleneck was found"
        return _diagnosis(cell, "intervals_overlap", evidence)
    evidence = f"{reached}; the measurements do not establish a single cause"
    return _diagnosis(cell, "no_single_cause", evidence, f"{MEASURE_MORE}, and compare the parts of the step")


class _Loss(NamedTuple):
    """A loss of efficiency whose confidence interval lies entirely beyond a bound, and its cause."""

    share: float  # share of a step
    kind: DiagnosisKind
    evidence: str
    hint: str
    detail: str = ""  # text that follows the kind in the verdict


def _losses(cell: CellMeasurement) -> list[_Loss]:
    losses = []
    wait = cell.data_wait_fraction or 0.0
    if _is_above(cell.data_wait_fraction_ci95, LOSS_BOUND):
        evidence = f"{_share_text(wait, cell.data_wait_fraction_ci95)} of a step is spent waiting for data"
        losses.append(_Loss(wait, "loader_bound", evidence, "raise data.workers"))
    rank, ratio = cell.straggler_rank, cell.straggler_ratio
    if ratio is not None and rank is not None:
        compared = f"rank {rank}'s compute time before any reduction / median of the other ranks"
        evidence = f"{compared}: {STRAGGLER.text(cell)}"
        hint = "check the clocks and other users of this rank's device; check links with `bert-dp doctor`"
        losses.append(_Loss(1 - 1 / ratio, "straggler", evidence, hint, f" rank {rank}"))
    ceiling, sent = cell.ceiling_efficiency, cell.communication_efficiency
    if ceiling is not None and _is_below(cell.ceiling_efficiency_ci95, 1 - LOSS_BOUND):
        copies = f"throughput of N = {cell.world_size} independent copies / (N x throughput of one rank)"
        evidence = f"{copies}: {CEILING.text(cell)}"
        hint = "check memory bandwidth, power and clocks; another engine does not help"
        losses.append(_Loss(1 - ceiling, "hardware_ceiling", evidence, hint))
    if sent is not None and _is_below(cell.communication_efficiency_ci95, 1 - LOSS_BOUND):
        evidence = f"throughput / throughput of the ceiling: {COMMUNICATION.text(cell)}"
        if (counters := cell.exposed_comm_ddp_fraction) is not None:
            evidence += f" (exposed according to DDP's counters: {format_percent(counters)} of a step)"
        hint = "use more accumulation, 16-bit reduction or a faster link"
        losses.append(_Loss(1 - sent, "communication_bound", evidence, hint))
    host = cell.launch_fraction
    if host is not None and _is_above(cell.launch_fraction_ci95, LAUNCH_BOUND):
        # host time includes the wait for data, which is a separate loss
        evidence = f"enqueueing a step takes {_share_text(host, cell.launch_fraction_ci95)} of the step time"
        losses.append(_Loss(host - wait, "launch_bound", evidence, "use compile=on or a larger micro batch"))
    return losses


def _is_above(interval: Sequence[float] | None, bound: float) -> bool:
    return interval is not None and interval[0] > bound


def _is_below(interval: Sequence[float] | None, bound: float) -> bool:
    return interval is not None and interval[1] < bound


def _share_text(share: float, interval: Sequence[float] | None) -> str:
    return f"{format_percent(share)} [{format_interval(interval, format_percent)}]"


def _compare_engines(runs: Sequence[CellMeasurement]) -> list[BottleneckDiagnosis]:
    """Compare the engines for each mode and number of ranks. Call an engine the fastest only if the intervals
    of its throughput ratios to all other engines are entirely above 1."""
    out = []
    for mode, count in dict.fromkeys((c.mode, c.world_size) for c in runs):
        ran = [c for c in runs if (c.mode, c.world_size, c.status) == (mode, count, "ok")]
        if len(ran) < 2:
            continue
        rates = {c.id: c.tokens_per_s or math.nan for c in ran}
        best, *others = sorted(ran, key=lambda c: rates[c.id], reverse=True)
        tied = next((c for c in others if _throughput_ratio(best, c)[0] <= 1), None)
        compared = tied or others[0]
        low, high = _throughput_ratio(best, compared)
        text = f"{rates[best.id] / rates[compared.id]:.3f} [{low:.3f} to {high:.3f}]"
        if not is_measurable([low, high]):
            text = f"not measurable with {count_of(min(len(c.repeats) for c in ran), 'repeat')}"
        evidence = f"throughput relative to {compared.id}: {text}"
        if tied is None:
            detail = f" of {len(ran)} engines at N = {count}"
            out.append(_diagnosis(best, "fastest", evidence, "nothing", detail))
        else:
            out.append(_diagnosis(best, "intervals_overlap", evidence))
    return out


def _throughput_ratio(cell: CellMeasurement, other: CellMeasurement) -> tuple[float, float]:
    """Compute the interval of the ratio of two throughputs from the ends of both step-time intervals."""
    steps = [(each.step_time_s and each.step_time_s.ci95) or (0.0, math.inf) for each in (cell, other)]
    (low, high), (other_low, other_high) = steps
    batches = cell.global_batch / other.global_batch
    return batches * other_low / high, batches * other_high / low if low else math.inf


def _words(kind: DiagnosisKind, detail: str) -> str:
    return kind.replace("_bound", "-bound").replace("_", " ") + detail


def _diagnosis(
    cell: CellMeasurement, kind: DiagnosisKind, evidence: str, hint: str = MEASURE_MORE, detail: str = ""
) -> BottleneckDiagnosis:
    words = _words(kind, detail)
    return BottleneckDiagnosis(cell=cell.id, kind=kind, verdict=words, evidence=evidence, next=hint)
