"""`paged` and `cross`: rows over pages of keys and values.

Beside the format's own inputs, a case may hold `in.alibi_slopes [H]` f32 (`slope * (key - query position)` is added to the
capped score) and `in.mask` u8, row after row `[q_len, kv_len]` row-major: what causality and the window leave, narrowed.
"""

import torch

from . import attention
from .draw import TOLERANCES, UNWRITTEN, Case, Pages, length

WIDTHS = [1, 3, 8, 16, 17, 32, 40, 64, 64, 64, 72, 80, 96, 100, 128, 128, 128, 160, 192, 256, 320, 512]
RATIOS = [1, 1, 2, 3, 4, 4, 5, 7, 8, 16]
SIZES = [1, 2, 3, 5, 8, 16, 16, 32, 64, 128]
# Numbers in the cache and among the queries, so that a case takes at most some megabytes and a second.
MOST_KV = 1 << 19
MOST_Q = 1 << 17


def paged(dice):
    """Self-attention: decode, append and prefill rows, causal or not, with any of the options."""
    return make(dice, "paged", causal=dice.often(0.75))


def cross(dice):
    """Queries over a fixed context: never causal, any number of queries over any number of keys."""
    return make(dice, "cross", causal=False)


def make(dice, op, causal):
    d, s, g = dice.choice(WIDTHS), dice.choice(SIZES), dice.choice([1, 1, 2, 2, 3, 4])
    h = g * dice.choice(RATIOS)
    q_lens, kv_lens = rows(dice, op, causal, s, max(4, MOST_KV // (2 * g * d)), max(4, MOST_Q // (h * d)))
    pages = Pages.scatter(dice, kv_lens, s)

    # Scores of unit spread at first, at times peaked; values of either sign around a mean that is not 0.
    q = dice.normal(sum(q_lens), h, d, std=dice.choice([1.0, 1.0, 3.0]))
    kv = dice.normal(pages.total, 2, s, g, d)
    kv[:, 1] += dice.choice([0.0, 0.5])
    kv.transpose(1, 2)[~pages.written(kv_lens)] = UNWRITTEN
    scale = d**-0.5 if dice.often(0.8) else round(dice.uniform(0.02, 0.3), 4)

    params = {"sm_scale": scale, "causal": causal, "page_size": s}
    options, tensors, traits = {}, {}, ["causal"] if causal else []
    window = dice.choice([0, 1, 7, s, 100, 511]) if dice.often(0.25) else -1
    if window >= 0:
        params["window_left"] = window
        traits.append(f"window{window}")
    if dice.often(0.2):
        params["logits_soft_cap"] = options["logits_soft_cap"] = dice.choice([5.0, 20.0, 50.0])
        traits.append("cap")
    if dice.often(0.2):
        tensors["in.sinks"] = options["sinks"] = torch.randn(h, generator=dice.torch) * 2
        traits.append("sinks")
    if dice.often(0.15):
        # The slopes of "Train Short, Test Long", for any number of heads.
        tensors["in.alibi_slopes"] = options["alibi"] = 2.0 ** (-8.0 * torch.arange(1, h + 1) / h)
        traits.append("alibi")
    custom = dice.choice([0.02, 0.5, 0.95]) if dice.often(0.15) else None
    if custom is not None:
        traits.append("mask")

    compute, source = attention.source(dice, options)
    parts, masks, first = [], [], 0
    for row, (q_len, kv_len) in enumerate(zip(q_lens, kv_lens)):
        at = pages.slots(row, kv_len)
        k, v = (kv[:, half][at].repeat_interleave(h // g, 1) for half in (0, 1))
        distance = torch.arange(kv_len) - torch.arange(kv_len - q_len, kv_len)[:, None]
        seen = torch.ones(q_len, kv_len, dtype=torch.bool)
        if causal:
            seen &= distance <= 0
        if window >= 0:
            seen &= distance >= -window
        if custom is not None:
            own = torch.rand(q_len, kv_len, generator=dice.torch) < custom
            masks.append(own.flatten())
            seen &= own
        here = (q[first : first + q_len], k, v, scale, {**options, "distance": distance}, seen)
        parts.append((*compute(*here), *attention.reference(*here)))
        first += q_len
    if custom is not None:
        tensors["in.mask"] = torch.cat(masks).to(torch.uint8)

    indptr = [0]
    for q_len in q_lens:
        indptr.append(indptr[-1] + q_len)
    tensors |= {
        "in.q": q,
        "in.kv": kv,
        "in.qo_indptr": dice.ints(indptr),
        "in.kv_indptr": dice.ints(pages.indptr),
        "in.kv_indices": dice.ints(pages.indices),
        "in.kv_last_page_len": dice.ints(pages.last_page_len),
        **attention.outputs(parts),
    }
    name = "_".join([f"h{h}g{g}_d{d}_s{s}", *traits, dice.dtype_name])
    return Case(op, name, source, params, TOLERANCES[dice.dtype_name], tensors)


def rows(dice, op, causal, page, most_keys, most_queries):
    """`(q_lens, kv_lens)` of a ragged batch within so many keys and queries altogether."""
    q_lens, kv_lens = [], []
    walk = dice.choice(["decode", "prefill", "mixed", "mixed"])
    for _ in range(dice.choice([1, 2, 3, 4, 6])):
        keys, queries = most_keys - sum(kv_lens) - page, most_queries - sum(q_lens)
        if keys < 1 or queries < 1:
            break
        kv_len = length(dice, page, keys)
        kind = walk if walk != "mixed" else dice.choice(["decode", "prefill", "append", "idle", "empty"])
        q_len = {"decode": 1, "prefill": kv_len, "append": dice.randint(1, kv_len), "idle": 0}.get(kind, 0)
        if kind == "empty":
            # Without keys; with queries only where no position is below 0.
            kv_len, q_len = 0, 0 if causal else dice.choice([0, 1, 3])
        elif not causal and op == "cross":
            q_len = dice.choice([q_len, dice.randint(0, 40)])
        q_lens.append(min(q_len, queries))
        kv_lens.append(kv_len)
    if not q_lens or not any(kv_lens):
        q_lens, kv_lens = [*q_lens, 1], [*kv_lens, min(most_keys, 3)]
    return q_lens, kv_lens
