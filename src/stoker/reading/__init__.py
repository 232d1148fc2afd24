"""Shards as samples and chunks of verified bytes."""
