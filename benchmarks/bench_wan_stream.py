"""Time and memory per frame of Wan2.1-1.3B's shape in a stream: groups of 4 denoising steps, random weights in bf16.

python -m benchmarks.bench_wan_stream                        # 1,005 frames at 480 x 832
python -m benchmarks.bench_wan_stream --device cpu --tiny    # tries the script itself where there is no GPU
"""

import argparse

import torch

from benchmarks.bench_wan import draw, make
from headmix_lab.measuring import add_options, environment, once_ms, open_device, results_path, write_csv
from headmix_lab.tables import print_table


@torch.no_grad()
def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--groups", type=int, default=36, help="groups of 28 frames, at most 146")
    add_options(parser, tiny="sizes that try the script itself")
    arguments = parser.parse_args(argv)
    arguments.device, arguments.dtype, rows, state = open_device(arguments.device), torch.bfloat16, [], None
    model = make("causal", arguments)
    x, t, text = draw((7, 2, 3) if arguments.tiny else (7, 30, 52), model, arguments)
    for group in range(arguments.groups):
        ms = once_ms(lambda state=state: [model.stream(x, t, text, state=state)[0] for _ in range(4)], arguments.device)
        state = model.stream(x, 0 * t, text, state=state)[1]
        kept = sum(one.summaries.nbytes for layer in state.layers for one in layer) / 2**30
        peak = torch.cuda.max_memory_allocated() / 2**30 if x.is_cuda else None
        rows.append({"frames": 28 * group + 25, "ms_per_frame": ms / 28, "state_gib": kept, "peak_gib": peak})
    print_table(rows, {"frames": "", "ms_per_frame": ".2f", "state_gib": ".3f", "peak_gib": ".2f"})
    write_csv(results_path(arguments, "wan_stream"), [row | environment(arguments.device) for row in rows])


if __name__ == "__main__":
    main()
