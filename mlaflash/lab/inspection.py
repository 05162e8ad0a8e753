"""What a compiled kernel is made of: shared-memory map, machine instructions, and those of its loops over KV tiles."""

from __future__ import annotations

import ctypes
import importlib.metadata
import itertools
import re
import shutil
import subprocess
import tempfile
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from mlaflash.emulator.build import SUFFIX, compile_library, source_path
from mlaflash.errors import MissingDependencyError, MlaFlashError
from mlaflash.lab.variants import Compilation

NVDISASM: Final = "nvdisasm"
WHEELS: Final = ("nvidia-cuda-nvdisasm", "nvidia-cuda-nvcc", "triton")
"""Packages that bring `NVDISASM`, where it is not on the PATH."""

_MEMBER = re.compile(r"static constexpr u32 (\w+) = ([^;]+);\s*(?://\s*(.*))?")
_LABEL = re.compile(r"\s*(\.L_\w+):")
_INSTRUCTION = re.compile(r"\s+/\*([0-9a-f]{4,})\*/\s+(?:\{\s*)?(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_.a-z]*)(.*)")
_TARGET = re.compile(r"`\((\.L_\w+)\)")
_GROUPS: Final = {
    "tensor cores": ("HMMA", "IMMA", "QMMA", "OMMA"),
    "ldmatrix": ("LDSM",),
    "shared loads": ("LDS",),
    "shared stores": ("STS", "STSM", "ATOMS"),
    "cp.async": ("LDGSTS", "LDGDEPBAR", "DEPBAR", "ARRIVES"),
    "bulk copies": ("UBLKCP", "UBLKPF", "UTMALDG"),
    "global": ("LDG", "LD", "STG", "ST", "RED", "ATOM", "ATOMG", "CCTL"),
    "local (spills)": ("LDL", "STL"),
    "barriers": ("BAR", "SYNCS", "WARPSYNC", "MEMBAR", "FENCE", "ERRBAR", "NANOSLEEP"),
    "warp": ("SHFL", "VOTE", "VOTEU", "REDUX", "MATCH", "CREDUX"),
    "special functions": ("MUFU",),
    "control": ("BRA", "BRX", "BSSY", "BSYNC", "EXIT", "CALL", "RET", "YIELD", "NOP", "BREAK", "BMOV", "ACQBULK"),
}
_GROUP_OF: Final = {opcode: group for group, opcodes in _GROUPS.items() for opcode in opcodes}
_FLOAT = re.compile(r"F(ADD|MUL|FMA|MNMX|SEL|SETP|CHK|SWZADD|MNMX3|SET)\d?|F2F|F2FP|HADD2|HMUL2|HFMA2|HMNMX2|PRMT")


@dataclass(frozen=True, slots=True)
class Region:
    """A part of a block's dynamic shared memory.

    Attributes
    ----------
    name : str
        As in the kernel's ``struct Smem``.
    offset, num_bytes : int
    holds : str
        What the kernel's source says of it.
    """

    name: str
    offset: int
    num_bytes: int
    holds: str


@dataclass(frozen=True, slots=True)
class Loop:
    """A loop with tensor-core instructions in it and no shorter one inside: over KV tiles.

    Attributes
    ----------
    begin, end : int
        Addresses of its first and last instruction.
    opcodes : mapping of str to int
        Instructions by their name without modifiers.
    """

    begin: int
    end: int
    opcodes: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class Machine:
    """The instructions of a kernel.

    Attributes
    ----------
    opcodes : mapping of str to int
        Of all of them.
    loops : tuple of Loop
        By address.
    """

    opcodes: Mapping[str, int]
    loops: tuple[Loop, ...]


