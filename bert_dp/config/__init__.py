"""The whole configuration of a run. Torch-free."""

from bert_dp.config.batch import BatchLayout, batch_at, batch_layout, progress_at, with_budget
from bert_dp.config.checks import (
    changed_settings,
    differing_settings,
    flat,
    init_issues,
    no_effect,
    residual_issues,
)
from bert_dp.config.cpu import BF16_UNITS, bf16_units, cpu_field
from bert_dp.config.engines import (
    ENGINES,
    OPTIMIZERS,
    benchmark_names,
    computes_alone,
    engine_facts,
    engines_with,
    sharded,
)
from bert_dp.config.error import ConfigError, Issue, IssueKind, plain_message
from bert_dp.config.examples import ExamplesManifest, read_data, read_examples
from bert_dp.config.extras import install_command
from bert_dp.config.load import (
    dump_config,
    load_config,
    micro_is_auto,
    parse_overrides,
    read_yaml,
    resolve,
    setting_paths,
)
from bert_dp.config.manifest import Manifest, read_manifest
from bert_dp.config.modernbert import HF, hf_directory, modernbert_issues
from bert_dp.config.native import Kind, native_class, native_head, native_issues
from bert_dp.config.precision import decide_precision
from bert_dp.config.rates import PeakLr, peak_lr
from bert_dp.config.schema import (
    BUDGETS,
    MAX_RANKS,
    MAX_VOCAB_SIZE,
    BatchConfig,
    BuildConfig,
    CheckpointConfig,
    Config,
    DataConfig,
    FinetuneConfig,
    LogConfig,
    ModelConfig,
    OptimConfig,
    ParallelConfig,
    ScheduleConfig,
    Section,
    divisors,
    num_masked,
)
from bert_dp.config.shipped import find_config, shipped_configs
