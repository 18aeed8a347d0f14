"""Artifacts: the compiled program, its manifest, and the validation of both."""

from tvmify.artifact.artifact import FORMAT_VERSION, Artifact, Seconds

__all__ = ["FORMAT_VERSION", "Artifact", "Seconds"]
