# Sourced by build steps that install Python packages: the certificates and the index settings of the
# machine that builds (neither stays in the image), and uv in /tmp/uv.
# shellcheck shell=sh
if [ -s /run/secrets/ca ]; then
    export SSL_CERT_FILE=/run/secrets/ca PIP_CERT=/run/secrets/ca
fi
if [ -s /run/secrets/env ]; then
    # shellcheck disable=SC1091
    . /run/secrets/env
fi
export UV_CACHE_DIR=/var/cache/uv PIP_CACHE_DIR=/var/cache/uv/pip UV_LINK_MODE=copy PIP_DISABLE_PIP_VERSION_CHECK=1

python3 -m venv /tmp/uv
/tmp/uv/bin/pip install -q --require-hashes -r /context/uv.txt
