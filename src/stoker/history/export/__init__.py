"""Exports: the same figures as files that other programs read. Nothing is written unless asked for."""
