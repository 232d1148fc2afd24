"""Checkpoints that others made: recognised by their files, read lazily, imported."""
