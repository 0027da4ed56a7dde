//! list, get, set, inherit: which objects, which values, from where.

use super::*;

fn listed(world: &World, names: &[&str], depth: Option<u64>, types: Option<Types>) -> Vec<String> {
    let names = names.iter().map(|name| (*name).to_owned()).collect();
    let FsAnswer::Listed(listed) =
        world.ok(FsRequest::List(Listing { names, depth, types, properties: Some(Vec::new()) }))
    else {
        panic!()
    };
    listed.into_iter().map(|listed| listed.name).collect()
}

const ALL: Types = Types { filesystems: true, snapshots: true, bookmarks: true };

#[test]
fn a_listing_goes_as_deep_as_it_is_told() {
    let world = World::new();
    for name in ["t/a", "t/a/b", "t/a/b/c"] {
        world.create(name);
    }
    world.ok(snapshot(&["t/a@1"], true));
    world.ok(FsRequest::Bookmark { of: "t/a@1".to_owned(), name: "t/a#m".to_owned() });
    assert_eq!(listed(&world, &[], None, None), ["t", "t/a", "t/a/b", "t/a/b/c"]);
    assert_eq!(listed(&world, &["t/a"], Some(0), None), ["t/a"]);
    assert_eq!(listed(&world, &["t/a"], Some(1), Some(ALL)), ["t/a", "t/a@1", "t/a#m", "t/a/b"]);
    let snapshots = Types { snapshots: true, ..Types::default() };
    assert_eq!(listed(&world, &["t/a"], Some(1), Some(snapshots)), ["t/a@1"]);
    assert_eq!(listed(&world, &["t/a", "t/a/b"], None, Some(snapshots)), ["t/a@1", "t/a/b@1", "t/a/b/c@1"]);
    assert_eq!(listed(&world, &["t/a@1", "t/a#m"], Some(0), None), ["t/a@1", "t/a#m"]);
    let missing = world.refused(FsRequest::List(Listing { names: vec!["t/zz".to_owned()], ..Listing::default() }));
    assert_eq!((missing.0.as_str(), missing.2), ("cannot open 't/zz': dataset does not exist", Kind::NotFound));
    world.pool.pool.set_properties(&[]).unwrap();
}

#[test]
fn values_come_from_where_they_were_set() {
    let world = World::new();
    for name in ["t/a", "t/a/b"] {
        world.create(name);
    }
    assert_eq!(world.value("t/a/b", "compression"), (Some("on".to_owned()), From::Default));
    world.ok(set("t/a", "compression", "zstd-5"));
    assert_eq!(world.value("t/a/b", "compress"), (Some("zstd-5".to_owned()), From::Inherited("t/a".to_owned())));
    world.ok(set("t/a/b", "compression", "off"));
    world.ok(set("t/a/b", "backup:policy", "daily"));
    assert_eq!(world.value("t/a/b", "compression"), (Some("off".to_owned()), From::Local));
    world.ok(inherit("t/a", "compression", true));
    assert_eq!(world.value("t/a/b", "compression"), (Some("on".to_owned()), From::Default));
    world.snapshot(&["t/a/b@1"]);
    assert_eq!(
        world.value("t/a/b@1", "backup:policy"),
        (Some("daily".to_owned()), From::Inherited("t/a/b".to_owned()))
    );
    assert_eq!(world.value("t/a/b@1", "compression"), (None, From::None));
    assert_eq!(world.refused(set("t/a/b@1", "compression", "off")).2, Kind::Invalid);
    assert_eq!(world.refused(set("t/a", "used", "1")).0, "cannot set property for 't/a': 'used' is readonly");
    assert_eq!(world.refused(set("t/a", "quota", "1x")).0, "cannot set property for 't/a': invalid numeric suffix 'x'");
    assert_eq!(world.value("t/a", "nosuch:thing"), (None, From::None));
}

#[test]
fn limits_that_cannot_be_are_refused_in_the_words_of_zfs() {
    let world = World::new();
    world.create("t/a");
    world.write("t/a", "f", 4 << 20, 1);
    assert_eq!(
        world.refused(set("t/a", "quota", "1M")).0,
        "cannot set property for 't/a': size is less than current used or reserved space"
    );
    assert_eq!(
        world.refused(set("t/a", "reservation", "1T")).0,
        "cannot set property for 't/a': size is greater than available space"
    );
    world.ok(set("t/a", "quota", "20M"));
    world.ok(set("t/a", "refreservation", "10M"));
    assert_eq!(world.value("t/a", "quota"), (Some((20 << 20).to_string()), From::Local));
    let number = |property| world.value("t/a", property).0.unwrap().parse::<u64>().unwrap();
    assert_eq!(
        number("used"),
        number("usedbydataset") + number("usedbysnapshots") + number("usedbychildren") + number("usedbyrefreservation")
    );
    assert_eq!(number("usedbydataset") + number("usedbyrefreservation"), 10 << 20);
    world.ok(set("t/a", "quota", "none"));
    assert_eq!(world.value("t/a", "quota").0.as_deref(), Some("0"));
    world.ok(set("t/a", "userquota@1000", "5M"));
    assert_eq!(world.value("t/a", "userquota@1000"), (Some((5 << 20).to_string()), From::Local));
}

#[test]
fn limits_of_numbers_hold_for_everything_below() {
    let world = World::new();
    world.create("t/a");
    world.ok(set("t/a", "filesystem_limit", "2"));
    world.ok(set("t/a", "snapshot_limit", "1"));
    world.create("t/a/b");
    world.create("t/a/b/c");
    assert_eq!(world.refused(create("t/a/d")).2, Kind::Quota);
    world.snapshot(&["t/a/b@1"]);
    assert_eq!(world.refused(snapshot(&["t/a/b/c@1"], false)).2, Kind::Quota);
    assert_eq!(world.names(), ["t", "t/a", "t/a/b", "t/a/b/c", "t/a/b@1"]);
    assert_eq!(world.value("t/a", "filesystem_count").0.as_deref(), Some("2"));
    assert_eq!(world.value("t/a", "snapshot_count").0.as_deref(), Some("1"));
}

