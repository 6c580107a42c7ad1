"""What can go wrong with a store, each as one sentence that says what to do."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import boto3
import pytest
from botocore import exceptions

from components.core.errors import UserError
from components.store import BundleStore
from components.store_errors import _TABLE, ATTEMPTS, sentence
from components.store_url import StoreUrl, parse_store_url
from tests.cloud.test_store import SMALL, URL, digest_of, put
from tests.cloud.wire import Hook, Wire, broken, error
from tests.support.s3 import BUCKET, ENVIRONMENT, s3_service

PLACE = f"s3://{BUCKET}/team"
OBJECTS = f"arn:aws:s3:::{BUCKET}/team/sha256/*"
LOOK = (
    f"no permission: the credentials' policy must allow s3:GetObject on {OBJECTS}, and s3:ListBucket on "
    f"arn:aws:s3:::{BUCKET}, without which S3 answers so for an object that is merely absent"
)
EXPIRED = "the credentials have expired; renew them, with `aws sso login` or whatever gave them, and run it again"
FAILED = (
    f"the service failed by itself (500), {ATTEMPTS} times, or is no S3 service; correct the endpoint in "
    "lora-pods:store, or run it again later"
)
SLOW = f"the service asks to slow down, {ATTEMPTS} times; run it again in some minutes"
BROKEN = f"the connection broke, {ATTEMPTS} times; run it again when the network is better"
UNREACHABLE = (
    "{host} cannot be reached; is the network up, and are the region and the endpoint in lora-pods:store right?"
)
HOST = f"{BUCKET}.s3.amazonaws.com"
USER = "User: arn:aws:iam::123456789012:user/ci is not authorized to perform: "


def sentence_of(action: Callable[[], object]) -> str:
    with pytest.raises(UserError) as told:
        action()
    text = str(told.value)
    assert "\n" not in text
    assert not any(
        secret in text for secret in ("CANARY", "?X-Amz", "Signature=", *(ENVIRONMENT[key] for key in SECRETS))
    )
    return text


CANARY = "CANARYwJalrXUtnFEMI/K7MDENG/bPxRfiCYEXAMPLEKEY"
SECRETS = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY")


@pytest.fixture
def bucket(wire: Wire) -> None:
    boto3.Session().client("s3").create_bucket(Bucket=BUCKET)
    wire.clear()


# --- answers, as they come to the HEAD with which everything begins -----------------------------------------


@pytest.mark.parametrize(
    ("fault", "told"),
    [
        (error("AccessDenied", 403, "Access Denied"), LOOK),
        (
            error("AccessDenied", 403, f'{USER}s3:ListBucket on resource: "arn:aws:s3:::{BUCKET}" because no policy'),
            f"no permission: the credentials' policy must allow s3:ListBucket on arn:aws:s3:::{BUCKET}, without which "
            "S3 answers so for an object that is merely absent",
        ),
        (
            error("AccessDenied", 403, f'{USER}s3:GetObject on resource: "arn:aws:s3:::{BUCKET}/k" because no policy'),
            f"no permission: the credentials' policy must allow s3:GetObject on arn:aws:s3:::{BUCKET}/k",
        ),
        (
            error("AccessDenied", 403, f'{USER}kms:Decrypt on resource: "arn:aws:kms:k" with an explicit deny'),
            "no permission: a policy denies kms:Decrypt on arn:aws:kms:k; take that out of it",
        ),
        (
            error("NoSuchBucket", 404, "The specified bucket does not exist"),
            "there is no such bucket; create it, or correct lora-pods:store",
        ),
        (
            error("AuthorizationHeaderMalformed", 400, extra="<Region>eu-west-1</Region>"),
            "the bucket is in the region eu-west-1; put that into lora-pods:store, as ?region=…",
        ),
        (
            error("PermanentRedirect", 301, x_amz_bucket_region="eu-west-1"),
            "the bucket is in the region eu-west-1; put that into lora-pods:store, as ?region=…",
        ),
        (
            error("PermanentRedirect", 301),
            "the bucket is in another region than boto3's default; put that into lora-pods:store, as ?region=…",
        ),
        (error("ExpiredToken", 400, "The provided token has expired."), EXPIRED),
        (error("InvalidToken", 400), EXPIRED),
        (
            error("InvalidAccessKeyId", 403, "The AWS Access Key Id you provided does not exist in our records."),
            "the service does not know the access key: it was deleted, or is another service's; give boto3 one of its "
            "own",
        ),
        (
            error("SignatureDoesNotMatch", 403),
            "the secret key does not belong to the access key; give boto3 both anew, as they were issued",
        ),
        (
            error("RequestTimeTooSkewed", 403),
            "this machine's clock is off by more than a quarter of an hour; set it (`timedatectl set-ntp true`), and "
            "run it again",
        ),
        (error("SlowDown", 503, "Please reduce your request rate."), SLOW),
        (error("TooManyRequestsException", 429), SLOW),
        (
            error("InternalError", 500),
            FAILED,
        ),
        (
            error("MethodNotAllowed", 405),
            "what answers there is no S3 service; correct the endpoint in lora-pods:store",
        ),
        (
            error("InvalidObjectState", 403, "see https://x.example/?X-Amz-Signature=1 of AKIAIOSFODNN7EXAMPLE."),
            "GetObject failed with InvalidObjectState: see … of …",
        ),
        *(
            (error(code, 400, f"{{Authorization: {CANARY}, X-Token: CANARY}}"), f"GetObject failed with {shown}")
            for code, shown in (("Odd", "Odd"), ("CANARY: x-amz-y", "HTTP status 400"))
        ),
        (
            error("InvalidRequest", 400, f"the key {CANARY} is\xa0odd"),
            r"GetObject failed with InvalidRequest: the key … is\xa0odd",
        ),
        (broken(exceptions.EndpointConnectionError), UNREACHABLE.format(host=HOST)),
        (broken(exceptions.ConnectTimeoutError), UNREACHABLE.format(host=HOST)),
        (broken(exceptions.ReadTimeoutError), BROKEN),
        (broken(exceptions.ConnectionClosedError), BROKEN),
    ],
)  # fmt: skip
def test_what_the_first_look_may_meet(wire: Wire, bucket: None, fault: Hook, told: str) -> None:
    for operation in ("HeadObject", "GetObject", "PutObject"):
        wire.then(operation, fault, times=99)
    assert sentence_of(lambda: put(BundleStore(URL), SMALL)) == f"{PLACE}: {told}"
    assert sentence_of(lambda: BundleStore(URL).size(digest_of(SMALL))) == f"{PLACE}: {told}"


def test_a_service_that_is_busy_is_asked_a_few_times_and_then_left_alone(wire: Wire, bucket: None) -> None:
    wire.then("HeadObject", error("SlowDown", 503), times=99)
    sentence_of(lambda: put(BundleStore(URL), SMALL))
    assert wire.calls == ["HeadObject"] * ATTEMPTS
    assert len(wire.waits) == ATTEMPTS - 1


def test_an_absent_object_that_may_not_be_listed_is_told_before_anything_is_sent(wire: Wire, bucket: None) -> None:
    for operation in ("HeadObject", "GetObject"):
        wire.then(operation, error("AccessDenied", 403))
    assert sentence_of(lambda: put(BundleStore(URL), SMALL)) == f"{PLACE}: {LOOK}"
    assert wire.calls == ["HeadObject", "GetObject"]


def test_a_head_that_is_refused_where_a_get_is_not_is_no_fault(wire: Wire, bucket: None) -> None:
    store = BundleStore(URL)
    put(store, SMALL)
    wire.then("HeadObject", error("AccessDenied", 403), times=2)
    assert store.size(digest_of(SMALL)) == len(SMALL)
    assert put(store, SMALL) is False


def test_an_empty_object_is_one_of_another_size(wire: Wire, bucket: None) -> None:
    wire.then("HeadObject", error("AccessDenied", 403))
    wire.then("GetObject", error("InvalidRange", 416))
    assert BundleStore(URL).size(digest_of(SMALL)) == 0


# --- answers to what changes something ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fault", "told"),
    [
        (error("AccessDenied", 403), f"no permission: the credentials' policy must allow s3:PutObject on {OBJECTS}"),
        (
            error("AccessDenied", 403, f'{USER}kms:GenerateDataKey on resource: "arn:aws:kms:eu:1:key/2" because'),
            "no permission: the credentials' policy must allow kms:GenerateDataKey on arn:aws:kms:eu:1:key/2",
        ),
        (error("NoSuchBucket", 404), "there is no such bucket; create it, or correct lora-pods:store"),
        *(
            (
                error(code, 400),
                f"what arrived is not what was sent ({code}), so it was not stored; run it again, and if that does not "
                "help, look for what changes bytes on the way: a proxy, a fault of memory",
            )
            for code in ("BadDigest", "XAmzContentChecksumMismatch", "XAmzContentSHA256Mismatch")
        ),
        (
            error("InvalidRequest", 400, "Value for x-amz-checksum-sha256 header is invalid."),
            "the service refuses the SHA-256 checksum of what was sent (InvalidRequest: Value for "
            "x-amz-checksum-sha256 header is invalid), so nothing was stored; use one that knows x-amz-checksum-sha256",
        ),
        (
            error("InvalidRequest", 400, "Missing something \u202eelse."),
            r"PutObject failed with InvalidRequest: Missing something \u202eelse",
        ),
        (
            error("NotImplemented", 501, "A header you provided implies functionality that is not implemented."),
            "the service cannot do what is needed here (PutObject: A header you provided implies functionality that is "
            "not implemented); use one that knows multipart uploads and x-amz-checksum-sha256",
        ),
        (error("ServiceUnavailable", 503), SLOW),
    ],
)  # fmt: skip
def test_what_an_upload_may_meet(wire: Wire, bucket: None, fault: Hook, told: str) -> None:
    wire.then("PutObject", fault, times=9)
    assert sentence_of(lambda: put(BundleStore(URL), SMALL)) == f"{PLACE}: {told}"
    assert BundleStore(URL).size(digest_of(SMALL)) is None


@pytest.mark.parametrize(
    ("operation", "action", "told"),
    [
        ("ListObjectsV2", lambda store: list(store.stored()), f"s3:ListBucket on arn:aws:s3:::{BUCKET}"),
        (
            "ListMultipartUploads",
            lambda store: list(store.unfinished()),
            f"s3:ListBucketMultipartUploads on arn:aws:s3:::{BUCKET}",
        ),
        ("DeleteObjects", lambda store: store.remove([digest_of(SMALL)]), f"s3:DeleteObject on {OBJECTS}"),
    ],
)
def test_each_thing_says_which_permission_it_takes(
    wire: Wire, bucket: None, operation: str, action: Callable[[BundleStore], object], told: str
) -> None:
    wire.then(operation, error("AccessDenied", 403))
    said = sentence_of(lambda: action(BundleStore(URL)))
    assert said == f"{PLACE}: no permission: the credentials' policy must allow {told}"


def test_a_role_that_may_not_be_assumed(wire: Wire) -> None:
    message = f"{USER}sts:AssumeRole on resource: arn:aws:iam::123456789012:role/deploy"
    denied = exceptions.ClientError({"Error": {"Code": "AccessDenied", "Message": message}}, "AssumeRole")
    assert sentence(URL, denied) == (
        f"{PLACE}: no permission: the credentials' policy must allow sts:AssumeRole on "
        "arn:aws:iam::123456789012:role/deploy"
    )


# --- credentials, as this machine has them ------------------------------------------------------------------


def without_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in SECRETS:
        monkeypatch.delenv(name)


def configured(monkeypatch: pytest.MonkeyPatch, folder: Path, text: str) -> None:
    (folder / "config").write_text(text, encoding="utf-8")
    monkeypatch.setenv("AWS_CONFIG_FILE", str(folder / "config"))


NO_CREDENTIALS = (
    f"{PLACE}: boto3 finds no credentials; set AWS_PROFILE, or AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or name a "
    "profile in lora-pods:store, as ?profile=…"
)


def test_no_credentials(monkeypatch: pytest.MonkeyPatch) -> None:
    without_keys(monkeypatch)
    assert sentence_of(lambda: BundleStore(URL).size(digest_of(SMALL))) == NO_CREDENTIALS
    assert sentence_of(lambda: BundleStore(URL).presigned(digest_of(SMALL))) == NO_CREDENTIALS


def test_half_of_the_credentials(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    assert sentence_of(lambda: BundleStore(URL).size(digest_of(SMALL))) == (
        f"{PLACE}: half of the credentials is missing (AWS_SECRET_ACCESS_KEY); set it too"
    )


@pytest.mark.parametrize("by", ["url", "environment"])
def test_a_profile_that_is_not_there(monkeypatch: pytest.MonkeyPatch, by: str) -> None:
    if by == "environment":
        monkeypatch.setenv("AWS_PROFILE", "team")
    url = StoreUrl(BUCKET, "team", profile="team" if by == "url" else None)
    assert sentence_of(lambda: BundleStore(url)) == (
        f"{PLACE}: there is no profile team in ~/.aws/config here; make it with `aws configure --profile team`, or "
        "name another in lora-pods:store or AWS_PROFILE"
    )


def test_an_sso_session_that_was_never_opened(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    without_keys(monkeypatch)
    monkeypatch.setenv("HOME", str(tmp_path))
    session = "sso_start_url = https://x.example/start\nsso_region = us-east-1\n"
    account = "sso_account_id = 123456789012\nsso_role_name = r\n"
    configured(monkeypatch, tmp_path, f"[profile team]\n{session}{account}")
    url = StoreUrl(BUCKET, "team", profile="team")
    assert sentence_of(lambda: BundleStore(url).size(digest_of(SMALL))) == (
        f"{PLACE}: the SSO session has expired, or was never opened; run `aws sso login --profile team`, and this again"
    )


def test_a_program_that_gives_no_credentials(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    without_keys(monkeypatch)
    configured(monkeypatch, tmp_path, "[profile team]\ncredential_process = sh -c 'echo CANARY >&2; exit 1'\n")
    url = StoreUrl(BUCKET, "team", profile="team")
    assert sentence_of(lambda: BundleStore(url).size(digest_of(SMALL))) == (
        f"{PLACE}: boto3 gets no credentials from custom-process; run `aws sso login --profile team`, or see that "
        "profile in ~/.aws/config"
    )


def test_a_configuration_that_cannot_be_read(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    configured(monkeypatch, tmp_path, "this is none\n")
    assert sentence_of(lambda: BundleStore(URL)) == (
        f"{PLACE}: boto3 cannot read ~/.aws/config or ~/.aws/credentials; mend what stands there"
    )


def test_a_region_that_is_none() -> None:
    url = StoreUrl(BUCKET, "team", region="eu west")
    assert sentence_of(lambda: BundleStore(url).size(digest_of(SMALL))) == (
        f"{PLACE}: boto3 makes nothing of the region eu west; correct lora-pods:store, or AWS_DEFAULT_REGION"
    )


# --- connections, for real ----------------------------------------------------------------------------------


@pytest.fixture
def no_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    Wire().tap(monkeypatch)


def test_an_endpoint_where_nobody_listens(no_waits: None) -> None:
    # A port that was ours a moment ago.
    with ThreadingHTTPServer(("127.0.0.1", 0), BaseHTTPRequestHandler) as server:
        port = server.server_port
    store = BundleStore(parse_store_url(f"s3://{BUCKET}/team?endpoint=http://127.0.0.1:{port}"))
    assert sentence_of(lambda: put(store, SMALL)) == (
        f"{PLACE} at http://127.0.0.1:{port}: {UNREACHABLE.format(host=f'127.0.0.1:{port}')}"
    )


def test_an_endpoint_that_speaks_no_tls(no_waits: None) -> None:
    with s3_service() as service:
        endpoint = service.endpoint.replace("http:", "https:")
        store = BundleStore(parse_store_url(f"s3://{BUCKET}/team?endpoint={endpoint}"))
        assert sentence_of(lambda: put(store, SMALL)) == (
            f"{PLACE} at {endpoint}: no TLS connection to {endpoint[8:]} comes about; is its certificate of an "
            "authority that this machine trusts (AWS_CA_BUNDLE names a file with more), and does it speak https?"
        )


@pytest.mark.parametrize("endpoint", ["http://h x", "CANARY"])
def test_an_endpoint_of_the_environment_that_is_none(monkeypatch: pytest.MonkeyPatch, endpoint: str) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", endpoint)
    assert sentence_of(lambda: BundleStore(URL)) == (
        f"{PLACE}: boto3 makes nothing of the endpoint; correct lora-pods:store, or AWS_ENDPOINT_URL, "
        "AWS_ENDPOINT_URL_S3 and endpoint_url in ~/.aws/config"
    )


@contextmanager
def something_else(
    status: int, headers: Mapping[str, str], page: bytes = b"<html><body>Not here</body>"
) -> Iterator[str]:
    """A web server that is no S3 service, answering everything with one page."""

    class Page(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name, value)
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(page)

        do_HEAD = do_GET

        def log_message(self, *_: object) -> None:
            """Not to the tests' output."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Page) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


