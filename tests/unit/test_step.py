"""Tests of the optimizer step (norm, clip, skipped steps, freed gradients) and of the engines around it."""

import dataclasses
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from bert_dp.config import OptimConfig
from bert_dp.data.stream import random_batch
from bert_dp.measure.profile_step import ALONE, lone_trainer
from bert_dp.model.bert import build_model
from bert_dp.model.interface import Model
from bert_dp.model.load import first_state
from bert_dp.optim import make_optimizer
from bert_dp.parallel import Engine, State, deepspeed, make_engine, single
from bert_dp.parallel.base import ShardedSums, clip_and_step
from bert_dp.parallel.ddp import reduce_narrow
from bert_dp.parallel.zero1 import assign
from bert_dp.training.distributed import connect, disconnect
from bert_dp.training.loop import dry_run
from bert_dp.training.metrics import bucket_bytes
from bert_dp.training.process import World, read_world
from tests.helpers import TINY_MODEL, issues_of, make_config, raised_issues, tiny_run
from tests.ranks import run_ranks
from tests.tensors import CPU, bits, with_moments

# with this large eps AdamW's step is nearly proportional to the gradient, so that a wrong clip shows
OPTIM = OptimConfig(lr=0.1, eps=1.0, weight_decay=0.1)


class Tied(Model):
    """A model of two layers with a shared weight, a norm and a saved buffer."""

    def __init__(self, dtype: torch.dtype = torch.float32):
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.inner = nn.Linear(4, 4, bias=False)
        self.norm = nn.LayerNorm(4)
        self.outer = nn.Linear(4, 4)
        self.outer.weight = self.inner.weight
        self.register_buffer("seen", torch.zeros(()))
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.normal_(generator=generator)
        self.to(dtype)

    def forward(self, x: Tensor) -> Tensor:
        return self.outer(self.norm(self.inner(x)))


