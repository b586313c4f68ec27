"""Draws small mistakes in the code that runs without a GPU, and chooses the tests that should notice them.

Some places are never drawn, as a mistake there changes no result on a CPU: kernels, launch parameters and what reads
``torch.cuda``; messages, representations and internal assertions, ``strict`` of `zip` among them; sizes of caches,
layouts in memory and asynchronous copies; and ``fsync``, which only a power cut shows.
"""

import ast
import inspect
import random
import re
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from slip_runs import ROOT, Copy

NEAREST, MOST_FILES = 3, 9  # files of tests for one slip, first the nearest
MOST_USERS = 6  # files that use a function, where tests of theirs are near
CHECK = re.compile("_?(check|require)|__post_init__")
REFUSING = {"forge", "refus", "wrong"}  # tests of wrong input
SHARED = {"excha", "proce", "ranks", "shard"}  # what several processes do together
UNTOLD = {"impl", "init", "launc", "py", "test", "tests", "trito"}
FOLDERS = (
    "console", "data", "diffusion", "evaluation", "files", "layers", "models", "ops", "runs", "sampling", "training",
)  # fmt: skip
KERNEL = re.compile(r"\.(jit|constexpr_function)$")
TUNING = "triton_tuning.py"  # tiles by GPU
# Their arguments are texts for users.
SPEAKING = {"InputError", "add_argument", "info", "note", "print", "rank_zero_info", "rank_zero_warn", "warn"}
ASKING = {"getattr", "hasattr", "isinstance", "issubclass", "setattr"}  # with other arguments they raise at once
UNSEEN = {"fsync"}
UNSEEN_KEYWORDS = {
    "daemon", "flush", "low_cpu_mem_usage", "maxnreg", "maxsize", "memory_format", "non_blocking", "num_stages",
    "num_warps", "stacklevel", "strict",
}  # fmt: skip
REPRESENTING = {"__repr__", "__str__", "extra_repr"}
COMMON = {
    "backward",
    "forward",
    "main",
    "setup",
    "update",
    "state_dict",
    "__init__",
    "__call__",
    "__getitem__",
    "__len__",
}
COMPARISONS: dict[type[ast.cmpop], tuple[type[ast.cmpop], ...]] = {
    ast.Lt: (ast.LtE, ast.Gt), ast.LtE: (ast.Lt, ast.GtE), ast.Gt: (ast.GtE, ast.Lt), ast.GtE: (ast.Gt, ast.LtE),
    ast.Eq: (ast.NotEq,), ast.NotEq: (ast.Eq,), ast.Is: (ast.IsNot,), ast.IsNot: (ast.Is,),
    ast.In: (ast.NotIn,), ast.NotIn: (ast.In,),
}  # fmt: skip
OPERATIONS: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Add, ast.Div: ast.Mult, ast.Mod: ast.FloorDiv,
    ast.BitAnd: ast.BitOr,
}  # fmt: skip
NAMES = {"min": "max", "max": "min", "any": "all", "all": "any", "amin": "amax", "amax": "amin", "floor": "ceil"}
CHOICES = (ast.If, ast.IfExp)
RESULTS = (ast.Return, ast.Yield, ast.YieldFrom)
SIMPLE = (ast.Assign, ast.AugAssign, ast.Expr, ast.Return)
TEXT = (ast.JoinedStr, ast.List, ast.Tuple)


class DrawnSlip(NamedTuple):
    """A mistake in a function of a file of the package, with the text of the file that has it."""

    file: str
    line: int
    names: tuple[str, ...]
    before: str
    after: str
    text: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line} {'.'.join(self.names)}: {self.before} -> {self.after}"


