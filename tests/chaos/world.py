"""One stack on one pod that rounds change and break, and what is looked at after each."""

from __future__ import annotations

import hashlib
import json
import os
import random
import re
import signal
import subprocess
import time
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from components.core.naming import engine_key, unit_name
from tests.chaos.schedule import FAULTS, Adapter, Declared, Round
from tests.chaos.witness import LISTENS, Testimony, judged, servings
from tests.chaos.witness import Client as Witness
from tests.engine.conftest import BASE, Client, Key, host_pod
from tests.support.adapters import CONFIG, lora_shapes, safetensors_bytes, write_adapter
from tests.support.machines import ROOT, Machine, call, container_engine, generate_key, wait_for
from tests.support.stacks import Checkout, Run

HERE = Path(__file__).parent
STACK, KEY = "acme", engine_key("acme", BASE)
UNIT = unit_name(KEY)
ON_POD = "/opt/chaos"
REFUSED = "refused on purpose"
WIDTH = 1 << 16  # of an adapter of 8 MiB
PATIENCE = 180.0
BLOB = re.compile("blobs/sha256/([0-9a-f]{64})")


@dataclass
class Outcome:
    """What came of one round; `faults` is everything that is not as it should be."""

    round: Round
    ended: str = ""
    hit: bool = False
    cancelled: bool = False
    converged: bool = False
    restarts: int = 0
    told: Testimony = field(default_factory=lambda: Testimony([], 0, 0, []))
    faults: list[str] = field(default_factory=list)
    seconds: float = 0.0

    def __str__(self) -> str:
        told = [self.ended, "converged" if self.converged else "DID NOT CONVERGE", str(self.told)]
        told += [f"{self.restarts} starts", *(["cancel"] if self.cancelled else [])]
        return f"{self.round}: {'; '.join(told)} ({self.seconds:.0f} s)" + "".join(f"\n     {f}" for f in self.faults)


