"""Prefetch: batches made ahead of the consumer, by a thread or by worker processes, to a tuned depth."""
