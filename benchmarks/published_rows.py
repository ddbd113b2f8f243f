"""Convert rows of published BERT throughput to scenarios of the predictor, or state why that is impossible.

Nothing is fitted. The columns of a row describe the gradients and the links. The sources cited in comments
describe how each framework reduces gradients.
"""

import csv
import dataclasses
import math
import re
import sys
from functools import cache
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from bert_dp.config import ModelConfig
from bert_dp.cost import num_parameters
from launcher.plan import step_model
from launcher.plan.scaling import BERT_SEQUENCE_LENGTH, MODELS
from launcher.plan.step_model import GB, Collective, Fabric, LinkSpec, Scenario, constant, find_link, hardware
from launcher.scale.models import StepProfile

ROWS = Path(__file__).parent / "published" / "published_bert_throughput.csv"
Row = dict[str, str]

GPUS = {"V100": "V100-32G", "A100-SXM-40G": "A100-40G"}  # other name -> name in hardware.yaml
INTRA = (  # text in the column -> link in hardware.yaml; the first match counts
    ("hybrid cube mesh", "nvlink2"),
    ("8x V100 SXM2", "nvlink2"),
    ("NVSwitch 300", "nvswitch2"),
    ("NVSwitch 600", "nvswitch3"),
    ("NVLink3", "nvlink3"),
    ("NVLink4", "nvlink4"),
    ("NVSwitch", "nvswitch4"),
    ("PCIe3", "pcie3"),
    ("PCIe4", "pcie4"),
    ("PCIe5", "pcie5"),
)
INTER = (("EDR", "ib-edr"), ("HDR", "ib-hdr"), ("NDR", "ib-ndr"), ("FDR", "ib-fdr"), ("OPA", "opa100"))

# Bytes that an optimizer moves through memory per parameter. Fused Adam reads p, g, m, v and writes p, m, v:
# 28. Fused LAMB (apex) also writes the update, computes two norms, and reads update and weights again: 52. In
# a graph of unfused operations (TensorFlow's BERT, optimization.py), every operation reads and writes: Adam
# makes 39 passes of 4 bytes, next_m (7), next_v (9), ratio (7), decay (5), rate (2), new weights (3) and
# assignments (6); LAMB makes 45, because it adds both corrections (4) and norms (2).
FUSED, PLAIN = {"Adam": 28, "LAMB": 52}, {"Adam": 156, "LAMB": 180}
# Horovod waits for its next cycle before it reduces ready gradients: 5 ms until version 0.21 (change 2468)
HOROVOD_CYCLE_S, HOROVOD_FUSION = 0.005, 64 * step_model.MIB
APEX_MESSAGE = 10_000_000  # elements

DO_NOT_FIT = (  # pattern of the row's id, reason
    (r"pdperf-pt-.*-32$", "the all-reduce cannot cause the loss at accumulation 22: host and driver differ"),
    (r"dle22-TF32-s512-strong-(128|256)$", "an outlier: efficiency 0.78, but 0.95 with AMP"),
    (r"dletf2-mn-A100-TF32-s512-", "0.86 already at 2 nodes, with 96 micro batches between reductions"),
    (r"dle19-mn-DGX1-", "reductions cannot cost 12 % with 32 to 512 micro batches between them"),
    (r"mlperf", "micro batches differ between the rows"),
)


class NotPredictable(Exception):
    """Error for a row that cannot be predicted; the message is the reason."""


@dataclasses.dataclass(frozen=True)
class Constants:
    """Constants of the predictor, by default from hardware.yaml."""

    spread: float = dataclasses.field(default_factory=lambda: constant("device_spread"))
    gain: float = dataclasses.field(default_factory=lambda: constant("overlap_gain"))


def read(path: Path = ROWS) -> list[Row]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


@cache
def shipped() -> tuple[Row, ...]:
    return tuple(read())


def base_of(row: Row, rows: list[Row]) -> Row:
    """Return the row relative to which `row` states its efficiency, from `rows` or the shipped rows. If it is
    missing, build it from `base_seq_per_s` with the same batch and accumulation."""
    stem = re.sub(r"-\d+(-\d?opa)?$", "", row["id"])
    for other in (*rows, *shipped()):
        same = other["id"] == f"{stem}-{row['base_gpus']}" or (
            other["source"] == row["source"] and other["id"].startswith(stem + "-")
        )
        if same and other["gpus"] == row["base_gpus"]:
            return other
    per_node = math.ceil(int(row["gpus"]) / int(row["nodes"]))
    nodes = math.ceil(int(row["base_gpus"]) / per_node)
    return {**row, "gpus": row["base_gpus"], "nodes": str(nodes), "seq_per_s": row["base_seq_per_s"]}


