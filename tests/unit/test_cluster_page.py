"""docs/cluster.md: its files parse, and have no key that their engines do not know.

The keys were checked against the CRD of Kubeflow Trainer (commit 8c0f5059) and the schemas of SkyPilot
0.14.1, which are too large to keep here.
"""

from __future__ import annotations

import json
import re
import shlex
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from bert_dp.config import find_config, shipped_configs
from launcher.cli.options import program
from tests.e2e.cli import here

PAGE = (Path(__file__).parents[2] / "docs" / "cluster.md").read_text()
POD = "template.spec.replicatedJobs[].template.spec.template.spec"
PATCH = f"spec.runtimePatches[].trainingRuntimeSpec.{POD}"
KNOWN = {
    "TrainJob": {
        "apiVersion kind metadata.name spec.runtimeRef.name spec.trainer.numNodes spec.trainer.image",
        "spec.trainer.command[] spec.runtimePatches[].manager",
        *(f"spec.trainer.resourcesPerNode.{each}" for each in ("requests.cpu", "requests.memory")),
        "spec.trainer.resourcesPerNode.limits.nvidia.com/gpu",
        f"{PATCH.removesuffix('.template.spec.template.spec')}.name",
        f"{PATCH}.terminationGracePeriodSeconds {PATCH}.containers[].name",
        *(f"{PATCH}.containers[].volumeMounts[].{each}" for each in ("name", "mountPath")),
        f"{PATCH}.volumes[].name {PATCH}.volumes[].persistentVolumeClaim.claimName",
        *(f"{PATCH}.volumes[].emptyDir.{each}" for each in ("medium", "sizeLimit")),
    },
    "SkyPilot": {
        "name num_nodes resources.accelerators resources.use_spot workdir setup run volumes./runs",
        "resources.job_recovery.max_restarts_on_errors resources.job_recovery.recover_on_exit_codes[]",
    },
}
INSTRUCTIONS = "ARG CMD COPY ENTRYPOINT ENV EXPOSE FROM LABEL RUN USER VOLUME WORKDIR".split()


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", PAGE, re.DOTALL)


def paths(value: Any, at: str = "") -> Iterator[str]:
    """The path of each leaf: a.b[].c."""
    if isinstance(value, dict):
        for key, below in value.items():
            yield from paths(below, f"{at}.{key}" if at else key)
    elif isinstance(value, list):
        for below in value:
            yield from paths(below, f"{at}[]")
    else:
        yield at


def commands() -> Iterator[list[str]]:
    """Every `bert-dp train` of the page, without the program."""
    job, sky = (yaml.safe_load(block) for block in blocks("yaml"))
    yield job["spec"]["trainer"]["command"][1:]
    yield shlex.split(sky["run"])[1:]
    for block in (*blocks("sh"), *blocks("bash")):
        for line in block.splitlines():
            words = shlex.split(line, comments=True)
            if "train" in words and "bert-dp" in words:
                yield words[words.index("train") :]


@pytest.mark.parametrize(("engine", "number"), [("TrainJob", 0), ("SkyPilot", 1)])
def test_a_manifest_has_the_keys_of_its_engine(engine: str, number: int) -> None:
    found = set(paths(yaml.safe_load(blocks("yaml")[number])))
    assert found == {path for line in KNOWN[engine] for path in line.split()}


def test_every_command_names_a_configuration_and_programs_that_exist() -> None:
    found = list(commands())
    assert len(found) >= 6
    for words in found:
        assert words[0] == "train"
        assert find_config(words[1]).is_file()
        if "--after-save" in words:
            assert program(words[words.index("--after-save") + 1])


def test_the_dockerfile_parses() -> None:
    (text,) = blocks("dockerfile")
    lines = [line for line in text.replace("\\\n", " ").splitlines() if not line.startswith("#")]
    parsed = [line.split(maxsplit=1) for line in lines]
    assert parsed[0][0] == "FROM"
    for name, rest in parsed:
        assert name in INSTRUCTIONS
        if name == "RUN":
            subprocess.run(["sh", "-n", "-c", rest], check=True)
        if name == "ENTRYPOINT":
            assert json.loads(rest) == ["bert-dp"]


def test_the_scripts_parse_and_slurm_s_is_printed() -> None:
    for block in blocks("sh"):
        subprocess.run(["sh", "-n", "-c", block], check=True)
    printed = here("configs", "slurm.sbatch")
    assert printed.stdout == (shipped_configs() / "slurm.sbatch").read_text()
    subprocess.run(["bash", "-n", "-c", printed.stdout], check=True)
    assert re.search("^slurm.sbatch +Slurm job", here("configs").stdout, re.MULTILINE)


def test_the_page_and_the_readme_name_the_risk() -> None:
    readme = Path(__file__).parents[2] / "README.md"
    for text in (PAGE, readme.read_text()):
        assert re.search("[Nn]o authentication, no encryption", text)
