"""Time and memory per frame of Wan2.1-1.3B's shape in a stream: groups of 4 denoising steps, random bf16 weights."""

import argparse

import torch

from benchmarks.bench_wan import draw, make
from headmix_lab.measuring import add_options, environment, once_ms, open_device, results_path, write_csv


@torch.no_grad()
def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--groups", type=int, default=36, help="groups of 28 frames, at most 146")
    add_options(parser, tiny="sizes that try the script itself")
    arguments = parser.parse_args(argv)
    arguments.device, arguments.dtype, rows, state = open_device(arguments.device), torch.bfloat16, [], None
    x, t, text = draw((7, 2, 3) if arguments.tiny else (7, 30, 52), model := make("causal", arguments), arguments)
    for group in range(arguments.groups):
        ms = once_ms(lambda state=state: [model.stream(x, t, text, state=state)[0] for _ in range(4)], arguments.device)
        state = model.stream(x, 0 * t, text, state=state)[1]
        kept = sum(one.summaries.nbytes for layer in state.layers for one in layer) / 2**30
        peak = torch.cuda.max_memory_allocated() / 2**30  # 0 on a CPU
        rows.append({"frames": 28 * group + 25, "ms_per_frame": ms / 28, "state_gib": kept, "peak_gib": peak})
    print(*rows, sep="\n")
    write_csv(results_path(arguments, "wan_stream"), [row | environment(arguments.device) for row in rows])


if __name__ == "__main__":
    main()
