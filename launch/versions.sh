#!/usr/bin/env bash
# Runs the quick tests and a small comparison with CP=1 under every megatron-core release that the
# plugin is tested with, each in a virtual environment of its own in out/versions/.
#
#   ./launch/versions.sh                  all of them
#   ./launch/versions.sh 0.18.2           only these, which may also be others
#   ./launch/versions.sh 0.18.2 -- -x     what follows -- goes to pytest
#
# Such an environment holds its own megatron-core; the other packages are links to those of .venv,
# so that it takes seconds and a few MB. The release that .venv itself has is tested there.
set -euo pipefail
# shellcheck source=launch/lib.sh
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"
cd "$ROOT"

# site_packages PYTHON: its folder of packages.
site_packages() {
    "$1" -c 'import sysconfig; print(sysconfig.get_path("purelib"))'
}

# link_packages FROM TO: links to all packages of a folder but megatron-core and pip.
link_packages() {
    local entry name
    find "$2" -maxdepth 1 -type l -exec rm {} +
    for entry in "$1"/*; do
        name=$(basename "$entry")
        case "$name" in
            megatron | megatron_core-* | pip | pip-* | __pycache__) ;;
            *) ln -s "$entry" "$2/$name" ;;
        esac
    done
}

# environment VERSION: make it, and set python to its Python.
environment() {
    local folder=$ROOT/out/versions/$1 site
    if [ "$1" = "$("$PYTHON" -c 'import importlib.metadata as m; print(m.version("megatron-core"))')" ]; then
        python=$PYTHON
        return
    fi
    python=$folder/bin/python
    [ -x "$python" ] || "$PYTHON" -m venv --without-pip "$folder"
    site=$(site_packages "$python")
    if [ ! -d "$site/megatron_core-$1.dist-info" ]; then
        "$PYTHON" -m pip --python "$python" install --quiet --disable-pip-version-check --no-input \
            --no-deps "megatron-core==$1" || die "pip could not install megatron-core $1" \
            "its own words are above; check that this release exists, and the network"
    fi
    link_packages "$(site_packages "$PYTHON")" "$site"
}

# run_under VERSION [PYTEST_ARGUMENT...]
run_under() {
    local python
    environment "$1"
    echo "== megatron-core $1: quick tests"
    "$python" -m pytest -m "not slow" "${@:2}" || return
    echo "== megatron-core $1: five steps at CP=1 and with each algorithm"
    "$python" -m megatron_cp_ext.cli.main verify --steps 5 --seq-length 128 \
        --config ring:cp=2 ulysses:cp=2 kvallgather:cp=2 hybrid:cp=4,ulysses=2 \
        --output "out/versions/verify-$1"
}

versions=() options=()
while [ $# -gt 0 ]; do
    case "$1" in
        -h | --help)
            print_usage "$0"
            exit
            ;;
        --)
            options=("${@:2}")
            break
            ;;
        -*) die "unknown option: $1" "arguments for pytest follow --" ;;
        *) versions+=("$1") ;;
    esac
    shift
done

"$ROOT/launch/setup.sh"
if [ ${#versions[@]} -eq 0 ]; then
    read -r -a versions < <("$PYTHON" -c \
        'from megatron_cp_ext.megatron.releases import TESTED_VERSIONS; print(*TESTED_VERSIONS)')
fi

export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
failed=()
for version in "${versions[@]}"; do
    run_under "$version" ${options[@]+"${options[@]}"} || failed+=("$version")
done
[ ${#failed[@]} -eq 0 ] || die "failed under megatron-core ${failed[*]}"
echo "== passed under megatron-core ${versions[*]}"
