"""Make shards of text, and stream batches from them. Torch-free but for `stream`."""
