"""Damaged and forged copies of a saved file, made from seeds, and a process that loads them.

``python -m tests.runtime.mutants FILE KIND FIRST LAST`` loads the mutants of these seeds. It prints
each seed before it loads the mutant, and then the outcome, so that `hunt`, which starts it, knows
which mutant ended the process.
"""

from __future__ import annotations

import hashlib
import io
import itertools
import json
import pickle
import pickletools
import random
import resource
import signal
import subprocess
import sys
import tempfile
import warnings
import zipfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path

MANIFEST = "archive/extra/tvmify/manifest.json"

Records = dict[str, bytes]

# ------------------------------------------------------------------------ damage, of a whole file


def _flip(data: bytes, chance: random.Random) -> bytes:
    changed = bytearray(data)
    for _ in range(chance.choice((1, 1, 1, 3, 30))):
        changed[chance.randrange(len(changed))] ^= 1 << chance.randrange(8)
    return bytes(changed)


def _overwrite(data: bytes, chance: random.Random) -> bytes:
    start = chance.randrange(len(data))
    filling = chance.choice((b"\0", b"\xff", chance.randbytes(1)))
    return (data[:start] + filling * chance.choice((1, 2, 4, 8, 512)) + data[start:])[: len(data)]


def _insert(data: bytes, chance: random.Random) -> bytes:
    start = chance.randrange(len(data) + 1)
    return data[:start] + chance.randbytes(chance.choice((1, 4, 100))) + data[start:]


def _delete(data: bytes, chance: random.Random) -> bytes:
    start = chance.randrange(len(data))
    return data[:start] + data[start + chance.choice((1, 4, 100, 5000)) :]


def _truncate(data: bytes, chance: random.Random) -> bytes:
    return data[: chance.randrange(len(data))]


def _swap(data: bytes, chance: random.Random) -> bytes:
    size = chance.choice((1, 16, 1024))
    one, other = sorted(chance.randrange(len(data) - size) for _ in range(2))
    if other - one < size:
        return data[one:] + data[:one]
    parts = data[:one], data[one : one + size], data[one + size : other]
    return parts[0] + data[other : other + size] + parts[2] + parts[1] + data[other + size :]


def _directory(data: bytes, chance: random.Random) -> bytes:
    """Flip a bit of the central directory: it is small, and other flips rarely hit it."""
    start = data.rindex(b"PK\5\6") - 2500
    return data[:start] + _flip(data[start:], chance)


_DAMAGE = (_flip, _overwrite, _insert, _delete, _truncate, _swap, _directory, _directory)

# --------------------------------------------------------------------------- changes of the records


def records(data: bytes) -> Records:
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def archive(contents: Records, forged: bool = True) -> bytes:
    """Write an archive; a forger updates the digests."""
    if forged and MANIFEST in contents:
        digests = {
            name: {"sha256": hashlib.sha256(record).hexdigest(), "size": len(record)}
            for name, record in contents.items()
            if name != MANIFEST
        }
        manifest = json.loads(contents[MANIFEST]) | {"records": digests}
        contents = contents | {MANIFEST: json.dumps(manifest).encode()}
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        for name, record in contents.items():
            archive.writestr(name, record)
    return file.getvalue()


def _change_records(data: bytes, chance: random.Random) -> bytes:
    contents = records(data)
    one, other = chance.sample(list(contents), 2)
    match chance.randrange(4):
        case 0:
            contents[one], contents[other] = contents[other], contents[one]
        case 1:
            del contents[one]
        case 2:
            contents[f"{chance.choice(('archive/', '/', '../', ''))}{one}x"] = contents[one]
        case 3:
            contents[one] = chance.choice(_DAMAGE[:5])(contents[one] or b"x", chance)
    return archive(contents, forged=False)


def damaged(data: bytes, seed: int) -> bytes:
    """Return a randomly damaged file; `tvmify.load` notices any damage."""
    chance = random.Random(seed)
    return chance.choice((*_DAMAGE, _change_records))(data, chance)


def _integer(value: int) -> bytes:
    data = value.to_bytes(16, "little", signed=True)
    return (
        pickle.LONG1 + bytes([len(data)]) + data if abs(value) >> 31 else (pickle.BININT + data[:4])
    )


