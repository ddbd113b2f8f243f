"""Test the first cause from the records of ranks and torchrun, its explanation, and the card of a failure."""

import errno
import itertools
import json
import re
import signal
import sys
import sysconfig
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from bert_dp import files
from bert_dp.config import Config, ConfigError, Issue, batch_layout, dump_config, load_config, shipped_configs
from bert_dp.cost import memory_estimate_gib
from bert_dp.files import STARTED_AGAIN
from bert_dp.files.models import Failure, FailureKind, RunMemory, kind_of_text
from bert_dp.training.process import RunFailed
from bert_dp.training.rank import record_error
from launcher.children import describe_exit_code
from launcher.watch import failure as watch
from launcher.watch.failure import RankExit, card, explain, first_line, suggest_micro_batch

WRONG = {"setting": "optim.lr", "kind": "out_of_range", "message": "wrong"}
TORCHRUN = """
Failures:
[1]:
  rank      : 1 (local_rank: 1)
  exitcode  : -9 (pid: 22935)  (SIGKILL)
Root Cause (first observed failure):
[0]:
  rank      : 0 (local_rank: 0)
  exitcode  : 1 (pid: 22934)
"""


@pytest.fixture(autouse=True)
def log_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(files.LOG_DIR, str(tmp_path))


def error(logs: Path, rank: int, message: str, time_ns: int, **facts: Any) -> None:
    message = f"RuntimeError: {message}"
    facts |= {"rank": rank, "time_ns": time_ns, "error_type": "RuntimeError", "message": message}
    facts |= {"where": "a.py:1", "kind": kind_of_text(message)}
    (logs / f"rank-{rank}.error.json").write_text(json.dumps(facts))


def cause_of(logs: Path, output: str = "", exits: Sequence[RankExit] = ()) -> Failure:
    failure = watch.first_cause(logs, output, exits, watch.recorded_errors(logs))
    assert failure is not None
    return failure


@pytest.mark.parametrize("kinds", sorted(set(itertools.product(("error", "silence", "peer"), repeat=3))))
def test_the_first_failure_not_due_to_a_peer_is_the_cause(tmp_path: Path, kinds: tuple[str, ...]) -> None:
    """Ranks 2, 1, 0 end in this order: with an error, without a record, or because a peer has ended."""
    exits = []
    for time_ns, (rank, kind) in enumerate(zip((2, 1, 0), kinds, strict=True), start=1):
        if kind == "silence":
            exits.append(RankExit(rank, -signal.SIGKILL, 10 * time_ns))
        else:
            message = "out of memory" if kind == "error" else "Connection closed by peer"
            error(tmp_path, rank, message, 10 * time_ns)
            exits.append(RankExit(rank, 1, 10 * time_ns + 5))
    failure = cause_of(tmp_path, "", exits)
    first = next((place for place, kind in enumerate(kinds) if kind != "peer"), 0)
    assert failure.rank == 2 - first
    assert (failure.killed_by is not None) == (kinds[first] == "silence")


DEEPSPEED = "[ERROR] ['python', '-m', 'bert_dp.worker'] exits with return code = -11"
GONE, LATER = "Connection closed by peer", "out of luck"


@pytest.mark.parametrize(
    ("message", "exits", "output", "cause"),
    [  # rank 0 raises its error at time 50
        (GONE, [(0, 1, 52), (1, -9, 51)], "", "rank 1: killed by signal 9 (SIGKILL)"),
        (LATER, [(1, -9, 40), (0, 1, 52)], "", "rank 1: killed by signal 9 (SIGKILL)"),
        (LATER, [(1, -9, 60), (0, 1, 52)], "", "rank 0: RuntimeError: out of luck"),
        (GONE, [(1, None, 51)], DEEPSPEED, "rank 1: killed by signal 11 (SIGSEGV)"),
        (GONE, [(1, None, 51)], "", "rank 1: ended without recording an error"),
        (GONE, [(1, 7, 51)], "", "rank 1: exited with code 7 without recording an error"),
        (GONE, [(1, 0, 51)], "", "rank 0: RuntimeError: Connection closed by peer"),
        (GONE, [], TORCHRUN, "rank 1: killed by signal 9 (SIGKILL)"),
        (LATER, [], TORCHRUN, "rank 0: RuntimeError: out of luck"),
    ],
)
def test_the_first_rank_to_end_is_the_cause_unless_an_error_came_earlier(
    tmp_path: Path, message: str, exits: list[tuple[int, int | None, int]], output: str, cause: str
) -> None:
    error(tmp_path, 0, message, 50)
    failure = cause_of(tmp_path, output, [RankExit(*each) for each in exits])
    assert failure.headline() == cause
    assert (failure.kind == "killed") == ("killed" in cause)


