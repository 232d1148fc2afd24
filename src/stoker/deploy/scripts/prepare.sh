#!/bin/sh
# Submits a job array for each stage and a last job that finishes the dataset; run it again after a failure.
exec stoker prepare run @arguments@ --on slurm --detach \
    --workers @pods@ --sbatch=--cpus-per-task=@cores@ --sbatch=--mem=@memory@M@partition@
