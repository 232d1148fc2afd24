"""Benchmarks of a machine: what storage, loader, fabric and checkpoints give here, and what limits them."""
