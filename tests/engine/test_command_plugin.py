"""The command plugin in use answers as the official one was recorded to, call by call, over real SSH.

`command_plugin_recorded.json` holds 39 steps of the official pulumi-resource-command 1.2.1 under pulumi 3.274.1: for
each the calls the engine made (request, and response or errors) and the console's lines. Every step is replayed to a
fresh plugin process, against two SSH servers of this test's own. What differs from run to run is put in place of the
record's values by narrow rules (`Hosts.localise`, `settle`); everything else must be equal. The plugin tested is
$LORA_PODS_COMMAND_PLUGIN, else the one pulumi would use: the official one is to pass too; tests of what it does not
do are skipped for it.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent import futures
from dataclasses import dataclass
from pathlib import Path

import grpc  # type: ignore[import-untyped]
import pytest
from google.protobuf import empty_pb2, json_format  # type: ignore[import-untyped]
from google.protobuf.message import Message  # type: ignore[import-untyped]
from pulumi.runtime.proto import engine_pb2, engine_pb2_grpc, plugin_pb2, provider_pb2

pytestmark = pytest.mark.pod

Json = None | bool | int | float | str | list["Json"] | dict[str, "Json"]
JsonObject = dict[str, Json]

STEPS: list[JsonObject] = json.loads(
    (Path(__file__).parent / "command_plugin_recorded.json").read_text(encoding="utf-8")
)

RECORDED_PORTS = (2222, 2223, 2999)
"""The first host, the second host, and a port where nothing listens."""

SECOND_HOST_NAME = "7c84c4127052"
"""What the second host's `hostname` said in step 09."""

METHODS: dict[str, tuple[Callable[[], Message], Callable[[], Message]]] = {
    "Handshake": (provider_pb2.ProviderHandshakeRequest, provider_pb2.ProviderHandshakeResponse),
    "GetPluginInfo": (empty_pb2.Empty, plugin_pb2.PluginInfo),
    "GetSchema": (provider_pb2.GetSchemaRequest, provider_pb2.GetSchemaResponse),
    "CheckConfig": (provider_pb2.CheckRequest, provider_pb2.CheckResponse),
    "DiffConfig": (provider_pb2.DiffRequest, provider_pb2.DiffResponse),
    "Configure": (provider_pb2.ConfigureRequest, provider_pb2.ConfigureResponse),
    "Check": (provider_pb2.CheckRequest, provider_pb2.CheckResponse),
    "Diff": (provider_pb2.DiffRequest, provider_pb2.DiffResponse),
    "Create": (provider_pb2.CreateRequest, provider_pb2.CreateResponse),
    "Read": (provider_pb2.ReadRequest, provider_pb2.ReadResponse),
    "Update": (provider_pb2.UpdateRequest, provider_pb2.UpdateResponse),
    "Delete": (provider_pb2.DeleteRequest, empty_pb2.Empty),
    "Cancel": (empty_pb2.Empty, empty_pb2.Empty),
}

CALL_SECONDS = 60
"""No call of the record took more than 4 s."""


class CallFailed(Exception):
    """A call's gRPC error, written as the record writes it."""


@dataclass(frozen=True)
class LogLine:
    """One message the plugin sent to the engine's log."""

    urn: str
    line: str
    at: float


class Engine(engine_pb2_grpc.EngineServicer):
    """The engine's side of the log, as far as a plugin uses it."""

    def __init__(self) -> None:
        self.logged: list[LogLine] = []
        self.arrived = threading.Condition()
        self.server = grpc.server(futures.ThreadPoolExecutor(max_workers=4))
        engine_pb2_grpc.add_EngineServicer_to_server(self, self.server)
        self.port: int = self.server.add_insecure_port("127.0.0.1:0")
        self.server.start()

    def Log(self, request: engine_pb2.LogRequest, context: grpc.ServicerContext) -> empty_pb2.Empty:
        prefix = {
            engine_pb2.INFO: "",
            engine_pb2.WARNING: "warning: ",
            engine_pb2.ERROR: "error: ",
        }.get(request.severity)
        if prefix is not None:
            # What the console shows only while a command runs is ephemeral, all the rest is not.
            if request.ephemeral != (prefix == ""):
                prefix = f"(ephemeral: {request.ephemeral}) {prefix}"
            line = LogLine(request.urn, prefix + request.message.split("\n")[0], time.monotonic())
            with self.arrived:
                self.logged.append(line)
                self.arrived.notify_all()
        return empty_pb2.Empty()

    def wait_for(self, text: str) -> None:
        with self.arrived:
            assert self.arrived.wait_for(lambda: any(text == entry.line for entry in self.logged), CALL_SECONDS)

    def lines(self, name: str) -> list[str]:
        return [entry.line for entry in self.logged if entry.urn.endswith(f"::{name}")]


