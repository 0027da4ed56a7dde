//! Properties: the table, parsing and display of values, effective values.

use super::effective::{SnapshotDirectory, effective, effective_with, limits, mountpoint};
use super::owner::OwnerFigure;
use super::*;
use crate::catalog::{PropertyRow, PropertySource};
use crate::frames::CompressionSetting;
use crate::pointer::ChecksumKind;
use crate::rows::OwnerKind;
use crate::space::Limits;
use proptest::prelude::*;

fn set(name: &str, value: &str) -> Result<String, String> {
    dataset_property(name).and_then(|property| property.parse(value, false)).map_err(|error| error.to_string())
}

fn rows(values: &[(&str, &str)]) -> Vec<(String, PropertyRow)> {
    let row = |value: &str| PropertyRow { source: PropertySource::Local, value: value.to_owned() };
    values.iter().map(|(name, value)| ((*name).to_owned(), row(value))).collect()
}

#[test]
fn each_line_of_the_table_is_sound() {
    for table in [DATASET_PROPERTIES, POOL_PROPERTIES] {
        let names: Vec<&str> = table.iter().map(|definition| definition.name).collect();
        let mut known: Vec<&str> =
            table.iter().flat_map(|definition| [Some(definition.name), definition.short]).flatten().collect();
        known.sort_unstable();
        let doubled: Vec<_> = known.windows(2).filter(|pair| pair[0] == pair[1]).collect();
        assert!(doubled.iter().all(|pair| pair[0] == "usedbychildren"), "{doubled:?}");
        for definition in table {
            let shown_only = definition.settable == Settable::Never;
            assert_eq!(matches!(definition.kind, Kind::Bytes | Kind::Figure), shown_only, "{}", definition.name);
            assert!(!definition.values.is_empty() && !definition.column.is_empty(), "{}", definition.name);
            if !shown_only && !["volsize", "volblocksize", "version", "mountpoint", "bootfs"].contains(&definition.name)
            {
                assert_eq!(
                    definition.canonical(definition.default).as_deref(),
                    Ok(definition.default),
                    "default of {}",
                    definition.name
                );
            }
        }
        assert!(names.len() > 20);
    }
}

#[test]
fn canonical_values_stay_what_they_are() {
    for (name, text, canonical, human) in [
        ("quota", "10G", "10737418240", "10G"),
        ("quota", "none", "0", "none"),
        ("quota", "5.5M", "5767168", "5.50M"),
        ("refquota", "1.5T", "1649267441664", "1.50T"),
        ("reservation", "0", "0", "none"),
        ("refreservation", "100mb", "104857600", "100M"),
        ("recordsize", "64k", "65536", "64K"),
        ("recordsize", "512", "512", "512"),
        ("recsize", "1M", "1048576", "1M"),
        ("compression", "zstd-19", "zstd-19", "zstd-19"),
        ("compress", "zstd-fast-7", "zstd-fast-7", "zstd-fast-7"),
        ("mountpoint", "/a//b/./c/", "/a/b/c", "/a/b/c"),
        ("mountpoint", "/", "/", "/"),
        ("mountpoint", "legacy", "legacy", "legacy"),
        ("canmount", "noauto", "noauto", "noauto"),
        ("snapshot_limit", "10", "10", "10"),
        ("filesystem_limit", "0", "0", "0"),
        ("checksum", "blake3", "blake3", "blake3"),
        ("copies", "1", "1", "1"),
        ("dedup", "off", "off", "off"),
        ("module:x", "any Text", "any Text", "any Text"),
        ("userquota@alice", "2g", "2147483648", "2G"),
        ("groupobjquota@100", "1000", "1000", "1000"),
        ("userquota@0", "none", "0", "none"),
    ] {
        let value = set(name, text).unwrap();
        assert_eq!(value, canonical, "{name}={text}");
        let property = dataset_property(name).unwrap();
        assert_eq!(property.human(&value), human, "{name}={text}");
        if value != "0" {
            assert_eq!(set(name, &value).unwrap(), canonical, "{name}: canonical values are canonical");
        }
    }
}

