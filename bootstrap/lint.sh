# shellcheck shell=bash disable=SC2034 # what is set here is read by ./dev
# What ./dev lint runs beside ruff and mypy: actionlint, for the workflows. Built once, where a Go is at hand.

ACTIONLINT=""

actionlint_version() { sed -n 's|^require github.com/rhysd/actionlint v||p' "$ROOT/bootstrap/actionlint/go.mod"; }
actionlint_home() { printf '%s' "$CACHE/tools/actionlint-$(actionlint_version)"; }

find_actionlint() {
  local candidate
  for candidate in "$(command -v actionlint || true)" "$(actionlint_home)/actionlint"; do
    [ -x "$candidate" ] || continue
    ACTIONLINT="$candidate"
    return 0
  done
  return 1
}

# No Go is downloaded for it: it is some hundred megabytes, and CI has one.
ensure_actionlint() {
  find_actionlint && return 0
  if ! refused_lately actionlint && find_go; then
    locked actionlint build_actionlint && find_actionlint && return 0
  fi
  say "lint: no actionlint is here and none can be built, so the workflows are not looked at"
  return 1
}

build_actionlint() {
  local aside started=$SECONDS
  aside="$(actionlint_home).aside"
  find_actionlint && return 0
  say "actionlint: building $(actionlint_version)"
  go_build actionlint-build "$ROOT/bootstrap/actionlint" "$aside/actionlint" github.com/rhysd/actionlint/cmd/actionlint \
    2>/dev/null || { remember_refusal actionlint; return 1; }
  rm -rf "$(actionlint_home)"
  mv "$aside" "$(actionlint_home)"
  say "actionlint: built ($((SECONDS - started)) s)"
}
