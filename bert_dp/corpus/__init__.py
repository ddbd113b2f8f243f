"""Text -> filtered, deduplicated, tokenized, packed shards, by `python -m bert_dp.corpus`. Torch-free."""

from bert_dp.corpus.builder import build, cache_dir, ensure, filter_warning

__all__ = ["build", "cache_dir", "ensure", "filter_warning"]
