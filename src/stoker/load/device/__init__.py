"""Host-to-device transfer: streams, pinned memory, batches gathered on the card."""
