#!/bin/sh
# Print the path of the Python to use: the newest of 3.13 .. 3.10 that works, else a newer python3.
#   tools/find_python.sh            on PATH and in /usr/bin ($SYSTEM_BIN instead, if set)
#   tools/find_python.sh 3.12       that version alone, in ~/.pyenv/versions as well
#   tools/find_python.sh /a/python  that interpreter alone
# "Works" is found out by running it: version managers put names on PATH that do not run, vendor
# images an old conda first, and Debian's python3 has no ensurepip until python3-venv is there.
set -u
unset PYTHONPATH PYTHONHOME PYTHONSTARTUP VIRTUAL_ENV CONDA_PREFIX CONDA_DEFAULT_ENV

works() { # works FILE [MINOR]: prints its path if it is Python 3.MINOR (any from 3.10) with venv
    [ -x "$1" ] && [ ! -d "$1" ] && "$1" -E -c '
import sys
if not (sys.version_info >= (3, 10) and sys.argv[1] in ("", str(sys.version_info[1]))):
    sys.exit(1)
import ensurepip, venv
' "${2-}" >/dev/null 2>&1 </dev/null && echo "$1"
}

search() { # search NAME [MINOR]: on PATH, then in /usr/bin
    old_ifs=$IFS
    IFS=:
    for folder in $PATH ${SYSTEM_BIN-/usr/bin}; do
        works "$folder/$1" "${2-}" && { IFS=$old_ifs; return 0; }
    done
    IFS=$old_ifs
    return 1
}

case ${1-} in
'')
    for minor in 13 12 11 10; do search "python3.$minor" $minor && exit; done
    search python3 && exit
    echo "no Python 3.10 or newer with venv found; on Debian and Ubuntu: apt-get install python3-venv" >&2
    ;;
3.[0-9]*)
    search "python$1" "${1#3.}" && exit
    for file in "${HOME:-/root}/.pyenv/versions/$1".*/bin/python; do works "$file" "${1#3.}" && exit; done
    echo "no Python $1 with venv found" >&2
    ;;
*)
    found=$(command -v "$1") && works "$found" && exit
    echo "PYTHON=$1 does not run, is older than 3.10 or lacks venv and ensurepip" >&2
    ;;
esac
exit 1
