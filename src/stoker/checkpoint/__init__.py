"""Checkpointing: snapshot, write, commit, drain to the remote tier; and restore."""
