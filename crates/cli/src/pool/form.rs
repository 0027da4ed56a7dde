//! Form of answers about pools: as a table, for scripts, or as JSON.

use super::called::Called;
use serde_json::{Value, json};

/// Form of a table.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PoolForm {
    pub scripted: bool,
    pub exact: bool,
    pub json: bool,
    /// As JSON, numbers are numbers.
    pub integers: bool,
    /// As JSON, pools are keyed by their GUIDs.
    pub by_guid: bool,
    /// Names of devices.
    pub called: Called,
}

/// Returns the head of an answer as JSON.
pub fn json_head(command: &str) -> Value {
    json!({ "command": format!("zpool {command}"), "vers_major": 0, "vers_minor": 1 })
}
