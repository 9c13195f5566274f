#!/usr/bin/env python3
"""Writes random parity cases: as many as asked for, the same ones for the same seed.

    python3 tools/make_cases.py DIR --count 200 --seed 1
    mstar parity DIR

Needs PyTorch and safetensors (`pip install torch safetensors`). Each case is one file of the recorded cases' format: `in.*`
inputs, `out.*` what PyTorch computes from them (the *source*, in the case's dtype as PyTorch's own operators do it), and
`ref.*` the same in float64 on the stored inputs, by loops that share no line with the source. `mstar parity` holds what it
computes against both; `tools/judge.py` does so without it.

Shapes are drawn to be awkward: rows without queries, without keys, of one key, at the edges of pages and of the kernels'
leaves; shared pages; unnamed pages and slots past a row's end that hold large numbers; head widths that no vector divides;
any ratio of query to key heads. `tools/cases/` has a file for each kind of case, and says what it draws.

A case depends on `--seed`, its op and its index alone, so `--op paged --first 17 --count 1` writes case 17 again. PyTorch's
operators may differ in the last bits from version to version and machine to machine; `source` names the version.

`--exact` takes as source float32 arithmetic that rounds nothing but its output. No kernel that multiplies in bfloat16 comes
closer than rounding its probabilities, so this asks bfloat16 cases for more than the format's sources do.
"""

import argparse
import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))

from cases import blocks, dense, draw, latent, paged, select  # noqa: E402

# Every kind of case, by its op: a function of a draw that gives a case.
OPS = {
    "paged": paged.paged,
    "cross": paged.cross,
    "mla": latent.mla,
    "dense": dense.dense,
    "flex": blocks.flex,
    "ring": blocks.ring,
    "dsa_attend": latent.dsa_attend,
    "dsa_select": select.dsa_select,
}


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=pathlib.Path, help="where to write; made when it is not there")
    parser.add_argument("--op", action="append", choices=OPS, help="which ops; may be given often; all unless said")
    parser.add_argument("--count", type=int, default=100, help="cases, shared by the ops in turn")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--first", type=int, default=0, help="index of the first case of each op")
    parser.add_argument("--dtype", choices=("f32", "bf16"), help="this one alone; both in turn unless said")
    parser.add_argument("--exact", action="store_true", help="a source that rounds nothing but its output")
    arguments = parser.parse_args()
    if arguments.count < 1 or arguments.first < 0:
        parser.error("--count must be at least 1 and --first at least 0")

    ops = arguments.op or list(OPS)
    for number in range(arguments.count):
        op, index = ops[number % len(ops)], arguments.first + number // len(ops)
        dice = draw.Draw(arguments.seed, op, index, arguments.dtype, arguments.exact)
        case = OPS[op](dice)
        path = arguments.folder / op / f"{index:04d}_{case.name}.safetensors"
        case.write(path)
    print(f"{arguments.count} cases of {', '.join(ops)} in {arguments.folder}")


if __name__ == "__main__":
    main()
