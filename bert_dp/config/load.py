"""From YAML and `--set` to a Config, with every problem in one list.

Precedence, lowest first: defaults < YAML file < `--set`. Example: with `optim: {lr: 1e-3}` in the file and
`--set optim.lr=2e-3`, the run uses 2e-3. Members of an exclusive group (`schedule.steps|tokens|hours|epochs`,
`data.path|sources`) displace the members set at a lower level; two at one level are an error.
"""

from __future__ import annotations

import difflib
import itertools
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from bert_dp.config.error import ConfigError, plain_message
from bert_dp.config.schema import BUDGETS, Config, Section
from bert_dp.config.shipped import find_config
from bert_dp.config.stored import read_regular

AUTO = "auto"
MAX_CONFIG_BYTES = 1_000_000
MAX_DEPTH = 16  # of nested sections and lists; ours have three
MAX_SHOWN = 200  # characters of a value in a message
SYNONYMS: Mapping[str, tuple[str, ...]] = {
    name: settings
    for names, settings in (
        ("learning_rate max_lr peak_lr base_lr", ("optim.lr",)),
        ("optimizer", ("optim.name",)),
        ("wd decay", ("optim.weight_decay",)),
        ("betas adam_beta1 adam_beta2", ("optim.beta1", "optim.beta2")),
        ("epsilon adam_epsilon", ("optim.eps",)),
        ("grad_clip max_grad_norm clip_grad_norm gradient_clipping", ("optim.clip",)),
        ("batch_size train_batch_size size", ("batch.global_size", "batch.micro_size")),
        ("global_batch global_batch_size", ("batch.global_size",)),
        (
            "micro_batch micro_batch_size per_device_batch_size per_device_train_batch_size",
            ("batch.micro_size",),
        ),
        (
            "accumulation grad_accum gradient_accumulation gradient_accumulation_steps",
            ("batch.global_size", "batch.micro_size"),
        ),
        ("num_epochs n_epochs max_epochs num_train_epochs", ("schedule.epochs",)),
        ("max_steps num_steps total_steps train_steps iterations", ("schedule.steps",)),
        ("max_tokens num_tokens total_tokens", ("schedule.tokens",)),
        ("warmup warmup_steps warmup_ratio num_warmup_steps", ("schedule.warmup_fraction",)),
        ("scheduler lr_scheduler lr_scheduler_type lr_schedule", ("schedule.name",)),
        ("seq_len seq_length max_seq_len max_seq_length max_length", ("data.sequence_length",)),
        ("num_workers dataloader_num_workers", ("data.workers",)),
        ("dataset corpus train_file", ("data.sources", "data.path")),
        ("hidden_dim d_model n_embd dim width", ("model.hidden_size",)),
        ("layers depth n_layer n_layers num_hidden_layers", ("model.num_layers",)),
        ("heads n_head n_heads num_attention_heads", ("model.num_heads",)),
        ("ffn_dim d_ff mlp_dim", ("model.intermediate_size",)),
        ("mask_prob mlm_probability", ("objective.mask_rate",)),
        ("dtype amp bf16 fp16 mixed_precision", ("precision",)),
        ("torch_compile", ("compile",)),
        ("strategy backend", ("parallel.engine",)),
        ("gradient_checkpointing recompute", ("parallel.activation_checkpointing",)),
        ("save_steps save_every save_interval", ("checkpoint.every_steps",)),
        ("eval_steps eval_every eval_interval", ("eval.every_steps",)),
        ("logging_steps log_every log_interval", ("log.every_steps",)),
        ("random_seed", ("run.seed",)),
    )
    for name in names.split()
}
"""Names that other programs have for a setting."""
EXCLUSIVE_GROUPS = (("schedule", BUDGETS), ("data", ("path", "sources")))


def load_config(path: str | Path | None, overrides: Sequence[str] = ()) -> Config:
    """Resolve defaults < YAML file < overrides (`a.b=value`, the value read as YAML).

    Raises ConfigError with every problem found, each with its full path and a suggestion.
    """
    return resolve(_levels(path, overrides))


def _levels(path: str | Path | None, overrides: Sequence[str]) -> list[dict[str, Any]]:
    """Lowest precedence first: the bases of a file, the file, the overrides."""
    levels: list[dict[str, Any]] = []
    chain: list[Path] = []
    file = None if path is None else Path(path)
    while file is not None:
        if file.resolve() in chain:
            names = " -> ".join(p.stem for p in (*chain, file))
            raise ConfigError([f"{path}: base: {names} is a circle; one of them must have no base"])
        chain.append(file.resolve())
        level = _undotted(read_yaml(file), file)
        base = level.pop("base", None)
        levels.insert(0, level)
        if base is not None and not isinstance(base, str):
            raise ConfigError([f"{file}: base: expected the name or path of a configuration, got {base!r}"])
        try:
            file = None if base is None else find_config(base, file.parent)
        except ConfigError as error:
            raise ConfigError([f"{file}: base: {issue}" for issue in error.issues]) from None
    return [*levels, parse_overrides(overrides)] if overrides else levels


