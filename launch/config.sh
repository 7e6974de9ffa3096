#!/usr/bin/env bash
# Reads a file of configs/: one `--flag value ...` a line, comment lines beginning with `#`.
# Words are separated by blanks; nothing else is special, quotes and `*` included.
#
#   ./launch/config.sh                        list the configurations
#   ./launch/config.sh llama3-8b-128k         print one as a shell array, to be used as in
#       source <(./launch/config.sh llama3-8b-128k)
#       megatron-cp check --nodes 1 --gpus-per-node 8 -- "${ARGS[@]}" --mock-data
#       torchrun --nproc-per-node 8 -m megatron_cp_ext.run "${ARGS[@]}" --mock-data
#
# Or source this file, and call read_config NAME: it sets CONFIG_ARGS, CONFIG_NODES and
# CONFIG_RANKS, the nodes and ranks of a node that the configuration is for.
# shellcheck source=launch/lib.sh
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"

# config_file NAME: the path of a configuration, given by its name or its path.
config_file() {
    if [ -f "$ROOT/configs/$1.args" ]; then
        printf '%s\n' "$ROOT/configs/$1.args"
    elif [ -f "$1" ]; then
        printf '%s\n' "$1"
    else
        die "there is no configuration $1" "one of: $(list_configs | paste -s -d ' ' -)" \
            "or the path of a file with one --flag value a line"
    fi
}

list_configs() {
    local file
    for file in "$ROOT"/configs/*.args; do
        basename "$file" .args
    done
}

# read_config NAME
read_config() {
    local file line
    local -a words
    local cluster='^# cluster: ([0-9]+) nodes? x ([0-9]+) '
    file=$(config_file "$1") || exit
    CONFIG_ARGS=() CONFIG_NODES=1 CONFIG_RANKS=1
    while IFS= read -r line || [ -n "$line" ]; do
        if [[ $line =~ $cluster ]]; then
            # Read by the scripts that source this file.
            # shellcheck disable=SC2034
            CONFIG_NODES=${BASH_REMATCH[1]} CONFIG_RANKS=${BASH_REMATCH[2]}
        fi
        read -r -a words <<<"$line"
        case "${words[0]-}" in
            "" | "#"*) ;;
            --*) CONFIG_ARGS+=("${words[@]}") ;;
            *) die "$file: a line begins neither with -- nor with #" "the line: $line" ;;
        esac
    done <"$file"
}

if [ "${BASH_SOURCE[0]}" = "$0" ]; then
    set -euo pipefail
    case "${1-}" in
        "") list_configs ;;
        -h | --help) print_usage "$0" ;;
        *)
            read_config "$1"
            printf 'ARGS=('
            printf ' %q' "${CONFIG_ARGS[@]}"
            printf ' )\n'
            ;;
    esac
fi
