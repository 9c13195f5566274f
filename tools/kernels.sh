#!/usr/bin/env bash
# Compiles the list of kernel variants (crates/kernels/src/cuda/variants.rs) with no card and no CUDA installed, and fails on one
# that does not compile, or that spills, uses local memory or has its matrix instructions serialised without a listed reason.
#
#   tools/kernels.sh            for sm_80 and sm_90a
#   tools/kernels.sh ARCH...    for those
#
# NVRTC is what MSTAR_NVRTC names, or else the wheel of PyPI, kept under target/nvrtc. Where that cannot be had it fails under
# CI=true, and elsewhere says aloud that it was skipped.
set -euo pipefail
cd "$(dirname "$0")/.."
version=13.5.37
sha256_x86_64=86b4d68058807988b7d9af5b44917a0601e9c337f35ccd657bfb3c759ff8d8bc
target=${CARGO_TARGET_DIR:-$PWD/target}
folder=$target/nvrtc/$version

fetch() {
    local new="$target/nvrtc/new.$$"
    rm -rf "$new" && mkdir -p "$new"
    python3 -m pip download -q --disable-pip-version-check --no-deps --only-binary :all: \
        --dest "$new" "nvidia-cuda-nvrtc==$version" || return 1
    if [ "$(uname -m)" = x86_64 ]; then
        (cd "$new" && echo "$sha256_x86_64  $(echo *.whl)" | sha256sum --check --quiet) || return 1
    fi
    (cd "$new" && python3 -m zipfile -e ./*.whl . && rm ./*.whl) || return 1
    # In place only when it is whole.
    rm -rf "$folder" && mv "$new" "$folder"
}

if [ -z "${MSTAR_NVRTC:-}" ]; then
    if ! compgen -G "$folder/nvidia/*/lib/libnvrtc.so.*" >/dev/null && ! fetch; then
        rm -rf "$target/nvrtc/new.$$"
        echo "nvidia-cuda-nvrtc $version could not be had from PyPI (python3 with pip, or MSTAR_NVRTC)"
        [ "${CI:-}" = true ] && exit 1
        echo "SKIPPED: no kernel was compiled"
        exit 0
    fi
    MSTAR_NVRTC=$(dirname "$(compgen -G "$folder/nvidia/*/lib/libnvrtc.so.*" | head -n 1)")
    export MSTAR_NVRTC
fi

[ $# -gt 0 ] || set -- sm_80 sm_90a
cargo build -q --release --locked -p mstar
archs=$(IFS=,; echo "$*")
# Not the user's cache: what is judged here was compiled here.
export MSTAR_CACHE_DIR=$target/kernels
"$target/release/mstar" kernels build --arch "$archs" --check
# Each architecture has binaries of its own, side by side in one cache: a second run finds all of them, and they are as many.
variants=0
for arch in "$@"; do
    again=$("$target/release/mstar" kernels build --arch "$arch")
    count=$(sed -n "s/^$arch: 0 compiled, \([0-9]*\) from the cache, 0 failed.*/\1/p" <<<"$again")
    [ -n "$count" ] || { echo "$arch: a second run did not find what the first one made"; exit 1; }
    variants=$((variants + count))
done
kept=$(find "$MSTAR_CACHE_DIR/kernels" -name '*.cubin' | wc -l)
[ "$kept" -ge "$variants" ] || { echo "$kept binaries for $variants variants: architectures share some"; exit 1; }