def _text(value: str) -> bytes:
    data = value.encode(errors="surrogatepass")
    return pickle.BINUNICODE + len(data).to_bytes(4, "little") + data


def forge_pickle(data: bytes, chance: random.Random) -> bytes:
    """Return a pickle of the same form with some values replaced."""
    operations = list(pickletools.genops(data))
    starts = [position for *_, position in operations] + [len(data)]
    parts = [data[start:end] for start, end in itertools.pairwise(starts)]
    texts = [value for _, value, _ in operations if isinstance(value, str)]
    for _ in range(chance.choice((1, 1, 2, 5))):
        at = chance.randrange(len(parts))
        operation, value, _ = operations[at]
        if operation.name in ("BININT", "BININT1", "BININT2", "LONG1") and chance.random() < 0.9:
            limit = chance.choice((0, 1, 8, 31, 32, 63))
            parts[at] = _integer(chance.choice((-1, 1)) * (1 << limit) - chance.randrange(2))
        elif operation.name == "BINUNICODE" and isinstance(value, str) and chance.random() < 0.9:
            other = chance.choice(texts)
            parts[at] = _text(chance.choice((other, "", value + "x", value[:-1], value * 1000)))
        else:
            other = chance.randrange(len(parts))
            parts[at] = chance.choice((b"", parts[at] * 2, parts[other], pickle.NONE))
    return b"".join(parts)


def forged(data: bytes, seed: int) -> bytes:
    """Return a file with a changed pickle and right digests."""
    chance = random.Random(seed)
    contents = records(data)
    name = "archive/data.pkl"
    contents[name] = chance.choice((forge_pickle, forge_pickle, forge_pickle, _flip, _swap))(
        contents[name], chance
    )
    return archive(contents)


# ----------------------------------------------------------------------------------------- the hunt

KINDS: dict[str, Callable[[bytes, int], bytes]] = {
    "damaged": damaged,
    "forged": forged,
    "damaged-torch": damaged,
}


def hunt(file: Path, kind: str, seeds: range) -> Counter[str]:
    """Load mutants in other processes, and count the outcomes.

    A process that a signal ends counts as ``"signal"`` with its number and the seed.
    """
    found: Counter[str] = Counter()
    first = seeds.start
    while first < seeds.stop:
        command = [sys.executable, "-m", "tests.runtime.mutants", file, kind, first, seeds.stop]
        child = subprocess.run(
            list(map(str, command)), capture_output=True, text=True, check=False, timeout=3600
        )
        *lines, last = child.stdout.splitlines() or [f"{first} "]
        for line in [*lines, last]:
            if line.partition(" ")[2]:
                found[line.partition(" ")[2]] += 1
        at = int(last.partition(" ")[0])
        if child.returncode < 0:
            found[f"{signal.Signals(-child.returncode).name} at seed {at}"] += 1
        elif "Sanitizer: out-of-memory" in child.stderr:
            found["RuntimeError"] += 1  # a sanitizer's `new` ends the process instead of raising
        elif child.returncode > 0:
            found[f"seed {at}: {child.stderr[-2000:]}"] += 1
        first = at + 1
    return found


def _outcomes(file: Path, kind: str, seeds: range) -> None:
    import torch

    import tvmify
    import tvmify.runtime

    data = file.read_bytes()
    load = torch.jit.load if kind.endswith("torch") else tvmify.load
    x = torch.ones(1, 3, 8, 8)
    expected = tvmify.load(file)(x)
    # PyTorch trusts the string lengths in a pickle.
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + (1 << 30),) * 2)
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory, "mutant.pt")
        for seed in seeds:
            print(seed, end=" ", flush=True)
            path.write_bytes(KINDS[kind](data, seed))
            try:
                y = load(path)(x)
                print("right" if torch.allclose(y, expected) else f"wrong at seed {seed}")
            except Exception as error:
                print(type(error).__name__ if str(error) else f"silent at seed {seed}")
            if [*Path(directory).iterdir()] != [path]:
                print(seed, "left a file behind")


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    _outcomes(Path(sys.argv[1]), sys.argv[2], range(int(sys.argv[3]), int(sys.argv[4])))
