//! Messages between commands and daemon processes: a line is parsed or refused, a parsed message
//! can be sent again, and no line of an untrusted process has control characters for a terminal.

use nacre_daemon::{
    control,
    pool::start::Start,
    rpc::{Message, Source, line},
    shared::wire::{MountRequest, Progress},
};
use serde::{Serialize, de::DeserializeOwned};
use serde_json::Value;

/// Limit of a line: longer ones are refused.
const MOST: u64 = 1 << 16;

/// Parses requests, answers and notes of all three: mounts, shared processes, pools.
pub fn messages(data: &[u8]) {
    lines::<control::Request>(data);
    lines::<Message<control::Answer>>(data);
    lines::<Message<Progress>>(data);
    lines::<nacre_admin::Command>(data);
    lines::<Message<nacre_admin::Reply>>(data);
    lines::<Start>(data);
    each::<MountRequest>(data, false, |request| {
        let _ = request.plan();
    });
}

fn lines<T: Serialize + DeserializeOwned>(data: &[u8]) {
    each::<T>(data, false, |_| {});
    each::<T>(data, true, |message| {
        let shown = serde_json::to_value(message);
        assert!(shown.is_ok_and(|value| is_harmless(&value)), "{}", data.escape_ascii());
    });
}

/// Calls `look` for each line that can be parsed.
fn each<T: Serialize + DeserializeOwned>(mut data: &[u8], harmless: bool, look: impl Fn(&T)) {
    while let Ok(Some(message)) = line::receive::<T>(&mut data, Source { most: MOST, harmless }) {
        look(&message);
        let mut again = serde_json::to_vec(&message).unwrap_or_default();
        again.push(b'\n');
        let read = line::receive::<T>(&mut again.as_slice(), Source { most: u64::MAX, harmless: false });
        assert!(matches!(read, Ok(Some(_))), "{}", again.escape_ascii());
    }
}

fn is_harmless(value: &Value) -> bool {
    match value {
        Value::String(text) => !text.contains(char::is_control),
        Value::Array(values) => values.iter().all(is_harmless),
        Value::Object(fields) => {
            fields.iter().all(|(name, value)| !name.contains(char::is_control) && is_harmless(value))
        }
        _ => true,
    }
}
