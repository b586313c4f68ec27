"""Record calls of the ops, and replay their forward and backward passes in C++.

It needs a C++ compiler: the first call on a GPU begins to compile ``replay.cpp``, which is cached where Triton caches
kernels, and calls are ordinary ones until that is done, for about half a minute. Then the first call of a kind records
its allocations, kernel launches and ops of PyTorch. They are replayed for this and all later calls of the kind. The
environment variable ``HEADMIX_VISION_REPLAY=0``, set before the package is imported, keeps all calls ordinary ones.

Calls have the same kind if all that they may depend on agrees: the state of the thread (autocast, inference mode),
whether autograd records, settings, and for each tensor its dispatch keys, type, device, shape, strides, address modulo
16, and whether it is another argument, too. Compiled graphs call the ops, and these calls are replayed as eager ones
are. Graphs that launch the kernels themselves (``HEADMIX_VISION_COMPILED=inline``) have no such calls.

Calls that Python has to see stay ordinary ones: while a compiler or tracer runs them, under dispatch modes and
transformations of torch.func, of subclasses of tensors, in forward-mode differentiation, in the capture of a CUDA
graph, in a backward pass that autograd records, under launch hooks of Triton, and where compiled autograd is enabled.
So do calls that cannot be recorded. Compiled autograd that is enabled after a replayed forward pass raises an error.
"""

from __future__ import annotations

import copy
import struct
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache, partial
from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from headmix_vision.ops import dispatch
from headmix_vision.ops.hardware import NO_KERNELS
from headmix_vision.ops.replay_build import _begin, _ready, _tell, extension
from headmix_vision.ops.runtime import KernelFailed, _forget, _recording

_hooks: Any = None
if NO_KERNELS is None:
    from triton import knobs

    _hooks = knobs.runtime

Call = Callable[..., Any]
_PACKED = {"i8": "b", "i16": "h", "i32": "i", "i64": "q", "u8": "B", "u16": "H", "u32": "I", "u64": "Q",
           "fp32": "f", "fp64": "d"}  # fmt: skip
_SPECIAL = ("global_scratch_size", "profile_scratch_size", "launch_cooperative_grid", "launch_pdl")
_EMPTY = ("aten::empty", "aten::empty_like", "aten::empty_strided", "aten::new_empty", "aten::new_empty_strided")
_ABSOLUTE = ("aten::as_strided", "aten::as_strided_", "aten::set_")  # with an offset into a storage
_UNREPEATABLE = {torch.Tag.nondeterministic_seeded, torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}


class Tape(TorchDispatchMode):
    """Records what is launched, allocated and called of PyTorch while it is entered."""

    def __init__(self, tensors: Sequence[Tensor | None]) -> None:
        super().__init__()
        self.steps = extension().Tape(tensors)
        self.device = next((x.device for x in tensors if x is not None), None)

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if op in dispatch.RUNS:  # one of ours: record what it does
            with self:
                return dispatch.RUNS[op](*args, **kwargs)
        if op is torch.ops.aten.detach.default:  # by torch.empty_like
            return args[0]
        if op.namespace != "aten":  # such as a collective, which must not run twice
            raise NotImplementedError(f"{op} may have an effect, which must not happen twice")
        if _UNREPEATABLE & set(op.tags) or op._schema.name in _ABSOLUTE:
            raise NotImplementedError(f"{op} does not repeat itself")
        _recording.tape = None  # another op may launch kernels of ours
        try:
            out = op(*args, **kwargs)
        finally:
            _recording.tape = self
        outs = list(out) if isinstance(out, (tuple, list)) else [out]
        if self._is_here(args) and any(isinstance(x, Tensor) and x.device != self.device for x in outs):
            raise NotImplementedError(f"{op} copies to another device, where Python may read values")
        if op._schema.name in _EMPTY:
            self.steps.allocate(out)
        else:
            self.steps.op(op._schema.name, op._schema.overload_name, args, kwargs, outs)
        given = {x.untyped_storage()._cdata for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)}
        self.steps.own([x for x in outs if x.untyped_storage()._cdata not in given])  # some may be views, or not
        return out

    def _is_here(self, args: Sequence[Any]) -> bool:
        return any(isinstance(x, Tensor) and x.device == self.device for x in args)

    def launch(self, kernel: Any, grid: tuple[int, ...], arguments: Mapping[str, Any]) -> None:
        """Record the launch of a kernel that Triton has compiled, with its arguments by name."""
        about = kernel.metadata
        if about.num_ctas != 1 or any(getattr(kernel.run, name) for name in _SPECIAL):
            raise NotImplementedError(f"{about.name} needs scratch memory, or a special launch")
        packed = [
            arguments[name] if kind[0] == "*" else struct.pack(_PACKED[kind], arguments[name])
            for name, kind in kernel.src.signature.items()
            if kind != "constexpr"
        ]
        self.steps.launch(kernel, kernel.function, grid, 32 * about.num_warps, about.shared, packed)


