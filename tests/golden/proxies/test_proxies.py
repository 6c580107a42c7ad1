"""What stands before a public engine, to the byte: its unit and nginx's configuration."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from components.core.errors import UserError
from components.render import render_proxy

CASES: dict[str, dict[str, Any]] = {
    "plain": {"listen": "0.0.0.0", "port": 8000, "inner_port": 18000},
    "tls": {"listen": "::", "port": 443, "inner_port": 10443, "tls_key": "0123456789abcdef", "on_ec2": True},
}


@pytest.mark.parametrize("case", CASES)
def test_proxy(case: str, update_golden: bool) -> None:
    found = render_proxy("org/base 100%", key="acme-org-base-01234567", **CASES[case])
    for text, suffix in ((found.unit, "service"), (found.config, "conf")):
        expected = Path(__file__).parent / f"{case}.{suffix}"
        if update_golden:
            expected.write_text(text, encoding="utf-8")
        assert text == expected.read_text(encoding="utf-8")


@pytest.mark.parametrize("listen", ["fe80::1%eth0", "10.0.0.1;", "a b", "x{"])
def test_an_address_that_nginx_could_not_be_told(listen: str) -> None:
    with pytest.raises(UserError, match="cannot be given to nginx"):
        render_proxy("org/base", key="k", listen=listen, port=8000, inner_port=18000)