#[test]
fn what_is_refused_is_refused_in_the_words_of_zfs() {
    for (name, text, what) in [
        ("quota", "0", "use 'none' to disable quota/refquota"),
        ("quota", "1x", "invalid numeric suffix 'x'"),
        ("quota", "-5", "bad numeric value '-5'"),
        ("quota", " 5M", "bad numeric value ' 5M'"),
        ("quota", "", "bad numeric value ''"),
        ("quota", ".", "bad numeric value '.'"),
        ("quota", "10Q", "invalid numeric suffix 'Q'"),
        ("quota", "1.5.2M", "invalid numeric suffix '.2M'"),
        ("quota", "16E", "numeric value is too large"),
        ("quota", "99999999999999999999", "numeric value is too large"),
        ("quota", "5bb", "invalid numeric suffix 'bb'"),
        ("recordsize", "3000", "'recordsize' must be power of 2 from 512B to 16M"),
        ("recordsize", "32M", "'recordsize' must be power of 2 from 512B to 16M"),
        ("recordsize", "256", "'recordsize' must be power of 2 from 512B to 16M"),
        (
            "compression",
            "zstd-20",
            "'compression' must be one of 'on | off | lz4 | zstd | zstd-[1-19] | zstd-fast | zstd-fast-[1-7]'",
        ),
        ("compression", "gzip-9", "'compression' cannot be set: this pool compresses with lz4 and zstd"),
        ("atime", "maybe", "'atime' must be one of 'on | off'"),
        ("canmount", "maybe", "'canmount' must be one of 'on | off | noauto'"),
        ("mountpoint", "relative", "'mountpoint' must be an absolute path, 'none', or 'legacy'"),
        ("mountpoint", "/a/../b", "'mountpoint' must be an absolute path, 'none', or 'legacy'"),
        ("mountpoint", "/a\nb", "'mountpoint' must be an absolute path, 'none', or 'legacy'"),
        ("mountpoint", "/a\u{1b}[2J", "'mountpoint' must be an absolute path, 'none', or 'legacy'"),
        ("nosuch", "1", "invalid property 'nosuch'"),
        ("Module:X", "1", "invalid property 'Module:X'"),
        ("used", "1", "'used' is readonly"),
        ("written@x", "1", "'written@' is readonly"),
        ("utf8only", "on", "'utf8only' is readonly: it can only be set at creation"),
        ("copies", "2", "'copies' cannot be set: this pool keeps one copy of everything"),
        ("dedup", "on", "'dedup' cannot be set: this pool does not deduplicate"),
        ("userused@alice", "1", "'userused@' is readonly"),
        ("userquota@", "1", "invalid user or group in 'userquota@'"),
        ("userquota@a", "0", "use 'none' to disable userquota/groupquota"),
        ("projectquota@1", "1", "'projectquota@' cannot be set: there are no projects"),
    ] {
        assert_eq!(set(name, text), Err(what.to_owned()), "{name}={text}");
    }
    let creating = |name: &str, text: &str| dataset_property(name).unwrap().parse(text, true);
    assert_eq!(creating("utf8only", "on").as_deref(), Ok("on"));
    assert_eq!(creating("casesensitivity", "mixed").as_deref(), Ok("mixed"));
    assert!(creating("casesensitivity", "Insensitive").is_err() && creating("normalization", "formc").is_err());
    assert!(creating("encryption", "on").is_err());
    assert!(set("module:x", &"v".repeat(8192)).is_err());
    assert!(set(&format!("module:{}", "x".repeat(250)), "v").is_err());
}

#[test]
fn properties_of_pools() {
    let set = |name: &str, text: &str, creating| {
        pool_property(name).and_then(|property| property.parse(text, creating)).map_err(|error| error.to_string())
    };
    assert_eq!(set("nosuch", "1", false), Err("invalid property 'nosuch'".to_owned()));
    assert_eq!(set("failmode", "x", false), Err("'failmode' must be one of 'wait | continue | panic'".to_owned()));
    assert_eq!(set("size", "5", false), Err("'size' is readonly".to_owned()));
    assert_eq!(set("ashift", "12", false), Err("'ashift' is readonly: it can only be set at creation".to_owned()));
    assert_eq!(set("ashift", "12", true), Ok("12".to_owned()));
    assert_eq!(set("ashift", "17", true), Err("'ashift' must be a number from 0 to 16".to_owned()));
    assert_eq!(set("altroot", "/mnt/", true), Ok("/mnt".to_owned()));
    assert_eq!(set("altroot", "mnt", true), Err("'altroot' must be an absolute path or 'none'".to_owned()));
    assert_eq!(set("comment", "the old disk", false), Ok("the old disk".to_owned()));
    assert_eq!(
        set("comment", &"x".repeat(33), false),
        Err("'comment' must be printable and at most 32 characters long".to_owned())
    );
    assert!(matches!(pool_property("feature@extensible_dataset"), Ok(Property::Feature(_))));
    assert!(pool_property("feature@x").is_err());
    assert_eq!(pool_property("listsnaps").unwrap(), pool_property("listsnapshots").unwrap());
}

