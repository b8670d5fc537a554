"""Files of artifacts: a folder of files, named by the SHA-256 of their contents, written whole or not at all."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterable, Iterator
from hashlib import file_digest, sha256
from pathlib import Path
from typing import IO, Any, NamedTuple

from ..errors import CheckpointCorrupt, StoreFull, StoreUnavailable
from ..model.ids import draw

#: Bytes that are read, written and encrypted at a time.
CHUNK = 1 << 20
#: Seconds after which a file that was never finished is removed.
UNFINISHED_SECONDS = 86_400.0

_FULL = {28, 122}
_TEMPORARY, _TRASH = ".part-", ".trash-"

#: Encrypts or decrypts one chunk: its number, whether it is the last one, and its bytes.
Crypt = Callable[[int, bool, bytes], bytes]


class Sealing(NamedTuple):
    """How the chunks of a new file are encrypted, and the line before them, which tells how to decrypt them."""

    header: bytes
    encrypt: Crypt


class ArtifactFiles:
    """The files of one folder, which is made with the first file.

    `unsealing` returns how to decrypt a file from its first line.
    """

    def __init__(self, folder: str | os.PathLike[str], unsealing: Callable[[bytes], Crypt] | None = None) -> None:
        self.folder = Path(folder)
        self._unsealing = unsealing

    # -- writing -----------------------------------------------------------------------------------------------------

    def write(self, chunks: Iterable[bytes], sealing: Sealing | None = None) -> Unfinished:
        """Write a file that has no name yet, durably. Its `finish` gives it its name."""
        with self._translating():
            self.folder.mkdir(parents=True, exist_ok=True)
            temporary = self.folder / f"{_TEMPORARY}{draw(8).hex()}"
            digest, size = sha256(), 0
            try:
                with temporary.open("xb") as file:
                    if sealing is not None:
                        file.write(sealing.header)
                    for number, (chunk, is_last) in enumerate(_with_last(_sized(chunks))):
                        digest.update(chunk)
                        size += len(chunk)
                        if sealing is None:
                            file.write(chunk)
                        else:
                            sealed = sealing.encrypt(number, is_last, chunk)
                            file.write(len(sealed).to_bytes(4, "big") + sealed)
                    file.flush()
                    os.fsync(file.fileno())
            except BaseException:
                temporary.unlink(missing_ok=True)
                raise
        return Unfinished(self, temporary, digest.hexdigest(), size)

    def finish(self, temporary: Path, digest: str) -> None:
        """Give a finished file its name, durably. An equal one is replaced."""
        target = self.path(digest)
        with self._translating():
            is_new = not target.parent.exists()
            target.parent.mkdir(exist_ok=True)
            temporary.replace(target)
            _sync(target.parent)
            if is_new:
                _sync(self.folder)
                _sync(self.folder.parent)

    def adopt(self, path: Path, digest: str) -> None:
        """Copy a file of another folder as it is, durably."""
        with self._translating():
            self.folder.mkdir(parents=True, exist_ok=True)
            temporary = self.folder / f"{_TEMPORARY}{draw(8).hex()}"
            with path.open("rb") as source, temporary.open("xb") as file:
                while chunk := source.read(CHUNK):
                    file.write(chunk)
                file.flush()
                os.fsync(file.fileno())
        self.finish(temporary, digest)

    # -- reading -----------------------------------------------------------------------------------------------------

    def path(self, digest: str) -> Path:
        """Return the place of a file."""
        return self.folder / digest[:2] / digest

    def is_sealed(self, digest: str) -> bool:
        """Whether a file is encrypted."""
        with self._opened(digest) as file:
            return _is_sealed(file, digest)

    def chunks(self, digest: str) -> Iterator[bytes]:
        """Yield the contents of a file, decrypted. Raise `CheckpointCorrupt` at the end if they have changed."""
        found = sha256()
        with self._opened(digest) as file:
            if _is_sealed(file, digest):
                yield from _hashed(self._decrypted(file, file.readline(200), digest), found)
            else:
                yield from _hashed(iter(lambda: file.read(CHUNK), b""), found)
        if found.hexdigest() != digest:
            raise damaged(digest, "its contents are not those that were written")

    def _decrypted(self, file: IO[bytes], header: bytes, digest: str) -> Iterator[bytes]:
        if self._unsealing is None:
            raise damaged(digest, "it is encrypted, and there are no keys here")
        decrypt = self._unsealing(header)
        number, length = 0, file.read(4)
        while length:
            data = file.read(int.from_bytes(length, "big"))
            length = file.read(4)
            yield decrypt(number, not length, data)
            number += 1

    @contextlib.contextmanager
    def _opened(self, digest: str) -> Iterator[IO[bytes]]:
        try:
            file = self.path(digest).open("rb")
        except FileNotFoundError:
            raise damaged(digest, f"its file {self.path(digest)} is missing") from None
        except OSError as error:
            raise StoreUnavailable(f"{self.path(digest)}: {error.strerror or error}") from None
        with file:
            yield file

    def digests(self) -> Iterator[str]:
        """Yield the digest of every file."""
        for shard in sorted(self.folder.glob("[0-9a-f][0-9a-f]")):
            for one in sorted(shard.iterdir()):
                if len(one.name) == 64 and not one.name.startswith("."):
                    yield one.name

    # -- removing ----------------------------------------------------------------------------------------------------

    def sweep(self, is_referenced: Callable[[str], bool]) -> int:
        """Remove files that nobody refers to, and unfinished ones of a day ago. Return the number of files removed.

        A writer makes its reference before it gives the file its name. A file is therefore put aside first, and put
        back if there is a reference now.
        """
        removed = 0
        if not self.folder.is_dir():
            return 0
        with self._translating():
            for trash in self.folder.glob(f"{_TRASH}*"):  # of a sweep that was interrupted
                removed += self._settle(trash, trash.name.removeprefix(_TRASH), is_referenced)
            for digest in [*self.digests()]:
                if not is_referenced(digest):
                    trash = self.folder / f"{_TRASH}{digest}"
                    with contextlib.suppress(FileNotFoundError):
                        self.path(digest).replace(trash)
                        removed += self._settle(trash, digest, is_referenced)
            for part in self.folder.glob(f"{_TEMPORARY}*"):
                with contextlib.suppress(FileNotFoundError):
                    if time.time() - part.stat().st_mtime > UNFINISHED_SECONDS:
                        part.unlink()
        return removed

    def _settle(self, trash: Path, digest: str, is_referenced: Callable[[str], bool]) -> int:
        if is_referenced(digest) and not self.path(digest).exists():
            trash.replace(self.path(digest))
            return 0
        trash.unlink(missing_ok=True)
        return 1

    @contextlib.contextmanager
    def _translating(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            failure = StoreFull if error.errno in _FULL else StoreUnavailable
            raise failure(f"{self.folder}: {error.strerror or error}") from error


#: Start of the first line of an encrypted file.
SEALED = b"keepstep-artifact-1 "


class Unfinished(NamedTuple):
    """A file that is written and has no name yet."""

    files: ArtifactFiles
    temporary: Path
    digest: str
    size: int

    def finish(self) -> None:
        self.files.finish(self.temporary, self.digest)


def damaged(digest: str, why: str) -> CheckpointCorrupt:
    """Return the error of an artifact that cannot be read."""
    return CheckpointCorrupt(f"artifact {digest[:12]}…: {why}")


def _is_sealed(file: IO[bytes], digest: str) -> bool:
    """Whether a file is encrypted; go back to its start. Plain contents may begin as an encrypted file does."""
    begins = file.readline(200).startswith(SEALED)
    file.seek(0)
    if begins:
        begins = file_digest(file, "sha256").hexdigest() != digest  # type: ignore[arg-type]
        file.seek(0)
    return begins


def _hashed(chunks: Iterable[bytes], digest: Any) -> Iterator[bytes]:
    for chunk in chunks:
        digest.update(chunk)
        yield chunk


def _sized(chunks: Iterable[bytes]) -> Iterator[bytes]:
    """Yield the same bytes in chunks of `CHUNK`, the last one shorter."""
    waiting = bytearray()
    for chunk in chunks:
        waiting += chunk
        while len(waiting) > CHUNK:
            yield bytes(waiting[:CHUNK])
            del waiting[:CHUNK]
    yield bytes(waiting)


def _with_last(chunks: Iterator[bytes]) -> Iterator[tuple[bytes, bool]]:
    """Yield each chunk, and whether it is the last one."""
    before = next(chunks)
    for chunk in chunks:
        yield before, False
        before = chunk
    yield before, True


def _sync(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
