"""Read a Config from YAML files and overrides (`a.b=value`), and report every problem at once.

Precedence, lowest first: defaults < YAML file < overrides. With `optim: {lr: 1e-3}` in the file and the
override `optim.lr=2e-3`, the run uses 2e-3. `schedule` has one budget, and `data` has either `path` or
`sources`. If two levels choose differently, the higher one decides. Two choices in one level are an error.
"""

import difflib
import functools
import itertools
import json
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from bert_dp.config.errors import ConfigError, Issue, IssueKind, read_regular, refusing
from bert_dp.config.hf import HF, hf_directory, read_hf
from bert_dp.config.own_code import split_code
from bert_dp.config.schema import BUDGETS, CODE, Config, ModelConfig, all_settings

AUTO = "auto"
MAX_CONFIG_BYTES = 1_000_000
MAX_SHOWN = 200  # a message shows at most this many characters of a value
_SYNONYMS = """
learning_rate max_lr peak_lr base_lr: optim.lr
optimizer: optim.name
wd decay: optim.weight_decay
betas adam_beta1 adam_beta2: optim.beta1 optim.beta2
epsilon adam_epsilon: optim.eps
grad_clip max_grad_norm clip_grad_norm gradient_clipping: optim.clip
batch_size train_batch_size size: batch.global_size batch.micro_size
accumulation grad_accum gradient_accumulation gradient_accumulation_steps: batch.global_size batch.micro_size
global_batch global_batch_size: batch.global_size
micro_batch micro_batch_size per_device_batch_size per_device_train_batch_size: batch.micro_size
num_epochs n_epochs max_epochs num_train_epochs: schedule.epochs
max_steps num_steps total_steps train_steps iterations: schedule.steps
max_tokens num_tokens total_tokens: schedule.tokens
warmup warmup_steps warmup_ratio num_warmup_steps: schedule.warmup_fraction
scheduler lr_scheduler lr_scheduler_type lr_schedule: schedule.name
seq_len seq_length max_seq_len max_seq_length max_length: data.sequence_length
num_workers dataloader_num_workers: data.workers
dataset corpus train_file: data.sources data.path
hidden_dim d_model n_embd dim width: model.hidden_size
layers depth n_layer n_layers num_hidden_layers: model.num_layers
heads n_head n_heads num_attention_heads: model.num_heads
ffn_dim d_ff mlp_dim: model.intermediate_size
mask_prob mlm_probability: objective.mask_rate
dtype amp bf16 fp16 mixed_precision: precision
torch_compile: compile
strategy backend: parallel.engine
gradient_checkpointing recompute: parallel.activation_checkpointing
save_steps save_every save_interval: checkpoint.every_steps
eval_steps eval_every eval_interval: eval.every_steps
logging_steps log_every log_interval: log.every_steps
random_seed: run.seed
"""
SYNONYMS: Mapping[str, tuple[str, ...]] = {
    name: tuple(settings.split())
    for names, settings in (row.split(": ") for row in _SYNONYMS.strip().splitlines())
    for name in names.split()
}
"""Name of a setting in other programs -> settings of bert-dp with a similar meaning."""
_KINDS: Mapping[str, IssueKind] = {
    "missing": "missing",
    "literal_error": "unknown",
    "value_error": "conflict",
    "finite_number": "out_of_range",
    "greater_than": "out_of_range",
    "greater_than_equal": "out_of_range",
    "less_than": "out_of_range",
    "less_than_equal": "out_of_range",
}
"""pydantic's error type -> kind of issue; any other type is wrong_type."""


def load_config(path: str | Path | None, overrides: Sequence[str] = ()) -> Config:
    """Build the configuration from defaults, a YAML file and overrides (`a.b=value`, with the value in
    YAML). If run.init_from is hf:DIR, DIR supplies the model settings and the tokenizer, unless they are set.
    Raises ConfigError with every problem, each with the full path of its setting and any suggestion."""
    levels = [*([] if path is None else read_levels(Path(path))), parse_overrides(overrides)]
    source = _merged_section(levels, "run").get("init_from")
    directory = hf_directory(source) if isinstance(source, str) else None
    is_complete = ModelConfig.model_fields.keys() <= _merged_section(levels, "model").keys()  # a saved config
    return resolve(levels if directory is None or is_complete else [read_hf(directory).level(), *levels])


