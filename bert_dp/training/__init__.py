"""Run one rank: set up its process, train, write checkpoints and record metrics."""
