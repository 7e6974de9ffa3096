#!/usr/bin/env bash
# Trains on several nodes: start it on each of them, with the same options but the node's rank.
#
#   ./launch/torchrun_multi.sh --config llama3-8b-256k --master node0:29500 --node-rank 0
#   ./launch/torchrun_multi.sh --config llama3-8b-256k --master node0:29500 --node-rank 1   ...
#
#   --master HOST[:PORT]   node 0, and a free port of it (default port: 29500) (required)
#   --node-rank N          which node this is, from 0 (required)
#   --nodes N              number of nodes (default: what the configuration is for)
set -euo pipefail
# shellcheck source=launch/launcher.sh
source "$(dirname "${BASH_SOURCE[0]}")/launcher.sh"
# shellcheck source=launch/nodes.sh
source "$(dirname "${BASH_SOURCE[0]}")/nodes.sh"

ENV_FILE=$ROOT/configs/nccl-cp.env
take_option() {
    take_node_option "$@"
}
parse_options "$@"
launch_on_nodes
