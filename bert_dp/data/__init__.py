"""Text -> filtered, deduplicated, tokenized, packed shards, by `python -m bert_dp.data`. Torch-free."""

from bert_dp.data.build import ensure

__all__ = ["ensure"]
