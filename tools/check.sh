#!/usr/bin/env bash
# Everything that must hold before a change lands. `just check` and CI run this and nothing else.
# Needs cargo with rustfmt and clippy, python3 with pip for the kernels' compiler (tools/kernels.sh); MSTAR_REFERENCE or ../shared/reference for the recorded cases.
set -euo pipefail
cd "$(dirname "$0")/.."

step() {
    printf '\n== %s (%s)\n' "$1" "$(date +%T)"
    shift
    "$@"
}

features_alone() {
    local family
    for family in paged mla dense flex dsa cuda; do
        cargo check -q --locked -p mstar-kernels --no-default-features --features "$family"
        cargo check -q --locked -p mstar --no-default-features --features "$family"
    done
    cargo check -q --locked -p mstar-kernels --no-default-features
    cargo check -q --locked -p mstar-core --no-default-features
    cargo check -q --locked -p mstar-core --no-default-features --features yaml
    cargo check -q --locked -p mstar --no-default-features
    for crate in mstar-attn-paged mstar-attn-mla mstar-attn-dense mstar-attn-flex mstar-dsa; do
        cargo check -q --locked -p "$crate"
        cargo check -q --locked -p "$crate" --features cuda
    done
}

examples() {
    local project
    for project in examples/*/; do
        echo "$project"
        CARGO_TARGET_DIR=$PWD/target/examples cargo run -q --manifest-path "$project/Cargo.toml"
    done
}

# What groups of a block tell each other, where some of them come late and copies come as they like.
out_of_order() {
    local seed
    for seed in 1 2 3; do
        MSTAR_EMULATOR_SEED=$seed cargo test -q --locked -p mstar-kernels --features paged,mla,dense,flex,dsa,emulator --lib -- \
            cuda::trials::segments cuda::trials::latents cuda::exec::tests::heads
    done
}

# In a program that must not unwind, a run ends as elsewhere, and a refusal is an exit code and no abort.
panic_abort() {
    cargo build -q --locked --profile abort -p mstar
    local mstar="${CARGO_TARGET_DIR:-target}/abort/mstar" code=0
    "$mstar" run specs/quickstart.yaml --quiet
    "$mstar" run specs/quickstart.yaml --quiet --set model.layers=0 2>/dev/null || code=$?
    [ "$code" -eq 2 ] || { echo "a refused spec ended with $code, not 2"; return 1; }
}

# Cargo unpacks what it packages into its home, under a name made from the target's path, and takes what an earlier run left there
# for this run's: a path of its own is never stale.
package() {
    local at
    mkdir -p target
    at=$(mktemp -d "$PWD/target/package-XXXXXX")
    cargo package -q --locked --workspace --allow-dirty --target-dir "$at"
    rm -rf "$at"
}

export RUSTFLAGS="${RUSTFLAGS:-} -D warnings"
step "format" cargo fmt --all --check
step "clippy" cargo clippy -q --locked --workspace --all-targets -- -D warnings
step "docs" env RUSTDOCFLAGS="-D warnings" cargo doc -q --locked --workspace --no-deps
# The README's own two commands, as they stand there.
step "test" bash -c "$(sed -n 's/^\(cargo test .*\)$/\1/p' README.md | head -n 1)"
step "quickstart" bash -c "$(sed -n 's/^\(cargo run .*\)$/\1/p' README.md | head -n 1)"
step "kernels" bash tools/kernels.sh
step "an emulated device" cargo test -q --locked -p mstar-kernels --features paged,mla,dense,flex,dsa,emulator --lib -- \
    cuda:: device::
step "the same out of order" out_of_order
# On a card that has `wgmma`: what runs where it is not wanted.
step "mma by name" env MSTAR_KERNELS=mma cargo test -q --locked -p mstar-kernels --features paged,mla,dense,flex,dsa,emulator --lib -- \
    dsa:: cuda::trials::faults::sparse
# What a run captures, what it takes and builds, devices compared, a whole forward as one region.
step "runs on it" cargo test -q --locked -p mstar --features emulator --test run --test specs --test parity --bin mstar -- \
    graphs::emulated:: device:: across:: regions::
step "panic = abort" panic_abort
step "each feature alone" features_alone
step "examples" examples
step "package" package
step "planted faults" bash tools/mutants.sh
echo
echo "all checks passed"
