"""A checkpoint as files: what lies where, written, committed, read, verified, kept. No torch."""
