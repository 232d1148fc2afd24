#!/bin/sh
# Submits a job array for each stage and a last job that finishes the dataset; run it again after a failure.
exec stoker prepare run /lustre/raw --tokenizer gpt2 --out /lustre/corpus --on slurm --detach \
    --workers 8 --sbatch=--cpus-per-task=8 --sbatch=--mem=32768M