def read_levels(file: Path, above: tuple[Path, ...] = ()) -> list[dict[str, Any]]:
    """Read the settings of a file and of its `base` files, lowest precedence first. Raises ConfigError."""
    if file.resolve() in above:
        message, hint = "base: leads back to this file", "remove base from one of the files"
        raise ConfigError([Issue(str(file), "conflict", message, hint=hint)])
    level = _undotted(read_yaml(file), file)
    base = level.pop("base", None)
    if base is None:
        return [level]
    try:
        found = find_config(str(base), file.parent)
    except ConfigError as error:
        raise ConfigError([issue.within(f"{file}: base") for issue in error.issues]) from None
    return [*read_levels(found, (*above, file.resolve())), level]


def shipped_configs() -> Path:
    """Return the directory of the shipped configurations: in the wheel, or next to the source."""
    root = Path(__file__).parents[2]
    packaged = root / "launcher" / "configs"
    return packaged if packaged.is_dir() else root / "configs"


def find_config(name: str, folder: Path = Path()) -> Path:
    """Find the file `name` in `folder`, or else the shipped configuration `name`. Raises ConfigError."""
    if not name:
        hint = "pass a file, or a name listed by `bert-dp configs`"
        raise ConfigError([Issue("CONFIG", "missing", "is empty", hint=hint)])
    path = folder / Path(name).expanduser()
    if path.exists() and not path.is_dir():  # a directory may have the same name as a shipped configuration
        return path
    names = [file.stem for file in sorted(shipped_configs().glob("*.yaml"))]
    plain = Path(name)
    if plain.parent.name in ("", "configs") and plain.stem in names:
        return shipped_configs() / f"{plain.stem}.yaml"
    if path.exists():  # a directory, which the caller refuses
        return path
    message = f"no such file or shipped configuration ({', '.join(names)})"
    similar = _did_you_mean(difflib.get_close_matches(plain.stem, names, n=1))
    raise ConfigError([Issue(name, "not_found", message, hint=similar)])


def micro_is_auto(path: str | Path, overrides: Sequence[str] = ()) -> bool:
    """Return True if `batch.micro_size` is auto and must be measured before the run. Raises ConfigError."""
    levels = [*read_levels(Path(path)), parse_overrides(overrides)]
    return bool(_merged_section(levels, "batch").get("micro_size") == AUTO)


def resolve(levels: Sequence[dict[str, Any]]) -> Config:
    """Merge nested dictionaries, lowest precedence first, and validate the result. Raises ConfigError."""
    merged: dict[str, Any] = {"schedule": {}}
    issues: list[Issue] = []
    for level in levels:
        for section, members in (("schedule", BUDGETS), ("data", ("path", "sources"))):
            values = level.get(section)
            chosen = [m for m in members if isinstance(values, dict) and values.get(m) is not None]
            if len(chosen) > 1:
                message = f"{' and '.join(chosen)} cannot be combined"
                issues.append(Issue(section, "conflict", message, hint="keep one"))
            if chosen and isinstance(merged.get(section), dict):
                # data.path also displaces data.build and data.tokenizer, which were set for data.sources
                displaced = (*members, "build", "tokenizer") if chosen == ["path"] else members
                merged[section] = {k: v for k, v in merged[section].items() if k not in displaced}
        merged = _merged(merged, level)
    if issues:
        raise ConfigError(issues)
    try:
        return Config.model_validate_json(json.dumps(merged, default=str))
    except ValidationError as error:
        raise ConfigError([_explain(e) for e in error.errors()]) from None


