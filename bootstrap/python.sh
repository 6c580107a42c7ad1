# shellcheck shell=bash
# uv, and the venv in .venv that holds exactly what the locks name, and this project itself with its `lora` command.

UV_MINIMUM=0.7.0
UV=""
# The extra of pyproject.toml that .venv is to have, or none; as long as this is empty it keeps what it has.
EXTRA=""

find_uv() {
  local candidate
  for candidate in "$(command -v uv || true)" "$CACHE/tools/uv/bin/uv"; do
    [ -x "$candidate" ] || continue
    if version_ge "$(version_in "$("$candidate" --version 2>/dev/null || echo 0)")" "$UV_MINIMUM"; then
      UV="$candidate"
      return 0
    fi
  done
  return 1
}

install_uv() {
  local aside="$CACHE/tools/uv.aside" started=$SECONDS
  find_uv && return 0
  python3 -c 'import ensurepip, venv' 2>/dev/null || install_packages "python3 python3-venv"
  say "uv: none on PATH that is $UV_MINIMUM or newer; installing one from PyPI for this project only"
  rm -rf "$aside"
  mkdir -p "$CACHE/tools"
  logged uv-venv python3 -m venv "$aside" || return 1
  logged uv-install "$aside/bin/python" -m pip install -q --disable-pip-version-check --require-hashes \
    -r "$ROOT/bootstrap/tools/uv.txt" || return 1
  rm -rf "$CACHE/tools/uv"
  mv "$aside" "$CACHE/tools/uv"
  say "uv: installed ($((SECONDS - started)) s)"
  find_uv
}

ensure_uv() { find_uv || locked uv install_uv || die "uv could not be installed"; }

remembered_extra() { cat "$VENV/.extra" 2>/dev/null || true; }

# Empty for none.
chosen_extra() {
  case "$EXTRA" in
    "") remembered_extra ;;
    none) ;;
    *) printf '%s' "$EXTRA" ;;
  esac
}

with_extra() {
  local extra
  extra="$(chosen_extra)"
  printf '%s' "${extra:+, with the extra $extra}"
}

# The stamp names what was installed, from where, and the interpreter: a venv whose Python is gone is made again.
venv_stamp() {
  local extra
  extra="$(chosen_extra)"
  set -- "$ROOT/requirements-dev.txt" ${extra:+"$ROOT/requirements-$extra.txt"} "$ROOT/pyproject.toml"
  printf '%s %s %s%s, compiled\n' "$(hash_of "$@")" \
    "$("$VENV/bin/python" -c 'import sys; print(*sys.version_info[:3], sep=".")' 2>/dev/null || echo none)" "$ROOT" \
    "${extra:+ with $extra}"
}

venv_ready() {
  [ -f "$VENV/.lock-stamp" ] && [ -x "$VENV/bin/lora" ] && [ "$(cat "$VENV/.lock-stamp")" = "$(venv_stamp)" ]
}

ensure_venv() {
  if venv_ready; then
    note "python: .venv is what the lock says$(with_extra)"
    return 0
  fi
  ensure_uv
  locked "venv-$(printf '%s' "$ROOT" | hash_of | cut -c1-12)" make_venv || die "the Python environment could not be made"
}

make_venv() {
  local remembered started=$SECONDS
  venv_ready && return 0
  say "python: making .venv from requirements-dev.txt$(with_extra)"
  if ! "$VENV/bin/python" -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null; then
    remembered="$(remembered_extra)"
    logged venv "$UV" venv --clear --python '>=3.10' "$VENV" || return 1
    # Kept, should the rest fail.
    printf '%s' "$remembered" >"$VENV/.extra"
  fi
  # From uv's cache first: it is instant, and it works without a network.
  sync_venv --offline >/dev/null 2>&1 || logged venv-sync sync_venv || return 1
  # Afterwards, since a sync removes what the lock does not name. It needs no network: the backend is in the lock.
  logged venv-project "$UV" pip install --quiet --offline --python "$VENV/bin/python" \
    --no-deps --no-build-isolation --editable "$ROOT" || return 1
  # Compiled now: where PYTHONDONTWRITEBYTECODE is set, as in many containers, each of pulumi's two processes would
  # compile hundreds of modules at every preview.
  logged venv-bytecode env -u PYTHONDONTWRITEBYTECODE "$VENV/bin/python" -c \
    'import components.deployment, components.described, components.ssh, pulumi.dynamic' || return 1
  # A choice that could not be made good is not remembered.
  printf '%s' "$(chosen_extra)" >"$VENV/.extra"
  venv_stamp >"$VENV/.lock-stamp"
  say "python: .venv ready ($((SECONDS - started)) s)"
}

sync_venv() {
  local extra
  extra="$(chosen_extra)"
  "$UV" pip sync "$@" --quiet --python "$VENV/bin/python" --require-hashes "$ROOT/requirements-dev.txt" \
    ${extra:+"$ROOT/requirements-$extra.txt"}
}
