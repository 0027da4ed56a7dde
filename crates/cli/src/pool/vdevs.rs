//! `nacre pool get PROPERTY POOL DEVICE...`: the properties of devices and groups, by the names and
//! in the order of OpenZFS. Properties that are not counted or not known here are `-`. Pure except
//! for [`asked`].

use super::{
    called, chosen,
    form::PoolForm,
    json, list,
    tree::{self, ROOT, Vdev},
};
use nacre_admin::{
    counted::Counts,
    pool::{Figures, Phase, properties::Value},
};
use nacre_daemon::{
    failure::Failure,
    pool::{
        client,
        expected::{self, UNAVAILABLE},
    },
};
use std::path::Path;

/// The properties with the headings of their columns, which are accepted as names, too.
const PROPERTIES: [(&str, &str); 51] = [
    ("capacity", "CAP"),
    ("state", "STATE"),
    ("guid", "GUID"),
    ("asize", "ASIZE"),
    ("psize", "PSIZE"),
    ("ashift", "ASHIFT"),
    ("size", "SIZE"),
    ("free", "FREE"),
    ("allocated", "ALLOC"),
    ("comment", "COMMENT"),
    ("expandsize", "EXPANDSZ"),
    ("fragmentation", "FRAG"),
    ("bootsize", "BOOTSIZE"),
    ("parity", "PARITY"),
    ("path", "PATH"),
    ("devid", "DEVID"),
    ("physpath", "PHYSPATH"),
    ("encpath", "ENCPATH"),
    ("fru", "FRU"),
    ("parent", "PARENT"),
    ("children", "CHILDREN"),
    ("numchildren", "NUMCHILD"),
    ("read_errors", "RDERR"),
    ("write_errors", "WRERR"),
    ("checksum_errors", "CKERR"),
    ("initialize_errors", "INITERR"),
    ("null_ops", "NULLOP"),
    ("read_ops", "READOP"),
    ("write_ops", "WRITEOP"),
    ("free_ops", "FREEOP"),
    ("claim_ops", "CLAIMOP"),
    ("trim_ops", "TRIMOP"),
    ("null_bytes", "NULLBYTE"),
    ("read_bytes", "READBYTE"),
    ("write_bytes", "WRITEBYTE"),
    ("free_bytes", "FREEBYTE"),
    ("claim_bytes", "CLAIMBYTE"),
    ("trim_bytes", "TRIMBYTE"),
    ("removing", "REMOVING"),
    ("allocating", "ALLOCATING"),
    ("failfast", "FAILFAST"),
    ("checksum_n", "CKSUM_N"),
    ("checksum_t", "CKSUM_T"),
    ("io_n", "IO_N"),
    ("io_t", "IO_T"),
    ("raidz_expanding", "RAIDZ_EXPANDING"),
    ("slow_io_n", "SLOW_IO_N"),
    ("slow_io_t", "SLOW_IO_T"),
    ("trim_support", "TRIMSUP"),
    ("trim_errors", "TRIMERR"),
    ("slow_ios", "SLOW"),
];

/// Properties that can be set in ZFS only: they never have a value here.
const SETTABLE: [&str; 9] =
    ["comment", "bootsize", "failfast", "checksum_n", "checksum_t", "io_n", "io_t", "slow_io_n", "slow_io_t"];

/// Returns the output of `get` where the names are a pool and its devices; `None` where they are
/// pools.
///
/// # Errors
/// Names that are neither; a property that does not exist.
pub fn asked(
    names: &[String],
    wanted: &[String],
    fields: Option<&[String]>,
    form: PoolForm,
) -> Result<Option<String>, Failure> {
    let [first, words @ ..] = names else { return Ok(None) };
    let is_pool = |name: &String| {
        !name.contains('/') && (!expected::lost(std::slice::from_ref(name)).is_empty() || client::find(name).is_some())
    };
    if words.is_empty() || words.iter().all(is_pool) || !is_pool(first) {
        return Ok(None);
    }
    let (mut pools, missing) = chosen::figures(std::slice::from_ref(first), false);
    let Some(mut pool) = pools.pop() else { return missing.map_or(Ok(None), Err) };
    form.called.name(&mut pool);
    let all_of = || tree::all_rows(&pool).map(|(_, vdev)| vdev);
    let meant = match words {
        [all] if all == "all-vdevs" => std::iter::once(Vdev::Root).chain(all_of()).collect(),
        words => words.iter().map(|word| of_word(&pool, word)).collect::<Result<Vec<_>, _>>()?,
    };
    let names = resolved(wanted)?;
    let rows = || {
        meant.iter().flat_map(|vdev| {
            names.iter().map(|name| (vdev.name().into_owned(), name.clone(), value(&pool, *vdev, name)))
        })
    };
    if form.json {
        Ok(Some(json::vdevs(&pool, &meant, &names, form)))
    } else {
        list::get_table(rows(), fields, form).map(Some)
    }
}

