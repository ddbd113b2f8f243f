"""Rows of published BERT throughput as scenarios of the predictor, or the reason why a row is none.

Nothing here is fitted: a row's columns say what was sent and over what, and the sources below say how its
framework does it.
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

GPUS = {"V100": "V100-32G", "A100-SXM-40G": "A100-40G"}  # other names of those in hardware.yaml
INTRA = (  # first word that the column holds
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

# Bytes an optimizer moves through memory per parameter. Fused Adam reads p, g, m, v and writes p, m, v: 28.
# Fused LAMB (apex) also writes the update, takes its norm and the weights', and reads both again: 52. Written
# as plain operations of a graph (TensorFlow's BERT, optimization.py) each operation reads and writes: 39 and
# 45 passes of 4 bytes: next_m (7), next_v (9), the ratio (7), decay (5), rate (2), new weights (3), assigning
# (6), and for LAMB both corrections (4) and norms (2).
FUSED, PLAIN = {"Adam": 28, "LAMB": 52}, {"Adam": 156, "LAMB": 180}
# Horovod waits for its next cycle before it reduces what has become ready: 5 ms until 0.21 (its change 2468)
HOROVOD_CYCLE_S, HOROVOD_FUSION = 0.005, 64 * step_model.MIB
APEX_MESSAGE = 10_000_000  # elements

DO_NOT_FIT = (  # reasons: see the reference of the file
    (r"pdperf-pt-.*-32$", "the loss at accumulation 22 cannot be the all-reduce: host and driver differ"),
    (r"dle22-TF32-s512-strong-(128|256)$", "an outlier: 0.78 where AMP keeps 0.95"),
    (r"dletf2-mn-A100-TF32-s512-", "0.86 at 2 nodes already, with 96 micro batches between reductions"),
    (r"dle19-mn-DGX1-", "a loss of 12 % with 32 to 512 micro batches between reductions is none of theirs"),
    (r"mlperf", "micro batches differ between the rows"),
)


class NotPredictable(Exception):
    """Why."""


@dataclasses.dataclass(frozen=True)
class Constants:
    """Of the whole file, from hardware.yaml unless asked otherwise."""

    spread: float = dataclasses.field(default_factory=lambda: constant("device_spread"))
    gain: float = dataclasses.field(default_factory=lambda: constant("overlap_gain"))


def read(path: Path = ROWS) -> list[Row]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


@cache
def shipped() -> tuple[Row, ...]:
    return tuple(read())


def base_of(row: Row, rows: list[Row]) -> Row:
    """The row that `row` counts its efficiency from, among `rows` or those committed; where both lack it,
    `base_seq_per_s` with the same batch and accumulation."""
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
    """`8x HDR IB 200Gb/s (DGX A100)`, `1x EDR IB 100Gb/s per node`, `40GbE, 4.1 Gb/s effective (iperf)`: the
    link of one NIC and their number. Raises NotPredictable."""
    if effective := re.search(r"([\d.]+)\s*Gb/s effective", text):
        kind = find_link("ethernet40")
        return dataclasses.replace(kind, gb_s=float(effective[1]) / 8, reach=1.0), 1
    count = int(times[1]) if (times := re.match(r"(\d+)x ", text)) else 1
    for word, name in INTER:
        if re.search(rf"\b{word}\b", text):
            return find_link(name), count
    if ethernet := re.search(r"\b(10|25|40|100|200)\s*GbE", text):
        return find_link(f"ethernet{ethernet[1]}"), count
    raise NotPredictable(f"link between nodes not stated: {text!r}")


@dataclasses.dataclass(frozen=True)
class AllToAllFabric(Fabric):
    """Compressed gradients (1-bit Adam) go by all-to-all, not by a ring: the parts, and then the sums."""

    def seconds(self, size: float, ranks: int, kind: Collective = "all_reduce") -> float:
        return 2 * self.all_to_all_seconds(size, ranks)

    def all_to_all_seconds(self, size: float, ranks: int) -> float:
        """Every rank sends each other one its part of `size` bytes: unlike a ring, all of a node's ranks
        cross its NICs with most of what they hold."""
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
    """The row as it would be asked for, and the seconds of a step that its framework's own ways add; its
    profile has a micro batch of 1 s. Raises NotPredictable."""
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
    # gradients are copied into the buffer and out of it, each read and written
    beside_s = 4 * parameters * width / memory + sparse_embedding_s(row, model, links)
    if "Horovod" in row["framework"]:
        beside_s += HOROVOD_CYCLE_S
    bucket: float = HOROVOD_FUSION if row["overlap"] == "Horovod" else step_model.BUCKET
    if "apex DDP" in row["overlap"]:
        bucket = APEX_MESSAGE * width
    question = step_model.Scenario(
        links,
        int(row["gpus"]),
        accumulation=accumulation(row),
        spread=constants.spread,
        overlap=row["overlap"].startswith("yes") or row["overlap"] == "Horovod",
        gain=constants.gain,
        bucket_bytes=bucket,
        first_bucket=None,
    )
    return profile, question, beside_s if question.replicas > 1 else 0.0


def micro_s_of(step_s: float, scenario: Scenario, profile: StepProfile) -> float:
    """T_micro of a profile from a measured step: the time that makes `predict` give `step_s`. The exposed
    time depends on it through what overlaps, so it is found by bisection. Raises NotPredictable when the step
    is shorter than what does not depend on it."""

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
    """TensorFlow joins the look-up's sparse gradient and the tied decoder's dense one into one sparse
    gradient of V + tokens rows (eager/backprop.py) in fp32, and its own strategies do not reduce that: over
    nodes every rank gathers all, within one a single GPU joins them and sends the whole to each
    (cross_device_ops.py: "efficient allreduce is not supported")."""
    ranks = int(row["gpus"])
    if ranks == 1 or "MultiWorkerMirrored" not in row["framework"]:
        return 0.0
    tokens = int(float(row["micro_batch"])) * int(row["seq_len"])
    size = (model.vocab_size + tokens) * model.hidden_size * 4.0
    if links.nodes(ranks) > 1:
        return links.seconds(ranks * size, ranks, "all_gather")
    return (ranks - 1) * ranks * size / (links.bus_gb_s(ranks) * GB)


def accumulation(row: Row) -> int:
    """1 where the table states none: the losses of those rows are in proportion to the gradients' bytes."""
    return int(float(row["accum"] or 1))


