//! Effects of a stream's later snapshots on an existing file system: they are trusted no further
//! than the first one, and overwrite no local setting.

use std::sync::mpsc;
use std::time::Duration;

use nacre_pool::send_stream::{Record, SentProperty, SnapshotHead};

use super::forged_streams::{receive_as, receive_while, send, source};
use super::*;

/// How long the receiver may take for a stream that names very many file systems.
const ENDS_WITHIN: Duration = Duration::from_secs(60);

fn heads(records: &mut [Record]) -> impl Iterator<Item = &mut SnapshotHead> {
    records.iter_mut().filter_map(|record| match record {
        Record::Snapshot(head) => Some(head),
        _ => None,
    })
}

/// The first stream of the source and the next one, from another pool; properties of the topmost file system in each.
fn streams(first: &[(&str, &str)], later: &[(&str, &str)]) -> [Vec<Record>; 2] {
    let world = source();
    let mut both = [send(&world, None), send(&world, Some("@1"))];
    for (records, properties) in both.iter_mut().zip([first, later]) {
        for head in heads(records).filter(|head| head.below.is_empty()) {
            head.properties.clear();
            for (name, value) in properties {
                head.properties.push(SentProperty { name: (*name).to_owned(), value: (*value).to_owned() });
            }
        }
        if let Some(Record::Stream(head)) = records.first_mut() {
            head.pool = 77;
        }
    }
    both
}

fn into() -> ToReceive {
    ToReceive { into: "t/in".to_owned(), ..ToReceive::default() }
}

fn is_refused_place(received: &Result<(), Refusal>) -> bool {
    received.as_ref().is_err_and(|refusal| {
        ["something is there already", "a place of the system", "does not answer"]
            .iter()
            .any(|why| refusal.what.contains(why))
    })
}

/// The value of a property, and where it comes from.
fn value(world: &World, property: &str) -> (Option<String>, String) {
    let (value, from) = world.value("t/in", property);
    (value, format!("{from:?}"))
}

#[test]
fn a_later_snapshot_brings_no_mount_point_where_something_is() {
    let full = std::env::temp_dir();
    let taken = full.join(format!("nacre-later-{}", std::process::id()));
    std::fs::create_dir(&taken).unwrap();
    std::fs::write(taken.join("mine"), "x").unwrap();
    let taken_text = taken.to_str().unwrap();
    for place in ["/etc", "/usr/", "//etc/.", "/silent/x", taken_text] {
        let [first, later] = streams(&[], &[("mountpoint", place)]);
        let world = World::new();
        receive_as(&world, &first, into()).unwrap();
        let before = world.value("t/in", "mountpoint").0;
        assert!(is_refused_place(&receive_as(&world, &later, into())), "{place}");
        assert!(is_refused_place(&receive_as(&world, &later, ToReceive { force: true, ..into() })), "{place}");
        assert_eq!(world.value("t/in", "mountpoint").0, before);
        // The local setting is effective.
        receive_as(&world, &later, ToReceive { except: vec!["mountpoint".to_owned()], ..into() }).unwrap();
        assert_eq!(world.value("t/in", "mountpoint").0, before);
    }
    // Set here, or the same as before: the stream changes nothing.
    let [first, later] = streams(&[], &[("mountpoint", taken_text)]);
    let world = World::new();
    receive_as(&world, &first, into()).unwrap();
    world.ok(set("t/in", "mountpoint", "/nowhere/else"));
    receive_as(&world, &later, into()).unwrap();
    let [first, later] = streams(&[("mountpoint", "/nowhere/own")], &[("mountpoint", "/nowhere/own")]);
    let world = World::new();
    receive_as(&world, &first, into()).unwrap();
    receive_as(&world, &later, into()).unwrap();
    // A free mount point.
    let [first, later] = streams(&[], &[("mountpoint", "/nowhere/free")]);
    let world = World::new();
    receive_as(&world, &first, into()).unwrap();
    receive_as(&world, &later, into()).unwrap();
    std::fs::remove_dir_all(&taken).unwrap();
}

