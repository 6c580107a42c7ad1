# shellcheck shell=bash
# What every part of ./dev uses. ROOT, VENV and CACHE are set by ./dev.

# Lines for people go to stderr, so that `./dev env` and `./dev pulumi` keep stdout to themselves.
say() { printf '%s\n' "$*" >&2; }

# A line about something that was already there; not shown by the verbs that only pass through.
note() { [ -n "${QUIET:-}" ] || say "$@"; }

die() {
  say "error: $*"
  exit 1
}

have() { command -v "$1" >/dev/null 2>&1; }

# One sha256 over the files in the order given.
hash_of() {
  if have sha256sum; then cat "$@" | sha256sum | cut -c1-64; else cat "$@" | shasum -a 256 | cut -c1-64; fi
}

# version_ge A B: A >= B, both plain dotted numbers.
version_ge() {
  [ "$(printf '%s\n%s\n' "$1" "$2" | sort -t. -k1,1n -k2,2n -k3,3n | head -n 1)" = "$2" ]
}

# The first dotted number in the text given.
version_in() { printf '%s\n' "$*" | sed -n '1s/^[^0-9]*\([0-9][0-9.]*\).*/\1/p'; }

# with_limit SECONDS COMMAND…: 124 when the time is up. macOS has no timeout(1), but perl.
with_limit() {
  local status=0
  if have timeout; then timeout -k 5 "$@"; else perl -e 'alarm shift; exec @ARGV or exit 127' "$@"; fi || status=$?
  case "$status" in
    137 | 142) return 124 ;; # ended by SIGKILL, by SIGALRM
    *) return "$status" ;;
  esac
}

# A refused download is not tried again for a day: where the network is closed, waiting for the
# refusal is what would make every run slow.
refused_lately() { [ -n "$(find "$CACHE/refused/$1" -mmin -1440 2>/dev/null)" ]; }

remember_refusal() { mkdir -p "$CACHE/refused" && : >"$CACHE/refused/$1"; }

forget_refusals() { rm -rf "$CACHE/refused"; }

# logged NAME COMMAND…: the output goes to a log; when the command fails, the log's end is shown.
logged() {
  local log="$CACHE/logs/$1.log" status=0
  shift
  mkdir -p "$CACHE/logs"
  "$@" >"$log" 2>&1 </dev/null || status=$?
  [ "$status" -ne 0 ] || return 0
  say "the last lines of $log:"
  tail -n 20 "$log" >&2
  return "$status"
}

# locked NAME COMMAND…: one ./dev at a time does this; a lock whose owner is gone is taken over.
locked() {
  local lock="$CACHE/locks/$1" owner told="" status=0 nameless=0
  shift
  mkdir -p "$CACHE/locks"
  until mkdir "$lock" 2>/dev/null; do
    owner="$(cat "$lock/pid" 2>/dev/null || true)"
    [ -w "$CACHE/locks" ] || die "cannot write to $CACHE/locks"
    # Its owner writes its number at once, so one without a number was left by a run that was killed right then.
    [ -n "$owner" ] || nameless=$((nameless + 1))
    if { [ -n "$owner" ] && ! kill -0 "$owner" 2>/dev/null; } || [ "$nameless" -gt 3 ]; then
      rm -rf "$lock"
      continue
    fi
    [ -n "$told" ] || say "waiting for another ./dev (process ${owner:-unknown}) to finish the same step"
    told=yes
    sleep 1
  done
  sh -c 'echo "$PPID"' >"$lock/pid"
  "$@" || status=$?
  rm -rf "$lock"
  return "$status"
}

# start FUNCTION…: in the background, as a process group of its own, so that what it started can be
# stopped with it. await_jobs waits for all, and fails as soon as one does.
JOBS=""

start() {
  set -m
  "$@" </dev/null &
  JOBS="$JOBS $!"
  set +m
}

await_jobs() {
  local pid rest
  while [ -n "$JOBS" ]; do
    rest=""
    for pid in $JOBS; do
      if kill -0 "$pid" 2>/dev/null; then
        rest="$rest $pid"
      elif ! wait "$pid"; then
        return 1
      fi
    done
    JOBS="$rest"
    [ -z "$JOBS" ] || sleep 0.5
  done
}

stop_jobs() {
  local pid
  for pid in $JOBS; do kill -- "-$pid" 2>/dev/null || true; done
  JOBS=""
}