def _tape(call: Call, args: Sequence[Any], tensors: Sequence[Tensor | None]) -> tuple[Tape, Any]:
    """Record a call that depends on tensors; also return its results."""
    included, excluded = torch._C._dispatch_tls_local_include_set(), torch._C._dispatch_tls_local_exclude_set()
    for name in ("AutogradFunctionality", "AutogradOther", "ADInplaceOrView"):  # they copy views
        excluded = excluded.add(getattr(torch._C.DispatchKey, name))
    caches_casts = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)  # a cast that was computed before would be a constant
    try:
        with torch.no_grad(), torch._C._ForceDispatchKeyGuard(included, excluded), Tape(tensors) as tape:
            _recording.tape = tape
            results = call(*args)
    finally:
        _recording.tape = None
        torch.set_autocast_cache_enabled(caches_casts)
    return tape, results


def _attempt(run: Call, plan: Call, *args: Any) -> Any:
    """Return the plan of a call, None for a kind whose calls stay ordinary ones, or NotImplemented for this call."""
    if not dispatch.is_eager():
        return NotImplemented
    try:
        return plan(*args)
    except torch.OutOfMemoryError:  # an ordinary call would meet it, too, and a later one of the kind may not
        raise
    except KernelFailed:  # of which the ordinary call warns
        return None
    except Exception as error:
        _tell(f"A call of {run.__module__}.{run.__name__} is not replayed: {error!r}"[:500])
        return None


def _is_watched() -> bool:
    """Return whether hooks of Triton, such as a profiler's, or compiled autograd have to see what a call does."""
    if _hooks is None:
        return True
    enter, leave = _hooks.launch_enter_hook, _hooks.launch_exit_hook
    if getattr(enter, "calls", enter) or getattr(leave, "calls", leave):
        return True
    compiled_autograd = sys.modules.get("torch._dynamo.compiled_autograd")
    return compiled_autograd is not None and compiled_autograd.compiled_autograd_enabled


def _calls(ordinary: Call, run: Call, plan: Call) -> Call:
    """Return a function that calls ``ordinary`` until the extension is there, then replays the plans of ``run``."""

    @lru_cache
    def calls() -> Call:
        if extension() is None:
            return ordinary
        made = extension().Calls(ordinary, partial(_attempt, run, plan))
        _forget.append(made.forget)
        return cast(Call, made)

    def call(*args: Any) -> Any:
        if not _ready.is_set():
            _begin(args)
            return ordinary(*args)
        return (ordinary if _is_watched() else calls())(*args)

    return call


def replayed_in_graphs(run: Call) -> Call:
    """Return a function that replays ``run``, as compiled graphs call it: without gradients, below autograd."""

    def plan_call(*args: Any) -> Any:
        tape, results = _tape(run, args, [x for x in args if isinstance(x, Tensor)])
        is_single = isinstance(results, Tensor)
        plan = extension().Plan(tape.steps, [results] if is_single else results, [])
        plan.is_single = is_single
        return plan

    return _calls(run, run, plan_call)


def replayed(ordinary: Call, run: Call, setup_context: Call, backward: Call) -> Call:
    """Return a function that replays ``ordinary``, the autograd function of the others, or calls it."""

    def plan_forward(*args: Any) -> Any:
        places = [i for i, x in enumerate(args) if isinstance(x, Tensor)]
        tape, results = _tape(run, args, [args[i] for i in places])
        context: Any = FunctionCtx()
        setup_context(context, args, results)
        saved, not_differentiable = (getattr(context, name, ()) for name in ("to_save", "non_differentiable"))
        context.to_save = context.non_differentiable = context.saved_for_forward = ()  # which the plan does not keep
        if any(isinstance(x, Tensor) for x in tree_leaves(vars(context))):
            raise NotImplementedError("its context holds a tensor")
        outputs = [results] if isinstance(results, Tensor) else results
        if not all(tape.steps.owns(x) for x in outputs):
            raise NotImplementedError("an output may be a view")
        differentiable = [all(x is not y for y in not_differentiable) for x in outputs]

        def gradients(*given: Tensor | None) -> list[Tensor | None]:
            """Compute the gradients of tensors from the differentiable outputs' gradients and saved tensors."""
            here, rest = copy.copy(context), iter(given)
            d_outputs = [next(rest) if is_differentiable else None for is_differentiable in differentiable]
            here.saved_tensors = tuple(rest)
            computed = backward(here, *d_outputs)
            return [computed[i] for i in places]

        def plan_backward(*given: Tensor | None) -> Any:
            tape, results = _tape(gradients, given, given)
            return extension().Plan(tape.steps, results, [])

        plan = extension().Plan(tape.steps, outputs, saved)
        plan.differentiable, plan.is_single = differentiable, isinstance(results, Tensor)
        plan.materialize = getattr(context, "materialize_grads", True)
        plan.backward = extension().Calls(gradients, partial(_attempt, run, plan_backward))
        return plan

    return _calls(ordinary, run, plan_forward)
