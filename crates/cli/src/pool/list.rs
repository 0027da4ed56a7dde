//! `nacre pool list` and `get`: tables and JSON. Pure.

use super::order::Form;
use crate::{
    columns::{self, Align},
    failure::Failure,
};
use nacre_admin::pool::{
    Figures,
    figures::percent,
    properties::{self, Value},
};
use nacre_pool::properties::{POOL_PROPERTIES, PropertyError, size::human_bytes};
use serde_json::{Map, json};

/// The columns where none are named.
const USUAL: [&str; 11] =
    ["name", "size", "allocated", "free", "checkpoint", "expandsize", "fragmentation", "capacity", "dedupratio", "health", "altroot"];

fn wrong(error: &PropertyError) -> Failure {
    Failure::usage(format!("bad property list: {error}")).next("`nacre pool get all POOL` shows the properties that there are")
}

/// A number of bytes for people or for scripts.
pub fn bytes(number: u64, exact: bool) -> String {
    if exact { number.to_string() } else { human_bytes(number) }
}

fn shown(value: &Value, form: Form) -> String {
    if form.exact { value.exact.clone() } else { value.human.clone() }
}

/// The table of `list`.
///
/// # Errors
/// A column that there is not.
pub fn table(pools: &[Figures], columns: Option<&[String]>, verbose: bool, form: Form) -> Result<String, Failure> {
    let names: Vec<&str> = match columns {
        None => USUAL.to_vec(),
        Some(columns) if columns.iter().any(|column| column == "all") => {
            std::iter::once("name").chain(POOL_PROPERTIES.iter().map(|property| property.name)).collect()
        }
        Some(columns) => columns.iter().map(String::as_str).collect(),
    };
    let columns = names.iter().map(|name| properties::resolve(name)).collect::<Result<Vec<_>, _>>().map_err(|error| wrong(&error))?;
    if form.json {
        let names: Vec<&str> = columns.iter().map(|(name, _)| name.as_str()).collect();
        return json("list", pools, form, |_| names.iter().map(|name| (*name).to_owned()).collect());
    }
    let mut rows = Vec::new();
    for pool in pools {
        let cells = columns.iter().map(|(name, _)| properties::value(pool, name).map(|value| shown(&value, form)));
        rows.push(cells.collect::<Result<Vec<String>, _>>().map_err(|error| wrong(&error))?);
        if verbose {
            rows.extend(device_rows(pool, &columns, form));
        }
    }
    if form.scripted {
        return Ok(columns::scripted(&rows));
    }
    let words = ["name", "health", "altroot", "comment"];
    let align = |name: &str| if words.contains(&name) || name.contains(':') { Align::Left } else { Align::Right };
    let headings: Vec<(&str, Align)> = columns.iter().map(|(name, heading)| (heading.as_str(), align(name))).collect();
    Ok(columns::aligned(&headings, &rows, false))
}

fn device_rows(pool: &Figures, columns: &[(String, String)], form: Form) -> Vec<Vec<String>> {
    let cell = |device: &nacre_admin::pool::DeviceFigures, name: &str| {
        let share = |number: u64| if form.exact { number.to_string() } else { format!("{number}%") };
        match name {
            "name" => format!("{}{}", if form.scripted { "" } else { "  " }, device.path),
            "size" => bytes(device.size, form.exact),
            "allocated" => bytes(device.allocated, form.exact),
            "free" => bytes(device.free(), form.exact),
            "fragmentation" => share(device.fragmentation()),
            "capacity" => share(percent(device.allocated, device.size)),
            "health" => "ONLINE".to_owned(),
            _ => "-".to_owned(),
        }
    };
    pool.devices.iter().map(|device| columns.iter().map(|(name, _)| cell(device, name)).collect()).collect()
}

/// The table of `get`.
///
/// # Errors
/// A property or a column that there is not.
pub fn properties_table(pools: &[Figures], wanted: &[String], fields: Option<&[String]>, form: Form) -> Result<String, Failure> {
    let all = wanted.iter().any(|name| name == "all");
    let mut names = Vec::new();
    if !all {
        for name in wanted {
            names.push(properties::resolve(name).map_err(|error| wrong(&error))?.0);
        }
    }
    let names_of = |pool: &Figures| if all { properties::names(pool) } else { names.clone() };
    if form.json {
        return json("get", pools, form, names_of);
    }
    let usual = ["name", "property", "value", "source"].map(str::to_owned);
    let fields = match fields {
        Some([all]) if all == "all" => &usual[..],
        fields => fields.unwrap_or(&usual),
    };
    let heading = |field: &String| match field.as_str() {
        "name" => Ok(("NAME", Align::Left)),
        "property" => Ok(("PROPERTY", Align::Left)),
        "value" => Ok(("VALUE", Align::Left)),
        "source" => Ok(("SOURCE", Align::Left)),
        other => Err(Failure::usage(format!("invalid column name '{other}'")).next("there are name, property, value and source")),
    };
    let headings = fields.iter().map(heading).collect::<Result<Vec<_>, _>>()?;
    let mut rows = Vec::new();
    for pool in pools {
        for name in names_of(pool) {
            let value = properties::value(pool, &name).map_err(|error| wrong(&error))?;
            let cell = |(heading, _): &(&str, Align)| match *heading {
                "NAME" => pool.name.clone(),
                "PROPERTY" => name.clone(),
                "VALUE" => shown(&value, form),
                _ => value.source.to_owned(),
            };
            rows.push(headings.iter().map(cell).collect());
        }
    }
    Ok(if form.scripted { columns::scripted(&rows) } else { columns::aligned(&headings, &rows, false) })
}

/// Pools with their properties as JSON, in the form of OpenZFS 2.3.
fn json(command: &str, pools: &[Figures], form: Form, names: impl Fn(&Figures) -> Vec<String>) -> Result<String, Failure> {
    let mut all = Map::new();
    for pool in pools {
        let mut values = Map::new();
        for name in names(pool) {
            let value = properties::value(pool, &name).map_err(|error| wrong(&error))?;
            let source = match value.source {
                "local" => "LOCAL",
                "default" => "DEFAULT",
                _ => "NONE",
            };
            values.insert(name, json!({ "value": shown(&value, form), "source": { "type": source, "data": "-" } }));
        }
        let fields = json!({
            "name": pool.name,
            "type": "POOL",
            "state": pool.health,
            "pool_guid": pool.guid.to_string(),
            "txg": pool.txg.to_string(),
            "properties": values,
        });
        all.insert(pool.name.clone(), fields);
    }
    let whole = json!({ "output_version": version(command), "pools": all });
    Ok(whole.to_string() + "\n")
}

/// The head of a JSON answer.
pub fn version(command: &str) -> serde_json::Value {
    json!({ "command": format!("zpool {command}"), "vers_major": 0, "vers_minor": 1 })
}
