"""Relax passes that TVM lacks, one per file, in the order of `pipeline`."""
