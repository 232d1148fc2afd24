#!/bin/bash
# Once on every node, before training. Doctor ends the job on a node that would starve its GPUs.
set -euo pipefail
@doctor@stoker stage @data@ --cache @cache@ --share "$SLURM_NODEID/$SLURM_NNODES"
