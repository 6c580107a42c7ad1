"""A stack of EC2 pods where pulumi-aws is not installed, as in .venv on purpose."""

from __future__ import annotations

import pytest

from tests.engine.conftest import Key
from tests.support.ec2 import EC2
from tests.support.stacks import Checkout

pytestmark = pytest.mark.pod


def test_one_sentence_and_no_traceback_say_what_to_do(checkout: Checkout, key: Key) -> None:
    stack = checkout.stack("acme")
    pod = {"base": "org/base", "ec2": EC2, "engine": {"vllm": {"version": "0.33.0"}}}
    stack.configure([pod], [], sshPrivateKey=key.private)
    run = stack.up(fails=True)
    assert "a pod is of the kind `ec2`, and pulumi-aws is not installed: run `./dev setup --with aws`" in run.output
    assert "Traceback" not in run.output
    assert [name for name in run.changes if not name.startswith("Deployment")] == []
