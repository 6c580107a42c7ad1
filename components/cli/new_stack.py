"""`lora new-stack CLIENT`: the stack file of another client, from a short skeleton or like one that is there."""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from components.core.adapter_files import shown_path
from components.core.errors import UserError, os_reason, printable
from components.stack_files import stack_config, stack_directory

PROJECT = "lora-pods"
# The demo's, and the one that explains every key: `up` in GitHub's workflow passes over both.
TAKEN = ("sandbox", "example")
# Of one stack alone: Pulumi adds those of the new one by itself. pulumi 3.274, sdk/go/common/workspace/project.go
ENCRYPTION = ("secretsprovider", "encryptedkey", "encryptionsalt")
# The settings' own, which may stand there unencrypted by mistake. Importing them would take longer than all the rest.
SECRETS = ("sshPrivateKey", "apiKey", "hfToken", "tlsKey")
# The skeleton's model ids begin with the name.
CLIENT = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,79}")

SKELETON = """\
# {client}: which machines serve which models. stacks/Pulumi.example.yaml explains every key.
config:
  lora-pods:pods: # one entry per base model
    - base: Qwen/Qwen2.5-7B-Instruct # TODO a Hugging Face id, or a path on the machine
      host:
        address: 10.20.0.7 # TODO
        hostKey: ssh-ed25519 AAAA… # TODO what `ssh-keyscan -t ed25519 ADDRESS` prints; compare its fingerprint
      engine:
        vllm: {{version: "0.33.0"}} # installed there once
        # port: 8001 # two stacks on one machine need two ports; 8000 if left out
  lora-pods:models: # what clients ask for
    - {{id: {client}-support-v1, base: Qwen/Qwen2.5-7B-Instruct, adapter: ../adapters/{client}/support-v1}} # TODO
"""

_TOP = re.compile(r"(?P<key>[^\s#:][^:]*):")
_ENTRY = re.compile(r"(?P<indent> +)(?P<quote>[\"']?)(?P<key>[^\s#\"'][^\s\"']*)(?P=quote):(\s|$)")
_SECURE = re.compile(r"(^|[\s{,])[\"']?secure[\"']?\s*:", re.MULTILINE)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = "Make stacks/Pulumi.CLIENT.yaml and say what to do next."
    parser.add_argument("client", metavar="CLIENT", help="the new stack's name: letters, digits, '-', '_' and '.'")
    parser.add_argument("--like", metavar="STACK", help="copy this stack's file, without its secrets")


def run(args: argparse.Namespace) -> int:
    """Always 0: raises UserError where the file cannot be made."""
    directory = stack_directory()
    path = make(directory, args.client, args.like)
    print(f"made {shown_path(path.relative_to(directory.parent))}")
    print("\n".join(next_steps(args.client, args.like)))
    return 0


def make(directory: Path, client: str, like: str | None) -> Path:
    """Write the file. Raises UserError if it is there, and for names and files that cannot be used."""
    _refuse_name(client)
    path = directory / f"Pulumi.{client}.yaml"
    text = SKELETON.format(client=client) if like is None else _like(directory, like, client)
    try:
        # Another file of that name, also a link to one that is not there, is never written to.
        with path.open("x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError:
        raise UserError(f"{shown_path(path)} is there already: edit that one, or choose another name") from None
    except OSError as error:
        raise UserError(f"{shown_path(path)}: cannot be written ({os_reason(error)})") from None
    if like is not None:
        _prove_copy(directory, like, client, path)
    return path


def next_steps(client: str, like: str | None) -> Iterator[str]:
    """What to run, in order."""
    if like is None:
        yield "next: fill in what says TODO, then"
    else:
        yield f"next: name its own models; where it shares a machine with {like}, give its engine another port; then"
    yield f"  pulumi stack init {client}"
    yield f"  pulumi config set --secret sshPrivateKey --stack {client} < ~/.ssh/id_ed25519"
    yield f'  printf %s "$(openssl rand -hex 24)" | pulumi config set --secret apiKey --stack {client}'
    yield f"  lora lock -s {client}"
    yield f"  pulumi preview --stack {client}"
    yield f"  pulumi up --stack {client}"


def _refuse_name(client: str) -> None:
    if not CLIENT.fullmatch(client):
        raise UserError(
            f"{printable(client)!r} cannot be a client's stack: its name has 1 to 80 letters, digits, '-', '_' and "
            f"'.', and begins with a letter or a digit"
        )
    if client in TAKEN:
        raise UserError(f"{client} is a stack of this project itself; choose another name")


def _like(directory: Path, like: str, client: str) -> str:
    stack_config(directory, like, PROJECT)  # whatever is wrong with it is told as everywhere
    text = (directory / f"Pulumi.{like}.yaml").read_text(encoding="utf-8")
    copied = without_secrets(text)
    return f"# {client}: made like {like}, without its secrets.\n{copied}"


def without_secrets(text: str) -> str:
    """A stack file's text, comments and all, without encrypted values and without what they were encrypted with."""
    return "".join(
        block
        for key, block in _blocks(text)
        if key not in ENCRYPTION and not _is_secret(key) and not _SECURE.search(_bare(block))
    )


def _is_secret(key: str) -> bool:
    return key.rpartition(":")[2] in SECRETS


def _blocks(text: str) -> Iterator[tuple[str, str]]:
    """The file cut at each key of the top level and each key of `config:`; comments belong to the key below them."""
    key, inside, depth, block, comments = "", "", None, "", ""
    for line in text.splitlines(keepends=True):
        bare = line.strip()
        top = _TOP.match(line)
        entry = _ENTRY.match(line) if inside == "config" else None
        if entry and depth is None:
            depth = len(entry["indent"])
        if not bare or bare.startswith("#"):
            comments += line
            continue
        if entry and len(entry["indent"]) != depth:
            entry = None
        if cut := entry or top:
            yield key, block
            key, block = cut["key"], ""
            if not entry:
                inside, depth = key, None
        block += comments + line
        comments = ""
    yield key, block + comments


def _bare(block: str) -> str:
    return re.sub(r"(^|\s)#.*", "", block)


def _prove_copy(directory: Path, like: str, client: str, path: Path) -> None:
    """Undo the copy unless it reads as the original does, less exactly its secrets."""
    original = stack_config(directory, like, PROJECT)
    expected = {key: value for key, value in original.items() if not _is_secret(key) and not _holds_secret(value)}
    try:
        copied: dict[str, Any] | None = stack_config(directory, client, PROJECT)
    except UserError:
        copied = None
    if copied != expected or any(word in _bare(path.read_text(encoding="utf-8")) for word in ENCRYPTION):
        path.unlink()
        raise UserError(
            f"stacks/Pulumi.{like}.yaml cannot be copied without its secrets as it is written; "
            f"make the new one without --like and copy what you need"
        )


def _holds_secret(value: object) -> bool:
    if isinstance(value, dict):
        return "secure" in value or any(map(_holds_secret, value.values()))
    return isinstance(value, list) and any(map(_holds_secret, value))
