"""Watching a run: inside the training process (boot, probe, hooks, stalls) and beside it (host, gpu, watch).

What runs inside imports the standard library only, so that it works in any environment torch works in.
"""
