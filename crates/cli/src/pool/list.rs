//! `nacre pool list` and `get`: tables. Pure.

use super::{
    form::PoolForm,
    json,
    tree::{self, Vdev},
};
use crate::columns::{self, Align};
use nacre_admin::pool::{
    Figures,
    figures::percent,
    properties::{self, Value},
};
use nacre_daemon::{failure::Failure, pool::expected::UNAVAILABLE};
use nacre_pool::properties::{POOL_PROPERTIES, PropertyError, size::human_bytes};

/// The default columns.
const USUAL: [&str; 11] = [
    "name",
    "size",
    "allocated",
    "free",
    "checkpoint",
    "expandsize",
    "fragmentation",
    "capacity",
    "dedupratio",
    "health",
    "altroot",
];

/// Returns the failure for a property that does not exist.
pub fn wrong(error: &PropertyError) -> Failure {
    let meant = error.next(POOL_PROPERTIES);
    let gap = if meant.is_empty() { "" } else { " " };
    Failure::usage(format!("bad property list: {error}"))
        .next(format!("{meant}{gap}`nacre pool get all POOL` shows the properties that there are"))
}

/// Formats a number of bytes for people or for scripts.
pub fn bytes(number: u64, exact: bool) -> String {
    if exact { number.to_string() } else { human_bytes(number) }
}

/// Returns the value of a property; few are known for a pool whose process has ended.
pub fn value(pool: &Figures, name: &str) -> Result<Value, PropertyError> {
    let value = properties::value(pool, name)?;
    let known = pool.health != UNAVAILABLE || ["name", "health", "guid"].contains(&name);
    Ok(if known { value } else { Value { exact: "-".to_owned(), human: "-".to_owned(), source: "-" } })
}

/// Returns a value for people or for scripts.
pub fn shown(value: &Value, form: PoolForm) -> String {
    if form.exact { value.exact.clone() } else { value.human.clone() }
}

