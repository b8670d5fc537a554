"""`artifacts`: what lies beside the store, one of them as a file, and whether all are whole."""

from __future__ import annotations

import keepstep as ks
from keepstep.cli import errors


def test_artifacts_are_listed_fetched_and_verified(keepstep, folder):
    (folder / ".keepstep").mkdir()
    with ks.open(folder / ".keepstep/runs.db") as engine:
        artifact = ks.Artifact.write(b"contents", name="a.txt", engine=engine).result()
    listed = keepstep("artifacts", "--json").json["artifacts"]
    assert listed == [{"digest": artifact.digest, "size": 8, "names": ["a.txt"], "runs": []}]
    assert "a.txt" in keepstep("artifacts").out
    assert keepstep("artifacts", "get", artifact.digest[:8], "out.txt").code == 0
    assert (folder / "out.txt").read_bytes() == b"contents"
    assert keepstep("artifacts", "get", artifact.digest[:8], "out.txt").code == errors.USAGE
    assert keepstep("artifacts", "get", "ffff", "other.txt").code == errors.NOT_FOUND
    assert keepstep("artifacts", "get").code == errors.USAGE
    assert keepstep("artifacts", "verify").code == 0
    assert keepstep("verify").code == 0
    assert keepstep("artifacts", "sweep", "--json").json == {"removed": 0}
    (path,) = (folder / ".keepstep/runs.db-artifacts").rglob(artifact.digest)
    path.write_bytes(b"CONTENTS")
    assert keepstep("artifacts", "verify").code == errors.FAILED
    assert keepstep("verify").code == errors.FAILED
