"""From the raw records of a grid to scaling.json: every number there is computed here, from files alone.

Efficiencies and their intervals: `_against` and `_ratio`.
"""

from __future__ import annotations

import contextlib
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bert_dp import cost
from bert_dp.config import computes_alone
from bert_dp.record.models import Summary
from launcher import results, stats
from launcher.results import Cell, GridCell, Scaling
from launcher.run.read_run import Repeat, cause, ended, failure_kind, read_repeat, read_summary
from launcher.scale.grid import Grid, run_dir
from launcher.stats import is_measurable

LOSS_TOLERANCE = {"fp64": 1e-9, "fp32": 1e-4, "bf16": 2e-2, "fp16": 2e-2}  # relative, over the whole run
STRAGGLER_RATIO = 1.2
CROSS_CHECK = 0.05  # share of a step by which two measures of one thing may differ
Facts = dict[str, Any]


class Measured:
    """One cell's repeats, and the figures that need no other cell."""

    def __init__(self, cell: GridCell, repeats: Sequence[Repeat], sequence_length: int, seed: int):
        self.cell, self.repeats = cell, repeats
        self.tokens = cell.global_batch * sequence_length  # of a step, over all ranks
        self.steps = [self._step_seconds(r) for r in repeats]
        """[repeat][step]: seconds that a step of the whole job took."""
        self.mean_s = statistics.median([sum(s) / len(s) for s in self.steps])
        self.draws = stats.resampled_means(self.steps, seed)

    def _step_seconds(self, repeat: Repeat) -> list[float]:
        """The slowest rank's: all ranks meet in every step. Independent copies do not: the throughput of
        their job is the sum of theirs, its mean step the harmonic mean of their mean steps. One step's figure
        follows that mean to first order, and the figures of all steps have it as their mean."""
        by_rank = repeat.parts["step_s"]
        means = [sum(steps) / len(steps) for steps in by_rank]
        if self.cell.kind != "ceiling":
            return by_rank[means.index(max(means))]
        job = len(means) / sum(1 / mean for mean in means)
        weights = [job**2 / mean**2 / len(means) for mean in means]
        by_step = zip(*by_rank, strict=True)
        return [sum(w * s for w, s in zip(weights, ranks, strict=True)) for ranks in by_step]

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.mean_s

    @property
    def per_gpu(self) -> float:
        return self.tokens_per_s / self.cell.world_size

    def part(self, name: str) -> float:
        """Seconds of a step, mean over ranks and steps of the repeat in the middle (of the two there): so the
        parts of a step sum to it."""
        order = sorted(range(len(self.steps)), key=lambda place: sum(self.steps[place]))
        middle = order[(len(order) - 1) // 2 : len(order) // 2 + 1]
        flat = [[s for rank in self.repeats[place].parts[name] for s in rank] for place in middle]
        return sum(sum(each) / len(each) for each in flat) / len(middle)

    def ranks(self) -> list[results.RankTimes]:
        """Per rank: five numbers over all repeats' steps, and its greatest memory."""

        def over_repeats(name: str, rank: int) -> results.FiveNumbers:
            return stats.five_numbers([s for r in self.repeats for s in r.parts[name][rank]])

        return [
            results.RankTimes(
                rank=rank,
                step_time_s=over_repeats("step_s", rank),
                own_work_s=over_repeats("own_work_s", rank),
                peak_memory_gib=max(r.memory_gib[rank] for r in self.repeats),
            )
            for rank in range(self.cell.world_size)
        ]

    def share_interval(self, name: str) -> list[float] | None:
        """Interval over the repeats of the share of a step that this part takes."""
        totals = [[sum(map(sum, r.parts[part])) for part in (name, "step_s")] for r in self.repeats]
        return stats.mean_interval([part / whole for part, whole in totals])

    def straggler(self) -> Facts:
        """The slowest rank's own work over the median of the others', paired within a repeat. Unknown where
        ranks meet in the forward, under fsdp, DeepSpeed and tensor parallelism."""
        ranks = range(self.cell.world_size)
        own = [[sum(steps) for steps in r.parts["own_work_s"]] for r in self.repeats]  # [repeat][rank]
        alone = computes_alone(self.cell.engine, self.cell.tensor)
        if len(ranks) == 1 or not alone or not all(map(all, own)):
            return {}
        ratios = [[s[k] / statistics.median([*s[:k], *s[k + 1 :]]) for s in own] for k in ranks]
        means = [stats.geometric_mean(each) for each in ratios]
        rank = max(ranks, key=lambda k: means[k][0])
        ratio, interval = means[rank]
        same = all(s.index(max(s)) == rank for s in own)
        sure = interval is not None and interval[0] > STRAGGLER_RATIO and same
        return {
            "straggler_ratio": ratio,
            "straggler_ratio_ci95": interval,
            "straggler_rank": rank if sure else None,
        }

    @property
    def curve(self) -> list[tuple[int, float]]:
        """(tokens, loss) of the first repeat; the losses of the others are the same by construction."""
        return self.repeats[0].curve


def collect(grid: Grid, out: Path, *, facts: Mapping[str, Any]) -> Scaling:
    """scaling.json from the files of `out`. `facts`: environment, command, config_hash."""
    measured: dict[str, Measured] = {}
    states: dict[str, Facts] = {}
    for seed, cell in enumerate(grid.cells):
        repeats, states[cell.id] = _repeats_of(cell, grid, out)
        if repeats:
            measured[cell.id] = Measured(cell, repeats, grid.config.data.sequence_length, seed)
    settings = _settings(grid, next(iter(measured.values()), None))
    matmul = results.find(out / "peak.json", results.PeakFile)
    peak = results.Peak(
        datasheet_flops=cost.peak_flops(str(settings.device), str(settings.precision)),
        matmul_flops=matmul.matmul_flops if matmul else None,
        matmul_precision=matmul.precision if matmul else None,
        shapes=matmul.shapes if matmul else [],
    )
    cells = [_cell(cell, states[cell.id], grid, measured, settings, peak) for cell in grid.cells]
    links = [link for path in sorted(out.glob("links-*.json")) if (link := results.find(path, results.Link))]
    modes, profile = grid.settings.modes, results.find(out / "profile.json", results.Profile)
    counts = {cell.world_size for cell in grid.cells if cell.world_size > 1}
    whole = profile is not None and matmul is not None and len(links) == len(counts)
    return Scaling(
        status="complete" if whole and all(c.status != "pending" for c in cells) else "partial",
        **facts,
        mode=modes[0] if len(modes) == 1 else "both",
        settings=settings,
        baselines={name: [f"{mode}-{name}-n1" for mode in modes] for name in ("single", "ddp")},
        peak=peak,
        cells=cells,
        links=links,
        profile=profile,
    )


def _repeats_of(cell: GridCell, grid: Grid, out: Path) -> tuple[list[Repeat], Facts]:
    """The runs of a cell that ended well, none when one did not; and how it ended, as Cell has it."""
    repeats, settings = [], grid.settings
    for place in range(settings.repeats):
        directory = run_dir(out, cell, place)
        status, summary = ended(directory), read_summary(directory)
        if summary is not None and status in ("oom", "failed"):
            return [], {"status": status, "failure_kind": failure_kind(directory), "cause": cause(directory)}
        with contextlib.suppress(ValueError, KeyError, TypeError, AttributeError):  # not there, or not whole
            repeats.append(read_repeat(directory, cell.world_size, settings.warm_up, settings.steps))
    return repeats, {"status": "ok" if len(repeats) == settings.repeats else "pending"}


def _settings(grid: Grid, first: Measured | None) -> results.ScalingSettings:
    config, settings = grid.config, grid.settings
    summary = first.repeats[0].summary if first else Summary(status="done")
    model, sequence = config.model, config.data.sequence_length
    return results.ScalingSettings(
        steps=settings.steps,
        warm_up=settings.warm_up,
        repeats=settings.repeats,
        launcher=settings.launcher,
        engines=list(settings.engines),
        gpus=list(settings.gpus),
        micro_batch=config.batch.micro_size,
        accumulation=settings.accumulation or 1 if "weak" in settings.modes else None,
        global_batch=config.batch.global_size if "strong" in settings.modes else None,
        sequence_length=sequence,
        parameters=cost.num_parameters(model, sequence),
        flops_per_token=cost.flops_per_token(model, sequence, config.objective.mask_rate),
        precision=summary.precision or config.precision,
        compiled=summary.compiled,
        device=summary.device,
        optimizer=config.optim.name,
        model=f"{model.num_layers} layers x {model.hidden_size}, vocabulary {model.vocab_size:,}",
    )


def _cell(
    cell: GridCell,
    state: Facts,
    grid: Grid,
    measured: Mapping[str, Measured],
    settings: results.ScalingSettings,
    peak: results.Peak,
) -> Cell:
    named = {**cell.model_dump(), "launcher": grid.settings.launcher, **state}
    mine = measured.get(cell.id)
    if mine is None:
        return Cell(**named)
    ceiling = measured.get(f"{cell.mode}-ceiling-n{cell.world_size}")
    ceiling = ceiling if cell.kind == "run" and cell.world_size > 1 else None
    single, ddp = (measured.get(f"{cell.mode}-{name}-n1") for name in ("single", "ddp"))
    twin = next((m for m in measured.values() if m.cell.kind == "synthetic" and m.cell.of == cell.id), None)
    flops = mine.per_gpu * (settings.flops_per_token or 0.0)
    steps = [s for each in mine.steps for s in each]
    micro = cell.accumulation * (cell.world_size // cell.tensor)
    judged = Cell(
        **named,
        repeats=[_repeat(r, s, mine) for r, s in zip(mine.repeats, mine.steps, strict=True)],
        steps_per_s=1 / mine.mean_s,
        global_steps_per_s=micro / mine.mean_s,
        samples_per_s=cell.global_batch / mine.mean_s,
        tokens_per_s=mine.tokens_per_s,
        tokens_per_s_per_gpu=mine.per_gpu,
        step_time_s=results.StepTime(
            median=statistics.median(steps),
            p95=stats.percentile(steps, 0.95),
            mean=mine.mean_s,
            ci95=stats.interval(mine.draws),
        ),
        split_s=_split(mine, ceiling),
        data_wait_fraction=mine.part("data_wait_s") / mine.part("step_s"),
        data_wait_fraction_ci95=mine.share_interval("data_wait_s"),
        **_loader(mine, twin),
        **_against(mine, single, ddp, ceiling),
        exposed_comm_ddp_fraction=_ddp_exposed(mine),
        **mine.straggler(),
        ranks=mine.ranks(),
        peak_memory_gib=max(max(r.memory_gib) for r in mine.repeats),
        **_energy(mine),
        mfu=flops / peak.datasheet_flops if peak.datasheet_flops else None,
        mamfu=flops / peak.matmul_flops if peak.matmul_flops else None,
        **_launch(mine, settings.device),
        **_loss(mine, single, settings.precision),
        skipped_steps=max(r.summary.skipped_steps or 0 for r in mine.repeats),
    )
    return judged.model_copy(update={"flags": _flags(judged, single is not None)})


def _repeat(repeat: Repeat, steps: Sequence[float], mine: Measured) -> results.Repeat:
    mean = sum(steps) / len(steps)
    return results.Repeat(
        run=f"runs/{repeat.name}",
        steps=len(steps),
        steps_per_s=1 / mean,
        tokens_per_s=mine.tokens / mean,
        step_time_s=results.RepeatTime(median=statistics.median(steps), p95=stats.percentile(steps, 0.95)),
    )


def _against(mine: Measured, single: Measured | None, ddp: Measured | None, top: Measured | None) -> Facts:
    """Speed-up and efficiencies: throughput over N x that of one rank, over that of the ceiling."""
    n = mine.cell.world_size
    out: Facts = {}
    if single is not None:
        out["speedup"] = mine.tokens_per_s / single.tokens_per_s
        out["efficiency"], out["efficiency_ci95"] = _ratio(mine, single, n)
    if ddp is not None:
        out["efficiency_ddp1"], out["efficiency_ddp1_ci95"] = _ratio(mine, ddp, n)
    if top is not None:
        reached, interval = _ratio(mine, top)
        out |= {"communication_efficiency": reached, "communication_efficiency_ci95": interval}
        out |= {"ceiling_tokens_per_s": top.tokens_per_s, "exposed_comm_fraction": 1 - reached}
        if single is not None:
            out["ceiling_efficiency"], out["ceiling_efficiency_ci95"] = _ratio(top, single, n)
    return out


def _ratio(mine: Measured, base: Measured, count: int = 1) -> tuple[float, list[float] | None]:
    """Throughput over `count` x that of `base`, and its interval."""
    interval = stats.ratio_interval(base.draws, mine.draws, mine.tokens / base.tokens / count)
    return mine.tokens_per_s / base.tokens_per_s / count, interval


def _split(mine: Measured, top: Measured | None) -> results.SplitTime:
    """Of a mean step, seconds, mean over ranks. Exposed communication is what the passes and the optimizer's
    phase (where ZeRO-1 waits) take beyond those of the ceiling, for as many tokens per rank."""
    whole, data, passes, optimizer = (
        mine.part(name) for name in ("step_s", "data_wait_s", "forward_backward_s", "optimizer_s")
    )
    other = max(0.0, whole - data - passes - optimizer)
    if top is None:
        return results.SplitTime(data=data, forward_backward=passes, optimizer=optimizer, other=other)
    own_passes = min(passes, top.part("forward_backward_s") * mine.tokens / top.tokens)
    own_optimizer = min(optimizer, top.part("optimizer_s"))
    comm = passes - own_passes + optimizer - own_optimizer
    return results.SplitTime(
        data=data, forward_backward=own_passes, exposed_comm=comm, optimizer=own_optimizer, other=other
    )


def _ddp_exposed(mine: Measured) -> float | None:
    """The same share of a step from DDP's own samples in the timed steps; it does not see what tensor
    parallelism sends."""
    if mine.cell.world_size == 1 or mine.cell.tensor > 1:
        return None
    return _median([statistics.median(r.exposed_s) / mine.mean_s for r in mine.repeats if r.exposed_s])


def _energy(mine: Measured) -> Facts:
    """Joules of the real steps, where every rank's device told it."""
    joules = _median([r.summary.energy_j for r in mine.repeats])
    tokens = _median([r.summary.tokens for r in mine.repeats])
    per = joules / tokens * 1e6 if joules is not None and tokens else None
    return {"energy_j": joules, "energy_j_per_mtoken": per}


def _median(values: Sequence[float | None]) -> float | None:
    """Of those that are known."""
    known = [value for value in values if value is not None]
    return statistics.median(known) if known else None


def _launch(mine: Measured, device: str | None) -> Facts:
    """Host time to enqueue the steps that the device kept up with, over all steps: near 1 the device waits
    for the host. Unknown on a CPU."""
    if device in (None, "CPU"):
        return {}
    share = mine.part("host_s") / mine.part("step_s")
    return {"launch_fraction": share, "launch_fraction_ci95": mine.share_interval("host_s")}


def _loader(mine: Measured, twin: Measured | None) -> Facts:
    """The share of a step that the same cell without the loader saves."""
    if twin is None:
        return {}
    interval = stats.ratio_interval(twin.draws, mine.draws)
    return {
        "loader_fraction": 1 - twin.mean_s / mine.mean_s,
        "loader_fraction_ci95": interval and [1 - interval[1], 1 - interval[0]],
    }


def _loss(mine: Measured, single: Measured | None, precision: str | None) -> Facts:
    """The curve, and whether it is the single rank's. Only a strong grid trains one model."""
    curve = mine.curve
    out: Facts = {"loss": results.LossCurve(final=curve[-1][1] if curve else None, curve=list(curve))}
    if mine.cell.mode != "strong" or mine.cell.kind != "run" or single is None or not curve:
        return out
    if [tokens for tokens, _ in curve] == [tokens for tokens, _ in single.curve]:
        pairs = zip((loss for _, loss in curve), (loss for _, loss in single.curve), strict=True)
        deviation = max(abs(own - base) / max(abs(base), 1e-12) for own, base in pairs)
        agrees = deviation <= LOSS_TOLERANCE.get(str(precision), 1e-4)
        out |= {"loss_deviation": deviation, "loss_agrees": agrees}
    return out


def _flags(cell: Cell, has_baseline: bool) -> list[str]:
    """What a reader must know before quoting the cell. `has_baseline`: one rank has been measured."""
    flags = []
    if cell.skipped_steps:
        flags.append(
            f"{cell.skipped_steps} optimizer steps were skipped (gradient not finite), and count as steps"
        )
    if cell.mode == "strong" and cell.kind == "run" and cell.loss_agrees is None:
        why = "a logged line is missing or not finite" if has_baseline else "there is no run of one rank"
        flags.append(f"losses are not compared: {why}")
    sent = cell.communication_efficiency_ci95
    if sent is not None and sent[0] > 1:
        flags.append("faster than its ceiling: the engine does less work per rank than a copy")
    if cell.loss_agrees is False:
        flags.append(f"not the same model: losses differ from one rank's by {cell.loss_deviation}")
    counters = cell.exposed_comm_ddp_fraction
    if sent is not None and counters is not None and is_measurable(sent):
        least, most = 1 - sent[1], 1 - sent[0]
        if not least - CROSS_CHECK <= counters <= most + CROSS_CHECK:
            flags.append(
                f"exposed communication: {100 * least:.1f} % to {100 * most:.1f} % by the ceiling, "
                f"{100 * counters:.1f} % by DDP's own counters"
            )
    return flags
