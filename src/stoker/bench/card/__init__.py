"""What a card is fed through: copies between it and the host, and the way from storage to it."""
