"""S3 and compatible services, accessed with boto3 in a separate thread pool. Requires the extra
`s3`."""

import asyncio
import os
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import boto3
from botocore.config import Config
from botocore.exceptions import (
    BotoCoreError,
    ClientError,
    NoCredentialsError,
    PartialCredentialsError,
)

from comfyfleet.errors import (
    AccessDenied,
    FleetError,
    LimitExceeded,
    NotFound,
    Refused,
    StoreFull,
    Unavailable,
)
from comfyfleet.server.storage import BucketUrl
from comfyfleet.server.storage.model import (
    CHUNK_BYTES,
    MEMORY_BYTES_MAX,
    OBJECT_BYTES_MAX,
    ListedObject,
    ObjectFacts,
    PresignedUrl,
    checked_content_type,
    checked_seconds,
    checked_size,
    disposition,
)
from comfyfleet.server.storage.outage import PROBE_BYTES, StoreOutage
from comfyfleet.transport.files import open_file

# Separate from asyncio's threads, so that an unresponsive bucket can't block name lookups and local
# files.
THREADS_MAX = 16
CONNECT_SECONDS_MAX = 5
READ_SECONDS_MAX = 30
TRIES_MAX = 4
DEFAULT_REGION = "us-east-1"
PROBE_SECONDS = 5.0
PROBE_KEY = "writable"
T = TypeVar("T")

_MISSING = frozenset({"404", "NoSuchKey", "NotFound"})
_CANT_COPY = frozenset({"NotImplemented", "MethodNotAllowed", "501", "405", "InvalidRequest"})
_DENIED = frozenset(
    {
        "401",
        "403",
        "AccessDenied",
        "AllAccessDisabled",
        "ExpiredToken",
        "InvalidAccessKeyId",
        "InvalidToken",
        "RequestTimeTooSkewed",
        "SignatureDoesNotMatch",
    }
)


