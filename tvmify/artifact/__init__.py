"""Artifacts: the compiled program, its manifest, and the validation of both."""

from tvmify.artifact.artifact import CALL_OF_TORCH, FORMAT_VERSION, Artifact
from tvmify.artifact.verdicts import Seconds, VerdictKey

__all__ = ["CALL_OF_TORCH", "FORMAT_VERSION", "Artifact", "Seconds", "VerdictKey"]
