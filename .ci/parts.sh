# Sourced: parts that run side by side, each with its output kept, and one line about each at the end.
python=${PYTHON:-python3}
logs=$(mktemp -d)
# Shared by all parts, and by the next run of either script: nothing is compiled twice.
cache=${MLAFLASH_CACHE_DIR:-$("$python" -m mlaflash cache path)} || exit
export MLAFLASH_CACHE_DIR=$cache
# One thread of each part is enough: those that NumPy would start for every core only spin.
export OPENBLAS_NUM_THREADS=1 OMP_NUM_THREADS=1
tests=("$python" -m pytest -q -m gpu --require-gpu -p no:cacheprovider --kernel-cache "$cache")
# Backtraces of the host would keep Python's frames, and with them the memory of calls that are over.
sanitizer=(compute-sanitizer --error-exitcode 7 --show-backtrace device)

run() { # name, command...: in the background, for $limit seconds at most
    local name=$1
    shift
    (timeout --kill-after=5 "$limit" "$@" >"$logs/$name" 2>&1; echo $? >"$logs/$name.status") &
}

report() { # waits for all parts; fails if one did
    local status name code failed=0
    wait
    for status in "$logs"/*.status; do
        name=$(basename "$status" .status)
        code=$(cat "$status")
        if [ "$code" = 0 ]; then
            echo "passed: $name: $(grep -E "passed|ERROR SUMMARY|RACECHECK SUMMARY" "$logs/$name" | tail -n 2 | paste -sd ' ')"
            continue
        fi
        failed=1
        case $code in
            124 | 137) echo "CUT OFF: $name, after $limit s" ;;
            *) echo "FAILED: $name (exit status $code)" ;;
        esac
        grep -E "^(FAILED|ERROR|FAIL)|Error:|Race reported|Barrier error|Uninitialized|    (and|at) " "$logs/$name" | head -n 12
        tail -n 3 "$logs/$name"
    done
    echo "logs in $logs"
    return $failed
}
