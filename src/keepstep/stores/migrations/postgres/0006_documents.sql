-- Documents: versioned bytes under a collection and a key, beside the runs. `owner` is the run that a document goes with.
-- `checksum` covers the whole row. Keys compare byte by byte, as in every store.
CREATE TABLE keepstep_document (
    collection text COLLATE "C" NOT NULL,
    key        text COLLATE "C" NOT NULL,
    version    bigint NOT NULL,
    at         timestamptz NOT NULL,
    writer     text COLLATE "C" NOT NULL,
    owner      text COLLATE "C",
    expires_at timestamptz,
    checksum   text NOT NULL,
    value      bytea NOT NULL,
    PRIMARY KEY (collection, key, version)
);
CREATE INDEX keepstep_document_owner ON keepstep_document (owner) WHERE owner IS NOT NULL;
CREATE INDEX keepstep_document_expiry ON keepstep_document (expires_at) WHERE expires_at IS NOT NULL;
