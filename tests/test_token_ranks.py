"""Tokens of a sample on two and four processes: what they compute and learn is what one process does."""

import multiprocessing
import time
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing
from diffusers import ContextParallelConfig, SanaTransformer2DModel, WanTransformer3DModel
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode

from headmix_vision.errors import InputError
from headmix_vision.layers import ConvPositionEncoding, HeadMixAttention
from headmix_vision.layers.positions import rotary_tables
from headmix_vision.models import HeadMixDiT, HeadMixVideoDiT
from headmix_vision.models.convert import sana_to_mhla, wan_to_mhla
from headmix_vision.ops import TokenBlocks, TokenGrid, TokenRanks, mhla
from headmix_vision.ops.hardware import INTERPRETED
from headmix_vision.ops.token_ranks import SEQUENCE, even_axis

LIMIT_S = 400
DOUBLE = torch.float64


def random(*shape, seed=0):
    return torch.randn(*shape, dtype=DOUBLE, generator=torch.Generator().manual_seed(seed))


def errors(ours, exact):
    return max(((x.double() - y).norm() / y.norm().clamp(min=1e-30)).item() for x, y in zip(ours, exact, strict=True))


def gradients(call, leaves, d_out):
    out = call(*leaves)
    return out.detach(), *torch.autograd.grad(out, leaves, d_out.to(out.dtype))


def op(ranks, shape, block_grid, prefix=0, per_head=False, dtype=DOUBLE, axis=0, **options):
    ranks = replace(ranks, axis=axis)
    blocks = TokenBlocks.from_grid(shape, block_grid, prefix)
    B, H, D, Dv, M = 2, 3, 8, 5, blocks.num_blocks
    q, k, v, d_out = (random(B, blocks.num_tokens, H, d, seed=i) for i, d in enumerate((D, D, Dv, Dv)))
    mixing = random(*([H] if per_head else []), M, M, seed=5).abs()

    def of_rank(x):
        return ranks.split(x, blocks.grid).to(dtype)

    def leaves(*tensors):
        return [x.clone().requires_grad_() for x in tensors]

    plain = options | {"impl": "torch"}
    exact = gradients(lambda *x: mhla(*x, blocks, **plain), leaves(q, k, v, mixing), d_out)
    ours = gradients(
        lambda *x: mhla(*x, blocks.of_rank(ranks), **options),
        leaves(of_rank(q), of_rank(k), of_rank(v), mixing.to(dtype)),
        of_rank(d_out),
    )
    whole = [ranks.gather(x, blocks.grid) for x in ours[:4]]
    return errors([*whole, ours[4] * ranks.size], exact)


def layer(ranks, shape=(6, 5), rotary=False, axis=0, **options):
    ranks = replace(ranks, axis=axis)
    torch.manual_seed(0)
    whole = HeadMixAttention(24, 3, grid=shape, dtype=DOUBLE, **options)
    grid = whole.grid
    rotation = rotary_tables(8, shape, shape, 1.0, like=random(1)) if rotary else None
    x, d_out = random(2, grid.num_tokens, 24), random(2, grid.num_tokens, 24, seed=1)
    leaves = [x.requires_grad_(), *whole.parameters()]
    exact = gradients(lambda x, *_: whole(x, rotation=rotation), leaves, d_out)
    whole.context_parallel(ranks)
    if rotation is not None:
        rotation = tuple(ranks.split(table, TokenGrid(shape), dim=0) for table in rotation)
    out, d_x, *d_parameters = gradients(
        lambda x, *_: whole(ranks.split(x, grid), rotation=rotation), leaves, ranks.split(d_out, grid)
    )
    return errors([ranks.gather(out, grid), *(ranks.all_reduce(d) for d in (d_x, *d_parameters))], exact)


def sharded(whole):
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for block in whole.blocks:
        fully_shard(block, mesh=mesh)
    return fully_shard(whole, mesh=mesh)