fn of_word<'a>(pool: &'a Figures, word: &str) -> Result<Vdev<'a>, Failure> {
    let group = tree::all_rows(pool).find_map(|(_, vdev)| match vdev {
        Vdev::Group(_) | Vdev::Pair(..) if vdev.name() == word => Some(vdev),
        _ => None,
    });
    match called::named_device(pool, Path::new(word)) {
        _ if ["root", ROOT].contains(&word) => Ok(Vdev::Root),
        _ if group.is_some() => Ok(group.unwrap_or(Vdev::Root)),
        Some(device) => Ok(Vdev::Leaf(device)),
        None => Err(Failure::usage(format!("Expected a list of vdevs in \"{}\", but got: {word}", pool.name))),
    }
}

/// Returns the properties that these words name.
fn resolved(words: &[String]) -> Result<Vec<String>, Failure> {
    if words.iter().any(|word| word == "all") {
        return Ok(PROPERTIES.iter().map(|(name, _)| (*name).to_owned()).collect());
    }
    let one = |word: &String| {
        let known = PROPERTIES.iter().find(|(name, head)| name == word || head.eq_ignore_ascii_case(word));
        match known {
            Some((name, _)) => Ok((*name).to_owned()),
            None if word == "name" || nacre_pool::properties::is_user_property(word) => Ok(word.clone()),
            None => {
                let why = format!("bad property list: invalid property '{word}'");
                Err(Failure::usage(why).next("`nacre pool get all POOL all-vdevs` shows the properties of devices"))
            }
        }
    };
    words.iter().map(one).collect()
}

