#!/usr/bin/env bash
# Everything that a card is to say, in one run of at most 8 minutes: rates, tests, the papers' Table 5,
# searches beside updates, and a training for the time that is left.
#
#   tests/gpu/on_a_card.sh RESULTS [--histories FILE.npz] [--steps abcef] [--seconds 480] [--device cuda|cpu]
#                          [--checkpoint FOLDER]
#
# It needs a checkout, Python 3.12 (PYTHON, else python3) with NumPy, PyTorch, Triton, typer, rich and pytest, and g++ for
# step e. Histories come from `python -m tests.gpu.training prepare ml-1m FILE.npz --root FOLDER` on a machine with the
# data. Each step writes one small file and may fail: the next goes on. A training goes on from a checkpoint, which is
# RESULTS/training of an earlier run. `--device cpu` tries the whole script at the smallest sizes, and counts for nothing;
# kernels are interpreted there, which Triton 3.6 can do with NumPy 2.3 and older (`--seconds 900` on two busy cores).
set -u

usage() { sed -n '2,13p' "$0" | cut -c3- >&2; exit 2; }

[ $# -ge 1 ] && [ "${1#--}" = "$1" ] || usage
results=$1 histories="" steps=abcef seconds=480 device=cuda checkpoint=""
shift
while [ $# -gt 0 ]; do
  [ $# -ge 2 ] || usage
  case $1 in
    --histories) histories=$2 ;;
    --steps) steps=$2 ;;
    --seconds) seconds=$2 ;;
    --device) device=$2 ;;
    --checkpoint) checkpoint=$2 ;;
    *) usage ;;
  esac
  shift 2
done
mkdir -p "$results" && results=$(cd "$results" && pwd) || exit 2
[ -z "$histories" ] || histories=$(realpath "$histories")
[ -z "$checkpoint" ] || cp -r "$checkpoint" "$results/training"
cd "$(dirname "$0")/../.." || exit 2

python=${PYTHON:-python3}
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
export PYTHONPATH=$PWD PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1
interpreted=(env)
if [ "$device" = cpu ]; then
  interpreted=(env TRITON_INTERPRET=1 FRESHET_GPU_TESTS_ON=cpu)
  export OMP_NUM_THREADS=1
fi
freshet=("$python" -c "from services.cli.main import main; main()")
summary=$scratch/steps.txt
: >"$summary"

left() { echo $((seconds - SECONDS)); }

# step LETTER SECONDS FILE COMMAND...: one step's output goes to its file, its result and time to the summary.
step() {
  local letter=$1 limit=$2 file=$results/$3 began=$SECONDS status
  shift 3
  case $steps in *"$letter"*) ;; *) return 0 ;; esac
  [ "$device" = cuda ] || limit=$((3 * limit)) # the interpreter is slow
  [ "$limit" -le "$(left)" ] || limit=$(left)
  if [ "$limit" -lt 5 ]; then
    echo "$letter  no time left: $*" >>"$summary"
    return 0
  fi
  echo "\$ $* ($limit s)" >>"$file"
  timeout -k 5 "$limit" "$@" >>"$file" 2>&1
  status=$?
  case $status in 0) status="passed" ;; 124 | 137) status="out of time" ;; *) status="failed ($status)" ;; esac
  echo "$letter  $status after $((SECONDS - began)) s: ${*:1:6}" | cut -c1-200 >>"$summary"
}

# The packages first, so that the wrong ones are seen at once; figures of another PyTorch say little.
"$python" - >>"$summary" 2>&1 <<'EOF'
import sys, numpy, torch, triton
found = f"Python {sys.version.split()[0]}, PyTorch {torch.__version__}, Triton {triton.__version__}, NumPy {numpy.__version__}"
expected = sys.version_info[:2] == (3, 12) and torch.__version__.startswith("2.11.") and triton.__version__.startswith("3.6.")
print(found if expected else f"{found}: NOT Python 3.12, PyTorch 2.11, Triton 3.6")
EOF
echo "commit $(git rev-parse HEAD 2>/dev/null || echo unknown), device $device" >>"$summary"

# The processor's kernels, for step e; meanwhile the card is busy with others.
kernels="mol_scores top_rows"
[ "$device" = cuda ] || kernels="$kernels mol_gradients"
# shellcheck disable=SC2086
"$python" deploy/build_kernels.py $kernels >"$scratch/kernels.txt" 2>&1 &
building=$!

