"""Bundles from a store, by URLs that are secrets."""

from __future__ import annotations

import contextlib
import math
import re
import threading
import time
from typing import Any, Dict, Iterator, List, NamedTuple, Optional, Sequence

from . import blobs, files, part, receiving, waiting
from .documents import Document, field
from .names import hex_of
from .said import GO_ON, Refusal, human, say
from .store import Store

FETCHES = 4  # bundles that come from a store at the same time
CONNECT_SECONDS = 20.0
STALL_SECONDS = 60.0  # a store that sends less than SLOWEST bytes in these is not waited for
SLOWEST = 64 * 1024
BUSY = (408, 429, 500, 502, 503, 504)  # what a store may answer now and not a moment later


class Wanted(NamedTuple):
    """A bundle in a store. Its URL opens the object to whoever has it; `name` is what it is called."""

    hexdigest: str
    size: int
    name: str
    url: Any

    @classmethod
    def of(cls, document: Document) -> "Wanted":
        from urllib.parse import urlsplit

        hexdigest, size = hex_of(field(document, "digest", str)), field(document, "size", int)
        name, text = field(document, "name", str), field(document, "url", str)
        if size <= 0:
            raise Refusal("the document's size of %s must be a number of bytes" % name)
        try:
            url = urlsplit(text)
            sound = url.scheme in ("http", "https") and bool(url.hostname) and url.port != 0
        except ValueError:
            sound = False
        # http.client puts a URL with other characters into the text of its error.
        if not sound or "@" in url.netloc or not re.fullmatch(r"[!-~]+", text):
            raise Refusal("the document's url of %s is not an http or https URL" % name)
        return cls(hexdigest, size, name, url)

    @property
    def host(self) -> str:
        return str(self.url.netloc)


class Unfetched(Exception):
    """Why a bundle does not come: what is said of it, or (`of_all`) a sentence that holds for all others too."""

    def __init__(self, why: str, of_all: bool = False) -> None:
        super().__init__(why)
        self.of_all = of_all


class Cut(Exception):
    """What may go better the next time, and what to do when it never does."""

    def __init__(self, what: str, advice: str) -> None:
        super().__init__(what)
        self.advice = advice


class Interrupted(Exception):
    """Nobody waits for the bundles any more."""


class Line:
    """One worker's connection, which the watcher can end: a timeout of a socket's is for each read alone, and one byte
    now and then would never end."""

    def __init__(self) -> None:
        self.sock: Any = None
        self.due = math.inf
        self.taken = 0

    def moves(self) -> None:
        self.due = time.monotonic() + STALL_SECONDS

    def end(self) -> None:
        import socket

        sock = self.sock
        if sock is not None:
            with contextlib.suppress(OSError):
                # Not the method of an SSLSocket, which takes from under the reader what it reads with.
                socket.socket.shutdown(sock, socket.SHUT_RDWR)


class Body:
    """The bytes of an answer, read as they come: what is there when a connection is cut is kept."""

    def __init__(self, response: Any, host: str, line: Line) -> None:
        self.response, self.host, self.line = response, host, line
        self.unmarked = 0

    def readinto(self, view: memoryview) -> int:
        with network_faults(self.host, self.line):
            count = int(self.response.readinto1(view))
        self.line.taken += count
        self.unmarked += count
        if self.unmarked >= SLOWEST:
            self.line.moves()
            self.unmarked = 0
        return count


@contextlib.contextmanager
def network_faults(host: str, line: Line) -> Iterator[None]:
    """Makes a cut of what the network does to a connection that stands."""
    import http.client
    import socket

    try:
        yield
    except socket.timeout:
        raise stalled(host) from None
    except (OSError, http.client.IncompleteRead):
        raise ended(host, line) from None
    except http.client.HTTPException:
        raise Cut("%s answers something other than HTTP" % host, IS_IT_S3) from None


IS_IT_S3 = "is it the S3 service that lora-pods:store names?"


def stalled(host: str) -> Cut:
    return Cut("%s sends nothing, or next to nothing, for %d seconds" % (host, STALL_SECONDS), GO_ON)


