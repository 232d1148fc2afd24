#!/bin/sh
# What people really start: a script that sets things and runs Python somewhere below.
set -e
export OMP_NUM_THREADS=1
"$PYTHON" "$(dirname "$0")/loop.py" "$@"
echo "script done"
