"""Check arguments, choose the implementation of an op once, and call it with little of PyTorch's dispatcher.

This file can be imported without Triton.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import lru_cache, partial, wraps
from numbers import Integral
from typing import Any, ParamSpec, TypeVar

import torch
import torch.fx
from torch import Tensor
from torch._library.triton import triton_ops_to_kernels
from torch._subclasses.functional_tensor import FunctionalTensor, FunctionalTensorMode

from headmix_vision.errors import InputError
from headmix_vision.ops.hardware import (
    INTERPRETED,
    NO_KERNELS,
    constant_in_graphs,
    give_compilers_the_assembler,
    gpu_behind,
    why_not_here,
)
from headmix_vision.ops.runtime import KernelFailed, _recording, forgotten_with_plans, recorded


def is_plain(x: Tensor) -> bool:
    """Return whether a tensor has values that Python may read, and that may be kept from call to call.

    A tensor of torch.compile, of another tracer or of a fake-tensor mode has none; under a transformation of torch.func
    it stands for many, or leaks when it is kept.
    """
    return not torch.compiler.is_compiling() and has_plain_type(x) and not is_transforming()


def values_are_at_hand(x: Tensor) -> bool:
    """Return whether reading values is free; an accelerator would have to wait."""
    return x.device.type == "cpu" and is_plain(x)


def has_plain_type(x: Tensor) -> bool:
    """Return whether the type of a tensor is not a subclass, which may have its own way with ops."""
    return type(x) in _PLAIN


def is_transforming() -> bool:
    """Return whether a transformation of torch.func runs, outside of compilers, which have their own ways with it."""
    return not torch.compiler.is_compiling() and torch._C._are_functorch_transforms_active()


def is_eager() -> bool:
    """Return whether neither a tracer nor a transformation nor a dispatch mode looks on."""
    if torch.compiler.is_compiling() or torch._C._is_tracing():
        return False
    return not torch._C._len_torch_dispatch_stack() and not torch._C._are_functorch_transforms_active()


def check_tensors(**tensors: object) -> None:
    """Raise InputError for a value that is not a tensor."""
    for name, value in tensors.items():
        if not isinstance(value, torch.Tensor):
            raise InputError(f"{name} must be a tensor, got {type(value).__name__}.")


def check_features(q: Tensor, k: Tensor, v: Tensor, dim: str) -> None:
    """Raise InputError unless queries, keys and values are of heads; ``dim`` is the name of the head dim of queries."""
    if q.ndim != 4:
        raise InputError(f"q must be [B, N, H, {dim}], got shape {tuple(q.shape)}.")
    if k.shape != q.shape:
        raise InputError(f"k must have the shape of q, {tuple(q.shape)}, got {tuple(k.shape)}.")
    if v.ndim != 4 or v.shape[:3] != q.shape[:3]:
        raise InputError(f"v must be [B, N, H, Dv] with q's {tuple(q.shape[:3])}, got shape {tuple(v.shape)}.")
    for name, x in (("q", q), ("v", v)):
        if x.shape[-1] < 1:
            raise InputError(f"{name} must have a head dim of at least 1, got shape {tuple(x.shape)}.")


def check_types(same_type: dict[str, torch.Tensor], any_type: dict[str, torch.Tensor]) -> None:
    """Raise InputError unless tensors have floating types, and the device of the first, some of them its type too."""
    first_name, first = next(iter(same_type.items()))
    for name, x in {**same_type, **any_type}.items():
        if not x.is_floating_point():
            raise InputError(f"{name} must have a floating type, got {x.dtype}.")
        if x.device != first.device:
            raise InputError(
                f"{name} is on {x.device}, {first_name} on {first.device}: all inputs must share one device."
            )
    for name, x in same_type.items():
        if x.dtype != first.dtype:
            raise InputError(
                f"{name} has type {x.dtype}, {first_name} {first.dtype}: {', '.join(same_type)} must share one type."
            )


def as_axes(name: str, numbers: object) -> tuple[int, ...]:
    """Return a tuple or list of one whole number for each axis as a tuple.

    Raises:
        InputError: if it is neither, or holds something else.
    """
    axes: tuple[Any, ...] = tuple(map(_as_int, numbers)) if isinstance(numbers, (tuple, list)) else (None,)
    if not all(_is_whole(n) for n in axes):
        raise InputError(f"{name} must be one whole number for each axis, got {numbers!r}.")
    return axes


def check_size(name: str, size: Any, least: int) -> None:
    """Raise InputError for a value that is not a whole number of at least ``least``."""
    if not _is_whole(size) or size < least:
        raise InputError(f"{name} must be a whole number of at least {least}, got {size!r}.")


def _as_int(number: object) -> object:
    """Return a whole number of another package, such as NumPy, as Python's."""
    if not isinstance(number, (int, torch.SymInt, torch.Tensor)) and isinstance(number, Integral):
        return int(number)
    return number


