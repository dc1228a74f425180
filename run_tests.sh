#!/usr/bin/env bash
# From a fresh machine to a full test run; arguments go to pytest:
#
#   ./run_tests.sh
#   ./run_tests.sh tests/unit -k layout
#
# SP_BENCH_PYTHON=/path/to/python: see .ci/environment.sh.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"
source .ci/environment.sh

prepare_environment test
unset PYTHONDONTWRITEBYTECODE  # tests start hundreds of processes: each would compile the package anew
exec "$PYTHON" -m pytest "$@"
