"""System metrics sampled from outside the job: cores, memory, disks, network mounts, processes, cards."""
