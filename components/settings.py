"""The stack file, parsed: every fault found at once, each with its path, before anything is touched.

The only place that reads Pulumi's configuration. The program and the dynamic providers (another process, handed the
same configuration by `configure`) both come through `load`. pulumi is imported where it is used: `lora` does without.
"""

from __future__ import annotations

import ipaddress
import json
import os
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from difflib import SequenceMatcher
from pathlib import Path, PurePosixPath
from typing import Annotated, Any, Literal, Protocol, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    JsonValue,
    ValidationError,
    ValidationInfo,
    model_validator,
)
from pydantic.alias_generators import to_camel

from components.core.adapter_files import is_absent, is_directory
from components.core.errors import UserError, printable
from components.core.naming import venv_python
from components.core.ssh_key import normalise_host_key, normalise_private_key
from components.stack_files import path_here, stack_directory
from components.store_url import StoreUrl, parse_store_url

PROJECT = "lora-pods"
MODEL_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
MODEL_ID_LENGTH = 96
SANDBOX_IMAGE = "localhost/lora-pods-sandbox"
SANDBOX_PYTHON = "/opt/vllm/bin/python"
SECRETS = ("sshPrivateKey", "apiKey", "hfToken", "tlsKey")
KEYS = ("pods", "models", "store", "running", "requireLock", *SECRETS)
FAULTS_SHOWN = 100
LOOPBACK = ("127.0.0.1", "::1", "localhost")
_INNER_PORTS = 10000


def _bearer(value: str) -> str:
    # vLLM compares the header's bytes as latin-1 decoded it: a key with other characters is refused for ever.
    if not value.isascii():
        raise UserError("holds a character that is not ASCII, which an Authorization header cannot carry")
    return _one_line(value)


def _pem_key(value: str) -> str:
    if "-----BEGIN " not in value or "PRIVATE KEY-----" not in value:
        raise UserError(
            "no private key in PEM; store the file's text: `pulumi config set --secret tlsKey < privkey.pem`"
        )
    return value


def _user_errors_as_faults(check: Callable[[str], str]) -> Callable[[str], str]:
    def checked(value: str) -> str:
        try:
            return check(value)
        except UserError as error:
            raise ValueError(str(error)) from None

    return checked


def _one_line(value: str) -> str:
    if not value or any(ord(char) < 32 or ord(char) == 127 for char in value):
        raise UserError("must be a non-empty text of one line")
    if any("\ud800" <= char <= "\udfff" for char in value):  # no file's name and no message can hold it
        raise UserError("holds half of a character (\\ud800 to \\udfff): write the character itself")
    return value


def _host_name(value: str) -> str:
    if not re.fullmatch(r"[A-Za-z0-9._:%-]+", value):
        raise UserError(
            "must be a host name or an IP address, nothing else (the user and the port have their own keys)"
        )
    return value


def _name(value: str) -> str:
    """What resources are called after: pulumi shows their names as they are."""
    if not _one_line(value).isprintable():
        raise UserError(f"{printable(value)} holds control or formatting characters: write it without them")
    return value


def _user_name(value: str) -> str:
    if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_.-]*", value):
        raise UserError("must be a login name")
    return value


def _absolute_path(value: str) -> str:
    if not value.startswith("/") or _one_line(value) != value:
        raise UserError("must be an absolute path on the pod")
    return value


def _host_key(value: str, info: ValidationInfo) -> str:
    if not value and info.data.get("insecure_host_key"):
        return value
    return _user_errors_as_faults(normalise_host_key)(value)


def _cidr(value: str) -> str:
    try:
        return str(ipaddress.IPv4Network(value))
    except ValueError:
        raise UserError(
            "must be an IPv4 network such as 203.0.113.7/32 (one address) or 10.0.0.0/8, without bits beyond its prefix"
        ) from None


def _region(value: str) -> str:
    if not re.fullmatch(r"[a-z]{2,4}(-[a-z]+)+-[0-9]+", value):
        raise UserError("must be a region's name as AWS writes it, such as eu-central-1")
    return value


def _instance_type(value: str) -> str:
    if not re.fullmatch(r"[a-z][a-z0-9-]*\.[a-z0-9-]+", value):
        raise UserError("must be an instance type as AWS writes it, such as g6e.xlarge")
    return value


