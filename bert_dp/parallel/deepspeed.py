"""Train with DeepSpeed ZeRO (arXiv 1910.02054). DeepSpeed reduces and clips gradients and takes the
optimizer steps. The model, the optimizer and the training loop are bert-dp's.

Stages 0 and 1 reduce gradients only on the last micro batch, stages 2 and 3 on every micro batch. LAMB needs
the norm of each tensor, so it is limited to stage 0: stages 1 to 3 flatten tensors. Muon is unsupported. To
clip, DeepSpeed divides by (norm + 1e-6) / clip; other engines divide by norm / clip. If the norm is not
finite, DeepSpeed itself skips the step in stages 1 to 3.
"""

import logging
import os
import warnings
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bert_dp import files
from bert_dp.config import Config, ConfigError, Issue
from bert_dp.model.interface import Model
from bert_dp.parallel import MakeOptimizer, State
from bert_dp.parallel.state import read_state, write_state
from bert_dp.training.process import World, standard_variables

OLDEST = (0, 19, 8)  # oldest tested version; older ones may take fp32 steps with a non-finite gradient norm
BUCKET_ELEMENTS = 25 * 2**20 // 4  # 25 MiB of fp32, as in ddp; DeepSpeed would allocate its default of 2 GB
MOMENTS = ("exp_avg", "exp_avg_sq")