@pytest.mark.parametrize(
    ("status", "headers", "told"),
    [
        (404, {}, "is no S3 service; correct the endpoint in lora-pods:store"),
        (
            301,
            {"Location": "https://x.example/"},
            "redirects everything and names no region; correct the endpoint in lora-pods:store (https?)",
        ),
    ],
)
def test_an_endpoint_that_is_no_s3_service(no_waits: None, status: int, headers: dict[str, str], told: str) -> None:
    with something_else(status, headers=headers) as endpoint:
        store = BundleStore(parse_store_url(f"s3://{BUCKET}/team?endpoint={endpoint}"))
        said = sentence_of(lambda: store.size(digest_of(SMALL)))
    assert said == f"{PLACE} at {endpoint}: what answers there {told}"


@pytest.mark.parametrize("page", [b"<html><body>Console</body>", b"<html><body>Console</body></html>", b""])
@pytest.mark.parametrize("headers", [{}, {"Content-Length": "PAGE"}, {"Content-Type": "text/html", "ETag": '"1"'}])
@pytest.mark.parametrize(
    "action",
    [
        lambda store: store.size(digest_of(SMALL)),
        lambda store: put(store, SMALL),
        lambda store: list(store.stored()),
        lambda store: list(store.unfinished()),
    ],
)
def test_a_console_that_says_yes_to_everything(
    no_waits: None, page: bytes, headers: dict[str, str], action: Callable[[BundleStore], object]
) -> None:
    sent = {name: value.replace("PAGE", str(len(page))) for name, value in headers.items()}
    with something_else(200, headers=sent, page=page) as endpoint:
        store = BundleStore(parse_store_url(f"s3://{BUCKET}/team?endpoint={endpoint}"))
        said = sentence_of(lambda: action(store))
    told = {f"{PLACE} at {endpoint}: what answers there is no S3 service; correct the endpoint in lora-pods:store"}
    if page and not page.endswith(b"</html>"):
        told.add(f"{PLACE} at {endpoint}: {FAILED}")  # botocore's guess, of what is not XML
    assert said in told


# --- the table ----------------------------------------------------------------------------------------------


def test_every_sentence_can_be_said_and_no_name_stands_twice() -> None:
    names = [name for keys, _ in _TABLE for name in keys.split()]
    assert sorted(names) == sorted(set(names))
    for name in names:
        code, _, hint = name.partition(":")
        fault = exceptions.ClientError({"Error": {"Code": code, "Message": hint}}, "PutObject")
        said = sentence(URL, fault)
        assert said.startswith(f"{PLACE}: ")
        assert "failed with" not in said
        assert "{" not in said


def test_names_of_exceptions_are_botocores() -> None:
    named = {name for keys, _ in _TABLE for name in keys.split() if name.endswith("Error") or hasattr(exceptions, name)}
    known = {name for name in named if hasattr(exceptions, name)}
    assert named - known == {"InternalError", "RecursionError", "ResponseParserError"}
