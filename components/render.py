"""Plans into the text of systemd units. The only module that uses Jinja2."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from components.core.engine_plan import EnginePlan
from components.core.errors import UserError, printable
from components.core.naming import (
    POD_ROOT,
    proxy_path,
    proxy_unit_name,
    secrets_path,
    state_directory,
    tls_key_path,
    url_host,
)
from components.core.unit_text import check_line_length, environment_word, exec_program, exec_word, plain_text

TEMPLATES = Path(__file__).resolve().parent.parent / "templates"

NGINX = "/usr/sbin/nginx"
MAX_BODY_MIB = 32
REQUESTS_PER_SECOND = 100
CONNECTIONS = 1024
"""What one address may have at once; an agency's own server is one address to us."""

OPENAI_ROUTES = (
    ("GET", "/v1/models"),
    ("POST", "/v1/chat/completions"),
    ("POST", "/v1/completions"),
    ("POST", "/v1/responses"),
    ("POST", "/v1/embeddings"),
    ("POST", "/v1/audio/transcriptions"),
    ("POST", "/v1/audio/translations"),
)
"""What a proxy passes on: the routes of OpenAI's API that answer a request for a model. vLLM asks for the key on each.

Not those that fetch or cancel an answer by its id, which might be another client's; not /health, which wants no key.
"""

_ADDRESS = re.compile(r"[A-Za-z0-9._:-]+")
_HOMES = re.compile(r"(?<![\w.-])/(home|root|run/user)/")
_KEY = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


def render_unit(plan: EnginePlan, *, key: str, on_ec2: bool = False) -> str:
    """Return the whole unit file of the engine called `key` (`naming.engine_key`), ending in a newline.

    The same plan and key give the same text. Raises UserError for what systemd cannot pass on to vLLM exactly as
    planned (see `unit_text`) and for a command line longer than systemd takes.
    """
    if not _KEY.fullmatch(key):
        raise UserError(f"the engine's name {printable(key)!r} cannot name a systemd unit; use a simpler stack name")
    state = f"/var/lib/{state_directory(key)}"
    environment = {**plan.environment, "HOME": state, "HF_HOME": f"{state}/huggingface"}
    program, *arguments = plan.argv
    command = " \\\n    ".join([exec_program(program), *_lines(arguments)])
    check_line_length(f"ExecStart={command}", f"the command line of the engine for {printable(plan.base)!r}")
    template = _templates().get_template("engine.service.j2")
    return template.render(
        base=plain_text(plan.base),
        blobs=sorted({root for root in plan.served.values() if root and root.startswith(f"{POD_ROOT}/blobs/")}),
        command=command,
        gpu=plan.gpu,
        on_ec2=on_ec2,
        environment=[environment_word(name, value) for name, value in sorted(environment.items())],
        protect_home="read-only" if _reads_homes(plan) else "yes",
        secrets_path=secrets_path(key),
        state_directory=state_directory(key),
        stop_seconds=plan.stop_seconds,
    )


@dataclass(frozen=True)
class ProxyTexts:
    """A proxy as it lies on a pod: its unit and nginx's configuration."""

    unit: str
    config: str


def render_proxy(
    base: str,
    *,
    key: str,
    listen: str,
    port: int,
    inner_port: int,
    tls_key: str | None = None,
    on_ec2: bool = False,
) -> ProxyTexts:
    """Return what stands at `listen`:`port` before the engine called `key`, which listens at 127.0.0.1:`inner_port`.

    `tls_key` is the name of its certificate's public key (`certificate.Tls`), None for plain HTTP. Raises UserError for
    an address that nginx could not be told.
    """
    if not _ADDRESS.fullmatch(listen):
        raise UserError(
            f"listen: {printable(listen)} cannot be given to nginx; name an address of the machine, or 0.0.0.0"
        )
    unit = proxy_unit_name(key)
    runtime = unit.removesuffix(".service")
    shared = {"on_ec2": on_ec2, "unit": unit, "runtime": f"/run/{runtime}"}
    return ProxyTexts(
        _templates()
        .get_template("proxy.service.j2")
        .render(
            **shared,
            base=plain_text(base),
            nginx=NGINX,
            config_path=proxy_path(key, ".conf"),
            runtime_directory=runtime,
            tls_key_path=tls_key_path(key, tls_key) if tls_key else None,
            privileged_port=port < 1024,
        ),
        _templates()
        .get_template("proxy.conf.j2")
        .render(
            **shared,
            routes=OPENAI_ROUTES,
            address=f"{url_host(listen)}:{port}",
            dual=listen == "::",
            inner_port=inner_port,
            certificate_path=proxy_path(key, ".crt") if tls_key else None,
            max_body_mib=MAX_BODY_MIB,
            requests_per_second=REQUESTS_PER_SECOND,
            connections=CONNECTIONS,
        ),
    )


def _lines(arguments: Sequence[str]) -> list[str]:
    """Put a flag and its value on one line; of several values, each on a line of its own."""
    groups: list[list[str]] = []
    for word in arguments:
        if word.startswith("-") or not groups:
            groups.append([])
        groups[-1].append(exec_word(word))
    return [line for group in groups for line in ([" ".join(group)] if len(group) <= 2 else group)]


def _reads_homes(plan: EnginePlan) -> bool:
    """Whether anything the engine is told lies where ProtectHome=yes would hide it."""
    return any(_HOMES.search(text) for text in (*plan.argv, *plan.environment.values()))


def _templates() -> Environment:
    return Environment(
        loader=FileSystemLoader(TEMPLATES),
        undefined=StrictUndefined,
        autoescape=False,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