def ended(host: str, line: Line) -> Cut:
    if time.monotonic() >= line.due:
        return stalled(host)  # the watcher cut it
    return Cut("the connection to %s was cut" % host, GO_ON)


class Fetches:
    """Bundles on their way from a store, several at a time, each on a thread of its own; the caller's watches them."""

    def __init__(self, store: Store, wanted: Sequence[Wanted]) -> None:
        import ssl

        self.store = store
        self.wanted = wanted
        self.left = list(reversed(wanted))
        self.fetched: Dict[str, int] = {}
        self.faults: Dict[str, List[str]] = {}  # what is said -> of which objects; of none where it holds for all
        self.error: Optional[BaseException] = None
        self.interrupted = threading.Event()
        self.unpacking = threading.Lock()  # none of these waits for another as for another podctl
        self.trusted = ssl.create_default_context()  # the system's authorities

    def run(self) -> Dict[str, int]:
        """-> the bytes that came of each. What came is kept, also where others did not: those are told together."""
        lines = [Line() for _ in self.wanted[:FETCHES]]
        workers = [threading.Thread(target=self.work, args=(line,), daemon=True) for line in lines]
        for worker in workers:
            worker.start()
        self.watch(workers, lines)
        if self.error is not None:
            raise self.error
        if self.interrupted.is_set():
            raise Refusal("the run that wanted the bundles was interrupted: what arrived of them is kept")
        if self.faults:
            faults = sorted(self.sentences())
            if len(faults) == 1:
                raise Refusal(faults[0])
            raise Refusal("not every bundle could be fetched:", ["- " + fault for fault in faults])
        return self.fetched

    def watch(self, workers: Sequence[threading.Thread], lines: Sequence[Line]) -> None:
        due = time.monotonic() + waiting.SAY_SECONDS
        over = math.inf
        now = time.monotonic()
        while now < over:
            at_work = [worker for worker in workers if worker.is_alive()]
            if not at_work:
                return
            at_work[0].join(waiting.POLL_SECONDS)
            now = time.monotonic()
            if not self.interrupted.is_set() and waiting.deserted():
                self.interrupted.set()
                over = now + CONNECT_SECONDS  # who waits for a lock, or for a name's address, cannot be woken
            for line in lines:
                if now >= line.due or self.interrupted.is_set():
                    line.end()
            if now > due:
                taken = sum(line.taken for line in lines)
                say("%d of %d bundles are here, %s came" % (len(self.fetched), len(self.wanted), human(taken)))
                due = now + waiting.SAY_SECONDS

    def sentences(self) -> Iterator[str]:
        for why, names in self.faults.items():
            more = " and %d more" % (len(names) - 3) if len(names) > 3 else ""
            yield "%s%s: %s" % (", ".join(sorted(names)[:3]), more, why) if names else why

    def work(self, line: Line) -> None:
        while not self.interrupted.is_set():
            try:
                wanted = self.left.pop()
            except IndexError:
                return
            before = line.taken
            try:
                if self.fetch(wanted, line):
                    say("sha256:%s is here (%s)" % (wanted.hexdigest, human(wanted.size)))
                self.fetched["sha256:" + wanted.hexdigest] = line.taken - before
            except Interrupted:
                return
            except Unfetched as fault:
                names = self.faults.setdefault(str(fault), [])
                if fault.of_all:
                    self.left.clear()
                else:
                    names.append(wanted.name)
            except Refusal as refusal:  # of the lock, or of what came
                self.faults.setdefault(str(refusal), [])
            except BaseException as error:
                self.left.clear()
                said = files.of_the_disk(self.store.root, error)
                if said:
                    self.faults.setdefault(said, [])
                else:
                    self.error = error

    def fetch(self, wanted: Wanted, line: Line) -> bool:
        """Takes one bundle into the part that `receive-all` takes it into, and makes its blob. -> False: it was here"""
        hexdigest = wanted.hexdigest
        with self.store.hold("fetch", self.store.staged(hexdigest, ".lock")):
            if receiving.is_here(self.store, hexdigest, wanted.size):
                return False
            while True:
                with part.opened(self.store, hexdigest, wanted.size) as arriving:
                    kept = part.arrived(self.store, hexdigest, wanted.size)
                    arriving.begin(kept)
                    try:
                        self.complete(arriving, wanted, line)
                    except (Unfetched, Interrupted):
                        arriving.keep()
                        raise
                if arriving.is_right():
                    with self.unpacking:
                        blobs.unpack_arrived(self.store, hexdigest, wanted.size)
                    return True
                if not kept:
                    raise Unfetched(
                        "its bytes are not those that its name says (they have the digest sha256:%s) and are thrown "
                        "away: remove the object, then run `lora push`" % arriving.digest.hexdigest()
                    )
                # What an earlier run left may be what was wrong: the object is judged by its own bytes.

    def complete(self, arriving: part.Part, wanted: Wanted, line: Line) -> None:
        """Takes what is not here yet, with more tries after what may pass. Tries that bring much do not count."""
        failures, farthest, whole = 0, arriving.at, False
        while arriving.at < wanted.size:
            try:
                self.ask(arriving, wanted, line, 0 if whole else arriving.at)
            except Cut as cut:
                if self.interrupted.is_set():
                    raise Interrupted from None
                whole = whole or isinstance(cut, OtherRange)
                if arriving.at >= farthest + files.PIECE:
                    failures, farthest = 0, arriving.at
                if failures == len(waiting.PAUSES):
                    raise Unfetched("%s: %s" % (cut, cut.advice), of_all=True) from None
                say("%s: trying again in %d s" % (cut, waiting.PAUSES[failures]))
                if self.interrupted.wait(waiting.PAUSES[failures]):
                    raise Interrupted from None
                failures += 1

    def ask(self, arriving: part.Part, wanted: Wanted, line: Line, offset: int) -> None:
        """Asks for the bytes after `offset`, once, and takes what comes, never more than the bundle has."""
        connection = self.connected(wanted)
        try:
            line.sock = connection.sock
            line.sock.settimeout(STALL_SECONDS)
            line.moves()
            url = wanted.url
            headers = {"Connection": "close", **({"Range": "bytes=%d-" % offset} if offset else {})}
            with network_faults(wanted.host, line):
                connection.request("GET", (url.path or "/") + ("?" + url.query if url.query else ""), headers=headers)
                response = connection.getresponse()
            line.moves()
            check_answer(response, wanted, offset)
            if response.status == 200 and arriving.at:
                arriving.begin(0)  # it was not asked for less, or gives no less
            body = Body(response, wanted.host, line)
            receiving.pump(body, arriving, wanted.size - arriving.at)
            if arriving.at < wanted.size:
                raise ended(wanted.host, line)
            more = 0
            with contextlib.suppress(Cut):
                more = body.readinto(memoryview(bytearray(1)))
            if more:
                arriving.begin(0)
                raise altered(wanted, "more than %d" % wanted.size)
        finally:
            line.end()  # an answer that was not read to its end would hold the connection open for a while
            line.sock, line.due = None, math.inf
            connection.close()

    def connected(self, wanted: Wanted) -> Any:
        """A connection to the store.

        HTTPS goes through the environment's proxy, as the downloads of `prepare` do: it sees the host alone. HTTP,
        which is for stores on a network of their own, does not: its proxy would read the URL.
        """
        import http.client
        import socket
        import ssl

        url, host = wanted.url, wanted.host
        proxy = https_proxy(host) if url.scheme == "https" else None
        target, port, to = url.hostname, url.port, host
        if proxy is not None:
            target, port = proxy.hostname, proxy.port or 80
            to = "%s through the proxy %s:%d" % (host, target, port)
        connection: http.client.HTTPConnection
        if url.scheme == "https":
            connection = http.client.HTTPSConnection(target, port, timeout=CONNECT_SECONDS, context=self.trusted)
            if proxy is not None:
                connection.set_tunnel(url.hostname, url.port or 443, proxy_headers(proxy))
        else:
            connection = http.client.HTTPConnection(target, port, timeout=CONNECT_SECONDS)
        access = (
            "it needs %s access to the store; open that (security group, firewall, proxy), or correct the endpoint in "
            "lora-pods:store" % url.scheme.upper()
        )
        try:
            connection.connect()
        except ssl.SSLCertVerificationError as error:
            raise Unfetched(
                "this pod does not trust the certificate of %s (%s): install the system's CA certificates there "
                "(package ca-certificates), add to them the authority of a store of your own, and check the pod's clock"
                % (host, error.verify_message),
                of_all=True,
            ) from None
        except socket.gaierror as error:
            what = "this pod cannot find the address of %s (%s)" % (target, error.strerror)
            if error.errno == socket.EAI_AGAIN:
                raise Cut(what, access) from None
            raise Unfetched("%s: %s" % (what, access), of_all=True) from None
        except socket.timeout:
            raise Cut("this pod cannot connect to %s within %d seconds" % (to, CONNECT_SECONDS), access) from None
        except ssl.SSLError as error:
            what = "this pod cannot speak TLS with %s (%s)" % (to, error.reason or "the connection was cut")
            if isinstance(error, (ssl.SSLEOFError, ssl.SSLZeroReturnError)):
                raise Cut(what, access) from None
            raise Unfetched("%s: %s" % (what, access), of_all=True) from None
        except (OSError, http.client.HTTPException) as error:
            said = re.match(r"Tunnel connection failed: (\d{3})", str(error))
            why = "the proxy answers %s" % said.group(1) if said else getattr(error, "strerror", None)
            raise Cut("this pod cannot connect to %s (%s)" % (to, why or type(error).__name__), access) from None
        return connection


