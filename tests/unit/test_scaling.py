"""Tests of the scaling grid and of the results computed from run records, without running anything."""

import dataclasses
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from bert_dp import files
from bert_dp.config import load_config, resolve
from bert_dp.cost import flops_per_token
from launcher import results
from launcher.job import Output, VerbOptions
from launcher.log import Log
from launcher.machine import environment
from launcher.machine.environment import Environment
from launcher.run.train import MEMORY_STATE, check_memory
from launcher.run.trials import SCRATCH, Runner, SearchOutcome, Slot, Trial, TrialOutcome
from launcher.scale import benchmark, models
from launcher.scale.analyze import analyze, diagnose
from launcher.scale.benchmark import cores_of, run_grid
from launcher.scale.grid import Grid, Settings, run_dir
from launcher.scale.models import CellMeasurement, GridCell
from tests import scaling_fixture
from tests.e2e.cli import TINY
from tests.helpers import failed, make_config, read_json
from tests.unit.test_result_files import flat

MACHINE = environment.probe()
SETTINGS = Settings(
    gpus=(1, 2, 4),
    modes=("weak", "strong"),
    engines=("ddp", "zero1"),
    tensor=(1,),
    launcher="torchrun",
    repeats=2,
    steps=6,
    warm_up=2,
    accumulation=2,
)
CONFIG = make_config(
    *("data.sequence_length=16", "schedule.hours=1", "precision=fp32"),
    *("model.vocab_size=64", "model.hidden_size=32", "model.num_layers=2", "model.num_heads=2"),
    *("model.intermediate_size=32", "batch.global_size=32", "batch.micro_size=4"),
    *("batch.ramp_fraction=0.5", "batch.ramp_quantum=8"),
)


def grid(machine: Environment = MACHINE, *, on_gpu: bool = False, **changes: Any) -> Grid:
    return Grid(CONFIG, dataclasses.replace(SETTINGS, **changes), machine, on_gpu=on_gpu)


def two(**changes: Any) -> Grid:
    """Return a grid for strong scaling of ddp over two ranks, with baselines and ceilings."""
    return grid(**{"gpus": (2,), "modes": ("strong",), "engines": ("ddp",), **changes})


def with_memory(gib: float, **changes: Any) -> Environment:
    return dataclasses.replace(MACHINE, memory_available_gib=gib, memory_limit_gib=None, **changes)


def test_a_grid_trains_the_users_configuration_with_baselines_and_ceilings_in_every_repeat() -> None:
    made = grid()
    assert made.issues == []
    whats = ("ddp", "zero1", "ceiling")
    ids = ["single-n1", "ddp-n1", "zero1-n1", *(f"{what}-n{n}" for n in (2, 4) for what in whats)]
    assert [cell.id for cell in made.cells] == [f"{mode}-{i}" for mode in ("weak", "strong") for i in ids]
    for cell in made.cells:
        conf = made.config_of(cell)
        assert cell.global_batch == cell.micro_batch * cell.accumulation * cell.world_size
        assert cell.micro_batch == 4
        assert cell.accumulation == 2 if cell.mode == "weak" else cell.global_batch == 32
        assert (conf.model, conf.optim) == (CONFIG.model, CONFIG.optim)
        assert (conf.schedule.steps, conf.schedule.hours, conf.checkpoint.keep) == (8, None, 0)
        assert (conf.batch.ramp_fraction, conf.compile) == (0, "off")
        assert conf.parallel.engine == cell.engine
    order, half = [cell.id for cell, _ in made.order()], len(made.cells)
    assert sorted(order[:half]) == sorted(order[half:]) == sorted(cell.id for cell in made.cells)
    assert order[:half] != order[half:], "each repeat has its own order"
    assert order == [cell.id for cell, _ in made.order()]


def test_settings_of_an_engine_apply_only_to_its_cells() -> None:
    parallel = CONFIG.parallel.model_copy(update={"engine": "fsdp", "fsdp_replicas": 2})
    engines = ("fsdp", "deepspeed-1", "deepspeed-3")
    settings = dataclasses.replace(SETTINGS, gpus=(4,), modes=("weak",), engines=engines)
    made = Grid(CONFIG.model_copy(update={"parallel": parallel}), settings, MACHINE, on_gpu=False)
    assert made.issues == []
    own = {cell.id: made.config_of(cell).parallel for cell in made.cells}
    assert {name for name, each in own.items() if each.fsdp_replicas == 2} == {"weak-fsdp-n4"}
    for stage in (1, 3):
        each = own[f"weak-deepspeed-{stage}-n4"]
        assert (each.engine, each.zero_stage) == ("deepspeed", stage)


