"""Define, read and check the configuration of a run and the manifests of its data. Torch-free."""

from bert_dp.config.batch import BatchLayout, batch_at, batch_layout, peak_lr, progress_at, with_budget
from bert_dp.config.checks import (
    BF16_UNITS,
    Kind,
    bf16_units,
    changed_settings,
    cpu_field,
    decide_precision,
    differing_settings,
    export_formats,
    finetuned_head,
    flat,
    init_issues,
    native_class,
    native_issues,
    no_effect,
    residual_issues,
)
from bert_dp.config.engines import ENGINES, OPTIMIZERS, benchmark_names, computes_alone, engine_facts, sharded
from bert_dp.config.errors import ConfigError, Issue, IssueKind, install_command
from bert_dp.config.hf import HF, HfEncoder, hf_directory, hf_issues, read_hf, tokenizer_issues
from bert_dp.config.load import (
    absolute,
    dump_config,
    find_config,
    load_config,
    micro_is_auto,
    parse_overrides,
    read_levels,
    read_yaml,
    resolve,
    setting_paths,
    shipped_configs,
)
from bert_dp.config.manifest import ExamplesManifest, Manifest, read_data, read_examples, read_manifest
from bert_dp.config.schema import (
    BUDGETS,
    CLOCKED,
    MAX_RANKS,
    MAX_VOCAB_SIZE,
    METERED,
    BatchConfig,
    BuildConfig,
    CheckpointConfig,
    Config,
    FinetuneConfig,
    LogConfig,
    ModelConfig,
    OptimConfig,
    ParallelConfig,
    RunConfig,
    ScheduleConfig,
    divisors,
    num_masked,
)
