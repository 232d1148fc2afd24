#!/bin/sh
# Installs the Debian packages that integration tests talk to, where we may.
# Usage: install-debian.sh [PACKAGE...]
set -eu
packages="${*:-slurm-wlm munge openmpi-bin nginx-light openssl nfs-ganesha nfs-ganesha-vfs user-mode-linux iproute2 prometheus ffmpeg chromium-headless-shell}"
missing=""
for package in $packages; do
    dpkg-query -W -f '${Status}' "$package" 2>/dev/null | grep -q 'install ok installed' || missing="$missing $package"
done
[ -n "$missing" ] || exit 0
command -v apt-get >/dev/null || { echo "not a Debian system: tests that need$missing will skip" >&2; exit 0; }
if [ "$(id -u)" = 0 ]; then sudo=""
elif command -v sudo >/dev/null && sudo -n true 2>/dev/null; then sudo="sudo -n"
else echo "no root here: tests that need$missing will skip" >&2; exit 0
fi
# Services that a package would start on installation are none of ours: the tests start their own.
export DEBIAN_FRONTEND=noninteractive RUNLEVEL=1
$sudo apt-get update -qq
# shellcheck disable=SC2086
$sudo apt-get install -y -qq --no-install-recommends $missing >/dev/null
