#!/usr/bin/env bash
# Everything there is to run on a machine with an NVIDIA GPU, without network: build, tests, sanitizers, a speed check,
# and a table of what happened. Logs go to $OUT (default: a temporary folder). Steps by name: tests/gpu.sh build tests
set -uo pipefail
cd "$(dirname "$0")/.."
out=${OUT:-$(mktemp -d)}
site=${SITE:-$out.site}  # where the package is installed; not into the source tree
python=${PYTHON:-python3}
export PYTHONPATH=$site XLA_PYTHON_CLIENT_PREALLOCATE=false PYTHONDONTWRITEBYTECODE=1
export JAXINFER_CACHE=${JAXINFER_CACHE:-$site.cache}
mkdir -p "$out" "$site"
steps=("$@")
[ ${#steps[@]} -eq 0 ] && steps=(build info kernels jit tests suite sanitize bench)
# conftest.py wants packages that a GPU machine may lack (beartype); it only checks annotations and skips GPU tests.
pytest=("$python" -P -m pytest -q --noconftest -W default -p no:cacheprovider --tb=short)
# Small shapes: a sanitizer makes everything a hundred times slower.
small="test_empty_batches or (test_append and None) or (test_every_layout and paged) or test_loop"
failed=0
table=""

step() {  # step NAME COMMAND...: runs it, keeps its log, adds a line to the table
  local name=$1 log=$out/$1.log begin=$SECONDS status
  shift
  echo "== $name"
  if "$@" >"$log" 2>&1; then status=ok; else status=FAILED failed=1; fi
  tail -n "${TAIL:-12}" "$log"
  table+=$(printf '%-10s %-7s %5d s  %s' "$name" "$status" $((SECONDS - begin)) "$(tail -n 1 "$log" | cut -c1-80)")$'\n'
}

sanitize() {
  command -v compute-sanitizer >/dev/null || { echo "compute-sanitizer is not here: skipped"; return 0; }
  local tool result=0
  for tool in memcheck racecheck synccheck; do
    echo "-- $tool"
    # XLA's own kernels are not ours to check.
    compute-sanitizer --tool "$tool" --kernel-name regex=jaxinfer --error-exitcode 9 --target-processes all \
      "${pytest[@]}" tests/test_gpu.py -k "$small" || result=1
  done
  return $result
}

for name in "${steps[@]}"; do
  case $name in
    build) step build "$python" -m pip install -q --no-build-isolation --no-deps --no-index --upgrade --target "$site" . ;;
    info) step info "$python" -P -c 'import json, jax, jaxinfer.jit as j; print(jax.devices()); print(json.dumps(j.info(), indent=1))' ;;
    kernels) TAIL=70 step kernels "$python" -P .ci/compile_kernels.py --arch sm_90a --jobs 8 ;;
    jit) step jit "${pytest[@]}" tests/test_jit.py ;;
    tests) TAIL=60 step tests "${pytest[@]}" tests/test_gpu.py --durations=5 ;;
    suite) TAIL=40 step suite "${pytest[@]}" tests --ignore=tests/test_gpu.py --ignore=tests/test_jit.py -m "not model" --ignore-glob="*test_models*" ;;
    sanitize) step sanitize sanitize ;;
    bench) TAIL=30 step bench "$python" -P tests/gpu_bench.py ;;
    *) echo "unknown step $name"; exit 2 ;;
  esac
done
printf '\n%s' "$table"
exit $failed
