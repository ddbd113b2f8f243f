"""Open a run for export: its model as one function of token ids and a padding mask."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from tokenizers import Tokenizer
from torch import Tensor, nn

from bert_dp import checkpoint, pretrained, record
from bert_dp.classifier import Classifier, pool
from bert_dp.config import Config, Kind
from bert_dp.corpus import tokenizer as tokens
from bert_dp.model import CrammedBert


@dataclasses.dataclass(frozen=True)
class ExportSource:
    """A checkpoint that is exported, and what it is exported as."""

    checkpoint: Path
    facts: record.CheckpointFacts
    config: Config
    kind: Kind
    model: CrammedBert | Classifier
    """In fp32, in eval mode."""
    tokenizer: Tokenizer
    tokenizer_file: Path
    special: dict[str, int]
    """Ids by role."""

    @property
    def run_name(self) -> str:
        """Name of the run's directory; of the checkpoint's where it stands alone."""
        folder = self.checkpoint.parent
        return folder.parent.name if folder.name == "checkpoints" else self.checkpoint.name

    def module(self) -> ExportModule:
        """Build the module that is traced, compiled and compared."""
        return ExportModule(self.model, self.kind).eval()


def open_run(run: str | Path, *, encoder: bool) -> ExportSource:
    """Load the newest good checkpoint of a run, or one checkpoint. `encoder`: without its head.

    Raises ConfigError.
    """
    loaded = pretrained.load_checkpoint(checkpoint.resolve(str(run)).resolve())
    model, file = loaded.model, record.tokenizer_of(loaded.path)
    kind: Kind = "encoder" if encoder else "mlm" if isinstance(model, CrammedBert) else "classifier"
    return ExportSource(
        checkpoint=loaded.path,
        facts=loaded.facts,
        config=loaded.config,
        kind=kind,
        model=model.float(),
        tokenizer=loaded.tokenizer,
        tokenizer_file=file,
        special=tokens.special_ids(loaded.tokenizer, str(file)),
    )


class ExportModule(nn.Module):
    """Compute foreign.OUTPUTS of input_ids and attention_mask, each [B, S] int64: logits [B, S, V] of tokens
    or [B, L] of labels, hidden states [B, S, H]."""

    def __init__(self, model: CrammedBert | Classifier, kind: Kind):
        super().__init__()
        self.model, self.kind = model, kind

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> tuple[Tensor, ...]:
        real_BS = attention_mask != 0
        x_BSH = self.model.model(input_ids, real_BS)
        if self.kind == "encoder":
            return (x_BSH.float(),)
        if isinstance(self.model, Classifier):
            return (self.model.head(pool(x_BSH, real_BS, self.model.pooling), None).float(),)
        table_VH = self.model.model.embeddings.tok_embeddings.weight
        return self.model.head(x_BSH, table_VH, None).float(), x_BSH.float()
