"""Bytes of remote files, over plain HTTP connections."""
