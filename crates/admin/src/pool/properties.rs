//! Properties of pools: value and source of each, and which may be set.

use nacre_pool::properties::{POOL_PROPERTIES, Property, PropertyError, Settable, features, pool_property};

use super::figures::{Figures, SPECIAL, percent};
use super::in_bucket;
use super::prices::PRICES;
use crate::{Imported, Kind, Refusal};

/// A value in canonical and readable form, and its source.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Value {
    /// For scripts.
    pub exact: String,
    /// For people.
    pub human: String,
    /// "local", "default" or "-".
    pub source: &'static str,
}

/// Returns the names of all properties of a pool, in the order in which `get all` shows them: ZFS'
/// order as far as it has one, the pool's features, then user properties.
#[must_use]
pub fn names(pool: &Figures) -> Vec<String> {
    let first = [
        "size",
        "capacity",
        "altroot",
        "health",
        "guid",
        "version",
        "bootfs",
        "delegation",
        "autoreplace",
        "cachefile",
        "failmode",
        "listsnapshots",
    ];
    let in_bucket = pool.devices.iter().any(|device| device.requests.is_some());
    let has = |name: &&str| !first.contains(name) && (in_bucket || ![in_bucket::LOG, PRICES].contains(name));
    let rest = POOL_PROPERTIES.iter().map(|definition| definition.name).filter(has);
    let own = pool.properties.iter().map(|(name, _)| name.clone()).filter(|name| name.contains(':'));
    let known =
        [features::REDUNDANT_METADATA, features::ORDERED_NAMES, features::FOLDED, features::GROUPS, features::CLASSES]
            .into_iter()
            .chain(features::SERVED.iter().copied());
    let there = known.filter(|name| state(pool, name) != "disabled");
    let there = there.map(|name| format!("feature@{name}"));
    first.into_iter().chain(rest).map(ToOwned::to_owned).chain(there).chain(own).collect()
}

/// Returns the state of a feature of a pool, in ZFS' words: `enabled` becomes active with its first use.
fn state(pool: &Figures, feature: &str) -> &'static str {
    let active = match feature {
        features::REDUNDANT_METADATA => pool.redundant_metadata,
        features::ORDERED_NAMES => pool.ordered_names,
        features::FOLDED if !pool.folding => return "enabled",
        features::FOLDED => true,
        features::GROUPS => !pool.groups.is_empty(),
        features::CLASSES if !pool.groups.iter().any(|group| group.class == SPECIAL) => return "enabled",
        features::CLASSES => true,
        other => features::SERVED.contains(&other),
    };
    if active { "active" } else { "disabled" }
}

/// Returns the whole name of a property that may be abbreviated ("cap"), and its heading.
///
/// # Errors
/// There is no property of that name.
pub fn resolve(name: &str) -> Result<(String, String), PropertyError> {
    if name == "name" {
        return Ok((name.to_owned(), "NAME".to_owned()));
    }
    Ok(match pool_property(name)? {
        Property::Known(definition) => (definition.name.to_owned(), definition.column.to_owned()),
        _ => (name.to_owned(), name.to_ascii_uppercase()),
    })
}

/// Returns the value of a property by its whole name.
///
/// # Errors
/// There is no property of that name.
pub fn value(pool: &Figures, name: &str) -> Result<Value, PropertyError> {
    let property = if name == "name" { None } else { Some(pool_property(name)?) };
    let plain = |text: String| Value { human: text.clone(), exact: text, source: "-" };
    let nothing = || plain("-".to_owned());
    let bytes = |number: u64| {
        let exact = number.to_string();
        let human = property.as_ref().map_or_else(|| exact.clone(), |property| property.human(&exact));
        Value { exact, human, source: "-" }
    };
    let share = |number: u64| Value { exact: number.to_string(), human: format!("{number}%"), source: "-" };
    let set = |text: &str| Value { exact: text.to_owned(), human: text.to_owned(), source: "local" };
    Ok(match name {
        "name" => plain(pool.name.clone()),
        "size" => bytes(pool.size),
        "allocated" => bytes(pool.allocated),
        "free" => bytes(pool.free),
        "freeing" => bytes(pool.freeing),
        "leaked" => bytes(0),
        "checkpoint" => nothing(),
        "expandsize" if pool.expandable == 0 => nothing(),
        "expandsize" => bytes(pool.expandable),
        "capacity" => share(percent(pool.allocated, pool.size)),
        "fragmentation" => share(pool.fragmentation),
        "dedupratio" => Value { exact: "1.00".to_owned(), human: "1.00x".to_owned(), source: "-" },
        "health" => plain(pool.health.clone()),
        "guid" => plain(pool.guid.to_string()),
        "version" => plain(nacre_pool::label::VERSION.to_string()),
        "altroot" => pool.altroot.as_deref().map_or_else(|| Value { source: "default", ..nothing() }, set),
        "readonly" if pool.read_only => set("on"),
        _ => match name.strip_prefix("feature@") {
            Some(feature) => set(state(pool, feature)),
            None => stored(pool, name, property.as_ref()),
        },
    })
}

