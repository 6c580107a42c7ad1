"""What boto3 and S3 services complain of, as sentences with what to do. No URL and no key of anybody's is in them."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from urllib.parse import urlsplit

from components.core.errors import UserError, printable
from components.store_url import StoreUrl

ATTEMPTS = 5
"""Of each request, before its failure is told."""

# By a service's error code, HTTP's status where an answer has no body, or the name of botocore's exception. In braces:
# a fact of `_facts`. https://docs.aws.amazon.com/AmazonS3/latest/API/ErrorResponses.html#ErrorCodeList
_TABLE: tuple[tuple[str, str], ...] = (
    # --- where it is
    ("NoSuchBucket", "there is no such bucket; create it, or correct lora-pods:store"),
    (
        "PermanentRedirect TemporaryRedirect AuthorizationHeaderMalformed IllegalLocationConstraintException 301 307",
        "the bucket is in {home}; put that into lora-pods:store, as ?region=…",
    ),
    (
        # A redirection that names no region: botocore (1.44) asks for the bucket's, which is redirected, …
        "RecursionError",
        "what answers there redirects everything and names no region; correct the endpoint in lora-pods:store (https?)",
    ),
    (
        "InvalidRegionError UnknownRegionError EndpointProviderError NoRegionError",
        "boto3 makes nothing of the region {region}; correct lora-pods:store, or AWS_DEFAULT_REGION",
    ),
    (
        "ConnectionError HTTPClientError",
        "{host} cannot be reached; is the network up, and are the region and the endpoint in lora-pods:store right?",
    ),
    ("ProxyConnectionError", "the proxy cannot be reached; see HTTPS_PROXY and HTTP_PROXY"),
    (
        "SSLError",
        "no TLS connection to {host} comes about; is its certificate of an authority that this machine trusts "
        "(AWS_CA_BUNDLE names a file with more), and does it speak https?",
    ),
    (
        "ReadTimeoutError ConnectionClosedError ResponseStreamingError IncompleteReadError RequestTimeout",
        "the connection broke, {attempts} times; run it again when the network is better",
    ),
    (
        "ResponseParserError 404 405 MethodNotAllowed",
        "what answers there is no S3 service; correct the endpoint in lora-pods:store",
    ),
    # --- who asks
    (
        "NoCredentialsError NoAuthTokenError",
        "boto3 finds no credentials; set AWS_PROFILE, or AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or name a "
        "profile in lora-pods:store, as ?profile=…",
    ),
    ("PartialCredentialsError", "half of the credentials is missing ({cred_var}); set it too"),
    (
        "CredentialRetrievalError TokenRetrievalError MetadataRetrievalError SSOError",
        "boto3 gets no credentials from {provider}; run {login}, or see that profile in ~/.aws/config",
    ),
    (
        "ProfileNotFound",
        "there is no profile {profile} in ~/.aws/config here; make it with `aws configure --profile {profile}`, or "
        "name another in lora-pods:store or AWS_PROFILE",
    ),
    ("ConfigParseError", "boto3 cannot read ~/.aws/config or ~/.aws/credentials; mend what stands there"),
    (
        "ExpiredToken ExpiredTokenException TokenRefreshRequired InvalidToken",
        "the credentials have expired; renew them, with {login} or whatever gave them, and run it again",
    ),
    (
        "UnauthorizedSSOTokenError SSOTokenLoadError UnauthorizedException",
        "the SSO session has expired, or was never opened; run {login}, and this again",
    ),
    ("LoginError", "the login session has expired, or was never opened; run `aws login`, and this again"),
    (
        "InvalidAccessKeyId InvalidClientTokenId UnrecognizedClientException",
        "the service does not know the access key: it was deleted, or is another service's; give boto3 one of its own",
    ),
    (
        "SignatureDoesNotMatch InvalidSignatureException",
        "the secret key does not belong to the access key; give boto3 both anew, as they were issued",
    ),
    (
        "RequestTimeTooSkewed RequestExpired RequestInTheFuture",
        "this machine's clock is off by more than a quarter of an hour; set it (`timedatectl set-ntp true`), and run "
        "it again",
    ),
    ("AccessDenied AccessDeniedException AllAccessDisabled Forbidden 401 403", "no permission: {denied}"),
    # --- what was asked
    (
        "SlowDown Throttling ThrottlingException ThrottledException RequestThrottled TooManyRequestsException "
        "RequestLimitExceeded BandwidthLimitExceeded ServiceUnavailable 429 503",
        "the service asks to slow down, {attempts} times; run it again in some minutes",
    ),
    (
        "InternalError InternalFailure 502 504",
        "the service failed by itself ({code}), {attempts} times; run it again later",
    ),
    (
        # Also what botocore (1.44) makes of a page that is no XML where there should be some.
        "500",
        "the service failed by itself (500), {attempts} times, or is no S3 service; correct the endpoint in "
        "lora-pods:store, or run it again later",
    ),
    (
        "BadDigest XAmzContentChecksumMismatch XAmzContentSHA256Mismatch InvalidDigest IncompleteBody",
        "what arrived is not what was sent ({code}), so it was not stored; run it again, and if that does not help, "
        "look for what changes bytes on the way: a proxy, a fault of memory",
    ),
    (
        "InvalidPart InvalidRequest:checksum",
        "the service refuses the SHA-256 checksum of what was sent ({code}: {message}), so nothing was stored; use one "
        "that knows x-amz-checksum-sha256",
    ),
    (
        "NotImplemented",
        "the service cannot do what is needed here ({operation}: {message}); use one that knows multipart uploads and "
        "x-amz-checksum-sha256",
    ),
    (
        "NoSuchUpload",
        "somebody ended the upload while it was under way (a rule of the bucket, or `lora gc-store`); run it again",
    ),
)
_SENTENCES = {name: sentence for names, sentence in _TABLE for name in names.split()}

_UPLOAD = ("s3:PutObject", "objects")
_NEEDED: Mapping[str, tuple[str, str]] = {
    "HeadObject": ("s3:GetObject", "objects"),
    "GetObject": ("s3:GetObject", "objects"),
    "PutObject": _UPLOAD,
    "CreateMultipartUpload": _UPLOAD,
    "UploadPart": _UPLOAD,
    "CompleteMultipartUpload": _UPLOAD,
    "AbortMultipartUpload": ("s3:AbortMultipartUpload", "objects"),
    "DeleteObjects": ("s3:DeleteObject", "objects"),
    "ListObjectsV2": ("s3:ListBucket", "bucket"),
    "ListMultipartUploads": ("s3:ListBucketMultipartUploads", "bucket"),
}
_LOOKING = ("HeadObject", "GetObject")
# "User: arn:aws:iam::1:user/x is not authorized to perform: s3:PutObject on resource: "arn:…" because no identity-…"
_NAMED = re.compile(r'not authorized to perform: ([\w-]+:\w+)(?: on resource: "?([^\s"]+))?')
_NOT_TO_BE_SHOWN = re.compile(r"\w+://\S+|\b(?:AKIA|ASIA)[A-Z0-9]+\b")
_AS_LONG_AS_SECRETS = re.compile(r"[\w+/=%.-]{32,}")
_CODE = re.compile(r"[A-Za-z][A-Za-z0-9_.]{0,59}|[0-9]{3}")
# S3's own, whose texts say what of the request is wrong. An unknown one's may repeat the request, headers and all.
_TEXT_SHOWN = (
    *("EntityTooLarge", "EntityTooSmall", "InvalidBucketName", "InvalidObjectState", "InvalidPartOrder"),
    *("InvalidRequest", "KeyTooLongError", "MalformedXML", "OperationAborted", "QuotaExceeded", "XMinioStorageFull"),
)


@contextmanager
def told(url: StoreUrl) -> Iterator[None]:
    """Raises UserError for whatever boto3 raises in it."""
    from botocore.exceptions import BotoCoreError, ClientError
    from botocore.parsers import ResponseParserError

    try:
        yield
    except (BotoCoreError, ClientError, ResponseParserError, RecursionError) as error:
        raise UserError(sentence(url, error)) from None


def code_of(error: Exception) -> str:
    """The service's own code, such as NoSuchBucket, or HTTP's status; what is no answer has the exception's name."""
    return str(_answer(error).get("Code") or type(error).__name__)


