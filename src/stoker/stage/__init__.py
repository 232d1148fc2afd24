"""Bring files next to the GPU, once per node."""
