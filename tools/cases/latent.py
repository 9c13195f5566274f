"""`mla` and `dsa_attend`: absorbed queries over paged latents, all of them or the picked ones.

A latent is `[ckv | kpe]`, `C + E` wide: a key of every head whole, and by its first `C` numbers the value of every head.
"""

import torch

from . import attention
from .draw import TOLERANCES, UNWRITTEN, Case, Pages, length
from .paged import SIZES, rows

WIDTHS = [(512, 64), (512, 64), (512, 0), (256, 32), (128, 64), (64, 16), (48, 8), (17, 3), (1, 0), (5, 4)]
HEADS = [1, 2, 3, 4, 8, 16, 16, 40, 128]
MOST_KV = 1 << 18
MOST_Q = 1 << 16


def shape(dice):
    """`(C, E, H, S)`."""
    return *dice.choice(WIDTHS), dice.choice(HEADS), dice.choice(SIZES)


def latents(dice, pages, width, lens, starts=None):
    latent = dice.normal(pages.total, pages.size, width)
    latent[~pages.written(lens, starts)] = UNWRITTEN
    return latent


def queries(dice, tokens, h, c, e):
    """`(q_nope, q_pe)`; scores of about unit spread, at times peaked."""
    std = dice.choice([1.0, 1.0, 3.0])
    return dice.normal(tokens, h, c, std=std), dice.normal(tokens, h, e, std=std)


def scale_of(dice, c, e):
    return (c + e) ** -0.5 if dice.often(0.8) else round(dice.uniform(0.02, 0.3), 4)


def attend(q, keys, c, scale, seen, compute):
    """A row's four outputs: `q [Q, H, C + E]` over `keys [N, C + E]`."""
    h = q.shape[1]
    k = keys[:, None].expand(-1, h, -1)
    here = (q, k, k[..., :c], scale, {}, seen)
    return (*compute(*here), *attention.reference(*here))


def mla(dice):
    """Decode, append and prefill rows over every latent, causal or not."""
    c, e, h, s = shape(dice)
    causal = dice.often(0.8)
    most = max(4, MOST_KV // (c + e)), max(4, MOST_Q // (h * (c + e)))
    q_lens, kv_lens = rows(dice, "mla", causal, s, *most)
    pages = Pages.scatter(dice, kv_lens, s)
    latent, scale = latents(dice, pages, c + e, kv_lens), scale_of(dice, c, e)
    q_nope, q_pe = queries(dice, sum(q_lens), h, c, e)
    q = torch.cat([q_nope, q_pe], -1)
    compute, source = attention.source(dice, {})
    parts, indptr = [], [0]
    for row, (q_len, kv_len) in enumerate(zip(q_lens, kv_lens)):
        seen = torch.ones(q_len, kv_len, dtype=torch.bool)
        if causal:
            seen &= torch.arange(kv_len) <= torch.arange(kv_len - q_len, kv_len)[:, None]
        keys = latent[pages.slots(row, kv_len)]
        parts.append(attend(q[indptr[-1] : indptr[-1] + q_len], keys, c, scale, seen, compute))
        indptr.append(indptr[-1] + q_len)
    tensors = {
        "in.q_nope": q_nope,
        "in.q_pe": q_pe,
        "in.latent": latent,
        "in.qo_indptr": dice.ints(indptr),
        "in.kv_indptr": dice.ints(pages.indptr),
        "in.kv_indices": dice.ints(pages.indices),
        "in.kv_len": dice.ints(kv_lens),
        **attention.outputs(parts),
    }
    params = {"sm_scale": scale, "causal": causal, "page_size": s, "kv_lora_rank": c, "qk_rope_head_dim": e}
    name = "_".join([f"c{c}_e{e}_h{h}_s{s}", *(["causal"] if causal else []), dice.dtype_name])
    return Case("mla", name, source, params, TOLERANCES[dice.dtype_name], tensors)


def dsa_attend(dice):
    """Query rows of any request over the positions that each has picked, -1 among them anywhere."""
    c, e, h, s = shape(dice)
    requests = dice.choice([1, 2, 3])
    lens = [length(dice, s, max(4, MOST_KV // (c + e) // requests)) for _ in range(requests)]
    starts = [dice.choice([0, 0, dice.randrange(s)]) for _ in lens]
    pages = Pages.scatter(dice, lens, s, starts)
    latent, scale = latents(dice, pages, c + e, lens, starts), scale_of(dice, c, e)
    tokens = dice.randint(1, max(1, min(12, MOST_Q // (h * (c + e)))))
    topk = dice.choice([1, 3, 16, 64, 256])
    q_nope, q_pe = queries(dice, tokens, h, c, e)
    q = torch.cat([q_nope, q_pe], -1)
    compute, source = attention.source(dice, {})
    owners, selection, parts = [], [], []
    for token in range(tokens):
        request = dice.randrange(requests)
        most = min(topk, lens[request])
        count = dice.choice([0, most, most, most, dice.randint(0, most)])
        picked = dice.sample(range(lens[request]), count)
        row = picked + [-1] * (topk - count)
        # As a rule picks come first; the format allows any order.
        if dice.often(0.3):
            dice.shuffle(row)
        owners.append(request)
        selection.append(row)
        page, slot = pages.slots(request, lens[request], starts[request])
        at = torch.tensor(picked, dtype=torch.long)
        keys = latent[page[at], slot[at]]
        seen = torch.ones(1, count, dtype=torch.bool)
        parts.append(attend(q[token : token + 1], keys, c, scale, seen, compute))
    tensors = {
        "in.q_nope": q_nope,
        "in.q_pe": q_pe,
        "in.latent": latent,
        "in.selection": dice.ints(selection),
        "in.kv_indptr": dice.ints(pages.indptr),
        "in.kv_indices": dice.ints(pages.indices),
        "in.row_request": dice.ints(owners),
        "in.page_start": dice.ints(starts),
        **attention.outputs(parts),
    }
    params = {"sm_scale": scale, "kv_lora_rank": c, "qk_rope_head_dim": e, "page_size": s}
    name = f"c{c}_e{e}_h{h}_s{s}_k{topk}_{dice.dtype_name}"
    return Case("dsa_attend", name, source, params, TOLERANCES[dice.dtype_name], tensors)