def model(ranks, kind=HeadMixDiT, wrap=None, frame_times=False, checkpointing=False, compiled=False, axis=0, **options):
    torch.manual_seed(0)
    sizes = {"embed_dim": 24, "depth": 2, "num_heads": 3, "num_classes": 3, "class_dropout": 0.0, "in_channels": 2}
    whole = kind(**sizes, **options, dtype=DOUBLE)
    with torch.no_grad():
        for index, parameter in enumerate(whole.parameters()):
            if not parameter.any():
                parameter.copy_(0.1 * random(*parameter.shape, seed=index))
    whole.set_grad_checkpointing(checkpointing)
    x, y = random(2, 2, *whole.input_size), torch.tensor([0, 2])
    t = torch.tensor([10.0, 700.0])
    if frame_times:
        t = 1000 * torch.rand(2, x.shape[2], generator=torch.Generator().manual_seed(0))

    def step(call, scale=1.0):
        whole.zero_grad()
        out = call(x, t, y)
        (scale * out.square().mean()).backward()
        return [out.detach()]

    def learned():
        grads = [parameter.grad for parameter in whole.parameters()]
        return [x.full_tensor() if isinstance(x, DTensor) else x.clone() for x in grads]

    exact = step(whole) + learned()
    whole.context_parallel(dist.group.WORLD, axis)
    if compiled:
        for block in whole.blocks:
            block.compile(fullgraph=True, backend="aot_eager")
    if wrap is not None:
        return errors(step(wrap(whole), ranks.size) + learned(), exact)
    ours = step(whole)
    whole.ranks.sum_gradients(whole.parameters())
    return errors(ours + learned(), exact)


WAN = {
    "num_attention_heads": 4, "attention_head_dim": 12, "in_channels": 4, "out_channels": 4, "text_dim": 16,
    "ffn_dim": 32, "num_layers": 2, "rope_max_seq_len": 32, "eps": 1e-3,
}  # fmt: skip


def wan(ranks, layers=None, grid=(5, 4, 5), token_times=False):
    torch.manual_seed(0)
    whole = wan_to_mhla(WanTransformer3DModel(**WAN), (2, 2, 3), layers, "paper", True, token_grid=(5, 4, 5)).double()
    tokens = grid[0] * grid[1] * grid[2]
    x, text = random(2, 4, grid[0], 2 * grid[1], 2 * grid[2]), random(2, 7, 16, seed=1)
    times = 1000 * random(2, tokens).sigmoid() if token_times else torch.tensor([5.0, 900.0])

    def step():
        whole.zero_grad()
        out = whole(x, times, text, return_dict=False)[0]
        out.square().mean().backward()
        return [out.detach(), *(parameter.grad.clone() for parameter in whole.parameters())]

    exact = step()
    with pytest.MonkeyPatch.context() as patch:  # diffusers counts GPUs
        patch.setattr(torch.accelerator, "device_count", lambda: 1)
        whole.enable_parallelism(config=ContextParallelConfig(ulysses_degree=ranks.size))
        out, *grads = step()
    return errors([out, *map(ranks.all_reduce, grads)], exact)


def refusal(ranks, **options):
    try:
        return wan(ranks, **options)
    except InputError as error:
        return str(error)


class Sent(TorchDispatchMode):
    """Lists the numbers that each collective is given, by name."""

    def __init__(self):
        super().__init__()
        self.numbers = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "_c10d_functional" and "wait" not in func.__name__:
            name = func.__name__.split(".")[0].removesuffix("_coalesced")
            given = args[0] if isinstance(args[0], list) else args[:1]
            self.numbers.setdefault(name, []).append(sum(x.numel() for x in given))
        return func(*args, **(kwargs or {}))


def sent(ranks, rows):
    blocks = TokenBlocks.from_grid((rows, 2), (4, 1))
    tokens = ranks.local(blocks.grid).num_tokens
    q, k, v = (random(2, tokens, 3, d).requires_grad_() for d in (8, 8, 5))
    mixing = random(4, 4).abs().requires_grad_()
    with Sent() as forward:
        out = mhla(q, k, v, mixing, blocks.of_rank(ranks))
    with Sent() as backward:
        out.sum().backward()
    return forward.numbers, backward.numbers