class DeepSpeedZero:
    """See `bert_dp.parallel.Engine`. RUN/deepspeed.json contains the configuration passed to DeepSpeed."""

    def __init__(self, config: Config, world: World, device: torch.device, *, precision: str, run_dir: Path):
        """Import DeepSpeed. Raises ConfigError if it is too old, or if `precision: auto` chose fp16."""
        if precision == "fp16":  # this engine has no scaler, and DeepSpeed disables the loop's autocast
            text = "auto means fp16 on this GPU, but parallel.engine: deepspeed does not support fp16"
            hint = "use precision: fp32 or parallel.engine: zero1"
            raise ConfigError([Issue("precision", "conflict", text, "auto", "parallel.engine", hint)])
        # DeepSpeed does not read the variables that srun and mpirun set
        os.environ.update(standard_variables(world, device.index))
        if device.type == "cpu":
            os.environ.setdefault("DS_ACCELERATOR", "cpu")
            # otherwise DeepSpeed counts devices by running numactl at every reduction
            os.environ.setdefault("LOCAL_SIZE", str(world.local_size))
        import deepspeed

        version = tuple(getattr(deepspeed, f"__version_{part}__") for part in ("major", "minor", "patch"))
        if version < OLDEST:
            text = f"deepspeed {deepspeed.__version__} is too old"
            hint = f"install {'.'.join(map(str, OLDEST))} or newer"
            raise ConfigError([Issue("parallel.engine", "needs_package", text, "deepspeed", hint=hint)])
        logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
        warnings.filterwarnings("ignore", "`torch.distributed.*is deprecated", FutureWarning)  # DeepSpeed's
        if device.type == "cpu":
            deepspeed.ops.__compatible_ops__ = {}  # keeps DeepSpeed from compiling an inference all-reduce
        if deepspeed.comm.is_initialized():  # drop references to destroyed groups of an earlier run
            deepspeed.utils.groups._release_process_group_references()
        self._package: Any = deepspeed
        self.dp_rank, self.dp_size = world.rank, world.size
        self.norm_pairs = None
        self._stage = config.parallel.zero_stage
        self._device = device
        self._settings = settings(config, precision)
        if world.rank == 0:
            files.write_json(run_dir / "deepspeed.json", self._settings)

    def prepare(self, model: Model, make_optimizer: MakeOptimizer) -> tuple[nn.Module, torch.optim.Optimizer]:
        self._model, self._parameters = model, dict(model.named_parameters())
        self._optimizer = make_optimizer(self._parameters.items())
        self._engine, zero, _, _ = self._package.initialize(
            model=model, optimizer=self._optimizer, config=self._settings, dist_init_required=False
        )
        if self._stage > 0:  # create the moments, so that they can be loaded before the first step
            parts = "fp32_partitioned_groups_flat" if self._stage == 3 else "single_partition_of_fp32_groups"
            for flat in getattr(zero, parts):
                moments = {key: torch.zeros_like(flat) for key in MOMENTS}
                self._optimizer.state[flat] = {"step": torch.zeros((), device=flat.device), **moments}
        if self._stage in (1, 2):
            zero._lazy_init_hp_params_optimizer_state()  # lets safe_get_full_optimizer_state find the moments
        return self._engine, self._optimizer

    def accumulate(self, *, last: bool) -> nullcontext[None]:
        self._engine.set_gradient_accumulation_boundary(last)
        return nullcontext()

    def backward(self, loss: Tensor) -> None:
        # DeepSpeed averages gradients over replicas, but the step's loss is the sum of the replicas' losses
        self._engine.backward(loss * self.dp_size, scale_wrt_gas=False)

    def step(self, max_norm: float) -> Tensor:
        assert max_norm == self._settings["gradient_clipping"], "DeepSpeed clips only to its configured norm"
        if self._stage == 0:  # in this stage the optimizer skips steps, because DeepSpeed never does
            gradients = [p.grad for p in self._parameters.values() if p.grad is not None]
            norm = torch.stack(torch._foreach_norm(gradients)).square().sum().sqrt()
            self._optimizer.grad_scale = torch.ones_like(norm)  # type: ignore[attr-defined]
            self._optimizer.found_inf = (~norm.isfinite()).float()  # type: ignore[attr-defined]
            self._engine.step()
            return norm
        self._engine.step()
        norm = self._engine.get_global_grad_norm()  # inf if the step was skipped
        return torch.as_tensor(norm, dtype=torch.float32, device=self._device)

    def gather_state(self) -> State | None:
        if self._stage == 0:
            return None if self.dp_rank else read_state(self._model, self._optimizer, None)
        state: State = {"model": {}, "optimizer": {}, "scaler": {}}
        step = next(iter(self._optimizer.state.values()))["step"]
        for name, tensor in self._model.state_dict().items():
            if name not in self._parameters:
                state["model"][name] = tensor.to("cpu", copy=True)
                continue
            whole = {key: self._whole(self._parameters[name], key) for key in ("", *MOMENTS)}
            if self.dp_rank == 0:
                state["model"][name] = whole.pop("").to("cpu", copy=True)
                state["optimizer"][f"{name}/step"] = step.to("cpu", copy=True)
                state["optimizer"].update({f"{name}/{k}": v.to("cpu", copy=True) for k, v in whole.items()})
        return state if self.dp_rank == 0 else None

    def scatter_state(self, state: State) -> None:
        """Load the state. Stages 1 to 3 keep one step count and raise ValueError if the counts differ."""
        if self._stage == 0:
            write_state(self._model, self._optimizer, None, state)
            return
        steps = {float(value) for name, value in state["optimizer"].items() if name.endswith("/step")}
        if len(steps) > 1:
            raise ValueError(f"the checkpoint's parameters have different step counts: {steps}")
        for name, tensor in self._model.state_dict().items():
            value = state["model"][name].to(self._device)
            if name not in self._parameters:
                tensor.copy_(value)
                continue
            parameter = self._parameters[name]
            with self._package.zero.GatheredParameters([parameter], modifier_rank=0), torch.no_grad():
                parameter.copy_(value)
            self._write(parameter, value, "")
            for key in MOMENTS:
                moment = state["optimizer"].get(f"{name}/{key}", torch.zeros(value.shape))
                self._write(parameter, moment.to(self._device, value.dtype), key)
        for values in self._optimizer.state.values():
            values["step"].fill_(max(steps, default=0.0))

    def _whole(self, parameter: nn.Parameter, key: str) -> Tensor:
        """Gather a parameter's whole weight (key "") or its moment `key`. Collective."""
        return self._safe("get_full", key)(parameter, *filter(None, [key])).detach()

    def _write(self, parameter: Any, whole: Tensor, key: str) -> None:
        """Set this rank's part of the optimizer's fp32 weight (key "") or moment `key` from `whole`."""
        part, verb = whole, "set_full"
        if self._stage == 3:  # safe_set_full_* fails if a tensor's size is not a multiple of the world size
            size, verb = parameter.ds_tensor.numel(), "set_local"
            padded = F.pad(whole.flatten(), (0, size * self.dp_size - whole.numel()))
            part = padded[self.dp_rank * size :][:size]
        self._safe(verb, key)(parameter, part, *filter(None, [key]))

    def _safe(self, verb: str, key: str) -> Any:
        return getattr(self._package.utils, f"safe_{verb}_{'optimizer_state' if key else 'fp32_param'}")


def settings(config: Config, precision: str) -> dict[str, Any]:
    """Return the configuration passed to DeepSpeed. DeepSpeed's defaults apply to the keys left out."""
    return {
        "train_micro_batch_size_per_gpu": config.batch.micro_size,
        "gradient_accumulation_steps": 1,  # bert-dp accumulates, since a batch ramp changes this number
        "gradient_clipping": config.optim.clip,
        "zero_optimization": {"stage": config.parallel.zero_stage, "reduce_bucket_size": BUCKET_ELEMENTS},
        "fp16": {"enabled": False},
        "bf16": {"enabled": False},  # True would convert the parameters to bf16
        # needed because DeepSpeed's forward disables the loop's autocast on a GPU
        "torch_autocast": {
            "enabled": precision == "bf16",
            "dtype": "bfloat16",
            "lower_precision_safe_modules": [],  # gradients of modules listed here would be reduced in bf16
        },
        "timers": {"throughput": {"enabled": False}},  # True would synchronise the device in every step
    }


make = DeepSpeedZero
