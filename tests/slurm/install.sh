#!/usr/bin/env bash
# Installs Debian's SLURM for the tests beside this file, if it is missing; says why where it cannot, and lets the tests
# skip themselves.
set -uo pipefail
packages=(slurmctld slurmd slurm-client iproute2)
command -v slurmctld >/dev/null && command -v slurmd >/dev/null && command -v sbatch >/dev/null && exit 0
if [ "$(id -u)" != 0 ] || ! command -v apt-get >/dev/null; then
    echo "install.sh: SLURM is installed on Debian by root alone; the SLURM tests will be skipped" >&2
    exit 0
fi
# Debian starts a package's daemons: not here.
policy=/usr/sbin/policy-rc.d
if [ ! -e $policy ]; then
    printf '#!/bin/sh\nexit 101\n' >$policy
    chmod 755 $policy
    trap 'rm -f $policy' EXIT
fi
export DEBIAN_FRONTEND=noninteractive
if ! { apt-get update -qq && apt-get install -qq --no-install-recommends "${packages[@]}"; } </dev/null >/dev/null; then
    echo "install.sh: apt-get failed; the SLURM tests will be skipped" >&2
fi
