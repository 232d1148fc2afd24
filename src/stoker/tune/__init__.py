"""`stoker tune`: better settings for a job, found by short trials of it and proven beside it unchanged."""
