"""NVIDIA GPUs: properties of the hardware, and how threads share the work of our kernels."""

from __future__ import annotations

from dataclasses import dataclass

from tvmify.compiler.costs.source import estimate, manual, number

_CUDA = "CUDA C++ Programming Guide, compute capability 8.0 and 9.0"


@dataclass(frozen=True)
class Gpu:
    """An H100 or H200, for which the kernels of `tvmify.compiler.cuda` are written."""

    #: A kernel with fewer blocks leaves some multiprocessors idle.
    multiprocessors: int = number(
        132, "count", manual("07c94e0", "NVIDIA's data sheet of the H200")
    )
    #: Threads that one multiprocessor runs at once.
    resident_threads: int = number(2048, "threads", manual("f585153", _CUDA))
    #: Threads that run in step.
    warp: int = number(32, "threads", manual("07c94e0", _CUDA))
    #: The widest load or store of a thread.
    vector: int = number(16, "bytes", manual("07c94e0", _CUDA))
    #: The most threads of a block.
    most_threads: int = number(1024, "threads", manual("07c94e0", _CUDA))
    #: Threads of a block of an element-wise kernel: fewer where blocks would not fill the GPU.
    elementwise_threads: int = number(
        256, "threads", estimate("9beab69", "8 blocks fill a multiprocessor")
    )
    fewest_elementwise_threads: int = number(
        64, "threads", estimate("9beab69", "32 blocks, the most of a multiprocessor, fill it")
    )
    #: Threads of a block of windows where those of single elements need a bound.
    window_threads: int = number(
        256, "threads", estimate("3d81937", "8 blocks fill a multiprocessor")
    )
    #: The largest window that one thread reduces.
    window: int = number(
        64,
        "elements",
        estimate("3d81937", "some loads of a thread; larger ones need several threads"),
    )
    #: Elements of a weight below which a product of one row only takes the time of a launch.
    launch_bound: int = number(
        1 << 14,
        "elements",
        estimate("716d4dc", "32 KB of float16: memory takes a hundredth of 1 us"),
    )
    #: Threads of a block of a product of one row.
    row_threads: int = number(
        128, "threads", estimate("f585153", "16 blocks fill a multiprocessor")
    )
    #: The most threads that add up one row of a weight.
    most_row_threads: int = number(256, "threads", estimate("f585153", "two of such blocks"))
    #: Loads that a thread has in flight: with fewer, bandwidth is unused.
    row_loads: int = number(
        4, "loads", estimate("f585153", "more registers would leave room for fewer threads")
    )
    #: If there are more rows than run at once, fewer threads of a row still read whole cache lines.
    fewest_row_threads: int = number(
        8, "threads", estimate("f585153", "8 threads by 16 bytes read one cache line, 128 bytes")
    )
    #: Then each thread has more loads in flight.
    most_row_loads: int = number(
        16,
        "loads",
        estimate(
            "f585153", "with 16 bytes each, a quarter of the registers that a thread may have"
        ),
    )


GPU = Gpu()
