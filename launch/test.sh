#!/usr/bin/env bash
# All checks and tests; sets up .venv first.
#
#   ./launch/test.sh            everything
#   ./launch/test.sh quick      without the tests marked slow
#   ./launch/test.sh versions   the quick tests and a comparison under each megatron-core release
#
# Further arguments go to pytest:  ./launch/test.sh quick tests/patching -x
set -euo pipefail
# shellcheck source=launch/lib.sh
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"
cd "$ROOT"

if [ "${1-}" = versions ]; then
    exec "$ROOT/launch/versions.sh" "${@:2}"
fi

options=()
if [ "${1-}" = quick ]; then
    options=(-m "not slow")
    shift
fi

"$ROOT/launch/setup.sh"
"$VENV/bin/ruff" check .
"$VENV/bin/ruff" format --check .
"$VENV/bin/mypy"
"$VENV/bin/shellcheck" --external-sources launch/*.sh launch/slurm.sbatch .ci/run

# Tests start several ranks; with a thread pool each they would fight for the cores.
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
exec "$PYTHON" -m pytest ${options[@]+"${options[@]}"} "$@"