class World:
    def __init__(self, directory: Path, declared: Declared) -> None:
        self.directory = directory
        self.private: dict[int, str] = {}
        self.public: dict[int, str] = {}
        self.make_ssh_key(declared.ssh_key)
        self.machine = Machine.start(directory / "machines", self.public[declared.ssh_key])
        self.mark = f"LORA_PODS_CHAOS={uuid.uuid4().hex}"
        checkout = Checkout.make(directory / "checkout", directory / "backend")
        checkout.environment["LORA_PODS_CHAOS"] = self.mark.partition("=")[2]
        self.client = Client(checkout.stack(STACK), Key(self.private[declared.ssh_key], ""), [host_pod(self.machine)])
        self.on_disk: dict[str, Adapter] = {}
        self.weights: dict[Adapter, str] = {}
        self.api_key = self.ssh_key = -1
        self.kills: list[float] = []
        self.journal: dict[str, dict[str, Any]] = {}
        self.prepare_machine()
        self.declare(declared)
        self.expect(declared)
        self.witness = Witness(self.start_client)

    def prepare_machine(self) -> None:
        run = self.machine.run
        # The journal is to outlive the pod's death.
        run("mkdir", "-p", BASE, ON_POD, "/var/log/journal")
        run("tee", f"{BASE}/config.json", stdin="{}")
        run("journalctl", "--flush")
        for program in ("client_on_pod.py", "hand_on_pod.py", "look_on_pod.py"):
            run("tee", f"{ON_POD}/{program}", stdin=(HERE / program).read_text(encoding="utf-8"))

    def close(self) -> None:
        self.witness.close()
        self.end_what_pulumi_left()
        self.machine.remove()

    # --- what is declared --------------------------------------------------------------------------------------------

    def make_ssh_key(self, number: int) -> None:
        if number not in self.private:
            path = self.directory / "keys" / str(number)
            self.public[number] = generate_key(path)
            self.private[number] = path.read_text(encoding="utf-8")

    def declare(self, declared: Declared) -> None:
        """Make the stack file, the adapters and the secrets say this."""
        for model, adapter in declared.adapters.items():
            if self.on_disk.get(model) != adapter:
                self.write_adapter(model, adapter)
        self.client.models[:] = [
            {"id": model, "base": BASE, "adapter": f"../adapters/{model}"} for model in sorted(declared.adapters)
        ]
        engine: dict[str, Any] = {"maxModelLen": declared.max_model_len, "env": {"STANDIN_START_SECONDS": "1"}}
        if not declared.probe:
            engine["probe"] = False
        self.client.pods[0] = host_pod(self.machine, **engine)
        if declared.vllm:
            del self.client.pods[0]["engine"]["python"]
            self.client.pods[0]["engine"]["vllm"] = {"version": declared.vllm}
        secrets = {}
        if self.api_key != declared.api_key:
            secrets["apiKey"] = api_key(declared.api_key)
        if self.ssh_key != declared.ssh_key:
            self.make_ssh_key(declared.ssh_key)
            both = {self.ssh_key, declared.ssh_key} & set(self.public)
            self.machine.authorize("\n".join(self.public[number] for number in sorted(both)))
            secrets["sshPrivateKey"] = self.private[declared.ssh_key]
        self.client.configure(**secrets)
        self.api_key, self.ssh_key = declared.api_key, declared.ssh_key

    def write_adapter(self, model: str, adapter: Adapter) -> None:
        empty = safetensors_bytes(lora_shapes(8, WIDTH))
        header = empty[: 8 + int.from_bytes(empty[:8], "little")]
        weights = header + random.Random(adapter.seed).randbytes(len(empty) - len(header))
        config = {**CONFIG, "r": 8, **({"standin_fail": REFUSED} if adapter.bad else {})}
        write_adapter(self.client.adapters / model, config, weights)
        self.weights[adapter] = hashlib.sha256(weights).hexdigest()
        self.on_disk[model] = adapter

    def expect(self, *declared: Declared) -> None:
        """Have the client ask for what all of these serve, with the key of either."""
        models = set.intersection(*({m for m, a in each.adapters.items() if not a.bad} for each in declared))
        asked = {"models": [BASE, *sorted(models)], "keys": sorted({api_key(each.api_key) for each in declared})}
        # Renamed, so that the client never reads half of it.
        self.machine.run("tee", f"{ON_POD}/ask.new", stdin=json.dumps(asked))
        self.machine.run("mv", f"{ON_POD}/ask.new", f"{ON_POD}/ask.json")

    def start_client(self) -> subprocess.Popen[str]:
        words = [*container_engine(), "exec", self.machine.name, "python3", f"{ON_POD}/client_on_pod.py"]
        return subprocess.Popen(
            [*words, f"{ON_POD}/ask.json", UNIT], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )

    # --- one round ---------------------------------------------------------------------------------------------------

    def play(self, planned: Round, usual_seconds: float) -> Outcome:
        outcome, began = Outcome(planned), time.time()
        self.witness.taken()
        try:
            self.declare(planned.after)
            self.expect(planned.before, planned.after)
            self.broken_up(outcome, planned.moment * usual_seconds)
            if planned.looks:
                self.look_at_what_is_left(outcome)
            self.finish(outcome)
            if outcome.converged:
                self.look_at_the_end(outcome)
            self.hear(outcome, began)
            self.expect(planned.end)
        except AssertionError as error:
            outcome.faults.append(f"the round could not be ended: {error}")
        outcome.seconds = time.time() - began
        return outcome

    def broken_up(self, outcome: Outcome, moment: float) -> None:
        with self.pulumi_up() as (process, log):
            outcome.hit = self.strike(outcome.round, process, moment)
            try:
                process.wait(PATIENCE)
            except subprocess.TimeoutExpired:
                outcome.faults.append(f"pulumi did not end within {PATIENCE:.0f} s")
                self.end_what_pulumi_left()
                process.wait()
            said = log.read_text(encoding="utf-8", errors="replace")
        if process.returncode == 0 and outcome.round.fault in ("pulumi and all it started", "pulumi alone"):
            outcome.hit = False  # it ended in that moment
        ended = {0: "succeeded", -signal.SIGKILL: "killed"}.get(process.returncode, "failed")
        outcome.ended = ended if outcome.hit else f"{ended} before the fault"
        # Pulumi's SDK says in this way that it was registering more when a step failed.
        ours = "Traceback" in said and "resource monitor shut down" not in said
        if ours and outcome.round.fault not in ("Ctrl-C", "one process that pulumi started"):
            outcome.faults.append("a traceback reached the console: " + last_lines(said))
        if process.returncode == 0 and outcome.round.change == "bad":
            outcome.faults.append("an `up` with an adapter that the engine refuses succeeded")

    @contextmanager
    def pulumi_up(self) -> Iterator[tuple[subprocess.Popen[str], Path]]:
        checkout, log = self.client.stack.checkout, self.directory / "broken-up.log"
        words = ["pulumi", "up", "--yes", "--skip-preview", "--stack", STACK, "--non-interactive", "--color=never"]
        with log.open("w", encoding="utf-8") as file:
            process = subprocess.Popen(
                words,
                cwd=checkout.root,
                env=checkout.environment,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                text=True,
                start_new_session=True,
            )
        try:
            yield process, log
        finally:
            process.kill()
            process.wait()

    def strike(self, planned: Round, process: subprocess.Popen[str], moment: float) -> bool:
        """Wait for the moment, and kill what is to be killed. -> False where the `up` ended before."""
        if planned.aim is None:
            try:
                process.wait(moment)
                return False
            except subprocess.TimeoutExpired:
                pass
        on_pod = {"podctl": "podctl", "the SSH sessions": "session", "the engine": "engine"}.get(planned.fault, "-")
        if (planned.aim, on_pod) != (None, "-"):
            told = self.by_hand(planned, on_pod, process)
            if told is None:
                return False
            if on_pod == "engine":
                self.kills.append(float(told["at"]))
        if planned.fault == "the pod":
            self.kills.append(time.time())
            self.machine.kill()
            call("start", self.machine.name)
            self.machine.wait_until_running()
        elif FAULTS[planned.fault] == "laptop":
            return self.kill_here(planned, process)
        return True

    def by_hand(self, planned: Round, fault: str, process: subprocess.Popen[str]) -> dict[str, Any] | None:
        """Have the pod wait for the step, and kill. -> what it told, None where the `up` ended before."""
        stop = f"{ON_POD}/stop"
        self.machine.run("rm", "-f", stop)
        words = ["python3", f"{ON_POD}/hand_on_pod.py", planned.aim or "-", str(planned.delay), fault, UNIT, stop]
        hand = subprocess.Popen(
            [*container_engine(), "exec", self.machine.name, *words], stdout=subprocess.PIPE, text=True
        )
        while hand.poll() is None and process.poll() is None:
            time.sleep(0.02)
        if hand.poll() is None:
            self.machine.run("touch", stop)
        said, _ = hand.communicate(timeout=60)
        return json.loads(said) if said else None

    def kill_here(self, planned: Round, process: subprocess.Popen[str]) -> bool:
        if planned.fault == "pulumi alone":
            process.kill()
        elif planned.fault == "Ctrl-C":
            os.killpg(process.pid, signal.SIGINT)
        elif planned.fault == "pulumi and all it started":
            self.end_what_pulumi_left()
        else:
            # It starts its language host at once, and others as they are needed.
            others = [pid for pid in self.pulumis() if pid != process.pid]
            while not others:
                if process.poll() is not None:
                    return False
                time.sleep(0.05)
                others = [pid for pid in self.pulumis() if pid != process.pid]
            end(random.Random(planned.number).choice(sorted(others)))
        return True

    def pulumis(self) -> list[int]:
        """All that runs here with our environment: pulumi, its plugins, the program."""
        found = []
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                try:
                    environment = (entry / "environ").read_bytes()
                except OSError:
                    continue
                if self.mark.encode() in environment:
                    found.append(int(entry.name))
        return found

    def end_what_pulumi_left(self) -> None:
        while left := [pid for pid in self.pulumis() if is_alive(pid)]:
            for pid in left:
                end(pid)

    # --- what a person does next -------------------------------------------------------------------------------------

    def finish(self, outcome: Outcome) -> None:
        """One `up` that nothing breaks, and a preview that finds nothing more to do."""
        planned = outcome.round
        if planned.gives_up:
            self.declare(planned.end)
            run = self.up(outcome, "--refresh")
        elif planned.change == "bad":
            run = self.up(outcome)
            if run.code == 0 or REFUSED not in run.output:
                outcome.faults.append("an adapter that the engine refuses was not told: " + last_lines(run.output))
            if not self.serves():
                outcome.faults.append("after the failed `up` nothing serves")
            self.declare(planned.end)
            run = self.up(outcome)
        else:
            run = self.up(outcome)
        if run.code != 0:
            outcome.faults.append("the next `up` failed: " + last_lines(run.output))
            self.up(outcome, "--refresh")  # so that the rounds after this one mean something
            return
        # An engine that was killed at the end is started again by systemd, in its own time.
        if not self.serves():
            outcome.faults.append("after the next `up` nothing serves")
        preview = self.client.stack.preview("--refresh", "--expect-no-changes", fails=None)
        outcome.converged = preview.code == 0
        if preview.code != 0:
            outcome.faults.append("a further preview has more to do: " + last_lines(preview.output))
            self.up(outcome, "--refresh")

    def up(self, outcome: Outcome, *arguments: str) -> Run:
        run = self.client.stack.up(*arguments, fails=None)
        if run.code != 0 and "the stack is currently locked" in run.output:
            outcome.cancelled = True
            self.client.stack.pulumi("cancel", "--yes", STACK)
            run = self.client.stack.up(*arguments, fails=None)
        return run

    # --- what is looked at -------------------------------------------------------------------------------------------

    def settle(self) -> None:
        """Until nobody works on the pod any more."""
        wait_for(lambda: "podctl" not in self.processes(), PATIENCE)

    def processes(self) -> str:
        return self.machine.run("sh", "-c", "cat /proc/[0-9]*/cmdline 2>/dev/null | tr '\\0' ' '", check=False)

    def serves(self) -> bool:
        moment = time.time()
        try:
            wait_for(lambda: self.witness.answered_since(moment), 30)
        except AssertionError:
            return False
        return True

    def look_at_what_is_left(self, outcome: Outcome) -> None:
        """After the fault, before anybody mends anything."""
        self.settle()
        planned = outcome.round
        outcome.faults += [f"after the fault: {fault}" for fault in halves(self.look())]
        # A bad engine that nobody is left to take back is tried over and over until the next `up`.
        nobody_left = planned.change == "bad" and planned.fault in ("podctl", "the pod")
        if not nobody_left and not self.serves():
            outcome.faults.append("after the fault nothing serves")

    def look(self, *key: str) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(
            self.machine.run("python3", f"{ON_POD}/look_on_pod.py", ROOT, UNIT, STACK, *key)
        )
        return found

    def look_at_the_end(self, outcome: Outcome) -> None:
        """After the next `up`, all is as declared and nothing else is there."""
        declared = outcome.round.end
        found = self.look(api_key(declared.api_key))
        outcome.faults += halves(found)
        outcome.faults += self.others_than_declared(declared, found)
        outcome.faults += [f"left behind: {path}" for path in left_behind(outcome.round, found)]

    def others_than_declared(self, declared: Declared, found: Mapping[str, Any]) -> Iterator[str]:
        if set(found["refs"]) != set(declared.adapters):
            yield f"references to {sorted(found['refs'])} instead of {sorted(declared.adapters)}"
        if set(found["served"]) != {BASE, *declared.adapters}:
            yield f"{sorted(found['served'])} is served instead of {sorted(declared.adapters)}"
        for model, adapter in declared.adapters.items():
            if f"weights={self.weights[adapter]} " not in found["served"].get(model, ""):
                yield f"{model} is served from other weights than declared"
        argv = found["argv"]
        if argv[argv.index("--max-model-len") + 1] != str(declared.max_model_len):
            yield "the engine has other flags than declared"
        if declared.vllm and f"vllm-{declared.vllm}" not in argv[0]:
            yield f"the engine is {argv[0]} instead of vLLM {declared.vllm}"

    def hear(self, outcome: Outcome, began: float) -> None:
        """Hold the client's answers against the journal."""
        self.read_journal(began - 5)
        times = servings(self.journal.values(), self.kills, UNIT)
        outcome.restarts = len([each for each in times if each.since > began])
        planned = outcome.round
        right = {BASE: ["none"]}
        for model in planned.before.adapters.keys() & planned.after.adapters.keys():
            both = {planned.before.adapters[model], planned.after.adapters[model]}
            right[model] = [self.weights[adapter] for adapter in both if not adapter.bad]
        outcome.told = judged(times, [each for each in self.witness.taken() if each.model in right], right)
        outcome.faults += [f"lost: {each}" for each in outcome.told.lost[:3]]

    def read_journal(self, since: float) -> None:
        """What the engine and systemd wrote of it; not what it wrote of each request."""
        fields = "MESSAGE,MESSAGE_ID,UNIT,_PID,_SYSTEMD_UNIT,_SOURCE_REALTIME_TIMESTAMP"
        asked = f"journalctl --output=json --output-fields={fields} --no-pager --since=@{since:.0f}"
        told = self.machine.run(
            "sh",
            "-c",
            f"{asked} _SYSTEMD_UNIT={UNIT} + UNIT={UNIT} | grep -e {LISTENS.split()[0]} -e MESSAGE_ID || true",
        )
        for entry in map(json.loads, told.splitlines()):
            self.journal[entry["__CURSOR"]] = entry


