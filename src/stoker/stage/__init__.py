"""Bringing data near the GPU: once per node, whole or not at all, safe on shared filesystems."""