def micro_is_auto(path: str | Path, overrides: Sequence[str] = ()) -> bool:
    """Whether `batch.micro_size` is to be found before the run. Raises ConfigError as `load_config` does."""
    merged: dict[str, Any] = {}
    for level in _levels(path, overrides):
        merged = _merged(merged, level)
    batch = merged.get("batch")
    return isinstance(batch, dict) and batch.get("micro_size") == AUTO


def resolve(levels: Sequence[dict[str, Any]]) -> Config:
    """Merge nested dictionaries, lowest precedence first, and validate. Raises ConfigError."""
    merged: dict[str, Any] = {"schedule": {}}
    issues: list[str] = []
    for level in levels:
        for section, members in EXCLUSIVE_GROUPS:
            values = level.get(section)
            chosen = [m for m in members if isinstance(values, dict) and values.get(m) is not None]
            if len(chosen) > 1:
                issues.append(f"{section}: {' and '.join(chosen)} are both set; keep one")
            if chosen and isinstance(merged.get(section), dict):
                # how to build goes with what to build from
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
    """`["optim.lr=1e-3"]` -> `{"optim": {"lr": 0.001}}`. Raises ConfigError on a missing `=`."""
    tree: dict[str, Any] = {}
    issues = []
    for item in overrides:
        try:
            _set(tree, item)
        except ValueError as error:
            issues.append(f"--set {_short(item)}: {error}")
    if issues:
        raise ConfigError(issues)
    return tree


def _set(tree: dict[str, Any], item: str) -> None:
    """Put the value of `a.b=value` into the tree. Raises ValueError."""
    key, sign, value = item.partition("=")
    if not sign or not key.strip():
        raise ValueError("expected a.b=value, for example --set optim.lr=1e-3")
    node, leaf = _place(tree, key.strip())
    try:
        node[leaf] = yaml.load(value, Loader=ConfigLoader)  # noqa: S506 (a SafeLoader)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise ValueError(f"not a YAML value ({_short(str(error).splitlines()[0])})") from None


def _place(tree: dict[str, Any], key: str) -> tuple[dict[str, Any], str]:
    """Return the section of `a.b` in the tree, made where it is missing, and `b`. Raises ValueError."""
    *parents, leaf = key.split(".")
    if len(parents) > MAX_DEPTH:
        raise ValueError(f"no setting has {len(parents) + 1} parts")
    node = tree
    for depth, parent in enumerate(parents, 1):
        node = node.setdefault(parent, {})
        if not isinstance(node, dict):
            raise ValueError(f"{'.'.join(parents[:depth])} is also set to a plain value; keep one")
    return node, leaf


def _undotted(level: dict[Any, Any], file: Path) -> dict[Any, Any]:
    """Return the level with each key `a.b` in its section. Raises ConfigError for a setting given twice."""
    dotted = [key for key in level if isinstance(key, str) and "." in key]
    tree: dict[Any, Any] = {key: value for key, value in level.items() if key not in dotted}
    issues = []
    for key in dotted:
        try:
            node, leaf = _place(tree, key)
            if leaf in node:
                raise ValueError("is set twice; keep one")
            node[leaf] = level[key]
        except ValueError as error:
            issues.append(f"{file}: {_short(key)}: {error}")
    if issues:
        raise ConfigError(issues)
    return tree


def dump_config(config: Config) -> str:
    """The complete configuration as YAML; loading it again gives an equal Config."""
    return yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False)


class ConfigLoader(yaml.SafeLoader):
    """SafeLoader with the scalars of YAML 1.2; no duplicate keys, no aliases: they grow without bound."""

    depth = 0

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        if self.check_event(yaml.events.AliasEvent):
            mark = self.peek_event().start_mark
            raise yaml.composer.ComposerError(None, None, "aliases are not supported", mark)
        self.depth += 1
        if self.depth > MAX_DEPTH:
            raise yaml.composer.ComposerError(None, None, "nested too deeply", self.peek_event().start_mark)
        node = super().compose_node(parent, index)
        self.depth -= 1
        return node


def _construct_mapping(loader: ConfigLoader, node: yaml.MappingNode) -> dict[Any, Any]:
    keys: set[Any] = set()
    for key_node, _ in node.value:
        key = loader.construct_object(key_node)
        if not isinstance(key, str | int | float | bool | None):
            raise yaml.constructor.ConstructorError(
                None, None, "a key must be a plain word", key_node.start_mark
            )
        if key in keys:
            raise yaml.constructor.ConstructorError(None, None, f"duplicate key {key!r}", key_node.start_mark)
        keys.add(key)
    return dict(loader.construct_mapping(node, deep=True))


