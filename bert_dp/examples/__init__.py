"""GLUE and own files -> a prepared directory of examples, by `python -m bert_dp.examples`. Torch-free."""

from bert_dp.examples.store import Examples

__all__ = ["Examples"]