KERNELS = {"dtype": torch.float32, "impl": "triton"}
CASES = {
    "op": (op, {"shape": (8, 3), "block_grid": (4, 2)}),
    "op, shared blocks": (op, {"shape": (7, 5), "block_grid": (3, 2), "prefix": 2, "per_head": True}),
    "op, one block": (op, {"shape": (9,), "block_grid": (1,), "normalizer": None, "feature_map": "elu1"}),
    "op, video": (op, {"shape": (5, 3, 2), "block_grid": (5, 2, 1), "prefix": 1}),
    "op, second axis": (op, {"shape": (3, 8), "block_grid": (2, 4), "prefix": 2, "per_head": True, "axis": 1}),
    "op, shared blocks of the last axis": (op, {"shape": (3, 2, 7), "block_grid": (2, 1, 3), "prefix": 1, "axis": 2}),
    "op, sequence": (op, {"shape": (5, 3, 3), "block_grid": (3, 2, 1), "prefix": 2, "axis": SEQUENCE}),
    "kernels": (op, {"shape": (4, 4), "block_grid": (4, 2), "normalizer": None, **KERNELS}),
    "kernels, shared blocks": (
        op,
        {"shape": (4, 5), "block_grid": (2, 3), "prefix": 2, "per_head": True, "axis": 1, **KERNELS},
    ),
    "kernels, sequence": (op, {"shape": (5, 3), "block_grid": (3, 2), "axis": SEQUENCE, **KERNELS}),
    "layer": (layer, {"block_grid": (3, 2), "cpe": True, "num_prefix_tokens": 2, "output_gate": True}),
    "layer, second axis": (
        layer,
        {"shape": (3, 8), "block_grid": (3, 2), "cpe": True, "num_prefix_tokens": 2, "rotary": True, "axis": 1},
    ),
    "layer, values convolved": (layer, {"block_grid": (3, 2), "lepe": 3, "num_prefix_tokens": 1, "input_norm": True}),
    "layer, rotary": (layer, {"block_grid": (3, 2), "rotary": True}),
    "layer, causal": (layer, {"block_grid": (3, 2), "rotary": True, "core_args": {"causal": "rows"}}),
    "layer, linear": (layer, {"core": "linear", "rotary": True, "qk_norm": True, "num_prefix_tokens": 1}),
    "image": (model, {"input_size": (10, 12), "block_grid": 2, "cpe": True}),
    "image, DistributedDataParallel": (model, {"input_size": 8, "block_grid": 2, "wrap": DistributedDataParallel}),
    "image, fully_shard": (model, {"input_size": 8, "block_grid": 2, "cpe": True, "wrap": sharded}),
    "video": (
        model,
        {"kind": HeadMixVideoDiT, "input_size": (5, 4, 6), "block_grid": (2, 2, 1), "cpe": "factorised",
         "positions": "rope", "frame_times": True, "output_gate": True, "checkpointing": True},
    ),
    "video, an axis that divides": (
        model,
        {"kind": HeadMixVideoDiT, "input_size": (3, 4, 8), "block_grid": (2, 2, 4), "cpe": True, "frame_times": True,
         "axis": None, "patch_size": 1},
    ),
    "video, compiled": (
        model,
        {"kind": HeadMixVideoDiT, "input_size": (5, 4, 8), "block_grid": (2, 2, 2), "cpe": True, "compiled": True},
    ),
    "wan": (wan, {}),
    "wan, softmax in a layer": (wan, {"layers": [1], "token_times": True}),
}  # fmt: skip


def runs(name, size):
    """Four processes need not do again what is slow and not of their number; kernels run where they are interpreted."""
    return (INTERPRETED or "kernels" not in name) and (size == 2 or name not in ("video, compiled", "kernels"))


