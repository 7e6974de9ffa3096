# Shared by the launchers that start one node of several: its options and torchrun's.
# shellcheck shell=bash

# Read by launch_on_nodes, set from the command line.
NODES='' NODE_RANK='' MASTER=''

# take_node_option OPTION VALUE: whether it is one of these options; remember it.
take_node_option() {
    case "$1" in
        --master) MASTER=$2 ;;
        --node-rank)
            [[ $2 =~ ^[0-9]+$ ]] || die "$1 $2: not a whole number" "the first node is 0"
            NODE_RANK=$2
            ;;
        --nodes) NODES=$(whole_number "$@") || exit ;;
        *) return 1 ;;
    esac
}

# launch_on_nodes: run this node's share of the training.
launch_on_nodes() {
    local port=29500
    NODES=${NODES:-$CONFIG_NODES}
    [ -n "$MASTER" ] || die "the first node is not given" "--master HOST:PORT, alike on all nodes"
    [ -n "$NODE_RANK" ] || die "this node's rank is not given" "--node-rank N, from 0 on --master"
    [ "$NODE_RANK" -lt "$NODES" ] ||
        die "--node-rank $NODE_RANK of --nodes $NODES" "ranks go from 0 to $((NODES - 1))"
    if [[ $MASTER =~ :([0-9]+)$ ]]; then
        port=${BASH_REMATCH[1]}
        MASTER=${MASTER%:*}
    fi
    launch --nnodes "$NODES" --node-rank "$NODE_RANK" --master-addr "$MASTER" --master-port "$port"
}
