"""Models in Google Cloud Storage: gs://bucket/folder, copied once into a folder of the cache.

Files are fetched in parts, several at once. A part that is there is not fetched again after a
broken download; a file is renamed into place when its checksum is right. Credentials are
Google's application default ones, or none, for public buckets.
"""

from __future__ import annotations

import base64
import json
import logging
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from checkpoint.errors import CheckpointError
from checkpoint.file_patterns import ALL_PATTERNS
from checkpoint.lock import locked
from checkpoint.part_file import Part, PartFile
from checkpoint.weights import INDEX_FILE, SINGLE_FILE, no_safetensors
from settings.config import GIB
from telemetry.progress import byte_progress

logger = logging.getLogger("hexserve.checkpoint")

DOWNLOAD_THREADS = 16
RETRY_S = 60.0
"""How long one part is tried, where the service says that it may be tried again."""
GENERATIONS_FILE = ".generations.json"
"""Of the files that are here: name → generation, Cloud Storage's number of an object's state."""


@dataclass(frozen=True, slots=True)
class _Object:
    """One object as it was when the bucket was listed; `crc32c` in base64, None if unknown."""

    bucket: Any
    path: str
    size: int
    generation: int
    crc32c: str | None

    def fetch(self, begin: int, end: int) -> bytes:
        """Its bytes [begin, end)."""
        from google.cloud.storage.retry import DEFAULT_RETRY

        # A handle of its own: a download overwrites what the handle knows of the object.
        data: bytes = self.bucket.blob(self.path).download_as_bytes(
            start=begin,
            end=end - 1,
            raw_download=True,
            checksum=None,  # of the whole file, which is checked when it is there
            if_generation_match=self.generation,
            timeout=RETRY_S,
            retry=DEFAULT_RETRY.with_timeout(RETRY_S),
        )
        return data


def fetch_gcs(url: str, cache: Path, patterns: Sequence[str]) -> Path:
    """Returns the folder under `cache` with the files of `url` that match one of `patterns`.

    Files that have not changed since an earlier call are not fetched again; processes that call
    it together wait for the first one.

    Raises:
        CheckpointError: the client library is not installed, there is no such bucket or folder,
            access is denied, the service cannot be reached, or a file does not arrive whole.
    """
    bucket, prefix = split_url(url)
    with _explained(url):
        objects = _matching(_client().bucket(bucket), prefix, patterns, url)
        target = cache.joinpath("gcs", bucket, *prefix.split("/"))
        target.mkdir(parents=True, exist_ok=True)
        with locked(target / ".lock", f"fetching {url}"):
            _fetch_missing(objects, target, url)
    return target


def split_url(url: str) -> tuple[str, str]:
    """("bucket", "folder/of/model") of gs://bucket/folder/of/model.

    Raises:
        CheckpointError: no bucket is named, or the path has parts that no folder can have.
    """
    bucket, _, path = url.removeprefix("gs://").partition("/")
    prefix = path.strip("/")
    names = [bucket, *(prefix.split("/") if prefix else ())]
    if any(name in ("", ".", "..") or "\0" in name for name in names):
        raise CheckpointError(f"{url}: gs://bucket/folder is wanted")
    return bucket, prefix


def _client() -> Any:
    from google.auth.exceptions import DefaultCredentialsError
    from google.cloud import storage

    try:
        return storage.Client()
    except DefaultCredentialsError:
        logger.info("no Google credentials here: trying without, as for a public bucket")
        return storage.Client.create_anonymous_client()


@contextmanager
def _explained(url: str) -> Iterator[None]:
    """Turns what the client library and the disk raise into messages that name `url`."""
    try:
        from google.api_core import exceptions as api
        from google.auth.exceptions import GoogleAuthError
        from google.cloud import storage  # noqa: F401 - is it there?
        from requests import RequestException
    except ImportError as error:
        raise CheckpointError(
            f"{url}: gs:// models need Google's client library: pip install 'hexserve[gcs]'"
        ) from error
    try:
        yield
    except api.NotFound as error:
        raise CheckpointError(f"{url}: there is no such bucket or object") from error
    except (api.Unauthorized, api.Forbidden) as error:
        raise CheckpointError(
            f"{url}: access is denied ({_reason(error)}). Give the account that this runs as "
            "the role Storage Object Viewer, or log in (gcloud auth application-default login)"
        ) from error
    except (api.PreconditionFailed, api.RequestRangeNotSatisfiable) as error:
        raise CheckpointError(f"{url}: changed while it was fetched; start again") from error
    except (api.GoogleAPIError, GoogleAuthError, RequestException) as error:
        raise CheckpointError(
            f"{url}: cannot be fetched from Google Cloud Storage ({_reason(error)})"
        ) from error
    except OSError as error:
        raise CheckpointError(f"{url}: cannot be kept in the cache ({error})") from error