def halves(found: Mapping[str, Any]) -> Iterator[str]:
    """What is there by half, or is referred to and not there, or has other bytes than it should."""
    unit, blobs = found["unit"], set(found["blobs"])
    if unit and not unit.endswith("[Install]\nWantedBy=multi-user.target\n"):
        yield f"half a unit: it ends with {unit[-40:]!r}"
    held = {model: {digest_in(text)} for model, text in found["refs"].items()}
    for who, digests in (*held.items(), ("the unit", set(BLOB.findall(unit)))):
        for digest in digests - blobs:
            yield f"{who} refers to {digest[:12]}, which is not there"
    if "failed" in found["verified"]:
        yield f"podctl verify failed: {found['verified']['failed']}"
    for what in ("rotten", "strays"):
        for name in found["verified"].get(what, ()):
            yield f"{what} on the pod: {name}"


def left_behind(planned: Round, found: Mapping[str, Any]) -> Iterator[str]:
    """What nothing needs any more. An upload that was given up, and what was promised to it, is kept for a week."""
    held = {digest_in(text) for text in found["refs"].values()}
    given_up = planned.gives_up or planned.change == "bad"
    for name in found["staging"]:
        if not given_up or (name.split(".")[0] in held and not name.endswith(".claim")):
            yield f"staging/{name}"
    yield from (f"staging/{name}, after a week" for name in found["stagingAfterAWeek"])
    kept = found["generations"]
    needed = held.union(*(each["blobs"] for each in kept.values()))
    promised = {name.split(".")[0] for name in found["staging"] if name.endswith(".claim")}
    yield from (f"blob {name[:12]}" for name in found["blobs"] if name not in needed | promised)
    yield from (f"blob {name[:12]}, after a week" for name in found["blobsAfterAWeek"] if name not in needed)
    yield from found["hidden"]
    yield from (f"venvs/{name}" for name in found["building"])
    if len(kept) > 3 or not all(each["proven"] for each in kept.values()):
        yield f"generations {kept}"


def digest_in(reference: str) -> str:
    return str(json.loads(reference)["digest"]).removeprefix("sha256:")


def api_key(number: int) -> str:
    return f"key-{number}-{hashlib.sha256(str(number).encode()).hexdigest()[:16]}"


def end(pid: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def is_alive(pid: int) -> bool:
    """Not one that has ended and was not waited for."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def last_lines(said: str) -> str:
    kept = [line.strip() for line in said.splitlines() if line.strip()]
    return " | ".join(line for line in kept if "error" in line.lower() or line in kept[-4:])[:1500]
