#!/usr/bin/env python3
"""The rows of `mstar bench` beside FlashInfer, FlashMLA and FlashAttention-3, on one card and in turns.

    pip install torch flashinfer-python fa3-fwd ninja      # and flash_mla, where it is at hand
    python3 tools/compare_peers.py --mstar target/release/mstar

Every kernel is timed as `mstar bench` times its own: by the device's clock, behind a cold second-level cache, over random
values in bf16, the middle of many launches; plans are made before. Each family of rows is timed in turns (mstar, the
peers, mstar again), so that both stand on the same machine in the same state. The ratio is the peer's time over
mstar's: above 1, mstar is faster. What cannot be run is told as SKIPPED, with the reason; only a missing `mstar` or torch is an error.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time

PAGE, LATENT_PAGE, D, TOPK = 16, 64, 128, 2048
SCALE = 0.0721688

DECODE = [
    (32, 8, rows, keys)
    for rows, keys in [(1, 8192), (1, 131072), (16, 1024), (16, 8192), (64, 1024), (64, 8192), (256, 1024), (256, 4096)]
]
DECODE += [(64, 8, rows, keys) for rows, keys in [(1, 8192), (64, 8192), (256, 4096)]]
DECODE += [(32, 32, rows, keys) for rows, keys in [(1, 8192), (64, 8192)]]
LATENT = [(16, 1, rows, keys) for rows, keys in [(1, 8192), (16, 4096), (64, 4096), (128, 4096), (64, 16384)]]
LATENT += [(64, 1, rows, keys) for rows, keys in [(64, 4096), (128, 4096), (64, 16384)]]
LATENT += [(128, 1, rows, keys) for rows, keys in [(16, 4096), (64, 4096), (128, 4096), (64, 16384)]]
LATENT += [(128, 2, rows, keys) for rows, keys in [(64, 4096), (128, 4096), (64, 16384)]]
TOPK_ROWS = [(1, 65536), (16, 32768), (64, 32768), (64, 8192)]
SPARSE = [(heads, rows) for heads in (16, 64, 128) for rows in (1, 64, 1024, 4096)]
# Head width, heads, rows, tokens of each, whether a query sees no later key.
DENSE = [
    (width, 2048 // width, rows, 16384 // rows, causal)
    for width in (64, 128, 256)
    for rows in (8, 2, 1)
    for causal in (False, True)
]


class Skipped(Exception):
    """A row that cannot be run, and why."""


def one_line(error):
    text = " ".join(str(error).split()) or type(error).__name__
    return text[:120]


class Clock:
    """Launches timed by the device, behind a cache that holds nothing of theirs."""

    def __init__(self, torch):
        self.torch = torch
        self.flush = torch.empty(512 << 20, dtype=torch.uint8, device="cuda")

    def microseconds(self, work, least=20, seconds=0.25):
        for _ in range(3):
            work()
        self.torch.cuda.synchronize()
        times, started = [], time.monotonic()
        while len(times) < least or time.monotonic() - started < seconds:
            begin, end = (self.torch.cuda.Event(enable_timing=True) for _ in range(2))
            # Longer than the host takes to put the launches in.
            self.flush.zero_()
            begin.record()
            work()
            end.record()
            end.synchronize()
            times.append(begin.elapsed_time(end) * 1e3)
        return statistics.median(times)


def uniform(torch, *shape):
    return torch.empty(*shape, dtype=torch.bfloat16, device="cuda").uniform_(-1, 1)


def numbers(torch, values):
    return torch.tensor(values, dtype=torch.int32, device="cuda")


def pages_of(torch, rows, keys, page):
    """Page starts, shuffled page ids, and the tokens of the last page."""
    each = -(-keys // page)
    ids = torch.randperm(rows * each, device="cuda").to(torch.int32)
    return numbers(torch, [row * each for row in range(rows + 1)]), ids, (keys - 1) % page + 1


def scratch(torch):
    return torch.zeros(512 << 20, dtype=torch.uint8, device="cuda")


def decode_flashinfer(torch, tensor_cores, h, g, rows, keys):
    import flashinfer

    indptr, ids, last = pages_of(torch, rows, keys, PAGE)
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(scratch(torch), "NHD", use_tensor_cores=tensor_cores)
    last = numbers(torch, [last] * rows)
    kinds = {"q_data_type": torch.bfloat16, "kv_data_type": torch.bfloat16}
    wrapper.plan(indptr, ids, last, h, g, D, PAGE, **kinds)
    q = uniform(torch, rows, h, D)
    pool = [uniform(torch, len(ids), PAGE, g, D) for _ in range(2)]
    out = torch.empty_like(q)
    return lambda: wrapper.run(q, tuple(pool), out=out)


def latent_flashinfer(torch, h, queries, rows, keys):
    from flashinfer.mla import BatchMLAPagedAttentionWrapper

    indptr, ids, _ = pages_of(torch, rows, keys, LATENT_PAGE)
    wrapper = BatchMLAPagedAttentionWrapper(scratch(torch), backend="fa3")
    starts = numbers(torch, [row * queries for row in range(rows + 1)])
    kinds = (torch.bfloat16, torch.bfloat16)
    wrapper.plan(starts, indptr, ids, numbers(torch, [keys] * rows), h, 512, 64, LATENT_PAGE, True, SCALE, *kinds)
    q, q_pe = uniform(torch, rows * queries, h, 512), uniform(torch, rows * queries, h, 64)
    latents, ropes = uniform(torch, len(ids), LATENT_PAGE, 512), uniform(torch, len(ids), LATENT_PAGE, 64)
    out = torch.empty_like(q)
    return lambda: wrapper.run(q, q_pe, latents, ropes, out=out)


def latent_flashmla(torch, h, queries, rows, keys):
    import flash_mla

    each = -(-keys // LATENT_PAGE)
    table = torch.randperm(rows * each, device="cuda").to(torch.int32).view(rows, each)
    lengths = numbers(torch, [keys] * rows)
    try:
        tiles, splits = flash_mla.get_mla_metadata(lengths, h * queries, 1)
    except TypeError:
        # Later versions make it at the first call.
        tiles, splits = flash_mla.get_mla_metadata()
    q, pool = uniform(torch, rows, queries, h, 576), uniform(torch, rows * each, LATENT_PAGE, 1, 576)
    attend = flash_mla.flash_mla_with_kvcache
    return lambda: attend(q, pool, table, lengths, 512, tiles, splits, softmax_scale=SCALE, causal=True)


def topk_flashinfer(torch, deterministic, rows, keys):
    import flashinfer

    scores = torch.rand(rows, keys, dtype=torch.float32, device="cuda")
    if not deterministic:
        return lambda: flashinfer.top_k(scores, TOPK)
    return lambda: flashinfer.top_k(scores, TOPK, deterministic=True)


def sparse_flashmla(torch, heads, rows):
    import flash_mla

    if heads < 64:
        raise Skipped(f"takes 64 heads or more, not {heads}")
    requests = rows if rows <= 64 else 1
    keys = 32768 * requests
    q, latents = uniform(torch, rows, heads, 576), uniform(torch, keys, 1, 576)
    step = 32768 // TOPK
    picks = torch.arange(TOPK, device="cuda") * step + torch.randint(step, (rows, TOPK), device="cuda")
    picks += torch.arange(rows, device="cuda")[:, None] % requests * 32768
    picks = picks.to(torch.int32).view(rows, 1, TOPK)
    return lambda: flash_mla.flash_mla_sparse_fwd(q, latents, picks, SCALE)


def dense_flash(torch, width, heads, rows, tokens, causal):
    from fa3_fwd_interface import flash_attn_varlen_func

    q, k, v = (uniform(torch, rows * tokens, heads, width) for _ in range(3))
    starts = numbers(torch, [row * tokens for row in range(rows + 1)])
    return lambda: flash_attn_varlen_func(q, k, v, starts, starts, tokens, tokens, causal=causal)


def dense_name(width, heads, rows, tokens, causal):
    many = f"{rows} x " if rows > 1 else ""
    wide = "" if width == 128 else f", d{width}"
    return f"dense {many}{tokens} of {tokens}{wide}, {'causal' if causal else 'fresh'}, bf16"


def families():
    """Names of mstar's rows (a sum of signed ones is what stands for a row), what they do, and the peers of each."""
    decode = [
        (
            [(f"decode {rows} x {keys}, {h}/{g}, bf16", 1)],
            {
                "FlashInfer": lambda torch, row=(h, g, rows, keys): decode_flashinfer(torch, True, *row),
                "FlashInfer, CUDA cores": lambda torch, row=(h, g, rows, keys): decode_flashinfer(torch, False, *row),
            },
        )
        for h, g, rows, keys in DECODE
    ]
    latent = []
    for h, queries, rows, keys in LATENT:
        of = f"{keys}" if queries == 1 else f"{queries} of {keys}"
        peers = {
            "FlashInfer fa3": lambda torch, row=(h, queries, rows, keys): latent_flashinfer(torch, *row),
            "FlashMLA": lambda torch, row=(h, queries, rows, keys): latent_flashmla(torch, *row),
        }
        latent.append(([(f"mla {rows} x {of}, {h} heads, bf16", 1)], peers))
    topk = [
        (
            [(f"topk {rows} x {TOPK} of {keys}", 1)],
            {
                "flashinfer.top_k": lambda torch, row=(rows, keys): topk_flashinfer(torch, False, *row),
                "the same, deterministic": lambda torch, row=(rows, keys): topk_flashinfer(torch, True, *row),
            },
        )
        for rows, keys in TOPK_ROWS
    ]
    sparse = [
        (
            [(f"sparse {rows}{'' if rows <= 64 else 'q'} x 2048 of 32768, {heads} h", 1)],
            {"FlashMLA": lambda torch, row=(heads, rows): sparse_flashmla(torch, *row)},
        )
        for heads, rows in SPARSE
    ]
    dense = [
        (
            [(dense_name(*row), 1)],
            {"FlashAttention-3": lambda torch, row=row: dense_flash(torch, *row)},
        )
        for row in DENSE
    ]
    return {"decode": decode, "mla": latent, "topk": topk, "sparse": sparse, "dense": dense}


