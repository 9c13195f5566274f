#!/usr/bin/env bash
# Plants each fault of tests/mutants.md and demands that the test named there fails, and, where the row names a spec,
# that `mstar run SPEC --verify 1` finds a wrong row. Without a fault the same tests and runs must pass. Needs cargo and python3.
#
#   tools/mutants.sh            all rows
#   tools/mutants.sh NAME...    those rows
set -uo pipefail
cd "$(dirname "$0")/.."
missed=0 caught=0
declare -A unplanted # tests, and runs, that end well with nothing planted

rows=$(sed -n 's/^| `\([a-z0-9-]*\)` |[^|]*| `\([a-z-]*\)` | `\([A-Za-z0-9_:]*\)` | \([^|]*\) |$/\1 \2 \3 \4/p' tests/mutants.md)
[ -n "$rows" ] || { echo "tests/mutants.md lists nothing"; exit 1; }

# Every test executable and the program, built once: `package folder executable`, the program's package being `program`.
crates=$(awk '{ print $2 } END { print "mstar" }' <<<"$rows" | sort -u)
# A library's kernels are features that its backends switch on.
features=$(printf '%s/mutants,' $crates)$(printf 'mstar-kernels/%s,' paged mla dense flex dsa)
built=$(cargo test -q --tests --no-run --message-format json $(printf -- '-p %s ' $crates) --features "${features%,}" | python3 -c '
import json, os, sys
for line in sys.stdin:
    made = json.loads(line)
    if made.get("executable"):
        package = made["package_id"].rsplit("#", 1)[1].split("@")[0]
        package = package if made["profile"]["test"] else "program"
        print(package, os.path.dirname(made["manifest_path"]), made["executable"])') || exit 1
program=$(awk '$1 == "program" { print $3 }' <<<"$built")
[ -x "$program" ] || { echo "no program was built"; exit 1; }

run_test() { # package, test path -> 0: it passed, 1: it failed, 2: there is no such test
    local package folder executable log status
    while read -r package folder executable; do
        [ "$package" = "$1" ] || continue
        log=$(cd "$folder" && CARGO_MANIFEST_DIR=$folder "$executable" --exact "$2" 2>&1 </dev/null)
        status=$?
        grep -q "^running 1 test" <<<"$log" || continue
        [ "$status" -eq 0 ] && return 0
        grep -qE "^test result: FAILED|panicked" <<<"$log" && return 1
        # It ended in some other way, such as a signal: nothing that it says names a fault.
        return 3
    done <<<"$built"
    return 2
}

while read -r name package test spec; do
    [ $# -eq 0 ] || [[ " $* " == *" $name "* ]] || continue
    if [ -z "${unplanted[$package $test]:-}" ]; then
        MSTAR_MUTANT= run_test "$package" "$test"
        case $? in
            0) unplanted[$package $test]=passes ;;
            2) echo "BROKEN  $name: no test $test in $package"; missed=$((missed + 1)); continue ;;
            *) echo "BROKEN  $name: $test fails with nothing planted"; missed=$((missed + 1)); continue ;;
        esac
    fi
    MSTAR_MUTANT=$name run_test "$package" "$test"
    case $? in
        1) echo "caught  $name by $test"; caught=$((caught + 1)) ;;
        *) echo "MISSED  $name by $test"; missed=$((missed + 1)) ;;
    esac
    spec=${spec//\`/}
    if [ "${spec:--}" != "-" ]; then
        if [ -z "${unplanted[$spec]:-}" ]; then
            if ! MSTAR_MUTANT= "$program" run $spec --verify 1 --quiet >/dev/null 2>&1; then
                echo "BROKEN  $name: --verify on $spec fails with nothing planted"; missed=$((missed + 1)); continue
            fi
            unplanted[$spec]=passes
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