def _is_whole(number: object) -> bool:
    if isinstance(number, torch.Tensor):  # torch.jit.trace makes tensors of sizes
        return torch.jit.is_tracing()
    return isinstance(number, (int, torch.SymInt)) and not isinstance(number, bool)


MAX_DIM = 128
_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
P = ParamSpec("P")
R = TypeVar("R")
Call = Callable[..., Any]


def why_no_kernel_takes(x: Tensor, name: str) -> str | None:
    """Return why no kernel can run on a named argument of its device and type, or None."""
    if NO_KERNELS is not None:
        return f"{name} {NO_KERNELS}"
    if reason := why_not_here(x.device, name):
        return reason
    if is_transforming():
        return f"{name} is under a transformation of torch.func: the kernels have none"
    if x.dtype not in _DTYPES:
        return f"{name} has type {x.dtype}: the kernels take bfloat16, float16 and float32"
    return None


def why_not_triton(q: Tensor, v: Tensor, names: tuple[str, str] = ("q", "v")) -> str | None:
    """Return the reason, naming the argument, why no kernel can run on these inputs; None if one can."""
    if reason := why_no_kernel_takes(q, names[0]):
        return reason
    for name, x in zip(names, (q, v), strict=True):
        if x.shape[-1] > MAX_DIM:
            return f"{name} has head dim {x.shape[-1]}: the kernels take up to {MAX_DIM}"
    return None


def select(impl: str, on_gpu: bool, why_not: Callable[[], str | None]) -> str:
    """Choose the implementation of an op.

    Args:
        impl: name of an implementation: ``"reference"``, ``"torch"`` or one of kernels, which begins with ``"triton"``;
            or ``"auto"``: the kernels on a CUDA device wherever they can run, else torch, with a warning for each
            reason.
        on_gpu: whether the inputs are on a CUDA device.
        why_not: returns the reason why the kernels cannot run on the inputs, or None if they can.

    Returns:
        The name of an implementation. ``"auto"`` are the kernels too, but torch serves where one does not compile.

    Raises:
        InputError: if kernels are asked for by name and cannot run; with the reason.
    """
    if impl == "auto":
        reason = why_not() if on_gpu else None
        if reason:
            warn_once(f"{reason}; the slower PyTorch implementation runs instead (impl='auto').")
        return "auto" if on_gpu and reason is None else "torch"
    if impl.startswith("triton") and (reason := why_not()):
        raise InputError(f"{reason}; impl={impl!r} was asked for.")
    return impl


_MOST_PLANS = 512
_plans: dict[Any, Any] = forgotten_with_plans({})
_PLAIN = (Tensor, torch.nn.Parameter)
_OF_A_KIND = frozenset((*_PLAIN, type(None)))


class Bound:
    """An op or core whose settings are fixed. It is called with tensors alone, and plans once for each kind of them.

    Tensors have the same kind if their shape, type and device agree. A plan reads nothing else of them. Each call has
    its own plan under tracers, transformations of torch.func and dispatch modes, and for subclasses of tensors.

    Args:
        plan: takes the tensors of a call, or None in the place of one. It checks them, and returns the function that
            computes all calls with tensors of these kinds.
    """

    def __init__(self, plan: Callable[..., Call]) -> None:
        self.plan = plan
        self.made_by: tuple[Call, tuple[Any, ...], dict[str, Any]] | None = None

    def __call__(self, *tensors: Any) -> Any:
        return self.planned(*tensors)(*tensors)

    def planned(self, *tensors: Any) -> Call:
        """Return the function that computes a call with these tensors."""
        if not is_eager() or not _OF_A_KIND.issuperset(map(type, tensors)):
            proxy = next((x for x in tensors if isinstance(x, torch.fx.Proxy)), None)
            return self.plan(*tensors) if proxy is None else partial(_record, proxy.tracer, self)
        kind = (self, *[None if x is None else (x.shape, x.dtype, x.device) for x in tensors])
        run = _plans.get(kind)
        if run is None:
            run = self.plan(*tensors)
            if len(_plans) == _MOST_PLANS:
                _plans.clear()
            _plans[kind] = run
        planned: Call = run
        return planned

    def __fx_create_arg__(self, tracer: Any) -> torch.fx.Node:
        """Let a graph of torch.fx bind again before it calls."""
        assert self.made_by is not None
        bind, settings, options = self.made_by
        node: torch.fx.Node = tracer.create_node(
            "call_function", bind, tracer.create_arg(settings), tracer.create_arg(options)
        )
        return node


