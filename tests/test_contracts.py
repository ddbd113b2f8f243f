"""Check rules of DESIGN for the code: allowed imports, docstrings, and content that files must not have."""

import ast
import re
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = ("bert_dp", "launcher")
OPTIONAL = tuple(
    "accelerate deepspeed datasets transformers onnx onnxruntime onnxscript "
    "tensorboard trackio wandb mlflow rensa pynvml pyarrow zstandard sklearn scipy".split()
)

Function = ast.FunctionDef | ast.AsyncFunctionDef


class Import(NamedTuple):
    """Import of a module. `target` is absolute; `from a import b` gives two imports, a and a.b."""

    module: str
    target: str
    line: int
    in_function: bool
    for_types: bool


@cache
def sources() -> dict[str, Path]:
    found = {}
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            parts = list(path.relative_to(ROOT).with_suffix("").parts)
            found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


@cache
def tree(module: str) -> ast.Module:
    return ast.parse(sources()[module].read_text())


def walk(module: str, node: ast.AST, in_function: bool = False, for_types: bool = False) -> Iterator[Import]:
    for child in ast.iter_child_nodes(node):
        inside = in_function or isinstance(node, (Function, ast.Lambda))
        types = for_types or (isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test))
        if isinstance(child, ast.Import):
            for alias in child.names:
                yield Import(module, alias.name, child.lineno, inside, types)
        elif isinstance(child, ast.ImportFrom):
            assert not child.level, f"{module}:{child.lineno} is a relative import; name the whole module"
            base = child.module or ""
            for name in (base, *(f"{base}.{alias.name}" for alias in child.names)):
                yield Import(module, name, child.lineno, inside, types)
        else:
            yield from walk(module, child, inside, types)


@cache
def imports() -> tuple[Import, ...]:
    return tuple(found for module in sources() for found in walk(module, tree(module)))


def within(name: str, *packages: str) -> bool:
    return any(name == p or name.startswith(f"{p}.") for p in packages)


def offenders(rule: Callable[[Import], bool]) -> list[str]:
    """Return the imports that break a rule."""
    return sorted({f"{i.module}:{i.line} imports {i.target}" for i in imports() if rule(i)})


# --- allowed imports


def test_the_walk_finds_known_imports() -> None:
    """If the walk found no imports, the tests below would pass without checking anything."""
    seen = {(i.module, i.target, i.in_function) for i in imports()}
    assert ("launcher.run.train", "bert_dp.config", False) in seen
    assert ("launcher.cli.training", "launcher.run.train", True) in seen
    assert ("bert_dp.training.rank", "bert_dp.training.distributed", True) in seen
    assert ("bert_dp.training.checkpoint", "safetensors.torch", False) in seen
    assert any(i.for_types for i in imports())
    assert len(sources()) > 20


ONE_SHOT = {
    "launcher.cli.evaluation": ("bert_dp.evaluation.prediction",),
    "launcher.cli.reports": ("bert_dp.training",),
    "launcher.datasets": ("bert_dp.data",),
    "launcher.evaluate.export": ("bert_dp.exporting", "bert_dp.measure"),
    "launcher.evaluate.text_loss": ("bert_dp.data", "bert_dp.evaluation", "bert_dp.measure"),
}
"""Module of verbs that work in the launcher's process -> packages that its functions may import."""


def test_the_launcher_imports_only_shared_packages_of_bert_dp() -> None:
    allowed = [f"bert_dp.{name}" for name in "config files cost __version__ training.process".split()]

    def is_wrong(i: Import) -> bool:
        of_rank = within(i.module, "launcher") and within(i.target, "bert_dp") and i.target != "bert_dp"
        one_shot = is_apart(i) and within(i.target, *ONE_SHOT.get(i.module, ()))
        return of_rank and not within(i.target, *allowed) and not one_shot

    assert offenders(is_wrong) == []


