"""Health checks of a machine: is it fit to feed GPUs, and what mends it?"""