def parse_overrides(overrides: Sequence[str]) -> dict[str, Any]:
    """Convert `["optim.lr=1e-3"]` to `{"optim": {"lr": 0.001}}`. Raises ConfigError."""
    tree: dict[str, Any] = {}
    issues = []
    for item in overrides:
        key, sign, value = item.partition("=")
        try:
            if not sign or not key.strip():
                raise ValueError("expected a.b=value, for example optim.lr=1e-3")
            section, leaf = _section_of(tree, key.strip())
            section[leaf] = _parse_yaml(value)
        except ValueError as error:
            issues.append(Issue(_short(item), "wrong_type", str(error)))
    if issues:
        raise ConfigError(issues)
    return tree


def _section_of(tree: dict[str, Any], key: str) -> tuple[dict[str, Any], str]:
    """Return the section of `key`, created if missing, and the last part of `key`. Raises ValueError."""
    *parents, leaf = key.split(".")
    if len(parents) > 16:  # limits the nesting; no setting has more than three parts
        raise ValueError(f"no setting has {len(parents) + 1} parts")
    for depth, parent in enumerate(parents, 1):
        tree = tree.setdefault(parent, {})
        if not isinstance(tree, dict):
            raise ValueError(f"{'.'.join(parents[:depth])} is a value, not a section")
    return tree, leaf


def _undotted(level: dict[Any, Any], file: Path) -> dict[Any, Any]:
    """Move each dotted key of a level into its section. Raises ConfigError if a setting is given twice."""
    tree = {key: value for key, value in level.items() if "." not in str(key)}
    issues = []
    for key in [key for key in level if key not in tree]:
        try:
            section, leaf = _section_of(tree, key)
            if leaf in section:
                raise ValueError("is set twice; keep one")
            section[leaf] = level[key]
        except ValueError as error:
            issues.append(Issue(f"{file}: {_short(key)}", "conflict", str(error)))
    if issues:
        raise ConfigError(issues)
    return tree


def absolute(config: Config) -> Config:
    """Return the configuration with all paths made absolute."""

    def full(path: str | None) -> str | None:
        return None if path is None else str(Path(os.path.expanduser(path)).resolve())

    def source(name: str) -> str:
        return name if name == "builtin" or name.startswith("hub:") else str(full(name))

    def code(name: str) -> str:
        file, function = split_code(name)
        return f"{full(str(file))}:{function}" if CODE.fullmatch(name) else name

    data, init_from = config.data, config.run.init_from
    sources = None if data.sources is None else tuple(map(source, data.sources))
    paths = {"path": full(data.path), "sources": sources, "tokenizer": full(data.tokenizer)}
    directory = hf_directory(init_from)
    weights = full(init_from) if directory is None else f"{HF}{full(str(directory))}"
    run = config.run.model_copy(update={"init_from": weights})
    optim = config.optim.model_copy(update={"name": code(config.optim.name)})
    own = {"task": config.task and code(config.task), "optim": optim}
    return config.model_copy(update={"data": data.model_copy(update=paths), "run": run, **own})


def dump_config(config: Config) -> str:
    """Return the complete configuration as YAML, from which load_config reads an equal Config."""
    return yaml.dump(config.model_dump(mode="json"), Dumper=ConfigDumper, sort_keys=False)


class ConfigLoader(yaml.SafeLoader):
    """YAML loader (1.2 scalars) that rejects duplicate keys and aliases. Aliases may expand without limit."""

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        if self.check_event(yaml.events.AliasEvent):
            mark = self.peek_event().start_mark
            raise yaml.composer.ComposerError(None, None, "aliases are not supported", mark)
        return super().compose_node(parent, index)

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [self.construct_object(key, deep=True) for key, _ in node.value]
        for number, key in enumerate(keys):
            if not isinstance(key, str | int):
                raise ValueError(f"key {key!r} is neither text nor a whole number")
            if key in keys[:number]:
                raise ValueError(f"duplicate key {key!r}")
        return super().construct_mapping(node, deep)


class ConfigDumper(yaml.SafeDumper):
    """Dumper that quotes text such as 1e5, which ConfigLoader would otherwise read as a number."""