def test_the_earliest_exception_is_the_cause_unless_there_is_bad_input(tmp_path: Path) -> None:
    assert watch.first_cause(tmp_path, "", (), ()) is None
    error(tmp_path, 0, "late", 9)
    error(tmp_path, 1, "early", 3)
    assert cause_of(tmp_path).rank == 1
    assert cause_of(tmp_path, TORCHRUN).source is None, "the killed rank is the one that raised"
    error(tmp_path, 2, "optim.lr: wrong", 20, issues=[WRONG])
    assert cause_of(tmp_path).issues == [WRONG]


def test_a_failure_includes_the_end_of_the_log_without_lines_of_an_earlier_start(tmp_path: Path) -> None:
    path = tmp_path / "rank-1.log"
    path.write_text("x" * 5_000_000 + f"\nof the first start\n{STARTED_AGAIN}\nsetting up\n")
    assert cause_of(tmp_path, TORCHRUN).log_tail == ["setting up"]
    path.write_text("x" * 5_000_000 + "".join(f"\nline {i}" for i in range(100)))
    assert cause_of(tmp_path, TORCHRUN).log_tail == [f"line {i}" for i in range(80, 100)]
    assert len(watch.read_end(path)) < 100_000
    assert watch.read_end(tmp_path / "none") == ""


def test_consequences_are_listed_apart_from_ranks_with_the_same_error(tmp_path: Path) -> None:
    error(tmp_path, 1, "loss is not finite", 3)
    error(tmp_path, 2, "loss is nowhere finite", 4)
    error(tmp_path, 0, "[/build/gloo/pair.cc:537] Connection closed by peer [::1]:9. Typically it hangs.", 5)
    exits = [RankExit(1, 1, 6), RankExit(3, -signal.SIGTERM, 7), RankExit(4, -signal.SIGBUS, 8)]
    failure = cause_of(tmp_path, "", exits)
    assert (failure.rank, failure.same_error_ranks) == (1, [2])
    assert failure.consequences == [
        "rank 0: RuntimeError: Connection closed by peer [::1]:9",
        "rank 4: killed by signal 7 (SIGBUS)",
    ]


CRASH = f"""setting up
Fatal Python error: Segmentation fault

Thread 0x00007f01 (most recent call first):
  File "other.py", line 9 in wait

Current thread 0x00007f02 (most recent call first):
  File "{sysconfig.get_path("stdlib")}/ctypes/__init__.py", line 519 in string_at
  File "/data/mine/hook.py", line 12 in poke
  File "/data/mine/main.py", line 3 in <module>

Extension modules: numpy.core (total: 1)
"""


def test_a_crash_shows_the_stack_of_its_thread_and_the_line_of_own_code(tmp_path: Path) -> None:
    (tmp_path / "rank-1.log").write_text(CRASH)
    failure = cause_of(tmp_path, "", [RankExit(1, -signal.SIGSEGV, 1)])
    assert (failure.killed_by, failure.where, failure.source) == (11, "/data/mine/hook.py:12", "in poke")
    assert failure.log_tail[0] == "Fatal Python error: Segmentation fault"
    assert failure.log_tail[1].startswith("Current thread")
    assert failure.log_tail[-1].endswith('main.py", line 3 in <module>')
    killed = cause_of(tmp_path, "", [RankExit(1, -signal.SIGKILL, 1)])
    # SIGKILL leaves no stack, so the stack in the log is older
    assert (killed.where, killed.log_tail[0]) == (None, "setting up")