@dataclass(frozen=True, slots=True)
class Inspection:
    """One compiled form and what it is made of.

    Attributes
    ----------
    compilation : Compilation
    regions : tuple of Region or None
        None where that cannot be found out here.
    machine : Machine or None
        Likewise.
    """

    compilation: Compilation
    regions: tuple[Region, ...] | None
    machine: Machine | None

    def as_dict(self) -> dict[str, Any]:
        """Return it as JSON holds it."""
        regions, machine = self.regions, self.machine
        return {
            **self.compilation.as_dict(),
            "shared_map": None
            if regions is None
            else [{"name": r.name, "offset": r.offset, "bytes": r.num_bytes, "holds": r.holds} for r in regions],
            "instructions": None if machine is None else dict(machine.opcodes),
            "groups": None if machine is None else grouped(machine.opcodes),
            "tile_loops": None
            if machine is None
            else [{"begin": loop.begin, "end": loop.end, "instructions": dict(loop.opcodes)} for loop in machine.loops],
        }


def grouped(opcodes: Mapping[str, int]) -> dict[str, int]:
    """Add instructions up by what they keep busy.

    Parameters
    ----------
    opcodes : mapping of str to int
        From `Machine` or `Loop`.
    """
    counts = Counter[str]()
    for opcode, count in opcodes.items():
        other = "uniform" if opcode.startswith(("U", "R2U", "S2U")) else "integer and moves"
        group = "float32 and conversions" if _FLOAT.fullmatch(opcode) else other
        counts[_GROUP_OF.get(opcode, group)] += count
    return dict(counts.most_common())


def find_nvdisasm() -> Path:
    """Find NVIDIA's disassembler: on the PATH, else in an installed package.

    Raises
    ------
    MissingDependencyError
        It is in neither.
    """
    found = shutil.which(NVDISASM)
    if found is not None:
        return Path(found)
    for wheel in WHEELS:
        try:
            files = importlib.metadata.files(wheel) or []
        except importlib.metadata.PackageNotFoundError:
            continue
        for file in files:
            path = Path(str(file.locate()))
            if file.name == NVDISASM and path.is_file():
                return path
    raise MissingDependencyError(
        f"counting machine instructions needs {NVDISASM}, which is neither on the PATH nor in an installed package; "
        "pip install 'mlaflash[inspect]'."
    )


def disassemble(cubin: bytes) -> Machine:
    """Count the instructions of a cubin.

    Parameters
    ----------
    cubin : bytes

    Returns
    -------
    Machine

    Raises
    ------
    MissingDependencyError
        There is no disassembler, or none that knows this machine code.
    """
    program = find_nvdisasm()
    with tempfile.NamedTemporaryFile(prefix="mlaflash-", suffix=".cubin") as file:
        # CuPy hands over all but the last byte, a zero that drivers do without and the disassembler does not.
        file.write(cubin + b"\0")
        file.flush()
        try:
            done = subprocess.run([str(program), "-c", file.name], capture_output=True, text=True, check=False)
        except OSError as error:
            raise MissingDependencyError(f"{program} cannot be run: {error}. Install another one.") from error
    if done.returncode or not done.stdout:
        raise MissingDependencyError(
            f"{program} does not read this machine code: {done.stderr.strip()}. Install one as new as NVRTC."
        )
    return parse(done.stdout)


def parse(listing: str) -> Machine:
    """Read what the disassembler prints.

    Parameters
    ----------
    listing : str
    """
    instructions: list[tuple[int, str, str]] = []
    labels: dict[str, int] = {}
    waiting: list[str] = []
    for line in listing.splitlines():
        label = _LABEL.match(line)
        if label:
            waiting.append(label[1])
            continue
        found = _INSTRUCTION.match(line)
        if found:
            address = int(found[1], 16)
            labels |= dict.fromkeys(waiting, address)
            waiting = []
            instructions.append((address, found[2].split(".")[0], found[3]))
    loops = []
    for address, opcode, operands in instructions:
        target = _TARGET.search(operands) if opcode in ("BRA", "BRX") else None
        begin = labels.get(target[1], address + 1) if target else address + 1
        if begin <= address:
            body = Counter(name for place, name, _ in instructions if begin <= place <= address)
            loops.append(Loop(begin, address, dict(body)))
    kept: list[Loop] = []
    # Branches from waits that were moved behind the code span other loops: of those that overlap, the shortest counts.
    for loop in sorted(loops, key=lambda loop: loop.end - loop.begin):
        is_apart = all(loop.end < other.begin or other.end < loop.begin for other in kept)
        if is_apart and any(loop.opcodes.get(opcode) for opcode in _GROUPS["tensor cores"]):
            kept.append(loop)
    kept.sort(key=lambda loop: loop.begin)
    return Machine(dict(Counter(name for _, name, _ in instructions).most_common()), tuple(kept))