def refused_of(made: Grid, cell_id: str) -> list[tuple[str, str, str | None]]:
    """Return (setting, kind, other) of each issue of a cell."""
    return [(i.setting, i.kind, i.other) for i in made.issues if f"(cell {cell_id})" in i.message]


@pytest.mark.parametrize(
    ("ranks", "tensor", "engine", "cell_id", "issue"),
    [
        (3, 1, "ddp", "strong-ddp-n3", ("batch.global_size", "does_not_divide", "batch.micro_size")),
        (3, 3, "ddp", "weak-ddp-n3-tp3", ("model.num_heads", "does_not_divide", "parallel.tensor")),
        (2, 2, "accelerate", "weak-accelerate-n2-tp2", ("parallel.tensor", "unsupported", "parallel.engine")),
        (3, 2, "ddp", "weak-ddp-n3-tp2", ("--tensor", "does_not_divide", "--nproc")),
    ],
)
def test_an_impossible_cell_is_reported(
    ranks: int, tensor: int, engine: str, cell_id: str, issue: tuple[str, str, str | None]
) -> None:
    made = grid(gpus=(ranks,), tensor=(tensor,), engines=(engine,))
    assert refused_of(made, cell_id)[0] == issue
    assert cell_id not in {cell.id for cell in made.cells}


@pytest.mark.parametrize(
    ("share", "on_gpu", "refused"), [(0.0, False, 1), (0.0, True, 1), (0.1, False, 1), (0.1, True, 0)]
)
def test_a_cell_far_above_the_memory_is_refused(share: float, on_gpu: bool, refused: int) -> None:
    """The memory of four ranks fits the model state and `share` of the rest. A compiled step on a GPU needs
    less than the estimate of an eager step."""
    alone = check_memory(CONFIG, 1, MACHINE, on_gpu=False)
    state = sum(alone.parts_gib[name] for name in MEMORY_STATE)
    host_gib = (state + share * (alone.total_gib - state)) * 4 if share else 0.0002
    gpus = [environment.Gpu(0, "g", host_gib / 4, None, free_gib=host_gib / 4)] * 4 if on_gpu else []
    made = grid(with_memory(host_gib, gpus=gpus), on_gpu=on_gpu, modes=("strong",))
    assert len(refused_of(made, "strong-ddp-n4")) == refused


@pytest.mark.parametrize(
    ("changes", "refused"),
    [({"repeats": 5}, ""), ({"repeats": 1}, "settings.repeats"), ({"steps": 9}, "steps")],
)
def test_a_grid_resumes_with_more_repeats_only(tmp_path: Path, changes: dict[str, Any], refused: str) -> None:
    results.write(tmp_path / benchmark.PLAN, benchmark.plan_of(grid()))
    plan = benchmark.plan_of(grid(**changes))
    output = Output(tmp_path, "grid", benchmark.PLAN, plan, benchmark.MUST_MATCH, benchmark.MAY_INCREASE)
    assert [refused in issue.message for issue in output.issues()] == ([True] if refused else [])


def test_cpu_ranks_have_equal_cores_at_every_rank_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(8)))
    assert [cores_of(grid(), ranks) for ranks in (1, 4)] == [(0, 1), tuple(range(8))]
    assert cores_of(grid(gpus=(1, 16)), 2) == tuple(range(8))
    assert cores_of(grid(with_memory(64.0), on_gpu=True), 2) is None


def test_settings_without_effect_on_any_cell_are_named() -> None:
    ignored, batch = ["parallel.engine", "log.step_times", "checkpoint.keep"], "batch.global_size"
    for changes, expected in (({}, ignored), ({"modes": ("weak",)}, [*ignored, batch])):
        lines = grid(**changes).overridden([f"{name}=1" for name in (*ignored, "optim.lr", batch)])
        assert [line.partition(" ")[0] for line in lines] == expected


