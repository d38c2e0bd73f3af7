#!/usr/bin/env bash
# Everything there is to run on a machine with an NVIDIA GPU, without network: build, tests, sanitizers, a speed check,
# and a table of what happened. Steps by name, any number of them: tests/gpu.sh build tests
#
#   build     installs the package into $SITE           kernels   the kernels alone, against the CPU executor
#   info      what the run-time compiler finds          tests     the GPU's own tests (tests/test_gpu*.py)
#   suite     all other tests, on the GPU backend       two       tests that need two GPUs
#   sanitize  memcheck, racecheck, synccheck            bench     a short speed check
#   delays    the warpgroup kernel with random sleeps
#
# OUT: folder of the logs. SITE: where the package is installed. EXTRA_SITE: folders with more Python packages (hypothesis,
# jaxtyping, beartype, gguf, tokenizers, ...). JAXINFER_MODEL: SmolLM2 as GGUF, see tests/test_gpu_models.py. JOBS: test
# files that run at once. KERNELS: folder of the kernels test's program and cubins. SANITIZER: compute-sanitizer.
set -uo pipefail
cd "$(dirname "$0")/.."
out=${OUT:-$(mktemp -d)}
site=${SITE:-$out.site}  # not into the source tree
kernels=${KERNELS:-$site.kernels}
jobs=${JOBS:-6}
python=${PYTHON:-python3}
# Subprocesses of tests must not find the source folder instead of the installed package.
export PYTHONSAFEPATH=1
export PYTHONPATH=$site${EXTRA_SITE:+:$EXTRA_SITE} XLA_PYTHON_CLIENT_PREALLOCATE=false PYTHONDONTWRITEBYTECODE=1
export JAXINFER_CACHE=${JAXINFER_CACHE:-$site.cache}
mkdir -p "$out" "$site"
steps=("$@")
[ ${#steps[@]} -eq 0 ] && steps=(build info kernels delays tests suite sanitize bench)
failed=0
table=""

# Checked annotations and hypothesis are for machines that have the packages; without them conftest.py only skips.
pytest() {
  local more=""
  "$python" -P -c 'import beartype, hypothesis, jaxtyping' 2>/dev/null || more=--noconftest
  "$python" -P -m pytest -q $more -W default --tb=short -rfE "$@"
}

# test_files OPTIONS -- FILE...: every file in a process of its own, some at once. Prints the logs of files that failed,
# then a line for each file and the totals.
test_files() {
  local options=() logs file running=0 bad=0 status
  while [ "$1" != -- ]; do options+=("$1"); shift; done
  shift
  logs=$(mktemp -d)
  for file in "$@"; do
    if [ "$running" -ge "$jobs" ]; then wait -n; running=$((running - 1)); fi
    { pytest "${options[@]}" "$file" >"$logs/$(basename "$file")" 2>&1; echo $? >"$logs/$(basename "$file").status"; } &
    running=$((running + 1))
  done
  wait
  for file in "$@"; do
    status=$(cat "$logs/$(basename "$file").status")
    [ "$status" -eq 0 ] || [ "$status" -eq 5 ] || { bad=$((bad + 1)); echo "== $file"; cat "$logs/$(basename "$file")"; }
  done
  for file in "$@"; do
    grep -hE '^(kernel |attention_|merge |append |all  )' "$logs/$(basename "$file")"  # reports of times
    printf '%-36s %s\n' "$(basename "$file")" "$(tail -n 1 "$logs/$(basename "$file")")"
  done
  cat "$logs"/*.py | grep -E '^(FAILED|ERROR) ' | cut -c1-200
  cat "$logs"/*.py | grep -oE '[0-9]+ (passed|failed|skipped|errors?)' |
    awk '{sum[$2] += $1} END {for (word in sum) printf "%d %s  ", sum[word], word; print ""}'
  rm -r "$logs"
  return $((bad > 0))
}

step() {  # step NAME COMMAND...: runs it, keeps its log, adds a line to the table
  local name=$1 log=$out/$1.log begin=$SECONDS status
  shift
  echo "== $name"
  if "$@" >"$log" 2>&1; then status=ok; else status=FAILED failed=1; fi
  tail -n "${TAIL:-12}" "$log"
  table+=$(printf '%-10s %-7s %5d s  %s' "$name" "$status" $((SECONDS - begin)) "$(tail -n 1 "$log" | cut -c1-80)")$'\n'
}

run_kernels() {
  "$python" -P tests/cuda/build.py "$kernels" "${ARCH:-sm_90a}" && "$kernels/test_kernels" "$kernels" || return 1
  [ ! -x "$kernels/test_prefill" ] || run_prefill "$kernels"
}

run_prefill() {  # run_prefill FOLDER: in shares side by side, because the CPU executor takes most of the time
  local result=0 share shares=12 running=()
  for ((share = 0; share < shares; share++)); do
    timeout 120 "$1/test_prefill" "$1" "" $share/$shares >"$1/share$share" &
    running+=($!)
  done
  for share in "${running[@]}"; do wait "$share" || result=1; done
  cat "$1"/share*
  return $result
}

# Sleeps before arrivals and waits change the order of everything that no barrier orders, and not one bit of a result.
run_delays() {
  local folder
  [ -x "$kernels/test_prefill" ] || "$python" -P tests/cuda/build.py "$kernels" sm_90a || return 1
  JAXINFER_INJECT_DELAYS=7 "$python" -P tests/cuda/build.py "$kernels.delays" sm_90a test_prefill || return 1
  for folder in "$kernels" "$kernels.delays"; do
    run_prefill "$folder" >"$folder/results" || { grep FAIL "$folder/results"; return 1; }
    grep -o '^.*bits [0-9a-f]*' "$folder/results" | sort >"$folder/bits"
  done
  diff "$kernels/bits" "$kernels.delays/bits" && echo "$(wc -l <"$kernels/bits") cases with the same bits"
}

sanitize() {
  local sanitizer tool result=0
  sanitizer=${SANITIZER:-$(command -v compute-sanitizer ||
    ls /usr/local/cuda*/bin/compute-sanitizer /usr/local/cuda*/compute-sanitizer/compute-sanitizer 2>/dev/null | head -n 1)}
  [ -n "$sanitizer" ] || { echo "compute-sanitizer is not here: skipped"; return 0; }
  [ -x "$kernels/test_kernels" ] || "$python" -P tests/cuda/build.py "$kernels" "${ARCH:-sm_90a}" || return 1
  # All of it ends within 8 minutes: what takes too long fails.
  local end=$((SECONDS + 450)) begin
  # As far as the reports of CUDA 13.0 show, racecheck follows an mbarrier from the threads that arrive, not from the lanes
  # whose accesses a __syncwarp puts before that arrival. What its cases use of a block's description is written and read by
  # arriving lanes alone. A layout with positions and masks of absent pages are read by all lanes: there it would report
  # what is no race, and step delays is the check.
  for tool in memcheck racecheck synccheck; do
    echo "-- $tool of the kernels against the CPU executor"
    begin=$SECONDS
    timeout $((end - SECONDS > 0 ? end - SECONDS : 1)) "$sanitizer" --tool "$tool" --error-exitcode 9 --print-limit 5 \
      "$kernels/test_kernels" "$kernels" sanitize | grep -v ^PASS
    [ "${PIPESTATUS[0]}" -eq 0 ] || { echo "$tool: FAILED or out of time"; result=1; }
    if [ -x "$kernels/test_prefill" ]; then
      timeout $((end - SECONDS > 0 ? end - SECONDS : 1)) "$sanitizer" --tool "$tool" --error-exitcode 9 --print-limit 5 \
        "$kernels/test_prefill" "$kernels" sanitize | grep -v PASS
      [ "${PIPESTATUS[0]}" -eq 0 ] || { echo "$tool of the warpgroup kernel: FAILED or out of time"; result=1; }
    fi
    echo "$tool: $((SECONDS - begin)) s"
  done
  # The launches of the FFI handlers, with buffers of exact size. XLA's own kernels are not ours to check, nor are the
  # calls of the CUDA API that fail because XLA asks what the driver can do.
  echo "-- memcheck of JAX calls"
  begin=$SECONDS
  XLA_PYTHON_CLIENT_ALLOCATOR=platform PYTHONPATH=tests:$PYTHONPATH timeout $((end - SECONDS > 0 ? end - SECONDS : 1)) \
    "$sanitizer" --tool memcheck --kernel-name kns=jaxinfer --report-api-errors no --error-exitcode 9 --print-limit 5 \
    "$python" -P tests/test_gpu_sanitize.py || { echo "memcheck of JAX calls: FAILED or out of time"; result=1; }
  echo "JAX calls: $((SECONDS - begin)) s"
  [ $result -eq 0 ] && echo "no errors in $((SECONDS - end + 450)) s"
  return $result
}

