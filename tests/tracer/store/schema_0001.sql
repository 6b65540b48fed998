-- The first schema, as SQLite keeps it.
CREATE TABLE adapters (
    run_id TEXT NOT NULL,
    name TEXT NOT NULL,
    version INTEGER NOT NULL,
    path TEXT NOT NULL,
    step INTEGER NOT NULL,
    created_at FLOAT NOT NULL,
    PRIMARY KEY (run_id, name, version)
);
CREATE TABLE calls (
    id TEXT NOT NULL,
    response_id TEXT NOT NULL,
    choice INTEGER NOT NULL,
    run_id TEXT,
    rollout_id TEXT,
    attempt_id TEXT,
    seq INTEGER NOT NULL,
    agent TEXT,
    model TEXT NOT NULL,
    adapter TEXT,
    adapter_version INTEGER,
    state TEXT NOT NULL,
    prompt_ids BLOB NOT NULL,
    response_ids BLOB NOT NULL,
    response_logprobs BLOB NOT NULL,
    finish_reason TEXT,
    params JSON NOT NULL,
    request JSON,
    response JSON,
    error TEXT,
    trace_id TEXT,
    span_id TEXT,
    started_at FLOAT NOT NULL,
    ended_at FLOAT,
    trained_step INTEGER,
    skip_reason TEXT,
    gateway TEXT,
    PRIMARY KEY (id)
);
CREATE INDEX calls_accounting ON calls (run_id, trained_step, skip_reason);
CREATE INDEX calls_attempt ON calls (attempt_id, seq);
CREATE INDEX calls_response ON calls (response_id);
CREATE INDEX calls_rollout ON calls (rollout_id);
CREATE TABLE gateways (
    boot_id TEXT NOT NULL,
    run_id TEXT,
    pid INTEGER NOT NULL,
    started_at FLOAT NOT NULL,
    proxied INTEGER NOT NULL,
    PRIMARY KEY (boot_id)
);
CREATE TABLE metrics (
    run_id TEXT NOT NULL,
    step INTEGER NOT NULL,
    name TEXT NOT NULL,
    value FLOAT NOT NULL,
    at FLOAT NOT NULL,
    PRIMARY KEY (run_id, step, name)
);
CREATE TABLE rewards (
    attempt_id TEXT NOT NULL,
    "key" TEXT NOT NULL,
    rollout_id TEXT NOT NULL,
    name TEXT NOT NULL,
    value FLOAT NOT NULL,
    span_id TEXT,
    response_id TEXT,
    explanation TEXT,
    created_at FLOAT NOT NULL,
    PRIMARY KEY (attempt_id, "key")
);
CREATE INDEX rewards_rollout ON rewards (rollout_id);
CREATE TABLE runs (
    id TEXT NOT NULL,
    name TEXT NOT NULL,
    kind TEXT NOT NULL,
    state TEXT NOT NULL,
    config JSON NOT NULL,
    policies JSON NOT NULL,
    created_at FLOAT NOT NULL,
    ended_at FLOAT,
    PRIMARY KEY (id)
);
CREATE TABLE spans (
    trace_id TEXT NOT NULL,
    span_id TEXT NOT NULL,
    parent_span_id TEXT,
    rollout_id TEXT,
    attempt_id TEXT,
    name TEXT NOT NULL,
    kind TEXT NOT NULL,
    start_ns BIGINT NOT NULL,
    end_ns BIGINT NOT NULL,
    status TEXT NOT NULL,
    attributes JSON NOT NULL,
    events JSON NOT NULL,
    resource JSON NOT NULL,
    PRIMARY KEY (trace_id, span_id)
);
CREATE INDEX spans_attempt ON spans (attempt_id);
CREATE TABLE tasks (
    id TEXT NOT NULL,
    run_id TEXT NOT NULL,
    split TEXT NOT NULL,
    "index" INTEGER NOT NULL,
    data JSON NOT NULL,
    PRIMARY KEY (id),
    FOREIGN KEY(run_id) REFERENCES runs (id),
    UNIQUE (run_id, split, "index")
);
CREATE TABLE rollouts (
    id TEXT NOT NULL,
    ordinal INTEGER NOT NULL,
    run_id TEXT NOT NULL,
    task_id TEXT NOT NULL,
    group_id TEXT NOT NULL,
    purpose TEXT NOT NULL,
    step INTEGER NOT NULL,
    "index" INTEGER NOT NULL,
    seed BIGINT NOT NULL,
    sampling JSON NOT NULL,
    state TEXT NOT NULL,
    reason TEXT,
    attempts INTEGER NOT NULL,
    infrastructure_retries INTEGER NOT NULL,
    winner TEXT,
    created_at FLOAT NOT NULL,
    started_at FLOAT,
    ended_at FLOAT,
    PRIMARY KEY (id),
    FOREIGN KEY(run_id) REFERENCES runs (id),
    FOREIGN KEY(task_id) REFERENCES tasks (id),
    UNIQUE (ordinal)
);
CREATE INDEX rollouts_queue ON rollouts (state, ordinal);
CREATE INDEX rollouts_step ON rollouts (run_id, step, purpose);
CREATE TABLE attempts (
    id TEXT NOT NULL,
    rollout_id TEXT NOT NULL,
    number INTEGER NOT NULL,
    state TEXT NOT NULL,
    key_hash TEXT NOT NULL,
    runner TEXT NOT NULL,
    lease_expires_at FLOAT NOT NULL,
    heartbeat_at FLOAT NOT NULL,
    started_at FLOAT NOT NULL,
    ended_at FLOAT,
    error TEXT,
    log TEXT,
    PRIMARY KEY (id),
    FOREIGN KEY(rollout_id) REFERENCES rollouts (id),
    UNIQUE (key_hash),
    UNIQUE (rollout_id, number)
);
CREATE INDEX attempts_leases ON attempts (state, lease_expires_at);
