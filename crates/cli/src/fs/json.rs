//! `list`, `get`, `holds` and `mount` as JSON, in the form of OpenZFS 2.3: objects by name,
//! properties by name with value and source. Pure.

use super::{command::TableForm, list, value};
use nacre_admin::fs::{From, Hold, ListedObject, MountedAt, ObjectType, Shown};
use serde_json::{Map, Value, json};

fn version(command: &str) -> Value {
    json!({ "command": format!("zfs {command}"), "vers_major": 0, "vers_minor": 1 })
}

fn pretty(value: &Value) -> String {
    // Values built here have only text as keys: serialization cannot fail.
    serde_json::to_string(value).unwrap_or_default() + "\n"
}

fn property(shown: &Shown, form: TableForm, received: bool) -> Value {
    let text = |value: &Option<String>| {
        value.as_deref().map_or_else(|| "-".to_owned(), |value| value::shown(&shown.property, value, form.exact))
    };
    let (kind, data) = match &shown.source {
        From::Inherited(from) => ("INHERITED", from.as_str()),
        From::Local => ("LOCAL", "-"),
        From::Received => ("RECEIVED", "-"),
        From::Temporary => ("TEMPORARY", "-"),
        From::Default => ("DEFAULT", "-"),
        From::None => ("NONE", "-"),
    };
    // User properties are text, whatever they contain.
    let number = shown
        .value
        .as_ref()
        .filter(|_| form.integers && !shown.property.contains(':'))
        .and_then(|value| value.parse::<u64>().ok());
    let value = number.map_or_else(|| json!(text(&shown.value)), |number| json!(number));
    let mut found = json!({ "value": value, "source": { "type": kind, "data": data } });
    if let (true, Some(fields)) = (received && shown.received.is_some(), found.as_object_mut()) {
        fields.insert("received".to_owned(), json!(text(&shown.received)));
    }
    found
}

/// Returns objects with their properties as JSON.
pub fn datasets<'a>(
    command: &str,
    objects: &'a [ListedObject],
    form: TableForm,
    wanted: &dyn Fn(&'a ListedObject) -> Vec<&'a Shown>,
    typed: &dyn Fn(&str) -> String,
) -> String {
    let mut all = Map::new();
    for listed in objects {
        let kind = match listed.is {
            ObjectType::Filesystem => "FILESYSTEM",
            ObjectType::Snapshot => "SNAPSHOT",
            ObjectType::Bookmark => "BOOKMARK",
        };
        let properties: Map<String, Value> = wanted(listed)
            .into_iter()
            .map(|shown| (typed(&shown.property), property(shown, form, command == "get")))
            .collect();
        let mut fields = json!({
            "name": listed.name,
            "type": kind,
            "pool": super::args::pool(&listed.name),
            "createtxg": if form.integers { json!(listed.created) } else { json!(listed.created.to_string()) },
            "properties": properties,
        });
        if let (Some((dataset, snapshot)), Some(fields)) = (listed.name.split_once('@'), fields.as_object_mut()) {
            fields.insert("dataset".to_owned(), json!(dataset));
            fields.insert("snapshot_name".to_owned(), json!(snapshot));
        }
        all.insert(listed.name.clone(), fields);
    }
    pretty(&json!({ "output_version": version(command), "datasets": all }))
}

/// Returns holds as JSON.
pub fn holds(holds: &[Hold], form: TableForm) -> String {
    let mut all: Map<String, Value> = Map::new();
    for hold in holds {
        let since = if form.exact { json!(hold.since) } else { json!(value::date(hold.since)) };
        let tags = all.entry(hold.snapshot.clone()).or_insert_with(|| json!({ "name": hold.snapshot, "holds": {} }));
        if let Some(tags) = tags.get_mut("holds").and_then(Value::as_object_mut) {
            tags.insert(hold.tag.clone(), since);
        }
    }
    pretty(&json!({ "output_version": version("holds"), "datasets": all }))
}

/// Returns mounts as JSON.
pub fn mounted(mounted: &[MountedAt]) -> String {
    let one = |mounted: &MountedAt| {
        (mounted.name.clone(), json!({ "filesystem": mounted.name, "mountpoint": mounted.at.to_string_lossy() }))
    };
    let all: Map<String, Value> = mounted.iter().map(one).collect();
    pretty(&json!({ "output_version": version("mount"), "datasets": all }))
}

/// Returns the values of an object for the columns of `list`.
pub fn columns<'a>(listed: &'a ListedObject, columns: &[String]) -> Vec<&'a Shown> {
    let names: Vec<String> = columns.iter().map(|name| super::args::long_name(name)).collect();
    listed.values.iter().filter(|shown| names.contains(&shown.property)).collect()
}

/// Returns the values of an object that `get` shows.
pub fn wanted<'a>(listed: &'a ListedObject, get: &'a super::command::Get) -> Vec<&'a Shown> {
    list::wanted(listed, get).collect()
}
