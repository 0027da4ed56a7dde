//! What the tests of logs, metrics, hooks and `top` need beside mounts.

pub mod exposition;
