"""Sizing a job before it runs: what it must read, hold and save, and what it costs when it cannot."""
