"""Range read-through: batches made from files that are still landing."""
