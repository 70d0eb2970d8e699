# Finds the Python that runs everything else.  Sourced by scripts/demo and scripts/test.

# Succeeds if "$1" really runs (version managers leave shims that do not), is 3.11 to 3.13, and passes the
# extra check "$2".
hawk_python_ok() {
    "$1" -c "import sys
if not (3, 11) <= sys.version_info[:2] <= (3, 13): sys.exit(1)
$2" </dev/null >/dev/null 2>&1
}

# Prints the path of a usable Python, or one line on stderr with the remedy.  "$1" is the clone's folder.
hawk_python() {
    if [ -n "${HAWK_PYTHON:-}" ]; then
        if hawk_python_ok "$HAWK_PYTHON" "import venv, ensurepip"; then
            printf '%s\n' "$HAWK_PYTHON"
            return 0
        fi
        echo "hawk: HAWK_PYTHON=$HAWK_PYTHON is not a Python 3.11 to 3.13 with the venv module; set it to one that is" >&2
        return 1
    fi
    if hawk_python_ok "$1/.venv/bin/python" ""; then
        printf '%s\n' "$1/.venv/bin/python"
        return 0
    fi
    local name without_venv=""
    for name in python3.13 python3.12 python3.11 python3; do
        if hawk_python_ok "$name" "import venv, ensurepip"; then
            command -v "$name"
            return 0
        fi
        if [ -z "$without_venv" ] && hawk_python_ok "$name" ""; then
            without_venv=$("$name" -c 'import sys; print("python%d.%d" % sys.version_info[:2])')
        fi
    done
    if [ -n "$without_venv" ]; then
        echo "hawk: $without_venv has no venv module; install the package $without_venv-venv, or set HAWK_PYTHON to another Python 3.11 to 3.13" >&2
    else
        echo "hawk: found no Python 3.11 to 3.13 that runs; install one, or set HAWK_PYTHON to its path" >&2
    fi
    return 1
}
