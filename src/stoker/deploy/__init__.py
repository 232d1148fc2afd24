"""Files that run a sized job: Kubernetes objects and Slurm scripts, ready as they are."""
