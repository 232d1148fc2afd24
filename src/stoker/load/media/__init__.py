"""Media: members of samples decoded, cut and resized on threads, as the order says."""
