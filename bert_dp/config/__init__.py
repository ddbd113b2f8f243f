"""The whole configuration of a run. Torch-free."""

from bert_dp.config.checks import (
    BatchPlan,
    ConfigError,
    batch_at,
    batch_plan,
    changed_settings,
    data_issues,
    init_issues,
    no_effect,
    progress_at,
)
from bert_dp.config.load import (
    dump_config,
    load_config,
    micro_is_auto,
    parse_overrides,
    resolve,
    setting_paths,
)
from bert_dp.config.rates import PeakLr, peak_lr
from bert_dp.config.schema import (
    MAX_VOCAB_SIZE,
    BatchConfig,
    BuildConfig,
    CheckpointConfig,
    Config,
    DataConfig,
    LogConfig,
    ModelConfig,
    OptimConfig,
    ParallelConfig,
    ScheduleConfig,
    Section,
    num_masked,
)

__all__ = [
    "MAX_VOCAB_SIZE", "BatchConfig", "BatchPlan", "BuildConfig", "CheckpointConfig", "Config", "ConfigError",
    "DataConfig", "LogConfig", "ModelConfig", "OptimConfig", "ParallelConfig", "PeakLr", "ScheduleConfig",
    "Section", "batch_at", "batch_plan", "changed_settings", "data_issues", "dump_config", "init_issues",
    "load_config", "micro_is_auto", "no_effect", "num_masked", "progress_at", "parse_overrides", "peak_lr",
    "resolve", "setting_paths",
]  # fmt: skip
