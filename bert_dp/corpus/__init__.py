"""Text -> filtered, deduplicated, tokenized, packed shards, by `python -m bert_dp.corpus`. Torch-free."""

from bert_dp.corpus.builder import ensure

__all__ = ["ensure"]
