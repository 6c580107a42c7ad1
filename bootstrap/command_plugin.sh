# shellcheck shell=bash disable=SC2034 # what is set here is read by ./dev
# The plugin behind pulumi_command: installed already, else from Pulumi, else the stand-in of this
# repository, which runs the same remote commands over the same SSH.

# In seconds. It is some tens of megabytes, and a line may be slow.
PLUGIN_DOWNLOAD_LIMIT=300
# The directory to put on PATH; empty when the official plugin is used.
STANDIN_BIN=""

# The engine asks for the version of the SDK package, so the lock decides.
command_version() { sed -n 's/^pulumi-command==\([0-9.]*\).*/\1/p' "$ROOT/requirements.txt"; }

# Named after its sources, so that a change to them builds it again.
standin_home() {
  local digest
  digest="$(cd "$ROOT/bootstrap/command-plugin" &&
    find . -type f ! -name '*_test.go' ! -name pulumi-resource-command | LC_ALL=C sort | xargs cat | hash_of)"
  printf '%s' "$CACHE/command-plugin-$(printf '%.12s' "$digest")"
}

find_official_plugin() {
  local dir
  dir="${PULUMI_HOME:-$HOME/.pulumi}/plugins/resource-command-v$(command_version)"
  if have pulumi-resource-command; then
    note "command plugin: the one on PATH"
  elif [ -x "$dir/pulumi-resource-command" ]; then
    note "command plugin: $(command_version), installed by pulumi"
  else
    return 1
  fi
  STANDIN_BIN=""
}

find_standin() {
  [ -x "$(standin_home)/pulumi-resource-command" ] || return 1
  STANDIN_BIN="$(standin_home)"
  note "command plugin: this repository's stand-in, because the official $(command_version) could not be downloaded here"
}

find_command_plugin() { find_official_plugin || find_standin; }

# Until it has been refused lately, the official plugin is asked for even where a stand-in is there.
settled_command_plugin() { find_official_plugin || { refused_lately command-plugin && find_standin; }; }

ensure_command_plugin() {
  (QUIET=1 settled_command_plugin) || locked command-plugin install_command_plugin ||
    die "the command plugin could not be installed"
}

install_command_plugin() {
  (QUIET=1 settled_command_plugin) && return 0
  download_command_plugin || build_standin
}

# Whether any of the hosts that pulumi downloads it from answers at all: where the network is closed,
# pulumi itself takes long to find out. Any answer will do; who has a mirror is taken at their word.
plugin_host_answers() {
  local host
  [ -z "${PULUMI_PLUGIN_DOWNLOAD_URL_OVERRIDES:-}" ] || return 0
  for host in api.github.com get.pulumi.com; do
    curl -sS --head --connect-timeout 5 --max-time 10 "https://$host/" >/dev/null 2>&1 && return 0
  done
  return 1
}

download_command_plugin() {
  local started=$SECONDS status=1
  refused_lately command-plugin && return 1
  if plugin_host_answers; then
    say "command plugin: asking pulumi to install $(command_version)"
    status=0
    logged command-plugin-install with_limit "$PLUGIN_DOWNLOAD_LIMIT" env PATH="$(tools_path)" PULUMI_SKIP_UPDATE_CHECK=1 \
      pulumi plugin install resource command "$(command_version)" 2>/dev/null || status=$?
  fi
  case "$status" in
    0)
      say "command plugin: installed ($((SECONDS - started)) s)"
      return 0
      ;;
    124)
      say "command plugin: the download took more than $PLUGIN_DOWNLOAD_LIMIT s; it is tried again the next time"
      return 1
      ;;
  esac
  remember_refusal command-plugin
  say "command plugin: the official one cannot be downloaded here ($((SECONDS - started)) s)"
  return 1
}

build_standin() {
  local aside started=$SECONDS
  (QUIET=1 find_standin) && return 0
  aside="$(standin_home).aside"
  ensure_go || { say "go: no toolchain, so the stand-in cannot be built"; return 1; }
  say "command plugin: building this repository's stand-in"
  go_build command-plugin-build "$ROOT/bootstrap/command-plugin" "$aside/pulumi-resource-command" . || return 1
  rm -rf "$(standin_home)"
  mv "$aside" "$(standin_home)"
  say "command plugin: built ($((SECONDS - started)) s)"
}
