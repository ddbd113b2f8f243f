"""Open a run for export: its model as one function of token ids and a padding mask."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from torch import Tensor, nn

from bert_dp import checkpoint, record
from bert_dp.classifier import Classifier, pool
from bert_dp.config import Kind
from bert_dp.corpus import tokenizer as tokens
from bert_dp.model import CrammedBert
from bert_dp.pretrained import LoadedCheckpoint, load_checkpoint


@dataclasses.dataclass(frozen=True)
class ExportSource(LoadedCheckpoint):
    """A checkpoint that is exported, its model in fp32."""

    kind: Kind
    """Of the model that is exported."""
    tokenizer_file: Path
    special: dict[str, int]
    """Ids by role."""

    @property
    def run_name(self) -> str:
        """Name of the run's directory; of the checkpoint's where it stands alone."""
        folder = self.path.parent
        return folder.parent.name if folder.name == "checkpoints" else self.path.name

    def module(self) -> ExportModule:
        """Build the module that is traced, compiled and compared."""
        return ExportModule(self.model, self.kind).eval()


def open_run(run: str | Path, *, encoder: bool) -> ExportSource:
    """Load the newest good checkpoint of a run, or one checkpoint. `encoder`: without its head.

    Raises ConfigError.
    """
    loaded = load_checkpoint(checkpoint.resolve(str(run)).resolve())
    kind: Kind = "encoder" if encoder else "mlm" if isinstance(loaded.model, CrammedBert) else "classifier"
    loaded.model.float()
    file = record.tokenizer_of(loaded.path)
    special = tokens.special_ids(loaded.tokenizer, str(file))
    return ExportSource(**vars(loaded), kind=kind, tokenizer_file=file, special=special)


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