#[test]
fn a_stream_mounts_nothing_over_what_is_below_the_altroot() {
    let top = std::env::temp_dir().join(format!("nacre-altroot-{}", std::process::id()));
    std::fs::create_dir_all(top.join("full/of")).unwrap();
    let world = || World::within(Opening { altroot: Some(top.clone()), ..opening() });
    for (place, is_refused) in [("/full", true), ("/full/of", false), ("/etc/new", true), ("/var/spool/new", true)] {
        let [first, _] = streams(&[("mountpoint", place)], &[]);
        let received = receive_as(&world(), &first, into());
        assert_eq!(is_refused_place(&received), is_refused, "{place}: {received:?}");
    }
    std::os::unix::fs::symlink("/etc", top.join("link")).unwrap();
    let link = top.join("link/new").to_str().unwrap().to_owned();
    for place in [
        "/etc/systemd/system/sshd.service.d",
        "/usr/local/new",
        "/boot/new",
        "/home/new/.ssh",
        "/var/spool/cron/crontabs",
        "/var/lib/dpkg/new",
        "/var/run/new",
        "/srv",
        &link,
    ] {
        let [first, _] = streams(&[("mountpoint", place)], &[]);
        assert!(is_refused_place(&receive_as(&World::new(), &first, into())), "{place}");
        // The next import may be without the altroot.
        assert!(is_refused_place(&receive_as(&world(), &first, into())), "{place}");
    }
    let [first, _] = streams(&[("mountpoint", "/shop")], &[]);
    let world = world();
    world.ok(create_with("t/home", &[("mountpoint", "/shop")]));
    assert!(is_refused_place(&receive_as(&world, &first, into())), "another file system is mounted there");
    std::fs::remove_dir_all(&top).unwrap();
}

#[test]
fn a_later_snapshot_turns_on_nothing_that_is_off() {
    if !rustix::process::geteuid().is_root() {
        return;
    }
    for name in ["setuid", "devices"] {
        let [first, later] = streams(&[(name, "off")], &[(name, "on")]);
        let world = World::new();
        receive_as(&world, &first, into()).unwrap();
        receive_as(&world, &later, into()).unwrap();
        assert_eq!(world.value("t/in", name).0.as_deref(), Some("off"));
        // Allowed here.
        let world = World::new();
        receive_as(&world, &first, into()).unwrap();
        world.ok(set("t/in", name, "on"));
        receive_as(&world, &later, into()).unwrap();
        assert_eq!(world.value("t/in", name).0.as_deref(), Some("on"));
        // All former content is replaced: the stream counts like a first one.
        let world = World::new();
        world.create("t/in");
        let [all, _] = streams(&[], &[]);
        receive_as(&world, &all, ToReceive { force: true, ..into() }).unwrap();
        assert_eq!(world.value("t/in", name).0.as_deref(), Some("off"));
    }
}

#[test]
fn a_later_snapshot_shares_with_nobody_else() {
    if !rustix::process::geteuid().is_root() {
        return;
    }
    let receives = |here: &str, later: &str| {
        let [first, later] = streams(&[], &[("sharenfs", later)]);
        let world = World::new();
        world.ok(set("t", "sharenfs", here));
        receive_as(&world, &first, into()).unwrap();
        assert_eq!(world.value("t/in", "sharenfs").0.as_deref(), Some(here));
        receive_as(&world, &later, into()).unwrap();
        world.value("t/in", "sharenfs").0
    };
    assert_eq!(receives("ro=@10.0.0.0/8", "rw,no_root_squash").as_deref(), Some("off"));
    assert_eq!(receives("on", "rw,no_root_squash").as_deref(), Some("off"));
    assert_eq!(receives("ro=@10.0.0.0/8", "ro=@10.0.0.0/8").as_deref(), Some("ro=@10.0.0.0/8"));
    assert_eq!(receives("ro=@10.0.0.0/8", "off").as_deref(), Some("off"));
    // What was set here stays.
    let [first, later] = streams(&[], &[("sharenfs", "rw,no_root_squash")]);
    let world = World::new();
    receive_as(&world, &first, into()).unwrap();
    world.ok(set("t/in", "sharenfs", "ro=@10.0.0.0/8"));
    receive_as(&world, &later, into()).unwrap();
    assert_eq!(world.value("t/in", "sharenfs").0.as_deref(), Some("ro=@10.0.0.0/8"));
}

