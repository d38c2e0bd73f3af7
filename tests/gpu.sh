#!/usr/bin/env bash
# Everything there is to run on a machine with an NVIDIA GPU, without network, with a table of what happened at the end.
# Without arguments all of it, which 16 cores and an H200 finish within ten minutes: the build; then what measures no
# times, as many jobs at once as there are cores; then a speed check alone. Or steps by name: tests/gpu.sh build tests
#
#   build     installs the package into $SITE           kernels   the kernels alone, against the CPU executor
#   info      what the run-time compiler finds          tests     the GPU's own tests (tests/test_gpu*.py)
#   suite     all other tests, on the GPU backend       two       tests that need two GPUs
#   sanitize  memcheck, racecheck, synccheck            bench     a short speed check
#   delays    the kernels alone, with random sleeps
#
# OUT: folder of the logs. SITE: where the package is installed. EXTRA_SITE: folders with more Python packages (hypothesis,
# jaxtyping, beartype, gguf, tokenizers, ...). JAXINFER_MODEL: SmolLM2 as GGUF, see tests/test_gpu_models.py. JOBS: how many
# at once. LIMIT: seconds that a job may take. KERNELS: folder of the kernel tests' programs and cubins. SANITIZER:
# compute-sanitizer. PEERS: a folder with FlashInfer and flash-attn3-jax, for bench. ARCH: of the GPU, for kernels and
# the like (sm_90a).
set -uo pipefail
cd "$(dirname "$0")/.."
out=$(realpath -m "${OUT:-$(mktemp -d)}")
site=${SITE:-$out.site}  # not into the source tree
kernels=${KERNELS:-$site.kernels}
jobs=${JOBS:-$(nproc)}
limit=${LIMIT:-400}
python=${PYTHON:-python3}
arch=${ARCH:-sm_90a}
sanitizer=${SANITIZER:-$(command -v compute-sanitizer ||
  ls /usr/local/cuda*/bin/compute-sanitizer /usr/local/cuda*/compute-sanitizer/compute-sanitizer 2>/dev/null | head -n 1)}
# Subprocesses of tests must not find the source folder instead of the installed package.
export PYTHONSAFEPATH=1
export PYTHONPATH=$site${EXTRA_SITE:+:$EXTRA_SITE} XLA_PYTHON_CLIENT_PREALLOCATE=false PYTHONDONTWRITEBYTECODE=1
export JAXINFER_CACHE=${JAXINFER_CACHE:-$site.cache}
mkdir -p "$out" "$site"
shopt -s nullglob
steps=("$@")
[ ${#steps[@]} -eq 0 ] && steps=(build info kernels delays tests suite sanitize bench)
for step in "${steps[@]}"; do
  case $step in
    build | info | kernels | tests | suite | two | sanitize | delays | bench) ;;
    *) echo "unknown step $step"; exit 2 ;;
  esac
done

wants() {  # wants STEP...: whether one of these was asked for
  local step
  for step in "$@"; do [[ " ${steps[*]} " == *" $step "* ]] && return 0; done
  return 1
}

# start STEP JOB COMMAND...: in the background, once there is room. Leaves a log, and a line "status seconds".
declare -A started=()
start() {
  local at=$out/$1/$2 begin
  [ -n "${started[$1]:-}" ] || { rm -rf "${out:?}/$1"; mkdir -p "$out/$1"; }  # logs of an earlier call
  started[$1]=yes
  shift 2
  while [ "$(jobs -rp | wc -l)" -ge "$jobs" ]; do wait -n; done
  begin=$SECONDS
  { timeout "$limit" "$@" >"$at.log" 2>&1; echo "$? $((SECONDS - begin))" >"$at.status"; } &
}

# ---- tests in Python ----

# Checked annotations and hypothesis are for machines that have the packages; without them conftest.py only skips.
pytest=("$python" -P -m pytest -q -W default --tb=short -rfE --durations=3)
conftest=true
"$python" -P -c 'import beartype, hypothesis, jaxtyping' 2>/dev/null || conftest=false
$conftest || pytest+=(--noconftest)

