//! The tables of `list` and `get`. Pure: objects in, text out.

use super::{
    args,
    command::{Get, Show, TableForm},
    value,
};
use crate::columns::{self, Align};
use nacre_admin::fs::{From, ListedObject, ObjectType, Shown};
use nacre_pool::properties::{Kind, Property, dataset_property};
use std::cmp::Ordering;

/// Returns the source of a value in the words of ZFS.
pub fn source(from: &From) -> String {
    match from {
        From::Local => "local".to_owned(),
        From::Received => "received".to_owned(),
        From::Temporary => "temporary".to_owned(),
        From::Inherited(from) => format!("inherited from {from}"),
        From::Default => "default".to_owned(),
        From::None => "-".to_owned(),
    }
}

/// Returns the word for a source in `get -s`.
fn kind_of(from: &From) -> &'static str {
    match from {
        From::Local => "local",
        From::Received => "received",
        From::Temporary => "temporary",
        From::Inherited(_) => "inherited",
        From::Default => "default",
        From::None => "none",
    }
}

/// The default order: a file system before its snapshots, snapshots by creation, everything else by
/// name.
fn by_itself(a: &ListedObject, b: &ListedObject) -> Ordering {
    let split = |name: &ListedObject| name.name.split('@').next().unwrap_or_default().to_owned();
    split(a).cmp(&split(b)).then_with(|| {
        let snapshot = |listed: &ListedObject| listed.is == ObjectType::Snapshot;
        snapshot(a).cmp(&snapshot(b)).then(a.created.cmp(&b.created)).then_with(|| a.name.cmp(&b.name))
    })
}

fn value_of<'a>(listed: &'a ListedObject, property: &str) -> Option<&'a Shown> {
    listed.values.iter().find(|shown| shown.property == property)
}

/// Compares numerically where both are numbers, else as text; missing values come last.
fn by_value(a: Option<&str>, b: Option<&str>) -> Ordering {
    let number = |text: &str| text.parse::<f64>().ok();
    match (a, b) {
        (Some(a), Some(b)) => match (number(a), number(b)) {
            (Some(a), Some(b)) => a.total_cmp(&b),
            _ => a.cmp(b),
        },
        (a, b) => b.is_some().cmp(&a.is_some()),
    }
}

/// Sorts objects by the given keys.
pub fn sort(objects: &mut [ListedObject], order: &[(String, bool)]) {
    objects.sort_by(|a, b| {
        for (property, descending) in order {
            let found = match property.as_str() {
                "name" => a.name.cmp(&b.name),
                property => {
                    let of =
                        |listed| value_of(listed, &args::long_name(property)).and_then(|shown| shown.value.as_deref());
                    by_value(of(a), of(b))
                }
            };
            let found = if *descending { found.reverse() } else { found };
            if found != Ordering::Equal {
                return found;
            }
        }
        by_itself(a, b)
    });
}

fn cell(listed: &ListedObject, column: &str, form: TableForm) -> String {
    if column == "name" {
        return listed.name.clone();
    }
    let name = args::long_name(column);
    let value = value_of(listed, &name).and_then(|shown| shown.value.as_deref());
    value.map_or_else(|| "-".to_owned(), |value| value::shown(&name, value, form.exact))
}

/// Returns the heading and the alignment of a column.
fn heading(column: &str) -> (String, Align) {
    let numbers = |name: &str| {
        matches!(
            name,
            "compressratio"
                | "refcompressratio"
                | "createtxg"
                | "guid"
                | "objsetid"
                | "userrefs"
                | "filesystem_count"
                | "snapshot_count"
        )
    };
    match dataset_property(column) {
        _ if column == "name" => ("NAME".to_owned(), Align::Left),
        Ok(Property::Known(known)) => {
            let number =
                matches!(known.kind, Kind::Bytes | Kind::Limit | Kind::Count | Kind::RecordSize) || numbers(known.name);
            (known.column.to_owned(), if number { Align::Right } else { Align::Left })
        }
        Ok(Property::Owner(_) | Property::WrittenSince(_)) => (column.to_uppercase(), Align::Right),
        _ => (column.to_uppercase(), Align::Left),
    }
}

/// Formats the table of `list`.
pub fn table(objects: &[ListedObject], columns: &[String], form: TableForm) -> String {
    let rows: Vec<Vec<String>> =
        objects.iter().map(|listed| columns.iter().map(|column| cell(listed, column, form)).collect()).collect();
    if form.scripted {
        return columns::scripted(&rows);
    }
    let heads: Vec<(String, Align)> = columns.iter().map(|column| heading(column)).collect();
    let heads: Vec<(&str, Align)> = heads.iter().map(|(head, align)| (head.as_str(), *align)).collect();
    columns::aligned(&heads, &rows, false)
}

/// Inserts the name as a property for `get`, at the position where it was asked for.
pub fn name_it(listed: &mut ListedObject, asked: Option<&[String]>) {
    let Some(place) = asked.and_then(|asked| asked.iter().position(|property| property == "name")) else { return };
    let shown =
        Shown { property: "name".to_owned(), value: Some(listed.name.clone()), received: None, source: From::None };
    listed.values.insert(place.min(listed.values.len()), shown);
}

/// Returns the values of an object that `get` shows.
pub fn wanted<'a>(listed: &'a ListedObject, get: &'a Get) -> impl Iterator<Item = &'a Shown> {
    listed.values.iter().filter(move |shown| {
        get.sources.is_empty() || get.sources.iter().any(|source| source == kind_of(&shown.source))
    })
}

/// Formats the table of `get`. `typed` returns the name of a property as it was typed on the
/// command line.
pub fn properties(objects: &[ListedObject], get: &Get, form: TableForm, typed: &dyn Fn(&str) -> String) -> String {
    let mut rows = Vec::new();
    for listed in objects {
        for shown in wanted(listed, get) {
            let name = &shown.property;
            let exact = |value: &Option<String>| {
                value.as_deref().map_or_else(|| "-".to_owned(), |value| value::shown(name, value, form.exact))
            };
            let cell = |field: &String| match field.as_str() {
                "name" => listed.name.clone(),
                "property" => typed(name),
                "value" => exact(&shown.value),
                "received" => exact(&shown.received),
                _ => source(&shown.source),
            };
            rows.push(get.fields.iter().map(cell).collect::<Vec<String>>());
        }
    }
    if form.scripted {
        return columns::scripted(&rows);
    }
    let heads: Vec<String> = get.fields.iter().map(|field| field.to_uppercase()).collect();
    let heads: Vec<(&str, Align)> = heads.iter().map(|head| (head.as_str(), Align::Left)).collect();
    if rows.is_empty() { String::new() } else { columns::aligned(&heads, &rows, false) }
}

/// Returns the properties to request: the shown ones, and the sort keys.
pub fn asked(show: &Show) -> Option<Vec<String>> {
    let columns = show.listing.properties.as_ref()?;
    let mut asked: Vec<String> = Vec::new();
    for name in columns.iter().chain(show.order.iter().map(|(name, _)| name)) {
        if name != "name" && !asked.contains(name) {
            asked.push(name.clone());
        }
    }
    Some(asked)
}
