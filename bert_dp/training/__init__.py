"""Run one rank: its process, the training loop, checkpoints and metrics."""