fn stored(pool: &Figures, name: &str, property: Option<&Property>) -> Value {
    let shown = |value: &str| if value.is_empty() { "-".to_owned() } else { value.to_owned() };
    match (pool.properties.iter().find(|(stored, _)| stored == name), property) {
        (Some((_, value)), Some(property)) => {
            Value { exact: shown(value), human: shown(&property.human(value)), source: "local" }
        }
        (None, Some(Property::Known(definition))) => Value {
            exact: shown(definition.default),
            human: shown(&definition.human(definition.default)),
            source: "default",
        },
        _ => Value { exact: "-".to_owned(), human: "-".to_owned(), source: "-" },
    }
}

/// Parses `PROPERTY=VALUE` for a pool: returns the whole name and the canonical value. `creating`:
/// the pool is being made or imported.
///
/// # Errors
/// The value is invalid, in ZFS' words.
pub fn parse(name: &str, value: &str, creating: bool) -> Result<(String, String), PropertyError> {
    let property = pool_property(name)?;
    let canonical = property.parse(value, creating)?;
    Ok((resolve(name)?.0, canonical))
}

/// Sets a property of an imported pool. An empty value of a user property removes it.
///
/// # Errors
/// The value is invalid.
pub fn set(pool: &Imported, name: &str, value: &str) -> Result<(), Refusal> {
    let doing = format!("cannot set property for '{}'", pool.name());
    super::writable(pool, &doing)?;
    let refused = |error: PropertyError| {
        Refusal::new(Kind::Invalid, format!("{doing}: {error}")).next(error.next(POOL_PROPERTIES))
    };
    if let Ok(Property::Known(definition)) = pool_property(name)
        && definition.settable == Settable::AtCreation
    {
        let error = Refusal::new(
            Kind::Invalid,
            format!("{doing}: property '{name}' can only be set at creation or import time"),
        );
        return Err(error);
    }
    let (name, value) = parse(name, value, false).map_err(refused)?;
    if let Some(feature) = name.strip_prefix("feature@") {
        let lacks = features::is_own(feature) && state(&Figures::of(pool)?, feature) == "disabled";
        let next = format!("nacre pool upgrade {}", pool.name());
        return if lacks && feature == features::GROUPS {
            Err(Refusal::new(Kind::Invalid, format!("{doing}: '{name}' comes with groups of devices"))
                .next("nacre pool create POOL mirror DEVICE DEVICE"))
        } else if lacks {
            Err(Refusal::new(Kind::Invalid, format!("{doing}: '{name}' comes with an upgrade")).next(next))
        } else {
            Ok(())
        };
    }
    in_bucket::check_property(pool.bucket.is_some(), &name, &value)
        .map_err(|refusal| Refusal { what: format!("{doing}: {}", refusal.what), ..refusal })?;
    if name == in_bucket::LOG {
        pool.change_log(&value).map_err(|refusal| Refusal { what: format!("{doing}: {}", refusal.what), ..refusal })?;
    }
    let removes = name.contains(':') && value.is_empty();
    let change = (name.as_str(), (!removes).then_some(value.as_str()));
    pool.pool.set_pool_properties(&[change]).map_err(|error| Refusal::pool(&doing, &error))?;
    pool.apply_property(&name, &value);
    Ok(())
}