def write_run(
    directory: Path,
    cell: GridCell,
    step_s: float,
    *,
    steps: int = 8,
    own: Sequence[float] = (),
    loss: float = 4.0,
    exposed: float = 0.1,
    **summary: Any,
) -> None:
    """Write the records of a run whose steps take `step_s` after two slow ones. `own` is each rank's share of
    a step before the reduction, `exposed` the share that DDP's counters report as exposed."""
    directory.mkdir(parents=True)
    tokens = cell.global_batch * 16
    whole = {"status": "done", "precision": "fp32", "device": "CPU", "compiled": False}
    files.write_json(directory / "summary.json", {**whole, "tokens": steps * tokens, **summary})
    (directory / "steps").mkdir()
    for rank in range(cell.world_size):
        times = [9.0, 9.0] + [step_s] * (steps - 2)
        line = {
            "step": steps,
            "step_s": times,
            "data_wait_s": [0.0] * steps,
            "forward_backward_s": [0.8 * t for t in times],
            "compute_before_reduction_s": [(own[rank] if own else 0.5) * t for t in times],
            "optimizer_s": [0.1 * t for t in times],
            "host_s": times,
            "peak_memory_gib": 1.0 + rank,
            "ddp_exposed_s": exposed * step_s if cell.engine == "ddp" else None,
        }
        files.append_line(directory / "steps" / f"rank-{rank}.jsonl", line)
    for step in (4, 8):
        logged = {"step": step, "tokens": step * tokens, "loss": loss - step / 10}
        files.append_line(directory / "metrics.jsonl", logged)


def collected(
    out: Path, made: Grid, records: Callable[[GridCell, int], dict[str, Any] | None]
) -> dict[str, CellMeasurement]:
    """Return the cells of scaling.json after writing the runs of `records(cell, repeat)`; None: no run."""
    for cell in made.cells:
        for repeat in range(made.settings.repeats):
            if (options := records(cell, repeat)) is not None:
                write_run(run_dir(out, cell, repeat), cell, **{"step_s": 1.0, **options})
    return {cell.id: cell for cell in analyze(made, out, facts={}).cells}


DDP = "strong-ddp-n2"


def test_figures_and_verdicts_follow_from_the_records(tmp_path: Path) -> None:
    seconds = {"single": 1.0, "ddp": 0.625, "independent": 0.5}  # per step on two ranks
    no_memory = failed("rank 1: OutOfMemoryError: CUDA out of memory", "device_memory")

    def records(cell: GridCell, repeat: int) -> dict[str, Any] | None:
        if cell.engine == "zero1":
            return no_memory
        return {"step_s": seconds[cell.engine] ** (cell.world_size > 1)}

    made = grid(gpus=(1, 2), modes=("strong",))
    cells = collected(tmp_path, made, records)
    ddp = cells[DDP]
    assert (ddp.speedup, ddp.efficiency, ddp.global_steps_per_s) == pytest.approx((1.6, 0.8, 8 / 0.625))
    # passes take 0.8 and the optimizer 0.1 of a step, minus the ceiling's 0.4 and 0.05 s
    assert ddp.split_s.exposed_comm == pytest.approx(0.1 + 0.0125)
    assert (ddp.loss_agrees, ddp.loss_deviation, ddp.mfu, ddp.launch_fraction) == (True, 0.0, None, None)
    assert cells["strong-zero1-n2"].status == "oom"
    assert analyze(made, tmp_path, facts={}).status == "partial"
    judged, lost = diagnose(list(cells.values()))
    assert (judged.cell, judged.verdict) == (DDP, "communication-bound")
    assert "80.0 % [80.0 % to 80.0 %]" in judged.evidence
    assert (lost.cell, lost.verdict) == ("strong-zero1-n2", "out of memory")


def test_gpu_metrics_use_their_denominators(tmp_path: Path) -> None:
    """MFU is relative to the peaks of all GPUs. Memory is the maximum over ranks."""
    gpu = {"device": "NVIDIA H100 80GB HBM3", "precision": "bf16"}
    files.write_json(tmp_path / "peak.json", {"matmul_flops": 600e12})
    ddp = collected(tmp_path, two(), lambda cell, repeat: {"step_s": 0.5, **gpu})[DDP]
    flops = 32 * 16 / 0.5 * flops_per_token(CONFIG.model, 16, CONFIG.objective.mask_rate)
    assert (ddp.mfu, ddp.mamfu) == pytest.approx((flops / (2 * 989e12), flops / (2 * 600e12)))
    assert (ddp.peak_memory_gib, ddp.launch_fraction) == (2.0, pytest.approx(1.0))
    assert ddp.launch_fraction_ci95 == pytest.approx([1.0, 1.0])