def _reason(error: Exception) -> str:
    message = getattr(error, "message", None) or str(error) or type(error).__name__
    return str(message).splitlines()[0][:300]


def _matching(bucket: Any, prefix: str, patterns: Sequence[str], url: str) -> dict[str, _Object]:
    """The objects of the top folder whose names match, by name; at least one."""
    start = f"{prefix}/" if prefix else ""
    blobs = list(bucket.list_blobs(prefix=start, delimiter="/", timeout=RETRY_S))
    names = [blob.name.removeprefix(start) for blob in blobs]
    matching = {
        name: _Object(bucket, blob.name, blob.size, blob.generation, blob.crc32c)
        for blob, name in zip(blobs, names, strict=True)
        # Hidden names are those of the fetching itself, above all GENERATIONS_FILE.
        if not name.startswith(".") and any(fnmatch(name, pattern) for pattern in patterns)
    }
    if not matching:
        what = f"only {', '.join(sorted(names)[:4])}" if any(names) else "no object begins with it"
        raise CheckpointError(f"{url}: no model is there ({what})")
    if patterns == ALL_PATTERNS and SINGLE_FILE not in names and INDEX_FILE not in names:
        raise CheckpointError(no_safetensors(url, names))
    return matching


def _fetch_missing(wanted: dict[str, _Object], target: Path, url: str) -> None:
    """Makes the files in `target` what they are in the bucket. The lock is held."""
    generations = _read_generations(target)
    missing = {
        name: each
        for name, each in wanted.items()
        if generations.get(name) != each.generation or not (target / name).is_file()
    }
    # What has been deleted in the bucket must not be taken for a part of the model.
    if any(name.endswith(".safetensors") for name in wanted):
        for name in generations.keys() - wanted.keys():
            (target / name).unlink(missing_ok=True)
            del generations[name]
    if missing:
        _fetch(missing, target, url, generations)
    _write_generations(target, generations)


def _fetch(
    missing: dict[str, _Object], target: Path, url: str, generations: dict[str, int]
) -> None:
    files = {
        name: PartFile(target / name, each.size, str(each.generation))
        for name, each in missing.items()
    }
    size = sum(file.size for file in files.values())
    logger.info("fetching %s: %d files, %.2f GiB", url, len(files), size / GIB)
    with (
        ThreadPoolExecutor(DOWNLOAD_THREADS, thread_name_prefix="gcs") as pool,
        byte_progress(size, f"fetching {url}", logger) as on_bytes,
    ):
        try:
            futures = []
            for name, file in files.items():
                on_bytes(file.size - sum(part.size for part in file.missing))
                for part in file.missing:
                    futures.append(pool.submit(_fetch_part, missing[name], file, part, on_bytes))
            for future in futures:
                future.result()
            for name, file in files.items():
                _check(file, missing[name], url)
                file.finish()
                generations[name] = missing[name].generation
                _write_generations(target, generations)
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def _fetch_part(
    source: _Object, file: PartFile, part: Part, on_bytes: Callable[[int], None]
) -> None:
    file.write(part, source.fetch(part.begin, part.end))
    on_bytes(part.size)


def _check(file: PartFile, source: _Object, url: str) -> None:
    import google_crc32c

    checksum = google_crc32c.Checksum()
    for piece in file.pieces():
        checksum.update(piece)
    if source.crc32c and base64.b64encode(checksum.digest()).decode() != source.crc32c:
        file.discard()
        raise CheckpointError(
            f"{url}: {file.path.name} has arrived with a wrong checksum and was thrown away; "
            "start again"
        )


def _read_generations(target: Path) -> dict[str, int]:
    try:
        stored = json.loads((target / GENERATIONS_FILE).read_text())
    except (FileNotFoundError, ValueError):
        return {}
    return dict(stored)


def _write_generations(target: Path, generations: dict[str, int]) -> None:
    scratch = target / f"{GENERATIONS_FILE}.new"
    scratch.write_text(json.dumps(generations, indent=1))
    os.replace(scratch, target / GENERATIONS_FILE)
