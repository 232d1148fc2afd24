"""Raw text into large, shuffled, tokenised shards: on this machine, a Slurm cluster or Ray."""
