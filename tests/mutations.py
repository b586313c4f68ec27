"""Damage real files: bytes, members of archives, tables of values and whatever else a format holds."""

import csv
import io
import json
import os
import pickle
import random
import struct
import tarfile
import warnings
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml

MARK = "MARK"  # the file that stored code makes when it runs
CALL = {"class_path": "subprocess.Popen", "init_args": {"args": ["touch", MARK]}}
OTHERS: list[Any] = [
    *(None, True, 0, -1, 10**18, -1.5, float("nan"), float("inf"), "", "x", "1.x", "../..", "/dev/zero", "9" * 5000),
    *("é\u202e\x1b[31m", [], [1, [2]], {}, {"a": {"b": 1}}, CALL, {"class_path": "os.system", "init_args": {}}),
]
Change = Callable[[Path, random.Random], str]


class Runs:
    """An object whose unpickling makes `MARK`."""

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (f"touch {MARK}",)


def _nodes(tree: Any, place: str = "") -> list[tuple[Any, Any, str]]:
    """List container, key and place of all values in nested dictionaries and lists."""
    items = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    found = []
    for key, value in items:
        found += [(tree, key, f"{place}.{key}"), *_nodes(value, f"{place}.{key}")]
    return found


def _other(value: Any, rng: random.Random) -> Any:
    """Choose another value in the place of one: of another kind, or a number or tensor that cannot be right."""
    if isinstance(value, torch.Tensor) and rng.random() < 0.6:
        empty, flat = value.flatten()[:0], value.flatten()
        changed = [empty, flat, value.to(torch.int8), value[None], torch.zeros(()), value.double() * float("nan")]
        sparse = empty if value.is_meta or not value.ndim else value.to_sparse()
        return rng.choice([*changed, sparse, value.to(torch.complex64)])
    if isinstance(value, int | float) and rng.random() < 0.4:
        return rng.choice([-value, -value - 1, value * 10**9, value + 0.5])
    return rng.choice(OTHERS)


def edit(tree: Any, rng: random.Random) -> str:
    """Replace, remove, rename or add one value in nested dictionaries and lists; return what was done."""
    nodes = _nodes(tree)
    if not nodes:
        return "nothing to edit"
    parent, key, place = rng.choice(nodes)
    how = rng.choice(["replace"] * 5 + ["remove", "rename", "add"])
    if how == "replace":
        parent[key] = _other(parent[key], rng)
        return f"{place} becomes {str(parent[key])[:60]!r}"
    if how == "remove":
        del parent[key]
    elif isinstance(parent, list):
        parent.append(rng.choice(OTHERS))
    elif how == "rename":
        parent[f"{key}x" if isinstance(key, str) else str(key)] = parent.pop(key)
    else:
        parent[rng.choice(["x", "class_path", "__class__", "", "name"])] = rng.choice(OTHERS)
    return f"{how} {place}"


def flip(path: Path, rng: random.Random) -> str:
    """Invert some bytes."""
    data = bytearray(path.read_bytes() or b"x")
    places = sorted(rng.randrange(len(data)) for _ in range(rng.choice([1, 1, 8, 64])))
    for place in places:
        data[place] ^= rng.randrange(1, 256)
    path.write_bytes(data)
    return f"flip bytes {places[:4]}"