# in YAML 1.2, 1e-3 is a number, and `off`, `on`, 010 and 1:30 are text
ConfigLoader.yaml_implicit_resolvers = {}
for _tag, _pattern in (
    ("bool", r"true|True|TRUE|false|False|FALSE"),
    ("null", r"|~|null|Null|NULL"),
    ("int", r"[-+]?(0|[1-9][0-9_]*)"),
    ("float", r"[-+]?([0-9]+\.?[0-9]*|\.[0-9]+)[eE][-+]?[0-9]+|[-+]?([0-9]+\.[0-9]*|\.[0-9]+)"),
    ("float", r"[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)"),
):
    for _class in (ConfigLoader, ConfigDumper):
        _class.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", re.compile(f"({_pattern})$"), None)


def _parse_yaml(text: str) -> Any:
    """Parse one YAML document. Raises ValueError with a one-line message."""
    try:
        return yaml.load(text, Loader=ConfigLoader)  # noqa: S506 (a SafeLoader)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise ValueError(f"not valid YAML ({_short(' '.join(str(error).split()))})") from None


def read_yaml(path: str | Path) -> dict[str, Any]:
    """Read a mapping from a YAML file with at most MAX_CONFIG_BYTES and no aliases. Raises ConfigError."""
    with refusing(str(path)):
        data = _parse_yaml(read_regular(Path(path), MAX_CONFIG_BYTES).decode())
        if not isinstance(data, dict):
            raise ValueError(f"expected a mapping of settings, got {type(data).__name__}")
    return data


def _short(text: str) -> str:
    """Truncate a text that is too long for a message, and append its original length."""
    return text if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]}... ({len(text)} characters)"


def _merged(base: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    """Return `base` overridden by `over`, section by section; neither is modified."""
    merged = dict(base)
    for key, value in over.items():
        below = merged.get(key)
        if isinstance(below, dict) and isinstance(value, dict):
            value = _merged(below, value)
        merged[key] = value
    return merged


def _merged_section(levels: Sequence[dict[str, Any]], name: str) -> dict[str, Any]:
    """Merge the levels and return the section `name`, or {} if there is no such section."""
    merged: dict[str, Any] = functools.reduce(_merged, levels, {})
    section = merged.get(name)
    return section if isinstance(section, dict) else {}


def setting_paths() -> list[str]:
    """Return every setting as a dotted path."""
    return [path for path, _, _ in all_settings()]


def _suggested(path: str, value: object) -> list[str]:
    """Return settings similar to the unknown setting `path` or, if `value` is a section, to its keys."""
    if isinstance(value, dict):
        inner = (_suggested(f"{path}.{key}", below) for key, below in value.items())
        return list(dict.fromkeys(itertools.chain.from_iterable(inner)))
    settings, leaf = setting_paths(), path.rpartition(".")[2]
    return (
        list(SYNONYMS.get(leaf.lower(), ()))
        or difflib.get_close_matches(path, settings, n=1, cutoff=0.8)
        or [name for name in settings if name.rpartition(".")[2] == leaf][:1]
        or difflib.get_close_matches(path, settings, n=1, cutoff=0.5)
    )


def _did_you_mean(names: Sequence[str]) -> str | None:
    return f"did you mean {' or '.join(names)}?" if names else None


def _explain(error: Any) -> Issue:
    """Convert one pydantic error to an Issue."""
    path, value = ".".join(map(str, error["loc"])), error.get("input")
    if error["type"] == "extra_forbidden":
        return Issue(_short(path), "unknown", "unknown setting", hint=_did_you_mean(_suggested(path, value)))
    message, hint = error["msg"].removeprefix("Value error, "), None
    kind: IssueKind = _KINDS.get(error["type"], "wrong_type")
    if path == "batch.micro_size" and value == AUTO:
        message = f"only `bert-dp train` and `bert-dp tune batch` accept {AUTO}"
        hint = "set a number, such as the result of `bert-dp tune batch`"
    elif error["type"] == "literal_error" and isinstance(value, str):
        options = re.findall(r"'([^']*)'", error["ctx"]["expected"])
        hint = _did_you_mean(difflib.get_close_matches(value, options, n=1, cutoff=0.4))
    if not isinstance(value, dict) and error["type"] != "missing":
        message += f" (got {_short(repr(value))})"
    return Issue(path, kind, message, value, hint=hint)