def _resource_id(prefix: str) -> Callable[[str], str]:
    def checked(value: str) -> str:
        if not re.fullmatch(prefix + r"-[0-9a-f]{8,17}", value):
            raise UserError(f"must be an id as AWS writes it: {prefix}-0123456789abcdef0")
        return value

    return checked


def _version(value: str) -> str:
    if not re.fullmatch(r"[0-9][A-Za-z0-9.+!-]*", value):
        raise UserError("must be a version of vLLM as PyPI has it, in quotes, such as '0.33.0'")
    return value


Line = Annotated[str, AfterValidator(_user_errors_as_faults(_one_line))]
Name = Annotated[str, AfterValidator(_user_errors_as_faults(_name))]
PodPath = Annotated[str, AfterValidator(_user_errors_as_faults(_absolute_path))]
Port = Annotated[int, Field(ge=1, le=65535)]
Cidr = Annotated[str, AfterValidator(_user_errors_as_faults(_cidr))]
Login = Annotated[str, AfterValidator(_user_errors_as_faults(_user_name))]


class _Part(BaseModel):
    model_config = ConfigDict(
        extra="forbid", strict=True, frozen=True, alias_generator=to_camel, hide_input_in_errors=True
    )


class VllmInstall(_Part):
    """`engine.vllm`: the vLLM that is installed on the pod, once, into a venv of its own."""

    version: Annotated[str, AfterValidator(_user_errors_as_faults(_version))]


class Tls(_Part):
    """`engine.tls`: the certificate that a proxy shows. The key to it is the stack's secret `tlsKey`."""

    certificate: Line


class Engine(_Part):
    """`engine`: how the pod's vLLM runs. What is not given is computed, or left to vLLM."""

    port: Port = 8000
    listen: Annotated[str, AfterValidator(_user_errors_as_faults(_host_name))] | None = None
    tls: Tls | None = None
    max_model_len: Annotated[int, Field(ge=1)] | None = None
    gpu_memory_utilization: Annotated[float, Field(gt=0, le=1)] | None = None
    gpu_memory_gi_b: Annotated[float, Field(gt=0, le=1024)] | None = Field(default=None, alias="gpuMemoryGiB")
    """What each GPU has, where the kind of pod does not tell."""
    dtype: Line | None = None
    max_loras: Annotated[int, Field(ge=1)] | None = None
    max_lora_rank: Annotated[int, Field(ge=1)] | None = None
    max_cpu_loras: Annotated[int, Field(ge=1)] | None = None
    args: Mapping[str, JsonValue] = Field(default_factory=dict)
    env: Mapping[str, str] = Field(default_factory=dict)
    python: PodPath | None = None
    vllm: VllmInstall | None = None
    device: Literal["gpu", "cpu"] | None = None
    disk_gi_b: Annotated[float, Field(gt=0)] | None = Field(default=None, alias="diskGiB")
    probe: bool = True
    ready_timeout_seconds: Annotated[int, Field(ge=10, le=86400)] = 1800

    @model_validator(mode="after")
    def _one_vllm(self) -> Engine:
        if self.python and self.vllm:
            raise ValueError("give `python` (an interpreter that has vLLM) or `vllm` (to install one), not both")
        return self


class Host(_Part):
    """`host`: a machine that is already there, with SSH and systemd."""

    address: Annotated[str, AfterValidator(_user_errors_as_faults(_host_name))]
    port: Port = 22
    user: Login = "root"
    insecure_host_key: bool = False
    """Whether any host key is accepted, so that anybody in between may be taken for the machine."""
    host_key: Annotated[str, AfterValidator(_host_key)]
    """Empty where any is accepted."""

    @model_validator(mode="before")
    @classmethod
    def _any_host_key(cls, given: Any) -> Any:
        if isinstance(given, Mapping) and given.get("insecureHostKey") is True:
            if given.get("hostKey"):
                raise ValueError("give `hostKey`, or `insecureHostKey: true`, not both")
            return {**given, "hostKey": ""}
        return given


class Sandbox(_Part):
    """`sandbox`: a container on this machine, with systemd and sshd inside."""

    image: Line = SANDBOX_IMAGE
    volumes: Mapping[PodPath, Line] = Field(default_factory=dict)
    shm_mi_b: Annotated[int, Field(ge=1)] = Field(default=1024, alias="shmMiB")


