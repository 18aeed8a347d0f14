"""Decomposes, checks and imports ATen programs into Relax."""