# Files that take 80 to 270 s by themselves, longest first, in shares of about a minute.
declare -A shares=(
  [test_gpu_models]=1 [test_gpu_accuracy]=5 [test_accuracy]=4 [test_gpu]=4 [test_reference]=2 [test_regressions_masks]=2
  [test_regressions_pages]=2 [test_generate]=2
)
long=(test_gpu_models test_gpu_accuracy test_accuracy test_gpu test_reference test_regressions_masks
  test_regressions_pages test_generate)

test_file() {  # test_file NAME: its jobs, if its step is wanted
  local step=suite options=(-m "not model") share count=${shares[$1]:-1}
  [[ $1 == test_gpu* ]] && { step=tests; options=(); }
  wants $step || return 0
  if [ "$count" -eq 1 ] || ! $conftest; then
    start $step "$1" "${pytest[@]}" "${options[@]}" "tests/$1.py"
    return
  fi
  for ((share = 0; share < count; share++)); do
    start $step "$1.$share" "${pytest[@]}" "${options[@]}" --share "$share/$count" "tests/$1.py"
  done
}

test_files() {
  local name
  for name in "${long[@]}"; do test_file "$name"; done
  for name in tests/test_*.py; do
    name=$(basename "$name" .py)
    [[ " ${long[*]} " == *" $name "* ]] || test_file "$name"
  done
}

# ---- tests of the kernels alone ----

start_shares() {  # start_shares STEP JOB COUNT COMMAND...: COMMAND i/COUNT for every share i
  local step=$1 job=$2 count=$3 share
  shift 3
  for ((share = 0; share < count; share++)); do start "$step" "$job.$share" "$@" "$share/$count"; done
}

# In shares, because the CPU executor takes most of the time. The warpgroup kernel's program is built for Hopper alone.
test_kernels() {  # test_kernels STEP FOLDER
  start_shares "$1" portable 4 "$2/test_kernels" "$2" ""
  [ ! -x "$2/test_prefill" ] || start_shares "$1" warpgroup 4 "$2/test_prefill" "$2" ""
}

# Sleeps before barriers and waits change the order of everything that no barrier orders, and not one bit of a result.
compare_bits() {
  local step
  for step in kernels delays; do
    grep -hoE '^.*bits [0-9a-f]+' "$out/$step"/{portable,warpgroup}.*.log | sort >"$out/$step/bits"
  done
  diff "$out/kernels/bits" "$out/delays/bits" && [ -s "$out/delays/bits" ] &&
    echo "$(wc -l <"$out/delays/bits") cases with the same bits"
}

sanitize() {
  local tool check
  [ -n "$sanitizer" ] || { start sanitize none echo "compute-sanitizer is not here: skipped"; return; }
  # As far as the reports of CUDA 13.0 show, racecheck follows an mbarrier from the threads that arrive, not from the lanes
  # whose accesses a __syncwarp puts before that arrival. What its cases use of a block's description is written and read by
  # arriving lanes alone. A layout with positions and masks of absent pages are read by all lanes: there it would report
  # what is no race, and step delays is the check.
  for tool in racecheck memcheck synccheck; do
    check=("$sanitizer" --tool $tool --error-exitcode 9 --print-limit 5)
    start_shares sanitize "$tool" "$([ $tool = racecheck ] && echo 8 || echo 1)" \
      "${check[@]}" "$kernels/test_kernels" "$kernels" sanitize
    [ ! -x "$kernels/test_prefill" ] ||
      start sanitize "$tool.warpgroup" "${check[@]}" "$kernels/test_prefill" "$kernels" sanitize
  done
  # The launches of the FFI handlers, with buffers of exact size. XLA's own kernels are not ours to check, nor are the
  # calls of the CUDA API that fail because XLA asks what the driver can do.
  start sanitize memcheck.jax env XLA_PYTHON_CLIENT_ALLOCATOR=platform PYTHONPATH="tests:$PYTHONPATH" \
    "$sanitizer" --tool memcheck --kernel-name kns=jaxinfer --report-api-errors no --error-exitcode 9 --print-limit 5 \
    "$python" -P tests/test_gpu_sanitize.py
}

# ---- what came out ----

failed() {  # failed STATUS_FILE; pytest's 5 says that no test was left of a file
  local status
  read -r status _ <"$1"
  [ "$status" -ne 0 ] && { [ "$status" -ne 5 ] || [[ $1 != */test_* ]]; }
}