class Ec2(_Part):
    """`ec2`: an instance of AWS that is made for its base, and ends with it. No port is open but to whom is named."""

    instance_type: Annotated[str, AfterValidator(_user_errors_as_faults(_instance_type))]
    region: Annotated[str, AfterValidator(_user_errors_as_faults(_region))]
    ssh_cidr: Cidr
    """Who may log in: the network that `pulumi up` runs in."""
    volume_gi_b: Annotated[int, Field(ge=8, le=65536)] = Field(alias="volumeGiB")
    """The root disk, which holds the system, the base model, vLLM and the adapters."""
    engine_cidr: Cidr | None = None
    """Who may ask the engine; nobody but the pod itself, if not given."""
    subnet_id: Annotated[str, AfterValidator(_user_errors_as_faults(_resource_id("subnet")))] | None = None
    ami: Annotated[str, AfterValidator(_user_errors_as_faults(_resource_id("ami")))] | None = None
    user: Login = "ubuntu"
    """The AMI's own user, who may use sudo without a password."""
    spot: bool = False
    public_ip: bool = True
    """Whether it is reached at an Elastic IP; else at its private address, from within its network."""
    profile: Name | None = None

    @model_validator(mode="after")
    def _private_in_a_subnet(self) -> Ec2:
        if not self.public_ip and self.subnet_id is None:
            raise ValueError(
                "publicIp: false needs a `subnetId` that this machine reaches, and that leads to the internet by a NAT "
                "gateway"
            )
        return self


class Pod(_Part):
    """One of `pods`: a base model, the machine that serves it, and how."""

    base: Name
    base_config: Line | None = None
    host: Host | None = None
    sandbox: Sandbox | None = None
    ec2: Ec2 | None = None
    engine: Engine = Engine()

    @model_validator(mode="after")
    def _one_kind(self) -> Pod:
        if sum(kind is not None for kind in (self.host, self.sandbox, self.ec2)) != 1:
            raise ValueError(
                "give exactly one kind of pod: `host: {address: …, hostKey: …}`, `sandbox: {}` or `ec2: {…}`"
            )
        if not self.sandbox and not (self.engine.python or self.engine.vllm):
            raise ValueError(
                f"say which vLLM the {'host' if self.host else 'instance'} runs: "
                "`engine: {vllm: {version: …}}` installs one, "
                "`engine: {python: /…/bin/python}` names an interpreter that has it"
            )
        return self

    @property
    def python(self) -> str:
        """The interpreter on the pod that has vLLM."""
        if self.engine.vllm:
            return venv_python(self.engine.vllm.version)
        return self.engine.python or SANDBOX_PYTHON

    @property
    def vllm_version(self) -> str | None:
        """The vLLM that is pinned; None where an interpreter has one that nobody here knows."""
        return self.engine.vllm.version if self.engine.vllm else None

    @property
    def device(self) -> Literal["gpu", "cpu"]:
        return self.engine.device or ("cpu" if self.sandbox else "gpu")

    @property
    def listen(self) -> str:
        """The address on the pod that clients come to. A sandbox is reached through its published port alone."""
        return self.engine.listen or ("0.0.0.0" if self.sandbox else "127.0.0.1")

    @property
    def proxied(self) -> bool:
        """Whether a proxy on the pod stands between its clients and vLLM, since others than the pod can reach it.

        A sandbox's port is published on this machine's loopback, whatever its engine listens at inside.
        """
        return not self.sandbox and self.listen not in LOOPBACK

    @property
    def vllm_listen(self) -> str:
        return "127.0.0.1" if self.proxied else self.listen

    @property
    def vllm_port(self) -> int:
        """vLLM's own port: beside a proxy it needs another one, at which nobody but the pod itself can ask."""
        port = self.engine.port
        if not self.proxied:
            return port
        return port + _INNER_PORTS if port + _INNER_PORTS <= 65535 else port - _INNER_PORTS

    @property
    def ports(self) -> tuple[int, ...]:
        """All that it takes of its machine's ports."""
        return tuple(dict.fromkeys((self.engine.port, self.vllm_port)))

    @property
    def scheme(self) -> str:
        return "https" if self.proxied and self.engine.tls else "http"


