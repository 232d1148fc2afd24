"""stoker inside other people's training loops: Hugging Face's Trainer, Lightning."""