def reason_not_to_fit(row: Row, efficiency: float) -> str | None:
    if efficiency > 1:
        return "an efficiency above 1 is noise"
    return next((reason for pattern, reason in DO_NOT_FIT if re.match(pattern, row["id"])), None)


def inter_link(text: str) -> tuple[LinkSpec, int]:
    """Return the link of one NIC and the number of NICs from a text such as `8x HDR IB 200Gb/s (DGX A100)` or
    `40GbE, 4.1 Gb/s effective (iperf)`. Raises NotPredictable."""
    if effective := re.search(r"([\d.]+)\s*Gb/s effective", text):
        kind = find_link("ethernet40")
        return dataclasses.replace(kind, gb_s=float(effective[1]) / 8, reach=1.0), 1
    count = int(times[1]) if (times := re.match(r"(\d+)x ", text)) else 1
    for word, name in INTER:
        if re.search(rf"\b{word}\b", text):
            return find_link(name), count
    if ethernet := re.search(r"\b(10|25|40|100|200)\s*GbE", text):
        return find_link(f"ethernet{ethernet[1]}"), count
    raise NotPredictable(f"link between the nodes not stated: {text!r}")


@dataclasses.dataclass(frozen=True)
class AllToAllFabric(Fabric):
    """Network for compressed gradients (1-bit Adam): one all-to-all of the parts, then one of the sums."""

    def seconds(self, size: float, ranks: int, kind: Collective = "all_reduce") -> float:
        return 2 * self.all_to_all_seconds(size, ranks)

    def all_to_all_seconds(self, size: float, ranks: int) -> float:
        """Return the time in which every rank sends each other rank a part of its `size` bytes. Unlike in a
        ring, all ranks of a node send most of their data through the node's NICs."""
        if ranks <= 1 or size <= 0:
            return 0.0
        bus = self.bus_gb_s(ranks) * GB
        local = min(ranks, self.gpus_per_node)
        outside = local * size * (ranks - local) / ranks
        _, slowest = self.protocols(ranks)[0]
        return slowest.start + (outside or size * (local - 1) / ranks) / bus


def fabric(row: Row) -> Fabric:
    gpus, nodes = int(row["gpus"]), int(row["nodes"])
    intra = next((find_link(name) for word, name in INTRA if word in row["intra"]), None)
    inter, nics = inter_link(row["inter"]) if nodes > 1 else (None, 1)
    if intra is None and gpus > 1:
        slowest = find_link("pcie3").bus_gb_s(8)
        if inter is None or inter.bus_gb_s(nodes) * nics > slowest:
            raise NotPredictable(f"link within the node not stated: {row['intra']!r}")
    compressed = float(row["grad_bytes_per_param"]) < 1
    return (AllToAllFabric if compressed else Fabric)(math.ceil(gpus / nodes), intra, inter, nics)


def scenario(row: Row, constants: Constants) -> tuple[StepProfile, Scenario, float]:
    """Return a profile whose micro batch takes 1 s, the scenario, and the seconds that the framework adds to
    a step. Raises NotPredictable."""
    if row["model"] not in MODELS or not row["seq_len"].isdigit() or not row["micro_batch"]:
        raise NotPredictable("batch, sequence length or parallelism not stated")
    model, width = MODELS[row["model"]], float(row["grad_bytes_per_param"])
    parameters = num_parameters(model, BERT_SEQUENCE_LENGTH)
    gpu = hardware()["gpus"].get(GPUS.get(row["gpu"], row["gpu"]))
    if gpu is None:
        raise NotPredictable(f"GPU not in hardware.yaml: {row['gpu']!r}")
    memory = gpu["memory_gb_s"] * GB * constant("memory_reach")
    bytes_moved = PLAIN if row["framework"].startswith("TF") else FUSED
    optimizer_s = parameters * bytes_moved["LAMB" if "LAMB" in row["optimizer"] else "Adam"] / memory
    layout = step_model.layer_gradients(model, parameters, width, 2 / 3)
    profile = StepProfile(
        micro_s=1.0,
        backward_s=2 / 3,
        optimizer_s=optimizer_s,
        gradients=layout,
        micro_batch=int(float(row["micro_batch"])),
        sequence_length=int(row["seq_len"]),
        num_layers=model.num_layers,
        hidden_size=model.hidden_size,
    )
    links = fabric(row)
    # gradients are copied into the buffer and out of it; each copy reads and writes
    extra_s = 4 * parameters * width / memory + sparse_embedding_s(row, model, links)
    if "Horovod" in row["framework"]:
        extra_s += HOROVOD_CYCLE_S
    bucket: float = HOROVOD_FUSION if row["overlap"] == "Horovod" else step_model.BUCKET
    if "apex DDP" in row["overlap"]:
        bucket = APEX_MESSAGE * width
    setup = step_model.Scenario(
        links,
        int(row["gpus"]),
        accumulation=accumulation(row),
        spread=constants.spread,
        overlap=row["overlap"].startswith("yes") or row["overlap"] == "Horovod",
        gain=constants.gain,
        bucket_bytes=bucket,
        first_bucket=None,
    )
    return profile, setup, extra_s if setup.replicas > 1 else 0.0


