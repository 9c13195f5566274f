#!/usr/bin/env python3
"""Writes the small traces under specs/data: the columns of the public ones, and lengths of our own drawing.

    python3 tools/make_traces.py [DIR]

The same seed always writes the same bytes. Names are those of the public files, so that MSTAR_DATA=DIR switches.
"""

import datetime
import json
import pathlib
import random
import sys

BLOCK = 512  # prompt tokens that one hash id stands for


def length(draw, median, sigma, low, high):
    return max(low, min(high, round(draw.lognormvariate(0, sigma) * median)))


def azure(path, seed, requests, gap, prompt, output):
    """TIMESTAMP,ContextTokens,GeneratedTokens; gaps are exponential, in seconds."""
    draw = random.Random(seed)
    now = datetime.datetime(2026, 1, 5, 9, 0, 0)
    lines = ["TIMESTAMP,ContextTokens,GeneratedTokens"]
    for _ in range(requests):
        now += datetime.timedelta(seconds=draw.expovariate(1 / gap))
        stamp = now.strftime("%Y-%m-%d %H:%M:%S.%f") + "0"
        lines.append(f"{stamp},{length(draw, *prompt)},{length(draw, *output)}")
    path.write_text("\n".join(lines) + "\n")


def mooncake(path, seed, sessions, turns):
    """Conversations under two system prompts: each turn's prompt is the one before it, grown."""
    draw = random.Random(seed)
    fresh = iter(range(10**9))
    systems = [[next(fresh) for _ in range(blocks)] for blocks in (2, 3)]
    rows = []
    for _ in range(sessions):
        ids = list(draw.choice(systems))
        at = draw.randrange(0, 30_000)
        for _ in range(draw.randint(1, turns)):
            ids = ids + [next(fresh) for _ in range(draw.randint(1, 6))]
            # The last block of a prompt is whole when the next turn goes on after it.
            last = BLOCK if draw.random() < 0.5 else draw.randint(1, BLOCK)
            rows.append((at, (len(ids) - 1) * BLOCK + last, length(draw, 120, 0.9, 2, 900), list(ids)))
            if last < BLOCK:
                ids = ids[:-1]
            at += draw.randrange(3_000, 20_000)
    rows.sort(key=lambda row: row[0])
    names = ("timestamp", "input_length", "output_length", "hash_ids")
    path.write_text("".join(json.dumps(dict(zip(names, row))) + "\n" for row in rows))


def main():
    to = pathlib.Path(sys.argv[1] if len(sys.argv) > 1 else pathlib.Path(__file__).parent.parent / "specs/data")
    to.mkdir(parents=True, exist_ok=True)
    azure(to / "AzureLLMInferenceTrace_code.csv", 1, 48, 0.4, (1500, 1.0, 20, 7400), (12, 0.7, 2, 120))
    azure(to / "AzureLLMInferenceTrace_conv.csv", 2, 48, 0.6, (700, 0.9, 20, 4000), (110, 0.8, 4, 600))
    mooncake(to / "conversation_trace.jsonl", 3, 16, 5)


if __name__ == "__main__":
    main()
