# shellcheck shell=bash
# pulumi-aws for the tests of `ec2` pods, in a directory of its own: in .venv, where only `./dev setup --with aws` puts it,
# pulumi would fetch the plugin that belongs to it for every stack.

# Its entry in the lock, hashes and all.
pulumi_aws_pin() { sed -n '/^pulumi-aws==/,/[^\\]$/p' "$ROOT/requirements-aws.txt"; }
pulumi_aws_version() { version_in "$(pulumi_aws_pin)"; }

# Named after that entry, so that another version or another file is another directory.
pulumi_aws_site() {
  printf '%s' "$CACHE/tools/pulumi-aws-$(pulumi_aws_version)-$(pulumi_aws_pin | hash_of | cut -c1-12)"
}

find_pulumi_aws() { [ -d "$(pulumi_aws_site)" ]; }

ensure_pulumi_aws() {
  find_pulumi_aws || { ensure_uv && locked pulumi-aws install_pulumi_aws; } ||
    die "pulumi-aws could not be installed for the tests"
}

install_pulumi_aws() {
  local aside started=$SECONDS
  aside="$(pulumi_aws_site).aside"
  find_pulumi_aws && return 0
  say "pulumi-aws: installing it beside .venv, for the tests"
  rm -rf "$aside"
  mkdir -p "$aside"
  pulumi_aws_pin >"$aside/requirements.txt"
  # As for .venv, from uv's cache first.
  copy_pulumi_aws "$aside" --offline >/dev/null 2>&1 || logged pulumi-aws-install copy_pulumi_aws "$aside" || return 1
  mv "$aside" "$(pulumi_aws_site)"
  say "pulumi-aws: installed ($((SECONDS - started)) s)"
}

# What it needs itself is in .venv, since pulumi-command needs the same.
copy_pulumi_aws() {
  local to="$1"
  shift
  "$UV" pip install "$@" --quiet --target "$to" --python "$VENV/bin/python" --no-deps --require-hashes -r "$to/requirements.txt"
}
