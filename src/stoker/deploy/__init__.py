"""Deployment manifests: Kubernetes objects and Slurm scripts for a sized job, ready as they are."""
