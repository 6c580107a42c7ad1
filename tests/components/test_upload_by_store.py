"""A store between the laptop and the pods: what is uploaded, what is fetched, and what goes over SSH all the same."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from components import settings as settings_module
from components import supply
from components.bundles import AdapterBundleProvider
from components.core.digest_cache import BundleFacts
from components.core.errors import UserError
from components.core.sizes import shown_size
from components.settings import RawConfig, Settings, load
from tests.components.test_settings import ENGINE, HOST, Config
from tests.components.test_ssh import CLIENT, text
from tests.components.test_upload import Pod, facts, hexes, pod, project, said, upload
from tests.support.s3 import ENVIRONMENT, S3, s3_service

__all__ = ["facts", "pod", "project", "said", "upload"]

Upload = Callable[..., None]
Facts = dict[str, BundleFacts]


@pytest.fixture
def s3(monkeypatch: pytest.MonkeyPatch) -> Iterator[S3]:
    for name, value in ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    with s3_service() as service:
        yield service
    supply.opened.cache_clear()


@pytest.fixture
def keep(s3: S3, facts: Facts) -> Callable[..., Any]:
    """Creates the bundle's resource for `model`, whose adapter is `name`, in a stack with the store."""

    def run(model: str, name: str) -> Any:
        provider = AdapterBundleProvider()
        provider._config = Config(
            pods=[{"base": "org/base", "host": HOST, "engine": ENGINE}],
            models=[{"id": model, "base": "org/base", "adapter": f"../adapters/{name}"}],
            sshPrivateKey=text(CLIENT),
            store=s3.store,
        )
        found = facts[name]
        return provider.create(
            {"digest": found.digest, "size": float(found.size), "rank": 8.0, "model": model, "store": "s3://…"}
        )

    return run


def key(found: BundleFacts) -> str:
    return f"team/sha256/{found.digest.removeprefix('sha256:')}.tar"


def test_a_bundle_is_uploaded_once_however_often_it_is_asked_for(
    s3: S3, keep: Callable[..., Any], facts: Facts
) -> None:
    assert keep("a", "v1").id == facts["v1"].digest
    assert [len(body) for name, body in s3.objects().items() if name == key(facts["v1"])] == [facts["v1"].size]
    s3.requests.clear()

    keep("a", "v1")
    keep("same-bytes", "v1")

    assert [(each.method, each.path) for each in s3.requests] == [("HEAD", f"/lora-pods-tests/{key(facts['v1'])}")] * 2


def test_a_machine_without_the_bytes_is_content_with_the_stores(
    s3: S3, keep: Callable[..., Any], facts: Facts, project: Path
) -> None:
    keep("a", "v1")
    shutil.rmtree(project / "adapters")
    assert keep("a", "v1").outs["store"] == "s3://…"


def test_what_the_store_lacks_is_looked_for_again(s3: S3, keep: Callable[..., Any], project: Path) -> None:
    """Every pod may have it: going back to it takes no bytes."""
    (project / "adapters").rename(project / "away")
    outs = keep("b", "v2").outs
    assert outs["store"] == ""
    assert AdapterBundleProvider().diff("id", outs, {**outs, "store": "s3://…"}).changes is True
    (project / "away").rename(project / "adapters")
    assert keep("b", "v2").outs["store"] == "s3://…"
    assert len(s3.objects()) == 1


def test_what_a_pod_lacks_and_nobody_has_is_named_before_it_is_told_of_any(
    s3: S3, pod: Pod, upload: Upload, keep: Callable[..., Any], facts: Facts, project: Path
) -> None:
    keep("a", "v1")
    shutil.rmtree(project / "adapters")
    with pytest.raises(UserError) as caught:
        upload({"a": "v1", "b": "v2"}, store=s3.store)
    assert str(caught.value) == (
        f"the pod lacks what neither s3://lora-pods-tests/team at {s3.endpoint} nor this machine has: b "
        f"({facts['v2'].digest}) at ../adapters/v2; run `lora push` where it is, or put the adapter there"
    )
    assert [verb for verb, _ in pod.calls] == ["missing"]


def test_four_models_of_the_same_bytes_send_them_once(s3: S3, keep: Callable[..., Any], facts: Facts) -> None:
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda model: keep(model, "v1"), "abcd"))
    assert sum(each.sent for each in s3.uploads) == facts["v1"].size


