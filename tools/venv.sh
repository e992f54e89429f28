#!/bin/sh
# Make or refresh a virtual environment: tools/venv.sh FOLDER WHAT [PYTHON]
# WHAT is given to pip install -e ('.' or '.[dev]'). Does nothing when FOLDER is newer than
# pyproject.toml, holds WHAT, was made here (a copied checkout would run the original's code) and
# with PYTHON (if one is named).
set -eu
unset PYTHONPATH PYTHONHOME PYTHONSTARTUP VIRTUAL_ENV CONDA_PREFIX CONDA_DEFAULT_ENV
folder=$1 what=$2 wanted=${3-}
tools=$(dirname "$0")
stamp=$folder/.edged-installed # lines: WHAT, the Python it was made with, the folder it is for
here=$(pwd -P)

[ -z "$wanted" ] || wanted=$("$tools/find_python.sh" "$wanted")
had_what=$(sed -n 1p "$stamp" 2>/dev/null || true)
had_python=$(sed -n 2p "$stamp" 2>/dev/null || true)
had_here=$(sed -n 3p "$stamp" 2>/dev/null || true)
same_here=true
[ "${had_here:-$here}" = "$here" ] || same_here=false
same_python=true
[ -z "$wanted" ] || [ "$wanted" = "$had_python" ] || same_python=false
if $same_python && $same_here && [ "$had_what" = "$what" ] && [ -n "$(find "$stamp" -newer pyproject.toml)" ] &&
    "$folder/bin/python" -c '' 2>/dev/null; then
    exit 0
fi

python=${wanted:-$("$tools/find_python.sh")}
echo "setup: $python ($("$python" -E -V 2>&1)) -> $folder, a minute or two; another one: make PYTHON=..."
if [ -e "$folder" ] && [ ! -e "$folder/pyvenv.cfg" ]; then
    echo "setup: $folder is there and is no virtual environment; remove it or name another VENV" >&2
    exit 1
fi
if ! "$folder/bin/python" -c '' 2>/dev/null || [ "${had_python:-$python}" != "$python" ] || ! $same_here; then
    rm -rf "$folder"
fi
"$python" -E -m venv "$folder"
"$folder/bin/python" -m pip install --quiet --disable-pip-version-check -e "$what"
printf '%s\n%s\n%s\n' "$what" "$python" "$here" >"$stamp"
