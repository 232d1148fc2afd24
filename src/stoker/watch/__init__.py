"""Profiling a run: start a command with hooks inside it, sample the machine beside it, say how it ended."""