def shared_map(kernel: str, defines: Mapping[str, int]) -> tuple[Region, ...]:
    """Ask the host's C++ compiler for the offsets in a kernel's ``struct Smem``.

    Parameters
    ----------
    kernel : str
    defines : mapping of str to int

    Returns
    -------
    tuple of Region
        In order; empty for a kernel without.

    Raises
    ------
    MissingDependencyError
        There is no C++ compiler.
    CompileError
        It refused the source.
    """
    source = source_path(kernel)
    members = _members(source.read_text(encoding="utf-8"))
    if not members:
        return ()
    offsets = ", ".join(f"Smem::{name}" for name, _ in members)
    with tempfile.TemporaryDirectory(prefix="mlaflash-") as folder:
        text = f'#include "{source}"\nextern "C" __attribute__((visibility("default"))) const u32 offsets[] = '
        path = Path(folder) / source.name
        path.write_text(f"{text}{{{offsets}}};\n", encoding="utf-8")
        library = Path(folder) / f"map{SUFFIX}"
        library.write_bytes(compile_library(path, defines, options=("-O0",)).payload)
        loaded = ctypes.CDLL(str(library))
        values = list((ctypes.c_uint32 * len(members)).in_dll(loaded, "offsets"))
    # By their place, which may depend on the constants; what holds nothing with these ends where it begins.
    order = sorted(range(len(members)), key=values.__getitem__)
    regions = [
        Region(members[i][0].lower(), values[i], values[after] - values[i], members[i][1])
        for i, after in itertools.pairwise(order)
    ]
    return tuple(region for region in regions if region.num_bytes)


def _members(source: str) -> list[tuple[str, str]]:
    """List the regions of ``struct Smem`` with their comments, and ``BYTES`` behind them.

    A region begins at 0 or behind one before; other members are ends, sizes, or offsets inside of a region.
    """
    struct = re.search(r"^struct Smem \{\n(.*?)^\};", source, re.DOTALL | re.MULTILINE)
    found: list[tuple[str, str]] = []
    places: set[str] = set()
    ends: set[str] = set()
    above = ""
    for line in struct[1].splitlines() if struct else ():
        member = _MEMBER.search(line)
        if member is None:
            above = line.strip().removeprefix("//").strip()
            continue
        name, definition, comment = member[1], member[2].strip(), member[3] or above
        above = ""
        words = set(re.findall(r"[A-Z]\w*", definition))
        follows = bool(words & (places | ends)) or re.match(r"[1-9]", definition) is not None
        if not (follows if found else definition == "0"):
            continue
        if name.endswith("_END"):
            ends.add(name)
        elif definition not in places:  # else another name of the same
            places.add(name)
            found.append((name, comment))
    return found


def inspect(compilation: Compilation, notes: list[str]) -> Inspection:
    """Look into a compiled form.

    Parameters
    ----------
    compilation : Compilation
        One that the compiler did not refuse.
    notes : list of str
        What cannot be found out here is added to it, once.
    """
    compiled, variant = compilation.compiled, compilation.variant
    regions = machine = None
    try:
        regions = shared_map(variant.kernel, variant.defines)
    except MlaFlashError as error:
        _note(notes, f"the map of shared memory is not known: {str(error).partition(chr(10))[0]}")
    try:
        machine = disassemble(compiled.cubin) if compiled else None
    except MissingDependencyError as error:
        _note(notes, f"machine instructions are not known: {error}")
    return Inspection(compilation, regions, machine)


def _note(notes: list[str], text: str) -> None:
    if text not in notes:
        notes.append(text)
