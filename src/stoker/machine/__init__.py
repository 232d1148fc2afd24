"""A machine as it is read: limits, disks, cards, surroundings; kept as plain values."""
