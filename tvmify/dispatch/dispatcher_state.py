"""What a dispatcher and the stages of its misses have in common."""

from __future__ import annotations

from dataclasses import dataclass

from tvmify.dispatch.counts import Counts
from tvmify.dispatch.memory import Memory
from tvmify.dispatch.module_state import ModuleState
from tvmify.dispatch.parts import MakePart
from tvmify.dispatch.programs import Programs
from tvmify.dispatch.subject import Subject
from tvmify.runtime import Graphs


@dataclass(frozen=True)
class DispatcherState:
    """The state of a dispatcher.

    Attributes
    ----------
    subject
        The module or function.
    module
        The module as the last call saw it.
    memory
        The outcomes by signature.
    programs
        The programs from which outcomes are made.
    counts
        What has happened so far.
    graphs
        The CUDA graphs of its calls.
    make_part
        Makes the dispatcher of a region or a submodule.
    """

    subject: Subject
    module: ModuleState
    memory: Memory
    programs: Programs
    counts: Counts
    graphs: Graphs
    make_part: MakePart

    @classmethod
    def of(
        cls, subject: Subject, make_part: MakePart, programs: Programs | None = None
    ) -> DispatcherState:
        """Return the state of a new dispatcher, which may share ``programs`` with others."""
        size = subject.options.cache_size
        if programs is None:
            programs = Programs(size)
        module, memory = ModuleState(subject), Memory(size)
        return cls(subject, module, memory, programs, Counts(), Graphs(), make_part)
