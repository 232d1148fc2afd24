"""Data loading: shards on local disk into batches, and batches into the GPU."""
