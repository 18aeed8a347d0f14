"""Arithmetic on vectors of floats, as wide as the arguments of the function."""

from __future__ import annotations

import math
import struct
from typing import Any

from tvm import tirx
from tvm.ir import Expr
from tvm.target import Target

from tvmify.compiler.microarchitecture import Microarchitecture

#: Terms of a polynomial that are evaluated one after the other.
_CHAIN = 6


class Lanes:
    """The arguments of one call, and the arithmetic on them.

    Attributes
    ----------
    digits
        Binary digits of a float: 24 or 53. Tables of coefficients have an entry for each.
    bias
        The largest exponent of a float, which is added to exponents where they are stored.
    x
        The first argument.
    arguments
        All of them.
    """

    def __init__(self, *arguments: Expr) -> None:
        self.float = str(arguments[0].ty.dtype)
        self.digits = 53 if self.float.startswith("float64") else 24
        self.bias = 1023 if self.digits == 53 else 127
        self._fraction = self.digits - 1
        self.int = self.float.replace("float", "int")
        self.uint = self.float.replace("float", "uint")
        self.double = self.float.replace("32", "64", 1)
        self.bool = self.float.replace("float32", "bool", 1).replace("float64", "bool", 1)
        self._bindings: list[tuple[tirx.Var, Expr]] = []
        self.arguments = [self.let(argument) for argument in arguments]
        self.x = self.arguments[0]

    def let(self, value: Expr) -> Expr:
        """Bind a value that is used more than once, so that it is computed once."""
        variable = tirx.Var(f"t{len(self._bindings)}", str(value.ty.dtype))
        self._bindings.append((variable, value))
        return variable

    def bound(self, result: Expr) -> Expr:
        """Wrap the result in the bound values."""
        for variable, value in reversed(self._bindings):
            result = tirx.Let(variable, value, result)
        return result

    def __call__(self, value: float) -> Expr:
        """Return a number as a float of each lane."""
        return tirx.const(value, self.float)

    @property
    def bits(self) -> int:
        """How many bits a float has."""
        return 64 if self.digits == 53 else 32

    def bits_of(self, value: float) -> int:
        """Return the bits of a number that is not negative."""
        kind, whole = ("<d", "<q") if self.digits == 53 else ("<f", "<i")
        return int(struct.unpack(whole, struct.pack(kind, value))[0])

    @property
    def nan(self) -> Expr:
        """NaN in each lane."""
        return self.as_float(self.integer(self.bits_of(math.nan)))

    @property
    def infinity(self) -> Expr:
        """Infinity in each lane."""
        return self.as_float(self.integer(self.bits_of(math.inf)))

    def integer(self, value: int) -> Expr:
        """Return a number as an integer of each lane."""
        return tirx.const(value, self.int)

    def as_float(self, bits: Expr) -> Expr:
        """Read the bits of an integer as a float."""
        return tirx.reinterpret(self.float, bits)

    def as_integer(self, value: Expr) -> Expr:
        """Read the bits of a float as an integer."""
        return tirx.reinterpret(self.int, value)

    def llvm(self, name: str, *arguments: Expr) -> Expr:
        """Call one of LLVM's functions on floats."""
        return tirx.call_llvm_pure_intrin(self.float, f"llvm.{name}", *arguments)

    def fma(self, a: Expr, b: Expr, c: Expr) -> Expr:
        """Return ``a * b + c``, rounded once also where the processor has no such instruction."""
        return self.llvm("fma", a, b, c)

    def polynomial(self, x: Expr, *coefficients: float) -> Expr:
        """Evaluate a polynomial, the highest power first.

        Uses Horner's scheme, and Estrin's for the first steps of a long polynomial: a processor has
        room for some 150 waiting instructions, and cannot overlap long chains of several vectors.
        """
        terms = [tirx.const(coefficient, str(x.ty.dtype)) for coefficient in coefficients[::-1]]
        while len(terms) > _CHAIN:
            pairs = [high * x + low for low, high in zip(terms[::2], terms[1::2], strict=False)]
            terms = pairs + terms[2 * len(pairs) :]
            x = self.let(x * x)
        result = terms.pop()
        while terms:
            result = result * x + terms.pop()
        return result

    def clamp(self, x: Expr, low: float, high: float) -> Expr:
        """Clamp x to bounds; NaN stays NaN."""
        above = self.let(tirx.Select(x > self(high), self(high), x))
        return self.let(tirx.Select(above < self(low), self(low), above))

    def magnitude(self, x: Expr | None = None) -> Expr:
        """Return the magnitude of x."""
        all_but_sign = self.integer((1 << (self.bits - 1)) - 1)
        return self.as_float(self.as_integer(self.x if x is None else x) & all_but_sign)

    def sign(self, x: Expr) -> Expr:
        """Return the bit of the sign, as an integer."""
        return self.as_integer(x) & self.integer(-1 << (self.bits - 1))

    def with_sign(self, result: Expr, x: Expr | None = None) -> Expr:
        """Give a result that is not negative the sign of x."""
        return self.as_float(self.as_integer(result) | self.sign(self.x if x is None else x))

    def keep_nan(self, result: Expr) -> Expr:
        """Return the result, or x where that is NaN."""
        return tirx.Select(self.x == self.x, result, self.x)

    def whole(self, x: Expr) -> tuple[Expr, Expr]:
        """Return the nearest whole number, up to 2**22 either way, as a float and as an integer."""
        # Beyond 2**23 (2**52 in float64) the unit in the last place is 1; half of that again leaves
        # room for a sign.
        beyond = 1.5 * 2.0**self._fraction
        shifted = self.let(x + self(beyond))
        # By its bits, since TVM takes a number plus another, minus that, for the first.
        number = self.let(self.as_float(self.as_integer(shifted)) - self(beyond))
        return number, self.let(self.as_integer(shifted) - self.integer(self.bits_of(beyond)))

    def power_of_two(self, exponent: Expr) -> Expr:
        """Return 2**exponent for exponents of normal numbers."""
        return self.as_float((exponent + self.integer(self.bias)) << self.integer(self._fraction))

    def scaled(self, mantissa: Expr, exponent: Expr) -> Expr:
        """Return ``mantissa * 2**exponent``, infinite or denormal where it has to be."""
        # In two factors: a single one could not have the exponents of infinity and denormals.
        target = Target.current(allow_none=True)
        if target is not None and Microarchitecture.of(target).vector_bits == 512:
            exponent = self.cast(exponent, self.int.replace("64", "32", 1))
            return self.llvm("ldexp", mantissa, exponent)  # one instruction
        half = self.let(exponent >> self.integer(1))
        return mantissa * self.power_of_two(half) * self.power_of_two(exponent - half)

    def unless(self, rare: Expr, exact: Expr, result: Expr) -> Expr:
        """Return the result; where a lane is `rare`, `exact` for all, which may be slow."""
        if self.bool != "bool":
            rare = tirx.call_llvm_pure_intrin("bool", "llvm.vector.reduce.or", rare)
        return tirx.if_then_else(rare, exact, result)

    def library(self, function: str) -> Expr:
        """Call the C library lane by lane, by LLVM's name of the function without ``llvm.``."""
        return self.llvm(function, *self.arguments)

    def cast(self, x: Expr, kind: str) -> Any:
        """Convert to another type of as many lanes."""
        return tirx.Cast(kind, x)
