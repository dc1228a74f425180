#!/usr/bin/env bash
# From a fresh machine to rows and a report:
#
#   ./run_sweep.sh                        the smoke sweep, into results/smoke
#   ./run_sweep.sh seq_len=512            the same with overrides
#   ./run_sweep.sh parity seq_len=1024    any sweep of conf/sweep, by its name, with overrides
#
# Run again, it skips what is committed. SP_BENCH_PYTHON=/path/to/python: see .ci/environment.sh.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"
source .ci/environment.sh

prepare_environment
unset PYTHONDONTWRITEBYTECODE  # a sweep starts many processes: each would compile the package anew
case "${1:-}" in
  sweep=*) ;;
  "" | -* | *=*) set -- sweep=smoke "$@" ;;
  *) set -- "sweep=$1" "${@:2}" ;;
esac
exec "$PYTHON" -m sp_bench run "$@"