LOOP = "training.loop training.build"
RANKS = "training.distributed parallel training.loop"
FORBIDDEN = {
    "bert_dp": "launcher typer",
    "bert_dp.parallel": "model.bert data.stream tasks training.loop",
    "bert_dp.config": "bert_dp",
    "bert_dp.model.interface": "bert_dp",
    "bert_dp.tasks": f"{LOOP} parallel",
    "bert_dp.examples": f"{LOOP} parallel model data.stream tasks",
    "bert_dp.model.bert": RANKS,
    "bert_dp.data.stream": RANKS,
    "bert_dp.optim": f"{RANKS} model.bert model.classifier",
    "bert_dp.training.distributed": f"{LOOP} data.stream model.bert parallel",
    "bert_dp.training.checkpoint": f"{LOOP} data.stream model.bert",
    "bert_dp.training.loop": "training.build model.bert model.classifier data.build tasks.mlm",
}
"""Package -> packages that it must not import, in bert_dp unless another package is named. Lower packages
do not import the loop; model, data and optim import no code of ranks; engines import no model or data."""


@pytest.mark.parametrize("package", FORBIDDEN)
def test_a_package_does_not_import_higher_packages(package: str) -> None:
    packages = ("bert_dp", "launcher", "typer")
    above = [word if word in packages else f"bert_dp.{word}" for word in FORBIDDEN[package].split()]

    def is_wrong(i: Import) -> bool:
        own = package != "bert_dp" and within(i.target, package)
        return within(i.module, package) and within(i.target, *above) and not own

    assert offenders(is_wrong) == []


def is_apart(i: Import) -> bool:
    return i.in_function or i.for_types


RULES: dict[str, Callable[[Import], bool]] = {
    "rich only in functions of the corpus builder": lambda i: (
        within(i.module, "bert_dp")
        and within(i.target, "rich")
        and not (i.module == "bert_dp.data.build" and i.in_function)
    ),
    "an engine's package only in the engine's file": lambda i: (
        within(i.target, "accelerate", "deepspeed")
        and i.module != f"bert_dp.parallel.{i.target.partition('.')[0]}"
    ),
    "worker and cli only as programs": lambda i: (
        within(i.target, "bert_dp.worker", "launcher.cli")
        and not within(i.module, "launcher.cli", "launcher.__main__")
    ),
    "optional packages only in functions": lambda i: within(i.target, *OPTIONAL) and not is_apart(i),
}


@pytest.mark.parametrize("rule", RULES)
def test_only_the_modules_of_a_rule_import_a_package(rule: str) -> None:
    assert offenders(RULES[rule]) == []


def package_of(module: str) -> str:
    """Return the package of a module of the launcher, or the module itself if it is in no package."""
    return module.split(".")[1] if "." in module else module


def test_the_launchers_packages_import_each_other_in_one_direction() -> None:
    """scale, tune, plan and evaluate import run, which imports none of them. They do not import each other,
    but plan imports the models of the files that scale writes."""
    packages: dict[str, set[str]] = {}
    for i in imports():
        if within(i.module, "launcher") and within(i.target, "launcher") and i.target != "launcher":
            packages.setdefault(package_of(i.module), set()).add(package_of(i.target))
    packages = {package: others - {package} for package, others in packages.items()}
    assert packages["scale"] >= {"run", "report", "job", "results"}
    order = list(TopologicalSorter(packages).static_order())  # raises CycleError, which names the cycle
    assert order.index("report") < order.index("machine") < order.index("watch") < order.index("run")
    questions = {"scale", "tune", "plan", "evaluate"}
    assert {package: others & questions for package, others in packages.items() if others & questions} == {
        "cli": questions,
        "plan": {"scale"},
    }
    scale, models = "launcher.scale", "launcher.scale.models"
    assert not offenders(
        lambda i: (
            within(i.module, "launcher.plan")
            and i.target.startswith(f"{scale}.")
            and not within(i.target, models)
        )
    )


def test_only_process_reads_the_rank_variables() -> None:
    names = {"RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK"}
    readers = {
        module
        for module in sources()
        if within(module, "bert_dp")
        for node in ast.walk(tree(module))
        if isinstance(node, ast.Constant) and node.value in names
    }
    assert readers == {"bert_dp.training.process"}


# --- imports that must work without loading heavy packages


def python(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)


