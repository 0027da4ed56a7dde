//! Properties of users: on snapshots, and absurd ones.

use super::*;

fn snapshot_with(names: &[&str], recursive: bool, properties: &[(&str, &str)]) -> FsRequest {
    let properties = properties.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect();
    FsRequest::Snapshot(ToSnapshot {
        names: names.iter().map(|name| (*name).to_owned()).collect(),
        recursive,
        properties,
    })
}

fn local(value: &str) -> (Option<String>, From) {
    (Some(value.to_owned()), From::Local)
}

fn inherited(value: &str, from: &str) -> (Option<String>, From) {
    (Some(value.to_owned()), From::Inherited(from.to_owned()))
}

#[test]
fn snapshots_have_their_own_and_those_of_their_file_system() {
    let world = World::new();
    world.create("t/a");
    world.create("t/a/b");
    world.ok(snapshot_with(&["t/a@1"], true, &[("b:policy", "keep")]));
    assert_eq!(world.value("t/a@1", "b:policy"), local("keep"));
    assert_eq!(world.value("t/a/b@1", "b:policy"), local("keep"));
    assert_eq!(world.value("t/a", "b:policy"), (None, From::None));
    world.ok(set("t/a", "b:policy", "daily"));
    world.ok(set("t/a", "b:other", "yes"));
    assert_eq!(world.value("t/a@1", "b:policy"), local("keep"));
    assert_eq!(world.value("t/a@1", "b:other"), inherited("yes", "t/a"));
    assert_eq!(world.value("t/a/b@1", "b:other"), inherited("yes", "t/a"));
    world.ok(set("t/a@1", "b:other", "no"));
    assert_eq!(world.value("t/a@1", "b:other"), local("no"));
    world.ok(inherit("t/a@1", "b:policy", false));
    assert_eq!(world.value("t/a@1", "b:policy"), inherited("daily", "t/a"));
    // Of everything below, snapshots too.
    world.ok(inherit("t/a", "b:other", true));
    assert_eq!(world.value("t/a@1", "b:other"), (None, From::None));
    // Several objects at once, of both kinds.
    let names = vec!["t/a/b".to_owned(), "t/a/b@1".to_owned()];
    let properties = vec![("b:policy".to_owned(), NewValue::Local("two".to_owned()))];
    world.ok(FsRequest::Set(ToSet { names, properties, ..ToSet::default() }));
    assert_eq!((world.value("t/a/b", "b:policy"), world.value("t/a/b@1", "b:policy")), (local("two"), local("two")));
    let FsAnswer::Listed(listed) =
        world.ok(FsRequest::List(Listing { names: vec!["t/a/b@1".to_owned()], ..Listing::default() }))
    else {
        panic!()
    };
    assert!(listed[0].values.iter().any(|shown| shown.property == "b:policy" && shown.source == From::Local));
}

#[test]
fn snapshots_have_no_others() {
    let world = World::new();
    world.create("t/a");
    world.snapshot(&["t/a@1"]);
    let refused = world.refused(set("t/a@1", "quota", "1G"));
    assert_eq!(
        (refused.0.as_str(), refused.2),
        ("cannot set property for 't/a@1': this property can not be modified for snapshots", Kind::Invalid)
    );
    let refused = world.refused(inherit("t/a@1", "compression", false));
    assert!(refused.0.ends_with("this property can not be modified for snapshots"), "{}", refused.0);
    let refused = world.refused(snapshot_with(&["t/a@2"], false, &[("quota", "1G")]));
    assert_eq!(refused.0, "cannot create snapshot 't/a@2': this property can not be modified for snapshots");
    assert!(world.refused(set("t/a@none", "b:c", "1")).0.contains("dataset does not exist"));
    world.ok(FsRequest::Bookmark { of: "t/a@1".to_owned(), name: "t/a#m".to_owned() });
    assert!(world.refused(set("t/a#m", "b:c", "1")).0.contains("bookmarks have no properties"));
    assert_eq!(world.names(), ["t", "t/a", "t/a#m", "t/a@1"]);
}

#[test]
fn absurd_values_are_refused_and_change_nothing() {
    let world = World::new();
    world.create("t/a");
    let (name, value) = (format!("b:{}", "c".repeat(253)), "v".repeat(7900));
    world.ok(set("t/a", &name, &value));
    assert_eq!(world.value("t/a", &name).0, Some(value.clone()));
    let longer = format!("{value}v");
    assert!(world.refused(set("t/a", &name, &longer)).0.contains("too long"));
    assert!(world.refused(set("t/a", &format!("{name}c"), "1")).0.contains("too long"));
    assert!(world.refused(create_with("t/b", &[("b:c", &longer)])).0.contains("too long"));
    assert_eq!(world.names(), ["t", "t/a"]);
    // A quota of all bytes that can be counted is one that never stops anybody.
    world.ok(set("t/a", "quota", "18446744073709551615"));
    assert!(
        world
            .refused(set("t/a", "reservation", "18446744073709551615"))
            .0
            .contains("size is greater than available space")
    );
    assert!(world.refused(set("t/a", "quota", "18446744073709551616")).0.contains("too large"));
    assert!(world.refused(set("t/a", "quota", "-1")).0.contains("bad numeric value"));
    world.write("t/a", "f", 100_000, 1);
    world.pool.pool.check(&world.pool.store, false, &mut |problem| panic!("{problem}")).unwrap();
}