@pytest.mark.parametrize(
    ("precision", "off", "agrees"),
    [("fp32", 0.5e-4, True), ("fp32", 2e-4, False), ("bf16", 0.015, True), ("bf16", 0.03, False)],
)
def test_losses_agree_within_the_precisions_tolerance(
    tmp_path: Path, precision: str, off: float, agrees: bool
) -> None:
    """The tolerance is 1e-4 of the loss in fp32 and 2 % in 16 bits. The last logged loss is 3.2."""

    def records(cell: GridCell, repeat: int) -> dict[str, Any]:
        return {"loss": 4.0 + 3.2 * off * (cell.world_size - 1), "precision": precision}

    ddp = collected(tmp_path, two(), records)[DDP]
    assert (ddp.loss_agrees, ddp.loss_deviation) == (agrees, pytest.approx(off))
    assert any("not the same model" in flag for flag in ddp.flags) != agrees


@pytest.mark.parametrize(("exposed", "flagged"), [(0.06, False), (0.04, True), (0.14, False), (0.16, True)])
def test_two_measures_of_communication_may_differ_by_a_twentieth_of_a_step(
    tmp_path: Path, exposed: float, flagged: bool
) -> None:
    """The ceiling says that a tenth is exposed. Cells of one rank and ceilings have no flags."""
    seconds = {"strong-ceiling-n2": 0.9, "strong-single-n1": 1.5}

    def records(cell: GridCell, repeat: int) -> dict[str, Any]:
        return {"step_s": seconds.get(cell.id, 1.0), "exposed": exposed}

    cells = collected(tmp_path, two(), records)
    seen = [f"{100 * exposed:.1f} % according to DDP's counters" in flag for flag in cells[DDP].flags]
    assert seen == [True] * flagged
    assert all(cells[name].flags == [] for name in ("strong-ddp-n1", "strong-ceiling-n2"))


def test_a_cell_that_skips_steps_or_is_faster_than_its_ceiling_is_flagged(tmp_path: Path) -> None:
    def records(cell: GridCell, repeat: int) -> dict[str, Any]:
        return {"step_s": 1.0 + 0.1 * (cell.kind == "ceiling"), "skipped_steps": 3 * repeat}

    flags = collected(tmp_path, two(), records)[DDP].flags
    assert [flag.partition(" (")[0].partition(":")[0] for flag in flags] == [
        "3 optimizer steps were skipped",
        "faster than its ceiling",
        "exposed communication",
    ]


@pytest.mark.parametrize("missing", ["", "links-2.json", "profile.json", "peak.json"])
def test_a_grid_is_complete_with_its_links_profile_and_peak(tmp_path: Path, missing: str) -> None:
    for name in ("links-2.json", "profile.json", "peak.json"):
        if name != missing:
            (tmp_path / name).write_text((RECORD / name).read_text())
    made = two(modes=("weak",))
    collected(tmp_path, made, lambda cell, repeat: {})
    seen = analyze(made, tmp_path, facts={})
    assert seen.status == ("partial" if missing else "complete")
    assert seen.mode == "weak"
    assert (seen.settings.accumulation, seen.settings.global_batch) == (2, None)


def test_losses_of_other_steps_are_not_compared(tmp_path: Path) -> None:
    made = two()
    collected(tmp_path, made, lambda cell, repeat: {})
    lines = run_dir(tmp_path, made.cells[0], 0) / "metrics.jsonl"
    lines.write_text(lines.read_text().splitlines(keepends=True)[0])
    for _ in ("other steps", "no run"):
        (ddp,) = (cell for cell in analyze(made, tmp_path, facts={}).cells if cell.id == DDP)
        assert (ddp.loss_agrees, ddp.loss_deviation) == (None, None)
        assert "losses are not compared" in ddp.flags[0]
        for path in (tmp_path / "runs").glob("strong-single-*"):
            shutil.rmtree(path)


