#!/usr/bin/env bash
# Makes the container images of the sandbox pod:  build.sh pod|standin|sandbox ...
#
#   pod      localhost/lora-pods-pod      a machine with systemd and sshd (from localhost/lora-pods-debian:12)
#   standin  localhost/lora-pods-standin  that, with a stand-in for vLLM, for tests
#   sandbox  localhost/lora-pods-sandbox  that, with the real vLLM for CPUs
#
# An image is tagged with a hash of all that it is made from, and made only where that tag is missing.
set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
root=$(cd "$here/../.." && pwd)
standin=$root/tests/engine/standin_vllm
# shellcheck source-path=SCRIPTDIR source=engine.sh
. "$here/engine.sh"

main() {
  if [ $# = 0 ]; then
    echo "usage: build.sh pod|standin|sandbox ..." >&2
    return 2
  fi
  choose_engine
  local image
  for image in "$@"; do
    case $image in
      pod | standin | sandbox) ensure "$image" ;;
      *) echo "build.sh: no image named $image: pod, standin or sandbox" >&2 && return 2 ;;
    esac
  done
}

hash_of() { # hash_of <file or directory>... : 12 hex digits of all names and contents
  find "$@" -type f ! -name '*.pyc' | LC_ALL=C sort | while read -r file; do
    echo "${file#"$root"}"
    cat "$file"
  done | sha256 | cut -c1-12
}

sha256() { if command -v sha256sum >/dev/null; then sha256sum; else shasum -a 256; fi; }

inputs() { # inputs <image> : the files that it is made from, its parents' included
  local debian=("$here/Containerfile.debian" "$here/debian.packages")
  local pod=("${debian[@]}" "$here/Containerfile.pod" "$here/pod")
  local uv=("$here/network.sh" "$here/uv.txt")
  case $1 in
    debian) printf '%s\n' "${debian[@]}" ;;
    pod) printf '%s\n' "${pod[@]}" ;;
    standin) printf '%s\n' "${pod[@]}" "${uv[@]}" "$standin" ;;
    sandbox) printf '%s\n' "${pod[@]}" "${uv[@]}" "$here/Containerfile.sandbox" "$here/install-vllm.sh" \
      "$here/vllm.txt" "$here/model.txt" ;;
  esac
}

ensure() ( # ensure <image> : makes it unless its tag is there
  # Two builds of one image at once would do everything twice.
  if command -v flock >/dev/null; then
    exec 9>"${TMPDIR:-/tmp}/lora-pods-build-$1.$(id -u).lock"
    flock 9
  fi
  local name=localhost/lora-pods-$1 alias=latest hash words=() word
  [ "$1" = debian ] && alias=12
  while read -r word; do words+=("$word"); done < <(inputs "$1")
  hash=$(hash_of "${words[@]}")
  # Tagging is the check as well: it fails where the image is missing.
  if "${engine[@]}" tag "$name:$hash" "$name:$alias" 2>/dev/null; then exit; fi
  case $1 in debian) ;; pod) ensure debian ;; *) ensure pod ;; esac
  echo "building $name ..." >&2
  local started=$SECONDS
  if ! "make_$1" "$name:$hash" >"$scratch/$1.log" 2>&1; then
    tail -n 40 "$scratch/$1.log" >&2
    echo "building $name failed" >&2
    exit 1
  fi
  "${engine[@]}" tag "$name:$hash" "$name:$alias"
  forget_others "$name" "$hash" "$alias"
  echo "built $name in $((SECONDS - started)) s" >&2
)

forget_others() { # forget_others <name> <tag>... : removes what the name meant before, where nothing uses it
  local tag
  "${engine[@]}" images --format '{{.Tag}}' "$1" | while read -r tag; do
    [ "$tag" = "$2" ] || [ "$tag" = "$3" ] || "${engine[@]}" rmi "$1:$tag" >/dev/null 2>&1 || true
  done
}

