"""Goodput over a job's whole life: runs that restart each other as one story."""