def status_of(error: Exception) -> int:
    """HTTP's status; 0 for what is no answer."""
    return int(_response(error).get("ResponseMetadata", {}).get("HTTPStatusCode", 0))


def sentence(url: StoreUrl, error: Exception) -> str:
    facts = _facts(url, error)
    names = [facts["code"], *(each.__name__ for each in type(error).__mro__)]
    if "checksum" in facts["message"].lower():
        names.insert(0, f"{facts['code']}:checksum")
    known = next((_SENTENCES[name] for name in names if name in _SENTENCES), None)
    unknown = "{operation} failed with {code}"
    if not _answer(error) or facts["code"] in _TEXT_SHOWN:
        unknown += ": {message}"
    return f"{url.place}: " + (known or unknown).format(**facts)


def no_service(url: StoreUrl) -> str:
    """The sentence for an answer that no S3 service gives."""
    return f"{url.place}: {_SENTENCES['ResponseParserError']}"


def refused(url: StoreUrl, operation: str, fault: Mapping[str, Any]) -> str:
    """Why one object of several was refused, for an item of an answer's `Errors`."""
    from botocore.exceptions import ClientError

    return sentence(url, ClientError({"Error": dict(fault)}, operation))


def _facts(url: StoreUrl, error: Exception) -> dict[str, str]:
    answer, details = _answer(error), getattr(error, "kwargs", {})
    profile = printable(details.get("profile") or url.profile or "")
    operation = str(getattr(error, "operation_name", "a request"))
    message = _shown(_AS_LONG_AS_SECRETS.sub("…", str(answer.get("Message") or "")) if answer else error).rstrip(".")
    place = urlsplit(str(details.get("endpoint_url") or url.endpoint or "")).netloc.rpartition("@")[2]
    code = code_of(error)
    return {
        "attempts": str(ATTEMPTS),
        "code": code if _CODE.fullmatch(code) else f"HTTP status {status_of(error)}",
        "cred_var": printable(details.get("cred_var", "")),
        "denied": _denied(url, operation, str(answer.get("Message", ""))),
        "home": _home(url, error),
        "host": printable(place) or "S3",
        "login": "`aws sso login" + (f" --profile {profile}`" if profile else "`"),
        "message": message or "it gave no reason",
        "operation": operation,
        "profile": profile,
        "provider": printable(details.get("provider", "where its profile says")),
        "region": printable(url.region or details.get("region_name") or "it was given"),
    }


