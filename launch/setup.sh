#!/usr/bin/env bash
# Makes .venv with the pinned packages of constraints.txt and this project, editable.
# Does nothing when that is done already. Everything is fetched through pip.
#
#   ./launch/setup.sh
set -euo pipefail
# shellcheck source=launch/lib.sh
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"
cd "$ROOT"

STAMP=$VENV/megatron-cp-setup
# Python 3.12, and not the one inside the .venv that is about to be made.
IS_312='import sys; sys.exit(sys.version_info[:2] != (3, 12) or sys.prefix == sys.argv[1])'
COMPILER_HELP=(
    "install a C++ compiler and the headers of Python 3.12 by one of"
    "  apt-get install g++ python3.12-dev      (Debian, Ubuntu)"
    "  dnf install gcc-c++ python3.12-devel    (Fedora, RHEL)"
    "  xcode-select --install                  (macOS)"
)

# Everything that decides what is installed. The stamp is a copy of it, written last.
inputs() {
    printf '%s\n' "$ROOT"
    cat constraints.txt setup.py pyproject.toml
    grep '^__version__' megatron_cp_ext/__init__.py
}

up_to_date() {
    [ -x "$PYTHON" ] && [ -f "$STAMP" ] && inputs | cmp -s - "$STAMP"
}

# One name or path of a Python a line, the likeliest first; some of them may not exist, or be
# shims that fail when they are run.
candidates() {
    printf '%s\n' python3.12 python3 python
    if has uv; then
        uv python find --system --no-python-downloads 3.12 2>/dev/null || true
    fi
    if has pyenv; then
        printf '%s\n' "$(pyenv root)"/versions/3.12*/bin/python3.12
    fi
}

# runs PYTHON CODE [ARGUMENT...]: whether the code runs and does not fail.
runs() {
    "$1" -c "${@:2}" >/dev/null 2>&1 </dev/null
}

find_python() {
    local candidate without_venv=
    while read -r candidate; do
        runs "$candidate" "$IS_312" "$VENV" || continue
        if runs "$candidate" 'import ensurepip, venv'; then
            printf '%s\n' "$candidate"
            return
        fi
        without_venv=$candidate
    done < <(candidates)
    [ -z "$without_venv" ] || die \
        "$without_venv is Python 3.12, but its venv module is not installed" \
        "Debian, Ubuntu: apt-get install python3.12-venv"
    die "Python 3.12 was not found; megatron-core needs it" \
        "install it by one of" \
        "  uv python install 3.12" \
        "  pyenv install 3.12" \
        "  apt-get install python3.12 python3.12-venv   (Debian, Ubuntu)" \
        "  dnf install python3.12                       (Fedora, RHEL)" \
        "and start again; .python-version makes uv and pyenv choose it here"
}

has_compiler() {
    has c++ || has g++ || has clang++
}

has_headers() {
    runs "$1" 'import os, sysconfig as s; os.stat(os.path.join(s.get_path("include"), "Python.h"))'
}

# Every pinned package has a wheel for Linux on x86-64 and on 64-bit ARM. Elsewhere megatron-core
# comes as source, and pip compiles its data set helper.
check_compiler() {
    case "$(uname -s) $(uname -m)" in
        "Linux x86_64" | "Linux aarch64") return ;;
    esac
    has_compiler || die \
        "megatron-core must be compiled on this kind of machine, but there is no C++ compiler" \
        "${COMPILER_HELP[@]}"
    has_headers "$1" || die \
        "megatron-core must be compiled on this kind of machine, but Python.h is missing" \
        "${COMPILER_HELP[@]}"
}

pip_install() {
    "$PYTHON" -m pip install --quiet --disable-pip-version-check --no-input \
        --constraint constraints.txt "$@" || die \
        "pip could not install the packages; its own words are above" \
        "if it could not reach its package index: check the network and pip's configuration" \
        "if it could not compile a package: ${COMPILER_HELP[0]}" "${COMPILER_HELP[@]:1}"
}

# A second call at the same time waits here, and then finds everything done.
if has flock; then
    exec 9<"${BASH_SOURCE[0]}"
    flock 9
fi
if up_to_date; then
    exit 0
fi

if ! runs "$PYTHON" 'import sys, pip; sys.exit(sys.version_info[:2] != (3, 12))'; then
    python=$(find_python)
    check_compiler "$python"
    echo "setup: making .venv with $("$python" -V)"
    "$python" -m venv --clear "$VENV"
fi
rm -f "$STAMP"
echo "setup: installing the pinned packages (with torch's CUDA build 5 GB, a few minutes)"
# The project is built with the pinned setuptools, not with one that pip would fetch for it.
pip_install setuptools
pip_install --no-build-isolation --editable '.[test]'
inputs >"$STAMP"
echo "setup: done"
