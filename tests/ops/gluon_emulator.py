"""Runs Gluon kernels on a CPU, program after program, in plain PyTorch: Triton's interpreter does not know Gluon.

Layouts and warps have no meaning here. What does is memory: shared memory is not a number until it is written, rows
that an asynchronous copy brings are none until it is waited for, asynchronous products read shared memory when they
are waited for, and only what was fenced; and a tensor is not read or written beside its elements.
"""

from __future__ import annotations

import math
import types

import torch
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import hopper
from triton.runtime.jit import JITFunction

from headmix_vision.ops.mhla.hopper import names as gluon_names

NAN = float("nan")


class Tile(torch.Tensor):
    """Registers. Augmented assignments make new ones."""

    type = types.SimpleNamespace(layout=None)

    def __iadd__(self, other):
        return self + other

    def __isub__(self, other):
        return self - other

    def __imul__(self, other):
        return self * other


def tile(x, dtype=torch.int32):
    return torch.as_tensor(x, dtype=None if isinstance(x, torch.Tensor) else dtype).as_subclass(Tile)


class Pointer:
    """Elements of a tensor, by their places in its storage from its first element on."""

    def __init__(self, numbers, owned, offset):
        self.numbers, self.owned, self.offset = numbers, owned, offset

    @classmethod
    def to(cls, x):
        size = x.untyped_storage().nbytes() // x.element_size() - x.storage_offset()
        numbers = x.detach().as_strided((size,), (1,))
        owned = torch.zeros(size, dtype=torch.bool)
        owned.as_strided(x.shape, x.stride(), 0).fill_(True)
        return cls(numbers, owned, tile(0))

    def __add__(self, offset):
        return Pointer(self.numbers, self.owned, self.offset + offset)

    def __getitem__(self, index):
        return Pointer(self.numbers, self.owned, self.offset[index])

    def places(self, mask):
        """Where it points to, and which of the places are present."""
        present = torch.as_tensor(True if mask is None else mask)
        offset, present = torch.broadcast_tensors(self.offset.long(), present)
        chosen = offset[present]
        assert ((chosen >= 0) & (chosen < len(self.owned))).all() and self.owned[chosen].all(), "outside of the tensor"
        return chosen, present

    def load(self, mask, other):
        chosen, present = self.places(mask)
        values = torch.full(present.shape, other, dtype=self.numbers.dtype).as_subclass(Tile)
        values[present] = self.numbers[chosen].as_subclass(Tile)
        return values


