#!/usr/bin/env bash
# Plants each fault of tests/mutants.md and demands that the test named there fails, and, where the row names a spec,
# that `mstar run SPEC --verify 1` finds a wrong row. Without a fault the same tests and runs must pass.
#
#   tools/mutants.sh            all rows
#   tools/mutants.sh NAME...    those rows
set -uo pipefail
cd "$(dirname "$0")/.."
features=(--features "mstar/mutants")
missed=0 caught=0
declare -A right # runs that end well with nothing planted

test_fails() { # package, test path -> 0 when the test ran and failed
    local log features=mutants
    # A library's kernels are features that its backends switch on.
    [ "$1" = mstar-kernels ] && features+=,paged,mla,dsa,dense,flex
    log=$(cargo test -q --tests -p "$1" --features "$features" -- --exact "$2" 2>&1)
    local status=$?
    grep -q "running 1 test" <<<"$log" || { echo "    no test $2 in $1"; return 2; }
    [ "$status" -ne 0 ] && grep -qE "^test result: FAILED|panicked|FAILED" <<<"$log"
}

rows=$(sed -n 's/^| `\([a-z0-9-]*\)` |[^|]*| `\([a-z-]*\)` | `\([A-Za-z0-9_:]*\)` | \([^|]*\) |$/\1 \2 \3 \4/p' tests/mutants.md)
[ -n "$rows" ] || { echo "tests/mutants.md lists nothing"; exit 1; }
cargo build -q -p mstar "${features[@]}" || exit 1
program=${CARGO_TARGET_DIR:-target}/debug/mstar

while read -r name package test spec; do
    [ $# -eq 0 ] || [[ " $* " == *" $name "* ]] || continue
    if MSTAR_MUTANT= test_fails "$package" "$test"; then
        echo "BROKEN  $name: $test fails with nothing planted"; missed=$((missed + 1)); continue
    fi
    MSTAR_MUTANT=$name test_fails "$package" "$test"
    case $? in
        0) echo "caught  $name by $test"; caught=$((caught + 1)) ;;
        *) echo "MISSED  $name by $test"; missed=$((missed + 1)) ;;
    esac
    spec=${spec//\`/}
    if [ "${spec:--}" != "-" ]; then
        if [ -z "${right[$spec]:-}" ]; then
            if ! MSTAR_MUTANT= "$program" run $spec --verify 1 --quiet >/dev/null 2>&1; then
                echo "BROKEN  $name: --verify on $spec fails with nothing planted"; missed=$((missed + 1)); continue
            fi
            right[$spec]=yes
        fi
        MSTAR_MUTANT=$name "$program" run $spec --verify 1 --quiet >/dev/null 2>&1
        status=$?
        if [ $status -eq 1 ]; then
            echo "caught  $name by --verify on $spec"; caught=$((caught + 1))
        else
            echo "MISSED  $name by --verify on $spec (exit $status)"; missed=$((missed + 1))
        fi
    fi
done <<<"$rows"
echo "$caught caught, $missed missed"
[ "$missed" -eq 0 ]