class Model(_Part):
    """One of `models`: what a request's `model` field names."""

    id: str
    base: Line
    adapter: Line | None = None
    may_equal_base: bool = False


class Settings(BaseModel):
    """The whole stack file. `directory` is the one that relative paths start from.

    `places` says where each model id and each base stands in the file, as `models[2]`.
    """

    model_config = ConfigDict(frozen=True, hide_input_in_errors=True)

    pods: tuple[Pod, ...]
    models: tuple[Model, ...]
    store: StoreUrl | None
    running: bool
    """Whether the machines that are ours (sandboxes and EC2 instances) are switched on."""
    require_lock: bool
    ssh_private_key: str | None
    api_key: str | None
    hf_token: str | None
    tls_key: str | None
    directory: Path
    places: Mapping[str, str]

    def adapter_directory(self, model: Model) -> Path:
        return self.resolve(model.adapter or "")

    def base_config(self, pod: Pod) -> Path | None:
        """The base's config.json on this machine, or its directory: `baseConfig`, or what a sandbox's volume holds."""
        if pod.base_config:
            return self.resolve(pod.base_config)
        for mounted, source in (pod.sandbox.volumes if pod.sandbox else {}).items():
            inside = PurePosixPath(pod.base)
            if inside.is_relative_to(mounted):
                path = self.resolve(source) / inside.relative_to(mounted) / "config.json"
                return None if is_absent(path) or is_directory(path) else path
        return None

    def resolve(self, path: str) -> Path:
        """A path of the stack file as one of this machine."""
        return path_here(self.directory, path)


class RawConfig(Protocol):
    """What `pulumi.Config` and the dynamic providers' configuration have in common."""

    def get(self, key: str) -> Any: ...


class SettingsError(UserError):
    """Every fault of a stack, one a line, each beginning with its path, in the file's order; then the warnings."""

    def __init__(self, faults: Sequence[str], warnings: Sequence[str] = ()) -> None:
        self.faults = tuple(sorted(faults, key=_place_in_file))
        count = f"{len(faults)} faults" if len(faults) > 1 else "1 fault"
        told = [*self.faults, *(f"warning: {warning}" for warning in warnings)]
        more = [f"and {len(told) - FAULTS_SHOWN} more"] if len(told) > FAULTS_SHOWN else []
        lines = [f"the stack has {count}; nothing was touched:", *told[:FAULTS_SHOWN], *more]
        super().__init__("\n  ".join(lines))


def _place_in_file(fault: str) -> tuple[int, int]:
    found = re.match(r"(pods|models)\[(\d+)", fault)
    return (("pods", "models").index(found[1]), int(found[2])) if found else (2, 0)


def program_config() -> RawConfig:
    """The running program's configuration."""
    import pulumi

    return pulumi.Config(PROJECT)


def load(config: RawConfig) -> Settings:
    """Parse and cross-check the stack's configuration. Raises SettingsError with all faults."""
    settings, faults = parse(config)
    if faults:
        raise SettingsError(faults)
    return settings


def parse(config: RawConfig) -> tuple[Settings, list[str]]:
    """Like `load`, with the faults returned, so that a caller can add what it finds before it raises them."""
    settings, faults = parse_models(config)
    require_lock = _boolean(config.get("requireLock"), "requireLock", False, faults)
    private_key = _secret(config.get("sshPrivateKey"), "sshPrivateKey", normalise_private_key, faults)
    api_key = _secret(config.get("apiKey"), "apiKey", _bearer, faults)
    hf_token = _secret(config.get("hfToken"), "hfToken", _bearer, faults)
    tls_key = _secret(config.get("tlsKey"), "tlsKey", _pem_key, faults)
    faults += _access_faults(settings, bool(config.get("sshPrivateKey")), bool(config.get("apiKey")))
    faults += _tls_faults(settings, bool(config.get("tlsKey")))
    found = {"ssh_private_key": private_key, "api_key": api_key, "hf_token": hf_token, "tls_key": tls_key}
    return settings.model_copy(update={"require_lock": require_lock, **found}), faults


