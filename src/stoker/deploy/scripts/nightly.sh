#!/bin/bash
# Every night the same job, then a check of its figures against those of the nights before.
# Exit code: the job's where it failed, else 1 where a figure became worse.
set -uo pipefail
export STOKER_HISTORY=@store@
cd @folder@ || exit 1
code=0
stoker watch --name @title@ --out "@runs@/$(date +%Y%m%d-%H%M%S)-$$" -- @command@ || code=$?
@also@stoker history check --fail || code=$((code ? code : 1))
exit "$code"
