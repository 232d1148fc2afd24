"""Cache folder: its index, free space and eviction, and the pins of who reads."""