class Plugin:
    """One running plugin, told of one engine."""

    def __init__(self, program: str, directory: Path, environment: dict[str, str]) -> None:
        self.engine = Engine()
        self.process = subprocess.Popen(
            [program, f"127.0.0.1:{self.engine.port}"],
            cwd=directory,
            env={k: v for k, v in os.environ.items() if k != "SSH_AUTH_SOCK"} | environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self.process.stdout is not None
        port = int(self.process.stdout.readline())
        self.channel = grpc.insecure_channel(
            f"127.0.0.1:{port}", options=[("grpc.max_receive_message_length", 400 << 20)]
        )

    def call(self, method: str, request: Json) -> JsonObject:
        """The response of one call as the record writes it.

        Raises:
            CallFailed: the plugin answered with an error.
        """
        make_request, response = METHODS[method]
        invoke = self.channel.unary_unary(
            f"/pulumirpc.ResourceProvider/{method}",
            request_serializer=lambda message: message.SerializeToString(),
            response_deserializer=type(response()).FromString,
        )
        try:
            answer = invoke(json_format.ParseDict(request, make_request()), timeout=CALL_SECONDS)
        except grpc.RpcError as error:
            code = error.code().name.title().replace("_", "")
            raise CallFailed(f"rpc error: code = {code} desc = {error.details()}") from None
        written: JsonObject = json_format.MessageToDict(answer)
        return written

    def outcome(self, method: str, request: Json) -> Json:
        """The response, or the errors, as the record writes them."""
        try:
            return self.call(method, request)
        except CallFailed as error:
            return [str(error)]

    def close(self) -> None:
        self.channel.close()
        self.process.kill()
        self.process.wait()
        self.engine.server.stop(None).wait()


# A host is an sshd in namespaces of its own: an empty /root, its own /run with the keys, a host name, and processes
# that all end with it. It ends when its standard input does, so when the test ends in any way.
HOST_SCRIPT = """
set -e
mount -t tmpfs tmpfs /run
cp -r "$1" /run/keys
mkdir -p /run/sshd
mount -t tmpfs -o mode=0700 tmpfs /root
echo "$2" > /proc/sys/kernel/hostname
"$3" -D -e -f /run/keys/sshd_config &
read -r _ || true
"""

SSHD_CONFIG = """
ListenAddress 127.0.0.1
Port {port}
HostKey /run/keys/host_key
PidFile none
AuthorizedKeysFile /run/keys/authorized_%u
StrictModes no
PermitRootLogin prohibit-password
PasswordAuthentication no
KbdInteractiveAuthentication no
UsePAM no
UseDNS no
AcceptEnv none
MaxStartups 100
Subsystem sftp internal-sftp
"""


class SshHost:
    """One SSH server on a free loopback port, where root may log in with any of the given public keys."""

    def __init__(self, directory: Path, name: str, client_keys: Sequence[Path]) -> None:
        self.port = free_port()
        self.client_key = client_keys[0]
        self.keys = directory / name
        self.keys.mkdir()
        make_key(self.keys / "host_key")
        authorized = "".join(public_key(key) + "\n" for key in client_keys)
        (self.keys / "authorized_root").write_text(authorized)
        (self.keys / "sshd_config").write_text(SSHD_CONFIG.format(port=self.port))
        (self.keys / "known_hosts").write_text(f"[127.0.0.1]:{self.port} {public_key(self.keys / 'host_key')}\n")
        self.process = subprocess.Popen(
            [
                *as_root(),
                *("unshare", "--mount", "--uts", "--pid", "--fork", "--kill-child", "--mount-proc"),
                *("sh", "-c", HOST_SCRIPT, "sh", str(self.keys), name, sshd_program()),
            ],
            stdin=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        said: list[str] = []
        assert self.process.stderr is not None
        for line in self.process.stderr:
            said.append(line)
            if "Server listening on" in line:
                break
        else:
            pytest.fail("the test's sshd did not start: " + "".join(said))
        threading.Thread(target=self.process.stderr.read, daemon=True).start()

    def run(self, command: str) -> subprocess.CompletedProcess[str]:
        """Runs a command on the host with the ssh program, past the plugin."""
        return subprocess.run(
            [
                *("ssh", "-F", "none", "-i", str(self.client_key), "-p", str(self.port)),
                *("-o", "BatchMode=yes", "-o", "IdentitiesOnly=yes"),
                *("-o", f"UserKnownHostsFile={self.keys / 'known_hosts'}"),
                *("root@127.0.0.1", command),
            ],
            capture_output=True,
            text=True,
            timeout=CALL_SECONDS,
        )

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait(10)


@dataclass(frozen=True)
class Hosts:
    """The two hosts of the record, and what stands here for its placeholders."""

    first: SshHost
    second: SshHost
    placeholders: Mapping[str, str]
    ports: Mapping[int, int]

    def localise(self, value: Json) -> Json:
        """The record's value with this run's keys and ports in it."""
        if isinstance(value, list):
            return [self.localise(item) for item in value]
        if isinstance(value, dict):
            return {
                key: self.ports[int(item)] if key == "port" and isinstance(item, (int, float)) else self.localise(item)
                for key, item in value.items()
            }
        if isinstance(value, str):
            text = self.placeholders.get(value, value)
            for recorded, here in self.ports.items():
                text = text.replace(f"127.0.0.1:{recorded}", f"127.0.0.1:{here}")
            return text
        return value

    def connection(self, **more: Json) -> JsonObject:
        """A connection to the first host as the plugin's Check answers it."""
        fields: JsonObject = {"host": "127.0.0.1", "port": 2222, "user": "root", "hostKey": "<host key>"}
        fields |= {"privateKey": "<private key 1>", "dialErrorLimit": 2, "perDialTimeout": 3}
        localised = self.localise(fields | more)
        assert isinstance(localised, dict)
        return localised


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def as_root() -> list[str]:
    return [] if os.geteuid() == 0 else ["sudo", "-n"]


def sshd_program() -> str:
    return shutil.which("sshd", path=os.environ.get("PATH", "") + ":/usr/sbin") or "sshd"


def make_key(path: Path, passphrase: str = "") -> None:
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", passphrase, "-C", "", "-f", path], check=True)


def public_key(path: Path) -> str:
    return Path(f"{path}.pub").read_text().strip()


def reason_to_skip_hosts() -> str | None:
    if not sys.platform.startswith("linux"):
        return "the test's SSH servers need Linux namespaces"
    for program in ("unshare", "ssh", "ssh-keygen", sshd_program()):
        if shutil.which(program) is None:
            return f"{program} is not installed (Debian: openssh-server, util-linux)"
    allowed = subprocess.run([*as_root(), "unshare", "--mount", "true"], capture_output=True, text=True)
    return None if allowed.returncode == 0 else f"no namespaces here: {allowed.stderr.strip()}"


@pytest.fixture(autouse=True, scope="session")
def _needs() -> None:
    """In place of this directory's: no pulumi and no container takes part here."""


@pytest.fixture(scope="module")
def program() -> str:
    """The plugin pulumi would use: the one named, on PATH, or installed by pulumi itself."""
    home = Path(os.environ.get("PULUMI_HOME", Path.home() / ".pulumi"))
    installed = home / "plugins/resource-command-v1.2.1/pulumi-resource-command"
    found = os.environ.get("LORA_PODS_COMMAND_PLUGIN") or shutil.which("pulumi-resource-command")
    if found is None and not installed.is_file():
        pytest.skip("no command plugin: neither LORA_PODS_COMMAND_PLUGIN, nor on PATH, nor installed by pulumi")
    return found or str(installed)


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hosts]:
    if reason := reason_to_skip_hosts():
        pytest.skip(reason)
    directory = tmp_path_factory.mktemp("ssh")
    keys = [directory / name for name in ("id1", "id2", "locked")]
    make_key(keys[0])
    make_key(keys[1])
    make_key(keys[2], passphrase="open sesame")
    make_key(directory / "other")
    with contextlib.ExitStack() as running:
        first = SshHost(directory, "first", keys)
        running.callback(first.close)
        second = SshHost(directory, SECOND_HOST_NAME, keys)
        running.callback(second.close)
        yield Hosts(
            first,
            second,
            placeholders={
                "<host key>": public_key(first.keys / "host_key"),
                "<some other host key>": public_key(directory / "other"),
                "<private key 1>": keys[0].read_text(),
                "<private key 2>": keys[1].read_text(),
                "<locked private key>": keys[2].read_text(),
            },
            ports=dict(zip(RECORDED_PORTS, (first.port, second.port, free_port()), strict=True)),
        )


@pytest.fixture
def start(program: str, tmp_path: Path) -> Iterator[Callable[..., Plugin]]:
    """Starts plugins in a project directory that holds the record's files."""
    (tmp_path / "small.bin").write_bytes(bytes(range(256)))
    (tmp_path / "adir" / "sub").mkdir(parents=True)
    (tmp_path / "adir" / "one.txt").write_text("one")
    (tmp_path / "adir" / "sub" / "two.txt").write_text("two")
    with contextlib.ExitStack() as running:

        def start(**environment: str) -> Plugin:
            plugin = Plugin(program, tmp_path, environment)
            running.callback(plugin.close)
            return plugin

        yield start


@pytest.fixture
def plugin(start: Callable[..., Plugin]) -> Plugin:
    return start()


@pytest.fixture
def stand_in(plugin: Plugin) -> Plugin:
    """A running plugin of this repository: skips the test where another one is in use."""
    described = json.loads(str(plugin.call("GetSchema", {}).get("schema", "{}"))).get("description", "")
    if not described.startswith("A stand-in for the official command plugin"):
        pytest.skip("not done by the official plugin")
    return plugin


BOTH_STREAMS = {
    "01-command-create": [["out", "err"], ["err", "out"]],
    "10-fails-exit-3": [["some-err", "some-out"], ["some-out", "some-err"]],
    "33-multi-line-and-trailing": [["no-newlinea", "b", ""], ["a", "b", "", "no-newline"]],
}
"""The lines of the commands that write to both streams at once: which comes first is a race in any plugin."""

NANOSECONDS = re.compile(r"\b\d{19}\b")
"""What `date +%s%N` prints, in step 08."""

# An operation's first line says that it begins (and may repeat an older message); the next ones carry log messages.
PROGRESS = re.compile(
    r"(?:\+|~|-|\+\+|--|\+-) +command:remote:\w+ (?P<name>\w+) (?P<verb>[a-z]+ing(?: replacement| original)?) "
    r"\(\d+s\)(?: \[diff: [^]]*\];?)?(?: (?P<message>.*))?"
)


def recorded_log(step: Mapping[str, Json]) -> dict[str, list[str]]:
    """Each resource's log lines, as far as they came from the plugin, out of the console's."""
    calls = objects(step["calls"])
    errors = {
        "error: " + error.partition("desc = ")[2].split("\n")[0]
        for call in calls
        for error in strings(call.get("errors", []))
    }
    found: dict[str, list[str]] = {
        str(request["name"]): [] for call in calls if "name" in (request := objects([call["request"]])[0])
    }
    begun: set[tuple[str, str]] = set()
    for line in strings(step["console"]):
        match = PROGRESS.fullmatch(line)
        if match is None:
            continue
        operation = (match["name"], match["verb"])
        if operation in begun and (message := match["message"] or "") not in errors:
            found[match["name"]].append(message)
        begun.add(operation)
    return found


def strings(value: Json) -> list[str]:
    assert isinstance(value, list)
    return [str(item) for item in value]


def objects(value: Json) -> list[JsonObject]:
    assert isinstance(value, list)
    return [item for item in value if isinstance(item, dict)]


def settle(step: str, method: str, answer: Json, recorded: Json) -> Json:
    """The answer with what is random or racing replaced by the record's, if it has the right form."""
    if isinstance(answer, list):
        return [settle_order(step, str(error)) for error in answer]
    assert isinstance(answer, dict)
    if not isinstance(recorded, dict):
        return answer
    answer = dict(answer)
    if method == "Diff" and sorted(strings(answer.get("diffs", []))) == sorted(strings(recorded.get("diffs", []))):
        # The official plugin lists them in Go's random map order.
        answer |= {"diffs": recorded["diffs"]} if "diffs" in recorded else {}
    if method == "Create" and "id" in answer and "id" in recorded:
        prefix = str(recorded["id"])[:-8]
        if re.fullmatch(re.escape(prefix) + "[0-9a-f]{8}", str(answer["id"])):
            answer["id"] = recorded["id"]
    if step == "08-key-rotated" and method == "Update":
        properties, old = answer["properties"], recorded["properties"]
        assert isinstance(properties, dict)
        assert isinstance(old, dict)
        stamp = NANOSECONDS.search(str(old["stdout"]))
        assert stamp is not None
        properties["stdout"] = NANOSECONDS.sub(stamp[0], str(properties["stdout"]))
    return answer


def settle_order(step: str, error: str) -> str:
    """An error with its output lines in the recorded order, which is the first one of BOTH_STREAMS."""
    for order in BOTH_STREAMS.get(step, []):
        error = error.replace("\n".join(order), "\n".join(BOTH_STREAMS[step][0]))
    return error


@dataclass(frozen=True)
class Effect:
    """What a step leaves at a path on a host: a file's text, or nothing."""

    host: int
    path: str
    text: str | None


EFFECTS = {
    "04-update-added": Effect(1, "/root/deleted", None),
    "06-trigger-added": Effect(1, "/root/deleted", "bye\n"),
    "07-trigger-changed-dbr": Effect(1, "/root/deleted", "bye\n"),
    "09-host-moved": Effect(1, "/root/deleted", None),
    "15-copy-create": Effect(1, "/root/f.txt", "hello v1"),
    "17-copy-content-changed": Effect(1, "/root/f.txt", "hello v2"),
    "18-copy-path-changed": Effect(1, "/root/g.txt", "hello v2"),
    "19-copy-host-moved": Effect(2, "/root/g.txt", None),
    "20-copy-trigger": Effect(2, "/root/g.txt", "hello v2"),
    "21-copy-missing-dir": Effect(1, "/root/nodir/x.txt", "x"),
    "24-preview-create": Effect(1, "/root/pre.txt", None),
    "34-archive-dir": Effect(1, "/root/adir/adir/sub/two.txt", "two"),
}


@pytest.mark.parametrize("step", STEPS, ids=[str(step["step"]) for step in STEPS])
def test_answers_as_recorded(step: JsonObject, hosts: Hosts, plugin: Plugin) -> None:
    name = str(step["step"])
    effect = EFFECTS.get(name)
    if effect is not None:
        host = hosts.first if effect.host == 1 else hosts.second
        assert host.run(f"rm -rf {effect.path}").returncode == 0

    for call in objects(step["calls"]):
        method = str(call["method"])
        expected = hosts.localise(call.get("response", call.get("errors")))
        answer = plugin.outcome(method, hosts.localise(call["request"]))
        assert settle(name, method, answer, expected) == expected, method

    for resource, expected_lines in recorded_log(step).items():
        lines = plugin.engine.lines(resource)
        if name == "08-key-rotated":
            lines = [NANOSECONDS.sub("<time>", line) for line in lines]
            expected_lines = [NANOSECONDS.sub("<time>", line) for line in expected_lines]
        if lines in BOTH_STREAMS.get(name, []):
            lines = BOTH_STREAMS[name][0]
        assert lines == expected_lines, resource

    if effect is not None:
        read = host.run(f"cat {effect.path}")
        assert (read.stdout if read.returncode == 0 else None) == effect.text


def test_copies_a_file_byte_for_byte(hosts: Hosts, plugin: Plugin) -> None:
    step = next(step for step in STEPS if step["step"] == "22-copy-file")
    create = next(call for call in objects(step["calls"]) if call["method"] == "Create")
    plugin.call("Create", hosts.localise(create["request"]))
    listed = hosts.first.run("od -An -v -tx1 /root/small.bin | tr -d ' \\n'")
    assert bytes.fromhex(listed.stdout) == bytes(range(256))


def test_shows_lines_while_the_command_runs(hosts: Hosts, plugin: Plugin) -> None:
    create(plugin, "s", {"create": "echo one; sleep 1; echo two", "connection": hosts.connection()})
    first, second = plugin.engine.logged
    assert [first.line, second.line] == ["one", "two"]
    assert second.at - first.at > 0.8


def create(plugin: Plugin, name: str, properties: JsonObject) -> JsonObject:
    return plugin.call("Create", {"urn": urn(name), "properties": properties})


def urn(name: str) -> str:
    return f"urn:pulumi:a::rec::command:remote:Command::{name}"


def outputs(answer: JsonObject) -> tuple[Json, Json]:
    properties = answer["properties"]
    assert isinstance(properties, dict)
    return properties["stdout"], properties["stderr"]


def test_stdin_feeds_the_delete_too(hosts: Hosts, plugin: Plugin) -> None:
    properties: JsonObject = {
        "connection": hosts.connection(),
        "addPreviousOutputInEnv": False,
        "stdin": "fed",
        "delete": "cat > /root/fed",
        "stdout": "",
        "stderr": "",
    }
    plugin.call("Delete", {"id": "s12345678", "urn": urn("s"), "properties": properties})
    assert hosts.first.run("cat /root/fed").stdout == "fed"


def test_logs_in_with_a_locked_key(hosts: Hosts, plugin: Plugin) -> None:
    connection = hosts.connection(privateKey="<locked private key>", privateKeyPassword="open sesame")
    assert outputs(create(plugin, "k", {"create": "echo in", "connection": connection})) == ("in", "")


def test_goes_through_a_proxy(hosts: Hosts, plugin: Plugin) -> None:
    connection = hosts.connection() | {"proxy": hosts.connection(port=2223, hostKey=None)}
    properties: JsonObject = {"create": "hostname; echo $SSH_CONNECTION", "connection": connection}
    stdout, _ = outputs(create(plugin, "p", properties))
    assert str(stdout).splitlines()[0] == "first"


def test_a_dead_agent_is_fatal_even_with_a_key(hosts: Hosts, start: Callable[..., Plugin]) -> None:
    plugin = start(SSH_AUTH_SOCK="/nonexistent/agent")
    with pytest.raises(CallFailed) as failed:
        create(plugin, "a", {"create": "true", "connection": hosts.connection()})
    said = "dial unix /nonexistent/agent: connect: no such file or directory"
    assert str(failed.value) == f"rpc error: code = Unknown desc = {said}"


def test_any_host_is_taken_without_a_host_key(hosts: Hosts, plugin: Plugin) -> None:
    connection = hosts.connection(hostKey=None)
    assert outputs(create(plugin, "h", {"create": "echo in", "connection": connection})) == ("in", "")


def test_a_line_of_128_kib_does_not_hang(hosts: Hosts, stand_in: Plugin) -> None:
    command = "head -c 131072 /dev/zero | tr '\\0' x; echo; echo end"
    answer = create(stand_in, "l", {"create": command, "connection": hosts.connection()})
    assert outputs(answer) == ("x" * 131072 + "\nend", "")
    assert stand_in.engine.lines("l") == ["x" * 65536, "x" * 65536, "", "end"]


def test_bytes_that_are_not_text_do_not_fail_the_command(hosts: Hosts, stand_in: Plugin) -> None:
    answer = create(stand_in, "b", {"create": "printf 'a\\377b\\n'", "connection": hosts.connection()})
    assert outputs(answer) == ("a\N{REPLACEMENT CHARACTER}b", "")
    assert stand_in.engine.lines("b") == ["a\N{REPLACEMENT CHARACTER}b"]


def test_cancel_ends_the_running_command(hosts: Hosts, stand_in: Plugin) -> None:
    command = "echo started; sleep 300"
    with futures.ThreadPoolExecutor(1) as pool:
        running = pool.submit(create, stand_in, "c", {"create": command, "connection": hosts.connection()})
        stand_in.engine.wait_for("started")
        stand_in.call("Cancel", {})
        with pytest.raises(CallFailed) as failed:
            running.result(10)
    assert str(failed.value) == (
        f'rpc error: code = Unknown desc = the update was cancelled: running "{command}":\nstarted\n'
    )


def test_cancel_ends_the_dialling(hosts: Hosts, stand_in: Plugin) -> None:
    connection = hosts.connection(port=2999, dialErrorLimit=-1)
    with futures.ThreadPoolExecutor(1) as pool:
        running = pool.submit(create, stand_in, "c", {"create": "true", "connection": connection})
        stand_in.engine.wait_for("Dial 1/inf failed: retrying")
        stand_in.call("Cancel", {})
        with pytest.raises(CallFailed) as failed:
            running.result(10)
    assert str(failed.value) == "rpc error: code = Unknown desc = the update was cancelled"


def test_a_host_that_accepts_and_says_nothing_is_given_up(hosts: Hosts, stand_in: Plugin) -> None:
    with socket.create_server(("127.0.0.1", 0)) as mute:
        port = mute.getsockname()[1]
        connection = hosts.connection(dialErrorLimit=0, perDialTimeout=1) | {"port": port}
        with pytest.raises(CallFailed) as failed:
            create(stand_in, "m", {"create": "true", "connection": connection})
    assert str(failed.value) == (
        f"rpc error: code = Unknown desc = after 0 failed attempts: ssh: no answer from 127.0.0.1:{port} within 1s"
    )


def test_check_fills_in_defaults_and_marks_secrets(stand_in: Plugin) -> None:
    def secret(value: Json) -> JsonObject:
        mark = "1b47061264138c4ac30d75fd1eb44270"
        return {"4dabf18193072939515e22adb298388d": mark, "value": value}

    news: JsonObject = {"connection": {"host": "h", "password": "p", "proxy": {"host": "j", "privateKey": "k"}}}
    answer = stand_in.call("Check", {"urn": urn("c"), "news": news})
    defaults: JsonObject = {"user": "root", "port": 22, "dialErrorLimit": 10, "perDialTimeout": 15}
    proxy: JsonObject = {"host": "j", "privateKey": secret("k"), **defaults}
    assert answer == {
        "inputs": {"connection": secret({"host": "h", "password": secret("p"), "proxy": proxy, **defaults})}
    }


@pytest.mark.parametrize(
    ("resource_type", "news", "failures"),
    [
        ("Command", {"create": "true"}, [("connection", "a connection must be given")]),
        ("Command", {"connection": {}}, [("connection.host", "a host must be given")]),
        (
            "Command",
            {"connection": {"host": "h"}, "logging": "all"},
            [("logging", '"all" is not stdout, stderr, stdoutAndStderr or none')],
        ),
        (
            "CopyToRemote",
            {"connection": {"host": "h"}},
            [
                ("source", "either asset or archive must be set"),
                ("remotePath", "a remote path must be given"),
            ],
        ),
    ],
)
def test_check_says_what_is_wrong(
    stand_in: Plugin, resource_type: str, news: JsonObject, failures: list[tuple[str, str]]
) -> None:
    request: JsonObject = {"urn": f"urn:pulumi:a::rec::command:remote:{resource_type}::c", "news": news}
    answer = stand_in.call("Check", request)
    assert answer["failures"] == [{"property": name, "reason": reason} for name, reason in failures]


def test_diff_names_nested_paths(stand_in: Plugin) -> None:
    answer = stand_in.call(
        "Diff",
        {
            "id": "c12345678",
            "urn": urn("c"),
            "oldInputs": {"environment": {"A": "1", "B C": "1", "D": "1"}, "triggers": ["x", {"y": 1}]},
            "news": {"environment": {"A": "2", "B C": "2", "E": "1"}, "triggers": ["x", {"y": 2}, "z"]},
        },
    )
    assert answer == {
        "changes": "DIFF_SOME",
        "diffs": ["environment", "triggers"],
        "detailedDiff": {
            "environment.A": {"kind": "UPDATE"},
            'environment["B C"]': {"kind": "UPDATE"},
            "environment.D": {"kind": "DELETE"},
            "environment.E": {},
            "triggers[1].y": {"kind": "UPDATE"},
            "triggers[2]": {},
        },
        "hasDetailedDiff": True,
    }


def test_refuses_other_resource_types(stand_in: Plugin) -> None:
    with pytest.raises(CallFailed) as failed:
        stand_in.call("Check", {"urn": "urn:pulumi:a::rec::command:local:Command::c", "news": {}})
    assert str(failed.value) == (
        "rpc error: code = Unknown desc = this stand-in for the command plugin has command:remote:Command and "
        'command:remote:CopyToRemote, not "command:local:Command": use the official plugin for it'
    )


def test_ends_when_the_engine_is_gone(stand_in: Plugin) -> None:
    assert stand_in.process.poll() is None
    stand_in.engine.server.stop(None).wait()
    assert stand_in.process.wait(10) in (0, -signal.SIGTERM)