/// Formats the table of `list`.
///
/// # Errors
/// A column that does not exist.
pub fn table(pools: &[Figures], columns: Option<&[String]>, verbose: bool, form: PoolForm) -> Result<String, Failure> {
    let names: Vec<&str> = match columns {
        None => USUAL.to_vec(),
        Some(columns) if columns.iter().any(|column| column == "all") => {
            std::iter::once("name").chain(POOL_PROPERTIES.iter().map(|property| property.name)).collect()
        }
        Some(columns) => columns.iter().map(String::as_str).collect(),
    };
    let columns = names
        .iter()
        .map(|name| properties::resolve(name))
        .collect::<Result<Vec<_>, _>>()
        .map_err(|error| wrong(&error))?;
    if form.json {
        let names: Vec<&str> = columns.iter().map(|(name, _)| name.as_str()).collect();
        return json::properties("list", pools, form, verbose, |_| {
            names.iter().map(|name| (*name).to_owned()).collect()
        });
    }
    let mut rows = Vec::new();
    for pool in pools {
        let cells = columns.iter().map(|(name, _)| value(pool, name).map(|value| shown(&value, form)));
        rows.push(cells.collect::<Result<Vec<String>, _>>().map_err(|error| wrong(&error))?);
        if verbose {
            rows.extend(vdev_rows(pool, &columns, form));
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

/// Returns the value of a vdev's column; for a device in a group, the group shows most of them.
pub fn shown_value(pool: &Figures, depth: usize, vdev: Vdev<'_>, name: &str) -> Value {
    let told = depth == 1 || ["name", "health", "size", "guid"].contains(&name);
    if told { vdev_value(pool, vdev, name) } else { Value { exact: "-".into(), human: "-".into(), source: "-" } }
}

/// Returns the value of a property of a vdev.
pub fn vdev_value(pool: &Figures, vdev: Vdev<'_>, name: &str) -> Value {
    let of = |exact: String, human: String| Value { exact, human, source: "-" };
    let plain = |text: &str| of(text.to_owned(), text.to_owned());
    let size_of = |number: u64| of(bytes(number, true), bytes(number, false));
    let share = |number: u64| of(number.to_string(), format!("{number}%"));
    let devices = vdev.devices(pool);
    let (size, allocated) = match vdev {
        Vdev::Root => (pool.size, pool.allocated),
        Vdev::Group(group) => (group.size, group.allocated),
        Vdev::Pair(_, device, _) | Vdev::Leaf(device) => (device.size, device.allocated),
    };
    match (name, vdev) {
        ("health", _) => plain(vdev.state(pool)),
        ("name", _) => plain(&vdev.name()),
        _ if pool.health == UNAVAILABLE => plain("-"),
        ("size", _) => size_of(size),
        ("allocated", _) => size_of(allocated),
        ("free", _) => size_of(size.saturating_sub(allocated)),
        ("fragmentation", _) => {
            let staying = devices.iter().filter(|device| !device.leaving);
            let held: u64 = staying.map(|device| device.occupied.saturating_sub(device.allocated)).sum();
            share(percent(held, devices.iter().map(|device| device.free()).sum()))
        }
        ("capacity", _) => share(percent(allocated, size)),
        ("guid", Vdev::Leaf(device)) => plain(&device.guid.to_string()),
        _ => plain("-"),
    }
}

fn vdev_rows(pool: &Figures, columns: &[(String, String)], form: PoolForm) -> Vec<Vec<String>> {
    let cell = |(depth, vdev): (usize, Vdev<'_>), name: &str| {
        let text = shown(&shown_value(pool, depth, vdev, name), form);
        if name == "name" && !form.scripted { format!("{}{text}", "  ".repeat(depth)) } else { text }
    };
    let words = |name: String, health: &str| {
        let cell = |(column, _): &(String, String)| match column.as_str() {
            "name" => name.clone(),
            "health" => health.to_owned(),
            _ => "-".to_owned(),
        };
        columns.iter().map(cell).collect()
    };
    let mut rows: Vec<Vec<String>> = Vec::new();
    for (class, heading) in tree::PARTS {
        let part = tree::rows(pool, class);
        rows.extend(heading.filter(|_| !part.is_empty()).map(|heading| words(heading.to_owned(), "-")));
        rows.extend(part.into_iter().map(|row| columns.iter().map(|(name, _)| cell(row, name)).collect()));
    }
    let indent = if form.scripted { "" } else { "  " };
    let spares = tree::spares(pool).map(|spare| words(format!("{indent}{}", spare.name()), tree::spare_state(spare)));
    let spares: Vec<Vec<String>> = spares.collect();
    if !spares.is_empty() {
        rows.push(words("spare".to_owned(), "-"));
    }
    rows.extend(spares);
    rows
}

/// Formats the table of `get`.
///
/// # Errors
/// A property or a column that does not exist.
pub fn properties_table(
    pools: &[Figures],
    wanted: &[String],
    fields: Option<&[String]>,
    form: PoolForm,
) -> Result<String, Failure> {
    let all = wanted.iter().any(|name| name == "all");
    let mut names = Vec::new();
    if !all {
        for name in wanted {
            names.push(properties::resolve(name).map_err(|error| wrong(&error))?.0);
        }
    }
    let names_of = |pool: &Figures| if all { properties::names(pool) } else { names.clone() };
    if form.json {
        return json::properties("get", pools, form, false, names_of);
    }
    let mut rows = Vec::new();
    for pool in pools {
        for name in names_of(pool) {
            let value = value(pool, &name).map_err(|error| wrong(&error))?;
            rows.push((pool.name.clone(), name, value));
        }
    }
    get_table(rows.into_iter(), fields, form)
}

/// Formats a table of names, properties and values.
///
/// # Errors
/// A column that does not exist.
pub fn get_table(
    values: impl Iterator<Item = (String, String, Value)>,
    fields: Option<&[String]>,
    form: PoolForm,
) -> Result<String, Failure> {
    let usual = ["name", "property", "value", "source"].map(str::to_owned);
    let fields = match fields {
        Some([all]) if all == "all" => &usual[..],
        fields => fields.unwrap_or(&usual),
    };
    let heading =
        |field: &String| match field.as_str() {
            "name" => Ok(("NAME", Align::Left)),
            "property" => Ok(("PROPERTY", Align::Left)),
            "value" => Ok(("VALUE", Align::Left)),
            "source" => Ok(("SOURCE", Align::Left)),
            other => Err(Failure::usage(format!("invalid column name '{other}'"))
                .next("there are name, property, value and source")),
        };
    let headings = fields.iter().map(heading).collect::<Result<Vec<_>, _>>()?;
    let row = |(of, name, value): (String, String, Value)| {
        let cell = |(heading, _): &(&str, Align)| match *heading {
            "NAME" => of.clone(),
            "PROPERTY" => name.clone(),
            "VALUE" => shown(&value, form),
            _ => value.source.to_owned(),
        };
        headings.iter().map(cell).collect::<Vec<String>>()
    };
    let rows: Vec<Vec<String>> = values.map(row).collect();
    Ok(if form.scripted { columns::scripted(&rows) } else { columns::aligned(&headings, &rows, false) })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn groups_are_told_with_their_devices() {
        let mut pool = tree::tests::mixed();
        (pool.devices[1].allocated, pool.groups[1].allocated) = (40, 50);
        let form = PoolForm { exact: true, scripted: true, ..PoolForm::default() };
        let columns = ["name", "size", "allocated", "free", "capacity", "health"].map(str::to_owned);
        let text = table(&[pool], Some(&columns), true, form).unwrap();
        assert_eq!(
            text,
            "tank\t300\t0\t0\t0\tONLINE\n/a\t100\t0\t100\t0\tONLINE\nmirror-1\t200\t50\t150\t25\tONLINE\n/b\t200\t-\t-\t-\tONLINE\n/c\t210\t-\t-\t-\tONLINE\n"
        );
    }
}
