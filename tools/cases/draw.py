"""What every kind of case draws from, and what a case is."""

import dataclasses
import hashlib
import json
import random

import torch
from safetensors.torch import save_file

DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16}
# What fills a page's unused slots and pages that no row names: finite, and ruinous to whoever reads it.
UNWRITTEN = 3e4

TOLERANCES = {"f32": {"atol": 1e-4, "rtol": 1e-4}, "bf16": {"atol": 1e-2, "rtol": 1e-2}}


class Draw(random.Random):
    """Numbers of one case: functions of seed, op and index."""

    def __init__(self, seed, op, index, dtype=None, exact=False):
        text = f"mstar case {seed} {op} {index}".encode()
        state = int.from_bytes(hashlib.sha256(text).digest()[:7], "little")
        super().__init__(state)
        self.torch = torch.Generator().manual_seed(state)
        drawn = self.choice(list(DTYPES))
        self.dtype_name = dtype or drawn
        self.dtype = DTYPES[self.dtype_name]
        self.exact = exact

    def often(self, probability):
        return self.random() < probability

    def normal(self, *shape, std=1.0):
        """Normal numbers in the case's dtype."""
        return (torch.randn(shape, generator=self.torch) * std).to(self.dtype)

    def ints(self, values):
        return torch.tensor(values, dtype=torch.int32)


@dataclasses.dataclass
class Case:
    """One file to be."""

    op: str
    name: str
    source: str
    params: dict
    tolerance: dict
    tensors: dict

    def write(self, path):
        path.parent.mkdir(parents=True, exist_ok=True)
        text = {key: getattr(self, key) for key in ("op", "source", "params", "tolerance")}
        metadata = {"mstar": json.dumps({"version": 1, **text})}
        # Each tensor its own memory: the container refuses views of one another.
        tensors = {name: tensor.clone().contiguous() for name, tensor in self.tensors.items()}
        save_file(tensors, str(path), metadata=metadata)


@dataclasses.dataclass
class Pages:
    """A page table over rows of some length, in pages of `size` slots, scattered over a pool."""

    size: int
    total: int
    indptr: list
    indices: list
    last_page_len: list

    @classmethod
    def scatter(cls, dice, lens, size, starts=None):
        """Pages for rows of `lens` tokens, shuffled; at times some begin with the pages of others. `starts` says how many
        slots of a row's first page lie before its first token."""
        starts = starts or [0] * len(lens)
        counts = [-(-(start + length) // size) if length else 0 for start, length in zip(starts, lens)]
        share = dice.often(0.3)
        rows, fresh = [], 0
        for row, count in enumerate(counts):
            pages = []
            if share and row and dice.often(0.7) and not any(starts):
                # Whole pages of an earlier row, which hold the same tokens for both.
                other = dice.randrange(row)
                whole = min(lens[row], lens[other]) // size
                pages = rows[other][: dice.randint(0, whole)]
            rows.append(pages + list(range(fresh, fresh + count - len(pages))))
            fresh += count - len(pages)
        total = fresh + dice.randint(1, 3)
        ids = list(range(total))
        dice.shuffle(ids)
        rows = [[ids[page] for page in pages] for pages in rows]
        indptr = [0]
        for pages in rows:
            indptr.append(indptr[-1] + len(pages))
        last = [(start + length - 1) % size + 1 if length else 0 for start, length in zip(starts, lens)]
        return cls(size, total, indptr, [page for pages in rows for page in pages], last)

    def slots(self, row, length, start=0):
        """`(page, slot)` index tensors of a row's tokens, in order."""
        at = torch.arange(start, start + length)
        pages = torch.tensor(self.indices[self.indptr[row] : self.indptr[row + 1]], dtype=torch.long)
        return pages[at // self.size] if length else at, at % self.size

    def written(self, lens, starts=None):
        """Which slots hold a token, `[P, S]`."""
        mask = torch.zeros(self.total, self.size, dtype=torch.bool)
        for row, length in enumerate(lens):
            mask[self.slots(row, length, starts[row] if starts else 0)] = True
        return mask


def length(dice, page, most):
    """A number of keys that is likely to be at an edge: of nothing, of a page, of a leaf of the kernels."""
    kind = dice.random()
    if kind < 0.15:
        return min(most, dice.choice([1, 2, 3]))
    if kind < 0.4:
        return max(1, min(most, dice.choice([1, 2, 3, 8]) * page + dice.choice([-1, 0, 1])))
    if kind < 0.5:
        return min(most, 512 * dice.choice([1, 1, 2]) + dice.choice([-1, 0, 1, 77]))
    return dice.randint(1, min(most, dice.choice([40, 200, 900])))