def micro_s_of(step_s: float, scenario: Scenario, profile: StepProfile) -> float:
    """Return the micro-batch time for which `predict` returns `step_s`. It is found by bisection, because the
    exposed communication depends on it. Raises NotPredictable if the step is shorter than its communication
    and optimizer."""

    def at(micro_s: float) -> float:
        return step_model.predict(step_model.with_micro_s(profile, micro_s), scenario).step_time_s

    low, high = 0.0, step_s
    if at(low) >= step_s:
        raise NotPredictable("the step is shorter than its communication and optimizer alone")
    for _ in range(80):
        middle = (low + high) / 2
        low, high = (middle, high) if at(middle) < step_s else (low, middle)
    return (low + high) / 2


def sparse_embedding_s(row: Row, model: ModelConfig, links: Fabric) -> float:
    """Return the seconds per step for the embedding's gradient in TensorFlow's own multi-worker strategy.

    TensorFlow combines the sparse gradient of the lookup and the dense gradient of the tied decoder into one
    sparse fp32 gradient of V + tokens rows (eager/backprop.py), and does not all-reduce it. Across nodes,
    every rank gathers the gradients of all ranks. Within a node, one GPU combines them and sends the result
    to each other GPU (cross_device_ops.py: "efficient allreduce is not supported").
    """
    ranks = int(row["gpus"])
    if ranks == 1 or "MultiWorkerMirrored" not in row["framework"]:
        return 0.0
    tokens = int(float(row["micro_batch"])) * int(row["seq_len"])
    size = (model.vocab_size + tokens) * model.hidden_size * 4.0
    if links.nodes(ranks) > 1:
        return links.seconds(ranks * size, ranks, "all_gather")
    return (ranks - 1) * ranks * size / (links.bus_gb_s(ranks) * GB)


def accumulation(row: Row) -> int:
    """Return the accumulation. It is 1 if not stated, because the lost time in such rows is proportional to
    the bytes of the gradients."""
    return int(float(row["accum"] or 1))


def step_s(row: Row) -> float:
    return int(row["gpus"]) * float(row["micro_batch"]) * accumulation(row) / float(row["seq_per_s"])


@dataclasses.dataclass(frozen=True)
class TrialOutcome:
    """A row with its prediction, which uses no other measurement than the base row."""

    row: Row
    measured: float
    """Efficiency relative to the base row."""
    predicted: float
    step_s: float
    dropped: str | None
    """Reason not to fit the row; None if there is none."""

    @property
    def points(self) -> float:
        """Return the error of the efficiency in percentage points."""
        return 100 * (self.predicted - self.measured)


def outcome(row: Row, rows: list[Row], constants: Constants) -> TrialOutcome:
    """Predict the efficiency of a row from its base. Raises NotPredictable."""
    base = base_of(row, rows)
    if base["micro_batch"] and float(base["micro_batch"]) != float(row["micro_batch"]):
        raise NotPredictable("the micro batch differs from the base row's, and so does its speed")
    base_profile, base_scenario, base_extra_s = scenario(base, constants)
    profile, setup, extra_s = scenario(row, constants)
    micro_s = micro_s_of(step_s(base) - base_extra_s, base_scenario, base_profile)
    whole_s = step_model.predict(step_model.with_micro_s(profile, micro_s), setup).step_time_s + extra_s
    per_gpu = float(base["seq_per_s"]) / int(base["gpus"])
    measured = float(row["seq_per_s"]) / int(row["gpus"]) / per_gpu
    sequences = profile.micro_batch * setup.accumulation / whole_s
    return TrialOutcome(row, measured, sequences / per_gpu, whole_s, reason_not_to_fit(row, measured))
