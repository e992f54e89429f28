#!/bin/sh
# The programs the tests need besides Python: installs them when it may, else says what to install.
set -eu
PATH=$PATH:/usr/sbin:/sbin
packages=
need() { # need PROGRAM PACKAGE
    command -v "$1" >/dev/null 2>&1 || case " $packages " in
    *" $2 "*) ;;
    *) packages="$packages $2" ;;
    esac
}
need mosquitto mosquitto
need mosquitto_pub mosquitto-clients
need systemd-analyze systemd
need systemd-sysusers systemd
need systemd-tmpfiles systemd
[ -n "$packages" ] || exit 0

if [ "$(id -u)" != 0 ] || ! command -v apt-get >/dev/null 2>&1; then
    echo "test: some tests need more programs; install them with: sudo apt-get install -y$packages"
    exit 0
fi
export DEBIAN_FRONTEND=noninteractive
echo "test: installing Debian packages:$packages"
install() {
    # shellcheck disable=SC2086 # a list of names
    apt-get install -y -qq --no-install-recommends $packages
}
log=$(mktemp)
trap 'rm -f "$log"' EXIT
{ install || { apt-get update -qq && install; }; } >"$log" 2>&1 </dev/null || {
    cat "$log" >&2
    exit 1
}
