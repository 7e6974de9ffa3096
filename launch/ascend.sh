#!/usr/bin/env bash
# Trains on Ascend NPUs, on this node or, with --master and --node-rank, on several.
#
#   ./launch/ascend.sh --config llama2-7b-32k
#   ./launch/ascend.sh --config llama3-8b-256k --master node0:29500 --node-rank 0      and so on
#
#   --cann FILE            CANN's set_env.sh (default: that of the variable ASCEND_TOOLKIT_HOME)
#   --master HOST[:PORT]   node 0, and a free port of it (default port: 29500)
#   --node-rank N          which node this is, from 0
#   --nodes N              number of nodes (default: what the configuration is for)
#
# The variables are those of configs/hccl-cp.env.
set -euo pipefail
# shellcheck source=launch/launcher.sh
source "$(dirname "${BASH_SOURCE[0]}")/launcher.sh"
# shellcheck source=launch/nodes.sh
source "$(dirname "${BASH_SOURCE[0]}")/nodes.sh"

ENV_FILE=$ROOT/configs/hccl-cp.env
CANN=${ASCEND_TOOLKIT_HOME:+$ASCEND_TOOLKIT_HOME/set_env.sh}
take_option() {
    case "$1" in
        --cann) CANN=$2 ;;
        *) take_node_option "$@" ;;
    esac
}
parse_options "$@"
CONFIG_ARGS+=(--cp-platform npu)

# CANN's script reads variables that may not be set.
if [ -z "$DRY_RUN" ] && [ -n "$CANN" ]; then
    [ -f "$CANN" ] || die "--cann $CANN: there is no such file" \
        "give the set_env.sh of the Ascend toolkit"
    set +u
    # shellcheck disable=SC1090
    source "$CANN"
    set -u
fi

if [ -n "$MASTER$NODE_RANK" ]; then
    launch_on_nodes
else
    [ "${NODES:-$CONFIG_NODES}" = 1 ] || die "$CONFIG is for $CONFIG_NODES nodes" \
        "start it on each with --master HOST:PORT --node-rank N" "or --nodes 1 to have it on one"
    launch --rdzv-backend c10d --rdzv-endpoint localhost:0 --local-addr localhost
fi
