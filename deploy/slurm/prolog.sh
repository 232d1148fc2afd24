#!/bin/bash
# Once on every node, before training. Doctor ends the job on a node that would starve its GPUs.
set -euo pipefail
stoker doctor --for "$SLURM_SUBMIT_DIR/plan.json" --cache /nvme/stoker
stoker stage s3://bucket/corpus --cache /nvme/stoker --share "$SLURM_NODEID/$SLURM_NNODES"
