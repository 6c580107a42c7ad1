"""`store`: the URL of an S3 bucket, as Pulumi writes the one of its own state: `s3://bucket/prefix?region=…`."""

from __future__ import annotations

import ipaddress
import re
from dataclasses import dataclass
from urllib.parse import parse_qsl, urlsplit

from components.core.errors import UserError, printable

OPTIONS = ("region", "endpoint", "profile")
# https://docs.aws.amazon.com/AmazonS3/latest/userguide/bucketnamingrules.html
_BUCKET = re.compile(r"[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]")
# What S3 calls safe in an object's key (…/userguide/object-keys.html).
_PREFIX = re.compile(r"[A-Za-z0-9!_.*'()/-]*")
KEY_BYTES = 1024
"""Of an object's whole key (same page)."""
# What botocore (1.44) takes: utils.is_valid_endpoint_url.
_HOST = re.compile(r"((?!-)[A-Za-z0-9-]{1,63}(?<!-)\.)*(?!-)[A-Za-z0-9-]{1,63}(?<!-)\.?")


@dataclass(frozen=True)
class StoreUrl:
    """Where bundles are kept. What is None is as boto3 finds it (environment, ~/.aws/config, the machine's role)."""

    bucket: str
    prefix: str
    """Without a slash at either end; empty for the bucket itself."""
    region: str | None = None
    endpoint: str | None = None
    profile: str | None = None

    @property
    def place(self) -> str:
        """The same for everyone who means the same objects, whatever their profile."""
        at = f" at {self.endpoint}" if self.endpoint else ""
        return "/".join(filter(None, ("s3:/", self.bucket, self.prefix))) + at

    def name(self, digest: str) -> str:
        """The bundle's object as `aws s3` and messages name it."""
        return f"s3://{self.bucket}/{self.key(digest)}"

    def key(self, digest: str) -> str:
        """The object of the bundle `sha256:<hex>`."""
        return self.folder + f"{digest.removeprefix('sha256:')}.tar"

    @property
    def folder(self) -> str:
        """What every bundle's key begins with."""
        return "/".join(filter(None, (self.prefix, "sha256/")))


def parse_store_url(text: str) -> StoreUrl:
    """Raises UserError for what is no `s3://bucket[/prefix][?region=…&endpoint=…&profile=…]`."""
    form = f"must be s3://BUCKET/PREFIX, and may end with ?{'&'.join(f'{name}=…' for name in OPTIONS)}"
    try:
        split = urlsplit(text)
        options = parse_qsl(split.query, keep_blank_values=True, strict_parsing=bool(split.query))
    except ValueError:
        raise UserError(form) from None
    if split.scheme != "s3" or split.fragment or "@" in split.netloc or not text.isprintable():
        raise UserError(form)
    if not _BUCKET.fullmatch(split.netloc) or ".." in split.netloc:
        raise UserError(
            f"{printable(split.netloc) or 'nothing'!r} is no bucket's name: 3 to 63 small letters, digits, dots and "
            "dashes"
        )
    prefix = split.path.strip("/")
    if not _PREFIX.fullmatch(prefix) or any(part in ("", ".", "..") for part in prefix.split("/") if prefix):
        raise UserError(
            f"{printable(prefix)!r} cannot be a prefix here: letters, digits and !-_.*'() between single slashes"
        )
    longest = KEY_BYTES - len(StoreUrl(split.netloc, "x").key("0" * 64)) + 1
    if len(prefix) > longest:
        raise UserError(
            f"its prefix has {len(prefix)} characters, and {longest} are the most with which S3 takes the bundles' keys"
        )
    given = dict(options)
    for name, _ in options:
        if name not in OPTIONS:
            raise UserError(f"{printable(name)!r} is no option of it; known are {', '.join(OPTIONS)}")
    if not all(map(str.isprintable, given.values())):
        raise UserError(form)
    if len(given) < len(options) or "" in given.values():
        raise UserError(f"an option is given twice, or empty; {form}")
    if "endpoint" in given:
        given["endpoint"] = _endpoint(given["endpoint"])
    return StoreUrl(split.netloc, prefix, given.get("region"), given.get("endpoint"), given.get("profile"))


def _endpoint(text: str) -> str:
    try:
        split = urlsplit(text)
        sound = split.port is None or split.port > 0
    except ValueError:
        sound = False
    if not sound or split.scheme not in ("http", "https") or not split.hostname:
        raise UserError("its endpoint must be the service's URL, such as https://minio.example:9000")
    if "@" in split.netloc:
        raise UserError(
            "its endpoint holds credentials, for everyone to read; take them out, consider them known, and give the "
            "new ones to boto3 (environment or ~/.aws/credentials)"
        )
    if split.query or split.fragment or split.path.strip("/"):
        raise UserError("its endpoint must end after the host and the port")
    if not _is_host(split.hostname):
        raise UserError(
            f"its endpoint's host {printable(split.hostname)!r} is none: letters, digits, dots and dashes, or an IP "
            "address"
        )
    return f"{split.scheme}://{split.netloc}"


def _is_host(text: str) -> bool:
    if ":" not in text:
        return len(text) <= 255 and bool(_HOST.fullmatch(text))
    try:
        return bool(ipaddress.IPv6Address(text))
    except ValueError:
        return False
