"""Winograd's minimal filtering for 3×3 convolutions."""
