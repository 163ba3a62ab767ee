#!/bin/sh
# Make the environment VENV and install this checkout into it; `make setup` calls this. Does nothing
# if that was done before and nothing that matters has changed.
#
#   VENV    folder of the environment
#   PYTHON  the Python to make it from; default: the first one >= 3.12 that is found
#   TORCH   what to install as torch, unless the Python has a CUDA build of it
#   EXTRAS  extras of setup.py
set -eu
: "${VENV:=.venv}" "${PYTHON:=}" "${TORCH:=torch==2.13.0}" "${EXTRAS:=megatron,plot,dev}"
stamp="$VENV/megatron-d3-setup"

# --- a Python that will do ------------------------------------------------------------------------

# NOTE: a pyenv shim exists for every version that any pyenv Python has, so it must be run to know.
will_do() {
    "$1" -c 'import sys; sys.exit(sys.version_info < (3, 12))' >/dev/null 2>&1
}

find_python() {
    if [ -n "$PYTHON" ]; then
        set -- "$PYTHON"
    else
        set -- python3.12 python3.13 python3.14 \
            "${PYENV_ROOT:-${HOME:-}/.pyenv}"/versions/3.1[2-9]*/bin/python python3 python
    fi
    for python in "$@"; do
        if will_do "$python"; then
            echo "$python"
            return
        fi
    done
    cat >&2 <<END
Megatron-D3 needs Python 3.12 or newer; ${PYTHON:-every Python found here} is older. Get one, e.g. by
    apt-get install python3.12 python3.12-venv      (Ubuntu 24.04)
    uv python install 3.12        or        pyenv install 3.12
    conda create -n d3 python=3.12 && conda activate d3
and run make again, or name it: make setup PYTHON=/path/to/python3.12
END
    exit 1
}

# --- what was installed, and from what ------------------------------------------------------------

wanted() {
    echo "$PWD $TORCH $EXTRAS"
    cksum setup.py pyproject.toml tools/setup.sh
    find megatron_d3 -name '*.[ch]' | sort | xargs cksum
}

if [ -f "$stamp" ] && [ "$(wanted)" = "$(cat "$stamp")" ] && will_do "$VENV/bin/python"; then
    exit 0
fi

if [ -x "$VENV/bin/python" ]; then
    if ! will_do "$VENV/bin/python"; then
        echo "$VENV has a Python older than 3.12; deactivate it, or remove it, and run make again" >&2
        exit 1
    fi
else
    python=$(find_python)
    # A container with a CUDA build of torch (NGC) is used with what it brings.
    share=
    if "$python" -c 'import sys, torch
is_new = tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 6)
sys.exit(not (is_new and torch.version.cuda))' >/dev/null 2>&1; then
        share=--system-site-packages
    fi
    if ! "$python" -m venv $share "$VENV"; then
        rm -rf "$VENV"
        echo "$python cannot make an environment; on Debian and Ubuntu: apt-get install" \
            "$("$python" -c 'import sys; print("python%d.%d-venv" % sys.version_info[:2])')" >&2
        exit 1
    fi
fi

pip="$VENV/bin/python -m pip --disable-pip-version-check"
torch_version() {
    "$VENV/bin/python" -c 'from importlib.metadata import version; print(version("torch"))'
}
if ! torch_version >/dev/null 2>&1; then
    echo "setup: installing $TORCH into $VENV (a few minutes)" >&2
    $pip install --quiet "$TORCH"
fi
torch=$(torch_version)
echo "setup: installing megatron-d3[$EXTRAS] into $VENV, with torch $torch as it is" >&2
# The torch that is there stays, whatever a dependency would like better.
echo "torch==$torch" > "$VENV/megatron-d3-constraints.txt"
$pip install --quiet --constraint "$VENV/megatron-d3-constraints.txt" --editable ".[$EXTRAS]"
wanted > "$stamp"
