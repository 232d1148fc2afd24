"""The checkpoint format: what lies where, written, committed, read, verified, kept. No torch."""