#[test]
fn written_counts_since_a_snapshot() {
    let world = World::new();
    world.create("t/a");
    world.write("t/a", "f", 1 << 20, 1);
    world.snapshot(&["t/a@1"]);
    world.write("t/a", "g", 2 << 20, 2);
    world.snapshot(&["t/a@2"]);
    world.write("t/a", "h", 3 << 20, 3);
    let number = |name: &str, property: &str| world.value(name, property).0.unwrap().parse::<u64>().unwrap() >> 20;
    assert_eq!(number("t/a", "written"), 3);
    assert_eq!(number("t/a@2", "written"), 2);
    assert_eq!(number("t/a@1", "written"), 1);
    assert_eq!(number("t/a", "written@1"), 5);
    assert_eq!(number("t/a@2", "written@1"), 2);
    assert_eq!(world.value("t/a@1", "written@2").0, None);
    world.ok(FsRequest::Bookmark { of: "t/a@1".to_owned(), name: "t/a#b".to_owned() });
    assert_eq!(number("t/a", "written#b"), 5);
    assert_eq!(number("t/a@2", "written#t/a#b"), 2);
    assert_eq!(world.value("t/a", "written#c").0, None);
    world.ok(FsRequest::Destroy(destroy("t/a@1")));
    assert_eq!(world.value("t/a", "written#b").0, None);
    assert_eq!(number("t/a", "referenced"), 6);
}

#[test]
fn ratios_tell_what_compression_saves() {
    let world = World::new();
    world.create("t/a");
    world.create("t/a/b");
    assert_eq!(world.value("t/a", "refcompressratio").0.as_deref(), Some("1.00"));
    world.write("t/a", "noise", 4 << 20, 1);
    world.write_text("t/a/b", "text", 4 << 20);
    let ratio = |name: &str, property: &str| world.value(name, property).0.unwrap().parse::<f64>().unwrap();
    assert_eq!(world.value("t/a", "refcompressratio").0.as_deref(), Some("1.00"));
    assert!(ratio("t/a/b", "refcompressratio") > 5.0);
    // Descendants count in one of the two ratios.
    let both = ratio("t/a", "compressratio");
    assert!(both > 1.5 && both < 2.1, "{both}");
    world.snapshot(&["t/a/b@1"]);
    assert_eq!(world.value("t/a/b@1", "compressratio").0, world.value("t/a/b", "refcompressratio").0);
    let logical: u64 = world.value("t/a", "logicalused").0.unwrap().parse().unwrap();
    assert!(logical > 8 << 20 && logical < 9 << 20, "{logical}");
}

#[test]
fn all_properties_have_values_that_can_be_read() {
    let world = World::new();
    world.create("t/a");
    world.snapshot(&["t/a@1"]);
    let listing = Listing { types: Some(ALL), ..Listing::default() };
    let FsAnswer::Listed(listed) = world.ok(FsRequest::List(listing)) else { panic!() };
    assert_eq!(listed.len(), 3);
    for listed in listed {
        assert!(listed.values.len() > 10, "{}", listed.name);
        assert!(listed.values.iter().all(|shown| shown.value.is_some()));
        let names: HashSet<&str> = listed.values.iter().map(|shown| shown.property.as_str()).collect();
        assert_eq!(names.len(), listed.values.len());
        assert!(names.contains("creation") && !names.contains("volsize"), "{names:?}");
    }
}

#[test]
fn a_pool_that_is_imported_read_only_changes_nothing() {
    let mut world = World::new();
    world.create("t/a");
    world.pool.read_only = true;
    assert_eq!(world.refused(create("t/b")).2, Kind::Permission);
    assert_eq!(world.names(), ["t", "t/a"]);
    world.ok(FsRequest::Unmount { what: ToUnmount::All, force: false });
    world.ok(FsRequest::Mount(ToMount::default()));
    assert!(world.mounts.mounted().iter().all(|mounted| mounted.options.read_only));
}

#[test]
fn a_value_that_is_not_inherited_gives_way_to_the_received_one() {
    let world = World::new();
    world.create("t/a");
    let revert = |property: &str| {
        let properties = vec![(property.to_owned(), NewValue::Received)];
        world.run(FsRequest::Set(ToSet { names: vec!["t/a".to_owned()], properties, ..ToSet::default() }))
    };
    let quota = |size: &str| (Some(size.to_owned()), From::Received);
    world.ok(set("t/a", "quota", "67108864"));
    revert("quota").unwrap();
    assert_eq!(world.value("t/a", "quota").1, From::Default);
    let edit = nacre_pool::engine::Edit {
        dataset: world.id("t/a"),
        name: "quota".to_owned(),
        to: nacre_pool::engine::Setting::Received("33554432".to_owned()),
    };
    world.pool.pool.set_properties(&[edit]).unwrap();
    world.ok(set("t/a", "quota", "67108864"));
    assert_eq!(world.value("t/a", "quota").1, From::Local);
    revert("quota").unwrap();
    assert_eq!(world.value("t/a", "quota"), quota("33554432"));
    // A mount follows, as with other changes.
    world.ok(set("t/a", "canmount", "off"));
    revert("canmount").unwrap();
    assert_eq!(world.mounted().len(), 1);
    assert!(revert("used").is_err() && revert("utf8only").is_err());
}
