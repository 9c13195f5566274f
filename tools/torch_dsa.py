#!/usr/bin/env python3
"""The sparse attention indexer on the CPU beside PyTorch, in one run.

    cargo bench -p mstar-kernels --features dsa --no-run
    pip install torch && python3 tools/torch_dsa.py [NAME...] [--repetitions 7]

Scores of 64 heads x 128 over 32768 keys are held against nothing but the matrix product that they contain,
[64 * rows, 128] x [128, 32768] in the same type, into memory that is already there, in whichever of the two layouts
of its second operand is faster; ours also applies relu and head weights, and reads keys from shuffled pages of 64. The pick of 2048 of
32768 scores is held against torch.sort(stable=True), and against Rust's stable sort.

Each repetition times both, one after the other and in turns, as the median of several calls with two threads;
what is printed is the ratio of the medians over the repetitions, with the least and the greatest ratio of one
repetition.
"""

import argparse
import json
import statistics
import subprocess
import time

import torch

HEADS, WIDTH, KEYS, TOPK = 64, 128, 32768, 2048
F32, BF16 = torch.float32, torch.bfloat16


def binary():
    """Where cargo put the bench; builds it if need be."""
    command = ["cargo", "bench", "-p", "mstar-kernels", "--features", "dsa", "--bench", "dsa", "--no-run"]
    lines = subprocess.run(command + ["--message-format", "json"], check=True, stdout=subprocess.PIPE, text=True)
    artifacts = (json.loads(line) for line in lines.stdout.splitlines() if line.startswith("{"))
    return next(a["executable"] for a in artifacts if a.get("executable") and a["target"]["name"] == "dsa")


def timed(work, calls):
    work()
    times = []
    for _ in range(calls):
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def product(rows, dtype):
    """The matrix product by itself."""
    torch.manual_seed(1)
    q = torch.randn(rows * HEADS, WIDTH).to(dtype)
    keys = torch.randn(KEYS, WIDTH).to(dtype)
    out = torch.empty(rows * HEADS, KEYS, dtype=dtype)
    by_row, by_column = keys.t(), keys.t().contiguous()
    return lambda calls: min(timed(lambda: torch.mm(q, k, out=out), calls) for k in (by_row, by_column))


def normal(generator):
    """As benches/dsa.rs makes them, in kind."""
    return torch.randn(1, KEYS, generator=generator)


def sort(ties):
    scores = normal(torch.Generator().manual_seed(5))
    if ties:
        scores = (scores * 64).round().clamp(min=0) / 64
    return lambda calls: timed(lambda: torch.sort(scores, dim=-1, stable=True, descending=True), calls)


def ours(path, name):
    def seconds(calls):
        line = subprocess.run([path, "--time", name, str(calls)], check=True, stdout=subprocess.PIPE, text=True)
        return float(line.stdout)

    return seconds


def cases(path):
    """Name, ours, theirs, operations (None: a pick)."""
    for name, rows, dtype in [
        ("scores_bf16_r1", 1, BF16),
        ("scores_bf16_r4", 4, BF16),
        ("scores_bf16_r16", 16, BF16),
        ("scores_fp8_r1", 1, BF16),
        ("scores_f32_r1", 1, F32),
        ("scores_f32_r4", 4, F32),
    ]:
        yield name, ours(path, name), product(rows, dtype), 2 * rows * HEADS * WIDTH * KEYS
    for content in ["random", "relu"]:
        mine = ours(path, f"topk_{content}")
        yield f"topk_{content} / torch.sort", mine, sort(content == "relu"), None
        yield f"topk_{content} / Rust's sort", mine, ours(path, f"sort_{content}"), None


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", help="cases to run; all by default, or part of a name")
    parser.add_argument("--repetitions", type=int, default=7)
    parser.add_argument("--calls", type=int, default=15)
    arguments = parser.parse_args()
    torch.set_num_threads(2)
    path = binary()
    print(f"torch {torch.__version__}, 2 threads, {arguments.repetitions} repetitions")
    with torch.inference_mode():
        for name, mine, theirs, operations in cases(path):
            if arguments.names and not any(part in name for part in arguments.names):
                continue
            pairs = [(mine(arguments.calls), theirs(arguments.calls)) for _ in range(arguments.repetitions)]
            ratios = sorted(b / a for a, b in pairs)
            left, right = (statistics.median(column) for column in zip(*pairs))
            if operations:
                rates = f"ours {operations / left / 1e9:7.1f} torch {operations / right / 1e9:7.1f} GFLOP/s"
            else:
                rates = f"ours {left * 1e6:7.1f} other {right * 1e6:7.1f} us     "
            print(f"{name:28} {rates} {right / left:6.2f}x ({ratios[0]:.2f}-{ratios[-1]:.2f})", flush=True)


if __name__ == "__main__":
    main()
