# Shared by the launch scripts: where things are, and how errors are said.
# shellcheck shell=bash

ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)
VENV=$ROOT/.venv
# Used by the scripts that source this file.
# shellcheck disable=SC2034
PYTHON=$VENV/bin/python

# die REASON [REMEDY...]: say what is wrong and what to do about it, and stop.
die() {
    printf 'error: %s\n' "$1" >&2
    shift
    [ $# -eq 0 ] || printf '  %s\n' "$@" >&2
    exit 1
}

has() {
    command -v "$1" >/dev/null 2>&1
}

# print_usage FILE: the comment at the top of a script.
print_usage() {
    sed -n '2,/^[^#]/{/^# shellcheck/d;s/^# \{0,1\}//p;}' "$1"
}
