"""What a stack file may say of a store, and which object a bundle is there."""

from __future__ import annotations

import pytest
from botocore.utils import is_valid_endpoint_url, is_valid_ipv6_endpoint_url

from components.core.errors import UserError
from components.store_url import KEY_BYTES, StoreUrl, parse_store_url

DIGEST = "sha256:" + "ab" * 32


@pytest.mark.parametrize(
    ("text", "expected", "place", "key"),
    [
        ("s3://bucket", StoreUrl("bucket", ""), "s3://bucket", f"sha256/{'ab' * 32}.tar"),
        ("s3://bucket/", StoreUrl("bucket", ""), "s3://bucket", f"sha256/{'ab' * 32}.tar"),
        ("s3://bucket/a/b/", StoreUrl("bucket", "a/b"), "s3://bucket/a/b", f"a/b/sha256/{'ab' * 32}.tar"),
        (
            "s3://bucket/a?region=eu-central-1&profile=acme%20ops",
            StoreUrl("bucket", "a", "eu-central-1", None, "acme ops"),
            "s3://bucket/a",
            f"a/sha256/{'ab' * 32}.tar",
        ),
        (
            "s3://bucket/a?endpoint=http://10.88.0.1:9000/",
            StoreUrl("bucket", "a", None, "http://10.88.0.1:9000"),
            "s3://bucket/a at http://10.88.0.1:9000",
            f"a/sha256/{'ab' * 32}.tar",
        ),
    ],
)
def test_what_is_said_of_a_store(text: str, expected: StoreUrl, place: str, key: str) -> None:
    store = parse_store_url(text)
    assert (store, store.place, store.key(DIGEST)) == (expected, place, key)
    assert store.name(DIGEST) == f"s3://bucket/{key}"


@pytest.mark.parametrize("host", ["minio", "a-1.example.:9000", "10.0.0.1:80", "[::1]:9000"])
def test_an_endpoint_that_boto3_takes_too(host: str) -> None:
    """Not that it should be ours to know; but what it refuses would be told later, and of nobody's key."""
    url = parse_store_url(f"s3://bucket?endpoint=http://{host}")
    assert url.endpoint == f"http://{host}"
    assert is_valid_endpoint_url(url.endpoint) or is_valid_ipv6_endpoint_url(url.endpoint)


def test_the_longest_prefix_makes_the_longest_key() -> None:
    assert len(parse_store_url(f"s3://bucket/{'a' * 948}/").key(DIGEST)) == KEY_BYTES


FORM = "must be s3://BUCKET/PREFIX, and may end with ?region=…&endpoint=…&profile=…"


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("bucket/prefix", FORM),
        ("https://bucket.s3.amazonaws.com/", FORM),
        ("s3://key:secret@bucket/a", FORM),
        ("s3://bucket/a#b", FORM),
        ("s3://bucket/a\n", FORM),
        ("s3://bucket/a?region", FORM),
        ("s3://bucket/a?region=x&region=y", f"an option is given twice, or empty; {FORM}"),
        ("s3://bucket/a?region=", f"an option is given twice, or empty; {FORM}"),
        ("s3://bucket/a?Region=x", "'Region' is no option of it; known are region, endpoint, profile"),
        ("s3://", "'nothing' is no bucket's name: 3 to 63 small letters, digits, dots and dashes"),
        ("s3://My_Bucket/a", "'My_Bucket' is no bucket's name: 3 to 63 small letters, digits, dots and dashes"),
        ("s3://bucket/a//b", "'a//b' cannot be a prefix here: letters, digits and !-_.*'() between single slashes"),
        ("s3://bucket/../b", "'../b' cannot be a prefix here: letters, digits and !-_.*'() between single slashes"),
        ("s3://bucket/a b", "'a b' cannot be a prefix here: letters, digits and !-_.*'() between single slashes"),
        (
            "s3://bucket?endpoint=minio:9000",
            "its endpoint must be the service's URL, such as https://minio.example:9000",
        ),
        (
            "s3://bucket?endpoint=http://minio:port",
            "its endpoint must be the service's URL, such as https://minio.example:9000",
        ),
        *(
            (
                f"s3://bucket?endpoint=http://{given}",
                f"its endpoint's host {host!r} is none: letters, digits, dots and dashes, or an IP address",
            )
            for given, host in (
                ("h%20x", "h x"),
                ("-minio:9000", "-minio"),
                ("min_io", "min_io"),
                ("mini%C3%B6", "miniö"),
                (f"{'a' * 64}.example", f"{'a' * 64}.example"),
                ("a..b", "a..b"),
            )
        ),
        ("s3://bucket?endpoint=http://h%0Ax", FORM),
        ("s3://bucket?profile=a%1Bb", FORM),
        (
            f"s3://bucket/{'a' * 949}",
            "its prefix has 949 characters, and 948 are the most with which S3 takes the bundles' keys",
        ),
        ("s3://bucket?endpoint=https://minio/path", "its endpoint must end after the host and the port"),
        (
            "s3://bucket?endpoint=https://key:CANARY@minio",
            "its endpoint holds credentials, for everyone to read; take them out, consider them known, and give the "
            "new ones to boto3 (environment or ~/.aws/credentials)",
        ),
    ],
)
def test_what_is_no_store(text: str, sentence: str) -> None:
    with pytest.raises(UserError) as caught:
        parse_store_url(text)
    assert str(caught.value) == sentence
    assert "CANARY" not in sentence