def call_bound(bound: Bound, *tensors: Any) -> Any:
    """Call a bound op or core. Graphs of torch.fx record this function."""
    return bound(*tensors)


def _record(tracer: Any, bound: Bound, *tensors: Any) -> Any:
    """Record a call of torch.fx without its inside: checks need real arguments."""
    return tracer.create_proxy("call_function", call_bound, (bound, *tensors), {})


def kept(make: Callable[P, R]) -> Callable[P, R]:
    """Call a function of settings once for equal settings of equal types, and keep its result.

    Nothing is kept under tracers, where sizes may be symbols, or for settings that cannot be hashed.
    """

    def make_new(*settings: P.args, **options: P.kwargs) -> R:
        made = make(*settings, **options)
        if isinstance(made, Bound):
            made.made_by = find, settings, options
        return made

    find_kept: Call = lru_cache(maxsize=_MOST_PLANS, typed=True)(make_new)

    @wraps(make)
    def find(*settings: P.args, **options: P.kwargs) -> R:
        if is_eager():
            try:
                found: R = find_kept(*settings, **options)
                return found
            except TypeError:  # settings that cannot be hashed
                pass
        return make_new(*settings, **options)

    return find


_warned: set[str] = set()


@constant_in_graphs
def warn_once(message: str) -> None:
    """Warn, unless this process has been told the same before."""
    if message not in _warned:
        _warned.add(message)
        warnings.warn(message, stacklevel=2)


COMPILED = "HEADMIX_VISION_COMPILED"
COMPILED_WAYS = ("opaque", "inline", "auto")


@constant_in_graphs
def way_in_graphs() -> str:
    """Return how compiled graphs hold the ops, from the environment variable ``HEADMIX_VISION_COMPILED``.

    ``opaque``, the default: graphs call the ops. ``inline``: graphs launch the portable kernels themselves, without
    Python, also from a package of AOTInductor. ``auto``: inline, except where MHLA has Gluon kernels for the GPU.

    Raises:
        InputError: if the variable has another value.
    """
    way = os.environ.get(COMPILED) or COMPILED_WAYS[0]
    if way not in COMPILED_WAYS:
        raise InputError(f"{COMPILED} must be one of {', '.join(COMPILED_WAYS)}, got {way!r}.")
    return way


def is_inline() -> bool:
    """Return whether the graph that is being traced shall launch the kernels itself."""
    return torch.compiler.is_compiling() and not INTERPRETED and way_in_graphs() != "opaque"


REPLAY = "HEADMIX_VISION_REPLAY"
RUNS: dict[Any, Call] = {}  # the function of each op


def are_calls_replayed() -> bool:
    """Return whether calls on a GPU may be replayed: False for ``HEADMIX_VISION_REPLAY=0`` and in Triton's interpreter.

    Raises:
        InputError: if the variable is neither 0 nor 1.
    """
    if (wanted := os.environ.get(REPLAY) or "1") not in ("0", "1"):
        raise InputError(f"{REPLAY} must be 0 or 1, got {wanted!r}.")
    return wanted == "1" and not INTERPRETED


class NotRecorded(Exception):
    """A graph cannot launch the kernels of a call itself."""


_LIBRARY = torch.library.Library("headmix_vision", "FRAGMENT")