# a: the card as it is found
if [ "$device" = cuda ]; then
  step a 20 card.txt nvidia-smi --query-gpu=name,driver_version,memory.total,clocks.sm,clocks.mem,clocks.max.sm,clocks.max.mem,power.limit,temperature.gpu,compute_mode --format=csv
  step a 40 card.txt "$python" -c "
import torch
from services.offline.evaluation.gpu.rates import measure_card
found = measure_card()
made = torch.cuda.get_device_properties(0)
print(made)
print(f'SUMMARY {made.name}: float16 {2e-12 * found.multiply_adds:.0f} TFLOP/s, {1e-12 * found.exponentials:.2f} T exponentials/s, copy {1e-12 * found.bytes_moved:.2f} TB/s read and written')"
  step a 10 card.txt nvidia-smi --query-gpu=clocks.sm,clocks.mem,temperature.gpu,power.draw --format=csv
else
  step a 40 card.txt "$python" -c "import platform; print('SUMMARY no card:', platform.processor())"
fi

# b: the tests, a process per kind of test; what they compile is there for the steps after
tested() {
  local kind number=0 status=0 pids=()
  for kind in "enclose and not bfloat16" "enclose and bfloat16" "exact or grouped" "certificate"; do
    number=$((number + 1))
    "${interpreted[@]}" "$python" -m pytest tests/gpu -p no:cacheprovider --durations=5 -k "$kind" >"$scratch/tests-$number.txt" 2>&1 &
    pids+=($!)
  done
  for number in "${pids[@]}"; do wait "$number" || status=1; done
  return $status
}
export -f tested
export scratch python
step b 110 tests.txt bash -c "interpreted=(${interpreted[*]}); tested"
for file in "$scratch"/tests-?.txt; do
  [ ! -f "$file" ] || { cat "$file"; tail -1 "$file" | sed 's/^/SUMMARY /'; } >>"$results/tests.txt"
done

# c: Table 5, what matters most first
batches=(--batch 32 --batch 1)
[ "$device" = cuda ] || batches=(--batch 2 --batch 1)
step c 130 bench.txt "${freshet[@]}" bench gpu --device "$device" --shape books --quick --json "${batches[@]}"
if [ "$device" = cuda ]; then
  step c 45 bench.txt "${freshet[@]}" bench gpu --shape ml-20m --quick --json "${batches[@]}"
  step c 50 bench.txt "${freshet[@]}" bench gpu --shape nq320k --quick --json "${batches[@]}"
fi

# e: 1,000 changes a second beside searches
wait "$building" || { cat "$scratch/kernels.txt" >>"$results/updates.txt"; echo "e  the processor's kernels were not built" >>"$summary"; }
lasting=(--shape books --seconds 4)
[ "$device" = cuda ] || lasting=(--shape ml-1m --seconds 1)
step e 70 updates.txt "$python" -m tests.gpu.updates --device "$device" "${lasting[@]}"

# f: a mixture and a dot product beside each other for the time that is left
trained() {
  local options=("$histories" --seconds "$training_seconds" --device "$device")
  "$python" -m tests.gpu.training train "${options[@]}" --head dot >"$scratch/dot.txt" 2>&1 &
  local other=$! status
  "$python" -m tests.gpu.training train "${options[@]}" --head mol --checkpoint "$results/training"
  status=$?
  wait "$other" || status=$?
  return $status
}
export -f trained
export histories device results
if [ -n "$histories" ]; then
  training_seconds=$(($(left) - 20))
  [ "$device" = cuda ] || training_seconds=$((training_seconds < 40 ? training_seconds : 40))
  export training_seconds
  step f "$(left)" training.txt bash -c trained
  [ ! -f "$scratch/dot.txt" ] || cat "$scratch/dot.txt" >>"$results/training.txt"
fi

# The table: what each step found, then how each ended.
{
  [ ! -f "$results/bench.txt" ] ||
    grep -hE '^(books|ml-20m|nq320k) .*(brute_force|top_k_avg\((200|4000)\)|per_embedding\(100\)|PyTorch|faiss|failed)' "$results/bench.txt"
  for file in card tests updates training; do
    [ ! -f "$results/$file.txt" ] || grep -h '^SUMMARY' "$results/$file.txt" | sed "s/^SUMMARY/$file:/"
  done
  cat "$scratch/steps.txt"
  echo "$SECONDS s in all"
} >"$results/summary.txt"
cut -c1-200 "$results/summary.txt"
find "$results" -type f -size +16M -exec echo "larger than 16 MiB, and may not come back:" {} \;
