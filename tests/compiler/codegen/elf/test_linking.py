"""Libraries behave as if linked by a compiler, and unknown object files are refused."""

from __future__ import annotations

import ctypes
import itertools
import math
import random
import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from tvmify.compiler.codegen import elf
from tvmify.compiler.codegen.elf import records
from tvmify.compiler.codegen.elf.linking import link
from tvmify.compiler.codegen.elf.objects import with_data

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="no g++ makes object files")

FIRST = """
#include <math.h>
#include <string.h>
extern int there(int), renamed(int);
extern const int table[4];
extern const char blob[];
static int zeros[1000], own = 5;
static int* pointer = &own;
static const char* const names[] = {"a", "bc"};
double (*const constant)(double) = sin;
int __attribute__((weak)) twice(int x) { return -1; }
int __attribute__((weak)) weak_only(int x) { return x + 7; }
extern int maybe(int) __attribute__((weak));
static int __attribute__((noinline)) hidden_from_all(int x) { return x * 3 + *pointer; }
int calls(int x) { return there(x) + renamed(x) + twice(x) + hidden_from_all(x) + table[x & 3]; }
int writes(int x) { zeros[999] += x; own += x; return zeros[999] + *pointer; }
double computes(double x) { return expf((float)x) + constant(x) + strlen(names[1]); }
int may_be_missing(int x) { return maybe ? maybe(x) : 42; }
int reads(int i) { return blob[i]; }
"""
SECOND = """
const int table[4] = {10, 20, 30, 40};
extern int twice(int);
static int own = 1000;
int there(int x) { return own + x; }
int twice(int x) { return 2 * x; }
int other_name(int x) { return twice(twice(x)); }
"""

#: A section of this name with the address of a constructor, and anything after it.
CONSTRUCTORS = 'asm(".section %s,\\"aw\\",@init_array\\n.quad f\\n%s\\n.text"); void f(void) {}'

_numbers = itertools.count()


def compiled(folder: Path, source: str, *options: str, language: str = "c") -> bytes:
    path = folder / f"x{next(_numbers)}.o"
    command = ["g++", "-x", language, "-c", "-O1", "-fPIC", "-w", *options, "-", "-o", str(path)]
    subprocess.run(command, input=source.encode(), check=True)
    return path.read_bytes()


def no_alias(symbol: str) -> str:
    return ""


def alias(symbol: str) -> str:
    return "other_name" if symbol == "renamed" else ""


@pytest.fixture(scope="module")
def objects(tmp_path_factory: pytest.TempPathFactory) -> list[bytes]:
    folder = tmp_path_factory.mktemp("objects")
    made = [compiled(folder, FIRST), compiled(folder, SECOND)]
    return [*made, with_data("blob", bytes(range(100)), made[0])]


def saved(folder: Path, content: bytes) -> Path:
    path = folder / f"library{next(_numbers)}.so"
    path.write_bytes(content)
    return path


def loaded(folder: Path, content: bytes) -> ctypes.CDLL:
    library = ctypes.CDLL(str(saved(folder, content)))
    library.computes.restype, library.computes.argtypes = ctypes.c_double, [ctypes.c_double]
    return library