def parse_models(config: RawConfig) -> tuple[Settings, list[str]]:
    """Pods, models, store and `running`, with their faults: all that can be said without a secret or a machine.

    Where the configuration is a mapping, also the keys in it that nobody would read.
    """
    faults = list(unknown_key_faults(config)) if isinstance(config, Mapping) else []
    raw_pods = _decoded(config.get("pods"))
    pods = list(_items(raw_pods, "pods", Pod, faults))
    models = list(_items(_decoded(config.get("models")), "models", Model, faults))
    if not pods and not faults:
        faults.append("pods: at least one is needed (a base model and the machine that serves it)")
    faults += _pod_faults(pods)
    faults += _model_faults(models, _bases(raw_pods))
    settings = Settings(
        pods=tuple(pod for _, pod in pods),
        models=tuple(sorted((model for _, model in models), key=lambda model: model.id)),
        store=_store(config.get("store"), faults),
        running=_boolean(config.get("running"), "running", True, faults),
        require_lock=False,
        ssh_private_key=None,
        api_key=None,
        hf_token=None,
        tls_key=None,
        directory=stack_directory(),
        places={
            **{pod.base: f"pods[{index}]" for index, pod in pods},
            **{model.id: f"models[{index}]" for index, model in models},
        },
    )
    return settings, faults


def secrecy_faults(config: RawConfig) -> list[str]:
    """What is encrypted in the stack file and should not be, and the reverse. Only the program can tell."""
    import pulumi

    faults = []
    for key in ("pods", "models", "store"):
        if pulumi.runtime.is_config_secret(f"{PROJECT}:{key}"):
            faults.append(
                f"{key}: holds a `secure:` value, which would make all of it unreadable in previews; secrets have "
                f"their own keys: {', '.join(SECRETS)}"
            )
    faults += unknown_key_faults(key.removeprefix(f"{PROJECT}:") for key in pulumi.runtime.config.get_config_env())
    for key in SECRETS:
        encrypted = pulumi.runtime.is_config_secret(f"{PROJECT}:{key}")
        if encrypted and not config.get(key):
            faults.append(f"{key}: is empty; set it, or do without: `pulumi config rm {key}`")
        if config.get(key) and not encrypted:
            faults.append(
                f"{key}: stands in the stack file for everyone to read; encrypt it: "
                f"`pulumi config set --secret {key}`, and consider what stood there as known"
            )
    return faults


def unknown_key_faults(keys: Iterable[str]) -> Iterator[str]:
    """Keys of ours that nobody reads: what stands under them would count as not said. Ours are without `lora-pods:`."""
    for key in sorted(set(keys) - set(KEYS)):
        if ":" not in key:
            yield f"{printable(key)}: unknown key; known here: {', '.join(KEYS)}"
        elif _is_meant_for_us(key):
            ours = f"{PROJECT}:{printable(key.rpartition(':')[2])}"
            yield f"{printable(key)}: is read by nobody; our keys begin with {PROJECT}: (did you mean {ours}?)"


def _is_meant_for_us(key: str) -> bool:
    """Whether a key of another namespace is a slip for one of ours, rather than a provider's."""
    namespace, _, name = key.partition(":")
    return _alike(namespace, PROJECT) or any(_alike(name, known) for known in ("pods", "models"))


def _alike(one: str, other: str) -> bool:
    return SequenceMatcher(None, one.strip().casefold(), other.casefold(), autojunk=False).ratio() >= 0.8


Item = TypeVar("Item", bound=_Part)


def _decoded(raw: object) -> object:
    """A nested value, which Pulumi hands over as JSON text; text that is none stays as it is."""
    if not isinstance(raw, str):
        return raw
    try:
        return json.loads(raw)
    except ValueError:
        return raw


def _items(raw: object, key: str, kind: type[Item], faults: list[str]) -> Iterator[tuple[int, Item]]:
    """Parse each entry on its own, so that one entry's fault hides no other's."""
    if not isinstance(raw, list):
        if raw is not None:
            faults.append(f"{key}: must be a list of mappings")
        return
    for index, entry in enumerate(raw):
        if not isinstance(entry, dict):
            faults.append(f"{key}[{index}]: must be a mapping")
            continue
        try:
            yield index, kind.model_validate(entry)
        except ValidationError as error:
            faults += [f"{key}[{index}]{fault}" for fault in _described(error, kind)]


