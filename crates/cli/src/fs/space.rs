//! `userspace` and `groupspace`: tables of the space that users and groups use.

use super::{args, ask, owners::Names};
use crate::{
    columns::{self, Align},
    output::print,
};
use clap::ArgMatches;
use nacre_admin::fs::{FsAnswer, FsRequest, OwnerSpace};
use nacre_daemon::failure::Failure;
use nacre_pool::properties::size::{human, human_bytes};
use std::cmp::Ordering;

/// A request for the space of owners.
#[derive(Debug, PartialEq, Eq)]
pub struct SpaceVerb {
    /// The file system.
    what: String,
    users: bool,
    groups: bool,
    numeric: bool,
    scripted: bool,
    exact: bool,
    fields: Vec<String>,
    /// The sort keys: fields, and whether the order is descending.
    order: Vec<(String, bool)>,
}

const FIELDS: [&str; 6] = ["type", "name", "used", "quota", "objused", "objquota"];

/// Parses the matched arguments; `group`: groups are the default of `-t`.
///
/// # Errors
/// A field or type that does not exist.
pub fn parse(group: bool, matches: &ArgMatches) -> Result<SpaceVerb, Failure> {
    let listed = |name: &str| -> Vec<String> {
        let lists = matches.get_many::<String>(name).into_iter().flatten();
        lists.flat_map(|list| list.split(',')).filter(|one| !one.is_empty()).map(ToOwned::to_owned).collect()
    };
    let check = |fields: &[String]| match fields.iter().find(|field| !FIELDS.contains(&field.as_str())) {
        Some(field) => Err(Failure::usage(format!("invalid field '{field}'")).next(FIELDS.join(", "))),
        None => Ok(()),
    };
    let mut fields = listed("columns");
    check(&fields)?;
    if fields.is_empty() {
        fields = FIELDS.map(str::to_owned).to_vec();
    }
    let mut order: Vec<(usize, String, bool)> = Vec::new();
    for (name, descending) in [("ascending", false), ("descending", true)] {
        let given: Vec<String> = matches.get_many::<String>(name).into_iter().flatten().cloned().collect();
        check(&given)?;
        order.extend(
            matches.indices_of(name).into_iter().flatten().zip(given).map(|(place, field)| (place, field, descending)),
        );
    }
    order.sort();
    let (mut users, mut groups) = (false, false);
    for kind in listed("types") {
        match kind.as_str() {
            "all" => (users, groups) = (true, true),
            "posixuser" | "user" => users = true,
            "posixgroup" | "group" => groups = true,
            // Identities of SMB do not exist, as on every system without an SMB service.
            "smbuser" | "smbgroup" => {}
            other => return Err(Failure::usage(format!("invalid type '{other}'")).next("all, posixuser, posixgroup")),
        }
    }
    if matches.get_many::<String>("types").is_none() {
        (users, groups) = (!group, group);
    }
    Ok(SpaceVerb {
        what: matches.get_one::<String>("WHAT").cloned().unwrap_or_default(),
        users,
        groups,
        numeric: matches.get_flag("numeric"),
        scripted: matches.get_flag("scripted"),
        exact: matches.get_flag("exact"),
        fields,
        order: order.into_iter().map(|(_, field, descending)| (field, descending)).collect(),
    })
}

/// Requests the owners and prints the table.
///
/// # Errors
/// No such file system, or output that cannot be written.
pub fn run(order: &SpaceVerb) -> Result<(), Failure> {
    let FsAnswer::Owners(owners) = ask::ask(args::pool(&order.what), "", FsRequest::Owners(order.what.clone()))? else {
        return Ok(());
    };
    let mut names = Names::default();
    let wanted = owners.into_iter().filter(|owner| if owner.group { order.groups } else { order.users });
    let mut rows: Vec<(OwnerSpace, String)> = wanted
        .map(|owner| (owner, if order.numeric { owner.id.to_string() } else { names.of(owner.group, owner.id) }))
        .collect();
    sort(&mut rows, &order.order);
    print(&table(&rows, order))
}

fn sort(rows: &mut [(OwnerSpace, String)], order: &[(String, bool)]) {
    let by = |field: &str, (a, a_name): &(OwnerSpace, String), (b, b_name): &(OwnerSpace, String)| match field {
        "type" => a.group.cmp(&b.group),
        "name" => a_name.cmp(b_name),
        "used" => a.used.cmp(&b.used),
        "quota" => a.quota.cmp(&b.quota),
        "objused" => a.objects.cmp(&b.objects),
        _ => a.object_quota.cmp(&b.object_quota),
    };
    rows.sort_by(|a, b| {
        for (field, descending) in order {
            let found = by(field, a, b);
            let found = if *descending { found.reverse() } else { found };
            if found != Ordering::Equal {
                return found;
            }
        }
        by("type", a, b).then_with(|| by("name", a, b))
    });
}

fn table(rows: &[(OwnerSpace, String)], order: &SpaceVerb) -> String {
    let exact = order.exact;
    let bytes = |number: u64| if exact { number.to_string() } else { human_bytes(number) };
    let count = |number: u64| if exact { number.to_string() } else { human(number) };
    // ZFS prints 0 for scripts and "none" for people.
    let limit = |limit: Option<String>| limit.unwrap_or_else(|| if exact { "0".to_owned() } else { "none".to_owned() });
    let cell = |(owner, name): &(OwnerSpace, String), field: &String| match field.as_str() {
        "type" => if owner.group { "POSIX Group" } else { "POSIX User" }.to_owned(),
        "name" => name.clone(),
        "used" => bytes(owner.used),
        "quota" => limit(owner.quota.map(bytes)),
        "objused" => count(owner.objects),
        _ => limit(owner.object_quota.map(count)),
    };
    let cells: Vec<Vec<String>> =
        rows.iter().map(|row| order.fields.iter().map(|field| cell(row, field)).collect()).collect();
    if order.scripted {
        return columns::scripted(&cells);
    }
    let heads: Vec<String> = order.fields.iter().map(|field| field.to_uppercase()).collect();
    let align = |field: &String| if matches!(field.as_str(), "type" | "name") { Align::Left } else { Align::Right };
    let heads: Vec<(&str, Align)> =
        heads.iter().zip(&order.fields).map(|(head, field)| (head.as_str(), align(field))).collect();
    columns::aligned(&heads, &cells, false)
}