#[test]
fn what_can_be_inherited() {
    let inherit = |name: &str| dataset_property(name).unwrap().check_inherit().map_err(|error| error.to_string());
    assert_eq!(inherit("compression"), Ok(()));
    assert_eq!(inherit("module:x"), Ok(()));
    assert_eq!(inherit("quota"), Err("'quota' property cannot be inherited".to_owned()));
    assert_eq!(inherit("canmount"), Err("'canmount' property cannot be inherited".to_owned()));
    assert_eq!(inherit("used"), Err("'used' is readonly".to_owned()));
    assert!(inherit("utf8only").is_err() && inherit("userquota@1").is_err() && inherit("written@a").is_err());
    let revert = |name: &str| dataset_property(name).unwrap().check_revert().is_ok();
    assert!(revert("compression") && revert("module:x") && revert("quota") && revert("canmount"));
    assert!(!revert("used") && !revert("utf8only") && !revert("userquota@1") && !revert("written@a"));
}

#[test]
fn values_come_from_the_nearest_ancestor() {
    let top = rows(&[("compression", "zstd"), ("module:x", "top"), ("quota", "100"), ("canmount", "off")]);
    let middle = rows(&[("atime", "off")]);
    let mut own = rows(&[("module:x", "own")]);
    own.push(("readonly".to_owned(), PropertyRow { source: PropertySource::Received, value: "on".to_owned() }));
    let chain =
        [Level { name: "t/a/b", rows: &own }, Level { name: "t/a", rows: &middle }, Level { name: "t", rows: &top }];
    let value = |name: &str| {
        let found = effective(&dataset_property(name).unwrap(), &chain).unwrap();
        (found.value, found.source.to_string())
    };
    let expect = |value: &str, source: &str| (value.to_owned(), source.to_owned());
    assert_eq!(value("compression"), expect("zstd", "inherited from t"));
    assert_eq!(value("atime"), expect("off", "inherited from t/a"));
    assert_eq!(value("module:x"), expect("own", "local"));
    assert_eq!(value("readonly"), expect("on", "received"));
    assert_eq!(value("exec"), expect("on", "default"));
    assert_eq!(value("quota"), expect("0", "default"));
    assert_eq!(value("canmount"), expect("on", "default"));
    assert_eq!(effective(&dataset_property("used").unwrap(), &chain), None);
    assert_eq!(effective(&dataset_property("other:x").unwrap(), &chain), None);
    let exec = effective_with(&dataset_property("exec").unwrap(), &chain, &[("exec", "off")]).unwrap();
    assert_eq!((exec.value.as_str(), exec.source.to_string().as_str()), ("off", "temporary"));
    assert_eq!(Source::None.to_string(), "-");
}

#[test]
fn mount_points_go_on_with_the_names_between() {
    let none: Vec<(String, PropertyRow)> = Vec::new();
    let at = |top: &[(&str, &str)], middle: &[(&str, &str)]| {
        let (top, middle) = (rows(top), rows(middle));
        let chain = [
            Level { name: "t/a/b", rows: &none },
            Level { name: "t/a", rows: &middle },
            Level { name: "t", rows: &top },
        ];
        let found = mountpoint(&chain);
        (found.value, found.source.to_string())
    };
    let expect = |value: &str, source: &str| (value.to_owned(), source.to_owned());
    assert_eq!(at(&[], &[]), expect("/t/a/b", "default"));
    assert_eq!(at(&[("mountpoint", "/x")], &[]), expect("/x/a/b", "inherited from t"));
    assert_eq!(at(&[("mountpoint", "/")], &[]), expect("/a/b", "inherited from t"));
    assert_eq!(at(&[("mountpoint", "/x")], &[("mountpoint", "/y/z")]), expect("/y/z/b", "inherited from t/a"));
    assert_eq!(at(&[("mountpoint", "/x")], &[("mountpoint", "none")]), expect("none", "inherited from t/a"));
    assert_eq!(at(&[("mountpoint", "legacy")], &[]), expect("legacy", "inherited from t"));
    let own = rows(&[("mountpoint", "/")]);
    assert_eq!(mountpoint(&[Level { name: "t", rows: &own }]).value, "/");
}