report() {
  local step status_file table="" state count sum longest slowest seconds result bad=0
  for step in build info kernels delays tests suite two sanitize bench; do
    [ -n "${started[$step]:-}" ] || continue
    state=ok count=0 sum=0 longest=0 slowest=""
    for status_file in "$out/$step"/*.status; do
      read -r _ seconds <"$status_file"
      count=$((count + 1)) sum=$((sum + seconds))
      if [ "$seconds" -ge "$longest" ]; then longest=$seconds slowest=$(basename "$status_file" .status); fi
      failed "$status_file" || continue
      state=FAILED bad=1
      echo "== $step, $(basename "$status_file" .status): status and seconds $(cat "$status_file")"
      tail -n 40 "${status_file%.status}.log" | cut -c1-300
    done
    case $step in
      tests | suite | two)
        result=$(tail -qn 1 "$out/$step"/*.log | grep -oE '[0-9]+ (passed|failed|skipped|errors?)' |
          awk '{sum[$2] += $1} END {for (word in sum) printf "%d %s  ", sum[word], word}') ;;
      kernels | delays)
        result=$(grep -hoE '^[0-9]+ of [0-9]+ cases failed' "$out/$step"/*.log |
          awk '{bad += $1; all += $3} END {print bad " of " all " cases failed"}') ;;
      sanitize)
        result=$(grep -hoE '(ERROR|RACECHECK) SUMMARY: [0-9]+' "$out/$step"/*.log |
          awk '{sum += $3} END {print sum + 0 " errors in " NR " runs"}') ;;
      info) result=$(head -n 1 "$out/info/info.log" | cut -c1-60) ;;
      *) result=$(tail -qn 1 "$out/$step"/*.log | tail -n 1 | cut -c1-60) ;;
    esac
    table+=$(printf '%-9s %-6s %3d jobs %5d s, longest %4d s %-26s %s' \
      "$step" "$state" "$count" "$sum" "$longest" "$slowest" "$result")$'\n'
  done
  for step in info bench; do
    [ -z "${started[$step]:-}" ] || cat "$out/$step"/*.log
  done
  [ -z "${started[delays]:-}" ] || cat "$out/delays/bits.log"
  [ -z "${started[tests]:-}" ] || grep -hE '^(kernel |attention_|merge |append |all  )' "$out/tests"/*.log  # times to compile
  printf '\n%s%d s in all; logs in %s\n' "$table" $SECONDS "$out"
  return $bad
}

# ---- all of it ----

if wants build; then
  start build package "$python" -m pip install -q --no-build-isolation --no-deps --no-index --upgrade --target "$site" .
fi
if wants kernels delays sanitize; then
  start build kernels "$python" -P tests/cuda/build.py "$kernels" "$arch"
fi
if wants delays; then
  start build delays env JAXINFER_INJECT_DELAYS=7 "$python" -P tests/cuda/build.py "$kernels.delays" "$arch"
fi
wait
for status_file in ${started[build]:+"$out"/build/*.status}; do
  if failed "$status_file"; then report; exit 1; fi
done

if wants info; then
  start info info "$python" -P -c \
    'import json, jax, jaxinfer.jit as j; print(jax.devices()); print(json.dumps(j.info(), indent=1))'
fi
test_files
if wants sanitize; then sanitize; fi
if wants kernels delays; then test_kernels kernels "$kernels"; fi
if wants delays; then test_kernels delays "$kernels.delays"; fi
if wants two; then start two two "${pytest[@]}" tests/test_gpu_programs.py -k "two_devices or second_device"; fi
wait
if wants delays; then
  compare_bits >"$out/delays/bits.log" 2>&1
  echo "$? 0" >"$out/delays/bits.status"
fi
if wants bench; then
  for table in decode prefill; do
    start bench "$table" env PYTHONPATH="$site${EXTRA_SITE:+:$EXTRA_SITE}${PEERS:+:$PEERS}" \
      "$python" -P -m jaxinfer bench "$table" --seconds 50 --json "$out/$table.json" --output "$out/$table.png"
    wait
  done
fi
report