def test_the_launcher_does_not_load_torch() -> None:
    apart = ("launcher.__main__", "launcher.plan.loss_fit")  # loss_fit is imported only to fit runs
    modules = [m for m in sources() if within(m, "launcher") and m not in apart]
    assert "launcher.cli.app" in modules
    assert "launcher.run.rendezvous" in modules  # imports torch in a function
    done = python(
        "import importlib, sys\n"
        f"for name in {modules!r}:\n"
        "    importlib.import_module(name)\n"
        "    heavy = {'torch', 'numpy', 'transformers', 'plotly', 'jinja2'} & set(sys.modules)\n"
        "    assert not heavy, f'{name} loaded {heavy}'\n"
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    "module", ("config files cost data examples training.process evaluation.scores").split()
)
def test_packages_without_torch_do_not_load_it(module: str) -> None:
    done = python(f"import bert_dp.{module}, sys; assert 'torch' not in sys.modules")
    assert done.returncode == 0, done.stderr


def test_everything_imports_without_the_optional_packages() -> None:
    needs_triton = "bert_dp.model.gpu_kernels"  # triton comes with torch's CUDA builds only
    modules = [m for m in sources() if not m.endswith("__main__") and m != needs_triton]
    done = python(
        "import importlib, sys\n"
        f"blocked = {set(OPTIONAL)!r}\n"
        "class Block:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name.partition('.')[0] in blocked:\n"
        "            raise ModuleNotFoundError(f'No module named {name!r}', name=name)\n"
        "sys.meta_path.insert(0, Block())\n"
        "failed = []\n"
        f"for name in {modules!r}:\n"
        "    try:\n"
        "        importlib.import_module(name)\n"
        "    except BaseException as error:\n"
        "        failed.append(f'{name}: {error!r}')\n"
        "assert not failed, failed\n"
        "assert not blocked & set(sys.modules), blocked & set(sys.modules)\n"
    )
    assert done.returncode == 0, done.stderr


# --- readability


def test_the_formatter_is_rarely_skipped() -> None:
    """Only tables of numbers may have `fmt: skip`."""
    files = [path for top in (*PACKAGES, "tests", "benchmarks") for path in (ROOT / top).rglob("*.py")]
    assert sum(path.read_text().count("# fmt: " + "skip") for path in files) <= 40


def test_long_public_functions_and_classes_have_docstrings() -> None:
    """Functions of more than 6 and classes of more than 12 statements need a docstring, with 20 exceptions.
    Methods of the Engine protocol, forward, private names and Sections, which document fields, need none."""
    classes = [node for node in tree("bert_dp.parallel").body if isinstance(node, ast.ClassDef)]
    protocol = {"forward", *(f.name for c in classes for f in c.body if isinstance(f, Function))}
    silent = []
    for module in sources():
        for parent in [n for n in ast.walk(tree(module)) if isinstance(n, (ast.Module, ast.ClassDef))]:
            for node in [n for n in parent.body if isinstance(n, (Function, ast.ClassDef))]:
                is_class = isinstance(node, ast.ClassDef)
                exempt = node.name.startswith("_") or node.name in protocol
                exempt |= is_class and "Section" in map(ast.unparse, node.bases)
                long = sum(isinstance(n, ast.stmt) for n in ast.walk(node)) > (13 if is_class else 7)
                if long and not exempt and ast.get_docstring(node) is None:
                    silent.append(f"{module}:{node.lineno} {node.name}")
    assert len(silent) <= 20, silent


def test_modules_have_docstrings() -> None:
    silent = [module for module in sources() if ast.get_docstring(tree(module)) is None]
    assert [module for module in silent if not module.endswith("__main__")] == []


def test_no_product_file_is_over_700_lines() -> None:
    assert {m: n for m, path in sources().items() if (n := len(path.read_text().splitlines())) > 700} == {}


def test_a_class_name_has_one_meaning() -> None:
    """Only `Engine` names several classes: the protocol and its implementations."""
    places: dict[str, list[str]] = {}
    for module in sources():
        for node in ast.walk(tree(module)):
            if isinstance(node, ast.ClassDef) and node.name != "Engine":
                places.setdefault(node.name, []).append(module)
    assert {name: found for name, found in places.items() if len(found) > 1} == {}


def test_docstrings_begin_with_a_verb_or_a_noun() -> None:
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    first = {
        f"{module}:{getattr(node, 'name', '')}": (ast.get_docstring(node) or "-").split()[0]
        for module in sources()
        for node in ast.walk(tree(module))
        if isinstance(node, documented)
    }
    fragments = {"What", "Whether", "How", "Of", "Why", "Which", "Where", "That"}
    assert {place: word for place, word in first.items() if word in fragments} == {}