def read(program: str, *arguments: object) -> str:
    if shutil.which(program) is None:
        pytest.skip(f"there is no {program}")
    command = [program, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def test_calls_and_data_resolve(objects: list[bytes], tmp_path: Path) -> None:
    library = loaded(tmp_path, link(objects, alias))
    # 1000 + x, 4 x from the alias, 2 x from the strong symbol, 3 x + 5, and a number of the table.
    assert [library.calls(x) for x in range(4)] == [1005 + 10 * x + 10 * (x + 1) for x in range(4)]
    assert library.weak_only(1) == 8 and library.may_be_missing(0) == 42
    assert [library.writes(1), library.writes(2)] == [1 + 6, 3 + 8]
    assert [library.reads(i) for i in (0, 99)] == [0, 99]
    assert library.computes(1.5) == pytest.approx(math.exp(1.5) + math.sin(1.5) + 2, rel=1e-6)


def test_the_order_of_files_plays_no_part(objects: list[bytes], tmp_path: Path) -> None:
    for several in itertools.permutations(objects):
        assert loaded(tmp_path, link(several, alias)).calls(3) == 1005 + 30 + 40


def test_symbols_without_versions(objects: list[bytes], tmp_path: Path) -> None:
    library = loaded(tmp_path, link(objects, alias, {}))
    assert library.computes(1.5) == pytest.approx(math.exp(1.5) + math.sin(1.5) + 2, rel=1e-6)


def test_the_same_files_make_the_same_library(objects: list[bytes]) -> None:
    assert link(objects, alias) == link(objects, alias)


def test_symbol_versions_match_the_compilers(objects: list[bytes], tmp_path: Path) -> None:
    reference = tmp_path / "reference.so"
    files = [saved(tmp_path, content) for content in objects]
    shared = ["-shared", "-Wl,--defsym,renamed=other_name"]
    subprocess.run(["g++", *shared, *files, "-o", reference, "-lm"], check=True)

    def versions(path: Path) -> set[str]:
        return set(re.findall(r"UND (\w+@\w+[\d.]+)", read("readelf", "-sW", "--dyn-syms", path)))

    expected = {v for v in versions(reference) if not v.startswith("_")}
    expected -= {v for v in expected if v.startswith("__cxa_finalize")}
    assert expected == versions(saved(tmp_path, link(objects, alias))) != set()


def test_a_debugger_sees_all_functions_and_a_profiler_the_library(
    objects: list[bytes], tmp_path: Path
) -> None:
    path = saved(tmp_path, link(objects, alias))
    functions = re.findall(r"^[0-9a-f]+ [tTW] (\w+)$", read("nm", path), re.MULTILINE)
    assert {"hidden_from_all", "calls", "twice", "other_name"} <= set(functions)
    assert "hidden_from_all" not in read("nm", "-D", path)
    assert re.search(r"Build ID: [0-9a-f]{40}", read("readelf", "-n", path))
    listed = read("gdb", "-batch", "-nx", "-ex", "info address hidden_from_all", path)
    assert '"hidden_from_all" is at 0x' in listed


def test_no_memory_is_written_and_run_and_addresses_are_fixed_once_loaded(
    objects: list[bytes], tmp_path: Path
) -> None:
    path = saved(tmp_path, link(objects, alias))
    segments = read("readelf", "-lW", path)
    flags = re.findall(r"^  LOAD .* 0x[0-9a-f]+ ([R ][W ][E ]) 0x", segments, re.MULTILINE)
    assert sorted(flags) == ["R  ", "R E", "RW ", "RW "]
    assert re.search(r"GNU_STACK .* RW  0x", segments) and "GNU_RELRO" in segments
    loader = read("readelf", "-dW", path)
    assert "BIND_NOW" in loader and "TEXTREL" not in loader
    maps = _maps(loaded_path := saved(tmp_path, link(objects, alias)), tmp_path)
    assert maps and not any("w" in line and "x" in line for line in maps), loaded_path


def _maps(path: Path, folder: Path) -> list[str]:
    ctypes.CDLL(str(path))
    lines = Path("/proc/self/maps").read_text().splitlines()
    return [line.split()[1] for line in lines if line.endswith(str(path))]


def test_exceptions_unwind_through_linked_code(tmp_path: Path) -> None:
    source = """
        #include <execinfo.h>
        static int __attribute__((noinline)) inner(void** found) { return backtrace(found, 64); }
        int outer(void** found) { volatile char room[5000] = {1}; return inner(found) + room[9]; }
    """
    made = [compiled(tmp_path, source, "-fomit-frame-pointer"), compiled(tmp_path, SECOND)]
    library = ctypes.CDLL(str(saved(tmp_path, link(made, no_alias))))
    found = (ctypes.c_void_p * 64)()
    count = library.outer(found)
    # Python's frames are above both functions; a profiler reaches them only by the unwind table.
    assert count > 3
    start = ctypes.cast(library.outer, ctypes.c_void_p).value or 0
    assert any(0 < (found[i] or 0) - start < 200 for i in range(count))


@pytest.mark.parametrize("order", [1, -1])
def test_constructors_run_in_the_order_of_their_priorities(order: int, tmp_path: Path) -> None:
    first = """
        int calls[4], count;
        void __attribute__((constructor)) without(void) { calls[count++] = 1; }
        void __attribute__((constructor(2000))) late(void) { calls[count++] = 2000; }
    """
    second = """
        extern int calls[4], count;
        static void __attribute__((constructor(300))) early(void) { calls[count++] = 300; }
        static void __attribute__((constructor(10000))) later(void) { calls[count++] = 10000; }
    """
    made = [compiled(tmp_path, source) for source in (first, second)]
    path = saved(tmp_path, link(made[::order], no_alias))
    library = ctypes.CDLL(str(path))
    assert list((ctypes.c_int * 4).in_dll(library, "calls")) == [300, 2000, 10000, 1]
    assert re.search(r"INIT_ARRAYSZ.* 32 ", read("readelf", "-dW", path))


REFUSED: dict[str, tuple[str, str]] = {
    "data of threads": ("__thread int x; int f(void) { return x; }", "flags"),
    "code that runs when it is unloaded": (
        "int x; __attribute__((destructor)) void f(void) { x = 1; }",
        "fini_array",
    ),
    "constructors of old compilers": (
        'static void f(void) {}void (*const first)(void) __attribute__((section(".ctors"))) = f;',
        r"\.ctors",
    ),
    "constructors in an unknown order": (
        CONSTRUCTORS % (".init_array.first", ""),
        r"\.init_array\.first",
    ),
    "a gap between constructors": (CONSTRUCTORS % (".init_array", ".zero 4"), "12 bytes"),
    "a choice at load": (
        "static int g(void) { return 1; } static void* r(void) { return g; }"
        'int f(void) __attribute__((ifunc("r"))); int h(void) { return f(); }',
        "unsupported kind",
    ),
    "a hidden symbol that is nowhere": (
        'extern int x __attribute__((visibility("hidden"))); int f(void) { return x; }',
        "nothing defines 'x'",
    ),
    "what another file defines": ("int there(int x) { return x; }", "two object files define"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_unsupported_object_content_is_refused(
    case: str, objects: list[bytes], tmp_path: Path
) -> None:
    source, reason = REFUSED[case]
    with pytest.raises(elf.CannotLink, match=reason):
        link([*objects, compiled(tmp_path, source)], alias)


@pytest.mark.parametrize(
    ("source", "options", "language"),
    [
        ("int x; int f(void) { return x; }", ["-fcommon"], "c"),
        ("int x; int* f(void) { return &x; }", ["-fno-pic", "-mcmodel=small"], "c"),
        ("inline int f() { static int x; return ++x; } int g() { return f(); }", [], "c++"),
        ("void g(); int f() { try { g(); } catch (...) { return 1; } return 0; }", [], "c++"),
    ],
    ids=["a common symbol", "an address in code", "a group of sections", "handlers of exceptions"],
)
def test_objects_of_other_compilers_are_refused(
    source: str, options: list[str], language: str, tmp_path: Path
) -> None:
    with pytest.raises(elf.CannotLink):
        link([compiled(tmp_path, source, *options, language=language)], no_alias)


def test_files_for_several_processors_are_refused(objects: list[bytes]) -> None:
    other = bytearray(objects[1])
    other[18:20] = records.AARCH64.to_bytes(2, "little")
    with pytest.raises(elf.CannotLink, match="different processors"):
        link([objects[0], bytes(other)], alias)
    other[18:20] = (243).to_bytes(2, "little")
    with pytest.raises(elf.CannotLink, match="ELF machine 243"):
        link([bytes(other)], alias)
    with pytest.raises(elf.CannotLink):
        link([], alias)


@pytest.mark.parametrize("content", [b"", b"junk", b"\x7fELF", b"!<arch>\n" + bytes(200)])
def test_junk_is_refused(content: bytes, objects: list[bytes]) -> None:
    with pytest.raises(elf.CannotLink, match="not an object file"):
        link([*objects, content], alias)


def test_shared_library_is_refused(objects: list[bytes]) -> None:
    with pytest.raises(elf.CannotLink, match="not an object file"):
        link([link(objects, alias)], alias)


def damages(content: bytes) -> list[Callable[[random.Random], bytes]]:
    def cut(source: random.Random) -> bytes:
        return content[: source.randrange(len(content))]

    def change(source: random.Random) -> bytes:
        changed = bytearray(content)
        for _ in range(source.randint(1, 4)):
            changed[source.randrange(len(content))] = source.randrange(256)
        return bytes(changed)

    def change_headers(source: random.Random) -> bytes:
        changed = bytearray(content)
        start = int.from_bytes(content[40:48], "little")
        changed[source.randrange(start, len(content))] = source.randrange(256)
        return bytes(changed)

    return [cut, change, change_headers]


def test_damaged_object_is_refused_or_links(objects: list[bytes]) -> None:
    source, refused = random.Random(0), 0
    for damage in damages(objects[0]) * 300:
        try:
            made = link([damage(source), *objects[1:]], alias)
        except elf.CannotLink:
            refused += 1
        else:
            assert len(made) < 1 << 20
    assert refused > 300