#[test]
fn a_stream_comes_from_this_pool_where_its_snapshot_is_here() {
    if !rustix::process::geteuid().is_root() {
        return;
    }
    let values = |world: &World, name: &str| {
        ["setuid", "devices", "sharenfs"].map(|property| world.value(name, property).0.unwrap_or_default())
    };
    let share = "ro=@10.0.0.0/8";
    // Another pool's stream that names this pool.
    let [mut first, mut later] = streams(&[("sharenfs", "rw")], &[("sharenfs", "rw"), ("setuid", "on")]);
    let world = World::new();
    world.create("t/a");
    world.snapshot(&["t/a@1"]);
    world.snapshot(&["t/a@2"]);
    for records in [&mut first, &mut later] {
        if let Some(Record::Stream(head)) = records.first_mut() {
            head.pool = world.pool.store.identity().pool;
        }
    }
    receive_as(&world, &first, into()).unwrap();
    assert_eq!(values(&world, "t/in"), ["off", "off", "off"]);
    // What was received has the guids of the stream.
    for head in heads(&mut later) {
        head.name = head.name.replacen("t/a", "t/in", 1);
    }
    receive_as(&world, &later, into()).unwrap();
    assert_eq!(values(&world, "t/in"), ["off", "off", "off"]);
    for head in heads(&mut first) {
        head.name = head.name.replacen("t/a", "t/in", 1);
    }
    receive_as(&world, &first, ToReceive { into: "t/second".to_owned(), ..into() }).unwrap();
    assert_eq!(values(&world, "t/second"), ["off", "off", "off"]);
    // Its own.
    let world = source();
    world.ok(set("t/a", "sharenfs", share));
    let records = send(&world, None);
    receive_as(&world, &records, into()).unwrap();
    assert_eq!(values(&world, "t/in"), ["on", "on", share]);
    world.ok(set("t/a", "sharenfs", "off"));
    receive_as(&world, &records, ToReceive { into: "t/second".to_owned(), ..into() }).unwrap();
    assert_eq!(values(&world, "t/second"), ["on", "on", "off"]);
}

#[test]
fn what_is_left_out_of_a_difference_stays_as_it_was_set_here() {
    let [first, later] = streams(&[("compression", "lz4")], &[("compression", "off")]);
    let except = || ToReceive { except: vec!["compression".to_owned()], ..into() };
    let world = World::new();
    receive_as(&world, &first, into()).unwrap();
    world.ok(set("t/in", "compression", "zstd"));
    let before = value(&world, "compression");
    receive_as(&world, &later, except()).unwrap();
    assert_eq!(value(&world, "compression"), before);
    assert_eq!(before.0.as_deref(), Some("zstd"));
    // Inherited on purpose.
    let world = World::new();
    receive_as(&world, &first, into()).unwrap();
    world.ok(inherit("t/in", "compression", false));
    let before = value(&world, "compression");
    receive_as(&world, &later, except()).unwrap();
    assert_eq!(value(&world, "compression"), before);
    // Only received: the value of the stream does not hold, and the parent's does.
    let world = World::new();
    world.ok(set("t", "compression", "zstd-3"));
    receive_as(&world, &first, into()).unwrap();
    receive_as(&world, &later, except()).unwrap();
    assert_eq!(world.value("t/in", "compression").0.as_deref(), Some("zstd-3"));
}

#[test]
fn what_is_set_or_inherited_during_a_transfer_counts() {
    let [first, later] = streams(&[("compression", "lz4")], &[("compression", "off"), ("setuid", "on")]);
    let except = || ToReceive { except: vec!["compression".to_owned()], ..into() };
    let received = |world: &World, what, meanwhile| {
        let done = || drop(world.ok(meanwhile));
        receive_while(world, &later, what, done).unwrap();
    };
    let world = World::new();
    receive_as(&world, &first, into()).unwrap();
    received(&world, except(), set("t/in", "compression", "zstd"));
    assert_eq!(world.value("t/in", "compression").0.as_deref(), Some("zstd"));
    // What was set before is not any more: the value of the stream does not hold.
    let world = World::new();
    receive_as(&world, &first, into()).unwrap();
    world.ok(set("t", "compression", "zstd-3"));
    world.ok(set("t/in", "compression", "zstd"));
    let revert = FsRequest::Set(ToSet {
        names: vec!["t/in".to_owned()],
        properties: vec![("compression".to_owned(), NewValue::Received)],
        ..ToSet::default()
    });
    received(&world, except(), revert);
    assert_eq!(world.value("t/in", "compression").0.as_deref(), Some("zstd-3"));
    // Forbidden above meanwhile: programs of the stream do not get rights by it.
    if rustix::process::geteuid().is_root() {
        let world = World::new();
        let allowed = vec![("setuid".to_owned(), "on".to_owned())];
        receive_as(&world, &first, ToReceive { properties: allowed, ..into() }).unwrap();
        world.ok(inherit("t/in", "setuid", false));
        received(&world, into(), set("t", "setuid", "off"));
        assert_eq!(world.value("t/in", "setuid").0.as_deref(), Some("off"));
    }
}

