"""Leases and fencing: who works on a thing, decided without locks."""
