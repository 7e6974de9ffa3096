#!/usr/bin/env bash
# Trains on this machine's GPUs, NPUs or CPUs.
#
#   ./launch/torchrun_node.sh --config tiny-gqa
#   ./launch/torchrun_node.sh --config llama3-8b-128k --data /data/books --output runs/books \
#       -- --train-iters 2000 --lr 1e-5
set -euo pipefail
# shellcheck source=launch/launcher.sh
source "$(dirname "${BASH_SOURCE[0]}")/launcher.sh"

ENV_FILE=$ROOT/configs/nccl-cp.env
take_option() {
    return 1
}
parse_options "$@"
launch --rdzv-backend c10d --rdzv-endpoint localhost:0 --local-addr localhost
