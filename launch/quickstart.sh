#!/usr/bin/env bash
# From a fresh clone to a proof: trains a small GPT on real text with context parallelism and
# without, and compares loss and grad norm of every step. A few minutes on two cores, no GPU.
#
#   ./launch/quickstart.sh
#
# Arguments go to `megatron-cp verify`:  ./launch/quickstart.sh --steps 20
set -euo pipefail
# shellcheck source=launch/lib.sh
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"
cd "$ROOT"

"$ROOT/launch/setup.sh"

echo "data: the source code of Python's standard library, byte by byte"
"$PYTHON" launch/prepare_data.py --output-prefix out/data/stdlib --max-bytes 4000000

exec "$VENV/bin/megatron-cp" verify \
    --config ring:cp=2 ulysses:cp=2 kvallgather:cp=2 hybrid:cp=4,ulysses=2 \
    --data-prefix out/data/stdlib --output out/quickstart "$@"
