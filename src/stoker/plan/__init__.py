"""Capacity planning: what a job must read, hold and save before it runs, and what it costs when it cannot."""