def loss_of(model: nn.Module, seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    x = torch.randn(8, 4, generator=torch.Generator().manual_seed(seed)).to(dtype)
    loss: Tensor = model(x).to(dtype).square().sum()  # never fp16, because the scaled loss would overflow
    return loss


def build(dtype: torch.dtype = torch.float32) -> tuple[Tied, torch.optim.Optimizer]:
    model = Tied(dtype)
    return model, make_optimizer(OPTIM, model.named_parameters(), model)


def everything(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    return bits({**model.state_dict(), **with_moments(optimizer, model.named_parameters())})


def step_once(optimizer: torch.optim.Optimizer, max_norm: float) -> Tensor:
    norm = clip_and_step(optimizer, None, max_norm)
    optimizer.zero_grad()
    return norm


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("max_norm", [0.0, 0.5, 1e6])
def test_clipping_equals_torchs_and_returns_the_unclipped_norm(dtype: torch.dtype, max_norm: float) -> None:
    ours, theirs = build(dtype), build(dtype)
    for step in range(3):
        loss_of(ours[0], step, dtype).backward()
        loss_of(theirs[0], step, dtype).backward()
        norm = step_once(ours[1], max_norm)
        parameters = list(theirs[0].parameters())
        wanted = torch.stack([p.grad.double().norm() for p in parameters if p.grad is not None]).norm()
        if max_norm:
            # torch divides by its norm + 1e-6
            nn.utils.clip_grad_norm_(parameters, max_norm + max_norm / float(wanted) * 1e-6)
        theirs[1].step()
        theirs[1].zero_grad()
        exact = {"rtol": 1e-6, "atol": 1e-7} if dtype == torch.float32 else {"rtol": 1e-7, "atol": 1e-9}
        torch.testing.assert_close(norm.double(), wanted, rtol=exact["rtol"], atol=0)
        assert norm > 0.5  # so that a missing clip shows
        for p, q in zip(ours[0].parameters(), theirs[0].parameters(), strict=True):
            torch.testing.assert_close(p, q, **exact)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("max_norm", [0.0, 0.5])
def test_a_gradient_that_is_not_finite_changes_nothing(bad: float, max_norm: float) -> None:
    model, optimizer = build()
    loss_of(model, 0).backward()
    step_once(optimizer, max_norm)
    before = everything(model, optimizer)
    loss_of(model, 1).backward()
    assert model.norm.weight.grad is not None
    model.norm.weight.grad[2] = bad
    norm = step_once(optimizer, max_norm)
    assert not norm.isfinite()
    assert everything(model, optimizer) == before
    loss_of(model, 2).backward()
    assert step_once(optimizer, max_norm).isfinite()  # the next step works again
    assert everything(model, optimizer) != before


# --- engines


@pytest.fixture
def group_of_one(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    monkeypatch.delenv("BERT_DP_INIT_FILE", raising=False)
    connect(ALONE, CPU, group_of_one=True)
    yield
    disconnect()


def engine_of(name: str, *, fp16: bool = False, **parallel: Any) -> Engine:
    config = make_config(parallel=parallel)
    return make_engine(name, config, ALONE, CPU, precision="fp16" if fp16 else "fp32", run_dir=Path())


def prepare(
    name: str, *, fp16: bool = False, **parallel: Any
) -> tuple[Engine, nn.Module, Tied, torch.optim.Optimizer]:
    engine = engine_of(name, fp16=fp16, **parallel)
    bare = Tied()
    wrapped, optimizer = engine.prepare(bare, lambda named: make_optimizer(OPTIM, named, bare))
    return engine, wrapped, bare, optimizer


def run_step(engine: Engine, model: nn.Module, step: int, *, fp16: bool = False) -> Tensor:
    for i in range(2):
        with engine.accumulate(last=i == 1):
            with torch.autocast("cpu", torch.float16, enabled=fp16):
                loss = loss_of(model, 10 * step + i) / (256 if fp16 else 1)
            engine.backward(loss)
    return engine.step(0.5)


def gathered(engine: Engine) -> State:
    state = engine.gather_state()
    assert state is not None
    return state


# --- fp16


class OverflowElsewhere(ShardedSums):
    """Sums in which this rank's part is finite and another rank's part is not."""

    def total(self, sums_N: Tensor) -> Tensor:
        return super().total(sums_N) + torch.inf


@pytest.mark.parametrize("sharding", ["parts of its tensors", "some of the tensors"])
def test_an_overflow_on_another_rank_halves_the_scale_and_skips_the_step(sharding: str) -> None:
    """Tensor parallelism and fsdp divide each tensor, and zero1 distributes whole tensors."""

    def step(sums: ShardedSums | None) -> Tensor:
        optimizer.zero_grad()
        scaler.scale(loss_of(model, 0)).backward()
        if sharding == "parts of its tensors":
            return clip_and_step(optimizer, scaler, 0.5, sums)
        return clip_and_step(optimizer, scaler, 0.5, norm_sums=sums)

    model, optimizer = build()
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    assert step(None).isfinite()
    before = everything(model, optimizer)
    assert not step(OverflowElsewhere()).isfinite()
    assert everything(model, optimizer) == before
    assert (scaler.get_scale(), scaler.state_dict()["_growth_tracker"]) == (512.0, 0)
    assert step(None).isfinite()
    assert everything(model, optimizer) != before
    assert (scaler.get_scale(), scaler.state_dict()["_growth_tracker"]) == (512.0, 1)


@pytest.mark.parametrize("name", ["ddp", "accelerate"])
def test_replicas_sum_with_loss_scale(name: str, group_of_one: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine multiplies by the number of replicas, because DDP takes the mean."""
    if name == "accelerate":
        pytest.importorskip("accelerate")
    for variable in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "OMP_NUM_THREADS"):
        monkeypatch.setenv(variable, "1" if variable.endswith(("SIZE", "THREADS")) else "0")
    norms = []
    for fp16, loss_scale in ((False, 1), (True, 256)):
        engine, model, bare, _ = prepare(name, fp16=fp16)
        engine.dp_size = 2
        norms.append(float(run_step(engine, model, 0, fp16=fp16)) * loss_scale)
        # gradients are views of DDP's buckets; freeing them would double the memory
        assert all(p.grad is not None and not p.grad.any() for p in bare.parameters())
    assert norms[1] == pytest.approx(norms[0], rel=0.05)


def gather_on_two_ranks() -> None:
    """Check that only rank 0 copies the state, because copies on all ranks may exceed the host's memory."""
    world = read_world(os.environ)
    connect(world, CPU)
    plain_to, copies = Tensor.to, []

    def counted(tensor: Tensor, *arguments: Any, **options: Any) -> Tensor:
        copies.extend([tensor.shape] * bool(options.get("copy")))
        return plain_to(tensor, *arguments, **options)

    for name, tensor in (("ddp", 1), ("ddp", 2), ("zero1", 1), ("zero1", 2), ("fsdp", 1), ("fsdp", 2)):
        config = make_config(parallel={"engine": name, "tensor": tensor}, model=TINY_MODEL)
        engine = make_engine(name, config, world, CPU, precision="fp32", run_dir=Path())
        bare = build_model(config.model, 16, 0)
        model, _ = engine.prepare(bare, lambda named, bare=bare: make_optimizer(OPTIM, named, bare))
        batch = random_batch(0, 2, 16, 4, 64)
        with engine.accumulate(last=True):
            engine.backward(model(batch.ids_BS, batch.positions_P, batch.labels_P))
        engine.step(0.5)
        copies.clear()
        Tensor.to = counted  # type: ignore[method-assign,assignment]
        state = engine.gather_state()
        Tensor.to = plain_to  # type: ignore[method-assign]
        held = 0 if state is None else sum(len(part) for part in state.values())
        assert (held > 0, len(copies)) == (world.rank == 0, held), (name, tensor)
    disconnect()


def test_a_gathered_state_is_only_on_rank_0() -> None:
    run_ranks(2, gather_on_two_ranks)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_mean_is_divided_before_it_is_narrowed(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """On four ranks, a gradient or a sum above fp16's 65,504 can have a mean that fits."""
    ours, others = torch.tensor([2e5, 6e4, 1.0, -2e5]), torch.tensor([0.0, 1.8e5, 2.0, 1e5])

    def all_reduce(sent: Tensor, group: Any, async_op: bool) -> Any:
        assert sent.dtype == dtype
        future: Any = torch.futures.Future()
        future.set_result([sent.add_((others / 4).to(dtype))])
        return SimpleNamespace(get_future=lambda: future)

    monkeypatch.setattr(torch.distributed, "all_reduce", all_reduce)
    buffer = ours.clone()
    group: Any = SimpleNamespace(size=lambda: 4)
    bucket: Any = SimpleNamespace(buffer=lambda: buffer)
    mean = reduce_narrow((group, dtype), bucket).wait()
    assert mean is buffer  # DDP continues with the fp32 buffer
    torch.testing.assert_close(mean, (ours + others) / 4, rtol=1e-2, atol=0)


# --- the dry run


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_the_dry_run_and_a_fresh_start_leave_no_trace(tmp_path: Path, shards: Path, precision: str) -> None:
    config = tiny_run(shards, batch={"global_size": 8, "micro_size": 4}, precision=precision)
    with lone_trainer(config, tmp_path) as trainer:
        bare = trainer.bare_model
        before = gathered(trainer.engine)
        start, _ = first_state(config, bare, trainer.data, trainer.comm)
        dry_run(trainer, start)
        after = gathered(trainer.engine)
        assert bits(after["model"]) == bits(before["model"])
        assert after["optimizer"] == {}
        assert all(p.grad is None for p in bare.parameters())
        assert trainer.stream.next().sample_ids.tolist() == [0, 1, 2, 3]
        assert bare.training
        assert bits(after["scaler"]) == bits(before["scaler"])
        assert (len(after["scaler"]) > 0) == (precision == "fp16")


@pytest.mark.parametrize(("global_size", "micro_batches"), [(4, [True]), (16, [False, True])])
def test_the_dry_run_runs_one_micro_batch_of_each_kind_and_one_evaluation(
    tmp_path: Path, shards: Path, monkeypatch: pytest.MonkeyPatch, global_size: int, micro_batches: list[bool]
) -> None:
    """This compiles everything, whereas a step of a large batch may take minutes."""
    config = tiny_run(shards, batch={"global_size": global_size, "micro_size": 4}, eval={"max_sequences": 20})
    taken, done, plain = list[bool](), list[bool](), single.SingleEngine.accumulate

    def accumulate(engine: Any, *, last: bool) -> Any:
        taken.append(last)
        return plain(engine, last=last)

    monkeypatch.setattr(single.SingleEngine, "accumulate", accumulate)
    with lone_trainer(config, tmp_path) as trainer:
        start, _ = first_state(config, trainer.bare_model, trainer.data, trainer.comm)
        heartbeat: Any = SimpleNamespace(progress=lambda: done.append(True))
        dry_run(dataclasses.replace(trainer, heartbeat=heartbeat), start)
    assert taken == micro_batches
    assert len(done) == len(micro_batches) + 1


# --- buckets and owners


def test_zero1_sends_buckets_of_configured_size(group_of_one: None, monkeypatch: pytest.MonkeyPatch) -> None:
    plain, sent = torch.distributed.reduce, list[int]()

    def counted(tensor: Tensor, *arguments: Any, **options: Any) -> Any:
        sent.append(tensor.nbytes)
        return plain(tensor, *arguments, **options)

    monkeypatch.setattr(torch.distributed, "reduce", counted)
    for bucket_mib, wanted in ((None, [112]), (48 / 2**20, [64, 48])):
        engine, model, _, _ = prepare("zero1", bucket_mib=bucket_mib)
        run_step(engine, model, 0)
        assert sorted(sent, reverse=True) == wanted
        sent.clear()


def test_ddp_uses_the_configured_buckets_and_graph(group_of_one: None) -> None:
    """Gradients in the buckets are zeroed in place, because freeing them would double the memory."""
    for settings, wanted in (({}, [112]), ({"bucket_mib": 48 / 2**20, "static_graph": True}, [64, 48])):
        engine, model, bare, _ = prepare("ddp", **settings)
        places = []
        for step in range(3):  # DDP rebuilds the buckets after the first step
            run_step(engine, model, step)
            grads = [p.grad for p in bare.parameters() if p.grad is not None]
            places.append([grad.data_ptr() for grad in grads])
        assert sorted(bucket_bytes(model), reverse=True) == wanted
        assert model.static_graph is settings.get("static_graph", False)
        assert (places[1], len(grads)) == (places[2], 4)
        assert not any(grad.any() for grad in grads)


def test_zero1_needs_a_tensor_for_each_replica(group_of_one: None) -> None:
    """The model has four tensors: a shared weight, a bias and the norm's two."""
    engine, bare = engine_of("zero1"), Tied()
    engine.dp_size = 4
    engine.prepare(bare, lambda named: make_optimizer(OPTIM, named, bare))
    engine.dp_size = 5
    (issue,) = raised_issues(engine.prepare, bare, lambda named: make_optimizer(OPTIM, named, bare))
    assert "4 tensors, too few for 5 replicas" in issue.message


SIZES = st.lists(st.integers(1, 1000), min_size=4, max_size=40)


@given(sizes=SIZES, ranks=st.integers(1, 4))
def test_owners_have_similar_numbers_of_elements(sizes: list[int], ranks: int) -> None:
    """An owner exceeds another by at most its smallest tensor, so a large tensor counts like many."""
    owners = assign({str(i): size for i, size in enumerate(sizes)}, ranks)
    held = [[size for i, size in enumerate(sizes) if owners[str(i)] == rank] for rank in range(ranks)]
    assert all(held)
    assert sorted(size for each in held for size in each) == sorted(sizes)
    least = min(sum(each) for each in held)
    assert all(sum(each) - min(each) <= least for each in held)


# --- deepspeed


def test_deepspeed_gets_the_settings_of_the_configuration() -> None:
    config = make_config(
        batch={"global_size": 8, "micro_size": 4}, optim={"clip": 0.75}, parallel={"zero_stage": 2}
    )
    wanted = {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": 0.75,
        "zero_optimization": {"stage": 2, "reduce_bucket_size": 25 * 2**20 / 4},
        "fp16": {"enabled": False},
        "bf16": {"enabled": False},  # because parameters are fp32
    }
    for precision, autocast in (("fp32", False), ("bf16", True)):
        passed = deepspeed.settings(config, precision)
        assert {name: passed[name] for name in wanted} == wanted
        assert passed["torch_autocast"]["enabled"] is autocast


def test_deepspeed_refuses_the_fp16_that_auto_chose(tmp_path: Path) -> None:
    """A GPU without bf16 leads to fp16, which the earlier check of the configuration cannot know."""
    config = make_config(parallel={"engine": "deepspeed"})
    (line,) = issues_of(deepspeed.DeepSpeedZero, config, ALONE, CPU, precision="fp16", run_dir=tmp_path)
    assert line.startswith("precision: auto means fp16")


def test_a_missing_package_is_named_with_its_install_command(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any, **__: Any) -> None:
        raise ModuleNotFoundError("No module named 'hjson'", name="hjson")

    monkeypatch.setitem(sys.modules, "bert_dp.parallel.deepspeed", SimpleNamespace(make=broken))
    (line,) = issues_of(engine_of, "deepspeed")
    assert "needs package hjson, which is not installed; `pip install 'deepspeed>=" in line


@pytest.mark.parametrize(("version", "is_old"), [((0, 19, 7), True), ((0, 9, 9), True), ((0, 19, 8), False)])
def test_a_deepspeed_version_that_may_step_with_bad_gradients_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, version: tuple[int, int, int], is_old: bool
) -> None:
    parts = {f"__version_{part}__": n for part, n in zip(("major", "minor", "patch"), version, strict=True)}
    number, comm = ".".join(map(str, version)), SimpleNamespace(is_initialized=lambda: False)
    package = SimpleNamespace(__version__=number, ops=SimpleNamespace(), comm=comm, **parts)
    monkeypatch.setitem(sys.modules, "deepspeed", package)
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "DS_ACCELERATOR", "LOCAL_SIZE"):
        monkeypatch.setenv(name, "1")  # so that monkeypatch restores the variable
        monkeypatch.delenv(name)
    settings = (make_config(parallel={"engine": "deepspeed"}), World(0, 0, 4, 2), CPU)
    if is_old:
        (line,) = issues_of(deepspeed.DeepSpeedZero, *settings, precision="fp32", run_dir=tmp_path)
        assert "install 0.19.8" in line
    else:
        deepspeed.DeepSpeedZero(*settings, precision="fp32", run_dir=tmp_path)
        assert package.ops.__compatible_ops__ == {}, "otherwise it compiles for minutes"
    assert (tmp_path / "deepspeed.json").exists() != is_old
    # otherwise deepspeed runs numactl at every reduction to count the ranks, or looks for a GPU
    assert (os.environ["LOCAL_SIZE"], os.environ["DS_ACCELERATOR"]) == ("2", "cpu")