def test_first_line_returns_the_first_informative_line_of_a_message() -> None:
    assert first_line("\n\n  one  \ntwo") == "one"
    assert first_line("[enforce fail at alloc_cpu.cpp:118] err") == "[enforce fail at alloc_cpu.cpp:118] err"
    assert first_line("[/a/b/pair.cc:537] Read error") == "Read error"
    assert len(first_line("x" * 10_000)) < 700


def test_the_card_shows_the_most_important_lines_first_and_no_control_characters(tmp_path: Path) -> None:
    facts: dict[str, Any] = {"explanation": ["it is so"], "fix": ["do so"], "same_error_ranks": [0, 1]}
    facts |= {"where": "mine.py:7", "source": "in f: g()", "log": "rank-3.log", "log_tail": ["a", "\x1b]0;b"]}
    facts["consequences"] = [f"rank {i}: RuntimeError: Connection closed by peer" for i in range(4, 40)]
    facts["memory"] = RunMemory(peaks_gib={"rank 3": 2.0, "rank 1": 1.0}, oom_kills=0, counter=None)
    lines = card(Failure(rank=3, message="ValueError: \x1b[2Jno", **facts), tmp_path)
    assert lines[0].startswith("failed: rank 3: ValueError: ")
    assert lines[1:4] == ["  at mine.py:7 in f: g()", "  log: rank-3.log", f"  run: {tmp_path}"]
    assert lines[4:7] == ["  same error on ranks: 0, 1", "  why: it is so", "  fix: do so"]
    assert lines[7] == "  memory: rank 3 peaked at 2.00 GiB"
    assert all(line.startswith("  consequence: rank") for line in lines[8:-3])
    assert len(lines[8:-3]) == watch.CONSEQUENCES_SHOWN
    assert lines[-3].startswith("  consequence: 30 more ranks")
    assert lines[-2] == "  | a"
    assert "\x1b" not in "".join(lines)