class S3Store:
    disk = "s3"

    def __init__(self, bucket: BucketUrl) -> None:
        self._bucket = bucket
        session = boto3.session.Session()
        self._client = _client(session, bucket, bucket.endpoint)
        # A signature includes the host, so URLs for clients are signed for the public endpoint.
        public = bucket.public_endpoint
        self._signing = _client(session, bucket, public) if public else self._client
        self._threads = ThreadPoolExecutor(THREADS_MAX, thread_name_prefix="s3")
        self.outage = StoreOutage(f"the bucket {bucket.name}")
        self._probing: asyncio.Task[None] | None = None

    async def put(self, key: str, data: bytes, content_type: str) -> None:
        if len(data) > MEMORY_BYTES_MAX:
            raise LimitExceeded(
                f"{key}: use a URL to store more than {MEMORY_BYTES_MAX} bytes", key=key
            )
        place = self._place(key)
        checked_content_type(content_type)
        put = partial(self._client.put_object, **place, Body=data, ContentType=content_type)
        await self._call(key, put, is_write=True)

    async def get(self, key: str) -> bytes:
        return await self._call(key, partial(self._read, key, self._place(key)))

    def _read(self, key: str, place: dict[str, str]) -> bytes:
        answer = self._client.get_object(**place)
        with answer["Body"] as body:
            if answer["ContentLength"] > MEMORY_BYTES_MAX:
                size = answer["ContentLength"]
                raise LimitExceeded(f"{key} has {size} bytes; use a URL to read it", key=key)
            data: bytes = body.read()
            return data

    async def get_start(self, key: str, size: int) -> bytes:
        return await self._call(key, partial(self._read_start, self._place(key), size))

    def _read_start(self, place: dict[str, str], size: int) -> bytes:
        # Not a range request, because S3 responds with 416 to a range of an empty object.
        with self._client.get_object(**place)["Body"] as body:
            data: bytes = body.read(size)
            return data

    async def chunks(
        self, key: str, *, start: int = 0, length: int | None = None
    ) -> AsyncIterator[bytes]:
        # No range if the whole object is requested, because S3 responds with 416 to a range of an
        # empty object.
        part = {} if length is None else {"Range": f"bytes={start}-{start + length - 1}"}
        response = await self._call(
            key, partial(self._client.get_object, **self._place(key), **part)
        )
        with response["Body"] as body:
            while chunk := await self._call(key, partial(body.read, CHUNK_BYTES)):
                yield chunk

    async def put_file(self, key: str, file: Path, content_type: str) -> None:
        place = self._place(key)
        checked_content_type(content_type)
        await self._call(key, partial(self._send, place, file, content_type), is_write=True)

    def _send(self, place: dict[str, str], file: Path, content_type: str) -> None:
        with file.open("rb") as body:
            self._client.put_object(**place, Body=body, ContentType=content_type)

    async def head(self, key: str) -> ObjectFacts | None:
        try:
            facts = await self._call(key, partial(self._client.head_object, **self._place(key)))
        except NotFound:
            return None
        return ObjectFacts(facts["ContentLength"], facts.get("ContentType", ""))

    async def copy(
        self, key: str, target: str, content_type: str, *, size: int | None = None
    ) -> bool:
        checked_content_type(content_type)
        copy = partial(self._copy, key, target, content_type, size)
        return await self._call(key, copy, is_write=True)

    def _copy(self, key: str, target: str, content_type: str, size: int | None) -> bool:
        source = self._place(key)
        if size is not None and self._client.head_object(**source)["ContentLength"] != size:
            return False
        self._client.copy_object(
            **self._place(target),
            CopySource=source,
            ContentType=content_type,
            MetadataDirective="REPLACE",
        )
        return True

    async def join(self, keys: Sequence[str], target: str, content_type: str) -> None:
        checked_content_type(content_type)
        copy = partial(self._copy_parts, keys, target, content_type)
        if await self._call(target, copy, is_write=True):
            return
        with tempfile.TemporaryDirectory(prefix="comfyfleet-") as folder:
            path = Path(folder) / "joined"
            with await open_file(path, "wb") as file:
                for key in keys:
                    async for chunk in self.chunks(key):
                        await asyncio.to_thread(file.write, chunk)
            await self.put_file(target, path, content_type)

    def _copy_parts(self, keys: Sequence[str], target: str, content_type: str) -> bool:
        """Copies the parts within S3. Returns False without creating an object if an S3-compatible
        service doesn't support that."""
        place = self._place(target)
        upload = self._client.create_multipart_upload(**place, ContentType=content_type)
        named = {**place, "UploadId": upload["UploadId"]}
        try:
            tags = [self._copy_part(named, number, key) for number, key in enumerate(keys, 1)]
            if all(tags):
                parts = [{"PartNumber": n, "ETag": tag} for n, tag in enumerate(tags, 1)]
                self._client.complete_multipart_upload(**named, MultipartUpload={"Parts": parts})
                return True
        except ClientError as error:
            if error.response.get("Error", {}).get("Code") not in _CANT_COPY:
                raise
        finally:
            # Aborting a completed upload fails, which is expected.
            with suppress(ClientError):
                self._client.abort_multipart_upload(**named)
        return False

    def _copy_part(self, named: Mapping[str, str], number: int, key: str) -> str | None:
        copied = self._client.upload_part_copy(
            **named, PartNumber=number, CopySource=self._place(key)
        )
        tag: str | None = copied.get("CopyPartResult", {}).get("ETag")
        return tag

    async def delete(self, *keys: str) -> None:
        for key in keys:
            await self._call(key, partial(self._client.delete_object, **self._place(key)))

    async def keys(self, prefix: str) -> AsyncIterator[str]:
        async for listed in self.listed(prefix):
            yield listed.key

    async def listed(self, prefix: str) -> AsyncIterator[ListedObject]:
        bucket_prefix = f"{self._bucket.prefix}/" if self._bucket.prefix else ""
        pages = self._client.get_paginator("list_objects_v2").paginate(
            Bucket=self._bucket.name, Prefix=bucket_prefix + prefix
        )
        page_iterator = iter(pages)
        while (page := await self._call(prefix, partial(next, page_iterator, None))) is not None:
            for entry in page.get("Contents", ()):
                yield ListedObject(entry["Key"].removeprefix(bucket_prefix), entry["LastModified"])

    async def url_to_get(self, key: str, *, seconds: int, filename: str | None = None) -> str:
        params: dict[str, Any] = self._place(key)
        if filename:
            params["ResponseContentDisposition"] = disposition("attachment", filename)
        return await self._presigned("get_object", key, params, seconds)

    async def url_to_put(
        self, key: str, *, content_type: str, seconds: int, size: int | None = None
    ) -> PresignedUrl:
        params: dict[str, Any] = self._place(key)
        params["ContentType"] = checked_content_type(content_type)
        if checked_size(size, size_max=OBJECT_BYTES_MAX) is not None:
            params["ContentLength"] = size
        url = await self._presigned("put_object", key, params, seconds)
        return PresignedUrl(url, {"Content-Type": content_type})

    async def _presigned(
        self, operation: str, key: str, params: dict[str, Any], seconds: int
    ) -> str:
        sign = partial(
            self._signing.generate_presigned_url,
            operation,
            Params=params,
            ExpiresIn=checked_seconds(seconds),
        )
        # This runs in a thread, because a role's credentials may have to be renewed first. Signing
        # doesn't show whether the bucket is available.
        with _translate_errors(self._bucket, key):
            return await self._run(sign)

    async def check(self) -> None:
        await self._call("", partial(self._client.head_bucket, Bucket=self._bucket.name))

    async def aclose(self) -> None:
        if self._probing is not None:
            self._probing.cancel()
        self._threads.shutdown(wait=False, cancel_futures=True)
        self._client.close()
        self._signing.close()

    def _place(self, key: str) -> dict[str, str]:
        return {"Bucket": self._bucket.name, "Key": self._bucket.key(key)}

    async def _call(self, key: str, call: Callable[[], T], *, is_write: bool = False) -> T:
        try:
            with _translate_errors(self._bucket, key):
                result = await self._run(call)
        except Unavailable as error:
            self.outage.note_failure(error, is_write=is_write)
            if self.outage.rejects_writes and self._probing is None:
                self._probing = asyncio.create_task(self._probe_until_writable())
            raise
        # Copies return False if nothing was copied.
        self.outage.note_success(has_written=is_write and result is not False)
        return result

    async def _run(self, call: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._threads, call)

    async def _probe_until_writable(self) -> None:
        """Writes an object every few seconds until the outage ends. Only a successful write proves
        that writes work again, and this process may have no other writes."""
        put = partial(self._client.put_object, **self._place(PROBE_KEY), Body=bytes(PROBE_BYTES))
        while self.outage.rejects_writes:
            await asyncio.sleep(PROBE_SECONDS)
            with suppress(FleetError):
                await self._call(PROBE_KEY, put, is_write=True)
        self._probing = None
        with suppress(FleetError):
            await self.delete(PROBE_KEY)


