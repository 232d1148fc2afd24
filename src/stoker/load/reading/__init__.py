"""Verified reads: shards as samples and chunks of bytes whose checksums hold."""
