//! Values of properties: figures from the catalog, stored and inherited values, temporary mount
//! options. One function per kind of object.

use nacre_pool::catalog::PropertySource;
use nacre_pool::properties::effective::{Level, effective};
use nacre_pool::properties::{
    DATASET_PROPERTIES, Definition, Effective, INCONSISTENT, Property, Scope, Source, WrittenFrom, dataset_property,
};
use nacre_pool::{PoolError, Txg};

use super::list::{From, Shown};
use super::objects::{Object, Objects};
use super::space::{self, Uses};
use crate::{Kind, Refusal};

/// Properties that `get all` shows first.
const FIRST: [&str; 8] = ["type", "creation", "used", "available", "referenced", "compressratio", "mounted", "origin"];

/// Returns the properties that `get all` shows of an object, the table's first.
pub(super) fn all(objects: &mut Objects<'_>, object: &Object) -> Result<Vec<Property>, Refusal> {
    let fits = |definition: &Definition| match object {
        Object::Filesystem(_) => definition.scope != Scope::Snapshot,
        Object::Snapshot { .. } => {
            matches!(definition.scope, Scope::FilesystemAndSnapshot | Scope::Snapshot | Scope::All)
        }
        Object::Bookmark { .. } => definition.scope == Scope::All,
    };
    // Properties of volumes have no value for a file system.
    let served = |definition: &&Definition| {
        definition.default != "-"
            && !definition.name.starts_with("vol")
            && definition.name != INCONSISTENT
            && fits(definition)
    };
    let mut found: Vec<&Definition> = DATASET_PROPERTIES.iter().filter(served).collect();
    // The most used properties come first, the others by name.
    found.sort_by_key(|definition| FIRST.iter().position(|name| *name == definition.name).unwrap_or(FIRST.len()));
    let mut found: Vec<Property> = found.into_iter().map(Property::Known).collect();
    let of = match object {
        Object::Filesystem(id) | Object::Snapshot { of: id, .. } => *id,
        Object::Bookmark { .. } => return Ok(found),
    };
    let mut users: Vec<String> = objects.with_chain(of, |chain| {
        let names = chain.iter().flat_map(|level| level.rows.iter());
        names.filter(|(name, _)| name.contains(':')).map(|(name, _)| name.clone()).collect()
    })?;
    if let Object::Snapshot { of, txg } = object {
        users.extend(objects.catalog.snapshot_properties(*of, *txg)?.into_iter().map(|(name, _)| name));
    }
    users.sort();
    users.dedup();
    found.extend(users.into_iter().map(Property::User));
    Ok(found)
}

/// Returns the value of a property of an object; none where it has none.
pub(super) fn of(
    objects: &mut Objects<'_>,
    uses: &Uses,
    object: &Object,
    property: &Property,
) -> Result<Shown, Refusal> {
    let found = match (object, property) {
        (Object::Filesystem(id), Property::Owner(owner)) => space::value(objects, uses, (*id, None), owner)?,
        (Object::Snapshot { of, txg }, Property::Owner(owner)) => {
            space::value(objects, uses, (*of, Some(*txg)), owner)?
        }
        (Object::Filesystem(id), _) => of_filesystem(objects, *id, property)?,
        (Object::Snapshot { of, txg }, _) => of_snapshot(objects, *of, *txg, property)?,
        (Object::Bookmark { of, name }, _) => of_bookmark(objects, *of, name, property)?.map(figure),
    };
    let property = name_of(property);
    let received = match object {
        Object::Filesystem(id) => received(objects, *id, &property)?,
        _ => None,
    };
    Ok(match found {
        Some(Effective { value, source }) => Shown { property, value: Some(value), source: From::of(source), received },
        None => Shown { property, value: None, source: From::None, received },
    })
}

/// Returns the displayed name of a property.
pub(super) fn name_of(property: &Property) -> String {
    match property {
        Property::Known(definition) => definition.name.to_owned(),
        Property::User(name) => name.clone(),
        Property::Owner(owner) => owner.id().map_or_else(|| format!("@{}", owner.owner), |id| owner.stored_name(id)),
        Property::WrittenSince(earlier) => format!("written{earlier}"),
        Property::Feature(name) => format!("feature@{name}"),
    }
}

fn figure(value: String) -> Effective {
    Effective { value, source: Source::None }
}

