"""One rank: its process, the train loop, checkpoints and metrics."""
