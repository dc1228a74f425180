#!/usr/bin/env bash
# From a fresh machine to rows and a report:
#
#   ./run_sweep.sh                        the smoke sweep, into results/smoke
#   ./run_sweep.sh smoke seq_len=512      any sweep of conf/sweep, with overrides
#
# Run again, it skips what is committed. SP_BENCH_PYTHON=/path/to/python: see .ci/environment.sh.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"
source .ci/environment.sh

prepare_environment
sweep="${1:-smoke}"
exec "$PYTHON" -m sp_bench run "sweep=$sweep" "${@:2}"
