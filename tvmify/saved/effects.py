"""Refuses to put programs into files that do more in this process than a file can say."""

from __future__ import annotations

from tvmify.artifact import Artifact
from tvmify.errors import SaveError


def refuse_effects(name: str, artifact: Artifact, done: str) -> None:
    """Refuse a program whose calls have an effect that files do not support.

    Parameters
    ----------
    name
        Of its subject.
    done
        What would be done with it, such as ``"saved"``.

    Raises
    ------
    SaveError
        It has such an effect.
    """
    effect = artifact.unsaved_effect()
    if effect is not None:
        raise SaveError(
            f"{name} cannot be {done}: {effect}, which compiled code does in this process only. "
            "Pass that tensor as an argument, and return its new value"
        )
