# Sourced by examples/run and tests/run, which set -euo pipefail.
#
# make_venv NAME makes .venv/NAME out of locks/NAME.txt, every download checked against its hash, and puts this clone
# on its path (a .pth file, so nothing is built). Done once for each lock, Python and place of the clone: a stamp says so.

make_venv() {
    local name=$1 root venv lock stamp
    root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)
    venv=$root/.venv/$name
    lock=$root/locks/$name.txt
    command -v python3 >/dev/null || venv_fail "trio-settlement needs python3, 3.11 or newer"
    stamp=$(python3 -I - "$root" "$lock" <<'PYTHON'
import hashlib, os, sys
if sys.version_info < (3, 11):
    sys.exit("trio-settlement needs Python 3.11 or newer; this python3 is %d.%d" % sys.version_info[:2])
print(sys.argv[1], os.path.realpath(sys.executable), sys.version.split()[0])
print(hashlib.sha256(open(sys.argv[2], "rb").read()).hexdigest())
PYTHON
    ) || exit 2
    venv_is_current || (
        mkdir -p "$root/.venv"
        exec 9>"$root/.venv/$name.lock"
        if command -v flock >/dev/null; then flock 9; fi # two at once: the second waits, and finds it done
        venv_is_current || venv_build
    ) || exit 2
}

# venv_extra NAME EXTRA adds locks/EXTRA.txt to .venv/NAME, where that can be built; else it says why in one line, and is
# false. A compiler that is missing is installed, as root on Debian.

venv_extra() {
    local name=$1 extra=$2 root venv lock stamp
    root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)
    venv=$root/.venv/$name
    lock=$root/locks/$extra.txt
    stamp="$(cat "$venv/stamp") $(sha256sum <"$lock")"
    [ "$(cat "$venv/stamp.$extra" 2>/dev/null)" = "$stamp" ] && return
    if ! venv_compiler; then
        echo "locks/$extra.txt needs a C compiler and Python's headers; on Debian and Ubuntu: apt-get install gcc python3-dev" >&2
        return 1
    fi
    echo "adding $extra to .venv/$name (once) ..." >&2
    if ! venv_three_times "$venv/bin/python" -m pip install -qq --disable-pip-version-check --no-input \
        --require-hashes --requirement "$lock"; then
        echo "could not install locks/$extra.txt" >&2
        return 1
    fi
    echo "$stamp" >"$venv/stamp.$extra"
}

# venv_beside NAME OTHER has locks/OTHER.txt in .venv/NAME/OTHER, a folder that is on nobody's path: other versions of what
# is in the environment. False where it cannot be installed.

venv_beside() {
    local name=$1 other=$2 root venv stamp
    root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)
    venv=$root/.venv/$name
    stamp="$(cat "$venv/stamp") $(sha256sum <"$root/locks/$other.txt")"
    [ "$(cat "$venv/stamp.$other" 2>/dev/null)" = "$stamp" ] && return
    echo "adding $other beside .venv/$name (once) ..." >&2
    rm -rf "${venv:?}/$other"
    if ! venv_three_times "$venv/bin/python" -m pip install -qq --disable-pip-version-check --no-input \
        --require-hashes --requirement "$root/locks/$other.txt" --target "$venv/$other"; then
        echo "could not install locks/$other.txt" >&2
        return 1
    fi
    echo "$stamp" >"$venv/stamp.$other"
}

venv_compiler() {
    venv_can_compile && return
    if [ "$(id -u)" = 0 ] && [ -f /etc/debian_version ] && command -v apt-get >/dev/null; then
        venv_three_times venv_apt gcc libc6-dev python3-dev || true
    fi
    venv_can_compile
}

venv_can_compile() {
    command -v cc >/dev/null &&
        python3 -I -c 'import os, sysconfig; os.stat(sysconfig.get_path("include") + "/Python.h")' 2>/dev/null
}

# These three see make_venv's variables.

venv_is_current() {
    [ -x "$venv/bin/python" ] && [ "$(cat "$venv/stamp" 2>/dev/null)" = "$stamp" ]
}

venv_build() {
    python3 -I -c 'import ensurepip, venv' 2>/dev/null || venv_install_module
    echo "setting up .venv/$name (once) ..." >&2
    rm -rf "$venv"
    python3 -m venv "$venv" || venv_fail "python3 -m venv failed"
    venv_three_times "$venv/bin/python" -m pip install -qq --disable-pip-version-check --no-input \
        --require-hashes --requirement "$lock" || venv_fail "could not install locks/$name.txt"
    echo "$root" >"$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/trio_settlement.pth"
    echo "$stamp" >"$venv/stamp"
}

venv_install_module() { # Debian keeps the module venv in a package of its own
    if [ "$(id -u)" = 0 ] && [ -f /etc/debian_version ] && command -v apt-get >/dev/null; then
        venv_three_times venv_apt python3-venv || true
        python3 -I -c 'import ensurepip, venv' 2>/dev/null && return
    fi
    venv_fail "this python3 has no venv; on Debian and Ubuntu: apt-get install python3-venv"
}

venv_apt() ( # one at a time: tests/servers/rabbitmq takes the same lock, and apt-get update waits for nobody
    lock=${XDG_CACHE_HOME:-$HOME/.cache}/trio-settlement/apt.lock
    mkdir -p "$(dirname "$lock")"
    exec 8>"$lock"
    if command -v flock >/dev/null; then flock 8; fi
    apt-get -qq update >&2 8>&- && DEBIAN_FRONTEND=noninteractive apt-get -qq -y install "$@" </dev/null >&2 8>&-
)

venv_three_times() {
    local try
    for try in 1 2 3; do
        "$@" && return
        if [ "$try" != 3 ]; then
            echo "try $try of 3 failed, trying again" >&2
            sleep $((try * 5))
        fi
    done
    return 1
}

venv_fail() {
    echo "$1" >&2
    exit 2
}
