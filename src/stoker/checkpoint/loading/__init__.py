"""Load matching: what a checkpoint has and what the objects want; names, shapes, dtypes; one report."""
