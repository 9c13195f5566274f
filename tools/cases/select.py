"""`dsa_select`: index scores `sum_h weights[t,h] relu(q[t,h].k[s])`, and the largest of them at or before each position."""

import torch

from .draw import Case

WIDTHS = [128, 128, 64, 32, 17, 1]
HEADS = [1, 2, 8, 32, 64]
MOST_KEYS = 1 << 17
# How far the scores of picks that were swapped may lie apart.
TOLERANCE = {"f32": {"atol": 1e-4, "rtol": 0.0}, "bf16": {"atol": 1e-3, "rtol": 0.0}}


def dsa_select(dice):
    """Query tokens of any request, in any order, over keys of which some are equal, so that picks are tied."""
    hi, di = dice.choice(HEADS), dice.choice(WIDTHS)
    topk = dice.choice([1, 2, 7, 16, 64, 200])
    requests = dice.choice([1, 2, 4])
    # As many keys as are picked, one more, or many more.
    most = max(2, min(900, MOST_KEYS // di // requests))
    lens = [min(most, dice.choice([1, topk, topk + 1, dice.randint(1, most)])) for _ in range(requests)]
    indptr = [0]
    for count in lens:
        indptr.append(indptr[-1] + count)
    keys = dice.normal(indptr[-1], di)
    if dice.often(0.3):
        # Keys said twice: equal scores, of which the earlier is the one to pick.
        keys = keys[torch.tensor([dice.randrange(len(keys)) for _ in keys])]
    tokens = dice.randint(1, 16)
    q = dice.normal(tokens, hi, di)
    # The factors Di^-0.5 and Hi^-0.5 are part of the weights; those of a trained indexer take either sign.
    weights = torch.randn(tokens, hi, generator=dice.torch) * (di * hi) ** -0.5
    if dice.often(0.2):
        weights = weights.abs()
    if dice.often(0.1):
        weights[0] = 0
    owners = [dice.randrange(requests) for _ in range(tokens)]
    positions = [dice.choice([lens[owner] - 1, dice.randrange(lens[owner])]) for owner in owners]

    selection, scores = torch.full((tokens, topk), -1, dtype=torch.int32), []
    for token, (owner, position) in enumerate(zip(owners, positions)):
        seen = keys[indptr[owner] : indptr[owner] + position + 1]
        exact = ((seen.double() @ q[token].double().T).relu() * weights[token].double()).sum(-1).float()
        ours = torch.einsum("h,sh->s", weights[token], torch.einsum("sd,hd->sh", seen.float(), q[token].float()).relu())
        # Equal keys must have equal scores, whatever blocks a product was cut into.
        order = torch.argsort(torch.where(tied(exact), exact, ours), descending=True, stable=True)
        picked = order[:topk].sort().values
        selection[token, : len(picked)] = picked.int()
        scores.append(exact)
    tensors = {
        "in.q": q,
        "in.weights": weights,
        "in.keys": keys,
        "in.key_indptr": dice.ints(indptr),
        "in.row_request": dice.ints(owners),
        "in.positions": dice.ints(positions),
        "out.selection": selection,
        "ref.scores": torch.cat(scores),
    }
    source = f"torch {torch.__version__}, CPU, float32 einsum and relu, then a stable sort; tied scores from float64"
    name = f"hi{hi}_di{di}_k{topk}_{dice.dtype_name}"
    return Case("dsa_select", name, source, {"topk": topk}, TOLERANCE[dice.dtype_name], tensors)


def tied(scores):
    """Which scores occur more than once."""
    _, inverse, counts = scores.unique(return_inverse=True, return_counts=True)
    return counts[inverse] > 1