def cut(path: Path, rng: random.Random) -> str:
    """Leave the end out, or all."""
    data = path.read_bytes()
    left = rng.choice([0, 1, len(data) // 2, max(len(data) - 1, 0), rng.randrange(len(data) + 1)])
    path.write_bytes(data[:left])
    return f"cut to {left} of {len(data)} bytes"


def lengthen(path: Path, rng: random.Random) -> str:
    """Append garbage, or the file once more."""
    data = path.read_bytes()
    more = rng.choice([data, rng.randbytes(100), b"\0" * 5000, b"\n"])
    path.write_bytes(data + more)
    return f"append {len(more)} bytes"


def blank(path: Path, rng: random.Random) -> str:
    """Overwrite a stretch by zeros, as a disk that lost a block."""
    data = path.read_bytes()
    start = rng.randrange(len(data) or 1)
    stretch = data[start : start + 512]
    path.write_bytes(data[:start] + b"\0" * len(stretch) + data[start + len(stretch) :])
    return f"zero {len(stretch)} bytes from {start}"


def replace(path: Path, rng: random.Random) -> str:
    """Put something in the place of the file that cannot be read as one."""
    path.unlink()
    kinds: dict[str, Callable[[], object]] = {
        "a directory": path.mkdir,
        "a FIFO": lambda: os.mkfifo(path),
        "a link to /dev/zero": lambda: path.symlink_to("/dev/zero"),
        "a broken link": lambda: path.symlink_to("nothing"),
        "a link to itself": lambda: path.symlink_to(path.name),
        "a pickle that runs code": lambda: path.write_bytes(pickle.dumps({"state_dict": Runs()})),
        "text": lambda: path.write_text("[1, 2\n"),
        "nothing": lambda: None,
    }
    kind = rng.choice(list(kinds))
    kinds[kind]()
    return f"replaced by {kind}"


def json_values(path: Path, rng: random.Random) -> str:
    """Change a value of JSON."""
    tree = json.loads(path.read_text())
    done = edit(tree, rng)
    path.write_text(json.dumps(tree))
    return done


def yaml_values(path: Path, rng: random.Random) -> str:
    """Change a value of YAML, or repeat one without end by aliases."""
    tree = yaml.safe_load(path.read_text())
    if rng.random() < 0.05:
        lines = ["a0: &a0 [1, 1]", *(f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]" for i in range(1, 12))]
        path.write_text("\n".join([path.read_text(), *lines]))
        return "aliases of aliases"
    done = edit(tree, rng)
    path.write_text(yaml.safe_dump(tree))
    return done


def checkpoint_values(path: Path, rng: random.Random) -> str:
    """Change a value of a checkpoint of torch."""
    tree = torch.load(path, weights_only=True)
    done = edit(tree, rng)
    torch.save(tree, path)
    return done


def zip_members(path: Path, rng: random.Random) -> str:
    """Swap, remove, repeat or rename members of a zip file."""
    with zipfile.ZipFile(path) as archive:
        members = [(name, archive.read(name)) for name in archive.namelist()]
    a, b = rng.randrange(len(members)), rng.randrange(len(members))
    how = rng.choice(["swap", "remove", "repeat", "rename", "exchange the names of"])
    if how == "swap":
        members[a], members[b] = (members[a][0], members[b][1]), (members[b][0], members[a][1])
    elif how == "remove":
        del members[a]
    elif how == "repeat":
        members.append((members[a][0], members[b][1]))
    elif how == "rename":
        members[a] = (f"../{members[a][0]}", members[a][1])
    else:
        members[a], members[b] = (members[b][0], members[a][1]), (members[a][0], members[b][1])
    with zipfile.ZipFile(path, "w") as archive, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of repeated names
        for name, data in members:
            archive.writestr(name, data)
    return f"{how} members {a} and {b} of {len(members)}"


def npz_arrays(path: Path, rng: random.Random) -> str:
    """Change an array of an npz file, or its header alone."""
    with np.load(path) as file:
        arrays: dict[str, Any] = dict(file)
    name = rng.choice(list(arrays))
    array, dtype = arrays[name], arrays[name].dtype.str
    kinds: dict[str, Callable[[], Any]] = {
        "objects": lambda: np.array([Runs()], dtype=object),
        "no numbers": lambda: np.array(["x"] * len(array) if array.ndim else "x"),
        "NaN": lambda: array * np.float32("nan"),
        "negative": lambda: -1 - array.astype(np.int64),
        "empty": lambda: array[:0] if array.ndim else array[None],
        "flat": lambda: array.ravel(),
        "complex": lambda: array.astype(np.complex64),
        "turned": lambda: array.T,
        "a huge count": lambda: f"{{'descr': '{dtype}', 'fortran_order': False, 'shape': (10**12, 8, 8, 1)}}",
        "an endless count": lambda: f"{{'descr': '{dtype}', 'fortran_order': False, 'shape': (10000000000000, 8, 8)}}",
        "a negative count": lambda: f"{{'descr': '{dtype}', 'fortran_order': False, 'shape': (-1,)}}",
    }
    kind = rng.choice(list(kinds))
    made = kinds[kind]()
    with zipfile.ZipFile(path, "w") as archive:
        for key, value in {**arrays, name: made}.items():
            file = io.BytesIO()
            if isinstance(value, str):
                text = f"{value}\n".encode()
                file.write(b"\x93NUMPY\x01\x00" + struct.pack("<H", len(text)) + text + array.tobytes())
            else:
                np.save(file, value, allow_pickle=True)
            archive.writestr(f"{key}.npy", file.getvalue())
    return f"{name} becomes {kind}"


def safetensors_header(path: Path, rng: random.Random) -> str:
    """Change a value of the header of a safetensors file, or claim another length for it."""
    data = path.read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    header, rest = json.loads(data[8 : 8 + length]), data[8 + length :]
    for key, text in list(header.get("__metadata__", {}).items()):  # JSON within texts
        if rng.random() < 0.3 and text[:1] in "{[":
            tree = json.loads(text)
            done = edit(tree, rng)
            header["__metadata__"][key] = json.dumps(tree)
            break
    else:
        done = edit(header, rng)
    text = json.dumps(header).encode()
    claimed = rng.choice([len(text)] * 9 + [2**63])
    path.write_bytes(struct.pack("<Q", claimed) + text + rest)
    return f"header: {done}" + ("" if claimed == len(text) else ", of endless length")


def tar_members(path: Path, rng: random.Random) -> str:
    """Swap, remove or repeat members of a tar file, or give one another name, kind or size."""
    with tarfile.open(path) as archive:
        members = [(one, archive.extractfile(one).read()) for one in archive if one.isfile()]  # type: ignore[union-attr]
    a, b = rng.randrange(len(members)), rng.randrange(len(members))
    how = rng.choice(["swap", "remove", "repeat", "rename", "link", "make a device of", "enlarge"])
    if how == "swap":
        members[a], members[b] = (members[a][0], members[b][1]), (members[b][0], members[a][1])
    elif how == "remove":
        del members[a]
    elif how == "repeat":
        members.append(members[a])
    elif how == "rename":
        members[a][0].name = rng.choice(["../x.png", "/tmp/x.png", "x" * 300, "é\x07.png"])
    elif how == "link":
        members[a][0].type, members[a][0].linkname = tarfile.SYMTYPE, rng.choice(["/etc/passwd", members[a][0].name])
    elif how == "make a device of":
        members[a][0].type = tarfile.CHRTYPE
    with tarfile.open(path, "w") as archive:
        for number, (member, data) in enumerate(members):
            member.size = 2**40 if how == "enlarge" and number == a else len(data)
            archive.fileobj.write(member.tobuf())  # type: ignore[union-attr]
            archive.fileobj.write(data + b"\0" * (-len(data) % 512))  # type: ignore[union-attr]
    return f"{how} members {a} and {b} of {len(members)}"


def table_cells(path: Path, rng: random.Random) -> str:
    """Change a cell, a row or the header of a CSV file."""
    rows = list(csv.reader(io.StringIO(path.read_text())))
    row = rng.choice([0, rng.randrange(len(rows))])
    cell = rng.randrange(len(rows[row]))
    values = ["", "x", "-1", "nan", "1e999", "\0", '"', "é\x1b[31m", "../../etc/passwd", "/dev/zero", "9" * 200_000]
    how = rng.choice(["replace"] * 5 + ["remove", "repeat", "lengthen", "drop row of"])
    if how == "replace":
        rows[row][cell] = rng.choice(values)
    elif how == "remove":
        del rows[row][cell]
    elif how == "repeat":
        rows[row].append(rows[row][cell])
    elif how == "lengthen":
        rows[row] += ["x"] * 100
    else:
        del rows[row]
    path.write_text("".join(",".join(one) + "\n" for one in rows))
    return f"{how} cell {cell} of row {row}"


ANY: list[Change] = [flip, cut, lengthen, blank, replace]
OF_KIND: dict[str, list[Change]] = {
    ".ckpt": [zip_members, *[checkpoint_values] * 5],
    ".npz": [zip_members, *[npz_arrays] * 5],
    ".safetensors": [safetensors_header] * 4,
    ".json": [json_values] * 12,
    ".yaml": [yaml_values] * 12,
    ".tar": [tar_members] * 4,
    ".csv": [table_cells] * 8,
}


def mutate(path: Path, rng: random.Random) -> str:
    """Damage a file in one way that its kind allows; return what was done."""
    return rng.choice([*ANY, *OF_KIND.get(path.suffix, [])])(path, rng)