def step_s(row: Row) -> float:
    return int(row["gpus"]) * float(row["micro_batch"]) * accumulation(row) / float(row["seq_per_s"])


@dataclasses.dataclass(frozen=True)
class TrialOutcome:
    """One row, predicted from its base alone."""

    row: Row
    measured: float
    """Efficiency against the base row."""
    predicted: float
    step_s: float
    dropped: str | None
    """Why it is on the list of rows not to fit."""

    @property
    def points(self) -> float:
        """Error of the efficiency, in points."""
        return 100 * (self.predicted - self.measured)


def outcome(row: Row, rows: list[Row], constants: Constants) -> TrialOutcome:
    """Predict the efficiency of a row from its base. Raises NotPredictable."""
    base = base_of(row, rows)
    if base["micro_batch"] and float(base["micro_batch"]) != float(row["micro_batch"]):
        raise NotPredictable("micro batch differs from the base's, so its own speed does")
    base_profile, base_scenario, base_beside_s = scenario(base, constants)
    profile, question, beside_s = scenario(row, constants)
    micro_s = micro_s_of(step_s(base) - base_beside_s, base_scenario, base_profile)
    whole_s = step_model.predict(step_model.with_micro_s(profile, micro_s), question).step_time_s + beside_s
    per_gpu = float(base["seq_per_s"]) / int(base["gpus"])
    measured = float(row["seq_per_s"]) / int(row["gpus"]) / per_gpu
    sequences = profile.micro_batch * question.accumulation / whole_s
    return TrialOutcome(row, measured, sequences / per_gpu, whole_s, reason_not_to_fit(row, measured))
