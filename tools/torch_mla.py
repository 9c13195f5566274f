#!/usr/bin/env python3
"""Latent attention on the CPU beside the matrix products that it contains, in PyTorch, in one run.

    cargo bench -p mstar-kernels --features dsa --no-run
    pip install torch && python3 tools/torch_mla.py [NAME...] [--repetitions 7]

For each shape three things are timed in turns with two threads: ours; the two matrix products alone,
[H, C + E] x [C + E, keys] and [H, keys] x [keys, C], on contiguous latents into memory that is already there, in
whichever layout of the second operand is faster and with no softmax between; and a large square product (4096) in the
same type, the fastest that PyTorch multiplies here. Ours reads shuffled pages of 64. Each figure is the median over the
repetitions of the median of several calls; the ratio is ours over the faster of the two, in brackets the least and the
greatest of one repetition.
"""

import argparse
import json
import statistics
import subprocess
import time

import torch

F32, BF16 = torch.float32, torch.bfloat16

# name, (heads, C, E, rows, keys that a row attends), dtype
SHAPES = [
    ("h16_c512e64_kv32768_bf16", (16, 512, 64, 1, 32768), BF16),
    ("h64_c512e64_kv32768_bf16", (64, 512, 64, 1, 32768), BF16),
    ("h128_c512e64_kv32768_bf16", (128, 512, 64, 1, 32768), BF16),
    ("h16_c512e0_kv32768_bf16", (16, 512, 0, 1, 32768), BF16),
    ("h16_bs16_kv2048_bf16", (16, 512, 64, 16, 2048), BF16),
    ("h16_c512e64_kv32768_f32", (16, 512, 64, 1, 32768), F32),
    ("h16_picks2048_of_32768_bf16", (16, 512, 64, 1, 2048), BF16),
    ("h64_picks2048_of_32768_bf16", (64, 512, 64, 1, 2048), BF16),
]


def binary():
    """Where cargo put the bench; builds it if need be."""
    command = ["cargo", "bench", "-p", "mstar-kernels", "--features", "dsa", "--bench", "mla", "--no-run"]
    lines = subprocess.run(command + ["--message-format", "json"], check=True, stdout=subprocess.PIPE, text=True)
    artifacts = (json.loads(line) for line in lines.stdout.splitlines() if line.startswith("{"))
    return next(a["executable"] for a in artifacts if a.get("executable") and a["target"]["name"] == "mla")


def timed(work, calls):
    work()
    times = []
    for _ in range(calls):
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def products(shape, dtype):
    """Seconds of scores and values as matrix products alone."""
    heads, lora, rope, rows, keys = shape
    torch.manual_seed(1)
    q = torch.randn(rows, heads, lora + rope).to(dtype)
    latent = torch.randn(rows, keys, lora + rope).to(dtype)
    weights = torch.rand(rows, heads, keys).to(dtype)
    scores = torch.empty(rows, heads, keys, dtype=dtype)
    o = torch.empty(rows, heads, lora, dtype=dtype)
    ckv = latent[..., :lora]
    by_row, by_column = latent.transpose(1, 2), latent.transpose(1, 2).contiguous()
    copied = ckv.contiguous()

    def seconds(calls):
        score = min(timed(lambda: torch.bmm(q, k, out=scores), calls) for k in (by_row, by_column))
        value = min(timed(lambda: torch.bmm(weights, v, out=o), calls) for v in (ckv, copied))
        return score + value

    return seconds


def square(dtype, side=4096):
    a, b = torch.randn(side, side).to(dtype), torch.randn(side, side).to(dtype)
    out = torch.empty(side, side, dtype=dtype)
    return 2 * side**3 / timed(lambda: torch.mm(a, b, out=out), 3)


def ours(path, name, calls):
    line = subprocess.run([path, "--time", name, str(calls)], check=True, stdout=subprocess.PIPE, text=True)
    return float(line.stdout)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", help="shapes to run; all by default, or part of a name")
    parser.add_argument("--repetitions", type=int, default=7)
    parser.add_argument("--calls", type=int, default=3, help="of PyTorch; of ours ten times as many")
    arguments = parser.parse_args()
    torch.set_num_threads(2)
    path = binary()
    print(f"torch {torch.__version__}, 2 threads, {arguments.repetitions} repetitions; GFLOP/s")
    with torch.inference_mode():
        for name, shape, dtype in SHAPES:
            if arguments.names and not any(part in name for part in arguments.names):
                continue
            heads, lora, rope, rows, keys = shape
            work = 2 * rows * keys * heads * (2 * lora + rope)
            alone = products(shape, dtype)
            runs = []
            for _ in range(arguments.repetitions):
                mine = work / ours(path, name, 10 * arguments.calls)
                runs.append((mine, work / alone(arguments.calls), square(dtype)))
            mine, same, large = (statistics.median(column) / 1e9 for column in zip(*runs))
            ratios = sorted(a / max(b, c) for a, b, c in runs)
            print(
                f"{name:30} ours {mine:6.1f} same shape {same:6.1f} square {large:6.1f}"
                f"{mine / max(same, large):6.2f}x ({ratios[0]:.2f}-{ratios[-1]:.2f})",
                flush=True,
            )


if __name__ == "__main__":
    main()