def https_proxy(host: str) -> Any:
    """The proxy that the environment has for HTTPS to `host`, None if none."""
    from urllib.parse import urlsplit
    from urllib.request import getproxies, proxy_bypass

    proxy = getproxies().get("https")
    if not proxy or proxy_bypass(host):
        return None
    try:
        url = urlsplit(proxy if "://" in proxy else "http://" + proxy)
        sound = url.scheme == "http" and bool(url.hostname) and url.port != 0
    except ValueError:
        sound = False
    if not sound:
        raise Unfetched("https_proxy in this pod's environment is not http://HOST:PORT: correct it there", of_all=True)
    return url


def proxy_headers(proxy: Any) -> Dict[str, str]:
    import base64
    from urllib.parse import unquote

    if proxy.username is None:
        return {}
    pair = "%s:%s" % (unquote(proxy.username), unquote(proxy.password or ""))
    return {"Proxy-Authorization": "Basic " + base64.b64encode(pair.encode("utf-8")).decode("ascii")}


class OtherRange(Cut):
    """Other bytes than those that were asked for: the next try asks for all of them."""


def altered(wanted: Wanted, size: str) -> Unfetched:
    return Unfetched(
        "it has %s bytes in the store where %d were pushed: it was altered; remove the object, then run `lora push`"
        % (size, wanted.size)
    )