for name in "${steps[@]}"; do
  case $name in
    build) step build "$python" -m pip install -q --no-build-isolation --no-deps --no-index --upgrade --target "$site" . ;;
    info) TAIL=40 step info "$python" -P -c 'import json, jax, jaxinfer.jit as j; print(jax.devices()); print(json.dumps(j.info(), indent=1))' ;;
    kernels) TAIL=20 step kernels run_kernels ;;
    tests) TAIL=70 step tests test_files --durations=5 -- tests/test_gpu*.py ;;
    suite) TAIL=90 step suite test_files -m "not model" -- $(ls tests/test_*.py | grep -v test_gpu) ;;
    two) TAIL=30 step two pytest tests/test_gpu_programs.py -k "two_devices or second_device" ;;
    delays) TAIL=20 step delays run_delays ;;
    sanitize) TAIL=60 step sanitize sanitize ;;
    bench)  # PEERS: a folder with FlashInfer and flash-attn3-jax, which GPU machines lack
      for table in decode prefill; do
        TAIL=60 step "bench-$table" env PYTHONPATH="$site${PEERS:+:$PEERS}" \
          "$python" -P -m jaxinfer bench "$table" --json "$out/$table.json" --output "$out/$table.png"
      done ;;
    *) echo "unknown step $name"; exit 2 ;;
  esac
done
printf '\n%s' "$table"
exit $failed
