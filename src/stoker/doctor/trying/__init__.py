"""Active checks: what reading cannot tell is tried, briefly, only where the user said."""
