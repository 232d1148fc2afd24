"""Staging: a node-local cache of remote files, brought once per node."""
