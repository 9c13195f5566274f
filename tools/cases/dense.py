"""`dense`: packed rows over packed keys, `[prefix | fresh]`."""

import torch

from . import attention
from .draw import TOLERANCES, Case
from .paged import MOST_KV, MOST_Q, RATIOS, WIDTHS, rows


def dense(dice):
    """Rows with and without prefixes, of any number of queries; more of them than keys where it is not causal."""
    d, g, causal = dice.choice(WIDTHS), dice.choice([1, 1, 2, 2, 3, 4]), dice.often(0.6)
    h = g * dice.choice(RATIOS)
    # The edges that lengths are drawn at are those of key tiles.
    most = max(4, MOST_KV // (2 * g * d)), max(4, MOST_Q // (h * d))
    q_lens, kv_lens = rows(dice, "dense" if causal else "cross", causal, dice.choice([16, 64, 128]), *most)

    q = dice.normal(sum(q_lens), h, d, std=dice.choice([1.0, 1.0, 3.0]))
    k, v = dice.normal(sum(kv_lens), g, d), dice.normal(sum(kv_lens), g, d)
    v += dice.choice([0.0, 0.5])
    scale = d**-0.5 if dice.often(0.8) else round(dice.uniform(0.02, 0.3), 4)

    compute, source = attention.source(dice, {})
    parts, cu_q, cu_k = [], [0], [0]
    for q_len, kv_len in zip(q_lens, kv_lens):
        first, last = cu_k[-1], cu_k[-1] + kv_len
        keys, values = (x[first:last].repeat_interleave(h // g, 1) for x in (k, v))
        seen = torch.ones(q_len, kv_len, dtype=torch.bool)
        if causal:
            seen &= torch.arange(kv_len) <= torch.arange(kv_len - q_len, kv_len)[:, None]
        here = (q[cu_q[-1] : cu_q[-1] + q_len], keys, values, scale, {}, seen)
        parts.append((*compute(*here), *attention.reference(*here)))
        cu_q.append(cu_q[-1] + q_len)
        cu_k.append(last)
    tensors = {
        "in.q": q,
        "in.k": k,
        "in.v": v,
        "in.cu_q": dice.ints(cu_q),
        "in.cu_k": dice.ints(cu_k),
        **attention.outputs(parts),
    }
    name = "_".join([f"h{h}g{g}_d{d}", *(["causal"] if causal else []), dice.dtype_name])
    params = {"sm_scale": scale, "causal": causal}
    return Case("dense", name, source, params, TOLERANCES[dice.dtype_name], tensors)
