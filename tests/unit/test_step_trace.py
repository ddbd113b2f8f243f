"""Profiled steps: which are refused, what is recorded of them, and that nothing half-written has a name."""

from __future__ import annotations

import contextlib
import gzip
import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.autograd import DeviceType

from bert_dp import files
from bert_dp.config import find_config, load_config
from bert_dp.config.checks import ProfilePlan, parse_profile, profile_issues
from bert_dp.files.models import ProfileFile
from bert_dp.training.distributed import HostCollectives
from bert_dp.training.profiler import StepTrace, idle_share, top_operators
from bert_dp.training.record_files import WriteErrors
from bert_dp.training.world import World
from launcher.report.run_page import of_directories
from tests.e2e.cli import TINY, refused, tiny
from tests.helpers import issues_of, read_json
from tests.report_fixture import SUMMARY, make_run, shown, unfolded
from tests.states import FACTS
from tests.tensors import CPU as CPU_DEVICE

CPU, GPU = DeviceType.CPU, DeviceType.CUDA


# --- which steps


def test_steps_are_first_and_end_and_ranks_a_list() -> None:
    plan = parse_profile("10:13", "1, 0,1")
    assert plan == ProfilePlan(10, 12, (0, 1))
    assert plan.options(2) == ["--profile", "10:13", "--profile-ranks", "0,1"]
    assert plan.options(1) == ["--profile", "10:13", "--profile-ranks", "0"]
    assert ProfilePlan(10, 12, (1,)).options(1) == []
    assert parse_profile("1:2", "0") == ProfilePlan(1, 1, (0,))


@pytest.mark.parametrize(
    ("steps", "ranks", "said"),
    [
        ("10", "0", "'10' is not FIRST:END"),
        ("a:b\x1b", "0", r"'a:b\x1b' is not FIRST:END"),
        ("1:9999999999999", "0", "is not FIRST:END"),
        ("0:3", "0", "is not FIRST:END"),
        ("5:5", "0", "is not FIRST:END"),
        ("5:4", "0", "is not FIRST:END"),
        ("1:2", "", "--profile-ranks: '' is not a list of ranks"),
        ("1:2", "0,-1", "is not a list of ranks"),
    ],
)
def test_what_is_no_range_of_steps_or_list_of_ranks_is_refused(steps: str, ranks: str, said: str) -> None:
    (issue,) = issues_of(parse_profile, steps, ranks)
    assert said in issue


def test_steps_and_ranks_that_the_run_does_not_have_are_named() -> None:
    plan = ProfilePlan(10, 12, (0, 3))
    assert profile_issues(plan, 4, steps=12) == []
    assert profile_issues(plan, 4, steps=None, done=9) == []
    issues = profile_issues(plan, 2, steps=11, done=10)
    assert [(i.setting, i.value) for i in issues] == [
        ("--profile", 12),
        ("--profile", 10),
        ("--profile-ranks", 3),
    ]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--profile", "3:4"), "--profile: step 3 is beyond this run's 2; end at 3 at most"),
        (("--profile", "2:1"), "--profile: '2:1' is not FIRST:END"),
        (("--profile", "1:2", "--profile-ranks", "2"), "--profile-ranks: no rank 2, this run has 0 to 1"),
        (("--profile-ranks", "0"), "--profile-ranks: records nothing without --profile"),
    ],
)
def test_the_verb_refuses_them_before_anything_starts(
    shards: Path, tmp_path: Path, options: tuple[str, ...], said: str
) -> None:
    run_dir = tmp_path / "run"
    assert said in refused("train", "quickstart", *tiny(shards), "--run-dir", str(run_dir), *options)
    assert not run_dir.exists()


def test_a_step_that_the_checkpoint_has_behind_it_is_refused(shards: Path, tmp_path: Path) -> None:
    checkpoint = tmp_path / "run" / "checkpoints" / "step-00000001"
    checkpoint.mkdir(parents=True)
    config = load_config(find_config("quickstart"), [*TINY, f"data.path={shards}"])
    files.write_json(
        checkpoint / "state.json", {**FACTS, "step": 1, "config": config.model_dump(mode="json")}
    )
    asked = ("train", "quickstart", *tiny(shards), "--resume", str(checkpoint), "--profile")
    said = refused(*asked, "1:2", "--run-dir", str(tmp_path / "new"))
    assert "--profile: step 1 is done, the run goes on with step 2" in said


# --- what is recorded


def event(start: float, end: float, device: DeviceType = CPU, *, annotation: bool = False) -> Any:
    """Microseconds."""
    return SimpleNamespace(
        time_range=SimpleNamespace(start=start, end=end), device_type=device, is_user_annotation=annotation
    )


EVENTS = [
    event(0, 1000, annotation=True),  # such as an optimizer's step, which holds operators and gaps
    event(100, 300),
    event(150, 200),  # called by the one before
    event(250, 400),  # of another thread
    event(600, 700),
    event(0, 1000, GPU, annotation=True),
    event(200, 300, GPU),
    event(900, 1000, GPU),
]


@pytest.mark.parametrize(("on_gpu", "share"), [(False, 0.6), (True, 0.8)])
def test_idle_is_what_no_operator_or_kernel_covers(on_gpu: bool, share: float) -> None:
    assert idle_share(EVENTS, on_gpu, 1e-3) == pytest.approx(share)
    assert idle_share(reversed(EVENTS), on_gpu, 1e-3) == pytest.approx(share)
    assert idle_share([], on_gpu, 1e-3) == 1.0
    assert idle_share([event(0, 2000, device) for device in (CPU, GPU)], on_gpu, 1e-3) == 0.0


