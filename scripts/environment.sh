#!/usr/bin/env bash
# scripts/environment.sh [EXTRA]   make .venv ready, with this project in it and what the extra of setup.cfg needs
#
# The extra "tpu" is added where there is a TPU. Does nothing where all that has been done since setup.cfg or
# scripts/locked last changed. The versions are those of scripts/locked (see scripts/lock), or, for machines that it is
# not for and where they cannot be had, the newest that setup.cfg allows.
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
locked=$root/scripts/locked
venv=$root/.venv
python=$venv/bin/python
log=$venv/install.log
installers=4

main() {
    local extra=${1-} stamp
    if has_tpu ''; then extra=${extra:+$extra,}tpu; fi
    stamp="$root $(cat "$root/setup.cfg" "$locked"/* | cksum)"
    if runs && has_installed "$stamp" "installed-*$extra*"; then return; fi
    tell "installing oDriver${extra:+ and what \"$extra\" needs} into .venv: about a minute, once"
    if ! runs || ! has_installed "$root" 'installed-*'; then supported_python -m venv --clear "$venv"; fi
    if ! install "$extra" 2>&1 | tee "$log" | show; then
        cat "$log" >&2
        return 1
    fi
    compile_modules
    echo "$stamp" >"$venv/installed-${extra:-plain}"
    tell "installed in $SECONDS s"
}

runs() {
    "$python" -c '' 2>/dev/null
}

# Whether one of the stamps of that name says so.
has_installed() {
    [[ $(find "$venv" -maxdepth 1 -name "$2" -exec cat {} + 2>/dev/null) == *"$1"* ]]
}

# Whether there is a TPU under this root: by its own driver, or by VFIO, which also passes on devices that are not Google's.
has_tpu() {
    local group
    if compgen -G "$1/dev/accel[0-9]*" >/dev/null; then return; fi
    for group in "$1"/dev/vfio/[0-9]*; do
        if grep -qsx 0x1ae0 "$1/sys/kernel/iommu_groups/${group##*/}/devices/"*/vendor; then return; fi
    done
    return 1
}

supported_python() {
    local candidate
    for candidate in python3.13 python3.12 python3.11 python3 python; do
        if "$candidate" -c 'import sys, ensurepip; sys.exit(not (3, 11) <= sys.version_info < (3, 14))' 2>/dev/null; then
            "$candidate" "$@"
            return
        fi
    done
    echo 'oDriver needs Python 3.11, 3.12 or 3.13 with its venv module, and found none on the PATH' >&2
    return 1
}

install() {
    if [[ $(uname -sm) == 'Linux x86_64' ]] && install_locked "$1"; then
        if [[ $1 == '' || $1 == tpu ]]; then return; fi
    fi
    install_packages -e "$root${1:+[$1]}"
}

# Several installers side by side, as pip does one thing after another.
install_locked() {
    local files=("$locked/base.txt") job part
    if [[ $1 == *tpu* ]]; then files+=("$locked/tpu.txt"); fi
    jobs=()
    trap 'kill "${jobs[@]}" 2>/dev/null || :' EXIT
    for ((part = 0; part < installers; part++)); do
        awk "NR % $installers == $part" "${files[@]}" >"$venv/locked-$part.txt"
        install_packages --no-deps --require-hashes -r "$venv/locked-$part.txt" &
        jobs+=($!)
    done
    install_packages --no-deps -e "$root" &
    jobs+=($!)
    for job in "${jobs[@]}"; do wait "$job" || return; done
}

# Those that a start imports: to compile all would take several times as long. The environment may forbid it to later starts.
compile_modules() {
    PYTHONDONTWRITEBYTECODE='' TRANSFORMERS_NO_ADVISORY_WARNINGS=1 PYTHONPATH=$root JAX_PLATFORMS=cpu "$python" -c \
        'import ipc.service.serve, ipc.commands.cli, engine.build, driver.odriver; from transformers import AutoTokenizer'
}

# By uv, if it is there and would not pass over a configuration of pip, such as where packages come from.
install_packages() {
    if command -v uv >/dev/null && ! is_pip_configured; then
        uv pip install --python "$python" "$@"
    else
        "$python" -m pip install --disable-pip-version-check --no-compile "$@"
    fi
}

is_pip_configured() {
    local directories directory
    if compgen -e | grep -q '^PIP_'; then return; fi
    IFS=: read -ra directories <<<"${XDG_CONFIG_DIRS:-/etc/xdg}"
    for directory in "${directories[@]/%//pip}" "${XDG_CONFIG_HOME:-$HOME/.config}/pip" "$HOME/.pip" /etc; do
        if [[ -e $directory/pip.conf ]]; then return; fi
    done
    return 1
}

# On a terminal, the package that is at hand.
show() {
    local what name rest
    while read -r what name rest; do
        case $what in
            Collecting | Downloading | '+') line "$name" ;;
            Installing) line "$rest" ;;
        esac
    done
    if [[ -t 2 ]]; then printf '\r\033[K' >&2; fi
}

line() {
    if [[ -t 2 ]]; then printf '\r\033[K  %.70s' "$1" >&2; fi
}

tell() {
    echo "oDriver: $1" >&2
}

if [[ ${BASH_SOURCE[0]} == "$0" ]]; then main "$@"; fi
