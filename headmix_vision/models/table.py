"""Table of models in Markdown: `python -m headmix_vision.models.table [PATTERN ...]`."""

from collections.abc import Iterable, Iterator, Sequence

from headmix_vision.console import OneLineParser, one_line_errors
from headmix_vision.models.model_list import Listed, describe, find_names


def rows(models: Iterable[Listed]) -> Iterator[str]:
    """Make the lines of the table, header first; operations are of a forward pass, multiply and add as two."""
    yield "| model | parameters, M | GFLOPs | input |"
    yield "|---|---:|---:|---|"
    for model in models:
        size = " x ".join(map(str, model.input_size))
        yield f"| `{model.name}` | {model.parameters / 1e6:.2f} | {model.gflops} | {size} |"


def main(args: Sequence[str] | None = None) -> None:
    """Run the command line; wrong input ends the process with one line and exit status 2."""
    parser = OneLineParser(prog="python -m headmix_vision.models.table", description="Print models in Markdown.")
    parser.add_argument("patterns", nargs="*", metavar="PATTERN", help="names, with * and ?; they keep their order")
    options = parser.parse_args(args)
    with one_line_errors():
        names = dict.fromkeys(name for pattern in options.patterns or ["*"] for name in find_names([pattern]))
        for row in rows(describe(list(names))):
            print(row, flush=True)


if __name__ == "__main__":
    main()
