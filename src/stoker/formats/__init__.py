"""The file formats shards come in. None of them is our own: Megatron, ustar tar, seekable zstd."""