def test_a_stack_file_is_parsed_once_for_all_of_its_bundles(s3: S3, monkeypatch: pytest.MonkeyPatch) -> None:
    parsed: list[object] = []

    def count(config: RawConfig) -> Settings:
        parsed.append(config)
        return load(config)

    monkeypatch.setattr(settings_module, "load", count)
    provider = AdapterBundleProvider()
    provider._config = Config(pods=[{"base": "org/base", "host": HOST, "engine": ENGINE}], sshPrivateKey=text(CLIENT))
    plain = {"digest": "sha256:aa", "size": 1.0, "rank": 8.0}
    assert provider.read("id", plain).outs == plain
    assert parsed == [], "a stack without a store is not asked of it"
    for _ in range(3):
        provider.read("id", {**plain, "store": "s3://elsewhere"})
    assert len(parsed) == 1
    provider._config = Config(provider._config)
    provider.read("id", {**plain, "store": "s3://elsewhere"})
    assert len(parsed) == 2, "another configuration counts"


def test_a_refresh_finds_that_the_store_lost_it(s3: S3, keep: Callable[..., Any], facts: Facts) -> None:
    place = f"s3://lora-pods-tests/team at {s3.endpoint}"
    keep("a", "v1")
    provider = AdapterBundleProvider()
    provider._config = Config(
        pods=[{"base": "org/base", "host": HOST, "engine": ENGINE}], sshPrivateKey=text(CLIENT), store=s3.store
    )
    props = {"digest": facts["v1"].digest, "size": 1.0, "rank": 8.0, "model": "a", "store": place}
    assert provider.read("id", props).outs == props
    s3.remove(key(facts["v1"]))
    assert provider.read("id", props).outs == {**props, "store": ""}
    without = {name: value for name, value in props.items() if name not in ("model", "store")}
    s3.requests.clear()
    assert provider.read("id", without).outs == without
    assert s3.requests == []


def test_two_pods_fetch_what_was_uploaded_once(s3: S3, pod: Pod, upload: Upload, facts: Facts, tmp_path: Path) -> None:
    upload({"a": "v1", "b": "v2"}, store=s3.store)
    first = hexes(facts["v1"], facts["v2"])
    assert pod.blobs() == first
    assert sum(each.sent for each in s3.uploads) == sum(found.size for found in facts.values())
    s3.requests.clear()

    pod.root = tmp_path / "another-pod"
    pod.calls.clear()
    upload({"a": "v1", "b": "v2"}, store=s3.store)

    assert pod.blobs() == first
    assert s3.uploads == []
    assert sorted(each.path for each in s3.downloads) == sorted(f"/lora-pods-tests/{key(f)}" for f in facts.values())
    assert [verb for verb, _ in pod.calls] == ["missing", "fetch"]
    assert sum(sent for _, sent in pod.calls) < 3000, "URLs and sizes, no weights"


def test_a_store_and_a_pod_that_fetches_show_how_far_they_are(
    s3: S3, pod: Pod, upload: Upload, facts: Facts, said: list[str]
) -> None:
    upload({"a": "v1"}, store=s3.store)
    size = shown_size(facts["v1"].size)
    assert said[0].startswith("uploading a to the store: 512 bytes of ")
    assert [line for line in said if re.fullmatch(rf"uploaded {size} in \d+ s", line)]
    assert said[-1] == f"{facts['v1'].digest} is here ({size})"


def test_what_a_cut_upload_left_on_the_pod_is_not_fetched_again(s3: S3, pod: Pod, upload: Upload, facts: Facts) -> None:
    pod.cut_after = 6 * facts["v1"].size // 10
    with pytest.raises(UserError):
        upload({"a": "v1"})
    pod.cut_after = None

    upload({"a": "v1"}, store=s3.store)

    assert pod.blobs() == hexes(facts["v1"])
    (download,) = s3.downloads
    assert download.range is not None
    assert int(download.range.removeprefix("bytes=").rstrip("-")) > facts["v1"].size // 2


def test_a_pod_that_has_all_asks_no_store(s3: S3, pod: Pod, upload: Upload) -> None:
    upload({"a": "v1"}, store=s3.store)
    s3.requests.clear()
    upload({"a": "v1"}, store=s3.store)
    assert s3.requests == []


def test_an_altered_object_is_served_to_nobody(s3: S3, pod: Pod, upload: Upload, facts: Facts) -> None:
    altered = bytearray(facts["v1"].size)
    s3.put(key(facts["v1"]), bytes(altered))
    with pytest.raises(UserError) as caught:
        upload({"a": "v1"}, store=s3.store)
    assert f"s3://lora-pods-tests/{key(facts['v1'])}" in str(caught.value)
    assert "X-Amz" not in str(caught.value)
    assert pod.blobs() == set()


def test_no_url_is_written_down(s3: S3, pod: Pod, upload: Upload, keep: Callable[..., Any]) -> None:
    outs = keep("a", "v1").outs
    upload({"a": "v1"}, store=s3.store)
    left = [path.read_bytes() for path in pod.root.rglob("*") if path.is_file()]
    for text_ in (json.dumps(outs).encode(), *left):
        assert b"X-Amz" not in text_
        assert ENVIRONMENT["AWS_ACCESS_KEY_ID"].encode() not in text_
