#!/usr/bin/env bash
# Runs the tests marked gpu and the benchmarks of bench/ on a CUDA device, and prints one line for each.
# Works from a plain checkout with any interpreter that has torch and the packages named below: PYTHON=python3.
set -uo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-python3}
export PYTHONPATH="$PWD:$PWD/tools${PYTHONPATH:+:$PYTHONPATH}"

"$python" - <<'PY' || exit 2
import importlib.util, sys
needed = ["torch", "numpy", "pydantic", "yaml", "typer", "rich", "fsspec", "safetensors", "xxhash", "pytest", "hypothesis"]
missing = [name for name in needed if importlib.util.find_spec(name) is None]
if missing:
    sys.exit(f"{sys.executable} lacks: {', '.join(missing)}\nhint: pip install {' '.join(missing)}")
import torch
if not torch.cuda.is_available():
    sys.exit(f"torch {torch.__version__} sees no CUDA device\nhint: choose another interpreter with PYTHON=...")
print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, Python {sys.version.split()[0]}")
PY

table=() worst=0
run() {
  local name=$1 began=$SECONDS status=0
  shift
  echo "== $name"
  "$@" || status=$?
  # pytest exits 5 when no test was chosen
  case $status in 0) word=passed ;; 5) word="no tests" ;; *) word="failed ($status)" worst=1 ;; esac
  table+=("$(printf '%-32s %-12s %5d s' "$name" "$word" $((SECONDS - began)))")
}

mapfile -t files < <(grep -l 'mark\.gpu' -r tests --include='test_*.py')  # others may import what is not installed
run "pytest -m gpu" "$python" -m pytest -q -m gpu -p no:cacheprovider "${files[@]}"  # arguments are for the benchmarks
for script in bench/*.py; do
  [ -e "$script" ] || continue
  grep -q -- '--device' "$script" && run "$script" "$python" "$script" --device cuda "$@"
done
printf '%s\n' "${table[@]}"
exit $worst