def _construct_text(loader: ConfigLoader, node: yaml.ScalarNode) -> str:
    text = loader.construct_scalar(node)
    if any("\ud800" <= letter <= "\udfff" for letter in text):
        raise yaml.constructor.ConstructorError(None, None, "a surrogate is not text", node.start_mark)
    return str(text)


# the scalars of YAML 1.2: `off` and `on` are words, 1e-3 is a float, 010 and 1:30 are no special numbers
ConfigLoader.yaml_implicit_resolvers = {}
for _tag, _pattern, _first in (
    ("bool", r"^(?:true|True|TRUE|false|False|FALSE)$", "tTfF"),
    ("null", r"^(?:~|null|Null|NULL|)$", ["~", "n", "N", ""]),
    ("int", r"^[-+]?(?:0|[1-9][0-9_]*)$", "-+0123456789"),
    (
        "float",
        r"^[-+]?(?:[0-9]+\.[0-9]*|\.[0-9]+|[0-9]+(?:\.[0-9]*)?[eE][-+]?[0-9]+|\.[0-9]+[eE][-+]?[0-9]+"
        r"|[0-9]+\.[0-9]*[eE][-+]?[0-9]+|\.(?:inf|Inf|INF))$|^\.(?:nan|NaN|NAN)$",
        "-+0123456789.",
    ),
):
    ConfigLoader.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", re.compile(_pattern), list(_first))
ConfigLoader.add_constructor("tag:yaml.org,2002:map", _construct_mapping)
ConfigLoader.add_constructor("tag:yaml.org,2002:str", _construct_text)


def read_yaml(path: str | Path) -> dict[str, Any]:
    """The mapping in a YAML file of at most MAX_CONFIG_BYTES, without aliases. Raises ConfigError."""
    try:
        text = read_regular(Path(path), MAX_CONFIG_BYTES)
    except OSError as error:
        raise ConfigError([f"{path}: cannot be read ({error.strerror})"]) from None
    try:
        data = yaml.load(text.decode(), Loader=ConfigLoader)  # noqa: S506 (a SafeLoader)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise ConfigError([f"{path}: not valid YAML ({_short(' '.join(str(error).split()))})"]) from None
    if not isinstance(data, dict):
        raise ConfigError([f"{path}: expected a mapping of settings, got {type(data).__name__}"])
    return data


def _short(text: str) -> str:
    """A text for a message: of a long one its beginning and its length."""
    return text if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]}... ({len(text)} characters)"


def _merged(base: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    """`over` on top of `base`, section by section; neither changes."""
    merged = dict(base)
    for key, value in over.items():
        below = merged.get(key)
        if isinstance(below, dict) and isinstance(value, dict):
            value = _merged(below, value)
        merged[key] = value
    return merged


def setting_paths(section: type[Section] = Config, prefix: str = "") -> Iterator[str]:
    """Every setting as a dotted path."""
    for name, field in section.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, Section):
            yield from setting_paths(field.annotation, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}"


def _suggested(path: str, value: object) -> list[str]:
    """Return the settings that an unknown one may stand for; for an unknown section those of its keys."""
    section, _, leaf = path.rpartition(".")
    settings = list(setting_paths())
    prefix = f"{section}." if section else ""
    mates = dict.fromkeys(
        name.removeprefix(prefix).partition(".")[0] for name in settings if name.startswith(prefix)
    )

    def mate(cutoff: float) -> list[str]:
        return [prefix + name for name in difflib.get_close_matches(leaf, mates, n=1, cutoff=cutoff)]

    if isinstance(value, dict):
        inner = (_suggested(f"{path}.{key}", below) for key, below in value.items())
        return mate(0.75) or list(dict.fromkeys(itertools.chain.from_iterable(inner)))
    return (
        list(SYNONYMS.get(leaf.lower(), ()))
        or mate(0.75)
        or [name for name in settings if name.rpartition(".")[2] == leaf][:1]
        or mate(0.5)
        or difflib.get_close_matches(path, settings, n=1, cutoff=0.5)
    )


def _explain(error: Any) -> str:
    path = ".".join(str(p) for p in error["loc"])
    if error["type"] == "extra_forbidden":
        hint = f"; did you mean {' or '.join(close)}?" if (close := _suggested(path, error["input"])) else ""
        return f"{_short(path)}: unknown setting{hint}"
    value = error.get("input")
    shown = "" if isinstance(value, dict) or error["type"] == "missing" else f" (got {_short(repr(value))})"
    message = plain_message(error["msg"])
    if path == "batch.micro_size" and value == AUTO:
        return (
            f"{path}: {AUTO} is found by `bert-dp train` and `bert-dp tune batch` alone; give the number "
            "that they find"
        )
    if error["type"] == "literal_error" and isinstance(value, str):
        options = re.findall(r"'([^']*)'", error["ctx"]["expected"])
        close = difflib.get_close_matches(value, options, n=1, cutoff=0.4)
        shown += f"; did you mean {close[0]}?" if close else ""
    return f"{path}: {message}{shown}" if path else f"{message}{shown}"