#[test]
fn the_engine_gets_what_was_set() {
    let none = Vec::new();
    let plain = Behaviour::of(&[Level { name: "t", rows: &none }]).unwrap();
    assert_eq!(
        (plain.record_shift, plain.compression, plain.checksum),
        (17, CompressionSetting::On, ChecksumKind::Xxh3)
    );
    assert!(
        plain.atime && plain.relatime && plain.exec && plain.xattrs && plain.acl && !plain.readonly && !plain.utf8_only
    );
    assert_eq!((plain.sync, plain.snapdir), (SyncMode::Standard, SnapshotDirectory::Hidden));
    let set = rows(&[
        ("recordsize", "16384"),
        ("compression", "zstd-fast-3"),
        ("checksum", "blake3"),
        ("sync", "disabled"),
        ("acltype", "off"),
        ("snapdir", "visible"),
        ("primarycache", "metadata"),
    ]);
    let changed = Behaviour::of(&[Level { name: "t/a", rows: &none }, Level { name: "t", rows: &set }]).unwrap();
    assert_eq!(
        (changed.record_shift, changed.compression, changed.checksum),
        (14, CompressionSetting::Zstd(-3), ChecksumKind::Blake3)
    );
    assert_eq!((changed.sync, changed.acl, changed.snapdir), (SyncMode::Disabled, false, SnapshotDirectory::Visible));
    assert!(!changed.cache_content && changed.prefetch);
    for (name, value) in [("recordsize", "5"), ("compression", "gzip"), ("atime", "perhaps")] {
        let damaged = rows(&[(name, value)]);
        assert!(Behaviour::of(&[Level { name: "t", rows: &damaged }]).is_err(), "{name}={value}");
    }
}

#[test]
fn limits_are_a_datasets_own() {
    let set = rows(&[
        ("quota", "100"),
        ("refquota", "0"),
        ("reservation", "30"),
        ("snapshot_limit", "0"),
        ("filesystem_limit", "none"),
    ]);
    let expected = Limits { quota: Some(100), reservation: 30, snapshots: Some(0), ..Limits::default() };
    assert_eq!(limits(&Level { name: "t", rows: &set }).unwrap(), expected);
    let damaged = rows(&[("quota", "ten")]);
    assert!(limits(&Level { name: "t", rows: &damaged }).is_err());
}

#[test]
fn owners() {
    let parsed = OwnerProperty::parse("userquota@1000").unwrap().unwrap();
    assert_eq!((parsed.kind, parsed.figure, parsed.id()), (OwnerKind::User, OwnerFigure::Quota, Some(1000)));
    assert_eq!(parsed.stored_name(1000), "userquota@1000");
    let named = OwnerProperty::parse("groupobjused@staff").unwrap().unwrap();
    assert_eq!((named.id(), named.stored_name(50)), (None, "groupobjused@50".to_owned()));
    assert_eq!(OwnerProperty::parse("quota").unwrap(), None);
    assert_eq!(OwnerProperty::parse("written@a").unwrap(), None);
    let set = rows(&[("userquota@1000", "4096")]);
    let level = [Level { name: "t", rows: &set }];
    assert_eq!(effective(&Property::Owner(parsed), &level).unwrap().value, "4096");
}

#[test]
fn sizes_as_people_read_them() {
    for (number, text) in [
        (0, "0B"),
        (512, "512B"),
        (1023, "1023B"),
        (1024, "1K"),
        (122_880, "120K"),
        (119_000, "116K"),
        (21_118_976, "20.1M"),
        (1_649_267_441_664, "1.50T"),
        (10_737_418_240, "10G"),
        (10_737_418_241, "10.0G"),
        (1_073_741_823, "1024M"),
        (u64::MAX, "16.0E"),
        (1 << 60, "1E"),
    ] {
        assert_eq!(size::human_bytes(number), text, "{number}");
    }
    assert_eq!((size::human(1500), size::human(7)), ("1.46K".to_owned(), "7".to_owned()));
}

proptest! {
    #[test]
    fn any_text_is_a_value_or_an_error(text in "[0-9a-zA-Z./ -]{0,10}") {
        for definition in DATASET_PROPERTIES.iter().chain(POOL_PROPERTIES) {
            if let Ok(value) = definition.canonical(&text)
                && value != "0"
            {
                prop_assert_eq!(definition.canonical(&value).unwrap(), value, "{}", definition.name);
            }
        }
        let _ = dataset_property(&text).map(|property| property.human(&text));
    }

    #[test]
    fn sizes_survive(number: u64, shift in 0u32..=6) {
        prop_assert_eq!(size::parse(&number.to_string()).unwrap(), number);
        let suffix = ["", "K", "m", "GB", "TiB", "p", "E"][shift as usize];
        let small = number >> 20 >> (10 * shift).min(43);
        let parsed = size::parse(&format!("{small}{suffix}"));
        prop_assert_eq!(parsed.ok(), small.checked_mul(1 << (10 * shift)));
        let shown = size::human(number);
        let read = size::parse(&shown);
        if number < u64::MAX / 2 {
            let read = read.unwrap() as f64;
            prop_assert!((read - number as f64).abs() <= number as f64 * 0.006, "{} {}", number, shown);
        }
    }
}
