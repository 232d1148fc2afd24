"""Sample order (shuffle, sharding over ranks, blending, packing), computed: pure."""
