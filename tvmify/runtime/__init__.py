"""Everything that runs compiled code: the native library, executors, and the guard of a module."""

# First: it loads the library that the others are linked to.
from tvmify.runtime.native import Call, Guard, cpu_features, flatten  # isort: skip
from tvmify.runtime.executor import Executor, PackedWeights
from tvmify.runtime.gradients import attach
from tvmify.runtime.measuring import measure
from tvmify.runtime.surroundings import is_being_transformed, unusual_signature
from tvmify.runtime.watch import DISPATCHER, Watched, watch

__all__ = [
    "DISPATCHER",
    "Call",
    "Executor",
    "Guard",
    "PackedWeights",
    "Watched",
    "attach",
    "cpu_features",
    "flatten",
    "is_being_transformed",
    "measure",
    "unusual_signature",
    "watch",
]
