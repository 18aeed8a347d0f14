"""Everything that runs compiled code: the native library, executors, and the guard of a module."""

# First, since it loads the library that the others link to.
from tvmify.runtime.native import (  # isort: skip
    Call,
    Guard,
    LatestCall,
    Shortcut,
    cmake_prefix_path,
    cpu_features,
    flatten,
    take_failure,
    with_method_renamed,
)
from tvmify.runtime import embedded  # defines operators
from tvmify.runtime.archive import ORIGINAL, inspect, load, original
from tvmify.runtime.archive import write as write_archive
from tvmify.runtime.executor import Executor, PackedWeights, compiled_module
from tvmify.runtime.gradients import attach, followed_leaves
from tvmify.runtime.graphs import GraphedCall, Graphs, is_capturing
from tvmify.runtime.graphs import obstacle as graph_obstacle
from tvmify.runtime.measuring import measure
from tvmify.runtime.measuring_gpu import measure_on, timing_algorithms
from tvmify.runtime.shape_guard import ShapeGuard
from tvmify.runtime.surroundings import (
    autocast_text,
    casting,
    casts_now,
    check_modes,
    gradients_text,
    is_being_transformed,
    is_traced_here,
    unusual_signature,
)
from tvmify.runtime.watch import DISPATCHER, watch
from tvmify.runtime.watched import Watched

__all__ = [
    "DISPATCHER",
    "ORIGINAL",
    "Call",
    "Executor",
    "GraphedCall",
    "Graphs",
    "Guard",
    "LatestCall",
    "PackedWeights",
    "ShapeGuard",
    "Shortcut",
    "Watched",
    "attach",
    "autocast_text",
    "casting",
    "casts_now",
    "check_modes",
    "cmake_prefix_path",
    "compiled_module",
    "cpu_features",
    "embedded",
    "flatten",
    "followed_leaves",
    "gradients_text",
    "graph_obstacle",
    "inspect",
    "is_being_transformed",
    "is_capturing",
    "is_traced_here",
    "load",
    "measure",
    "measure_on",
    "original",
    "take_failure",
    "timing_algorithms",
    "unusual_signature",
    "watch",
    "with_method_renamed",
    "write_archive",
]
