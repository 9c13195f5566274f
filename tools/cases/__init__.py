"""Kinds of random parity cases, one file a kind; `make_cases.py` writes them."""
