"""Compares operators, architectures and random programs with eager, and records where they ran."""
