#!/usr/bin/env bash
# One folder that tests mstar on any x86-64 Linux machine with a card, where there is neither cargo nor CUDA: the test executables,
# the program, specs, and a run.sh that runs all of them and prints one summary.
#
#   tools/gpu-bundle.sh FOLDER [options]
#     --only LIST      of program,kernels,core,backends,foreign,specs,cases (default: all; cases only with --cases)
#     --cases FOLDER   recorded cases, put beside
#     --features LIST  more features of mstar-kernels, such as emulator
#     --nvrtc FOLDER   an NVRTC library's folder, put beside; large
#     --debug          executables of the dev profile: built sooner, slower
#
# Executables are stripped, and one over 20 MiB is an error.
set -euo pipefail
cd "$(dirname "$0")/.."
most=$((20 << 20))

usage() { sed -n '2,/^[^#]/s/^# \{0,1\}//p' "$0" >&2; exit 2; }
[ $# -gt 0 ] && [[ $1 != -* ]] || usage
out=$1; shift
only=program,kernels,core,backends,foreign,specs,cases cases="" nvrtc="" features="" profile=(--release) built=release
while [ $# -gt 0 ]; do
    case $1 in
        --only) only=${2:?}; shift 2 ;;
        --cases) cases=${2:?}; shift 2 ;;
        --features) features=${2:?}; shift 2 ;;
        --nvrtc) nvrtc=${2:?}; shift 2 ;;
        --debug) profile=() built=debug; shift ;;
        *) usage ;;
    esac
