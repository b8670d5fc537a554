"""Artifacts: results that are too large for a record, as files beside the store, with references of runs to them."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterable, Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import msgspec

from ..errors import DefinitionError
from ..kernel.context import in_workflow
from ..ports import CURRENT, Store
from ..stores.artifact_files import CHUNK, ArtifactFiles
from ..stores.artifacts import COLLECTION, PENDING, VARIABLE, files_of, flaws_of, sealing_of, sweep_files
from ..values import VALUES
from ..workflows.call import Call, PlainCall

if TYPE_CHECKING:
    from .documents import Documents

Source = bytes | str | os.PathLike[str] | IO[bytes] | Iterable[bytes] | AsyncIterable[bytes]


class _Reference(msgspec.Struct, omit_defaults=True):
    """The value of a reference."""

    size: int
    name: str = ""
    media_type: str = ""


_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder(_Reference).decode


@dataclass(frozen=True, slots=True)
class Artifact:
    """A file beside the store, named by the SHA-256 of its contents; as small as any value in a record.

    Await the result of a method, or call its `.result()` in plain def code. Methods work in the body of a step, and
    outside a run with `engine`.
    """

    digest: str
    size: int
    name: str = ""
    media_type: str = ""

    @staticmethod
    def write(source: Source, *, name: str = "", media_type: str = "", engine: Any = None) -> Call[Artifact]:
        """Write bytes, the file of a path, an open file or chunks, and return the artifact, which is durable then.

        It belongs to the run of the current step and is removed with it. Outside a run it stays until
        `engine.artifacts.remove`.
        """
        return _call(lambda here: here.write(source, name=name, media_type=media_type, owner=_owner()), engine)

    def read(self, *, engine: Any = None) -> Call[bytes]:
        """Return the contents, verified."""
        return _call(lambda here: asyncio.to_thread(here.read, self), engine)

    def open(self, *, engine: Any = None) -> Call[IO[bytes]]:
        """Return the contents as a file for reading, verified."""
        return _call(lambda here: asyncio.to_thread(here.open, self), engine)

    def path(self, *, engine: Any = None) -> Call[Path]:
        """Return the path of the file, verified. The file must not be changed; an encrypted one is refused."""
        return _call(lambda here: asyncio.to_thread(here.path, self), engine)

    def keep(self, *, engine: Any = None) -> Call[None]:
        """Let an artifact of another run belong to this run, too, so that it stays as long as either."""
        return _call(lambda here: here.refer(self, owner=_owner()), engine)


VALUES.register(Artifact, "ks.Artifact")


def _call(act: Callable[[Artifacts], Any], engine: Any) -> Call[Any]:
    if in_workflow():
        raise DefinitionError("an artifact is used in the workflow itself; write and read it in a step")
    scope = CURRENT.get()
    host = engine if engine is not None or scope is None else scope.run.host
    if host is None:
        raise DefinitionError("an artifact is used outside a run, so its store is not known; give engine=engine")
    here = host if isinstance(host, Artifacts) else host.artifacts
    here = here if isinstance(here, Artifacts) else here.artifacts  # of a blocking engine

    async def body() -> Any:
        return await act(here)

    return PlainCall(body, (), {})


def _owner() -> str:
    scope = CURRENT.get()
    return "" if scope is None else scope.run.id


@dataclass(frozen=True, slots=True)
class ArtifactInfo:
    """An artifact of a store: its digest, size, names, and the runs that it belongs to."""

    digest: str
    size: int
    names: tuple[str, ...]
    runs: tuple[str, ...]


class Artifacts:
    """The artifacts of a store. Given by `engine.artifacts`."""

    def __init__(self, store: Store, documents: Documents, folder: str | os.PathLike[str] | None = None) -> None:
        self._store = store
        self._documents = documents
        self._folder = folder
        self._files: ArtifactFiles | None = None

    @property
    def files(self) -> ArtifactFiles:
        """The files; an error tells how to name their folder."""
        self._files = self._files or files_of(self._store, self._folder)
        if self._files is None:
            raise DefinitionError(
                f"the store {self._store.url} has no folder for artifacts; name one that all workers share, with "
                f'ks.open(..., artifacts="folder") or {VARIABLE}'
            )
        return self._files

    # -- writing -----------------------------------------------------------------------------------------------------

    async def write(self, source: Source, *, name: str = "", media_type: str = "", owner: str = "") -> Artifact:
        """Write an artifact, its reference, and make both durable."""
        _check_text(name, "name=")
        _check_text(media_type, "media_type=")
        if isinstance(source, AsyncIterable):
            with await _gathered(source) as gathered:
                file = await asyncio.to_thread(self.files.write, _chunks(gathered), sealing_of(self._store))
        else:
            file = await asyncio.to_thread(self.files.write, _chunks(source), sealing_of(self._store))
        artifact = Artifact(file.digest, file.size, name, media_type)
        try:
            await self.refer(artifact, owner=owner, pending=True)
        except BaseException:
            file.temporary.unlink(missing_ok=True)
            raise
        await asyncio.to_thread(file.finish)
        await self.refer(artifact, owner=owner)
        return artifact

    async def refer(self, artifact: Artifact, *, owner: str = "", pending: bool = False) -> None:
        """Write the reference of a run to an artifact."""
        value = _encode(_Reference(artifact.size, artifact.name, artifact.media_type))
        key = f"{_checked(artifact.digest)}/{owner}"
        if pending and await self._documents.get(COLLECTION, key) is not None:
            return  # the run has such an artifact already, and its file must not be given up
        await self._documents.put(COLLECTION, key, value, owner=owner, writer=PENDING if pending else "")

    # -- reading -----------------------------------------------------------------------------------------------------

    def read(self, artifact: Artifact) -> bytes:
        """Return the contents, verified."""
        return b"".join(self.files.chunks(_checked(artifact.digest)))

    def open(self, artifact: Artifact) -> IO[bytes]:
        """Return a file for reading, verified. An encrypted artifact is decrypted into a temporary file."""
        if not self.files.is_sealed(_checked(artifact.digest)):
            return self.path(artifact).open("rb")
        file = _temporary_file()
        for chunk in self.files.chunks(artifact.digest):
            file.write(chunk)
        file.seek(0)
        return file

    def path(self, artifact: Artifact) -> Path:
        """Return the path of the file, verified."""
        if self.files.is_sealed(_checked(artifact.digest)):
            raise DefinitionError("the file of an artifact is encrypted here; use read() or open() instead of path()")
        for _ in self.files.chunks(artifact.digest):
            pass
        return self.files.path(artifact.digest)

    async def list(self) -> Sequence[ArtifactInfo]:
        """Return all artifacts that something refers to, by digest."""
        found: dict[str, ArtifactInfo] = {}
        for one in await self._documents.list(COLLECTION):
            digest, _, run = one.key.partition("/")
            facts = _decode(one.value)
            before = found.get(digest) or ArtifactInfo(digest, facts.size, (), ())
            names = before.names if facts.name in before.names or not facts.name else (*before.names, facts.name)
            found[digest] = ArtifactInfo(digest, facts.size, names, (*before.runs, *([run] if run else [])))
        return [*found.values()]

    # -- care --------------------------------------------------------------------------------------------------------

    async def remove(self, digest: str) -> int:
        """Remove the reference that belongs to no run, and the file if no run refers to it. Return 1 if it is gone."""
        await self._documents.put(COLLECTION, f"{_checked(digest)}/", None)
        return await self.sweep()

    async def sweep(self) -> int:
        """Remove files that nothing refers to. Return their number."""
        if self._files is None and self._store.url == "memory:":
            return 0  # nothing was written here, and no folder is made for that
        files = files_of(self._store, self._folder)
        if files is None or not files.folder.is_dir():
            return 0
        return await asyncio.to_thread(sweep_files, self._store, files)

    async def verify(self) -> Sequence[str]:
        """Read all artifacts, and return what is missing or damaged."""
        files = files_of(self._store, self._folder)
        return await asyncio.to_thread(lambda: [what for _, what in flaws_of(self._store, files)])


# -- sources -----------------------------------------------------------------------------------------------------------


def _chunks(source: Any) -> Iterable[bytes]:
    if isinstance(source, bytes | bytearray | memoryview):
        return [bytes(source)]
    if isinstance(source, str | os.PathLike):
        return _file_chunks(Path(source))
    if hasattr(source, "read"):
        return _read_chunks(source)
    if isinstance(source, Iterable):
        return source
    raise DefinitionError(f"source must be bytes, a path, an open binary file or chunks of bytes, got {source!r}")


def _file_chunks(path: Path) -> Iterator[bytes]:
    try:
        with path.open("rb") as file:
            yield from _read_chunks(file)
    except (FileNotFoundError, IsADirectoryError, PermissionError) as error:
        raise DefinitionError(f"{path} cannot be read: {error.strerror}") from None


def _read_chunks(file: IO[bytes]) -> Iterator[bytes]:
    while chunk := file.read(CHUNK):
        if not isinstance(chunk, bytes):
            raise DefinitionError("source must be a file that is opened in binary mode")
        yield chunk


async def _gathered(source: AsyncIterable[bytes]) -> IO[bytes]:
    """Write chunks that come one by one into a temporary file."""
    file = _temporary_file()
    async for chunk in source:
        file.write(chunk)
    file.seek(0)
    return file


def _temporary_file() -> IO[bytes]:
    from tempfile import TemporaryFile  # noqa: PLC0415 - rarely needed

    return TemporaryFile()


def _checked(digest: str) -> str:
    if not isinstance(digest, str) or len(digest) != 64 or not set(digest) <= set("0123456789abcdef"):
        raise DefinitionError(f"a digest must be 64 hexadecimal digits, got {digest!r:.80}")
    return digest


def _check_text(text: Any, what: str) -> None:
    if not isinstance(text, str) or len(text.encode(errors="replace")) > 500 or not all(map(_is_stored, text)):
        raise DefinitionError(
            f"{what} must be Unicode text of at most 500 bytes without control characters, got {text!r:.80}"
        )


def _is_stored(char: str) -> bool:
    return char >= " " and not "\ud800" <= char <= "\udfff"
