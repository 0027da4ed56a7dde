//! The protocol of docker's volume plugins, version 1, which podman speaks as well: JSON in POST
//! requests, one call each.

use crate::{
    failure::{Failure, Kind},
    http::Request,
    log,
    options::{Options, shown},
    volumes::{Shown, Volumes},
};
use serde::Deserialize;
use serde_json::{Value, json};
use std::time::Instant;

/// Media type of the answers.
const JSON: &str = "application/vnd.docker.plugins.v1.1+json";
/// Media type of the metrics.
const METRICS: &str = "text/plain; version=0.0.4";

/// The path of the call that makes a volume; one that fails has a directory to delete.
const CREATE: &str = "/VolumeDriver.Create";
/// The path of the call that removes a volume.
const REMOVE: &str = "/VolumeDriver.Remove";

/// Whether files may have to be deleted after this call.
pub fn leaves_files(path: &str) -> bool {
    [CREATE, REMOVE].contains(&path)
}

/// An answer to a request.
pub struct Answer {
    /// Status of HTTP.
    pub status: u16,
    /// Media type.
    pub kind: &'static str,
    /// The body.
    pub body: Vec<u8>,
}

/// The arguments of all calls; each call uses some of them.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct Arguments {
    #[serde(rename = "Name")]
    name: String,
    #[serde(rename = "ID")]
    id: String,
    #[serde(rename = "Opts")]
    options: Option<Options>,
}

impl Answer {
    /// The error of a request, as docker reads it.
    pub fn error(status: u16, message: &str) -> Answer {
        Answer { status, kind: JSON, body: json!({ "Err": message }).to_string().into_bytes() }
    }

    fn json(value: &Value) -> Answer {
        Answer { status: 200, kind: JSON, body: value.to_string().into_bytes() }
    }
}

/// Answers a request, and logs it with its number.
pub fn answer(volumes: &Volumes, number: u64, request: &Request) -> Answer {
    let begun = Instant::now();
    match (request.method.as_str(), request.path.as_str()) {
        ("GET", "/metrics") => {
            return match volumes.metrics() {
                Ok(text) => Answer { status: 200, kind: METRICS, body: text.into_bytes() },
                Err(failure) => Answer::error(500, &failure.message),
            };
        }
        ("POST", _) => {}
        _ => return Answer::error(404, "only POST of docker's plugin protocol and GET /metrics are served"),
    }
    let arguments = match arguments(&request.body) {
        Ok(arguments) => arguments,
        Err(error) => return Answer::error(400, &format!("the body is not understood: {error}")),
    };
    let Some(result) = call(volumes, &request.path, &arguments) else {
        return Answer::error(404, &format!("unknown call {}", shown(&request.path)));
    };
    let milliseconds = begun.elapsed().as_millis();
    let what = format!("request {number}: {} {}", request.path.trim_start_matches('/'), shown(&arguments.name));
    match result {
        Ok(value) => {
            log::line(&format!("{what}: done in {milliseconds} ms"));
            Answer::json(&value)
        }
        Err(failure) => {
            log::line(&format!("{what}: {:?} in {milliseconds} ms: {failure}", failure.kind));
            let status = if failure.kind == Kind::Invalid { 400 } else { 500 };
            Answer::error(status, &failure.message)
        }
    }
}

/// An empty body has no arguments.
fn arguments(body: &[u8]) -> Result<Arguments, serde_json::Error> {
    if body.iter().all(u8::is_ascii_whitespace) { Ok(Arguments::default()) } else { serde_json::from_slice(body) }
}

/// Carries out a call. `None` for an unknown one.
fn call(volumes: &Volumes, path: &str, arguments: &Arguments) -> Option<Result<Value, Failure>> {
    let name = arguments.name.as_str();
    let done = |()| json!({ "Err": "" });
    Some(match path {
        "/Plugin.Activate" => Ok(json!({ "Implements": ["VolumeDriver"] })),
        "/VolumeDriver.Capabilities" => Ok(json!({ "Capabilities": { "Scope": "local" } })),
        CREATE => {
            let options = arguments.options.clone().unwrap_or_default();
            volumes.create(name, &options).map(done)
        }
        REMOVE => volumes.remove(name).map(done),
        "/VolumeDriver.Mount" => {
            volumes.mount(name, &arguments.id).map(|at| json!({ "Mountpoint": at.to_string_lossy(), "Err": "" }))
        }
        "/VolumeDriver.Unmount" => volumes.unmount(name, &arguments.id).map(done),
        "/VolumeDriver.Path" => {
            volumes.get(name).map(|volume| json!({ "Mountpoint": volume.at.to_string_lossy(), "Err": "" }))
        }
        "/VolumeDriver.Get" => volumes.get(name).map(|volume| {
            let mut row = row(&volume);
            if let Some(object) = row.as_object_mut() {
                object.insert("Status".into(), volumes.status(&volume).into());
            }
            json!({ "Volume": row, "Err": "" })
        }),
        "/VolumeDriver.List" => volumes.list().map(|list| {
            let rows: Vec<Value> = list.iter().map(row).collect();
            json!({ "Volumes": rows, "Err": "" })
        }),
        _ => return None,
    })
}

fn row(volume: &Shown) -> Value {
    json!({
        "Name": volume.record.name,
        "Mountpoint": volume.at.to_string_lossy(),
        "CreatedAt": created(volume.record.created),
    })
}

/// Seconds since 1970 as RFC 3339 in UTC. Days become dates by the count of days in eras of 400
/// years.
fn created(seconds: u64) -> String {
    let (days, second) = (seconds / 86_400 + 719_468, seconds % 86_400);
    let (era, day) = (days / 146_097, days % 146_097);
    let year = (day - day / 1460 + day / 36_524 - day / 146_096) / 365;
    let day_of_year = day - (365 * year + year / 4 - year / 100);
    let shifted = (5 * day_of_year + 2) / 153;
    let date = day_of_year - (153 * shifted + 2) / 5 + 1;
    let month = if shifted < 10 { shifted + 3 } else { shifted - 9 };
    let year = year + era * 400 + u64::from(month <= 2);
    format!("{year:04}-{month:02}-{date:02}T{:02}:{:02}:{:02}Z", second / 3600, second / 60 % 60, second % 60)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn times_are_written_as_dates() {
        for (seconds, text) in [
            (0, "1970-01-01T00:00:00Z"),
            (951_782_400, "2000-02-29T00:00:00Z"),
            (1_709_251_199, "2024-02-29T23:59:59Z"),
            (1_735_689_600, "2025-01-01T00:00:00Z"),
            (4_107_542_400, "2100-03-01T00:00:00Z"),
        ] {
            assert_eq!(created(seconds), text);
        }
    }

    #[test]
    fn bodies_are_read() {
        assert_eq!(arguments(b"").unwrap().name, "");
        let read = arguments(br#"{"Name":"a","Opts":{"size":"1G"},"ID":"x","More":1}"#).unwrap();
        assert_eq!((read.name.as_str(), read.id.as_str(), read.options.unwrap().len()), ("a", "x", 1));
        assert!(arguments(br#"{"Name":"a","Opts":null}"#).unwrap().options.is_none());
        for bad in [&b"["[..], b"{\"Name\":1}", b"{\"Opts\":{\"size\":1}}", b"\xff"] {
            assert!(arguments(bad).is_err());
        }
    }
}
