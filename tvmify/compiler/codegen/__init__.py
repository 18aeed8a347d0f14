"""Scheduled TIR to object code, and object code to a shared library."""
