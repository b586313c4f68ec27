"""Draws small mistakes in the code that runs without a GPU, and runs the tests that should notice them.

Some places are never drawn, as a mistake there changes no result on a CPU: kernels, their tiles, what assembles them
and what reads ``torch.cuda``; messages, representations and internal assertions, ``strict`` of `zip` among them; sizes
of caches, layouts in memory and asynchronous copies; and ``fsync``, which only a power cut shows. Nor are arguments of
`gcd` and the like exchanged, or signs of whole numbers lost: dim -1 of a matrix is dim 1.
"""

import ast
import random
import re
import sys
import time
from collections.abc import Iterator
from functools import cache
from typing import Any, NamedTuple

from slip_reach import Reach
from slip_runs import ROOT, Copy, Verdict

FOLDERS = (
    "data", "diffusion", "evaluation", "files", "layers", "models", "ops", "runs", "sampling", "training",
)  # fmt: skip
KERNEL = re.compile(r"\.(jit|constexpr_function)$")
TUNING = "triton_tuning.py"  # tiles by GPU
TILES = re.compile(r"\bTiles( \| None)?$")  # the type of what functions choose that choose tiles
ASSEMBLING = re.compile("assembler|_driver_major")  # functions about the programs that assemble for GPUs
SYMMETRIC = {"alignment", "equal", "gcd", "max", "maximum", "min", "minimum"}  # in their arguments
# Their arguments are texts for users.
SPEAKING = {"InputError", "add_argument", "info", "note", "print", "rank_zero_info", "rank_zero_warn", "warn"}
ASKING = {"getattr", "hasattr", "isinstance", "issubclass", "setattr"}  # with other arguments they raise at once
UNSEEN = {"fsync"}
UNSEEN_KEYWORDS = {
    "daemon", "flush", "low_cpu_mem_usage", "maxnreg", "maxsize", "memory_format", "non_blocking", "num_stages",
    "num_warps", "repr", "stacklevel", "strict",
}  # fmt: skip
REPRESENTING = {"__repr__", "__str__", "extra_repr"}
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
        if isinstance(node, ast.FunctionDef) and (
            ASSEMBLING.search(node.name) or TILES.search(ast.unparse(node.returns or ast.Constant(None)))
        ):
            return
        if isinstance(node, SIMPLE) and any(text in ast.unparse(node) for text in ("torch.cuda", "Tiles(")):
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
        if not isinstance(getattr(node.operand, "value", None), int):
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
        if _called(node) not in SYMMETRIC:
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
    folders = [path for folder in FOLDERS for path in (package / folder).rglob("*.py")]
    for path in sorted([*folders, *(package / f"{name}.py" for name in ("console", "errors", "processes"))]):
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


def draw(copy: Copy, reach: Reach, count: int, seed: int, limit_s: float) -> int:
    """Draw slips and run their tests; a test notices a slip if it passes without. Returns how many go unnoticed."""
    rng, verdicts = random.Random(seed), []
    while len(verdicts) < count:
        slip, start = draw_slip(rng), time.monotonic()
        before = (ROOT / "headmix_vision" / slip.file).read_text()
        chosen = reach.choose(slip.file, before, slip.line, limit_s / 3)  # a mistake may slow them down
        module = "headmix_vision." + slip.file.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
        files, verdict = sorted({test.partition("::")[0] for test in chosen}), Verdict("passed", "no test runs it")
        with copy.changed(slip.file, slip.text):
            while files:
                verdict = copy.run(files, limit_s, chosen, module)
                if verdict.test not in files:
                    break
                files.remove(verdict.test)  # it cannot be collected; another one may notice the slip
        if verdict.kind == "broken" and not verdict.test:
            continue  # it cannot be imported, which every test would notice
        verdicts.append(verdict)
        said = f"{verdict} {time.monotonic() - start:.0f} s"
        print(f"{len(verdicts):3d}/{count} {slip}\n        {said}", flush=True)
    failed = {verdict.test for verdict in verdicts if verdict.is_notice}
    always = {test for test in failed if copy.run([test], limit_s).kind != "passed"}  # each alone, as it noticed
    for test in sorted(always):
        print(f"without a slip, too: {test}")
    noticed = sum(verdict.is_notice and verdict.test not in always for verdict in verdicts)
    print(f"{noticed} of {count} drawn slips are noticed (seed {seed})")
    return count - noticed


if __name__ == "__main__":
    rng = random.Random(int(sys.argv[1]))
    for _ in range(int(sys.argv[2])):
        print(draw_slip(rng))
