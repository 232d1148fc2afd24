"""Readings of a machine from outside the job: cores, memory, disks, network mounts, processes, cards."""
