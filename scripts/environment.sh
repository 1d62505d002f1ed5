#!/usr/bin/env bash
# scripts/environment.sh [EXTRA]   make .venv ready, with this project in it and what the extra of setup.cfg needs
#
# Does nothing where that has been done since setup.cfg last changed.
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
extra=${1-}
venv=$root/.venv
python=$venv/bin/python
log=$venv/install.log
stamp="$root $(cksum <"$root/setup.cfg")"

main() {
    if runs && has_installed "$stamp" "installed-${extra:-*}"; then return; fi
    if ! runs || ! has_installed "$root" 'installed-*'; then supported_python -m venv --clear "$venv"; fi
    install
    echo "$stamp" >"$venv/installed-${extra:-plain}"
}

runs() {
    "$python" -c '' 2>/dev/null
}

# Whether one of the stamps of that name says so.
has_installed() {
    [[ $(find "$venv" -maxdepth 1 -name "$2" -exec cat {} + 2>/dev/null) == *"$1"* ]]
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

# Shows a line of progress, and all that pip said should it fail.
install() {
    echo "installing oDriver${extra:+ and what \"$extra\" needs} into .venv" >&2
    if ! "$python" -m pip install --disable-pip-version-check -e "$root${extra:+[$extra]}" 2>&1 | tee "$log" | show; then
        cat "$log" >&2
        return 1
    fi
}

show() {
    local what name rest
    while read -r what name rest; do
        case $what in
            Collecting) line "$name" ;;
            Installing) line "$rest" ;;
        esac
    done
    if [[ -t 2 ]]; then printf '\r\033[K' >&2; fi
}

line() {
    if [[ -t 2 ]]; then printf '\r\033[K  %.70s' "$1" >&2; fi
}

main
