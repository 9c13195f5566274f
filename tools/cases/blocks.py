"""`flex` and `ring`: queries over blocks of keys, written or not, and over a cache that is overwritten in place."""

import torch

from . import attention
from .draw import TOLERANCES, UNWRITTEN, Case
from .paged import MOST_KV, MOST_Q, RATIOS, WIDTHS

BLOCKS = [128, 128, 128, 64, 32, 16, 100, 5]
MODS = ["none", "causal", "alibi", "rel_bias", "soft_cap"]
# Tokens of a block of a ring.
BLOCK = 128


def flex(dice):
    """Batches over written blocks, of which the last may be short, under every score mod; at times nothing is written."""
    b, d, g = dice.choice([1, 1, 2, 3]), dice.choice(WIDTHS), dice.choice([1, 1, 2, 2, 3])
    h = g * dice.choice(RATIOS)
    m = max(1, min(MOST_KV // (2 * b * g * d), dice.choice([1, 127, 128, 129, 256, 640, dice.randint(1, 700)])))
    l = max(1, min(MOST_Q // (b * h * d), dice.choice([1, 3, 64, 127, 128, 129, dice.randint(1, 200)])))
    size = dice.choice(BLOCKS)
    density = dice.choice([0.0, 0.3, 0.5, 0.8, 1.0])
    blocks = [dice.often(density) for _ in range(-(-m // size))]
    written = torch.tensor(blocks).repeat_interleave(size)[:m]

    q = dice.normal(b, h, l, d, std=dice.choice([1.0, 1.0, 3.0]))
    k, v = dice.normal(b, g, m, d), dice.normal(b, g, m, d)
    v += dice.choice([0.0, 0.5])
    k[:, :, ~written] = UNWRITTEN
    v[:, :, ~written] = UNWRITTEN
    scale = d**-0.5 if dice.often(0.8) else round(dice.uniform(0.02, 0.3), 4)
    mod, offset = dice.choice(MODS), dice.choice([0, 0, m - l, dice.randint(-40, m)])
    distance = torch.arange(m) - (torch.arange(l) + offset)[:, None]
    params = {"sm_scale": scale, "block_size": size, "score_mod": mod, "q_offset": offset}
    seen, options, tensors = written.expand(l, m), {}, {}
    if mod == "causal":
        seen = seen & (distance <= 0)
    elif mod == "alibi":
        # Of "Train Short, Test Long", for any number of heads; numbers of float32.
        options["alibi"], options["distance"] = 2.0 ** (-8.0 * torch.arange(1, h + 1) / h), distance
        params["alibi_slopes"] = options["alibi"].tolist()
    elif mod == "rel_bias":
        window = dice.choice([0, 1, 13, 40, 200])
        table = torch.randn(h, 2 * window + 1, generator=dice.torch)
        options["bias"] = table[:, distance.clamp(-window, window) + window]
        params["rel_bias_window"], tensors["in.rel_bias"] = window, table
    elif mod == "soft_cap":
        params["soft_cap"] = options["logits_soft_cap"] = dice.choice([0.5, 5.0, 20.0])

    compute, source = attention.source(dice, options)
    parts = []
    for batch in range(b):
        keys, values = (x[batch].transpose(0, 1).repeat_interleave(h // g, 1) for x in (k, v))
        # A sum over hidden keys would meet their large numbers; what is not written is not there.
        keys, values = (x.masked_fill(~written[:, None, None], 0) for x in (keys, values))
        here = (q[batch].transpose(0, 1), keys, values, scale, options, seen)
        parts.append([x.transpose(0, 1) for x in (*compute(*here), *attention.reference(*here))])
    tensors |= {"in.q": q, "in.k": k, "in.v": v, "in.written": written.to(torch.uint8)}
    tensors |= attention.outputs(parts, torch.stack)
    name = f"{mod}_b{b}h{h}g{g}_d{d}_l{l}_m{m}_s{size}_{dice.dtype_name}"
    return Case("flex", name, source, params, TOLERANCES[dice.dtype_name], tensors)


def ring(dice):
    """Worlds that take turns, each frame after frame: some passes that keep nothing, then the one that commits."""
    frame = BLOCK * dice.choice([1, 1, 1, 2])
    d, g = dice.choice([1, 8, 16, 17, 64]), dice.choice([1, 1, 2])
    h = g * dice.choice([1, 2, 3])
    frames, worlds, dilation = dice.choice([1, 2, 3, 4]), dice.choice([1, 1, 2, 3]), dice.choice([1, 1, 2, 4])
    buckets = dice.choice([frames, frames, dice.randint(1, frames)])
    most = max(6, min(24, (MOST_Q // 2) // (h * frame * d)))
    # Clocks of worlds: a frame is passed over any number of times, and counts on when it is committed.
    clocks, passes = [0] * worlds, []
    often = dice.choice([0.4, 0.8, 1.0])
    for _ in range(most):
        world = dice.randrange(worlds)
        passes.append([world, clocks[world], dice.often(often)])
        clocks[world] += passes[-1][2]

    n = len(passes)
    q = dice.normal(n, h, frame, d, std=dice.choice([1.0, 1.0, 3.0]))
    k, v = dice.normal(n, g, frame, d), dice.normal(n, g, frame, d)
    scale = d**-0.5 if dice.often(0.8) else round(dice.uniform(0.02, 0.3), 4)
    compute, source = attention.source(dice, {})
    held, parts, blocks, indptr = {}, [], [], [0]
    for at, (world, position, commit) in enumerate(passes):
        aligned = position % dilation == 0
        slot = position // dilation % buckets if aligned else None
        seen = [s for s in range(frames) if (world, s) in held and s != slot] + [frames]
        of = [held.get((world, s), at) for s in seen[:-1]] + [at]
        for s in seen:
            first = (world * (frames + 1) + s) * (frame // BLOCK)
            blocks += range(first, first + frame // BLOCK)
        indptr.append(len(blocks))
        keys, values = (torch.cat([x[i] for i in of], 1).transpose(0, 1).repeat_interleave(h // g, 1) for x in (k, v))
        all_seen = torch.ones(frame, len(keys), dtype=torch.bool)
        here = (q[at].transpose(0, 1), keys, values, scale, {}, all_seen)
        parts.append((compute(*here)[0].transpose(0, 1), attention.reference(*here)[0].transpose(0, 1)))
        if commit and aligned:
            held[world, slot] = at
    o, exact = (torch.stack(column) for column in zip(*parts))
    params = {
        "tokens_per_frame": frame,
        "ring_frames": frames,
        "ring_buckets": buckets,
        "pinned_dilation": dilation,
        "num_worlds": worlds,
        "sm_scale": scale,
        "passes": passes,
    }
    tensors = {
        "in.q": q,
        "in.k": k,
        "in.v": v,
        "out.o": o,
        "out.visible_blocks": dice.ints(blocks),
        "out.visible_indptr": dice.ints(indptr),
        "ref.o": exact.float(),
    }
    name = f"w{worlds}_f{frames}of{buckets}_dil{dilation}_h{h}g{g}_d{d}_t{frame}_{dice.dtype_name}"
    return Case("ring", name, source, params, TOLERANCES[dice.dtype_name], tensors)
