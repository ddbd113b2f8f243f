"""Test that the files in docs/cluster.md parse and contain only keys that their tools know."""

import json
import re
import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from bert_dp.config import find_config, shipped_configs
from launcher.cli.options import program
from tests.e2e.cli import here

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "cluster.md").read_text()
# checked against the CRD of Kubeflow Trainer (commit 8c0f5059) and the schemas of SkyPilot 0.14.1, which are
# too large for this repository
KNOWN = {
    "TrainJob": """apiVersion kind metadata name spec runtimeRef trainer numNodes image command
        resourcesPerNode requests limits cpu memory nvidia.com/gpu runtimePatches manager template
        trainingRuntimeSpec replicatedJobs terminationGracePeriodSeconds containers volumeMounts mountPath
        volumes persistentVolumeClaim claimName emptyDir medium sizeLimit""",
    "SkyPilot": """name num_nodes resources accelerators use_spot job_recovery max_restarts_on_errors
        recover_on_exit_codes volumes /runs workdir setup run""",
}
INSTRUCTIONS = "ARG CMD COPY ENTRYPOINT ENV EXPOSE FROM LABEL RUN USER VOLUME WORKDIR".split()


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", PAGE, re.DOTALL)


JOB, SKY = (yaml.safe_load(block) for block in blocks("yaml"))


def keys(value: Any) -> set[str]:
    below = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    own = set(value) if isinstance(value, dict) else set()
    return own.union(*map(keys, below))


@pytest.mark.parametrize(("engine", "manifest"), [("TrainJob", JOB), ("SkyPilot", SKY)])
def test_a_manifest_has_exactly_the_known_keys_of_its_tool(engine: str, manifest: Any) -> None:
    assert keys(manifest) == set(KNOWN[engine].split())


def test_every_command_names_a_configuration_and_programs_that_exist() -> None:
    lines = [line for language in ("sh", "bash") for block in blocks(language) for line in block.splitlines()]
    commands = [shlex.split(line, comments=True) for line in (*lines, SKY["run"])]
    commands = [words for words in (*commands, JOB["spec"]["trainer"]["command"]) if "train" in words]
    assert len(commands) >= 6
    for words in commands:
        assert find_config(words[words.index("train") + 1]).is_file()
        if "--after-save" in words:
            assert program(words[words.index("--after-save") + 1])


def test_the_scripts_and_the_dockerfile_parse() -> None:
    (text,) = blocks("dockerfile")
    lines = [line for line in text.replace("\\\n", " ").splitlines() if not line.startswith("#")]
    parsed = [line.split(maxsplit=1) for line in lines]
    assert (parsed[0][0], parsed[-1][0], json.loads(parsed[-1][1])) == ("FROM", "ENTRYPOINT", ["bert-dp"])
    assert {name for name, _ in parsed} <= set(INSTRUCTIONS)
    printed = here("configs", "slurm.sbatch").stdout
    assert printed == (shipped_configs() / "slurm.sbatch").read_text()
    for script in (*blocks("sh"), *(rest for name, rest in parsed if name == "RUN"), printed):
        subprocess.run(["bash", "-n", "-c", script], check=True)


def test_the_page_and_the_readme_warn_that_traffic_is_not_protected() -> None:
    for text in (PAGE, (ROOT / "README.md").read_text()):
        words = " ".join(text.split())
        assert re.search("[Nn]o authentication, no encryption|neither authenticated nor encrypted", words)