def test_operators_stand_by_their_own_time_on_the_device() -> None:
    def of(name: str, cpu: float, gpu: float, *, annotation: bool = False, device: DeviceType = CPU) -> Any:
        return SimpleNamespace(
            key=name,
            count=2,
            self_cpu_time_total=cpu,
            self_device_time_total=gpu,
            is_user_annotation=annotation,
            device_type=device,
        )

    averages = [
        of("mm", 10, 500),
        of("add", 300, 20),
        of("step", 900, 900, annotation=True),
        of("view", 5, 0),
        of("the kernel of mm", 0, 500, device=GPU),
    ]
    assert [(o.name, o.calls, o.self_s) for o in top_operators(averages, False)] == [
        ("add", 2, pytest.approx(300e-6)),
        ("mm", 2, pytest.approx(10e-6)),
        ("view", 2, pytest.approx(5e-6)),
    ]
    assert [o.name for o in top_operators(averages, True)] == ["mm", "add"]
    assert len(top_operators([of(str(n), n + 1, 0) for n in range(50)], False)) == 20


class Paused:
    """A meter that notes when steps are not timed."""

    def __init__(self) -> None:
        self.times = 0
        self.now = False

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        self.times, self.now = self.times + 1, True
        yield
        self.now = False


def traced(plan: ProfilePlan, run_dir: Path, rank: int, steps: range, stop: int | None = None) -> StepTrace:
    """A run of `steps`, each a matrix product, that stops after step `stop`."""
    entered: list[str] = []
    heartbeat: Any = SimpleNamespace(enter=lambda phase, step: entered.append(phase))
    comm = HostCollectives(World(rank, rank, 2, 2), None)
    trace = StepTrace(plan, comm, CPU_DEVICE, run_dir, heartbeat, WriteErrors())
    meter: Any = Paused()
    trace.reached(steps.start - 1, meter)
    for step in steps:
        torch.randn(8, 8) @ torch.randn(8, 8)
        trace.reached(step, meter)
        if step == stop:
            break
    trace.reached(step, meter, at_end=True)
    assert (meter.times, meter.now) == (0 if trace.steps is None else 2, False)
    assert entered == ["save"] * meter.times, "the launcher must not take it for a step that hangs"
    return trace


@pytest.mark.parametrize(
    ("plan", "steps", "stop", "recorded"),
    [
        ((2, 3), range(1, 6), None, [2, 3]),
        ((1, 1), range(1, 6), None, [1, 1]),
        ((4, 5), range(1, 6), None, [4, 5]),
        ((2, 4), range(1, 6), 3, [2, 3]),  # a signal came
        ((2, 4), range(3, 6), None, [3, 4]),  # started again from the checkpoint of step 2
    ],
)
def test_the_steps_of_the_plan_are_recorded_as_far_as_the_run_takes_them(
    tmp_path: Path, plan: tuple[int, int], steps: range, stop: int | None, recorded: list[int]
) -> None:
    assert traced(ProfilePlan(*plan, (0,)), tmp_path, 0, steps, stop).steps == recorded
    profile = ProfileFile.model_validate(read_json(tmp_path / "profile" / "rank-0.json"))
    assert (profile.rank, profile.steps, profile.device) == (0, recorded, "cpu")
    products = {operator.name: operator.calls for operator in profile.operators}
    assert products["aten::mm"] == recorded[1] - recorded[0] + 1
    assert 0 <= profile.idle_share <= 1
    with gzip.open(tmp_path / "profile" / profile.trace) as file:
        names = [one.get("name") for one in json.load(file)["traceEvents"]]
    assert names.count("aten::mm") == products["aten::mm"]


def test_other_ranks_and_steps_that_never_come_leave_nothing(tmp_path: Path) -> None:
    plan = ProfilePlan(2, 3, (1,))
    assert traced(plan, tmp_path, 0, range(1, 6)).steps == [2, 3]
    assert traced(ProfilePlan(8, 9, (0,)), tmp_path, 0, range(1, 6)).steps is None
    assert traced(ProfilePlan(2, 3, (0,)), tmp_path, 0, range(4, 6)).steps is None
    assert not (tmp_path / "profile").exists()


def test_a_profile_that_cannot_be_written_ends_no_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "profile").write_text("in the way")
    trace = traced(ProfilePlan(2, 3, (0,)), tmp_path, 0, range(1, 4))
    assert (trace.steps, trace._write_errors.count) == ([2, 3], 1)
    assert "warning: the profile could not be written" in capsys.readouterr().out


# --- the report


def test_the_busiest_operators_of_a_rank_are_named(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", summary={**SUMMARY, "profiled_steps": [10, 12]})
    operators = [{"name": f"aten::op{n}", "calls": 1000, "self_s": 0.4 / (n + 1)} for n in range(5)]
    for rank, device in ((0, "cuda"), (1, "cpu")):
        facts = {"rank": rank, "steps": [10, 12], "device": device, "wall_s": 2.0, "idle_share": 0.125}
        (run / "profile").mkdir(exist_ok=True)
        files.write_json(
            run / "profile" / f"rank-{rank}.json", {**facts, "operators": operators, "trace": "t.json.gz"}
        )
    (run / "profile" / "rank-2.json").write_text("{}")
    report = of_directories([run])
    told = unfolded(shown(report, 200))
    assert "of the whole job; steps 10 to 12 under the profiler" in told
    assert "profile of rank 0 steps 10 to 12, idle 12.5 %, of 2.0 s; " in told
    assert "20.0 % in aten::op0, 10.0 % in aten::op1, 6.7 % in aten::op2" in told
    assert "aten::op3" not in told
    notes = [row.cells[0].note for row in report.sections[1].tables[0].rows]
    assert sum("profile/t.json.gz" in note for note in notes) == 2
