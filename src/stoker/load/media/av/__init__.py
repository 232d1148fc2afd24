"""Sound and video: which seconds and frames of a member become a sample, decoded by torchcodec."""
