"""Links between GPUs from nvidia-smi's own tables, and the findings of doctor about them."""

from __future__ import annotations

import dataclasses

from launcher.machine.doctor import link_findings
from launcher.machine.environment import Environment, Gpu, probe

TOPOLOGY = """\
\t\x1b[4mGPU0\tGPU1\tGPU2\tGPU3\tNIC0\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\x1b[0m
GPU0\t X \tNV12\tSYS\tSYS\tPXB\t0-23,48-71\t0\t\tN/A
GPU1\tNV12\t X \tSYS\tSYS\tPXB\t0-23,48-71\t0\t\tN/A
GPU2\tSYS\tSYS\t X \tPIX\tSYS\t24-47,72-95\t1\t\tN/A
GPU3\tSYS\tSYS\tPIX\t X \tSYS\t24-47,72-95\t1\t\tN/A
NIC0\tPXB\tPXB\tSYS\tSYS\t X \t\t\t\t

Legend:

  X    = Self
  SYS  = Connection traversing PCIe as well as the SMP interconnect between NUMA nodes (e.g., QPI/UPI)
  NV#  = Connection traversing a bonded set of # NVLinks
"""
P2P = """\
 \tGPU0\tGPU1\tGPU2\tGPU3\t
 GPU0\tX\tOK\tOK\tCNS\t
 GPU1\tOK\tX\tOK\tOK\t
 GPU2\tOK\tOK\tX\tOK\t
 GPU3\tCNS\tOK\tOK\tX\t

Legend:

  X    = Self
  OK   = Status Ok
  CNS  = Chipset not supported
"""


def with_gpus(*indices: int) -> Environment:
    gpus = tuple(Gpu(index, "H100", 80.0, None) for index in indices)
    return dataclasses.replace(probe(), gpus=gpus, gpu_topology=TOPOLOGY)


def test_only_the_visible_gpus_count() -> None:
    (near,) = link_findings(with_gpus(2, 3), P2P)
    assert (near.level, near.message.partition(": ")[2]) == ("ok", "PIX 2-3")
    assert link_findings(with_gpus(5, 6), "No devices were found") == []


def test_slow_links_and_p2p_that_is_off_name_their_pairs() -> None:
    far, p2p = link_findings(with_gpus(0, 1, 2, 3), P2P)
    assert (far.level, p2p.level) == ("warn", "warn")
    assert far.message.endswith("NV12 0-1; PIX 2-3; SYS 0-2 0-3 1-2 1-3")
    assert p2p.message.endswith("CNS 0-3")