make_debian() {
  local base=docker.io/library/debian:12
  if "${engine[@]}" image inspect "$base" >/dev/null 2>&1 || within 15 "${engine[@]}" manifest inspect "$base" >/dev/null 2>&1; then
    build "$1" "$here/Containerfile.debian" "$here"
    return
  fi
  echo "no container registry answers: making Debian 12 with debootstrap" >&2
  local sudo=()
  [ "$(id -u)" = 0 ] || sudo=(sudo)
  command -v debootstrap >/dev/null || [ -x /usr/sbin/debootstrap ] || {
    echo "debootstrap is missing: apt-get install debootstrap" >&2
    return 1
  }
  local tree=$scratch/debian
  ${sudo[@]+"${sudo[@]}"} env PATH="$PATH:/usr/sbin:/sbin" debootstrap --variant=minbase \
    --include="$(paste -sd, "$here/debian.packages")" bookworm "$tree" || return
  ${sudo[@]+"${sudo[@]}"} tar -C "$tree" --exclude='./var/cache/apt/*' --exclude='./var/lib/apt/lists/*' \
    --exclude='./dev/*' -c . | "${engine[@]}" import --change 'CMD ["/sbin/init"]' - "$1" || return
  ${sudo[@]+"${sudo[@]}"} rm -rf "$tree"
}

make_pod() {
  build "$1" "$here/Containerfile.pod" "$here"
}

make_standin() {
  mkdir "$scratch/standin" && cp -R "$standin/." "$here/network.sh" "$here/uv.txt" "$scratch/standin/" || return
  build "$1" "$standin/Containerfile" "$scratch/standin"
}

make_sandbox() {
  build "$1" "$here/Containerfile.sandbox" "$here"
}

build() { # build <tag> <Containerfile> <context>
  local options=() ca
  # One commit for all steps: each costs a copy of what it wrote.
  [ "${engine[0]##*/}" != podman ] || options+=(--layers=false)
  for ca in "${SSL_CERT_FILE:-}" /etc/ssl/certs/ca-certificates.crt /etc/pki/tls/certs/ca-bundle.crt /etc/ssl/cert.pem; do
    if [ -s "$ca" ]; then
      options+=(--secret "id=ca,src=$ca")
      break
    fi
  done
  index_settings >"$scratch/env"
  options+=(--secret "id=env,src=$scratch/env")
  DOCKER_BUILDKIT=1 "${engine[@]}" build "${limits[@]}" "${options[@]}" -t "$1" -f "$2" "$3"
}

index_settings() { # where this machine's pip and uv look for packages, as shell assignments
  local name index
  for name in PIP_INDEX_URL PIP_EXTRA_INDEX_URL PIP_TRUSTED_HOST PIP_DEFAULT_TIMEOUT UV_DEFAULT_INDEX UV_INDEX UV_INDEX_URL \
    UV_EXTRA_INDEX_URL UV_INSECURE_HOST UV_HTTP_TIMEOUT http_proxy https_proxy no_proxy HTTP_PROXY HTTPS_PROXY NO_PROXY; do
    [ -z "${!name:-}" ] || printf 'export %s=%q\n' "$name" "${!name}"
  done
  index=$(python3 -m pip config get global.index-url 2>/dev/null || true)
  if [ -n "$index" ] && [ -z "${PIP_INDEX_URL:-}${UV_DEFAULT_INDEX:-}${UV_INDEX_URL:-}" ]; then
    printf 'export PIP_INDEX_URL=%q UV_DEFAULT_INDEX=%q\n' "$index" "$index"
  fi
}

within() { # within <seconds> <command>... ; macOS has no timeout
  if command -v timeout >/dev/null; then timeout "$@"; else shift && "$@"; fi
}

scratch=$(mktemp -d "${TMPDIR:-/tmp}/lora-pods-build.XXXXXX")
trap 'rm -rf "$scratch"' EXIT
main "$@"
