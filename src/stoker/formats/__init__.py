"""File formats of shards. None of them is our own: Megatron, ustar tar, seekable zstd."""
