"""Rewrites of Relax modules that TVM lacks; one per file, in the order of `pipeline`."""
