"""Curation: a list of steps that documents pass before they are tokenised, each counted."""
