# Sourced by run_sweep.sh and run_tests.sh, from the top of the checkout.
#
# prepare_environment [extra]: sets PYTHON to an interpreter that has sp_bench, and the extra, installed. Makes .venv if
# there is none and installs the pinned set of constraints.txt; does nothing when neither has changed since.
#
# SP_BENCH_PYTHON=/path/to/python uses that interpreter as it is and installs nothing: for a GPU machine whose torch,
# flash-attn and so on are already there (once: pip install -e '.[test]').

prepare_environment() {
  local extra="${1:-}" target="." reason found stamp wanted
  [[ -n "$extra" ]] && target=".[$extra]"
  if [[ -n "${SP_BENCH_PYTHON:-}" ]]; then
    PYTHON="$SP_BENCH_PYTHON"
    # this checkout's code, also for commands that tests start in other folders; that Python may have another installed
    export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"
    reason="$("$PYTHON" -c 'import sp_bench.cli' 2>&1)" || {
      echo "SP_BENCH_PYTHON=$PYTHON cannot run sp_bench (${reason##*$'\n'}): $PYTHON -m pip install -e '$target' first" >&2
      exit 2
    }
    found="$(cd / && "$PYTHON" -c 'import sp_bench; print(sp_bench.__path__[0])')"
    if [[ "$found" != "$PWD/sp_bench" ]]; then
      echo "SP_BENCH_PYTHON=$PYTHON runs the code of $found, not that of $PWD: use a Python that heeds PYTHONPATH" >&2
      exit 2
    fi
    return
  fi
  PYTHON="$PWD/.venv/bin/python"
  if [[ ! -x "$PYTHON" ]]; then
    python3 -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "python3 3.11 or newer is needed" >&2; exit 2; }
    python3 -m venv .venv
  fi
  stamp=".venv/.sp_bench-${extra:-base}"
  wanted="$(cat pyproject.toml constraints.txt | sha256sum)"
  if [[ "$(cat "$stamp" 2>/dev/null)" != "$wanted" ]]; then
    # a module is compiled when it is first imported, as few of them are: 50 s less
    "$PYTHON" -m pip install --no-compile --quiet --disable-pip-version-check -c constraints.txt -e "$target"
    echo "$wanted" >"$stamp"
  fi
}
