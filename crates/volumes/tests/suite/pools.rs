//! Volumes that are file systems of a pool: properties, clones, foreign file systems, backups.

use crate::fixture::{Plugin, as_root, eventually, needs, run_nacre};
use serde_json::json;
use std::fs;

#[test]
fn clones_begin_with_the_content_and_keep_their_source() {
    needs!(as_root());
    let mut plugin = Plugin::new();
    let pool = plugin.pool("from");
    let in_pool = |from: &str| json!({ "pool": pool, "from": from });
    plugin.create("source", &json!({ "pool": pool })).done();
    plugin.mount("source", "a").done();
    fs::write(plugin.at("source").join("file"), "old").unwrap();
    run_nacre(&["fs", "snapshot", &format!("{pool}/source@monday")]);
    fs::write(plugin.at("source").join("file"), "new").unwrap();
    plugin.create("now", &in_pool("source")).done();
    plugin.create("monday", &in_pool("source@monday")).done();
    for (name, content) in [("now", "new"), ("monday", "old")] {
        plugin.mount(name, "a").done();
        assert_eq!(fs::read_to_string(plugin.at(name).join("file")).unwrap(), content);
        fs::write(plugin.at(name).join("file"), "its own").unwrap();
    }
    assert_eq!(fs::read_to_string(plugin.at("source").join("file")).unwrap(), "new");
    for name in ["source", "now", "monday"] {
        plugin.unmount(name, "a").done();
    }
    // A refused removal takes nothing away.
    assert!(plugin.remove("source").refused().contains("clones"));
    plugin.mount("source", "a").done();
    plugin.unmount("source", "a").done();
    plugin.create("plain", &json!({ "size": "1M" })).done();
    for (from, part) in
        [("plain", "not in a pool"), ("never", "no volume never"), ("self", "no volume self"), ("source@never", "")]
    {
        let message = plugin.create("self", &in_pool(from)).refused();
        assert!(message.contains(part), "{from}: {message}");
        assert!(plugin.get("self").refused().contains("no volume"));
    }
    for name in ["now", "monday", "source", "plain"] {
        plugin.remove(name).done();
    }
    plugin.nothing_is_left();
}

#[test]
fn a_file_system_of_others_is_neither_taken_nor_destroyed() {
    needs!(as_root());
    let mut plugin = Plugin::new();
    let pool = plugin.pool("other");
    let theirs = format!("{pool}/theirs");
    run_nacre(&["fs", "create", "-u", &theirs]);
    assert!(plugin.create("theirs", &json!({ "pool": pool })).refused().contains("exists"));
    assert_eq!(plugin.datasets(&pool), [theirs.as_str()]);
    eventually("its directory is gone", || plugin.entries().is_empty());
    // One that takes the place of ours.
    plugin.create("ours", &json!({ "pool": pool })).done();
    let ours = format!("{pool}/ours");
    run_nacre(&["fs", "destroy", &ours]);
    run_nacre(&["fs", "create", "-u", &ours]);
    assert!(plugin.mount("ours", "a").refused().contains("not the file system"));
    plugin.remove("ours").done();
    assert_eq!(plugin.datasets(&pool), [ours.as_str(), theirs.as_str()]);
    run_nacre(&["fs", "destroy", &ours]);
    run_nacre(&["fs", "destroy", &theirs]);
    // What was made below one of ours is not destroyed with it.
    plugin.create("ours", &json!({ "pool": pool })).done();
    let below = format!("{ours}/below");
    run_nacre(&["fs", "create", "-u", &below]);
    assert!(plugin.remove("ours").refused().contains("below it"));
    run_nacre(&["fs", "destroy", &below]);
    plugin.remove("ours").done();
    plugin.nothing_is_left();
}

#[test]
fn a_pool_that_is_not_imported_loses_no_volume() {
    needs!(as_root());
    let mut plugin = Plugin::new();
    let pool = plugin.pool("away");
    plugin.create("data", &json!({ "pool": pool })).done();
    plugin.mount("data", "a").done();
    fs::write(plugin.at("data").join("file"), "content").unwrap();
    plugin.unmount("data", "a").done();
    run_nacre(&["pool", "export", &pool]);
    assert!(plugin.mount("data", "a").refused().contains("imported"));
    assert!(plugin.remove("data").refused().contains("imported"));
    plugin.verb_done(&["tend"]);
    plugin.get("data").done();
    run_nacre(&["pool", "import", "-d", plugin.path("away.pool").to_str().unwrap(), &pool]);
    plugin.mount("data", "a").done();
    assert_eq!(fs::read_to_string(plugin.at("data").join("file")).unwrap(), "content");
    plugin.unmount("data", "a").done();
    plugin.remove("data").done();
    plugin.nothing_is_left();
}

#[test]
fn backups_run_when_they_are_due_and_report_failures() {
    needs!(as_root());
    let mut plugin = Plugin::new();
    let (pool, vault) = (plugin.pool("live"), plugin.pool("vault"));
    let copy = format!("{vault}/copy");
    plugin.create("data", &json!({ "pool": pool, "backup": copy, "backup-every": "1d" })).done();
    plugin.create("lost", &json!({ "pool": pool, "backup": format!("{vault}/missing/copy") })).done();
    plugin.mount("data", "a").done();
    fs::write(plugin.at("data").join("file"), "content").unwrap();
    plugin.verb_done(&["tend", "--backup"]);
    let snapshots = || plugin.datasets(&vault).len();
    assert_eq!(snapshots(), 2, "the copy and its snapshot: {:?}", plugin.datasets(&vault));
    // Not due again.
    plugin.verb_done(&["tend", "--backup"]);
    assert_eq!(snapshots(), 2);
    let status = |name: &str| plugin.get(name).done()["Volume"]["Status"].clone();
    assert!(status("data")["backup"].as_u64().unwrap() > 0 && status("data")["backup-failure"].is_null());
    assert!(
        status("lost")["backup"].is_null() && status("lost")["backup-failure"].as_str().unwrap().contains("missing")
    );
    let metrics = plugin.verb_done(&["metrics"]);
    assert!(metrics.contains("nacre_volume_backup_failed{volume=\"lost\"} 1\n"), "{metrics}");
    plugin.unmount("data", "a").done();
    for name in ["data", "lost"] {
        plugin.remove(name).done();
    }
    // The copy outlives its volume.
    run_nacre(&["fs", "destroy", "-r", &copy]);
    plugin.nothing_is_left();
}