def register(name: str, run: Call, fake: Call, record: Call | None = None, kernels: Sequence[Any] = ()) -> Any:
    """Register an op of ``torch.library``.

    Compilers replace it, after they have derived its gradients. If ``record`` can, it puts its launches into the graph.
    Else the graph calls the op ``<name>_kernels``, which runs the same function but has no gradients: a call of it
    costs less, and C++ may replay it; see ``replay.py``.

    Args:
        name: of the op.
        run: the function.
        fake: allocates the outputs.
        record: computes what ``run`` computes, of traced tensors; raises NotRecorded or KernelFailed if it cannot.
        kernels: that ``record`` may launch. Cached graphs depend on their source.
    """
    op: Any = torch.library.custom_op(f"headmix_vision::{name}", run, mutates_args=())
    op.register_fake(fake)
    RUNS[op._opoverload] = run
    schema = torch.library.infer_schema(run, mutates_args=())
    _LIBRARY.define(f"{name}_kernels{schema}", tags=(torch.Tag.pt2_compliant_tag,))
    in_graphs = run
    if are_calls_replayed():
        from headmix_vision.ops.replay import replayed_in_graphs

        in_graphs = replayed_in_graphs(run)
    _LIBRARY.impl(f"{name}_kernels", in_graphs, "CompositeExplicitAutograd")
    torch.library.register_fake(f"headmix_vision::{name}_kernels", fake, lib=_LIBRARY)
    inner = getattr(torch.ops.headmix_vision, f"{name}_kernels").default

    def replace(mode: Any, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        from torch._subclasses.fake_tensor import FakeTensor
        from torch.export._trace import custom_triton_ops_decomposition_disabled

        if not all(issubclass(kind, (FakeTensor, FunctionalTensor)) or kind in _PLAIN for kind in types):
            return NotImplemented
        if custom_triton_ops_decomposition_disabled():  # torch.export keeps ops
            return mode.__torch_dispatch__(op, types, args, kwargs)
        with mode:
            if record is not None:
                try:
                    return record(*args, **(kwargs or {}))
                except NotRecorded:
                    pass
            return inner(*args, **(kwargs or {}))

    op.register_torch_dispatch(FunctionalTensorMode, replace)
    if not INTERPRETED:
        triton_ops_to_kernels[f"headmix_vision::{name}"] = list(kernels)
    return op


@contextmanager
def record_launches(
    fallback: bool, kind: tuple[Hashable, ...], tables: Mapping[int, Tensor] | None = None
) -> Iterator[None]:
    """Record the launches of an op on a device, the second entry of ``kind``, into the graph that is being traced.

    Args:
        fallback: let the op take the place of kernels that do not compile.
        kind: what the kernels depend on.
        tables: traced tensors by the ``id`` of the index table that each stands for.

    Raises:
        NotRecorded: if the kernels do not compile.
    """
    device: Any = kind[1]
    if kind in FAILED:
        raise NotRecorded
    if gpu_behind(device).capability == (9, 0) and not INTERPRETED:
        give_compilers_the_assembler()
    try:
        with recorded(tables or {}, check=fallback):
            yield
    except KernelFailed as error:
        stand_in(error, fallback, *kind)
        raise NotRecorded from error


def without_dispatcher(op: Call, run: Call, *, differentiable: bool = False) -> Call:
    """Return a function that calls ``run`` for plain tensors, and else the op.

    Args:
        op: the op, which computes what ``run`` computes.
        run: takes the arguments of the op.
        differentiable: whether ``run`` has gradients; if not, the op refuses them while they are recorded.
    """

    def call(*args: Any) -> Any:
        past = (differentiable or not torch.is_grad_enabled()) and is_eager() and _are_plain(args)
        return (run if past else op)(*args)

    return call


_HOLD_NO_SUBCLASS = frozenset((*_OF_A_KIND, tuple, int, float, bool))  # tuples hold settings


def _are_plain(arguments: Sequence[Any]) -> bool:
    return _HOLD_NO_SUBCLASS.issuperset(map(type, arguments)) or all(map(_is_plain, arguments))


def _is_plain(argument: Any) -> bool:
    """Return whether an argument is or holds no tensor of a subclass; a list holds tensors alone, or none."""
    if isinstance(argument, Tensor):
        return has_plain_type(argument)
    if isinstance(argument, list) and argument and isinstance(argument[0], Tensor):
        return all(map(has_plain_type, argument))
    return True


# Takes a tensor out of a transformation of torch.func that has ended, as PyTorch does for all functions.
out_of_dead_transformation = torch._C._functorch.unwrap_if_dead


def apply_of(function: type[torch.autograd.Function]) -> Call:
    """Return ``function.apply`` for eager calls, without what PyTorch's own does in Python for torch.func.

    Tensors have to be taken out of dead transformations before; the function has no ``setup_context``.
    """
    apply: Call = super(torch.autograd.Function, function).apply  # type: ignore[misc]
    return apply


def as_function(run: Call, setup_context: Call, backward: Call, jvp: Call | None = None) -> Call:
    """Return a function of tensors with gradients, for eager calls, in which no transformation of torch.func is active.

    C++ may replay its calls; see ``replay.py``.

    Args:
        run, setup_context, backward: as they are registered for an op.
        jvp: the derivative in forward mode, as in ``torch.autograd.Function``.

    Raises:
        InputError: if the variable is neither 0 nor 1.
    """

    class Function(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *args: Any) -> Any:  # a setup_context of its own costs a binding of the arguments
            output = run(*args)
            setup_context(ctx, args, output)
            return output

        @staticmethod
        def backward(ctx: Any, *d_outputs: Any) -> Any:
            return backward(ctx, *d_outputs)

    Function.__name__ = run.__name__.strip("_")
    if jvp is not None:
        Function.jvp = staticmethod(jvp)  # type: ignore[method-assign]
    apply = apply_of(Function)

    def call(*args: Any) -> Any:
        return apply(*[out_of_dead_transformation(x) if isinstance(x, Tensor) else x for x in args])

    if not are_calls_replayed():
        return call
    from headmix_vision.ops.replay import replayed

    return replayed(call, run, setup_context, backward)


# Inputs for which kernels did not compile: the name of the op, and what its kernels depend on.
FAILED: set[tuple[Hashable, ...]] = set()
# What an op excludes while it runs, so that autograd does not record inside.
_AUTOGRAD = ("AutogradFunctionality", "AutogradCPU", "AutogradCUDA", "AutogradOther", "ADInplaceOrView")


def stand_in(error: KernelFailed, allowed: bool, *inputs: Hashable) -> None:
    """Warn once that PyTorch computes such inputs instead, or raise the error where kernels were asked for."""
    if not allowed or _recording.tape is not None:  # a record of it would launch kernels and run PyTorch
        raise error
    FAILED.add(inputs)
    warn_once(f"{error}; the slower PyTorch implementation runs instead (impl='auto')")


def gradients_of(run: Callable[..., Any], inputs: Sequence[Tensor], d_outputs: Sequence[Tensor]) -> list[Tensor]:
    """Compute the gradients of the inputs of a differentiable function, inside or outside of an op.

    Args:
        run: takes the inputs and returns one tensor, or as many as ``d_outputs``.
        inputs: tensors of floating types.
        d_outputs: gradients of the outputs.
    """
    if _recording.tape is not None:
        raise NotImplementedError("autograd runs inside")
    excluded = torch._C._dispatch_tls_local_exclude_set()
    for key in _AUTOGRAD:
        excluded = excluded.remove(getattr(torch._C.DispatchKey, key))
    included = torch._C._dispatch_tls_local_include_set()
    with torch._C._ForceDispatchKeyGuard(included, excluded), torch.enable_grad():
        leaves = [x.detach().requires_grad_() for x in inputs]
        outputs = run(*leaves)
        outputs = (outputs,) if isinstance(outputs, Tensor) else outputs
        return list(torch.autograd.grad(outputs, leaves, d_outputs, allow_unused=True, materialize_grads=True))


def are_traced_parts(tensors: Sequence[Tensor]) -> bool:
    """Return whether a tracer shows C tensors [B, N, H, D] as the parts into which one [B, N, C H D] was cut."""
    x = tensors[0]
    if has_plain_type(x):
        return False
    from torch.fx.experimental.symbolic_shapes import guard_or_false, sym_eq  # with SymPy, a second to import

    width, first = x.shape[2] * x.shape[3], x.storage_offset()
    layout = (*x.shape, x.stride(0), len(tensors) * width, x.shape[3], 1)
    return all(
        guard_or_false(sym_eq((*x.shape, *x.stride(), x.storage_offset()), (*layout, first + part * width)))
        for part, x in enumerate(tensors)
    )


def split_parts(packed: Tensor) -> list[Tensor]:
    """Cut [B, N, C, H, D] into C parts [B, N, H, D]."""
    B, N, C, H, D = packed.shape
    # Inductor leaves out a concatenation of these if it and the split name the dim by one number, not -1.
    return [x.view(B, N, H, D) for x in torch.split_with_sizes(packed.flatten(2), [H * D] * C, 2)]