def work(rank, size, folder):
    torch.set_num_threads(1)
    store = dist.FileStore(str(folder / "store"), size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
    ranks = TokenRanks.of(dist.group.WORLD)
    results = {"sent": [sent(ranks, rows) for rows in (8, 64)]}
    results["sent of a sequence"] = [sent(replace(ranks, axis=SEQUENCE), rows) for rows in (9, 63)]
    results["refusal"] = refusal(ranks, grid=(3, 3, 5))
    for name, (case, options) in CASES.items():
        if runs(name, size):
            results[name] = case(ranks, **options)
    torch.save(results, folder / f"{rank}.pt")
    dist.destroy_process_group()


@pytest.fixture(
    scope="module", params=[2, pytest.param(4, marks=pytest.mark.slow)], ids=lambda size: f"{size} processes"
)
def results(request, tmp_path_factory):
    """The result of each case in each process."""
    folder = tmp_path_factory.mktemp("ranks")
    multiprocessing.set_forkserver_preload(
        ["headmix_vision.models.convert_wan", "headmix_vision.models", "torch._dynamo"]
    )  # once for all
    context = torch.multiprocessing.start_processes(
        work, (request.param, folder), request.param, join=False, start_method="forkserver"
    )
    end = time.monotonic() + LIMIT_S
    try:
        while not context.join(1):
            assert time.monotonic() < end, f"no result after {LIMIT_S} s"
    finally:
        for process in context.processes:
            process.kill()
    return [torch.load(folder / f"{rank}.pt") for rank in range(request.param)]


@pytest.mark.parametrize("name", CASES)
def test_ranks_compute_and_learn_what_one_process_does(results, name):
    if not runs(name, len(results)):
        pytest.skip("runs elsewhere")
    tolerance = 3e-6 if "kernels" in name or "wan" in name else 1e-10  # diffusers norms tokens in float32
    assert max(result[name] for result in results) < tolerance


def test_what_ranks_send_does_not_depend_on_the_number_of_tokens(results):
    batch, heads, blocks, dim, value_dim = 2, 3, 4, 8, 5
    summaries = batch * heads * blocks * dim * (value_dim + 1) // len(results)
    name, mixing = "all_gather_into_tensor", blocks**2 // len(results)
    for result in results:
        assert result["sent"] == [({name: [summaries]}, {name: [summaries + mixing]})] * 2
        short, long = result["sent of a sequence"]
        assert short == long and short[0]["all_gather_into_tensor"][0] <= 2 * summaries


def test_tokens_that_do_not_divide_are_refused(results):
    for result in results:
        assert result["refusal"].startswith(
            f"45 tokens of a 3x3x5 grid are no multiple of {len(results)} ranks: choose"
        )


def test_plans_and_models_without_context_parallelism_are_refused():
    config = ContextParallelConfig(ulysses_degree=2)
    with pytest.raises(InputError, match="cp_plan does not apply"):
        wan_to_mhla(WanTransformer3DModel(**WAN), (1, 1, 1)).enable_parallelism(config=config, cp_plan={})
    sizes = {"num_attention_heads": 2, "attention_head_dim": 4, "num_layers": 1, "sample_size": 8}
    cross = {"num_cross_attention_heads": 2, "cross_attention_head_dim": 4, "cross_attention_dim": 8}
    sana = sana_to_mhla(SanaTransformer2DModel(**sizes, **cross, caption_channels=8))
    with pytest.raises(InputError, match="does not apply to Sana"):
        sana.enable_parallelism(config=config)
    with pytest.raises(InputError, match="not the sequence of tokens"):
        ConvPositionEncoding(8).of_rank(torch.zeros(1, 6, 8), TokenGrid((3, 4)), replace(TWO, axis=SEQUENCE))


TWO = TokenRanks("", 0, 2)


def test_fewer_rows_than_ranks_are_refused():
    layer = HeadMixAttention(8, 2, grid=(1, 4), block_grid=(1, 2))
    layer.context_parallel(TWO)
    with pytest.raises(InputError, match="1x4 grid cannot be spread over 2 ranks"):
        layer(torch.zeros(1, 4, 8))


def test_a_kernel_that_reaches_beyond_the_next_rank_is_refused():
    convolution = ConvPositionEncoding(8, kernel_size=5)
    with pytest.raises(InputError, match="one has 1 tokens along axis 0, the kernel reaches 2"):
        convolution.of_rank(torch.zeros(1, 8, 8), TokenGrid((3, 4)), TWO)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"core": "softmax"}, "SoftmaxCore needs all tokens"),
        ({"core": "hih"}, "HeadInHeadCore needs all tokens"),
        ({"head_mix": "mea"}, "no head mix, got ExplicitHeads"),
        ({"core_args": {"normalizer": "source_block"}}, "not 'source_block'"),
        ({"core_args": {"causal": True}}, "causal attention needs all tokens"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_layers_that_need_all_tokens_are_refused(options, reason):
    layer = HeadMixAttention(8, 2, **{"block_grid": (2, 2), **options})
    with pytest.raises(InputError, match=reason):
        layer.context_parallel(TWO)
    assert layer.ranks is None


@pytest.mark.parametrize(
    ("option", "reason"),
    [
        ({"normalizer": "source_block"}, "source_block"),
        ({"impl": "reference"}, "reference"),
        ({"impl": "triton_pairwise"}, "triton_pairwise"),
        ({"causal": True}, "causal attention needs all tokens"),
    ],
    ids=["source_block", "reference", "triton_pairwise", "causal"],
)
def test_the_op_refuses_what_needs_all_tokens(option, reason):
    blocks = TokenBlocks.from_grid((4, 2), (2, 2)).of_rank(TWO)
    q = torch.zeros(1, 4, 2, 8)
    with pytest.raises(InputError, match=reason):
        mhla(q, q, q, torch.ones(4, 4), blocks, **option)


@pytest.mark.parametrize(
    ("shape", "block_grid", "size", "axis"),
    [
        ((21, 30, 50), (3, 5, 10), 2, 2),
        ((21, 30, 50), (3, 5, 10), 3, 0),
        ((32, 32), (4, 4), 3, 0),
        ((5, 6), (1, 2), 2, 1),
    ],
)
def test_the_axis_that_gives_each_rank_as_many_tokens_and_whole_blocks(shape, block_grid, size, axis):
    assert even_axis(shape, block_grid, size) == axis


def test_an_axis_that_a_model_has_not_is_refused():
    with pytest.raises(InputError, match="axis must be"):
        HeadMixDiT(8, embed_dim=8, depth=1, num_heads=2).spread_tokens(None, axis=2)


def test_a_layer_takes_a_group_and_a_mesh():
    layer, x = HeadMixAttention(8, 2, grid=(4, 4), block_grid=(2, 2)), torch.randn(1, 16, 8)
    expected = layer(x)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        for group in (dist.group.WORLD, init_device_mesh("cpu", (1,))):
            layer.context_parallel(group)
            assert layer.ranks.size == 1
            torch.testing.assert_close(layer(x), expected)
    finally:
        dist.destroy_process_group()


def test_only_a_group_is_taken():
    for take in (TokenRanks.of, HeadMixAttention(8, 2).context_parallel):
        with pytest.raises(InputError, match="must be a process group or a device mesh, got 2"):
            take(2)
        with pytest.raises(InputError, match="this process, which is not a member of it"):
            take(dist.GroupMember.NON_GROUP_MEMBER)


def test_another_number_of_tokens_is_refused():
    grid = TokenGrid((4, 4))
    with pytest.raises(InputError, match="4x4 grid has 16 tokens, got 7"):
        TWO.split(torch.zeros(1, 7, 3), grid)
    with pytest.raises(InputError, match="2x4 grid has 8 tokens, got 7"):
        TWO.gather(torch.zeros(1, 7, 3), grid)