fn yes(is: bool) -> String {
    if is { "yes" } else { "no" }.to_owned()
}

/// Compression ratio: content size by charged size, never below 1, as ZFS shows it but for the `x`.
fn ratio((charged, logical): (u64, u64)) -> String {
    let hundredths = u128::from(logical) * 100 / u128::from(charged.max(1));
    let hundredths = if charged == 0 { 100 } else { hundredths.max(100) };
    format!("{}.{:02}", hundredths / 100, hundredths % 100)
}

/// Returns the received value, which may be hidden by a local one.
fn received(objects: &mut Objects<'_>, id: u64, name: &str) -> Result<Option<String>, PoolError> {
    let known = objects.known(id)?;
    let row = known.stored.iter().find(|(there, row)| there == name && row.source == PropertySource::Received);
    Ok(row.map(|(_, row)| row.value.clone()))
}

fn of_filesystem(objects: &mut Objects<'_>, id: u64, property: &Property) -> Result<Option<Effective>, Refusal> {
    match property {
        Property::Known(definition) if definition.name == "mountpoint" => objects.mountpoint(id).map(Some),
        Property::Known(definition) if definition.default.is_empty() => {
            Ok(filesystem_figure(objects, id, definition.name)?.map(figure))
        }
        Property::Known(definition) => {
            let found = objects.effective(id, definition.name)?;
            Ok(Some(temporary(objects, id, definition.name, found)))
        }
        Property::User(_) => Ok(objects.with_chain(id, |chain| effective(property, chain))?),
        Property::WrittenSince(earlier) => Ok(written_since(objects, id, earlier, None)?.map(figure)),
        Property::Owner(_) | Property::Feature(_) => Ok(None),
    }
}

/// Overrides values by the temporary options of an existing mount.
fn temporary(objects: &Objects<'_>, id: u64, name: &str, stored: Effective) -> Effective {
    let Some(options) = objects.mounted(id).map(|mounted| &mounted.options) else { return stored };
    let now = match name {
        "readonly" => options.read_only,
        "exec" => !options.no_exec,
        "setuid" => !options.no_suid,
        "devices" => !options.no_dev,
        "atime" => !options.no_atime,
        _ => return stored,
    };
    let value = if now { "on" } else { "off" };
    if stored.value == value { stored } else { Effective { value: value.to_owned(), source: Source::Temporary } }
}

fn filesystem_figure(objects: &mut Objects<'_>, id: u64, name: &str) -> Result<Option<String>, Refusal> {
    let known = objects.known(id)?;
    let row = &known.row;
    Ok(Some(match name {
        "type" => "filesystem".to_owned(),
        "creation" => row.created_at.to_string(),
        "createtxg" => row.created.0.to_string(),
        "guid" => row.guid.to_string(),
        "objsetid" => id.to_string(),
        "snapshots_changed" => match known.stored.iter().find(|(there, _)| there == name) {
            Some((_, row)) => row.value.clone(),
            None => return Ok(None),
        },
        INCONSISTENT => u8::from(objects.catalog.is_half(id)?).to_string(),
        "mounted" => yes(objects.is_seen(id)),
        "origin" => match row.origin {
            Some((of, txg)) => objects.name(&Object::Snapshot { of, txg })?,
            None => return Ok(None),
        },
        "receive_resume_token" => match objects.catalog.resume_token(id)? {
            Some(token) => token.text(),
            None => return Ok(None),
        },
        "filesystem_count" => objects.catalog.counts(id)?.0.to_string(),
        "snapshot_count" => objects.catalog.counts(id)?.1.to_string(),
        "used" => objects.catalog.breakdown(id)?.used.to_string(),
        "available" => objects.catalog.available(id)?.to_string(),
        "referenced" => objects.catalog.usage(id)?.referenced.to_string(),
        "usedbydataset" => objects.catalog.breakdown(id)?.by_dataset.to_string(),
        "usedbysnapshots" => objects.catalog.breakdown(id)?.by_snapshots.to_string(),
        "usedbychildren" => objects.catalog.breakdown(id)?.by_children.to_string(),
        "usedbyrefreservation" => objects.catalog.breakdown(id)?.by_refreservation.to_string(),
        "written" => objects.catalog.usage(id)?.unique.to_string(),
        "logicalused" => objects.catalog.stored_below(id)?.1.to_string(),
        "logicalreferenced" => objects.catalog.usage(id)?.logical_referenced.to_string(),
        "compressratio" => ratio(objects.catalog.stored_below(id)?),
        "refcompressratio" => {
            let usage = objects.catalog.usage(id)?;
            ratio((usage.referenced, usage.logical_referenced))
        }
        _ => return Ok(None),
    }))
}