# --- content that files must not have


@cache
def tracked() -> tuple[Path, ...]:
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    if listed.returncode:
        pytest.skip("not a git checkout")
    return tuple(path for name in listed.stdout.split("\0") if name and (path := ROOT / name).is_file())


def test_no_file_contains_a_path_of_a_machine() -> None:
    words = tuple(
        "/".join(("", *parts)) for parts in (("work", ""), ("tmp", "lab"), ("home", ""), ("root", ""))
    )
    texts = {str(path.relative_to(ROOT)): path.read_bytes().decode("utf-8", "replace") for path in tracked()}
    assert [(name, word) for name, text in texts.items() for word in words if word in text] == []


def test_no_pickle_and_no_remote_code() -> None:
    """DESIGN allows safetensors, JSON, and torch.load with weights_only=True, but no trust_remote_code.
    Collectives of objects are not allowed either, because they unpickle the data of a peer."""
    bad = offenders(lambda i: within(i.target, "pickle", "dill", "cloudpickle", "marshal", "shelve"))
    for module in sources():
        for node in ast.walk(tree(module)):
            if not isinstance(node, ast.Call):
                continue
            keywords = {k.arg: ast.unparse(k.value) for k in node.keywords}
            name = ast.unparse(node.func)
            if name == "torch.load" and keywords.get("weights_only") != "True":
                bad.append(f"{module}:{node.lineno} torch.load without weights_only=True")
            if re.search(r"(gather|broadcast|scatter|send|recv)_object(_list)?$", name):
                bad.append(f"{module}:{node.lineno} {name} pickles")
            if keywords.get("trust_remote_code", "False") != "False":
                bad.append(f"{module}:{node.lineno} trust_remote_code")
            if name in ("eval", "exec", "yaml.unsafe_load", "yaml.full_load"):
                bad.append(f"{module}:{node.lineno} {name}")
    assert bad == []


# --- packages that CI installs


def test_every_archive_that_ci_installs_has_its_hash() -> None:
    """.ci/*.lock name one archive per line with its SHA-256, in the version of .constraints.txt, and contain
    all requirements of the package and its tests."""
    lock = re.compile(r"([a-z0-9][a-z0-9._-]*)==(\S+) --hash=sha256:[0-9a-f]{64}")
    listed = [
        lock.fullmatch(line)
        for path in (ROOT / ".ci").glob("*.lock")
        for line in path.read_text().splitlines()
    ]
    assert listed
    assert None not in listed
    versions = {canonical(found[1]): found[2].partition("+")[0] for found in listed if found}
    pins = re.findall(r"^([\w.-]+)==(\S+)$", (ROOT / ".constraints.txt").read_text(), re.MULTILINE)
    assert {name: v for name, v in pins if versions.get(canonical(name), v) != v} == {}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    wanted = [*project["dependencies"], *extras["test"], *extras["dev"]]
    names = {canonical(re.split(r"[^\w.-]", line)[0]) for line in wanted} - {"bert-dp"}
    assert names - versions.keys() == set()


def test_make_train_installs_no_extra(tmp_path: Path) -> None:
    done = subprocess.run(
        ["make", "-n", "train", f"VENV={tmp_path}/v"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    installs = [line.split(" -c ")[1] for line in done.stdout.splitlines() if "pip install" in line]
    assert installs == [".constraints.txt -e ."]


def canonical(name: str) -> str:
    """Return a distribution's name as normalized by PEP 503."""
    return re.sub(r"[-_.]+", "-", name).lower()


def test_the_guide_names_files_that_exist() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text()
    names = re.findall(r"`([\w/]+(?:\.(?:py|yaml)|/))`", text)
    assert len(names) > 60
    files = [f"/{path.relative_to(ROOT)}" for path in tracked()]
    assert [name for name in names if not any(f"/{name}" in file for file in files)] == []


def test_the_top_folder_contains_only_known_entries() -> None:
    folders = {"launcher", "bert_dp", "configs", "tests", "benchmarks", "docs"}
    files = {"pyproject.toml", "README.md", "LICENSE", "Makefile", "CHANGELOG.md", "CONTRIBUTING.md"}
    top = {path.relative_to(ROOT).parts[0] for path in tracked()}
    assert {name for name in top if not name.startswith(".")} == folders | files
