"""The properties of a processor that schedule rules use, read from the target alone."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

from tvmify.compiler.costs import CORE

if TYPE_CHECKING:
    from tvm.target import Target


@dataclass(frozen=True)
class Microarchitecture:
    """The properties of a processor from which tiles are derived. Nothing is read from the building
    machine: machines of one target share their programs. A target may say more: the processor
    (``mcpu``), and the number of cores (``num-cores``).

    Attributes
    ----------
    vector_bits
        Width of a vector register.
    vector_registers
        How many of them the instruction set has.
    l1_bytes, l2_bytes
        Private caches of a core: those of the processor that the target names, or else the smallest
        of the processors with its features.
    memory_operands
        Whether arithmetic instructions can take (and broadcast) an operand from memory, as on x86.
        If not, each operand needs a register.
    multiplies_pairs
        Whether an instruction adds products of two pairs of bfloat16 to sums in float32.
    multiplies_tiles
        Whether AMX multiplies tiles of bfloat16. None of our kernels uses it, but PyTorch's do.
    units
        How many multiply-adds of whole registers start per cycle, by the vendors' manuals unless
        `CORE` has a number.
    cores
        How many there are, if the target says so. A library runs with any number of threads all the
        same, since loops are only marked parallel.
    """

    vector_bits: int
    vector_registers: int
    l1_bytes: int
    l2_bytes: int
    memory_operands: bool
    multiplies_pairs: bool = False
    multiplies_tiles: bool = False
    units: int = 2
    cores: int | None = None

    @classmethod
    def of(cls, target: Target) -> Microarchitecture:
        """Read a TVM target: its ``mattr`` first, its ``mcpu`` and ``mtriple`` otherwise."""
        machine = cls._with_features(target)
        if (caches := _CACHES.get(str(target.attrs.get("mcpu", "")))) is not None:
            machine = replace(machine, l1_bytes=caches[0] << 10, l2_bytes=caches[1] << 10)
        cores = target.attrs.get("num-cores")
        return machine if cores is None else replace(machine, cores=int(cores))

    @classmethod
    def _with_features(cls, target: Target) -> Microarchitecture:
        attributes = target.attrs
        features = {str(name) for name in attributes.get("mattr", ())}
        cpu = str(attributes.get("mcpu", ""))
        if str(attributes.get("mtriple", "")).startswith(("aarch64", "arm64")):
            return cls._of_aarch64(cpu, features)
        avx512 = cpu == "x86-64-v4" or cpu in _AVX512_MODELS
        if "-avx512f" not in features and ("+avx512f" in features or avx512):
            halves = "+avx512fp16" in features or cpu in _FP16_MODELS
            pairs = "+avx512bf16" in features or cpu in _BF16_MODELS
            zen4 = cpu == "znver4" or (features >= _ZEN4 and not features & _NOT_ZEN4)
            return cls(
                vector_bits=512,
                vector_registers=32,
                l1_bytes=48 << 10 if halves else 32 << 10,
                l2_bytes=1 << 20,
                memory_operands=True,
                multiplies_pairs=pairs,
                multiplies_tiles="+amx-bf16" in features or cpu in _FP16_MODELS,
                units=CORE.zen4_units if zen4 else 2,
            )
        avx2 = cpu == "x86-64-v3" or cpu in _AVX2_MODELS or avx512
        if "+avx2" in features or avx2:
            return cls(256, 16, 32 << 10, 256 << 10, memory_operands=True)
        return cls(128, 16, 32 << 10, 256 << 10, memory_operands=True)

    @classmethod
    def _of_aarch64(cls, cpu: str, features: set[str]) -> Microarchitecture:
        """Describe a processor by Arm's manuals. Vectors are NEON's: SVE's have the same registers,
        and code for them would need a length that the target does not tell.
        """
        describe = partial(cls, 128, 32, memory_operands=False)
        if cpu.startswith("apple-m"):
            return describe(l1_bytes=128 << 10, l2_bytes=2 << 20, units=4)
        # Neoverse V1 has these features and V2 more; those of A64FX, with SVE as well, are fewer.
        v1 = features >= _V1 and "+sve2" not in features
        if v1 or "+sve" in features or cpu in _NEOVERSE_MODELS:
            wide = v1 or cpu in _FOUR_UNITS
            return describe(l1_bytes=64 << 10, l2_bytes=1 << 20, units=4 if wide else 2)
        # Cores with out-of-order execution, since Cortex-A76, on which N1 is based.
        recent = "+dotprod" in features
        return describe(l1_bytes=(64 if recent else 32) << 10, l2_bytes=512 << 10)

    @classmethod
    def current(cls) -> Microarchitecture:
        """Read the current target, for legalizers, which are not passed one."""
        from tvm.target import Target

        return cls.of(Target.current(allow_none=False))

    def lanes(self, bits: int = 32) -> int:
        """How many elements of this many bits a register holds."""
        return max(1, self.vector_bits // max(bits, 8))

    @property
    def working_set(self) -> int:
        """Bytes that stay in L2 while others stream through."""
        return int(self.l2_bytes * CORE.working_set)

    def distance(self, size: int) -> int:
        """The cost per byte of reading a tensor again, relative to the private caches."""
        return CORE.far if size > self.working_set else 1

    def keeps(self, weight_bytes: float) -> bool:
        """Whether L2 may keep this many bytes of weights from call to call."""
        return weight_bytes <= self.l2_bytes

    def nanoseconds(self, multiply_adds: float, weight_bytes: float = 0) -> float:
        """Estimate the time of one core for sums of products with weights. Weights come from beyond
        the private caches, since other layers of a network evict them.
        """
        arithmetic = multiply_adds / (CORE.clock * self.units * self.lanes())
        return arithmetic + weight_bytes / CORE.weights

    @property
    def accumulators(self) -> int:
        """Registers available for sums; the others hold weights and an activation."""
        return self.vector_registers - (4 if self.vector_registers > 16 else 3)

    def streaming(self, multiply_adds: float, byte_count: float) -> float:
        """Estimate the nanoseconds of one core for a loop nest whose tensors are in its caches."""
        return max(self.nanoseconds(multiply_adds), byte_count / CORE.stream)

    def core_counts(self, usual: tuple[int, ...]) -> tuple[int, ...]:
        """Return the numbers of cores that a kernel is to be good for."""
        return usual if self.cores is None else (self.cores,)

    def worth_threads(self, multiply_adds: float, byte_count: float) -> bool:
        """Whether there are several cores, and a loop nest is long enough for a fork and join."""
        return (
            self.cores != 1
            and self.streaming(multiply_adds, byte_count) > CORE.worth_fork * CORE.fork
        )


def bits_of(dtype: str) -> int:
    """Bits of one element of a type, by its name."""
    digits = re.search(r"\d+$", dtype)
    return int(digits.group()) if digits else 8


#: L1 and L2 of a core of x86 in KiB, by LLVM's names of the processors, from the manuals: the
#: smallest of those that have one name. Hybrid ones are missing: their cores differ.
_CACHES = {
    **dict.fromkeys(("haswell", "broadwell", "skylake"), (32, 256)),
    **dict.fromkeys(("skylake-avx512", "cascadelake", "cooperlake"), (32, 1024)),
    **dict.fromkeys(("icelake-client", "rocketlake"), (48, 512)),
    **dict.fromkeys(("icelake-server", "tigerlake"), (48, 1280)),
    **dict.fromkeys(("sapphirerapids", "emeraldrapids", "graniterapids"), (48, 2048)),
    **dict.fromkeys(("znver1", "znver2", "znver3"), (32, 512)),
    "znver4": (32, 1024),
    "znver5": (48, 1024),
}
_FP16_MODELS = frozenset("sapphirerapids emeraldrapids graniterapids".split())
_BF16_MODELS = _FP16_MODELS | frozenset("cooperlake znver4 znver5".split())
#: Features that distinguish Zen 4 from all others with AVX-512: Cooper Lake lacks the second, and
#: Zen 5 and Xeons since Sapphire Rapids have more.
_ZEN4, _NOT_ZEN4 = {"+avx512bf16", "+avx512vbmi"}, {"+avxvnni", "+avx512fp16"}
_AVX512_MODELS = _BF16_MODELS | frozenset(
    "skylake-avx512 cascadelake cannonlake icelake-client icelake-server tigerlake "
    "rocketlake".split()
)
_V1 = {"+bf16", "+i8mm", "+sve"}
_FOUR_UNITS = frozenset("neoverse-v1 neoverse-v2".split())
_NEOVERSE_MODELS = _FOUR_UNITS | frozenset("neoverse-n1 neoverse-n2".split())
_AVX2_MODELS = frozenset(
    "haswell broadwell skylake alderlake raptorlake znver1 znver2 znver3 core-avx2".split()
)
