"""The state of a training loop: flattened, planned, copied to host memory, and read back into place."""
