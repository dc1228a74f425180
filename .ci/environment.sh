# Sourced by run_sweep.sh and run_tests.sh, from the top of the checkout.
#
# prepare_environment [extra]: sets PYTHON to an interpreter that has sp_bench, and the extra, installed. Makes .venv if
# there is none and installs the pinned set of constraints.txt; does nothing when neither has changed since.
#
# SP_BENCH_PYTHON=/path/to/python uses that interpreter as it is and installs nothing: for a GPU machine whose torch,
# flash-attn and so on are already there (once: pip install -e '.[test]').

prepare_environment() {
  local extra="${1:-}" target="." stamp wanted
  if [[ -n "${SP_BENCH_PYTHON:-}" ]]; then
    PYTHON="$SP_BENCH_PYTHON"
    "$PYTHON" -c 'import sp_bench' || { echo "SP_BENCH_PYTHON=$PYTHON has no sp_bench: pip install -e . there" >&2; exit 2; }
    return
  fi
  PYTHON="$PWD/.venv/bin/python"
  if [[ ! -x "$PYTHON" ]]; then
    python3 -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "python3 3.11 or newer is needed" >&2; exit 2; }
    python3 -m venv .venv
  fi
  [[ -n "$extra" ]] && target=".[$extra]"
  stamp=".venv/.sp_bench-${extra:-base}"
  wanted="$(cat pyproject.toml constraints.txt | sha256sum)"
  if [[ "$(cat "$stamp" 2>/dev/null)" != "$wanted" ]]; then
    "$PYTHON" -m pip install --quiet --disable-pip-version-check -c constraints.txt -e "$target"
    echo "$wanted" >"$stamp"
  fi
}
