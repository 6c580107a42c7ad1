# shellcheck shell=bash disable=SC2034 # what is set here is read by ./dev
# The pulumi CLI with its Python host: one on PATH that is new enough, else one of our own in the
# cache, from the official installer where that can be reached, else built from Go modules.

# What the SDK's typed arguments and `stackConfigDir` need of the engine.
PULUMI_MINIMUM=3.237.0
# The directory to put first on PATH; empty when the user's own pulumi is used.
PULUMI_BIN=""

pulumi_version() { sed -n 's|^require github.com/pulumi/pulumi/pkg/v3 v||p' "$ROOT/bootstrap/pulumi/go.mod"; }
pulumi_home() { printf '%s' "$CACHE/pulumi-$(pulumi_version)"; }

# usable_pulumi PATH: prints the version if that CLI is new enough and has a Python host with it.
usable_pulumi() {
  local cli="$1" version
  [ -x "$cli" ] || return 1
  version="$(version_in "$(PULUMI_SKIP_UPDATE_CHECK=1 "$cli" version 2>/dev/null || echo 0)")"
  version_ge "$version" "$PULUMI_MINIMUM" || return 1
  [ -x "$(dirname "$cli")/pulumi-language-python" ] || have pulumi-language-python || return 1
  printf '%s' "$version"
}

find_pulumi() {
  local version
  if version="$(usable_pulumi "$(command -v pulumi || true)")"; then
    PULUMI_BIN=""
    note "pulumi: $version, found on PATH"
  elif version="$(usable_pulumi "$(pulumi_home)/bin/pulumi")"; then
    PULUMI_BIN="$(pulumi_home)/bin"
    note "pulumi: $version, in this project's cache ($(cat "$(pulumi_home)/source" 2>/dev/null || echo unknown))"
  else
    return 1
  fi
}

ensure_pulumi() { (QUIET=1 find_pulumi) || locked pulumi install_pulumi || die "pulumi could not be installed"; }

install_pulumi() {
  local aside
  aside="$(pulumi_home).aside"
  (QUIET=1 find_pulumi) && return 0
  rm -rf "$aside"
  mkdir -p "$aside"
  download_pulumi "$aside" || build_pulumi "$aside" || return 1
  usable_pulumi "$aside/bin/pulumi" >/dev/null || { say "pulumi: what was installed does not run"; return 1; }
  rm -rf "$(pulumi_home)"
  mv "$aside" "$(pulumi_home)"
}

download_pulumi() {
  local aside="$1" started=$SECONDS
  refused_lately pulumi && return 1
  say "pulumi: none on PATH that is $PULUMI_MINIMUM or newer; asking the official installer for $(pulumi_version)"
  if curl -fsSL --connect-timeout 5 --max-time 30 https://get.pulumi.com -o "$aside/install.sh" 2>/dev/null &&
    logged pulumi-install with_limit 600 sh "$aside/install.sh" \
      --version "$(pulumi_version)" --install-root "$aside" --no-edit-path 2>/dev/null; then
    rm -f "$aside/install.sh"
    printf 'official installer\n' >"$aside/source"
    say "pulumi: installed ($((SECONDS - started)) s)"
    return 0
  fi
  remember_refusal pulumi
  say "pulumi: the official installer cannot be reached ($((SECONDS - started)) s)"
  return 1
}

build_pulumi() {
  local aside="$1" started=$SECONDS modules="$ROOT/bootstrap" sdk
  ensure_go || { say "go: no toolchain, so pulumi cannot be built"; return 1; }
  say "pulumi: building $(pulumi_version) from Go modules: 4 to 10 minutes the first time (log: $CACHE/logs/pulumi-build.log)"
  go_build pulumi-build "$modules/pulumi" "$aside/bin/pulumi" github.com/pulumi/pulumi/pkg/v3/cmd/pulumi \
    "-X github.com/pulumi/pulumi/sdk/v3/go/common/version.Version=v$(pulumi_version)" || return 1
  go_build pulumi-python-build "$modules/language-python" "$aside/bin/pulumi-language-python" \
    github.com/pulumi/pulumi/sdk/v3/python/cmd/pulumi-language-python || return 1
  # The two scripts that the host starts lie beside its source.
  sdk="$(GOTOOLCHAIN=local GOFLAGS=-mod=readonly "$GO" -C "$modules/language-python" list -m -f '{{.Dir}}' github.com/pulumi/pulumi/sdk/v3)" || return 1
  install -m 0755 "$sdk/python/cmd/pulumi-language-python-exec" "$sdk/python/dist/pulumi-resource-pulumi-python" "$aside/bin/" || return 1
  printf 'built from Go modules\n' >"$aside/source"
  say "pulumi: built ($((SECONDS - started)) s)"
}