def _client(session: Any, bucket: BucketUrl, endpoint: str | None) -> Any:
    # boto3 doesn't read AWS_REGION, which AWS itself sets in its containers.
    region = bucket.region or session.region_name or os.environ.get("AWS_REGION")
    return session.client(
        "s3",
        endpoint_url=endpoint,
        region_name=region or DEFAULT_REGION,
        config=Config(
            signature_version="s3v4",
            # S3-compatible services seldom have a host name per bucket. On AWS, a URL must contain
            # the region's host: the global host redirects requests for new buckets, and a PUT then
            # fails.
            s3={"addressing_style": "path" if endpoint else "virtual"},
            retries={"mode": "standard", "total_max_attempts": TRIES_MAX},
            connect_timeout=CONNECT_SECONDS_MAX,
            read_timeout=READ_SECONDS_MAX,
            max_pool_connections=THREADS_MAX,
            # Otherwise, boto3 adds checksums that S3-compatible services don't support.
            request_checksum_calculation="when_required",
            response_checksum_validation="when_required",
        ),
    )


# Error codes of S3-compatible services whose storage is full. AWS itself has no storage limit.
_FULL = frozenset(
    {
        "InsufficientStorage",
        "QuotaExceeded",
        "StorageFull",
        "XMinioAdminBucketQuotaExceeded",
        "XMinioStorageFull",
    }
)


@contextmanager
def _translate_errors(bucket: BucketUrl, key: str) -> Iterator[None]:
    where = f"s3://{bucket.name}/{bucket.prefix + '/' if bucket.prefix else ''}{key}"
    try:
        yield
    except ClientError as error:
        raise _to_our_error(error, bucket, where) from error
    except (NoCredentialsError, PartialCredentialsError) as error:
        raise AccessDenied(
            f"{where}: no credentials for S3 were found",
            bucket=bucket.name,
            hint="Set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or assign a role to the machine",
        ) from error
    except (BotoCoreError, OSError) as error:
        raise Unavailable(f"{where}: S3 can't be reached: {error}", bucket=bucket.name) from error


def _to_our_error(error: ClientError, bucket: BucketUrl, where: str) -> Exception:
    fields = error.response.get("Error", {})
    code, message = str(fields.get("Code", "")), str(fields.get("Message", "")) or "no reason given"
    details = {"bucket": bucket.name, "s3_code": code}
    if code == "NoSuchBucket":
        return Refused(f"{where}: bucket {bucket.name!r} doesn't exist", **details)
    if code in _MISSING:
        return NotFound(f"object {where} was not found", **details)
    if code in _DENIED:
        return AccessDenied(f"{where}: S3 denied access ({code}: {message})", **details)
    status = error.response.get("ResponseMetadata", {}).get("HTTPStatusCode")
    if code in _FULL or status == 507:
        return StoreFull(f"{where}: the storage is full ({code}: {message})", **details)
    return Unavailable(f"{where}: S3 responded with {code}: {message}", **details)
