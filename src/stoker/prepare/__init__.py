"""Data preparation: raw text into large, shuffled, tokenised shards; here, on Slurm, Ray or in pods."""