@pytest.mark.parametrize(
    ("own", "straggler"),
    [
        ([(0.3, 0.6), (0.3, 0.6)], 1),
        ([(0.6, 0.3), (0.6, 0.3)], 0),
        ([(0.5, 0.59), (0.5, 0.59)], None),
        ([(0.5, 0.61), (0.5, 0.61)], 1),
        ([(0.5, 0.88), (0.5, 0.43)], None),  # 1.76 in one repeat, 0.86 in the other
        ([(0.5, 0.8), (0.5, 0.9)], None),  # two repeats: one degree of freedom
        ([(0.5, 0.8), (0.5, 0.9), (0.5, 0.85)], 1),
        ([(0.3, 0.6)], None),
        ([(0.2, 0.4, 0.2, 0.2)] * 3, 1),
        ([(0.2, 0.4, 0.2, 0.2), (0.2, 0.4, 0.41, 0.2), (0.2, 0.4, 0.2, 0.2)], None),  # rank 2 in one repeat
    ],
)
def test_a_straggler_is_the_same_rank_in_every_repeat(
    tmp_path: Path, own: list[tuple[float, ...]], straggler: int | None
) -> None:
    ranks = len(own[0])
    made = two(gpus=(ranks,), repeats=len(own))
    ddp = collected(tmp_path, made, lambda cell, repeat: {"own": own[repeat]})[f"strong-ddp-n{ranks}"]
    assert ddp.straggler_rank == straggler
    assert ranks == 2 or ddp.straggler_ratio == pytest.approx(2.0)
    assert (ddp.straggler_ratio_ci95 is None) == (len(own) == 1)


def test_a_replica_of_two_ranks_counts_once(tmp_path: Path) -> None:
    """Weak scaling, tensor 2: 2 ranks train 4 x 2 sequences per step, the ceiling's replicas 4 x 2 each."""
    seconds = {"weak-single-n1": 1.0, "weak-ddp-n1": 1.25, "weak-ddp-n2-tp2": 0.8, "weak-ceiling-n2": 1.1}
    made = two(modes=("weak",), tensor=(2,))
    cells = collected(tmp_path, made, lambda cell, repeat: {"step_s": seconds[cell.id]})
    assert set(cells) == set(seconds)
    split, reached = cells["weak-ddp-n2-tp2"], 8 / 0.8 / (16 / 1.1)
    expected = {
        "global_batch": 8,
        "global_steps_per_s": 2 / 0.8,
        "tokens_per_s": 8 * 16 / 0.8,
        "speedup": 1.25,
        "efficiency": 0.625,
        "efficiency_ddp1": 1.25 / 0.8 / 2,
        "communication_efficiency": reached,
        "ceiling_efficiency": 1 / 1.1,
    }
    assert {name: getattr(split, name) for name in expected} == pytest.approx(expected)
    assert split.communication_efficiency_ci95 == pytest.approx([reached] * 2)
    assert split.ceiling_efficiency_ci95 == pytest.approx([1 / 1.1] * 2)
    assert split.split_s.forward_backward == pytest.approx(0.8 * 1.1 / 2)  # half the ceiling's tokens
    assert split.exposed_comm_ddp_fraction is None
    assert (split.straggler_ratio, split.loss_agrees) == (None, None)


class MadeRunner(Runner):
    """A runner whose runs and helpers end at once. Runs of ddp on two ranks fail."""

    def __init__(self, out: Path, log: Log, *, on_gpu: bool):
        (out / SCRATCH).mkdir(exist_ok=True)
        super().__init__(out, [Slot()], [], launcher="torchrun", on_gpu=on_gpu, log=log)
        self.ran: list[Trial] = []
        self.helper_calls: list[tuple[str, list[str], Sequence[int] | None]] = []

    def run(self, trials: Iterable[Trial]) -> Iterator[tuple[Trial, TrialOutcome]]:
        for trial in trials:
            self.ran.append(trial)
            fails = trial.config.parallel.engine == "ddp" and trial.ranks == 2
            facts = failed("no") if fails else {"status": "done", "tokens_per_s": 2e3}
            trial.directory.mkdir(parents=True)
            files.write_json(trial.directory / "summary.json", facts)
            yield trial, TrialOutcome("failed" if fails else "ok", 1.0)

    def helper(self, module: str, arguments: Sequence[str], cores: Sequence[int] | None = None) -> list[Any]:
        self.helper_calls.append((module.rpartition(".")[2], list(arguments), cores))
        if module.endswith("all_reduce"):
            measured = {"seconds_median": 0.5, "busbw_gb_s": 3.0, "repeats": 7, "backend": "gloo"}
            return [{"bytes": int(size), **measured} for size in arguments[2:]]
        if module.endswith("profile_step"):
            self.profiled = load_config(Path(arguments[0]))
            return [{"micro_batch": 4}, read_json(RECORD / "profile.json")]
        return [read_json(RECORD / "peak.json")]