# What is compiled before anything is timed: one process each, side by side.
WARM = {
    "decode": lambda torch: decode_flashinfer(torch, True, 32, 8, 2, 64)(),
    "decode on CUDA cores": lambda torch: decode_flashinfer(torch, False, 32, 8, 2, 64)(),
    "mla": lambda torch: latent_flashinfer(torch, 16, 1, 2, 128)(),
    "topk": lambda torch: topk_flashinfer(torch, False, 2, 8192)(),
}
WARM_OF = {"decode": ["decode", "decode on CUDA cores"], "mla": ["mla"], "topk": ["topk"], "sparse": [], "dense": []}


def warm(kinds, seconds):
    """Has peers compile what they compile at first use."""
    names = [name for kind in kinds for name in WARM_OF[kind]]
    files = {name: tempfile.TemporaryFile() for name in names}
    command = [sys.executable, os.path.abspath(__file__), "--warm"]
    running = {
        name: subprocess.Popen(command + [name], stdout=files[name], stderr=subprocess.STDOUT) for name in names
    }
    until, failed = time.monotonic() + seconds, {}
    for name, process in running.items():
        try:
            code = process.wait(max(0.1, until - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            failed[name] = f"not compiled within {seconds} s"
            continue
        if code != 0:
            files[name].seek(0)
            lines = files[name].read().decode(errors="replace").strip().splitlines()
            failed[name] = one_line(lines[-1] if lines else f"exit code {code}")
    return failed


def run_mstar(args, rows):
    """What `mstar bench` measures of each row; those that it does not have are left out."""
    rows = list(rows)
    while rows:
        with tempfile.TemporaryDirectory() as folder:
            saved = os.path.join(folder, "bench.json")
            command = [args.mstar, "bench", "--device", args.device, "--json", saved]
            for name in rows:
                command += ["--rows", name]
            try:
                done = subprocess.run(command, capture_output=True, text=True, timeout=args.seconds)
            except subprocess.TimeoutExpired:
                raise Skipped("mstar bench took too long") from None
            if done.returncode == 0:
                with open(saved) as file:
                    return {line["name"]: line for line in json.load(file)["lines"]}
        text = " ".join(done.stderr.split())
        lacking = [name for name in rows if f"--rows {name}: no row is called so" in text]
        if not lacking:
            raise Skipped(one_line(f"mstar bench: {text}"))
        rows.remove(lacking[0])
    return {}


def compare(args, torch, clock, rows, failed, until):
    """Times a family in turns; yields a record a row."""
    wanted = sorted({name for names, _ in rows for name, _ in names})
    try:
        first = run_mstar(args, wanted)
    except Skipped as why:
        return [{"row": names[0][0], "skipped": str(why)} for names, _ in rows]
    peers = []
    for names, kinds in rows:
        times = {}
        if any(name not in first for name, _ in names):
            kinds = {}
        for name, make in kinds.items():
            if time.monotonic() > until:
                times[name] = "time is up"
                continue
            broken = failed.get(name)
            if broken:
                times[name] = broken
                continue
            try:
                times[name] = clock.microseconds(make(torch))
            except Skipped as why:
                times[name] = str(why)
            except ImportError as why:
                times[name] = failed[name] = one_line(why)
            except Exception as why:  # a peer's own, whatever it is
                times[name] = one_line(why)
                if "illegal memory access" in str(why):
                    failed.update({other: "the device is lost" for other in kinds})
            torch.cuda.empty_cache()
        peers.append(times)
    try:
        again = first if time.monotonic() > until else run_mstar(args, list(first))
    except Skipped:
        again = first
    records = []
    for (names, _), times in zip(rows, peers):
        if any(name not in first or name not in again for name, _ in names):
            records.append({"row": names[0][0], "skipped": "this mstar has no such row"})
            continue
        runs = [sum(sign * run[name]["median_us"] for name, sign in names) for run in (first, again)]
        line = first[names[0][0]]
        record = {"row": names[0][0], "mstar_us": statistics.mean(runs), "turns_us": runs, "peers": times}
        record["gb_per_s"], record["percent_of_limit"] = line["gb_per_s"], line["percent_of_roofline"]
        if len(names) > 1:
            record["row"] = f"{names[0][0]} less {names[1][0].split()[0]}"
            record["percent_of_limit"] = None
        records.append(record)
    return records


def show(record):
    if "skipped" in record:
        return f"{record['row']:<48} SKIPPED: {record['skipped']}"
    known = {name: us for name, us in record["peers"].items() if not isinstance(us, str)}
    share = record["percent_of_limit"]
    text = f"{record['row']:<48}{record['mstar_us']:>9.1f}{f'{share:.0f}' if share else '-':>6}"
    if not known:
        why = "; ".join(f"{name}: {why}" for name, why in record["peers"].items())
        return f"{text}  SKIPPED: {why}"
    best = min(known, key=known.get)
    return f"{text}{known[best]:>10.1f}{known[best] / max(record['mstar_us'], 1e-3):>7.2f}  {best}"


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("families", nargs="*", metavar="FAMILY", help="decode, mla, topk, sparse, dense; all when none is named")
    parser.add_argument("--mstar", default="target/release/mstar", help="the program")
    parser.add_argument("--device", default="cuda:0", help="as mstar calls it; torch uses its first card")
    parser.add_argument("--seconds", type=float, default=600, help="start nothing new after so long")
    parser.add_argument("--warm-seconds", type=float, default=300, help="most time that peers may compile for")
    parser.add_argument("--json", help="save everything that was measured")
    parser.add_argument("--warm", help=argparse.SUPPRESS)
    args = parser.parse_args()
    try:
        import torch
    except ImportError as why:
        sys.exit(f"torch is needed: {why}")
    if not torch.cuda.is_available():
        sys.exit("torch sees no card")
    if args.warm:
        WARM[args.warm](torch)
        torch.cuda.synchronize()
        return
    every = families()
    unknown = [name for name in args.families if name not in every]
    if unknown:
        sys.exit(f"no family is called {unknown[0]}; there are {', '.join(every)}")
    if not os.access(args.mstar, os.X_OK):
        sys.exit(f"{args.mstar} is not there; build it, or name it with --mstar")
    started = time.monotonic()
    kinds = args.families or list(every)
    not_warm = warm(kinds, args.warm_seconds)
    for name, why in not_warm.items():
        print(f"compiling {name}: {why}", flush=True)
    broken = {
        "FlashInfer": not_warm.get("decode"),
        "FlashInfer, CUDA cores": not_warm.get("decode on CUDA cores"),
        "FlashInfer fa3": not_warm.get("mla"),
        "flashinfer.top_k": not_warm.get("topk"),
        "the same, deterministic": not_warm.get("topk"),
    }
    broken = {name: why for name, why in broken.items() if why}
    versions = [f"torch {torch.__version__}"]
    for package in ("flashinfer", "flash_mla"):
        try:
            module = __import__(package)
            versions.append(f"{package} {getattr(module, '__version__', '')}".strip())
        except Exception as why:
            versions.append(f"{package} SKIPPED ({one_line(why)})")
    print(f"{torch.cuda.get_device_name()}, {', '.join(versions)}; peers ready after {time.monotonic() - started:.0f} s")
    print(f"\n{'row':<48}{'mstar us':>9}{'%lim':>6}{'peer us':>10}{'ratio':>7}  the fastest peer", flush=True)
    clock, records = Clock(torch), []
    for kind in kinds:
        for record in compare(args, torch, clock, every[kind], broken, started + args.seconds):
            records.append(record)
            print(show(record), flush=True)
    if args.json:
        with open(args.json, "w") as file:
            json.dump({"device": torch.cuda.get_device_name(), "versions": versions, "rows": records}, file, indent=1)


if __name__ == "__main__":
    main()
