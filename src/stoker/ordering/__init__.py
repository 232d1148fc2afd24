"""The order of samples, computed: pure."""
