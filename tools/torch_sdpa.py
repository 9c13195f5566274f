#!/usr/bin/env python3
"""Paged attention on the CPU beside PyTorch's scaled_dot_product_attention, in one run.

    cargo bench -p mstar-kernels --features paged --no-run
    pip install torch && python3 tools/torch_sdpa.py [NAME...] [--repetitions 7]

Each repetition times both, one after the other and in turns, as the median of several calls with two threads;
what is printed is the ratio of the medians over the repetitions, with the least and the greatest ratio of one
repetition. Ours reads keys and values from shuffled pages of 16 tokens, torch's are contiguous.
"""

import argparse
import json
import statistics
import subprocess
import time

import torch
from torch.nn.functional import scaled_dot_product_attention

F32, BF16 = torch.float32, torch.bfloat16

# bench, name, (query heads, key heads, width, rows, queries, keys, causal), dtype
SHAPES = [
    ("prefill", "h8_d128_l1024_causal_f32", (8, 8, 128, 1, 1024, 1024, True), F32),
    ("prefill", "h8_d128_l1024_causal_bf16", (8, 8, 128, 1, 1024, 1024, True), BF16),
    ("prefill", "h8_d64_l2048_full_f32", (8, 8, 64, 1, 2048, 2048, False), F32),
    ("prefill", "h8_d64_l2048_full_bf16", (8, 8, 64, 1, 2048, 2048, False), BF16),
    ("prefill", "h32g8_d128_l512_causal_f32", (32, 8, 128, 1, 512, 512, True), F32),
    ("prefill", "h32g8_d128_l512_causal_bf16", (32, 8, 128, 1, 512, 512, True), BF16),
    ("decode", "h32g8_d128_kv8192_f32", (32, 8, 128, 1, 1, 8192, False), F32),
    ("decode", "h32g8_d128_kv8192_bf16", (32, 8, 128, 1, 1, 8192, False), BF16),
    ("decode", "h32g8_d128_kv65536_f32", (32, 8, 128, 1, 1, 65536, False), F32),
    ("decode", "h32g8_d128_kv65536_bf16", (32, 8, 128, 1, 1, 65536, False), BF16),
    ("decode", "h32g8_d128_bs16_kv2048_f32", (32, 8, 128, 16, 1, 2048, False), F32),
    ("decode", "h32g8_d128_bs16_kv2048_bf16", (32, 8, 128, 16, 1, 2048, False), BF16),
]


def binaries():
    """Where cargo put the benches, by name; builds them if need be."""
    command = ["cargo", "bench", "-p", "mstar-kernels", "--features", "paged", "--no-run", "--message-format", "json"]
    lines = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout.splitlines()
    artifacts = (json.loads(line) for line in lines if line.startswith("{"))
    return {a["target"]["name"]: a["executable"] for a in artifacts if a.get("executable")}


def torch_inputs(shape, dtype):
    heads, kv_heads, width, rows, queries, keys, _ = shape
    torch.manual_seed(1)
    sizes = [(rows, heads, queries), (rows, kv_heads, keys), (rows, kv_heads, keys)]
    return [torch.randn(*size, width).to(dtype) for size in sizes]


def torch_seconds(inputs, shape, calls):
    options = {"is_causal": shape[6], "enable_gqa": shape[0] != shape[1]}
    times = []
    with torch.inference_mode():
        scaled_dot_product_attention(*inputs, **options)
        for _ in range(calls):
            start = time.perf_counter()
            scaled_dot_product_attention(*inputs, **options)
            times.append(time.perf_counter() - start)
    return statistics.median(times)


def our_seconds(binary, name, calls):
    line = subprocess.run([binary, "--time", name, str(calls)], check=True, stdout=subprocess.PIPE, text=True)
    return float(line.stdout)


def amount(bench, shape, dtype):
    """Useful operations of a prefill, bytes of keys and values of a decode."""
    heads, kv_heads, width, rows, queries, keys, causal = shape
    if bench == "decode":
        return 2 * rows * keys * kv_heads * width * dtype.itemsize, "GB/s"
    pairs = queries * (queries + 1) // 2 if causal else queries * keys
    return 4 * pairs * rows * heads * width, "GFLOP/s"


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", help="shapes to run; all by default, or part of a name")
    parser.add_argument("--repetitions", type=int, default=7)
    parser.add_argument("--calls", type=int, default=9)
    arguments = parser.parse_args()
    torch.set_num_threads(2)
    found = binaries()
    print(f"torch {torch.__version__}, 2 threads, {arguments.repetitions} repetitions")
    for bench, name, shape, dtype in SHAPES:
        if arguments.names and not any(part in name for part in arguments.names):
            continue
        inputs = torch_inputs(shape, dtype)
        ours, theirs = [], []
        for _ in range(arguments.repetitions):
            ours.append(our_seconds(found[bench], name, arguments.calls))
            theirs.append(torch_seconds(inputs, shape, arguments.calls))
        work, unit = amount(bench, shape, dtype)
        rate = lambda times: work / statistics.median(times) / 1e9  # noqa: E731
        ratios = sorted(b / a for a, b in zip(ours, theirs))
        ratio = statistics.median(theirs) / statistics.median(ours)
        print(
            f"{name:32} ours {rate(ours):6.1f} torch {rate(theirs):6.1f} {unit:8}"
            f"{ratio:6.2f}x ({ratios[0]:.2f}-{ratios[-1]:.2f})",
            flush=True,
        )


if __name__ == "__main__":
    main()
