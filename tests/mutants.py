"""`python -m tests.mutants [MODULE...]`: count the small changes of pure modules that the unit tests detect.

mutmut changes one expression at a time in a temporary copy of the tree and runs, in a forked process, the
tests that reach the function. It skips code outside of functions and decorated functions. Each survivor is
printed as a diff, then a line per module; `--json FILE` keeps the counts. Survivors without an observable
effect are listed, with the reason, in equivalent_mutants.yaml and are not counted. The exit code is 1 if a
module scores below GOAL or if an entry of the list matches no survivor.
"""

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[1]
EQUIVALENT = Path(__file__).with_name("equivalent_mutants.yaml")
GOAL = 0.9

MODULES = {
    "launcher/plan/step_model.py": ["test_step_model.py"],
    "launcher/stats.py": ["test_stats.py"],
    "launcher/scale/analyze.py": ["test_diagnose.py", "test_scaling.py"],
    "launcher/tune/throughput.py": ["test_throughput.py"],
    "launcher/tune/lr_search.py": ["test_lr_search.py"],
    "bert_dp/files/io.py": ["test_secrets.py", "test_terminal.py"],
    "bert_dp/config/batch.py": ["test_config.py", "test_checks.py", "test_rates.py"],
    "bert_dp/config/checks.py": ["test_config.py", "test_checks.py"],
    "bert_dp/cost.py": ["test_cost.py", "test_stats.py"],
    "bert_dp/data/stream.py": ["test_data.py", "test_mlm.py"],
    "bert_dp/training/noise.py": ["test_noise_estimate.py"],
}
"""Module -> files of tests/unit that must detect its mutants."""

KILLED = ("killed", "timeout", "segfault")


def copy_tree(target: Path) -> None:
    """Copy the current state of all files that git tracks or would track."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    for name in filter(None, listed.stdout.split("\0")):
        if (ROOT / name).is_file():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, target / name)


def mutmut(copy: Path, *arguments: str) -> str:
    """Run mutmut and return its output. Raise RuntimeError with the end of the output if it fails."""
    done = subprocess.run(
        [sys.executable, "-c", "from mutmut.__main__ import cli; cli()", *arguments],
        cwd=copy,
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": "", "PYTHONDONTWRITEBYTECODE": "1"},
    )
    if done.returncode:
        raise RuntimeError(done.stdout[-3000:] + done.stderr[-3000:])
    return done.stdout


def statuses(module: str, children: int) -> tuple[dict[str, str], dict[str, str]]:
    """Return (mutant -> status, survivor -> its changed lines)."""
    with tempfile.TemporaryDirectory(prefix="mutants-") as directory:
        copy = Path(directory)
        copy_tree(copy)
        tests = [f"tests/unit/{name}" for name in MODULES[module] if (ROOT / "tests/unit" / name).exists()]
        settings = {
            "source_paths": ["bert_dp", "launcher"],
            "only_mutate": [module],
            "also_copy": ["configs", "benchmarks", "README.md", "CHANGELOG.md", "CONTRIBUTING.md"],
            "pytest_add_cli_args_test_selection": tests,
            "pytest_add_cli_args": ["-p", "no:cacheprovider", "-m", "not slow and not gpu"],
        }
        lines = ["[mutmut]"]
        for name, values in settings.items():
            lines += [f"{name} =", *(f"    {value}" for value in values)]
        (copy / "setup.cfg").write_text("\n".join(lines) + "\n")
        mutmut(copy, "run", "--max-children", str(children))
        found = dict(re.findall(r"^ +(\S+): (.+)$", mutmut(copy, "results", "--all", "true"), re.MULTILINE))
        left = {name: mutmut(copy, "show", name) for name, status in found.items() if status not in KILLED}
    return found, {name: changed_lines(diff) for name, diff in left.items()}


def changed_lines(diff: str) -> str:
    """Return the lines that begin with - or + in a unified diff, without its header."""
    return "\n".join(
        f"{line[0]} {line[1:].strip()}"
        for line in diff.splitlines()
        if line[:1] in ("-", "+") and not line.startswith(("---", "+++"))
    )


def only_strict(change: str) -> bool:
    """Return True if only zip's `strict` changed, which has no effect because the lengths never differ."""
    lines = [re.sub(r"strict=\w+|, (?=\))", "", line[1:]) for line in change.splitlines()]
    return "strict=" in change and len({line.replace(", )", ")") for line in lines}) == 1


def judge(
    module: str, found: dict[str, str], left: dict[str, str], equivalent: Sequence[Any]
) -> dict[str, Any]:
    """Return a module's counts, its survivors that are not listed, and the entries that match no survivor."""
    listed = [entry["change"].strip() for entry in equivalent if entry["module"] == module]
    same = [name for name, change in left.items() if change in listed or only_strict(change)]
    survivors = {name: change for name, change in left.items() if name not in same}
    counted = len(found) - len(same)
    killed = counted - len(survivors)
    return {
        "module": module,
        "mutants": len(found),
        "equivalent": len(same),
        "killed": killed,
        "score": round(killed / counted, 4) if counted else None,
        "survivors": survivors,
        "stale": [change for change in listed if change not in left.values()],
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("modules", nargs="*", help=f"default: {', '.join(MODULES)}")
    parser.add_argument(
        "--json", type=Path, help="file of counts and survivors; keeps those of other modules"
    )
    parser.add_argument("--processes", type=int, default=1)
    arguments = parser.parse_args()
    unknown = [module for module in arguments.modules if module not in MODULES]
    if unknown:
        parser.error(f"not in the list: {', '.join(unknown)}")
    equivalent = yaml.safe_load(EQUIVALENT.read_text()) or []
    good = True
    for module in arguments.modules or MODULES:
        result = judge(module, *statuses(module, arguments.processes), equivalent)
        for name, change in result["survivors"].items():
            print(f"{name}\n{change}\n")
        for change in result["stale"]:
            print(f"{EQUIVALENT.name}: entry matches no survivor of {module}:\n{change}\n")
        print(
            f"{module}: {result['killed']} of {result['mutants'] - result['equivalent']} detected"
            f" ({result['score'] or 0:.1%}), {result['equivalent']} equivalent",
            flush=True,
        )
        good = good and not result["stale"] and (result["score"] or 0) >= GOAL
        if arguments.json is not None:
            kept = json.loads(arguments.json.read_text()) if arguments.json.exists() else {}
            kept[module] = {key: value for key, value in result.items() if key != "module"}
            arguments.json.write_text(json.dumps(kept, indent=1) + "\n")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