def _described(error: ValidationError, kind: type[BaseModel]) -> Iterator[str]:
    seen: set[str] = set()
    for detail in error.errors(include_url=False, include_context=False):
        path = list(detail["loc"])
        where = "".join(f"[{part}]" if isinstance(part, int) else f".{printable(part)}" for part in path)
        if where in seen:
            continue
        seen.add(where)
        if detail["type"] == "extra_forbidden":
            known = sorted(_keys(kind, path[:-1]))
            yield f"{where}: unknown key; {_meant(str(path[-1]), known)}known here: {', '.join(known)}"
        elif detail["type"] == "missing":
            yield f"{where}: is missing"
        else:
            # A value under `env` may be a secret, whatever it should not be.
            found = "" if "env" in path and detail["input"] is not None else detail["input"]
            yield f"{where}: {_as_people_say(detail['type'], detail['msg'], found)}"


def _meant(key: str, known: Sequence[str]) -> str:
    # Here, since it is loaded for a fault alone.
    from difflib import get_close_matches

    if key in SECRETS:
        return f"it is a secret of the stack: `pulumi config set --secret {key}`; "
    spelled = {name.lower(): name for name in known}
    close = get_close_matches(key.replace("-", "").replace("_", "").lower(), spelled, 1, 0.75)
    if close:
        return f"did you mean {spelled[close[0]]}? "
    return "vLLM's own flags stand under args; " if "args" in known else ""


# By pydantic's names of what is wrong (https://docs.pydantic.dev/latest/errors/validation_errors/).
_MUST_BE = {
    **dict.fromkeys(("dict_type", "model_type", "model_attributes_type"), "must be a mapping of keys to values"),
    **dict.fromkeys(("list_type", "tuple_type"), "must be a list"),
    "string_type": "must be a text (YAML takes what is not in quotes for a number, or true or false, where it can)",
    **dict.fromkeys(("int_type", "int_parsing", "int_from_float", "int_parsing_size"), "must be a whole number"),
    **dict.fromkeys(("float_type", "float_parsing"), "must be a number"),
    **dict.fromkeys(("bool_type", "bool_parsing"), "must be true or false"),
}


def _as_people_say(kind: str, message: str, found: object) -> str:
    if kind == "value_error":  # our own words
        return message.removeprefix("Value error, ")
    if found is None:
        return "is empty: give it a value"
    wanted = _MUST_BE.get(kind) or message.replace("Input should be", "must be")
    # A number is shown as it would stand in JSON: "3" is another thing than 3. Of all else only the kind: it may be a
    # secret in the wrong place.
    if isinstance(found, str) and not re.fullmatch(r"[-+]?[0-9][0-9._eE+-]{0,30}", found):
        return f"{wanted}; it is a text" if found else wanted
    if isinstance(found, bool | int | float | str):
        return f"{wanted}; it is {printable(json.dumps(found), 60)}"
    return f"{wanted}; it is a {'list' if isinstance(found, list) else 'mapping'}"


def _keys(kind: type[BaseModel], path: Sequence[int | str]) -> Iterator[str]:
    for step in path:
        field = next(f for name, f in kind.model_fields.items() if (f.alias or name) == step)
        kind = next(
            part
            for part in (field.annotation, *getattr(field.annotation, "__args__", ()))
            if isinstance(part, type) and issubclass(part, BaseModel)
        )
    return (field.alias or name for name, field in kind.model_fields.items())


def _boolean(raw: object, key: str, default: bool, faults: list[str]) -> bool:
    value = _decoded(raw)
    if value in (None, ""):
        return default
    if not isinstance(value, bool):
        faults.append(f"{key}: must be true or false")
        return default
    return value


def _store(raw: object, faults: list[str]) -> StoreUrl | None:
    if raw is None or raw == "":
        return None
    try:
        return parse_store_url(str(raw))
    except UserError as error:
        faults.append(f"store: {error}")
        return None


def _secret(raw: object, key: str, check: Callable[[str], str], faults: list[str]) -> str | None:
    if raw is None or raw == "":
        return None
    try:
        return check(str(raw))
    except UserError as error:
        faults.append(f"{key}: {error}")
        return None


