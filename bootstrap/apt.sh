# shellcheck shell=bash
# Which system packages are missing, and who may install them.

APT_UPDATED=""

# need COMMAND:PACKAGE…: installs the packages (Debian, Ubuntu) of the commands that are missing,
# where that is allowed, and otherwise says what to run.
need() {
  local pair missing=""
  for pair in "$@"; do
    have "${pair%%:*}" || [ -x "/usr/sbin/${pair%%:*}" ] || missing="$missing ${pair#*:}"
  done
  [ -z "$missing" ] || install_packages "${missing# }"
}

may_install() { have apt-get && { [ "$(id -u)" -eq 0 ] || { have sudo && sudo -n true 2>/dev/null; }; }; }

install_packages() {
  local sudo="" started=$SECONDS
  have apt-get || die "missing: $1. Install them with this system's package manager and run this again."
  may_install || die "packages are missing, and installing them needs root. Run: sudo apt-get install -y $1"
  [ "$(id -u)" -eq 0 ] || sudo="sudo -n"
  say "apt: installing $1"
  # shellcheck disable=SC2086 # both are lists of words
  [ -n "$APT_UPDATED" ] || logged apt-update $sudo apt-get update -q ||
    say "apt: the package lists could not be refreshed; trying with the old ones"
  APT_UPDATED=yes
  # shellcheck disable=SC2086
  logged apt-install $sudo env DEBIAN_FRONTEND=noninteractive apt-get install -y -q $1 ||
    die "apt could not install: $1"
  say "apt: done ($((SECONDS - started)) s)"
}