done
for part in ${only//,/ }; do
    [[ ,program,kernels,core,backends,foreign,specs,cases, == *",$part,"* ]] || { echo "--only: no part $part" >&2; exit 2; }
done
wants() { [[ ,$only, == *",$1,"* ]]; }
target=${CARGO_TARGET_DIR:-target}

rm -rf "$out" && mkdir -p "$out"

keep() { # file, name: stripped, and small enough
    strip -s -o "$2" "$1"
    local size; size=$(stat -c %s "$2")
    [ "$size" -le $most ] || { echo "$2 has $size bytes, over $most" >&2; exit 1; }
}

packages=() kernels=mstar-kernels/cuda
wants kernels && packages+=(-p mstar-kernels)
wants core && packages+=(-p mstar-core)
wants backends && packages+=(-p mstar-attn-paged -p mstar-attn-mla -p mstar-attn-dense -p mstar-attn-flex -p mstar-dsa)
extra=(); for feature in ${features//,/ }; do extra+=("mstar-kernels/$feature"); done
join() { local IFS=,; echo "$*"; }
if [ ${#packages[@]} -gt 0 ]; then
    mkdir -p "$out/tests"
    wants kernels && kernels+=,mstar-kernels/paged,mstar-kernels/mla,mstar-kernels/dense,mstar-kernels/flex,mstar-kernels/dsa
    wants core && kernels+=,mstar-core/cuda,mstar-core/yaml
    # Features of a package that is not built are no arguments.
    wants kernels || kernels=${kernels#mstar-kernels/cuda}
    for package in "${packages[@]}"; do
        case $package in mstar-attn-* | mstar-dsa) kernels+=,$package/cuda ;; esac
    done
    wants kernels && kernels+=,$(join "${extra[@]}")
    log=$(cargo test --locked "${profile[@]}" --no-run --lib --tests "${packages[@]}" --features "${kernels#,}" 2>&1) ||
        { printf '%s\n' "$log" >&2; exit 1; }
    # `  Executable unittests src/lib.rs (target/release/deps/mstar_core-0123456789abcdef)`
    while read -r file; do
        name=$(basename "$file"); name=${name%-*}
        # The integration binary of each crate is called `it`: its crate is the file's before it in the list.
        if [ "$name" = it ]; then name=${last:-unknown}-it; else last=$name; fi
        keep "$file" "$out/tests/$name"
    done < <(sed -n 's/^ *Executable .*(\(.*\))$/\1/p' <<<"$log")
    ls "$out/tests" | grep -q . || { echo "no test executable was built" >&2; exit 1; }
fi
if wants program; then
    program=(); [ -z "$features" ] || program=(--features "$features")
    cargo build -q --locked "${profile[@]}" -p mstar "${program[@]}"
    keep "$target/$built/mstar" "$out/mstar"
fi
if wants foreign; then
    # Outside the workspace, as a user's project is.
    CARGO_TARGET_DIR=$PWD/target/examples cargo build -q "${profile[@]}" --manifest-path examples/foreign-cuda/Cargo.toml
    keep "target/examples/$built/foreign-cuda" "$out/foreign-cuda"
fi
if wants specs; then
    # As they are, and without their graph: each runs both ways.
    mkdir -p "$out/specs/eager" && cp specs/*.yaml "$out/specs/"
    cp -r specs/data "$out/specs/data" && cp -r specs/data "$out/specs/eager/data"
    for spec in specs/*.yaml; do
        awk '/^graph:/ { within = 1; next } /^[^ \t]/ { within = 0 } !within' "$spec" >"$out/specs/eager/${spec##*/}"
    done
fi
if wants cases && [ -n "$cases" ]; then cp -rL "$cases" "$out/cases"; fi
if [ -n "$nvrtc" ]; then mkdir "$out/nvrtc" && cp -L "$nvrtc"/libnvrtc*.so* "$out/nvrtc/"; fi
git rev-parse HEAD >"$out/commit" 2>/dev/null || echo unknown >"$out/commit"

cat >"$out/run.sh" <<'RUN'
#!/usr/bin/env bash
# Runs what is in this folder on the machine's card and prints one summary. It may be called from any folder.
#
#   run.sh [PART...]    of machine, kernels, tests, sanitize, foreign, specs, graphs, across, parity; all without one
#
# MSTAR_DEVICE       the device (cuda:0)
# MSTAR_REFERENCE    recorded cases, where none lie beside
# BUNDLE_LOGS        where logs go (logs)
# BUNDLE_FILTER      only tests with this in their name, and only specs with it in theirs
# BUNDLE_LIMIT       seconds that one step may take (300)
# BUNDLE_UNDER       a command that each test executable runs under, such as a debugger's
# BUNDLE_SANITIZER   compute-sanitizer, where it is not on the path or in CUDA's folders
# BUNDLE_TOOLS       its tools (memcheck racecheck initcheck)
# Exit code 1 when anything failed. A part that this folder or this machine lacks is told as SKIPPED, which is no failure.
set -uo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
device=${MSTAR_DEVICE:-cuda:0} logs=${BUNDLE_LOGS:-$here/logs} filter=${BUNDLE_FILTER:-} limit=${BUNDLE_LIMIT:-300}
[ $# -gt 0 ] || set -- machine kernels tests sanitize foreign specs graphs across parity
mkdir -p "$logs" && logs=$(cd "$logs" && pwd) && cd "$here" || exit 1
# A driver maps streams onto so many queues, and streams that share one wait for each other: 8 where nobody asks for more, and tests
# hold streams up.
export CUDA_DEVICE_MAX_CONNECTIONS=${CUDA_DEVICE_MAX_CONNECTIONS:-32}
export MSTAR_CACHE_DIR=${MSTAR_CACHE_DIR:-$here/cache} MSTAR_DATA=${MSTAR_DATA:-}
[ -n "$MSTAR_DATA" ] || unset MSTAR_DATA
[ -d nvrtc ] && export MSTAR_NVRTC="${MSTAR_NVRTC:-$here/nvrtc}"
cases=${MSTAR_REFERENCE:-}
[ -d cases ] && cases=$here/cases
[ -n "$cases" ] && export MSTAR_REFERENCE="$cases"
summary=() failed=0 steps=0 skips=0
read -ra under <<<"${BUNDLE_UNDER:-}"
within=(); command -v timeout >/dev/null && within=(timeout -k 10 "$limit")

skip() { # name, why
    skips=$((skips + 1))
    summary+=("SKIPPED $1: $2")
    echo "${summary[-1]}"
}

step() { # name, command...: its log, its line of the summary
    local name=$1 start=$SECONDS code=0 line; shift
    "${within[@]}" "$@" >"$logs/$name.log" 2>&1 </dev/null || code=$?
    steps=$((steps + 1))
    line=$(grep -E '^test result: |cases? on .* passed|wrong|ERROR SUMMARY|RACECHECK SUMMARY' "$logs/$name.log" | tail -n 1)
    local skipped; skipped=$(grep -c SKIPPED "$logs/$name.log")
    [ "$skipped" -eq 0 ] || line+=" [$skipped SKIPPED]"
    if [ $code -eq 0 ]; then
        summary+=("ok      $name ($((SECONDS - start)) s) $line")
    else
        failed=$((failed + 1))
        [ $code -ne 124 ] || line="after its $limit s $line"
        summary+=("FAILED  $name ($((SECONDS - start)) s, exit $code) $line")
        echo "---- $name, its last lines ----"
        grep -E '^(test .*FAILED|thread .*panicked|error|mstar: |FAIL)' "$logs/$name.log" | head -n 20
        tail -n 15 "$logs/$name.log"
    fi
    echo "${summary[-1]}"
}

# compute-sanitizer: named, on the path, or in CUDA's folders.
sanitizer() {
    local at
    for at in "${BUNDLE_SANITIZER:-}" "$(command -v compute-sanitizer)" \
        "${CUDA_HOME:-/usr/local/cuda}"/bin/compute-sanitizer /usr/local/cuda*/bin/compute-sanitizer \
        /usr/local/cuda*/compute-sanitizer/compute-sanitizer /opt/nvidia/*/compute-sanitizer; do
        [ -n "$at" ] && [ -x "$at" ] && [ -f "$at" ] && { echo "$at"; return; }
    done
    return 1
}

for part in "$@"; do
    case $part in
        machine)
            [ -x mstar ] || { skip machine "no program here"; continue; }
            step machine ./mstar backends
            cat "$logs/machine.log" ;;
        kernels)
            [ -x mstar ] || { skip kernels "no program here"; continue; }
            step kernels ./mstar kernels build --check ;;
        tests)
            ran=0
            for test in tests/*; do
                [ -x "$test" ] && [ -f "$test" ] || continue
                ran=1
                # One by one: some hold a stream up, and a driver that loads a kernel for another waits until all streams have run.
                # What holds of every family, and the sanitizers' list, are parts of their own.
                step "$(basename "$test")" "${under[@]}" "$test" ${filter:+"$filter"} --nocapture --test-threads 1 --skip cuda::trials
                # What holds of every family, where no test beside it holds a stream up.
                [ "$(basename "$test")" != mstar_kernels ] ||
                    step trials "${under[@]}" "$test" "cuda::trials${filter:+::$filter}" --nocapture --skip every_variant_of_the_list_runs
            done
            [ $ran = 1 ] || skip tests "no test executable here" ;;
        sanitize)
            [ -x tests/mstar_kernels ] || { skip sanitize "no tests of the kernels here"; continue; }
            list=(tests/mstar_kernels cuda::trials::sanitize::every_variant_of_the_list_runs --nocapture --test-threads 1)
            # Once without, so that kernels are compiled and what fails by itself is told apart.
            step sanitize-plain "${list[@]}"
            if grep -q "SKIPPED every_variant" "$logs/sanitize-plain.log"; then
                skip sanitize "there is no device to watch; see sanitize-plain.log"
            elif at=$(sanitizer); then
                for tool in ${BUNDLE_TOOLS:-memcheck racecheck initcheck}; do
                    step "sanitize-$tool" "$at" --tool "$tool" --error-exitcode 97 "${list[@]}"
                done
            else
                skip sanitize "no compute-sanitizer (BUNDLE_SANITIZER names one)"
            fi ;;
        foreign)
            [ -x foreign-cuda ] || { skip foreign "not in this folder"; continue; }
            step foreign-cuda ./foreign-cuda ;;
        specs | graphs)
            [ -x mstar ] || { skip "$part" "no program here"; continue; }
            folder=specs; [ "$part" = specs ] && folder=specs/eager
            [ -d "$folder" ] || { skip "$part" "no specs here"; continue; }
            for spec in "$folder"/*.yaml; do
                [ -f "$spec" ] && [[ $spec == *"$filter"* ]] || continue
                more=()
                [ "$part" = graphs ] && ! grep -q '^graph:' "$spec" && more=(--set 'graph.buckets=[1, 2, 4, 8, 16, 32]')
                step "$part-$(basename "$spec" .yaml)" ./mstar run "$spec" --device "$device" --verify 0.02 "${more[@]}"
            done ;;
        across)
            [ -x mstar ] && [ -d specs/eager ] || { skip across "no program or no specs here"; continue; }
            ./mstar parity --help 2>&1 | grep -q -- --across || { skip across "this program has no parity --across"; continue; }
            for spec in specs/eager/*.yaml; do
                [ -f "$spec" ] && [[ $spec == *"$filter"* ]] || continue
                step "across-$(basename "$spec" .yaml)" ./mstar parity --across "cpu,$device" "$spec"
            done ;;
        parity)
            [ -x mstar ] || { skip parity "no program here"; continue; }
            [ -n "$cases" ] && [ -e "$cases" ] || { skip parity "no cases here (MSTAR_REFERENCE names some)"; continue; }
            step parity ./mstar parity "$cases" --device "$device" ;;
        *) echo "no part $part" >&2; exit 2 ;;
    esac
done
printf '\n== commit %s, %s\n' "$(cat commit 2>/dev/null || echo unknown)" "$device"
printf '%s\n' "${summary[@]}"
echo "$steps steps, $failed failed, $skips parts skipped; logs in $logs"
[ $failed -eq 0 ] && [ $steps -gt 0 ]
RUN
chmod +x "$out/run.sh"
executables=("$out"/mstar "$out"/foreign-cuda "$out"/tests/*)
for file in "${executables[@]}"; do [ -f "$file" ] && stat -c '%s %n' "$file"; done |
    awk '{ all += $1; if ($1 > most) most = $1 } END { printf "%d executables, the largest %.1f MiB, together %.1f MiB\n", NR, most / 2^20, all / 2^20 }'
du -sh "$out"
