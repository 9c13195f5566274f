"""The mathematics of one row, twice: in float64, and as PyTorch computes it."""

import torch
import torch.nn.functional as F

EAGER = "scores and softmax in float32, probabilities in the case's dtype"
EXACT = "float32 arithmetic, rounded once at the output"


def scores(q, k, scale, options, mask):
    """`[H, Q, N]` scores of `q [Q, H, D]` against `k [N, H, D]` in their dtype, `-inf` where `mask [Q, N]` hides a key."""
    s = torch.einsum("qhd,nhd->hqn", q, k) * scale
    cap = options.get("logits_soft_cap", 0)
    if cap:
        s = cap * torch.tanh(s / cap)
    if "alibi" in options:
        # slope * (key position - query position)
        s = s + options["alibi"].to(s.dtype)[:, None, None] * options["distance"].to(s.dtype)
    if "bias" in options:
        # [H, Q, N]
        s = s + options["bias"].to(s.dtype)
    return s.masked_fill(~mask, float("-inf"))


def with_sink(s, options):
    """The scores with each head's sink as one more key, where there are sinks and the query sees a key at all."""
    if "sinks" not in options:
        return s
    sink = options["sinks"].to(s.dtype)[:, None, None].expand(-1, s.shape[1], 1)
    seen = (s > float("-inf")).any(-1, keepdim=True)
    return torch.cat([s, torch.where(seen, sink, float("-inf"))], -1)


def reference(q, k, v, scale, options, mask):
    """`(o [Q, H, Dv], lse [Q, H])` in float64, straight from the definition, query by query."""
    q, k, v = q.double(), k.double(), v.double()
    o = torch.zeros(q.shape[0], q.shape[1], v.shape[2], dtype=torch.float64)
    lse = torch.full(q.shape[:2], float("-inf"), dtype=torch.float64)
    for i in range(q.shape[0]):
        seen = mask[i].nonzero()[:, 0]
        if not len(seen):
            continue
        s = torch.einsum("nhd,hd->hn", k[seen], q[i]) * scale
        cap = options.get("logits_soft_cap", 0)
        if cap:
            s = cap * (s / cap).tanh()
        if "alibi" in options:
            s = s + options["alibi"].double()[:, None] * options["distance"][i, seen].double()
        if "bias" in options:
            s = s + options["bias"][:, i, seen].double()
        top = s.amax(-1)
        if "sinks" in options:
            top = torch.maximum(top, options["sinks"].double())
        weights = (s - top[:, None]).exp()
        total = weights.sum(-1)
        if "sinks" in options:
            total = total + (options["sinks"].double() - top).exp()
        o[i] = torch.einsum("hn,nhd->hd", weights, v[seen]) / total[:, None]
        lse[i] = top + total.log()
    return o, lse


def eager(q, k, v, scale, options, mask, exact):
    """`(o, lse)` as engines write attention without a kernel; `exact` keeps probabilities in float32."""
    dtype = q.dtype
    s = with_sink(scores(q.float(), k.float(), scale, options, mask), options)
    lse = torch.logsumexp(s, -1)
    p = torch.softmax(s, -1).nan_to_num(0.0)[..., : k.shape[0]]
    if not exact:
        p = p.to(dtype).float()
    return torch.einsum("hqn,nhd->qhd", p, v.float()).to(dtype), lse.T


def sdpa(q, k, v, scale, options, mask):
    """`(o, lse)` with `scaled_dot_product_attention`, which takes a mask and nothing else; lse in float32."""
    lse = torch.logsumexp(scores(q.float(), k.float(), scale, options, mask), -1).T
    heads = (x.transpose(0, 1)[None] for x in (q, k, v))
    o = F.scaled_dot_product_attention(*heads, attn_mask=mask, scale=scale)[0].transpose(0, 1)
    # A query that sees no key is left as 0, whatever the operator makes of it.
    return torch.where(mask.any(-1)[:, None, None], o, 0), lse


def source(dice, options):
    """The function that computes a row's `out.*`, and its name."""
    torch_version = f"torch {torch.__version__}"
    if dice.exact:
        return (lambda *row: eager(*row, True)), f"{torch_version}, CPU, per row: {EXACT}"
    if options:
        return (lambda *row: eager(*row, False)), f"{torch_version}, CPU, per row: {EAGER}"
    name = f"{torch_version} scaled_dot_product_attention, CPU, per row over gathered keys; lse: torch.logsumexp"
    return sdpa, name


def outputs(parts, join=torch.cat):
    """What a case holds of `(o, lse, exact o, exact lse)` of its rows."""
    o, lse, exact_o, exact_lse = (join(column) for column in zip(*parts))
    return {"out.o": o, "out.lse": lse.float(), "ref.o": exact_o.float(), "ref.lse": exact_lse.float()}