class Sites(ast.NodeVisitor):
    """Collects the nodes of a file that can be changed, each with its changes and the names of its functions."""

    def __init__(self, tree: ast.Module) -> None:
        self.found: list[tuple[ast.AST, tuple[str, ...], list[str]]] = []
        self.names: tuple[str, ...] = ()
        self.visit(tree)

    def visit(self, node: ast.AST) -> None:
        if isinstance(node, (ast.JoinedStr, ast.Raise, ast.Assert, ast.Import, ast.ImportFrom)):
            return
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            return
        if isinstance(node, ast.Call) and _called(node) in SPEAKING | UNSEEN:
            return
        if isinstance(node, ast.keyword) and node.arg in UNSEEN_KEYWORDS:
            return
        if isinstance(node, ast.FunctionDef) and any(KERNEL.search(ast.unparse(x)) for x in node.decorator_list):
            return
        if isinstance(node, SIMPLE) and "torch.cuda" in ast.unparse(node):
            return
        if isinstance(node, CHOICES) and "cuda" in ast.unparse(node.test):
            for child in [node.orelse] if isinstance(node.orelse, ast.expr) else node.orelse:
                self.visit(child)
            return
        if changes := [change for change in _changes(node) if change != ast.unparse(node)]:
            self.found.append((node, self.names, changes))
        conditions = (
            node.ifs if isinstance(node, ast.comprehension) else [node.test] if isinstance(node, CHOICES) else []
        )
        self.found += [(test, self.names, [f"not ({ast.unparse(test)})"]) for test in conditions]
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            if node.name not in REPRESENTING:
                outer, self.names = self.names, (*self.names, node.name)
                if isinstance(node, ast.FunctionDef) and not any(isinstance(x, RESULTS) for x in ast.walk(node)):
                    self.found += [(statement, self.names, ["return"]) for statement in node.body[1:]]
                defaults = [*node.args.defaults, *node.args.kw_defaults] if isinstance(node, ast.FunctionDef) else []
                for child in [*[x for x in defaults if x is not None], *node.body]:
                    self.visit(child)
                self.names = outer
        elif isinstance(node, ast.AnnAssign):
            if node.value is not None:
                self.visit(node.value)
        else:
            self.generic_visit(node)


def _called(node: ast.Call) -> str:
    return node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")


def _changed(node: ast.AST, **fields: Any) -> str:
    """Write a node with other fields."""
    return ast.unparse(type(node)(**{name: getattr(node, name, None) for name in node._fields} | fields))


def _changes(node: ast.AST) -> Iterator[str]:
    """Write all changes of a node."""
    if isinstance(node, ast.Compare) and len(node.ops) == 1:
        for other in COMPARISONS[type(node.ops[0])]:
            yield _changed(node, ops=[other()])
    elif isinstance(node, ast.BinOp) and not any(_is_text(x) for x in (node.left, node.right)):
        if type(node.op) in OPERATIONS:
            yield _changed(node, op=OPERATIONS[type(node.op)]())
        elif isinstance(node.op, ast.FloorDiv):
            yield f"-(-({ast.unparse(node.left)}) // ({ast.unparse(node.right)}))"
    elif isinstance(node, ast.BoolOp):
        yield _changed(node, op=ast.And() if isinstance(node.op, ast.Or) else ast.Or())
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, (ast.Not, ast.USub)):
        yield ast.unparse(node.operand)
    elif isinstance(node, ast.Constant):
        if isinstance(node.value, bool):
            yield str(not node.value)
        elif isinstance(node.value, int):
            yield from (str(node.value + 1), str(node.value - 1))
        elif isinstance(node.value, float):
            yield repr(2 * node.value or 1.0)
    elif isinstance(node, ast.Slice):
        yield from _slices(node)
    elif isinstance(node, ast.Call):
        yield from _calls(node)
    elif isinstance(node, ast.AugAssign) or (
        isinstance(node, ast.Expr) and isinstance(node.value, ast.Call) and _called(node.value) not in SPEAKING | UNSEEN
    ):
        yield "pass"


def _is_text(node: ast.AST) -> bool:
    return isinstance(node, TEXT) or (isinstance(node, ast.Constant) and isinstance(node.value, str))


def _slices(node: ast.Slice) -> Iterator[str]:
    for name in ("lower", "upper"):
        bound = getattr(node, name)
        if bound is not None:
            yield _changed(node, **{name: ast.BinOp(bound, ast.Add(), ast.Constant(1))})
            yield _changed(node, **{name: None})