def places_of(shape, layout):
    """Where the elements of a tile of shared memory lie: [*shape]."""
    *leading, columns = shape
    rows = torch.arange(math.prod(leading)).view(*leading, 1)
    column = torch.arange(columns)
    if isinstance(layout, gl.NVMMASharedLayout):
        width = layout.swizzle_byte_width // 2
        assert columns % width == 0 and not layout.transposed
        height = leading[-1]
        row, inner = rows % height, column % width
        group = (inner // 8) ^ (row * width // 64 % (width // 8))
        return rows // height * (height * columns) + (column // width * height + row) * width + group * 8 + inner % 8
    if len(shape) == 1:
        return column
    assert list(layout.order) in ([1, 0], [2, 1, 0])
    group = (column // layout.vec) ^ (rows // layout.per_phase % layout.max_phase)
    return rows * columns + group * layout.vec + column % layout.vec


class Memory:
    """A view of shared memory, and which of it products may read: what was written before a fence."""

    def __init__(self, numbers, fenced, places, layout):
        self.numbers, self.fenced, self.places, self.layout = numbers, fenced, places, layout

    @classmethod
    def allocate(cls, dtype, shape, layout):
        size = math.prod(shape)
        numbers, fenced = torch.full((size,), NAN, dtype=dtype), torch.zeros(size, dtype=torch.bool)
        return cls(numbers, fenced, places_of(shape, layout), layout)

    @property
    def shape(self):
        return self.places.shape

    def _view(self, places):
        return Memory(self.numbers, self.fenced, places, self.layout)

    def index(self, i):
        assert 0 <= i < len(self.places)
        return self._view(self.places[int(i)])

    def slice(self, start, length, dim=0):
        return self._view(self.places.narrow(dim, start, length))

    def permute(self, order):
        return self._view(self.places.permute(order))

    def load(self, layout):
        return self.numbers[self.places].as_subclass(Tile)

    def store(self, x):
        assert x.shape == self.shape and x.dtype == self.numbers.dtype
        self.numbers[self.places] = x.as_subclass(torch.Tensor)
        self.fenced[self.places] = False

    def is_fenced(self):
        return self.fenced[self.places].all()


class Product:
    """An asynchronous product on its way; the operands that lie in shared memory are read when it ends."""

    type = types.SimpleNamespace(layout=None)

    def __init__(self, a, b, total):
        self.operands, self.total, self.value = (a, b), total, None
        self.shape = torch.Size((a.shape[0], b.shape[1]))
        for x in (a, b):
            assert not isinstance(x, Memory) or x.is_fenced(), "read before a fence"

    def end(self):
        a, b = (x.load(None) if isinstance(x, Memory) else x for x in self.operands)
        total = self.total.value if isinstance(self.total, Product) else self.total
        product = a.float() @ b.float()
        self.value = (product if total is None else total + product).as_subclass(Tile)


class Machine:
    """What a program sees of the GPU: the names that a kernel uses of the language, each as a function here."""

    def __init__(self, grid, num_warps):
        self.grid, self.warps = grid, num_warps

    def start(self, program):
        self.program, self.allocated, self.copies, self.groups, self.products = program, [], [], [], []

    def __getattr__(self, name):
        return getattr(gl, name)  # kinds of layouts

    constexpr, bfloat16, float32, int32, int64 = int, torch.bfloat16, torch.float32, torch.int32, torch.int64
    static_range = staticmethod(range)
    exp = staticmethod(torch.exp)

    @staticmethod
    def minimum(a, b):
        return a.clamp(max=b)

    @staticmethod
    def maximum(a, b):
        return a.clamp(min=b)

    @staticmethod
    def SliceLayout(dim, parent):
        return None

    @staticmethod
    def DotOperandLayout(operand_index, parent, k_width):
        return None

    @staticmethod
    def range(*bounds):
        return (tile(i) for i in range(*map(int, bounds)))

    def program_id(self, axis):
        return tile(self.program)

    def num_programs(self, axis):
        return tile(self.grid[0])

    def num_warps(self):
        return self.warps

    def arange(self, start, end, layout):
        return tile(torch.arange(start, end, dtype=torch.int32))

    def full(self, shape, value, dtype, layout):
        return torch.full(tuple(shape), value, dtype=dtype).as_subclass(Tile)

    def zeros(self, shape, dtype, layout):
        return self.full(shape, 0, dtype, layout)

    def where(self, condition, a, b):
        return torch.where(torch.as_tensor(condition), a, b).as_subclass(Tile)

    def sum(self, x, axis):
        return x.sum(axis)

    def convert_layout(self, x, layout):
        return x

    def load(self, pointer, mask=None, other=NAN):
        return pointer.load(mask, other)

    def store(self, pointer, value, mask=None):
        chosen, present = pointer.places(mask)
        pointer.numbers[chosen] = torch.broadcast_to(value, present.shape)[present].to(pointer.numbers.dtype)

    def inline_asm_elementwise(self, asm, constraints, args, dtype, is_pure, pack):
        if "mov.u32 $0, %ctaid.y; setp.ne.u32 p, $0, 0; vote.sync.ballot.b32 $0, p, 0xffffffff;" in asm:
            return tile(0)
        if "mul.wide.s32 $0, $1, $2; mad.wide.s32 $0, $3, $4, $0;" in asm:
            return tile(int(args[0]) * int(args[1]) + int(args[2]) * int(args[3]), torch.int64)
        if asm == "mov.f32 $0, $1;":
            return args[0]
        assert "add.rn.bf16x2 sum, $1, $2; max.bf16x2 $0, sum, $3;" in asm, asm
        return torch.maximum(args[0] + args[1], args[2])

    def allocate_shared_memory(self, dtype, shape, layout):
        memory = Memory.allocate(dtype, list(map(int, shape)), layout)
        self.allocated.append(memory)
        return memory

    def barrier(self):
        pass

    @staticmethod
    def reinterpret(memory, dtype, shape, layout):
        shape = list(map(int, shape))
        assert dtype == memory.numbers.dtype and math.prod(shape) <= memory.places.numel()
        return Memory(memory.numbers, memory.fenced, memory.places.min() + places_of(shape, layout), layout)

    def fence_async_shared(self):
        for memory in self.allocated:
            memory.fenced.fill_(True)

    def async_load(self, memory, pointer, mask=None):
        assert pointer.offset.shape == memory.shape
        self.copies.append((memory, pointer.load(mask, 0)))
        memory.store(torch.full(memory.shape, NAN, dtype=memory.numbers.dtype))

    def commit_group(self):
        self.groups.append(self.copies)
        self.copies = []

    def wait_group(self, pending):
        while len(self.groups) > pending:
            for memory, rows in self.groups.pop(0):
                memory.store(rows)

    @staticmethod
    def warpgroup_mma_init(x):
        return x

    def warpgroup_mma(self, a, b, acc, *, use_acc=True, is_async=False):
        product = Product(a, b, acc if use_acc else None)
        assert is_async and acc.shape == product.shape
        self.products.append(product)
        return product

    def warpgroup_mma_wait(self, pending, deps):
        while len(self.products) > pending:
            self.products.pop(0).end()
        ended = [x.value if isinstance(x, Product) and x.value is not None else x for x in deps]
        return ended[0] if len(ended) == 1 else tuple(ended)

    @staticmethod
    def mma_v2(a, b, acc):
        return acc + a.float() @ b.float()

    def bind(self, fn, known):
        """The Python function of a kernel, or of a function that it calls, with this machine for the language."""
        if fn not in known:
            names = dict(fn.__globals__)
            known[fn] = types.FunctionType(fn.__code__, names, fn.__name__, fn.__defaults__)
            for name, x in fn.__globals__.items():
                if isinstance(x, JITFunction):
                    names[name] = self.bind(x.fn, known)
                elif isinstance(x, gl.constexpr):
                    names[name] = x.value
                elif name in ("gl", "tl", "async_copy"):
                    names[name] = self
                elif name in vars(Machine) and (hasattr(hopper, name) or hasattr(gluon_names, name)):
                    names[name] = getattr(self, name)
            names["range"] = self.range
        return known[fn]


class Emulated:
    """A Gluon kernel, to be launched like one; calls ``launched`` first."""

    def __init__(self, kernel, launched):
        self.fn, self.arg_names, self.launched = kernel.fn, kernel.arg_names, launched

    def __getitem__(self, grid):
        def launch(*arguments, num_warps, maxnreg=None, **constants):
            self.launched()
            machine = Machine(grid, num_warps)
            kernel = machine.bind(self.fn, {})
            arguments = [Pointer.to(x) if isinstance(x, torch.Tensor) else x for x in arguments]
            for program in range(grid[0]):
                machine.start(program)
                kernel(*arguments, **constants)

        return launch
