#!/usr/bin/env bash
# Puts the plugin into a Megatron-LM checkout, or takes it out: one line,
# `import megatron_cp_ext.adaptor`, before pretrain_gpt.py imports megatron.
#
#   ./launch/patch_megatron.sh apply CHECKOUT     patch pretrain_gpt.py; nothing if it is already
#   ./launch/patch_megatron.sh revert CHECKOUT    undo that; nothing if it is not patched
#   ./launch/patch_megatron.sh status CHECKOUT    exit status 0 patched, 1 not, 2 not known
#
# The file is recognized by its SHA-256, listed in patches/fingerprints.tsv. Any other is refused.
set -euo pipefail
# shellcheck source=launch/lib.sh
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"

LINE='import megatron_cp_ext.adaptor'
TABLE=$ROOT/patches/fingerprints.tsv

# fingerprint FILE: its SHA-256.
fingerprint() {
    if has sha256sum; then
        sha256sum <"$1"
    elif has shasum; then
        shasum -a 256 <"$1"
    else
        die "neither sha256sum nor shasum was found" "install coreutils"
    fi | cut -d ' ' -f 1
}

# recognize FILE: set state (clean, patched or unknown), and for a known file the result's hash
# on either side, the patch, and the trees it is for.
recognize() {
    local found clean patched patch trees
    found=$(fingerprint "$1")
    state=unknown
    while IFS=$'\t' read -r clean patched patch trees; do
        case "$found" in
            "$clean") state=clean ;;
            "$patched") state=patched ;;
            *) continue ;;
        esac
        CLEAN=$clean PATCHED=$patched PATCH=$ROOT/patches/$patch TREES=$trees
        return
    done < <(grep -v '^#' "$TABLE")
}

# known_trees: what the table knows, in one line.
known_trees() {
    grep -v '^#' "$TABLE" | cut -f 4 | paste -s -d ',' - | sed 's/,/, /g'
}

# refuse: the file is not one of the known ones.
refuse() {
    local reason
    reason="it is none of: $(known_trees)"
    if grep -qxF "$LINE" "$SCRIPT"; then
        reason="it has the line already, but otherwise $reason"
    fi
    die "$SCRIPT is not known" "$reason" \
        "no patch is needed to train: torchrun ... -m megatron_cp_ext.run $SCRIPT ARGUMENTS" \
        "or edit it yourself: '$LINE' before the first import of megatron or gpt_builders"
}

# patch_file EXPECTED [OPTION...]: change SCRIPT by PATCH, and only if EXPECTED is what comes out.
patch_file() {
    local expected=$1 folder
    shift
    has git || die "git was not found; it applies the patch" "install git"
    folder=$(mktemp -d)
    # shellcheck disable=SC2064
    trap "rm -rf -- $(printf %q "$folder")" EXIT
    cp "$SCRIPT" "$folder/pretrain_gpt.py"
    (cd "$folder" && GIT_CEILING_DIRECTORIES=$folder/.. git apply --unidiff-zero "$@" "$PATCH") ||
        die "git could not apply $PATCH to $SCRIPT" "nothing was changed"
    [ "$(fingerprint "$folder/pretrain_gpt.py")" = "$expected" ] ||
        die "$PATCH does not give the file that $TABLE expects" "nothing was changed"
    cat "$folder/pretrain_gpt.py" >"$SCRIPT"
}

case "${1-}" in
    -h | --help)
        print_usage "$0"
        exit
        ;;
esac
[ $# -eq 2 ] || die "give a command and a checkout" \
    "usage: ./launch/patch_megatron.sh apply|revert|status CHECKOUT"
COMMAND=$1
SCRIPT=$2/pretrain_gpt.py
[ -f "$SCRIPT" ] || die "there is no $SCRIPT" "give the folder of a Megatron-LM checkout"
recognize "$SCRIPT"

case "$COMMAND" in
    status)
        case "$state" in
            patched) echo "patched: $SCRIPT ($TREES)" ;;
            clean) echo "not patched: $SCRIPT ($TREES)" && exit 1 ;;
            unknown) echo "not known: $SCRIPT" && exit 2 ;;
        esac
        ;;
    apply)
        case "$state" in
            clean) patch_file "$PATCHED" && echo "patched: $SCRIPT ($TREES)" ;;
            patched) echo "already patched: $SCRIPT ($TREES)" ;;
            unknown) refuse ;;
        esac
        ;;
    revert)
        case "$state" in
            patched) patch_file "$CLEAN" --reverse && echo "as it was: $SCRIPT ($TREES)" ;;
            clean) echo "not patched: $SCRIPT ($TREES)" ;;
            unknown) refuse ;;
        esac
        ;;
    *) die "unknown command: $COMMAND" "one of apply, revert, status" ;;
esac