def test_the_cause_is_written_before_its_traceback(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "rank-2.error.json"
    there: list[bool] = []
    monkeypatch.setattr(files, "hide", lambda text, secrets: text)
    monkeypatch.setattr(sys.stderr, "write", lambda text: there.append(path.exists()))
    try:
        json.loads("{")
    except ValueError as problem:
        record_error(2, problem)
    assert there == [True]
    facts = json.loads(path.read_text())
    # the error is raised in the standard library but attributed to the line of this test
    assert facts["error_type"] == "JSONDecodeError"
    assert facts["where"].rpartition(":")[0] == __file__
    name = "test_the_cause_is_written_before_its_traceback"
    assert facts["source"] == f'in {name}: json.loads("{{")'


def test_bad_input_is_recorded_and_no_error_contains_a_secret(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    record_error(0, ConfigError([Issue(**WRONG)]))
    assert capsys.readouterr().err == "error: optim.lr: wrong\n"
    failure = cause_of(tmp_path)
    assert (failure.kind, failure.issues) == ("bad_input", [WRONG])
    monkeypatch.setenv("MY_TOKEN", "q7Zx-81kkd-Pw04ff")
    record_error(1, RuntimeError("login with q7Zx-81kkd-Pw04ff failed"))
    for text in ((tmp_path / "rank-1.error.json").read_text(), capsys.readouterr().err):
        assert ("login with" in text, "q7Zx-81kkd-Pw04ff" in text) == (True, False)


def test_own_code_excludes_python_and_installed_packages() -> None:
    assert files.is_own_code(files.__file__)
    assert files.is_own_code("/data/mine/hook.py")
    installed = (json.__file__, pytest.__file__, f"{sysconfig.get_path('purelib')}/torch/nn/linear.py")
    for library in (*installed, "/x/lib/python3/dist-packages/a.py", "<frozen runpy>", "<string>"):
        assert not files.is_own_code(library)


def test_an_agreed_failure_names_no_rank(tmp_path: Path) -> None:
    record_error(0, RunFailed("5 steps in a row were skipped", "not_finite"))
    failure = cause_of(tmp_path)
    assert (failure.rank, failure.headline()) == (None, "5 steps in a row were skipped")
    assert failure.kind == "not_finite", "the kind must not depend on the message"
    assert failure.agreed
    assert failure.log == str(tmp_path / "rank-0.log")


@pytest.mark.parametrize(
    ("rank", "message", "kind"),
    [
        (0, f"exited with code 1 {watch.NO_CAUSE}", "no_cause"),
        (1, "ValueError: odd", "error"),
        (None, "step-00000002 could not be saved: [Errno 28] No space left on device", "disk"),
    ],
)
def test_a_full_disk_is_named(tmp_path: Path, rank: int | None, message: str, kind: FailureKind) -> None:
    before = Failure(rank=rank, message=message, kind=kind)
    failure = watch.add_disk_error(before, tmp_path, OSError(errno.ENOSPC, "full"))
    refused = f"No space left on device: cannot write to {tmp_path}"
    causes = {failure.headline(), *failure.explanation}
    assert failure.headline() == (refused if kind == "no_cause" else before.headline())
    assert before.headline() in causes
    assert "No space left on device" in " ".join(causes)
    assert any("make space" in fix for fix in failure.fix) == (kind != "error")


def test_a_real_time_signal_has_no_name() -> None:
    words = f"killed by signal {signal.SIGRTMIN + 3} (real-time)"
    assert describe_exit_code(-signal.SIGRTMIN - 3, "") == words


NONE = RunMemory(peaks_gib={}, oom_kills=0, counter="memory.events")
CUDA = "OutOfMemoryError: CUDA out of memory. GPU 1 has a total capacity of {} of which 5 MiB is free."
HOST = (
    "RuntimeError: [enforce fail at alloc_cpu.cpp:118] err == 0. DefaultCPUAllocator: can't allocate memory: "
    "you tried to allocate 99 bytes."
)


def config(*overrides: str) -> Config:
    batch = "batch.global_size=512 batch.micro_size=128 batch.ramp_fraction=0 batch.ramp_quantum=null"
    return load_config(shipped_configs() / "crammed-bert.yaml", [*batch.split(), *overrides])


def size(of: Config, world: int) -> float:
    return sum(memory_estimate_gib(of, "bf16", world).values())


def applied(base: Config, fix: str) -> Config:
    """Return the configuration with the micro batch of a fix."""
    (micro,) = re.findall(r"batch.micro_size=(\d+)", fix)
    return base.model_copy(update={"batch": base.batch.model_copy(update={"micro_size": int(micro)})})


@pytest.mark.parametrize("world", [1, 2, 4])
@pytest.mark.parametrize("capacity", [4.0, 6.0, 10.0])
def test_the_advised_micro_batch_fits_divides_and_keeps_the_global_batch(world: int, capacity: float) -> None:
    base = config()
    estimate, fix = suggest_micro_batch(base, "bf16", world, capacity, on_gpu=True)
    assert f"{size(base, world):.2f} GiB at micro batch 128; available: {capacity:.2f} GiB" in estimate
    changed = applied(base, fix)
    assert batch_layout(changed, world).global_size == base.batch.global_size
    assert size(changed, world) <= (1 - watch.SPARE) * capacity
    before, after = (512 // (of.batch.micro_size * world) for of in (base, changed))
    assert f" (accumulation {before} -> {after}, global batch" in fix
    assert fix.endswith(f"about {size(changed, world):.2f} GiB")
    larger = applied(base, f"batch.micro_size={2 * changed.batch.micro_size}")
    assert size(larger, world) > (1 - watch.SPARE) * capacity, "not the largest that fits"


def test_a_smaller_micro_batch_is_advised_even_if_the_estimate_fits() -> None:
    base = config("batch.micro_size=8")
    for times, fits in ((1000.0, True), (1.05, True), (0.95, False)):
        estimate, fix = suggest_micro_batch(base, "bf16", 1, times * size(base, 1), on_gpu=True)
        assert ("the run used more than the estimate" in estimate) == fits
        assert size(applied(base, fix), 1) <= (1 - watch.SPARE) * size(base, 1)


def test_other_settings_are_advised_if_one_sequence_does_not_fit() -> None:
    _, fix = suggest_micro_batch(config(), "bf16", 4, 0.1, on_gpu=True)
    assert fix.startswith("no smaller micro batch fits")
    assert "parallel.engine=zero1" in fix


def raised(message: str) -> Failure:
    return Failure(rank=0, message=message, kind=kind_of_text(message))


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    (tmp_path / "config.yaml").write_text(dump_config(config()))
    gpus = [{"memory_gib": 12.0}, {"memory_gib": 16.0}]
    files.write_json(
        tmp_path / "environment.json", {"gpus": gpus, "memory_gib": 64.0, "memory_limit_gib": 20.0}
    )
    return tmp_path


@pytest.mark.parametrize(
    ("message", "gib"),
    [
        (CUDA.format("10.00 GiB"), 10),
        (CUDA.format("8192.00 MiB"), 8),
        ("AcceleratorError: CUDA error: out of memory", 12),
    ],
)
def test_a_device_out_of_memory_needs_a_smaller_micro_batch(run_dir: Path, message: str, gib: int) -> None:
    explained = explain(raised(message), run_dir, 1, NONE)
    assert f"available: {gib:.2f} GiB" in explained.explanation[-1]
    assert explained.fix[0].startswith("batch.micro_size=")
    assert explained.memory is None


def test_host_memory_is_divided_between_the_ranks_of_a_node(run_dir: Path) -> None:
    assert "fewer ranks" in explain(raised(HOST), run_dir, 2, NONE).fix[0], "the GPUs hold the model"
    (run_dir / "config.yaml").write_text(dump_config(config("run.device=cpu")))
    explained = explain(raised(HOST), run_dir, 2, NONE)
    assert explained.explanation[0] == "control group limit 20.00 GiB / 2 ranks = 10.00 GiB per rank"
    assert "available: 10.00 GiB" in explained.explanation[1]
    assert explained.memory is NONE
    files.write_json(run_dir / "environment.json", {"memory_gib": 64.0})
    whole = explain(raised(HOST), run_dir, 4, NONE, here=2).explanation[0]  # on one of two nodes
    assert whole == "machine memory 64.00 GiB / 2 ranks = 32.00 GiB per rank"


@pytest.mark.parametrize(
    ("oom_kills", "part"),
    [
        (2, "because host memory ran out"),
        (0, "outside the run (the kernel counted no"),
        (None, "or by the kernel"),
    ],
)
def test_kills_by_the_kernel_have_their_own_advice(run_dir: Path, oom_kills: int | None, part: str) -> None:
    (run_dir / "config.yaml").write_text(dump_config(config("run.device=cpu")))
    killed = Failure(rank=1, kind="killed", message="killed by signal 9", killed_by=signal.SIGKILL)
    for peaks, peaked in (({"rank 1": 3.5}, "peaked at 3.50 GiB"), ({}, "before its memory was sampled")):
        memory = RunMemory(peaks_gib=peaks, oom_kills=oom_kills, counter="memory.events")
        explained = explain(killed, run_dir, 2, memory)
        assert part in explained.explanation[0]
        assert peaked in explained.explanation[0]
        assert explained.memory is memory
        assert explained.kind == ("host_memory" if oom_kills else "killed")
        assert ("host out of memory" in explained.message) == bool(oom_kills)
        assert explained.fix[0].startswith("batch.micro_size=") == bool(oom_kills)


@pytest.mark.parametrize("number", watch.MEANING)
def test_a_crash_is_explained(tmp_path: Path, number: int) -> None:
    explained = explain(Failure(rank=0, message="killed", killed_by=number), tmp_path, 1, NONE)
    assert (*explained.explanation, *explained.fix) == watch.MEANING[number]


@pytest.mark.parametrize("message", ["ValueError: no", HOST])
def test_without_a_configuration_there_is_no_explanation(tmp_path: Path, message: str) -> None:
    explained = explain(raised(message), tmp_path, 1, NONE)
    assert (explained.message, explained.explanation, explained.fix) == (message, [], [])
