"""Read machine code of compiled kernels: resources, and registers that are read but never written."""

from __future__ import annotations

import re
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import triton

INSTRUCTION = re.compile(r"/\*([0-9a-f]{4,})\*/\s+(@!?U?P\w+\s+)?([\w.]+)\s*(.*?)\s*;")
LABEL = re.compile(r"^(\.L_x_\d+):", re.MULTILINE)


def _run(tool: str, *options: str, cubin: bytes) -> str:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        path = Path(triton.__file__).parent / "backends/nvidia/bin" / tool
        return subprocess.run([path, *options, file.name], capture_output=True, text=True, check=True).stdout


def resource_usage(cubin: bytes) -> tuple[int, int]:
    """Read registers and bytes of stack of a thread."""
    usage = _run("cuobjdump", "-res-usage", cubin=cubin)
    found = re.search(r"REG:(\d+).*?STACK:(\d+)", usage)
    assert found, usage
    return int(found[1]), int(found[2])


def amd_resource_usage(listing: str) -> tuple[int, int]:
    """Read registers and bytes of scratch memory of a thread from the metadata of an assembler listing."""
    registers, scratch = (
        re.search(rf"\.{name}:\s+(\d+)", listing) for name in ("vgpr_count", "private_segment_fixed_size")
    )
    assert registers and scratch, listing[-2000:]
    return int(registers[1]), int(scratch[1])


def disassemble(cubin: bytes) -> str:
    return _run("nvdisasm", "-c", cubin=cubin)


def _written_and_read(operation: str, operands: str) -> tuple[set[int], set[int]]:
    """Return the numbers of the uniform registers that an instruction writes and reads, at least the first of each."""
    if operation.startswith("ULOP3"):
        operands = re.sub(r"^UP\w+, ", "", operands)  # the predicate that it may write, too
    first, _, rest = operands.partition(",")
    written: set[int] = set()
    if found := re.fullmatch(r"UR(\d+)", first):
        wide = ".64" in operation or ".WIDE" in operation
        written = set(range(int(found[1]), int(found[1]) + 1 + wide))
        operands = rest
    read = {int(n) + i for n in re.findall(r"gdesc\[UR(\d+)\]", operands) for i in (2, 3)}  # where the right factor is
    return written, read | {int(n) for n in re.findall(r"(?<!gdesc\[)UR(\d+)", operands)}


def unwritten_registers(listing: str) -> list[str]:
    """List a Hopper kernel's reads of uniform registers that, on some path, no instruction before has written.

    ptxas 12.8 makes such code; see ``headmix_vision/ops/hardware.py``. Later releases do not.
    """
    code: list[Any] = []  # address, predicate, operation, operands
    labels: dict[str, int] = {}
    for line in listing.splitlines():
        if label := LABEL.match(line.strip()):
            labels[label[1]] = len(code)
        elif found := INSTRUCTION.search(line):
            code.append(found.groups())
    unwritten: list[set[int] | None] = [None] * len(code)  # before each instruction; None where none leads yet
    paths = [(0, set(range(63)))]
    while paths:
        place, registers = paths.pop()
        while place < len(code):
            known = unwritten[place]
            if known is not None and registers <= known:
                break
            registers = unwritten[place] = registers | (known or set())
            _, predicate, operation, operands = code[place]
            registers = registers - _written_and_read(operation, operands)[0]
            if operation.startswith("BRA"):
                target = re.search(r"\.L_x_\d+", operands)
                if target and target[0] in labels:
                    paths.append((labels[target[0]], registers))
                if not (predicate or re.match(r"!?U?P\d", operands)):
                    break
            elif operation == "EXIT" and not predicate:
                break
            place += 1
    return [
        f"{operation} {operands} at {address}"
        for (address, _, operation, operands), before in zip(code, unwritten, strict=True)
        if before and _written_and_read(operation, operands)[1] & before
    ]
