"""Files that launcher and rank share: results, lines, heartbeats, locks. Torch-free."""

from bert_dp.files.heartbeat_layout import (
    BEAT_BYTES,
    BEAT_SLOTS,
    IN_STEP,
    PHASES,
    Heartbeat,
    heartbeat_path,
    read_heartbeat,
)
from bert_dp.files.io import (
    CONTROL,
    REDACTED,
    hide,
    is_secret,
    lock,
    printable,
    safe,
    secret_values,
    without_folders,
)
from bert_dp.files.json_lines import (
    MAX_JSON_BYTES,
    append_line,
    cut_back,
    finite,
    parse_json,
    read_json,
    read_lines,
    write_json,
    write_text,
)
from bert_dp.files.run_facts import (
    PREDICTIONS,
    SCHEMA_VERSION,
    TOKENIZER,
    CheckpointFacts,
    list_checkpoints,
    newest_checkpoint_facts,
    read_checkpoint_facts,
    tokenizer_of,
    weights_hash,
)
from bert_dp.files.shared import (
    INIT_FILE,
    LAUNCHER_PID,
    LAUNCHER_START,
    LOG_DIR,
    STARTED_AGAIN,
    STOP_SIGNALS,
    cache_issues,
    cache_root,
    honoured,
    is_own_code,
    reopen_std_streams,
    set_private_umask,
    start_ticks,
)
