#!/usr/bin/env python3
"""Judges what `mstar parity --dump DIR` wrote, on its own: it shares no line with the program.

    mstar parity --dump out ../shared/reference/paged ../shared/reference/cross
    python3 tools/judge.py out

Needs numpy alone. Each dumped file names its case in its metadata (`mstar_case`); `--cases DIR`
looks for the case there instead, under the dump's own relative path. Exit 0: every output passes; 1: one fails; 2: one
cannot be judged.

The rule is that of the recorded cases' FORMAT: `|x - out| <= atol + rtol |out|` everywhere, and for float outputs a
relative L2 error against `ref` of at most max(1.1 x the source's, 1.4 x rounding), float32 also below 1e-6; infinities
equal, NaN nowhere. A selection matches as a set, but for swaps within atol of the recorded score, the earlier of equals.
"""

import argparse
import json
import pathlib
import struct
import sys

import numpy as np

DTYPES = {"F32": np.float32, "F16": np.float16, "I32": np.int32, "U8": np.uint8}


def read(path):
    """Tensors (bfloat16 widened to float32) with their dtype names, and the metadata."""
    raw = path.read_bytes()
    (length,) = struct.unpack("<Q", raw[:8])
    header = json.loads(raw[8 : 8 + length])
    metadata = header.pop("__metadata__", {})
    tensors = {}
    for name, entry in header.items():
        begin, end = (8 + length + offset for offset in entry["data_offsets"])
        if entry["dtype"] == "BF16":
            bits = np.frombuffer(raw[begin:end], np.uint16).astype(np.uint32) << 16
            values = bits.view(np.float32)
        else:
            values = np.frombuffer(raw[begin:end], DTYPES[entry["dtype"]])
        tensors[name] = (values.reshape(entry["shape"]), entry["dtype"])
    return tensors, metadata


def to_bf16(x):
    """Nearest bfloat16, ties to even, as float32. Infinities stay; there is no NaN here."""
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32).astype(np.uint64)
    rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16) << 16
    return rounded.astype(np.uint32).view(np.float32).reshape(np.shape(x))


def rounded(reference, dtype):
    if dtype == "BF16":
        return to_bf16(reference)
    return reference.astype(DTYPES[dtype]).astype(np.float32)


def relative_l2(x, reference):
    """Over entries finite in the reference; a zero norm asks for equality."""
    finite = np.isfinite(reference)
    r, y = reference[finite].astype(np.float64), x[finite].astype(np.float64)
    error = np.sqrt(np.sum((y - r) ** 2))
    norm = np.sqrt(np.sum(r**2))
    if error == 0:
        return 0.0
    return error / norm if norm > 0 else np.inf


def judge_floats(x, out, reference, dtype, tolerance):
    if x.shape != out.shape:
        return f"shape {x.shape}, recorded {out.shape}"
    wide, recorded = x.astype(np.float64), out.astype(np.float64)
    with np.errstate(invalid="ignore"):
        apart = np.abs(wide - recorded)
        close = (wide == recorded) | (apart <= tolerance["atol"] + tolerance["rtol"] * np.abs(recorded))
        close &= np.isfinite(wide) == np.isfinite(recorded)
    if not close.all():
        at = tuple(int(i) for i in np.argwhere(~close)[0])
        return f"at {list(at)}: computed {x[at]}, recorded {out[at]}"
    infinite = ~np.isfinite(reference)
    if not np.array_equal(wide[infinite], reference[infinite].astype(np.float64)):
        return "an infinity of the reference is not matched"
    own = relative_l2(out, reference)
    bound = max(1.1 * own if np.isfinite(own) else 0.0, 1.4 * relative_l2(rounded(reference, dtype), reference))
    if dtype == "F32":
        bound = max(bound, 1e-6)
    if not np.any(reference[np.isfinite(reference)]):
        bound = 0.0
    error = relative_l2(x, reference)
    return None if error <= bound else f"relative L2 error {error:.3e}, allowed {bound:.3e}"


def judge_selection(x, out, scores, positions, topk, atol):
    start = 0
    for row, position in enumerate(positions):
        seen = int(position) + 1
        run = scores[start : start + seen].astype(np.float64)
        start += seen
        ours = [int(p) for p in x[row] if p != -1]
        picked, recorded = set(ours), {int(p) for p in out[row] if p != -1}
        if len(ours) != len(picked) or len(picked) != min(topk, seen):
            return f"row {row}: {len(ours)} positions, {len(picked)} distinct, {min(topk, seen)} due"
        if not all(0 <= p < seen for p in picked):
            return f"row {row}: a position outside 0..{seen}"
        gone = sorted(run[p] for p in recorded - picked)
        come = sorted(run[p] for p in picked - recorded)
        if any(abs(a - b) > atol for a, b in zip(gone, come)):
            return f"row {row}: swapped positions whose scores differ by more than {atol}"
        for p in picked:
            earlier = np.flatnonzero(run[:p] == run[p])
            if any(int(e) not in picked for e in earlier):
                return f"row {row}: position {p} although an earlier one scores the same"
    return None


def judge(dump, case, metadata):
    described = json.loads(metadata["mstar"])
    tolerance, op = described["tolerance"], described["op"]
    faults = []
    outputs = [name for name in case if name.startswith("out.")]
    for name in outputs:
        if name not in dump:
            faults.append(f"{name}: not in the dump")
            continue
        (x, dtype), (out, recorded_dtype) = dump[name], case[name]
        if dtype != recorded_dtype:
            fault = f"dtype {dtype}, recorded {recorded_dtype}"
        elif name == "out.selection":
            positions, scores = case["in.positions"][0], case["ref.scores"][0]
            fault = judge_selection(x, out, scores, positions, described["params"]["topk"], tolerance["atol"])
        elif dtype == "I32":
            fault = None if np.array_equal(x, out) else "integers differ"
        else:
            reference = case[name.replace("out.", "ref.", 1)][0]
            fault = judge_floats(x, out, reference, dtype, tolerance)
        if fault:
            faults.append(f"{name}: {fault}")
    extra = sorted(set(dump) - set(outputs))
    if extra:
        faults.append(f"the dump holds {', '.join(extra)} besides")
    return op, len(outputs), faults


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("dump", type=pathlib.Path, help="folder that `mstar parity --dump` wrote")
    parser.add_argument("--cases", type=pathlib.Path, help="where the cases lie, under the dump's relative paths")
    arguments = parser.parse_args()
    files = sorted(arguments.dump.rglob("*.safetensors"))
    if not files:
        sys.exit(f"judge: {arguments.dump}: no .safetensors file")
    passed = failed = unjudged = 0
    for path in files:
        label = path.relative_to(arguments.dump)
        try:
            dump, metadata = read(path)
            where = arguments.cases / label if arguments.cases else pathlib.Path(metadata["mstar_case"])
            case, recorded = read(where)
            if recorded["mstar"] != metadata["mstar"]:
                raise ValueError("the dump is of another case: their metadata differ")
            op, outputs, faults = judge(dump, case, recorded)
        except Exception as error:  # One unreadable file must not hide the others' verdicts.
            unjudged += 1
            print(f"unjudged {label}: {type(error).__name__}: {error}")
            continue
        failed += bool(faults)
        passed += not faults
        for fault in faults:
            print(f"FAIL {label} ({op}): {fault}")
    print(f"{len(files)} dumps: {passed} passed, {failed} failed, {unjudged} unjudged")
    sys.exit(2 if unjudged else 1 if failed else 0)


if __name__ == "__main__":
    main()