#[test]
fn a_stream_that_names_very_many_file_systems_ends() {
    let (sender, done) = mpsc::channel();
    let thread = std::thread::spawn(move || {
        let [first, mut later] = streams(&[], &[]);
        if let Some(Record::Stream(head)) = later.first_mut() {
            for number in 0..100_000 {
                head.there.push((format!("/more/{number}"), String::new(), 0));
                head.there.push((String::new(), format!("name-{number}"), head.pool));
            }
            // All that is here has another name there.
            for (below, _, _) in head.there.iter_mut().filter(|(below, _, _)| below.starts_with("/b")) {
                *below = below.replacen("/b", "/renamed", 1);
            }
        }
        for head in heads(&mut later).filter(|head| head.below.starts_with("/b")) {
            head.below = head.below.replacen("/b", "/renamed", 1);
        }
        let world = World::new();
        receive_as(&world, &first, into()).unwrap();
        receive_as(&world, &later, into()).unwrap();
        assert!(world.names().contains(&"t/in/renamed/c".to_owned()), "{:?}", world.names());
        sender.send(()).unwrap();
    });
    match done.recv_timeout(ENDS_WITHIN) {
        Ok(()) | Err(mpsc::RecvTimeoutError::Disconnected) => thread.join().unwrap(),
        Err(mpsc::RecvTimeoutError::Timeout) => panic!("the work grows with the square of the number"),
    }
}

#[test]
fn a_property_comes_once_and_under_its_name() {
    let forged: [&[(&str, &str)]; 6] = [
        &[("SHARENFS", "rw")],
        &[("MOUNTPOINT", "/etc")],
        &[("Setuid", "on")],
        &[("recsize", "4096")],
        &[("sharenfs", "off"), ("sharenfs", "rw")],
        &[("a:b", "1"), ("a:b", "2")],
    ];
    for properties in forged {
        let [first, _] = streams(properties, &[]);
        let is_refused = |received: Result<(), Refusal>| {
            received.is_err_and(|refusal| refusal.kind == Kind::Invalid && refusal.what.contains("invalid stream"))
        };
        let world = World::new();
        assert!(is_refused(receive_as(&world, &first, into())), "{properties:?}");
        assert_eq!(world.names(), ["t"]);
        let [plain, later] = streams(&[], properties);
        receive_as(&world, &plain, into()).unwrap();
        assert!(is_refused(receive_as(&world, &later, into())), "{properties:?}");
    }
    // One that is unknown here, and those of users.
    let [first, _] = streams(&[("unknown", "1"), ("a:b", "1"), ("A:B", "1"), ("recordsize", "4096")], &[]);
    let world = World::new();
    receive_as(&world, &first, into()).unwrap();
    assert_eq!(world.value("t/in", "recordsize").0.as_deref(), Some("4096"));
    assert_eq!(world.value("t/in", "a:b").0.as_deref(), Some("1"));
}

#[test]
fn a_receiver_changes_names_and_mounts_while_nothing_else_does() {
    let sender = source();
    let first = send(&sender, None);
    sender.ok(set("t/a", "readonly", "on"));
    sender.ok(FsRequest::Destroy(ToDestroy { recursive: true, ..destroy("t/a/d") }));
    let later = send(&sender, Some("@1"));
    let world: &'static World = Box::leak(Box::new(World::new()));
    receive_as(world, &first, into()).unwrap();
    world.create("t/in/mine");
    let (alone, changes) = mpsc::channel();
    *world.mounts.before.lock() = Some(Box::new(move || alone.send(world.pool.changing.is_locked()).unwrap()));
    receive_as(world, &later, ToReceive { force: true, ..into() }).unwrap();
    let changes: Vec<bool> = changes.try_iter().collect();
    assert!(!changes.is_empty() && changes.iter().all(|alone| *alone), "{changes:?}");
    assert!(!world.names().iter().any(|name| name.starts_with("t/in/d")));
    // Also a file system that was made here, and inherits the property.
    let mine = world.id("t/in/mine");
    assert!(world.mounts.mounted().iter().any(|mounted| mounted.what.dataset == mine && mounted.options.read_only));
}