def _response(error: Exception) -> Mapping[str, Any]:
    return getattr(error, "response", None) or {}


def _answer(error: Exception) -> Mapping[str, Any]:
    answer: Mapping[str, Any] = _response(error).get("Error", {})
    return answer


def _shown(text: object) -> str:
    return printable(_NOT_TO_BE_SHOWN.sub("…", str(text)))


def _home(url: StoreUrl, error: Exception) -> str:
    metadata = _response(error).get("ResponseMetadata", {})
    region = metadata.get("HTTPHeaders", {}).get("x-amz-bucket-region") or _answer(error).get("Region")
    if region:
        return f"the region {printable(region)}"
    return f"another region than {printable(url.region)}" if url.region else "another region than boto3's default"


def _denied(url: StoreUrl, operation: str, message: str) -> str:
    """What the policy has to allow; in S3's own words where it names it."""
    bucket = f"arn:aws:s3:::{url.bucket}"
    resources = {"bucket": bucket, "objects": f"{bucket}/{url.folder}*"}
    named = _NAMED.search(message)
    action, resource = _NEEDED.get(operation, (operation, "bucket"))
    needed = f"{action} on {resources[resource]}"
    if named:
        needed = f"{named[1]} on {printable(named[2] or url.bucket)}"
    if "explicit deny" in message:
        return f"a policy denies {needed}; take that out of it"
    absent = ""
    if operation in _LOOKING:
        if not named:
            needed += f", and s3:ListBucket on {bucket}"
        if not named or named[1] == "s3:ListBucket":
            absent = ", without which S3 answers so for an object that is merely absent"
    return f"the credentials' policy must allow {needed}{absent}"
