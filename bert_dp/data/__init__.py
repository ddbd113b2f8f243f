"""Build shards from text, and stream batches from them. Torch-free except for `stream`."""
