# `just check` is what CI runs.

check:
    bash tools/check.sh

test:
    cargo test --workspace

fmt:
    cargo fmt --all

quickstart:
    cargo run --release -- run specs/quickstart.yaml

parity cases="../shared/reference":
    cargo run --release -- parity {{cases}}

bench *args:
    cargo run --release -- bench {{args}}
