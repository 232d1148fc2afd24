"""Hardware and kernel inventory: limits, disks, cards, surroundings; read once, or again and again."""
