"""Train a separate model on each rank, without communication. This measures the throughput with all
devices busy, which is the upper limit for every engine."""

from bert_dp.parallel.single import make

__all__ = ["make"]
