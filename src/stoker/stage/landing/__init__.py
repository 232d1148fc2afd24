"""Resumable downloads: slices written, hashed and noted, so that a successor can go on."""