/// Returns the value of a property of a vdev.
pub fn value(pool: &Figures, vdev: Vdev<'_>, name: &str) -> Value {
    let plain = |text: String| Value { human: text.clone(), exact: text, source: "-" };
    let nothing = |source| Value { source, ..plain("-".to_owned()) };
    let number = |number: u64| plain(number.to_string());
    let bytes =
        |number: u64| Value { exact: list::bytes(number, true), human: list::bytes(number, false), source: "-" };
    let of_pool =
        |name: &str| list::value(pool, name).map_or_else(|_| nothing("-"), |value| Value { source: "-", ..value });
    let devices = vdev.devices(pool);
    let parent = || {
        let above = match vdev {
            Vdev::Leaf(device) => tree::above(pool, device),
            // The group that its device is in.
            Vdev::Pair(_, device, _) => tree::group_of(pool, device),
            _ => None,
        };
        above.map_or_else(|| ROOT.to_owned(), |above| above.name().into_owned())
    };
    let children = || match vdev {
        Vdev::Root => tree::tops(pool).iter().map(|top| top.vdev.name().into_owned()).collect::<Vec<_>>(),
        Vdev::Group(_) => {
            let own = tree::tops(pool).into_iter().find(|top| top.vdev.name() == vdev.name());
            own.iter().flat_map(|top| &top.below).map(|below| below.name().into_owned()).collect()
        }
        Vdev::Pair(..) => devices.iter().map(|device| device.name().to_owned()).collect(),
        Vdev::Leaf(_) => Vec::new(),
    };
    let sum = |of: &dyn Fn(&Counts) -> u64| devices.iter().map(|device| of(&device.counts)).sum::<u64>();
    match (name, vdev) {
        ("name", _) => plain(vdev.name().into_owned()),
        ("state", Vdev::Root) => of_pool("health"),
        ("state", _) => plain(vdev.state(pool).to_owned()),
        ("path", Vdev::Leaf(device)) => plain(device.path.clone()),
        ("parent", Vdev::Group(_) | Vdev::Pair(..) | Vdev::Leaf(_)) => plain(parent()),
        (name, _) if SETTABLE.contains(&name) => nothing("default"),
        _ if pool.health == UNAVAILABLE => nothing("-"),
        ("children", Vdev::Root | Vdev::Group(_) | Vdev::Pair(..)) => plain(children().join(",")),
        ("numchildren", _) => number(children().len() as u64),
        ("parity", Vdev::Group(group)) if group.kind == "raidz" => number(group.parity as u64),
        ("asize", vdev) => value(pool, vdev, "size"),
        // A process of an older version does not report the length.
        ("psize", _) if devices.iter().all(|device| device.length > 0) => {
            bytes(devices.iter().map(|device| device.length).sum())
        }
        ("ashift", _) => of_pool("ashift"),
        ("expandsize", vdev) if matches!(vdev, Vdev::Root) || pool.devices.len() == 1 => of_pool("expandsize"),
        ("capacity" | "guid" | "size" | "free" | "allocated" | "fragmentation", Vdev::Root) => of_pool(name),
        ("capacity" | "guid" | "size" | "free" | "allocated" | "fragmentation", vdev) => {
            list::vdev_value(pool, vdev, name)
        }
        ("read_errors", _) => number(sum(&|counts| counts.read_errors)),
        ("write_errors", _) => number(sum(&|counts| counts.write_errors)),
        ("checksum_errors", _) => number(sum(&|counts| counts.checksum_errors)),
        ("read_ops", _) => number(sum(&|counts| counts.reads)),
        ("write_ops", _) => number(sum(&|counts| counts.writes)),
        ("read_bytes", _) => bytes(sum(&|counts| counts.read_bytes)),
        ("write_bytes", _) => bytes(sum(&|counts| counts.written_bytes)),
        ("trim_ops", _) => number(devices.iter().filter_map(|device| device.spread.times.last()).flatten().sum()),
        // Always zero: no device here has parity or receives these requests.
        ("parity" | "initialize_errors" | "null_ops" | "free_ops" | "claim_ops", _) => number(0),
        ("null_bytes" | "free_bytes" | "claim_bytes", _) => bytes(0),
        ("removing" | "raidz_expanding", _) => plain("off".to_owned()),
        ("allocating", _) => plain("on".to_owned()),
        // Support is known only after a TRIM.
        ("trim_support", Vdev::Leaf(device)) if device.trim.unsupported => plain("off".to_owned()),
        ("trim_support", Vdev::Leaf(device)) if device.trim.phase != Phase::Never => plain("on".to_owned()),
        _ => nothing("-"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use nacre_admin::pool::DeviceFigures;

    #[test]
    fn what_is_not_known_is_not_said() {
        let device = |path: &str, size| DeviceFigures {
            path: path.to_owned(),
            guid: 7,
            size,
            length: size + 1,
            ..DeviceFigures::default()
        };
        let devices = vec![device("/a", 100), device("/b", 200)];
        let pool =
            Figures { name: "tank".to_owned(), health: "ONLINE".to_owned(), size: 300, devices, ..Figures::default() };
        let of = |vdev, name: &str| value(&pool, vdev, name).exact;
        let first = Vdev::Leaf(&pool.devices[0]);
        assert_eq!((of(Vdev::Root, "children"), of(Vdev::Root, "numchildren")), ("/a,/b".to_owned(), "2".to_owned()));
        assert_eq!(
            (of(first, "asize"), of(first, "psize"), of(Vdev::Root, "psize")),
            ("100".to_owned(), "101".to_owned(), "302".to_owned())
        );
        assert_eq!(
            (of(first, "parent"), of(first, "slow_ios"), of(first, "trim_support")),
            (ROOT.to_owned(), "-".to_owned(), "-".to_owned())
        );
        assert_eq!(value(&pool, first, "comment").source, "default");
        assert_eq!(
            resolved(&["alloc".to_owned(), "RDERR".to_owned(), "a:b".to_owned()]).unwrap(),
            ["allocated", "read_errors", "a:b"]
        );
        assert!(resolved(&["health".to_owned()]).is_err());
        let mixed = tree::tests::mixed();
        let of = |vdev, name: &str| value(&mixed, vdev, name).exact;
        assert_eq!((of(Vdev::Root, "children").as_str(), of(Vdev::Root, "numchildren").as_str()), ("/a,mirror-1", "2"));
        let mirror = of_word(&mixed, "mirror-1").unwrap();
        assert_eq!((of(mirror, "children").as_str(), of(mirror, "size").as_str()), ("/b,/c", "200"));
        assert_eq!(of(Vdev::Leaf(&mixed.devices[2]), "parent"), "mirror-1");
        assert_eq!(of(Vdev::Leaf(&mixed.devices[0]), "parent"), ROOT);
        let lost = Figures { health: UNAVAILABLE.to_owned(), ..pool.clone() };
        assert_eq!(
            (value(&lost, first, "state").exact.as_str(), value(&lost, first, "size").exact.as_str()),
            ("UNAVAIL", "-")
        );
    }
}
