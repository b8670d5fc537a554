-- Documents: versioned bytes under a collection and a key, beside the runs. `owner` is the run that a document goes with.
-- `value` comes last, so that the other columns are read without it. `checksum` covers the whole row.
CREATE TABLE keepstep_document (
    collection TEXT NOT NULL,
    key        TEXT NOT NULL,
    version    INTEGER NOT NULL,
    at         REAL NOT NULL,
    writer     TEXT NOT NULL,
    owner      TEXT,
    expires_at REAL,
    checksum   TEXT NOT NULL,
    value      BLOB NOT NULL
);
CREATE UNIQUE INDEX keepstep_document_place ON keepstep_document (collection, key, version);
CREATE INDEX keepstep_document_owner ON keepstep_document (owner) WHERE owner IS NOT NULL;
CREATE INDEX keepstep_document_expiry ON keepstep_document (expires_at) WHERE expires_at IS NOT NULL;
