"""Diagnosis of a recording: where the time went, what is wrong, what it costs, what to change. Pure."""