fn of_snapshot(
    objects: &mut Objects<'_>,
    of: u64,
    txg: Txg,
    property: &Property,
) -> Result<Option<Effective>, Refusal> {
    match property {
        Property::Known(definition) => Ok(snapshot_figure(objects, of, txg, definition.name)?.map(figure)),
        Property::User(_) => {
            let own = objects.catalog.snapshot_properties(of, txg)?;
            let name = objects.name(&Object::Snapshot { of, txg })?;
            Ok(objects.with_chain(of, |chain| {
                let levels: Vec<Level<'_>> =
                    std::iter::once(Level { name: &name, rows: &own }).chain(chain.iter().copied()).collect();
                effective(property, &levels)
            })?)
        }
        Property::WrittenSince(earlier) => Ok(written_since(objects, of, earlier, Some(txg))?.map(figure)),
        Property::Owner(_) | Property::Feature(_) => Ok(None),
    }
}

fn snapshot_figure(objects: &mut Objects<'_>, of: u64, txg: Txg, name: &str) -> Result<Option<String>, Refusal> {
    let line = objects.line(of)?;
    let Some((place, row)) = line.find(txg) else { return Ok(None) };
    Ok(Some(match name {
        "type" => "snapshot".to_owned(),
        "creation" => row.created_at.to_string(),
        "createtxg" => txg.0.to_string(),
        "guid" => row.guid.to_string(),
        "objsetid" => of.to_string(),
        INCONSISTENT => "0".to_owned(),
        "used" => objects.catalog.used_by(&line, place)?.to_string(),
        "referenced" => row.referenced.to_string(),
        "written" => objects.catalog.written_to(&line, place)?.to_string(),
        "logicalreferenced" => row.logical.to_string(),
        "compressratio" | "refcompressratio" => ratio((row.referenced, row.logical)),
        "userrefs" => row.holds.to_string(),
        "defer_destroy" => if row.deferred { "on" } else { "off" }.to_owned(),
        "clones" => {
            let clones = objects.catalog.clones(of, txg)?;
            let names = clones.into_iter().map(|clone| Ok(objects.known(clone)?.name.clone()));
            names.collect::<Result<Vec<_>, PoolError>>()?.join(",")
        }
        _ => return Ok(None),
    }))
}

fn of_bookmark(objects: &Objects<'_>, of: u64, name: &str, property: &Property) -> Result<Option<String>, Refusal> {
    let Property::Known(definition) = property else { return Ok(None) };
    let Some((_, row)) = objects.catalog.bookmarks(of)?.into_iter().find(|(there, _)| there == name) else {
        return Ok(None);
    };
    Ok(Some(match definition.name {
        "type" => "bookmark".to_owned(),
        "creation" => row.created_at.to_string(),
        "createtxg" => row.txg.0.to_string(),
        "guid" => row.guid.to_string(),
        _ => return Ok(None),
    }))
}

fn written_since(
    objects: &mut Objects<'_>,
    id: u64,
    earlier: &WrittenFrom,
    later: Option<Txg>,
) -> Result<Option<String>, Refusal> {
    let from = match earlier {
        WrittenFrom::Snapshot(name) => {
            let part = name.rsplit('@').next().unwrap_or(name);
            objects.catalog.snapshot_named(id, part)?
        }
        WrittenFrom::Bookmark(name) => {
            let part = name.rsplit('#').next().unwrap_or(name);
            let bookmarks = objects.catalog.bookmarks(id)?;
            bookmarks.into_iter().find(|(there, _)| there == part).map(|(_, row)| row.txg)
        }
    };
    let Some(from) = from else { return Ok(None) };
    // What a destroyed snapshot referenced is not known any more from its bookmark.
    Ok(objects.catalog.written_since(id, from, later)?.map(|bytes| bytes.to_string()))
}

/// Parses the name of a property that a command gave.
pub(super) fn property(name: &str) -> Result<Property, Refusal> {
    dataset_property(name).map_err(|error| Refusal::new(Kind::Invalid, format!("bad property list: {error}")))
}
