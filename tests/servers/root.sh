# Sourced by tests/servers/rabbitmq and tests/servers/mysql-root, which set -euo pipefail: a folder with a Debian of some
# suite and one package of it, made by debootstrap in the user's cache. No proc or sys is mounted: it is files only.
#
# They set: suite; package; cache (a folder); root (in it); found, a path in the root that may hold a *, which must be
# there then. And `none WHY`, which says that this cannot be had here, and ends the script with 75.
# shellcheck disable=SC2154 # set by who sources it

mirror() { # the archive that apt itself is configured with, neither its security part nor another vendor's
    apt-get indextargets --format '$(ORIGIN)|$(LABEL)|$(REPO_URI)' 'Created-By: Packages' |
        sed -n 's/^Debian|Debian|//p' | sort | uniq -c | sort -rn | awk 'NR == 1 { print $2 }'
}

discard() { # rm, but never through a mount that a broken debootstrap has left
    [[ -e $1 ]] || return 0
    awk -v at="$(realpath "$1")/" 'index($5 "/", at) == 1 { print $5 }' /proc/self/mountinfo | sort -r |
        while read -r mount; do umount "$mount" || umount -l "$mount"; done
    rm -rf --one-file-system "$1"
}

apt() { # one of us at a time, and somebody else's apt is waited for: apt-get update itself does not wait
    local try
    for try in {1..5}; do
        flock -w 120 "$cache/apt.lock" timeout 120 apt-get -qq -o DPkg::Lock::Timeout=100 "$@" && return
        sleep $((try * 2))
    done
    return 1
}

make_root() {
    local from making="$root.making" log="$root.log" child until=$((SECONDS + 600))
    [[ -d $root ]] && return
    [[ -z $(find "$root.none" -mmin -10 2>/dev/null) ]] || none "$(<"$root.none")"
    from=$(mirror)
    if [[ -z $from ]] || ! command -v debootstrap >/dev/null; then
        { apt update && DEBIAN_FRONTEND=noninteractive apt install -y --no-install-recommends debootstrap; } \
            </dev/null >"$log" 2>&1 9>&- || given_up "apt-get installs no debootstrap ($log)"
        from=$(mirror)
    fi
    [[ -n $from ]] || none "apt knows no Debian archive"
    trap 'discard "$making"' EXIT
    trap 'kill ${child-} 2>/dev/null || :; wait; exit 143' INT TERM
    for _ in 1 2 3; do
        discard "$making"
        timeout $((until > SECONDS ? until - SECONDS : 1)) debootstrap --variant=minbase --include="$package" \
            "$suite" "$making" "$from" </dev/null >"$log" 2>&1 9>&- &
        child=$!
        if wait $child; then
            compgen -G "$making/$found" >/dev/null ||
                given_up "Debian $suite has another version by now"
            rm -rf "$making"/var/cache/apt/archives/*.deb "$making"/var/lib/apt/lists/*
            grep -qs localhost "$making/etc/hosts" || echo "127.0.0.1 localhost" >>"$making/etc/hosts"
            mv -T "$making" "$root" && rm "$log"
            trap - EXIT INT TERM
            return
        fi
        sleep 3
    done
    given_up "debootstrap failed three times: $(tail -n 1 "$log") ($log)"
}

given_up() { echo "$*" >"$root.none" && none "$*"; } # the next who asks within ten minutes gets the same answer
