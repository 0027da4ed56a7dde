//! How answers about pools look: as a table, for scripts, or as JSON.

use super::called::Called;
use serde_json::{Value, json};

/// How a table looks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PoolForm {
    pub scripted: bool,
    pub exact: bool,
    pub json: bool,
    /// As JSON, numbers are numbers.
    pub integers: bool,
    /// As JSON, pools are found by their numbers.
    pub by_guid: bool,
    /// What devices are called.
    pub called: Called,
}

/// The head of an answer as JSON.
pub fn json_head(command: &str) -> Value {
    json!({ "command": format!("zpool {command}"), "vers_major": 0, "vers_minor": 1 })
}
