# Shared by the launchers: their options, and the torchrun command that follows from them.
# shellcheck shell=bash
# shellcheck source=launch/config.sh
source "$(dirname "${BASH_SOURCE[0]}")/config.sh"

# What all launchers take; a launcher prints it after its own help.
print_common_options() {
    cat <<'HELP'

Options:
  --config NAME|FILE   a configuration of configs/, or a file like them (required)
  --nproc-per-node N   ranks of a node (default: what the configuration is for)
  --script FILE        Megatron's pretrain_gpt.py (default: the packaged GPT pre-training)
  --data PREFIX        indexed dataset PREFIX.bin, PREFIX.idx (default: mock data)
  --data-cache DIR     where the dataset's index is kept
  --tokenizer DIR      Hugging Face tokenizer (default: the one of the configuration)
  --output DIR         checkpoints in DIR/checkpoints, resumed from if there, and DIR/tensorboard
  --save-interval N    steps between checkpoints (default: 500)
  --env FILE           variables to set, KEY=VALUE a line; those set already win
  --python FILE        Python to run (default: .venv/bin/python, else python3)
  --dry-run            print the command, and start nothing
  -h, --help           this text
  -- FLAG ...          further flags for Megatron; they come last and win
HELP
}

# parse_options ARGUMENT...: set what the common options say. The launcher's own options have
# been taken out before by its take_option, a function that is given the option and its value and
# answers whether it knows it.
parse_options() {
    CONFIG='' RANKS='' TRAIN_SCRIPT='' DATA='' DATA_CACHE='' TOKENIZER='' OUTPUT=''
    SAVE_INTERVAL=500 DRY_RUN='' EXTRA=()
    RUN_PYTHON=python3
    [ ! -x "$PYTHON" ] || RUN_PYTHON=$PYTHON
    while [ $# -gt 0 ]; do
        case "$1" in
            --)
                EXTRA=("${@:2}")
                break
                ;;
            -h | --help)
                print_usage "$0"
                print_common_options
                exit
                ;;
            --dry-run)
                DRY_RUN=1
                shift
                continue
                ;;
        esac
        [ $# -ge 2 ] || die "$1 is not an option, or lacks its value" \
            "flags for Megatron follow --" "--help lists the options"
        case "$1" in
            --config) CONFIG=$2 ;;
            --nproc-per-node) RANKS=$(whole_number "$@") || exit ;;
            --script) TRAIN_SCRIPT=$2 ;;
            --data) DATA=$2 ;;
            --data-cache) DATA_CACHE=$2 ;;
            --tokenizer) TOKENIZER=$2 ;;
            --output) OUTPUT=$2 ;;
            --save-interval) SAVE_INTERVAL=$(whole_number "$@") || exit ;;
            --env) ENV_FILE=$2 ;;
            --python) RUN_PYTHON=$2 ;;
            *)
                take_option "$@" ||
                    die "unknown option: $1" "flags for Megatron follow --" "--help lists the options"
                ;;
        esac
        shift 2
    done
    [ -n "$CONFIG" ] || die "no configuration is given" \
        "--config NAME, one of: $(list_configs | paste -s -d ' ' -)"
    read_config "$CONFIG"
    RANKS=${RANKS:-$CONFIG_RANKS}
}

# whole_number OPTION VALUE: the value, if it is a whole number above 0.
whole_number() {
    [[ $2 =~ ^[1-9][0-9]*$ ]] || die "$1 $2: not a whole number above 0" "as in $1 8"
    printf '%s\n' "$2"
}

# check_files: what the options name exists on this machine.
check_files() {
    [ -z "$TRAIN_SCRIPT" ] || [ -f "$TRAIN_SCRIPT" ] ||
        die "--script $TRAIN_SCRIPT: there is no such file" \
            "give Megatron-LM's pretrain_gpt.py, or leave it out"
    [ -z "$DATA" ] || { [ -f "$DATA.bin" ] && [ -f "$DATA.idx" ]; } ||
        die "--data $DATA: there is no $DATA.bin with its $DATA.idx" \
            "launch/prepare_data.py makes them from text"
    [ -z "$TOKENIZER" ] || [ -e "$TOKENIZER" ] ||
        die "--tokenizer $TOKENIZER: there is no such folder" "give a Hugging Face tokenizer's"
    has "$RUN_PYTHON" || die "--python $RUN_PYTHON was not found" "run ./launch/setup.sh"
}

# read_env FILE: put its assignments into ENV_SET.
read_env() {
    local line
    [ -f "$1" ] || die "--env $1: there is no such file" "give one with KEY=VALUE a line"
    while IFS= read -r line || [ -n "$line" ]; do
        case "$line" in
            "" | "#"*) continue ;;
        esac
        [[ $line =~ ^[A-Za-z_][A-Za-z0-9_]*= ]] ||
            die "$1: a line is neither KEY=VALUE nor a comment" "the line: $line"
        ENV_SET+=("$line")
    done <"$1"
}

# drop_set: take out of ENV_SET what the environment has already.
drop_set() {
    local assignment name
    local -a all=("${ENV_SET[@]}")
    ENV_SET=()
    for assignment in "${all[@]}"; do
        name=${assignment%%=*}
        [ -n "${!name+set}" ] || ENV_SET+=("$assignment")
    done
}

# training_arguments: set TRAINING to the flags of the training, in the order in which later wins.
training_arguments() {
    TRAINING=("${CONFIG_ARGS[@]}")
    if [ -n "$DATA" ]; then
        TRAINING+=(--data-path "$DATA" --split "100,0,0")
    else
        TRAINING+=(--mock-data)
    fi
    [ -z "$DATA_CACHE" ] || TRAINING+=(--data-cache-path "$DATA_CACHE")
    [ -z "$TOKENIZER" ] ||
        TRAINING+=(--tokenizer-type HuggingFaceTokenizer --tokenizer-model "$TOKENIZER")
    [ -z "$OUTPUT" ] || TRAINING+=(
        --save "$OUTPUT/checkpoints" --load "$OUTPUT/checkpoints"
        --save-interval "$SAVE_INTERVAL" --tensorboard-dir "$OUTPUT/tensorboard"
    )
    TRAINING+=(${EXTRA[@]+"${EXTRA[@]}"})
}

# launch TORCHRUN_OPTION...: run the training, or print the command that would.
launch() {
    local -a command
    ENV_SET=()
    read_env "$ENV_FILE"
    drop_set
    training_arguments
    command=("$RUN_PYTHON" -m torch.distributed.run --nproc-per-node "$RANKS" "$@"
        -m megatron_cp_ext.run ${TRAIN_SCRIPT:+"$TRAIN_SCRIPT"} "${TRAINING[@]}")
    if [ -n "$DRY_RUN" ]; then
        print_command ${ENV_SET[@]+"${ENV_SET[@]}"} "${command[@]}"
        return
    fi
    check_files
    # The plugin is importable also where it is not installed.
    exec env ${ENV_SET[@]+"${ENV_SET[@]}"} "PYTHONPATH=$ROOT${PYTHONPATH:+:$PYTHONPATH}" \
        "${command[@]}"
}

# print_command WORD...: in one line that a shell reads back.
print_command() {
    printf '%q' "$1"
    printf ' %q' "${@:2}"
    printf '\n'
}
