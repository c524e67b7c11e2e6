#!/bin/sh
# Makes the virtual environment, or brings it up to date: tools/venv.sh DIR [EXTRA]
#
# Installs the working tree in editable mode, with the optional extra. A stamp in DIR remembers which pyproject.toml
# (by checksum) of which checkout was installed, so that a second call costs nothing and a moved checkout is noticed.
# PYTHON names the interpreter; VENV_ARGS are passed to `python -m venv`.
set -eu

venv=$1
extra=${2:-}
root=$(cd "$(dirname "$0")/.." && pwd)
want="$root $(cksum <"$root/pyproject.toml")"

die() {
    echo "m31: $1" >&2
    exit 1
}

usable() { # is "$1" a Python that m31 supports?
    "$1" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' >/dev/null 2>&1
}

find_python() {
    if [ -n "${PYTHON:-}" ]; then
        usable "$PYTHON" || die "PYTHON=$PYTHON is not Python 3.11, 3.12 or 3.13 (or does not start)."
        echo "$PYTHON"
        return
    fi
    for candidate in python3 python3.13 python3.12 python3.11; do
        if usable "$candidate"; then
            echo "$candidate"
            return
        fi
    done
    die "no Python 3.11, 3.12 or 3.13 found on PATH (looked for python3, python3.13, python3.12, python3.11). \
Install one, or name it: make PYTHON=/path/to/python3.11 ..."
}

stamp_is_current() { # "$1": the extra, or base
    [ -f "$venv/.m31-$1" ] && [ "$(cat "$venv/.m31-$1")" = "$want" ]
}

if "$venv/bin/python" -c '' >/dev/null 2>&1; then
    if stamp_is_current "${extra:-base}"; then
        exit 0
    fi
else
    python=$(find_python)
    # A half-made environment (interrupted, or its interpreter gone) is of no use: --clear starts it anew.
    # shellcheck disable=SC2086  # VENV_ARGS is a list of options
    "$python" -m venv --clear ${VENV_ARGS:-} "$venv" ||
        die "'$python -m venv' failed. On Debian and Ubuntu the package python3-venv provides it."
fi

spec=$root
[ -z "$extra" ] || spec="$root[$extra]"
quiet=
[ -t 1 ] || quiet=-q
echo "m31: installing ${extra:+the $extra tools and }m31 into $venv (the first time this downloads torch, which is large)"
"$venv/bin/python" -m pip install $quiet --no-input --disable-pip-version-check -e "$spec" ||
    die "pip could not install m31; see its message above and docs/environment.md, 'Installing torch'."

echo "$want" >"$venv/.m31-base"
[ -z "$extra" ] || echo "$want" >"$venv/.m31-$extra"
