#!/usr/bin/env python3
"""Dense and block-mask attention on the CPU beside PyTorch's, in one run.

    cargo bench -p mstar-kernels --features dense,flex --bench dense --no-run
    pip install torch && python3 tools/torch_flex.py [NAME...] [--repetitions 7]

Dense attention stands beside scaled_dot_product_attention, block-mask attention beside compiled flex_attention with the same
blocks and the same score mod. Each repetition times both, one after the other and in turns, as the median of several
calls with two threads; what is printed is the ratio of the medians over the repetitions, with the least and the
greatest ratio of one repetition. PyTorch attends a contiguous sequence whichever way ours lies.
"""

import argparse
import json
import statistics
import subprocess
import time

import torch
from torch.nn.attention.flex_attention import BlockMask, flex_attention
from torch.nn.functional import scaled_dot_product_attention

QUERIES, KEYS, BLOCK = 512, 3840, 128
SMALL, LARGE = (8, 8, 64), (16, 4, 128)

# name, (query heads, key heads, width), dtype, score mod; None: dense
SHAPES = [
    ("dense_f32", SMALL, torch.float32, None),
    ("dense_bf16", SMALL, torch.bfloat16, None),
    ("pages_f32", SMALL, torch.float32, None),
    ("pages_bf16", SMALL, torch.bfloat16, None),
    ("pages_gqa_d128_bf16", LARGE, torch.bfloat16, None),
    ("ring_f32", SMALL, torch.float32, "none"),
    ("ring_bf16", SMALL, torch.bfloat16, "none"),
    ("ring_gqa_d128_bf16", LARGE, torch.bfloat16, "none"),
    ("causal_f32", SMALL, torch.float32, "causal"),
    ("alibi_f32", SMALL, torch.float32, "alibi"),
    ("soft_cap_f32", SMALL, torch.float32, "soft_cap"),
]


def binary():
    """Where cargo put the bench; builds it if need be."""
    command = ["cargo", "bench", "-p", "mstar-kernels", "--features", "dense,flex", "--bench", "dense"]
    command += ["--no-run", "--message-format", "json"]
    lines = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout.splitlines()
    artifacts = (json.loads(line) for line in lines if line.startswith("{"))
    return next(a["executable"] for a in artifacts if a.get("executable"))


def score_mod(name, heads, offset):
    slopes = torch.tensor([0.5 ** (h + 1) for h in range(heads)])
    mods = {
        "none": None,
        "causal": lambda s, b, h, i, j: torch.where(j <= i + offset, s, -float("inf")),
        "alibi": lambda s, b, h, i, j: s + slopes[h] * (j - (i + offset)),
        "soft_cap": lambda s, b, h, i, j: 20.0 * torch.tanh(s / 20.0),
    }
    return mods[name]


def attend(shape, dtype, mod):
    """A call of PyTorch's, with what it needs."""
    heads, kv_heads, width = shape
    torch.manual_seed(1)
    normal = lambda heads, rows: torch.randn(1, heads, rows, width).to(dtype)  # noqa: E731
    gqa = heads != kv_heads
    if mod is None:
        q, k, v = normal(heads, QUERIES), normal(kv_heads, KEYS), normal(kv_heads, KEYS)
        return lambda: scaled_dot_product_attention(q, k, v, enable_gqa=gqa)
    visible = KEYS // BLOCK
    total = -(-visible // 3) * 4
    blocks = [block for block in range(total) if block % 4 != 2][:visible]
    rows = QUERIES // BLOCK
    count = torch.full((1, 1, rows), visible, dtype=torch.int32)
    order = torch.zeros(1, 1, rows, total, dtype=torch.int32)
    order[..., :visible] = torch.tensor(blocks, dtype=torch.int32)
    none = torch.zeros_like(count)
    mask = BlockMask.from_kv_blocks(
        none, torch.zeros_like(order), count, order, BLOCK_SIZE=BLOCK, seq_lengths=(QUERIES, total * BLOCK)
    )
    keys = total * BLOCK
    q, k, v = normal(heads, QUERIES), normal(kv_heads, keys), normal(kv_heads, keys)
    compiled = torch.compile(flex_attention)
    change = score_mod(mod, heads, keys - QUERIES)
    return lambda: compiled(q, k, v, score_mod=change, block_mask=mask, enable_gqa=gqa)


def their_seconds(call, calls):
    times = []
    with torch.inference_mode():
        call()
        for _ in range(calls):
            start = time.perf_counter()
            call()
            times.append(time.perf_counter() - start)
    return statistics.median(times)


def our_seconds(path, name, calls):
    line = subprocess.run([path, "--time", name, str(calls)], check=True, stdout=subprocess.PIPE, text=True)
    return float(line.stdout)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", help="shapes to run; all by default, or part of a name")
    parser.add_argument("--repetitions", type=int, default=7)
    parser.add_argument("--calls", type=int, default=5)
    arguments = parser.parse_args()
    torch.set_num_threads(2)
    path = binary()
    print(f"torch {torch.__version__}, 2 threads, {arguments.repetitions} repetitions")
    for name, shape, dtype, mod in SHAPES:
        if arguments.names and not any(part in name for part in arguments.names):
            continue
        call = attend(shape, dtype, mod)
        their_seconds(call, 1)
        ours, theirs = [], []
        for _ in range(arguments.repetitions):
            ours.append(our_seconds(path, name, arguments.calls))
            theirs.append(their_seconds(call, arguments.calls))
        flops = 4 * QUERIES * KEYS * shape[0] * shape[2]
        rate = lambda times: flops / statistics.median(times) / 1e9  # noqa: E731
        ratios = sorted(b / a for a, b in zip(ours, theirs))
        ratio = statistics.median(theirs) / statistics.median(ours)
        print(
            f"{name:22} ours {rate(ours):6.1f} torch {rate(theirs):6.1f} GFLOP/s"
            f"{ratio:7.2f}x ({ratios[0]:.2f}-{ratios[-1]:.2f})",
            flush=True,
        )


if __name__ == "__main__":
    main()