def check_answer(response: Any, wanted: Wanted, offset: int) -> None:
    """Whether what follows an answer's head are the bytes after `offset`, or (200) all of them."""
    given = re.fullmatch(r"bytes (?:(\d{1,19})-(\d{1,19})|\*)/(\d{1,19}|\*)", response.getheader("Content-Range") or "")
    if response.status == 200:
        if response.length not in (None, wanted.size):
            raise altered(wanted, "%d" % response.length)
        return
    if response.status in (206, 416) and given and given.group(3) not in ("*", "%d" % wanted.size):
        raise altered(wanted, given.group(3))
    if response.status == 206:
        if not offset or not given or given.groups()[:2] != ("%d" % offset, "%d" % (wanted.size - 1)):
            raise OtherRange(
                "%s answers with other bytes than it was asked for" % wanted.host,
                "is there a proxy before it that changes what it sends?",
            )
        return
    text = b""
    with contextlib.suppress(Exception):  # what it says is of use, and no more
        text = response.read(SLOWEST)
    raise_answer(response, text.decode("utf-8", "replace"), wanted)


def raise_answer(response: Any, text: str, wanted: Wanted) -> None:
    """Says what an S3 answered instead of an object. Of its text only its code: the rest may repeat the request."""
    code = (re.findall(r"<Code>([A-Za-z.]{1,60})</Code>", text) or [""])[0]
    message = (re.findall(r"<Message>([^<]{1,400})</Message>", text) or [""])[0].lower()
    said = ("%d %s" % (response.status, code)).strip()
    if response.status in BUSY or code in ("SlowDown", "RequestTimeout"):
        raise Cut("%s answers %s" % (wanted.host, said), "it is busy or out of order; when it is not, " + GO_ON)
    regions = [response.getheader("x-amz-bucket-region") or "", *re.findall(r"<Region>([^<]+)</Region>", text)]
    regions = [region for region in regions if re.fullmatch(r"[a-z0-9-]{1,40}", region)]
    if response.status in (301, 302, 303, 307, 308) or (response.status == 400 and regions):
        region = regions[0] if regions else "…"
        raise Unfetched(
            "%s sends this pod elsewhere (%s), where the link to it does not count: name the bucket's region in "
            "lora-pods:store (?region=%s)" % (wanted.host, said, region)
        )
    if response.status == 404 and code == "NoSuchBucket":
        raise Unfetched("its bucket does not exist: correct lora-pods:store, or make the bucket and run `lora push`")
    if response.status in (404, 410):
        raise Unfetched("the store has no such object: run `lora push` where the adapter is, then pulumi up again")
    if response.status == 416:
        raise altered(wanted, "fewer")
    if code == "ExpiredToken":
        raise Unfetched(
            "the credentials that its link was made with have ended: log in anew on the machine that runs pulumi, and "
            + GO_ON
        )
    if "request has expired" in message:
        raise Unfetched(
            "the link to it is over (%s): the clock of the machine that runs pulumi is behind, or this took too long; "
            "set the clock right there, and %s" % (said, GO_ON)
        )
    if code == "RequestTimeTooSkewed" or re.search("not (yet valid|valid yet)", message):
        raise Unfetched(
            "the link to it is not valid yet (%s): the clock of the machine that runs pulumi is ahead; set it right "
            "there, and %s" % (said, GO_ON)
        )
    if code in ("InvalidAccessKeyId", "SignatureDoesNotMatch", "InvalidToken", "InvalidTokenId"):
        raise Unfetched(
            "the store does not take the credentials that its link was made with (%s): correct them on the machine "
            "that runs pulumi, and %s" % (said, GO_ON)
        )
    if code == "InvalidObjectState":
        raise Unfetched(
            "it lies in an archive (%s): restore it, and keep the bucket's lifecycle rules from what is pushed" % said
        )
    if "kms:decrypt" in message:
        raise Unfetched(
            "the store does not give it (%s): the credentials on the machine that runs pulumi need kms:Decrypt on the "
            "key that it is encrypted with" % said
        )
    if response.status in (401, 403):
        raise Unfetched(
            "the store does not give it (%s): the credentials on the machine that runs pulumi need s3:GetObject for "
            "it, and s3:ListBucket, without which an object that is not there looks the same" % said
        )
    raise Unfetched("%s answers %s: %s" % (wanted.host, said, IS_IT_S3))


def verb_fetch(store: Store, document: Document) -> Document:
    """Takes bundles from a store, by URLs that are secrets: no answer, no line and no file holds one."""
    wanted: Dict[str, Wanted] = {}
    for bundle in field(document, "bundles", list):
        one = Wanted.of(bundle)
        wanted.setdefault(one.hexdigest, one)
    store.make_staging()
    receiving.check_room(store, {one.hexdigest: one.size for one in wanted.values()})
    return {"fetched": Fetches(store, list(wanted.values())).run()}
