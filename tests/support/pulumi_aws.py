"""pulumi-aws for tests of `ec2` pods. It is not in .venv: see bootstrap/aws.sh."""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path

import pytest

SITE = "LORA_PODS_PULUMI_AWS_SITE"


def need_pulumi_aws() -> None:
    """Make `pulumi_aws` importable, or skip the test or the module that calls this."""
    if importlib.util.find_spec("pulumi_aws") is not None:
        return
    site = os.environ.get(SITE, "")
    if not (Path(site) / "pulumi_aws").is_dir():
        pytest.skip(
            'pulumi-aws is not here: run `./dev test --fast PATH`, which installs it; after that `eval "$(./dev env)"` '
            "names it to pytest",
            allow_module_level=True,
        )
    # Last: nothing there may come before what .venv holds.
    sys.path.append(site)
