"""What the drivers of remote stores raise, in our words.

Drivers wrap the service's reply several times and lose parts of it on the way (a 412 becomes
FileExistsError, or OSError with EINVAL), so the whole chain of causes is looked at.
"""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager

from ckptfmt.errors import CheckpointError, CorruptError, NotFoundError, StorageError
from ckptfmt.storage import failures

_CREDENTIALS = {
    "NoCredentialsError",
    "PartialCredentialsError",
    "CredentialRetrievalError",
    "TokenRetrievalError",
    "DefaultCredentialsError",
    "RefreshError",
    "ClientAuthenticationError",
}
# By name: the drivers that define them are not imported here.
_NETWORK = {
    "FSTimeoutError",
    "EndpointConnectionError",
    "ConnectionClosedError",
    "ConnectTimeoutError",
    "ReadTimeoutError",
    "HTTPClientError",
    "ClientConnectorError",
    "ClientOSError",
    "ServerDisconnectedError",
    "ClientPayloadError",
    "ServiceRequestError",
    "ServiceResponseError",
    "IncompleteReadError",
    "ResponseStreamingError",
}


def chain(error: BaseException) -> Iterator[BaseException]:
    """The error, what caused it, what caused that."""
    seen: set[int] = set()
    current: BaseException | None = error
    while current is not None and id(current) not in seen:
        seen.add(id(current))
        yield current
        current = current.__cause__ or current.__context__


def status_of(error: BaseException) -> int | None:
    """The HTTP status that the service replied with, if one can be found."""
    for link in chain(error):
        response = getattr(link, "response", None)
        if isinstance(response, dict):  # botocore
            status = response.get("ResponseMetadata", {}).get("HTTPStatusCode")
            if isinstance(status, int):
                return status
        for name in ("status_code", "status", "code"):  # azure, aiohttp, gcsfs
            status = getattr(link, name, None)
            if isinstance(status, int) and 100 <= status < 600:
                return status
            if isinstance(status, str) and status.isdecimal() and len(status) == 3:
                return int(status)
    return None


def says_taken(error: BaseException) -> bool:
    """The key exists already (412; 409 of Azure, and of S3 during a race)."""
    return isinstance(error, FileExistsError) or status_of(error) in (409, 412)


def says_beyond_end(error: BaseException) -> bool:
    """The range begins behind the object's end (416)."""
    return status_of(error) == 416


def says_refused(error: BaseException) -> bool:
    """The service certainly did not do it: it understood the request and said no."""
    if isinstance(error, FileNotFoundError | PermissionError | TypeError | ValueError):
        return True
    if any(type(link).__name__ in _CREDENTIALS for link in chain(error)):
        return True
    status = status_of(error)
    return status is not None and 400 <= status < 500 and status not in (408, 409, 429)


def from_driver(
    error: BaseException, where: str, *, writing: bool = False, outcome_unknown: bool = False
) -> CheckpointError:
    """The error of ours that says what a driver's error says."""
    if isinstance(error, CheckpointError):
        return error
    status = status_of(error)
    found = str(error).strip() or type(error).__name__
    absent = isinstance(error, FileNotFoundError | NotADirectoryError) or status == 404
    if absent and not writing:
        return failures.no_object(where)
    names = {type(link).__name__ for link in chain(error)}
    if isinstance(error, PermissionError) or status in (401, 403) or names & _CREDENTIALS:
        return StorageError(
            "access denied",
            reason="access-denied",
            where=where,
            found=found,
            do="check credentials, bucket and policy",
            errno=errno.EACCES,
        )
    if status in (507,):
        return StorageError(
            "no space left",
            reason="no-space",
            where=where,
            found=found,
            do="raise the quota, or free space (ckptfmt gc) and save again",
            errno=errno.ENOSPC,
        )
    code = error.errno if isinstance(error, OSError) else None
    if status is None and code and isinstance(error, OSError):
        mapped = (failures.from_write_error if writing else failures.from_os_error)(
            error, where, outcome_unknown=outcome_unknown
        )
        if isinstance(mapped, StorageError) and not names & _NETWORK:
            return mapped
        if isinstance(mapped, NotFoundError | CorruptError):
            return mapped
    passing = status in (408, 409, 425, 429) or (status is not None and status >= 500)
    passing = passing or isinstance(error, TimeoutError | ConnectionError) or bool(names & _NETWORK)
    return StorageError(
        "the store failed" if status is None else f"the store replied {status}",
        reason="io",
        where=where,
        found=found,
        do="check that the bucket or server exists and answers" if absent else "try again later",
        retryable=passing,
        outcome_unknown=outcome_unknown,
        errno=code,
    )


@contextmanager
def mapped(where: str, *, writing: bool = False) -> Iterator[None]:
    """Whatever the driver raises inside comes out as ours."""
    try:
        yield
    except Exception as error:
        raise from_driver(error, where, writing=writing) from error