@pytest.mark.parametrize("on_gpu", [False, True])
def test_a_grid_runs_its_cells_and_measures_links_profile_and_peak_once(tmp_path: Path, on_gpu: bool) -> None:
    """A rank with a GPU may use every core."""
    machine = with_memory(64.0, gpus=[environment.Gpu(0, "g", 80.0, None)] * 2)
    made = grid(machine, on_gpu=on_gpu, gpus=(2,), modes=("weak",))
    cores = {ranks: cores_of(made, ranks) for ranks in (1, 2)}
    assert [each is None for each in cores.values()] == [on_gpu] * 2
    shown: list[str] = []
    runs = MadeRunner(tmp_path, shown.append, on_gpu=on_gpu)
    run_grid(made, runs, shown.append)
    names = [trial.name for trial in runs.ran]
    (lost,) = [name for name in names if name.startswith("weak-ddp-n2")]
    assert len(names) == len(set(names)) == 2 * len(made.cells) - 1, "a failed cell is not repeated"
    assert all(trial.cores == cores[trial.ranks] for trial in runs.ran)
    place = f"[{names.index(lost) + 1}/{2 * len(made.cells)}] {lost}"
    assert any(line.startswith(f"{place}: failed: no;") for line in shown)
    sizes = [4**k for k in range(6, 14)]
    link = results.read(tmp_path / "links-2.json", models.MeasuredLink)
    assert (link.world_size, link.backend, len(link.points)) == (2, "gloo", len(sizes))
    assert {(p.seconds, p.busbw_gb_s) for p in link.points} == {(0.5, 3.0)}
    links, (profile, _, profile_cores), peak = runs.helper_calls
    assert links == ("all_reduce", ["2", "0.3", *map(str, sizes)], None)
    assert (profile, profile_cores) == ("profile_step", cores[1])
    assert peak == ("matmul_peak", [made.precision, "2"], cores[1])
    batch, data = runs.profiled.batch, runs.profiled.data
    assert (batch.global_size, batch.micro_size, data.synthetic) == (4, 4, True)
    assert runs.profiled.parallel.engine == "single"


@pytest.mark.parametrize(("status", "code"), [("complete", 0), ("failed", 1), ("partial", 130)])
def test_the_exit_code_shows_a_failed_or_stopped_benchmark(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, status: str, code: int
) -> None:
    found = results.parse(scaling_fixture.scaling(prediction=True), models.Scaling, "scaling.json")
    cells = [c.model_copy(update={"status": "failed" if status == "failed" else "ok"}) for c in found.cells]
    found = found.model_copy(update={"cells": cells})
    settings = [*TINY, "data.sources=[builtin]", "run.device=cpu", "batch.global_size=32", "precision=fp32"]
    end = SearchOutcome("partial", None, 130) if status == "partial" else SearchOutcome("complete")
    monkeypatch.setattr(benchmark, "measure", lambda *_: (found, end))
    how = VerbOptions(tmp_path, False, False, Console(width=200))
    assert benchmark.scale("quickstart", settings, SETTINGS, how, lambda s: s.prediction) == code
    assert (tmp_path / "report.html").exists()


def test_a_run_ended_by_a_signal_stays_pending(tmp_path: Path) -> None:
    def records(cell: GridCell, repeat: int) -> dict[str, Any]:
        return {"status": "stopped", "signal": 2, "steps": 5} if cell.id == DDP else {}

    cells = collected(tmp_path, two(), records)
    assert {name for name, cell in cells.items() if cell.status == "pending"} == {DDP}
    assert {cell.status for cell in cells.values()} == {"ok", "pending"}


RECORD = Path(__file__).parents[2] / "benchmarks" / "raw" / "2026-11-21-scaling"


def test_the_committed_record_follows_from_its_raw_files() -> None:
    recorded, plan = (read_json(RECORD / name) for name in ("scaling.json", "grid.json"))
    del plan["config"]["data"]["build"]["order"]  # a setting that no longer exists
    del plan["settings"]["synthetic"]
    settings = Settings(**{k: tuple(v) if isinstance(v, list) else v for k, v in plan["settings"].items()})
    made = Grid(resolve([plan["config"]]), settings, MACHINE, on_gpu=False)
    again = results.plain(analyze(made, RECORD, facts={}))
    assert again["status"] == "complete"
    then = numbers(recorded)
    kept = {path: number for path, number in numbers(again).items() if path in then}
    assert kept == pytest.approx({path: then[path] for path in kept}, rel=1e-9)
    assert len(kept) > 300


def numbers(value: Any) -> dict[str, float]:
    """Return every number of a nested value by its path."""
    return {path: leaf for path, leaf in flat(value) if isinstance(leaf, int | float)}
