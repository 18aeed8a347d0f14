"""What is built: the compiled program, its description, and the check of both."""

from tvmify.artifact.artifact import FORMAT_VERSION, Artifact, Seconds

__all__ = ["FORMAT_VERSION", "Artifact", "Seconds"]