def _pod_faults(pods: Sequence[tuple[int, Pod]]) -> Iterator[str]:
    bases: dict[str, int] = {}
    places: dict[tuple[str, int], int] = {}
    for index, pod in pods:
        where = f"pods[{index}]"
        if pod.base in bases:
            yield (
                f"{where}.base: {printable(pod.base)} has a pod already (pods[{bases[pod.base]}]); one pod serves "
                "every model of a base"
            )
        bases.setdefault(pod.base, index)
        if not pod.host:
            continue
        for port in pod.ports:
            place = (pod.host.address, port)
            if place in places:
                own = "" if port == pod.engine.port else f", and vLLM's own beside it ({port})"
                yield (
                    f"{where}.engine.port: {pod.engine.port}{own} on {pod.host.address} is taken by "
                    f"pods[{places[place]}]; give each engine of a machine its own port"
                )
                break
        for port in pod.ports:
            places.setdefault((pod.host.address, port), index)
    sandboxes = [index for index, pod in pods if pod.sandbox]
    for index in sandboxes[1:]:
        yield f"pods[{index}].sandbox: a stack has one sandbox, named after it, and pods[{sandboxes[0]}] is it"


def _access_faults(settings: Settings, has_private_key: bool, has_api_key: bool) -> Iterator[str]:
    """What keeps this machine from a pod, or lets anybody in."""
    for pod in settings.pods:
        where = settings.places[pod.base]
        if not pod.sandbox and not has_private_key:
            yield (
                f"{where}.{'host' if pod.host else 'ec2'}: needs the key that opens it: "
                "`pulumi config set --secret sshPrivateKey < ~/.ssh/id_ed25519`"
            )
        if pod.ec2 and pod.ec2.engine_cidr and pod.listen in LOOPBACK:
            yield (
                f"{where}.ec2.engineCidr: opens a port at which nothing listens; let the engine listen there as well: "
                "`engine: {listen: 0.0.0.0}`"
            )
        if not pod.sandbox and pod.listen not in LOOPBACK and not has_api_key:
            yield (
                f"{where}.engine.listen: {pod.listen} lets in whoever reaches the machine; set a key for clients "
                "first: `pulumi config set --secret apiKey …`"
            )
    agent = os.environ.get("SSH_AUTH_SOCK")
    if settings.pods and agent and not os.path.exists(agent):  # noqa: PTH110 -- Path's raises in a closed folder
        yield (
            "SSH_AUTH_SOCK names a socket that is not there, or not for this user, and the command plugin fails on "
            "that even with a key at hand: unset it in this shell"
        )


def _tls_faults(settings: Settings, has_tls_key: bool) -> Iterator[str]:
    for pod in settings.pods:
        where = settings.places[pod.base]
        if pod.engine.tls and not pod.proxied:
            yield (
                f"{where}.engine.tls: is for an engine that other machines reach; "
                + ("a sandbox's port is this machine's own" if pod.sandbox else "give `listen`, too, or leave it out")
            )
        elif pod.engine.tls and not has_tls_key:
            yield (
                f"{where}.engine.tls: needs the key of its certificate: "
                "`pulumi config set --secret tlsKey < privkey.pem`"
            )


def _bases(raw: object) -> set[str]:
    """The bases that pods are written for, also by entries with faults: those are told once, not for each model."""
    if not isinstance(raw, list):
        return set()
    return {str(entry["base"]) for entry in raw if isinstance(entry, dict) and entry.get("base")}


def _model_faults(models: Sequence[tuple[int, Model]], bases: set[str]) -> Iterator[str]:
    counts = Counter(model.id for _, model in models)
    first = {model.id: index for index, model in reversed(models)}
    for index, model in models:
        where = f"models[{index}]"
        if not MODEL_ID.fullmatch(model.id) or len(model.id) > MODEL_ID_LENGTH:
            yield (
                f"{where}.id: {printable(model.id)!r} cannot be used; an id has 1 to {MODEL_ID_LENGTH} letters, "
                "digits, dots, dashes and underscores, and begins with a letter or a digit"
            )
        if counts[model.id] > 1 and index != first[model.id]:
            yield f"{where}.id: {printable(model.id)} is also models[{first[model.id]}]; each id names one model"
        if model.id in bases:
            yield f"{where}.id: {printable(model.id)} is the name a base is served under; choose another id"
        if bases and model.base not in bases:
            yield (
                f"{where}.base: no pod serves {printable(model.base)}; pods serve "
                f"{', '.join(sorted(map(printable, bases)))}"
            )