def _calls(node: ast.Call) -> Iterator[str]:
    if _called(node) in ASKING:
        return
    for keyword in node.keywords:
        if keyword.arg is not None and keyword.arg not in UNSEEN_KEYWORDS:
            yield _changed(node, keywords=[x for x in node.keywords if x is not keyword])
    starred = any(isinstance(x, ast.Starred) for x in node.args)
    if len(node.args) >= 2 and not starred:
        yield _changed(node, args=[node.args[1], node.args[0], *node.args[2:]])
        yield _changed(node, args=node.args[:-1])
    if _called(node) in NAMES:
        other = NAMES[_called(node)]
        is_name = isinstance(node.func, ast.Name)
        yield _changed(node, func=ast.Name(other) if is_name else ast.Attribute(node.func.value, other))  # type: ignore[attr-defined]


@cache
def sites() -> list[tuple[str, ast.AST, tuple[str, ...], list[str]]]:
    """List what can be changed in the package."""
    listed = []
    package = ROOT / "headmix_vision"
    for path in sorted(path for folder in FOLDERS for path in (package / folder).rglob("*.py")):
        if path.name != TUNING:
            file = str(path.relative_to(package))
            listed += [(file, *site) for site in Sites(ast.parse(path.read_text())).found]
    return listed


def draw_slip(rng: random.Random) -> DrawnSlip:
    """Draw a node of the package, and one of its changes."""
    file, node, names, changes = rng.choice(sites())
    after = rng.choice(changes)
    source = (ROOT / "headmix_vision" / file).read_bytes()
    starts = [0]
    for line in source.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    first = starts[node.lineno - 1] + node.col_offset  # type: ignore[attr-defined]
    last = starts[node.end_lineno - 1] + node.end_col_offset  # type: ignore[attr-defined]
    inner = after if isinstance(node, (ast.Slice, ast.stmt)) else f"({after})"
    text = (source[:first] + inner.encode() + source[last:]).decode()
    return DrawnSlip(file, node.lineno, names, ast.unparse(node), after, text)  # type: ignore[attr-defined]


