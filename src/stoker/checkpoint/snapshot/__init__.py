"""Snapshot: the state of a training loop flattened, planned, copied to host memory, and put back."""