@cache
def _imported(path: Path) -> frozenset[str]:
    """Name the files of the package, like ``data/clip_frames.py``, that a file imports."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level:  # helpers beside the tests
            for name in [node.module] if node.module else [alias.name for alias in node.names]:
                if (helper := path.parent / f"{name}.py").is_file():
                    names |= {f"headmix_vision.{name}" for name in _imported(helper)}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    bare = {name.removeprefix("headmix_vision").strip(".").removesuffix(".py").replace(".", "/") for name in names}
    package = ROOT / "headmix_vision"
    files = {f"{name}.py" for name in bare if (package / f"{name}.py").is_file()}
    inits = {str(Path(name) / "__init__.py") for name in bare}
    return frozenset(files | {name for name in inits if (package / name).is_file()})


@cache
def _distance(test: Path, file: str) -> int:
    """Count the imports between a file of tests and one of the package; 9 where there are none."""
    reached, front = set(), _imported(test)
    for distance in range(9):
        if file in front:
            return distance
        reached |= front
        front = frozenset(x for near in front for x in _imported(ROOT / "headmix_vision" / near)) - reached
    return 9


def _reached_by(slip: DrawnSlip) -> set[str]:
    """Name the function, its class, and the public ones of the file through which a private one is reached."""
    mentioned = {
        node.name: {getattr(x, "attr", getattr(x, "id", "")) for x in ast.walk(node)}
        for node in ast.walk(ast.parse((ROOT / "headmix_vision" / slip.file).read_text()))
        if isinstance(node, (ast.FunctionDef, ast.ClassDef))
    }
    found = {name for name in slip.names if name not in COMMON}
    while private := {name for name in found if name.startswith("_")}:
        callers = {name for name, names in mentioned.items() if names & private and name not in COMMON} - found
        if not callers:
            break
        found |= callers
    return {name for name in found if not name.startswith("_")} or found or {Path(slip.file).stem}


def _users(file: str, names: set[str]) -> set[str]:
    """Name the other files of the package that name one of these, if they are few."""
    package, users = ROOT / "headmix_vision", set[str]()
    texts = {str(path.relative_to(package)): path.read_text() for path in package.rglob("*.py")}
    for name in names:
        named = re.compile(rf"\b{name}\b")
        using = {other for other, text in texts.items() if other != file and named.search(text)}
        users |= using if len(using) <= MOST_USERS else set()
    return users


def _words(name: str) -> set[str]:
    """Split a name into the first letters of its words, which ``resuming`` shares with ``resume``."""
    return {word[:5] for word in re.findall("[a-z0-9]+", name.lower())} - UNTOLD


def tests_for(slip: DrawnSlip) -> tuple[list[str], Callable[[Any], Any]]:
    """Choose files of tests near the file and its users, and a sort key that puts tests first which name the code."""
    names = _reached_by(slip)
    named = re.compile(rf"\b({'|'.join(sorted(names))})\b")
    words = {file: _words(file) for file in (slip.file, *_users(slip.file, names))}
    words[slip.file] |= _words("_".join([*names, slip.before]))
    if any(CHECK.match(name) for name in (*slip.names, slip.before)):
        words[slip.file] |= REFUSING
    tests = [*(ROOT / "tests").rglob("test_*.py")]
    counts = Counter(word for test in tests for word in _words(str(test.relative_to(ROOT))))
    ranks = {}
    for test in tests:
        place, text = str(test.relative_to(ROOT)), test.read_text()
        if place.endswith("_gpu.py") or place.split("/")[1] in ("benchmarks", "peers", "analysis"):
            continue
        told = _words(place)
        distance = min(
            _distance(test, file) - sum(1 + 4 / counts[word] for word in told & own) for file, own in words.items()
        )
        is_slow = bool(re.search("torchrun|distributed|Popen|run_on_ranks|two_processes", text))
        ranks[place] = distance - 2 * bool(named.search(text)) + 2 * (is_slow and not words[slip.file] & SHARED)
    chosen = sorted(ranks, key=lambda test: (ranks[test], len(test), test))[:MOST_FILES]

    def order(item: Any) -> tuple[bool, int]:
        try:
            mentions = bool(named.search(inspect.getsource(item.function)))
        except (OSError, TypeError):
            mentions = False
        return not mentions, chosen.index(item.location[0])

    return chosen, order


def draw(copy: Copy, count: int, seed: int, limit_s: float) -> int:
    """Draw slips and run their tests; a test notices a slip if it passes without. Returns how many go unnoticed."""
    rng, verdicts = random.Random(seed), []
    while len(verdicts) < count:
        slip, start = draw_slip(rng), time.monotonic()
        files, order = tests_for(slip)
        module = "headmix_vision." + slip.file.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
        with copy.changed(slip.file, slip.text):
            for chosen in (files[:NEAREST], files[NEAREST:]):
                verdict = copy.run(chosen, limit_s, order, module)
                while verdict.test in chosen:  # a file that cannot be collected; another one may notice the slip
                    chosen.remove(verdict.test)
                    verdict = copy.run(chosen, limit_s, order, module) if chosen else verdict
                if verdict.kind not in ("passed", "too long", "broken"):
                    break
        if verdict.kind == "broken" and not verdict.test:
            continue  # it cannot be imported, which every test would notice
        verdicts.append(verdict)
        said = f"{verdict} {time.monotonic() - start:.0f} s"
        print(f"{len(verdicts):3d}/{count} {slip}\n        {said}", flush=True)
    failed = {verdict.test for verdict in verdicts if verdict.is_notice}
    always = copy.failing(sorted(failed), limit_s * 10)
    for test in sorted(always):
        print(f"without a slip, too: {test}")
    noticed = sum(verdict.is_notice and verdict.test not in always for verdict in verdicts)
    print(f"{noticed} of {count} drawn slips are noticed (seed {seed})")
    return count - noticed


if __name__ == "__main__":
    rng = random.Random(int(sys.argv[1]))
    for _ in range(int(sys.argv[2])):
        print(draw_slip(rng))
